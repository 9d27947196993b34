"""Denoising diffusion from scratch: noise schedule, a small U-Net with time embedding, EMA, ancestral sampling."""

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
T = 20
betas = torch.linspace(1e-4, 0.02, T, device=device)
alphas = 1.0 - betas
alpha_bar = torch.cumprod(alphas, dim=0)


def timestep_embedding(t, dim):
    half = dim // 2
    freqs = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32, device=t.device) / half)
    args = t[:, None].float() * freqs[None]
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


class ResBlock(nn.Module):
    def __init__(self, i, o, emb):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, i), nn.Conv2d(i, o, 3, padding=1)
        self.emb = nn.Linear(emb, o)
        self.norm2, self.conv2 = nn.GroupNorm(4, o), nn.Conv2d(o, o, 3, padding=1)
        self.skip = nn.Conv2d(i, o, 1) if i != o else nn.Identity()

    def forward(self, x, emb):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.emb(F.silu(emb))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class UNet(nn.Module):
    def __init__(self, ch=16):
        super().__init__()
        self.ch = ch
        self.time = nn.Sequential(nn.Linear(ch, ch * 4), nn.SiLU(), nn.Linear(ch * 4, ch * 4))
        self.inp = nn.Conv2d(3, ch, 3, padding=1)
        self.down1, self.down2 = ResBlock(ch, ch, ch * 4), ResBlock(ch, 2 * ch, ch * 4)
        self.pool = nn.AvgPool2d(2)
        self.mid = ResBlock(2 * ch, 2 * ch, ch * 4)
        self.up2, self.up1 = ResBlock(4 * ch, ch, ch * 4), ResBlock(2 * ch, ch, ch * 4)
        self.out = nn.Conv2d(ch, 3, 3, padding=1)

    def forward(self, x, t):
        emb = self.time(timestep_embedding(t, self.ch))
        x = self.inp(x)
        d1 = self.down1(x, emb)
        d2 = self.down2(self.pool(d1), emb)
        m = self.mid(self.pool(d2), emb)
        u2 = self.up2(torch.cat([F.interpolate(m, scale_factor=2), d2], 1), emb)
        u1 = self.up1(torch.cat([F.interpolate(u2, scale_factor=2), d1], 1), emb)
        return self.out(u1)


model = UNet().to(device)
ema = copy.deepcopy(model).requires_grad_(False)
opt = torch.optim.AdamW(model.parameters(), lr=2e-4)
loader = DataLoader(torch.rand(48, 3, 16, 16) * 2 - 1, batch_size=16, shuffle=True)
for epoch in range(2):
    for x0 in loader:
        x0 = x0.to(device)
        t = torch.randint(0, T, (x0.size(0),), device=device)
        noise = torch.randn_like(x0)
        a = alpha_bar[t].view(-1, 1, 1, 1)
        loss = F.mse_loss(model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t), noise)
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        with torch.no_grad():
            for p_ema, p in zip(ema.parameters(), model.parameters()):
                p_ema.lerp_(p, 1 - 0.995)
        print(f"epoch {epoch} loss {loss.item():.4f}")


@torch.no_grad()
def sample(n):
    x = torch.randn(n, 3, 16, 16, device=device)
    steps = 0
    for i in reversed(range(T)):
        t = torch.full((n,), i, device=device, dtype=torch.long)
        eps = ema(x, t)
        x = (x - betas[i] / (1 - alpha_bar[i]).sqrt() * eps) / alphas[i].sqrt()
        if i > 0:
            x = x + betas[i].sqrt() * torch.randn_like(x)
        steps += 1
    return x.clamp(-1, 1), steps


images, steps = sample(4)
print("sampled", tuple(images.shape), "in", steps, "steps")
