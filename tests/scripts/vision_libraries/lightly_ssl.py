"""lightly: BYOL with a momentum encoder and Barlow Twins, as its examples."""

import copy

import torch
import torchvision
from lightly.loss import BarlowTwinsLoss, NegativeCosineSimilarity
from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.utils.scheduler import cosine_schedule
from torch import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class BYOL(nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone, self.projection_head, self.prediction_head = (
            backbone,
            BYOLProjectionHead(512, 64, 32),
            BYOLPredictionHead(32, 64, 32),
        )
        self.backbone_momentum, self.projection_head_momentum = (
            copy.deepcopy(self.backbone),
            copy.deepcopy(self.projection_head),
        )
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)

    def forward(self, x):
        return self.prediction_head(self.projection_head(self.backbone(x).flatten(start_dim=1)))

    def forward_momentum(self, x):
        return self.projection_head_momentum(self.backbone_momentum(x).flatten(start_dim=1)).detach()


model = BYOL(nn.Sequential(*list(torchvision.models.resnet18().children())[:-1])).to(device)
criterion, barlow = NegativeCosineSimilarity(), BarlowTwinsLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.06)
for epoch in range(2):
    momentum = cosine_schedule(epoch, 2, 0.996, 1)
    x0, x1 = torch.rand(8, 3, 32, 32, device=device), torch.rand(8, 3, 32, 32, device=device)
    update_momentum(model.backbone, model.backbone_momentum, m=momentum)
    update_momentum(model.projection_head, model.projection_head_momentum, m=momentum)
    p0, p1, z0, z1 = model(x0), model(x1), model.forward_momentum(x0), model.forward_momentum(x1)
    loss = 0.5 * (criterion(p0, z1) + criterion(p1, z0)) + 0.01 * barlow(p0, p1)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"epoch: {epoch:>02}, loss: {loss.item():.5f}, momentum {momentum:.4f}")
