"""SimCLR: two augmented views, NT-Xent with a boolean mask of the positives, then a linear probe on frozen features."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
n_views, temperature = 2, 0.07


def augment(x):
    flip = torch.rand(x.size(0), 1, 1, 1, device=x.device) < 0.5
    x = torch.where(flip, x.flip(-1), x)
    return (x + 0.1 * torch.randn_like(x)).clamp(0, 1)


def info_nce_loss(features, batch_size):
    labels = torch.cat([torch.arange(batch_size) for _ in range(n_views)], dim=0)
    labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float().to(device)
    features = F.normalize(features, dim=1)
    similarity_matrix = torch.matmul(features, features.T)
    mask = torch.eye(labels.shape[0], dtype=torch.bool).to(device)
    labels = labels[~mask].view(labels.shape[0], -1)
    similarity_matrix = similarity_matrix[~mask].view(similarity_matrix.shape[0], -1)
    positives = similarity_matrix[labels.bool()].view(labels.shape[0], -1)
    negatives = similarity_matrix[~labels.bool()].view(similarity_matrix.shape[0], -1)
    logits = torch.cat([positives, negatives], dim=1)
    return logits / temperature, torch.zeros(logits.shape[0], dtype=torch.long).to(device)


encoder = nn.Sequential(
    nn.Conv2d(3, 16, 3, 2, 1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, 2, 1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
).to(device)
projector = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).to(device)
images, labels = torch.rand(96, 3, 32, 32), torch.randint(0, 10, (96,))
loader = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True, drop_last=True)
optimizer = torch.optim.Adam([*encoder.parameters(), *projector.parameters()], 3e-4, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(loader))
for epoch in range(2):
    for x, _ in loader:
        x = x.to(device)
        views = torch.cat([augment(x), augment(x)], dim=0)
        logits, target = info_nce_loss(projector(encoder(views)), x.size(0))
        loss = F.cross_entropy(logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        top1 = (logits.argmax(1) == target).float().mean() * 100
        print(f"epoch {epoch} logits {tuple(logits.shape)} loss {loss.item():.4f} top1 {top1.item():.2f}%")
    scheduler.step()

for p in encoder.parameters():
    p.requires_grad = False
encoder.eval()
probe = nn.Linear(32, 10).to(device)
optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
for x, y in loader:
    with torch.no_grad():
        h = encoder(x.to(device))
    loss = F.cross_entropy(probe(h), y.to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"probe loss {loss.item():.4f}, classes {len(torch.bincount(labels.to(device), minlength=10))}")
