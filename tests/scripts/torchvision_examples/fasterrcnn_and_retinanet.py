"""Faster R-CNN, RetinaNet, FCOS and SSDlite: one training step and one prediction each, on the same boxes."""

import torch
import torchvision
from torchvision.models import detection

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
images = [torch.rand(3, 80, 100), torch.rand(3, 96, 64)]
targets = [
    {"boxes": torch.tensor([[5.0, 5.0, 40.0, 60.0], [20.0, 10.0, 70.0, 70.0]]), "labels": torch.tensor([1, 3])},
    {"boxes": torch.tensor([[10.0, 12.0, 50.0, 80.0]]), "labels": torch.tensor([2])},
]
for name, builder, options in (
    (
        "fasterrcnn",
        detection.fasterrcnn_mobilenet_v3_large_320_fpn,
        {"min_size": 96, "max_size": 128, "rpn_post_nms_top_n_train": 50},
    ),
    ("retinanet", detection.retinanet_resnet50_fpn, {"min_size": 96, "max_size": 128}),
    ("fcos", detection.fcos_resnet50_fpn, {"min_size": 96, "max_size": 128}),
    ("ssdlite", detection.ssdlite320_mobilenet_v3_large, {}),
):
    model = builder(weights=None, weights_backbone=None, num_classes=4, **options).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model.train()
    losses = model([i.to(device) for i in images], [{k: v.to(device) for k, v in t.items()} for t in targets])
    loss = sum(losses.values())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        predictions = model([i.to(device) for i in images])
    print(
        name,
        f"loss {loss.item():.4f}",
        sorted(losses),
        len(predictions),
        "predictions with",
        sorted(predictions[0]),
        torchvision.ops.box_area(targets[0]["boxes"]).shape[0],
        "boxes",
    )
