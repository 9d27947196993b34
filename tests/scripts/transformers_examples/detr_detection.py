"""Object detection with DETR's Hungarian matching on the batch's own boxes; tiny config with a ResNet backbone of timm's kind left out."""

import torch
from transformers import YolosConfig, YolosForObjectDetection, set_seed

set_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
config = YolosConfig(
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=96,
    image_size=[64, 64],
    patch_size=16,
    num_detection_tokens=10,
    num_labels=5,
)
model = YolosForObjectDetection(config).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
generator = torch.Generator().manual_seed(0)
for step in range(3):
    labels = []
    for n in (2, 1, 3):
        boxes = torch.rand(n, 4, generator=generator) * 0.4 + 0.2
        labels.append(
            {"class_labels": torch.randint(0, 5, (n,), generator=generator).to(device), "boxes": boxes.to(device)}
        )
    out = model(torch.rand(3, 3, 64, 64, generator=generator).to(device), labels=labels)
    optimizer.zero_grad()
    out.loss.backward()
    optimizer.step()
    print(f"step {step} loss {out.loss.item():.4f} boxes {tuple(out.pred_boxes.shape)}", sorted(out.loss_dict))
