"""torchvision references/detection in short: Mask R-CNN on images of random sizes with boxes, labels and masks; evaluation by IoU."""

import math
import sys

import torch
import torchvision
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.models.detection.mask_rcnn import MaskRCNN, MaskRCNNPredictor
from torchvision.ops import box_iou, masks_to_boxes

torch.manual_seed(0)
device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


class Shapes(torch.utils.data.Dataset):
    def __getitem__(self, idx):
        g = torch.Generator().manual_seed(idx)
        h, w = (int(torch.randint(60, 80, (1,), generator=g)) for _ in range(2))
        n = int(torch.randint(1, 4, (1,), generator=g))
        masks = torch.zeros(n, h, w, dtype=torch.uint8)
        for mask in masks:
            y, x = (int(torch.randint(0, 30, (1,), generator=g)) for _ in range(2))
            mask[y : y + 20, x : x + 25] = 1
        boxes = masks_to_boxes(masks)
        area = (boxes[:, 3] - boxes[:, 1]) * (boxes[:, 2] - boxes[:, 0])
        target = {
            "boxes": boxes,
            "labels": torch.ones((n,), dtype=torch.int64),
            "masks": masks,
            "image_id": idx,
            "area": area,
            "iscrowd": torch.zeros(n, dtype=torch.int64),
        }
        return torch.rand(3, h, w, generator=g), target

    def __len__(self):
        return 6


def collate_fn(batch):
    return tuple(zip(*batch))


backbone = torchvision.models.detection.backbone_utils.resnet_fpn_backbone(
    backbone_name="resnet18", weights=None, trainable_layers=5
)
model = MaskRCNN(
    backbone,
    num_classes=2,
    min_size=64,
    max_size=96,
    rpn_pre_nms_top_n_train=100,
    rpn_post_nms_top_n_train=50,
    rpn_pre_nms_top_n_test=50,
    rpn_post_nms_top_n_test=20,
    box_batch_size_per_image=32,
)
model.roi_heads.box_predictor = FastRCNNPredictor(model.roi_heads.box_predictor.cls_score.in_features, 2)
model.roi_heads.mask_predictor = MaskRCNNPredictor(model.roi_heads.mask_predictor.conv5_mask.in_channels, 64, 2)
model.to(device)
params = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.SGD(params, lr=0.005, momentum=0.9, weight_decay=0.0005)
loader = torch.utils.data.DataLoader(Shapes(), batch_size=2, shuffle=False, collate_fn=collate_fn)
for epoch in range(1):
    model.train()
    for images, targets in loader:
        images = [image.to(device) for image in images]
        targets = [{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in t.items()} for t in targets]
        loss_dict = model(images, targets)
        losses = sum(loss for loss in loss_dict.values())
        if not math.isfinite(losses.item()):
            print(f"Loss is {losses.item()}, stopping training")
            sys.exit(1)
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        print("objects", sum(len(t["boxes"]) for t in targets), "losses", sorted(loss_dict), f"{losses.item():.4f}")
model.eval()
seen = 0
with torch.inference_mode():
    for images, targets in loader:
        outputs = model([image.to(device) for image in images])
        outputs = [{k: v.to("cpu") for k, v in t.items()} for t in outputs]
        for output, target in zip(outputs, targets):
            iou = box_iou(output["boxes"], target["boxes"])
            seen += iou.shape[1]
print("evaluated", seen, "objects")
