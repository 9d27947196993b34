"""segmentation_models_pytorch: Unet, FPN and DeepLabV3+ with Dice loss and its metrics, as its binary segmentation example."""

import segmentation_models_pytorch as smp
import torch

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
images, masks = torch.rand(4, 3, 64, 64), (torch.rand(4, 1, 64, 64) > 0.6).long()
for arch in ("Unet", "FPN", "DeepLabV3Plus"):
    model = smp.create_model(arch, encoder_name="resnet18", encoder_weights=None, in_channels=3, classes=1).to(device)
    loss_fn = smp.losses.DiceLoss(smp.losses.BINARY_MODE, from_logits=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(2):
        logits_mask = model(images.to(device))
        loss = loss_fn(logits_mask, masks.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        pred_mask = (model.eval()(images.to(device)).sigmoid() > 0.5).float()
    tp, fp, fn, tn = smp.metrics.get_stats(pred_mask.long(), masks.to(device), mode="binary")
    iou = smp.metrics.iou_score(tp, fp, fn, tn, reduction="micro")
    print(
        arch,
        f"loss {loss.item():.4f} IoU {iou.item():.4f}",
        "foreground",
        int((tp + fn).sum()),
        "pixels",
        int((tp + fp + fn + tn).sum()),
    )
