"""Kornia: differentiable augmentation on the GPU, edges, and a homography fitted by gradient descent."""

import kornia
import kornia.augmentation as K
import torch

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
augment = torch.nn.Sequential(
    K.RandomHorizontalFlip(p=0.5),
    K.RandomAffine(degrees=10.0, p=1.0),
    K.ColorJiggle(0.1, 0.1, 0.1, 0.1, p=1.0),
    K.RandomErasing(p=0.5),
).to(device)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3, padding=1),
    torch.nn.ReLU(),
    torch.nn.AdaptiveAvgPool2d(1),
    torch.nn.Flatten(),
    torch.nn.Linear(8, 4),
).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(2):
    images, labels = torch.rand(8, 3, 32, 32).to(device), torch.randint(0, 4, (8,)).to(device)
    images = augment(images)
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} images {tuple(images.shape)} loss {loss.item():.4f}")
magnitude, edges = kornia.filters.canny(torch.rand(1, 3, 32, 32).to(device))
print("edges", tuple(edges.shape), tuple(magnitude.shape))
H = torch.nn.Parameter(torch.eye(3, device=device)[None])
optimizer = torch.optim.SGD([H], lr=1e-3)
src, dst = torch.rand(1, 3, 24, 24).to(device), torch.rand(1, 3, 24, 24).to(device)
for _ in range(2):
    loss = torch.nn.functional.l1_loss(kornia.geometry.homography_warp(src, H, (24, 24)), dst)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"warp loss {loss.item():.4f}")
