"""WGAN with gradient penalty: critic steps, interpolates, autograd.grad with create_graph."""

import torch
from torch import autograd, nn

torch.manual_seed(1)
use_cuda = torch.cuda.is_available()
device = torch.device("cuda" if use_cuda else "cpu")
G = nn.Sequential(nn.Linear(32, 128), nn.ReLU(True), nn.Linear(128, 128), nn.ReLU(True), nn.Linear(128, 64)).to(device)
D = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2, True), nn.Linear(128, 1)).to(device)
optimizerD, optimizerG = (
    torch.optim.Adam(D.parameters(), lr=1e-4, betas=(0.5, 0.9)),
    torch.optim.Adam(G.parameters(), lr=1e-4, betas=(0.5, 0.9)),
)
one = torch.tensor(1.0, device=device)
mone = one * -1


def calc_gradient_penalty(real_data, fake_data):
    alpha = torch.rand(real_data.size(0), 1).expand(real_data.size()).to(device)
    interpolates = (alpha * real_data + (1 - alpha) * fake_data).requires_grad_(True)
    disc = D(interpolates)
    gradients = autograd.grad(
        outputs=disc,
        inputs=interpolates,
        grad_outputs=torch.ones(disc.size()).to(device),
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )[0]
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean() * 10.0


for iteration in range(2):
    for p in D.parameters():
        p.requires_grad = True
    for _ in range(3):
        real = torch.rand(16, 64).to(device)
        D.zero_grad()
        D_real = D(real).mean()
        D_real.backward(mone)
        fake = G(torch.randn(16, 32).to(device)).detach()
        D_fake = D(fake).mean()
        D_fake.backward(one)
        penalty = calc_gradient_penalty(real, fake)
        penalty.backward()
        optimizerD.step()
    for p in D.parameters():
        p.requires_grad = False
    G.zero_grad()
    cost = D(G(torch.randn(16, 32).to(device))).mean()
    cost.backward(mone)
    optimizerG.step()
    print(f"iteration {iteration} D {(D_fake - D_real + penalty).item():.4f} G {-cost.item():.4f}")
