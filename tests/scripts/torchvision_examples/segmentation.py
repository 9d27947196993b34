"""torchvision references/segmentation in short: DeepLabV3 with auxiliary loss, ignore index, confusion matrix and mean IoU."""

import torch
import torch.nn as nn
import torchvision

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class ConfusionMatrix:
    def __init__(self, num_classes):
        self.num_classes, self.mat = num_classes, None

    def update(self, a, b):
        n = self.num_classes
        if self.mat is None:
            self.mat = torch.zeros((n, n), dtype=torch.int64, device=a.device)
        with torch.inference_mode():
            k = (a >= 0) & (a < n)
            inds = n * a[k].to(torch.int64) + b[k]
            self.mat += torch.bincount(inds, minlength=n**2).reshape(n, n)

    def compute(self):
        h = self.mat.float()
        acc_global = torch.diag(h).sum() / h.sum()
        iu = torch.diag(h) / (h.sum(1) + h.sum(0) - torch.diag(h))
        return acc_global, iu


def criterion(inputs, target):
    losses = {name: nn.functional.cross_entropy(x, target, ignore_index=255) for name, x in inputs.items()}
    return losses["out"] + 0.5 * losses["aux"] if len(losses) > 1 else losses["out"]


model = torchvision.models.segmentation.deeplabv3_mobilenet_v3_large(
    weights=None, weights_backbone=None, num_classes=5, aux_loss=True
).to(device)
params_to_optimize = [
    {"params": [p for p in model.backbone.parameters() if p.requires_grad]},
    {"params": [p for p in model.classifier.parameters() if p.requires_grad]},
    {"params": [p for p in model.aux_classifier.parameters() if p.requires_grad], "lr": 0.1},
]
optimizer = torch.optim.SGD(params_to_optimize, lr=0.01, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=4, power=0.9)
for epoch in range(2):
    model.train()
    for _ in range(2):
        image, target = torch.rand(2, 3, 64, 64), torch.randint(0, 5, (2, 64, 64))
        target[:, :4] = 255
        image, target = image.to(device), target.to(device)
        loss = criterion(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        print(f"epoch {epoch} ignored {int((target == 255).sum())} loss {loss.item():.4f}")
    model.eval()
    confmat = ConfusionMatrix(5)
    with torch.inference_mode():
        output = model(image)["out"]
        confmat.update(target.flatten(), output.argmax(1).flatten())
    acc, iu = confmat.compute()
    print(
        "pixels",
        int(confmat.mat.sum()),
        "by class",
        confmat.mat.sum(1).tolist(),
        f"accuracy {acc.item() * 100:.2f} mean IoU {iu.mean().item() * 100:.2f}",
    )
