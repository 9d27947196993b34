"""Vision transformer for small images as pytorch/examples/vision_transformer."""

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


class PatchExtractor(nn.Module):
    def __init__(self, patch_size=16):
        super().__init__()
        self.patch_size = patch_size

    def forward(self, input_data):
        b, c, h, w = input_data.size()
        assert h % self.patch_size == 0 and w % self.patch_size == 0
        p = self.patch_size
        patches = input_data.unfold(2, p, p).unfold(3, p, p).permute(0, 2, 3, 1, 4, 5).contiguous()
        return patches.view(b, (h // p) * (w // p), c * p * p)


class InputEmbedding(nn.Module):
    def __init__(self, patch_size, n_channels, latent_size, num_patches):
        super().__init__()
        self.patchify = PatchExtractor(patch_size)
        self.LinearProjection = nn.Linear(patch_size * patch_size * n_channels, latent_size)
        self.class_token = nn.Parameter(torch.randn(1, 1, latent_size))
        self.pos_embedding = nn.Parameter(torch.randn(1, num_patches + 1, latent_size))

    def forward(self, x):
        linear_projection = self.LinearProjection(self.patchify(x))
        b = linear_projection.size(0)
        tokens = torch.cat((self.class_token.expand(b, -1, -1), linear_projection), dim=1)
        return tokens + self.pos_embedding


class EncoderBlock(nn.Module):
    def __init__(self, latent_size, num_heads, dropout):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(latent_size), nn.LayerNorm(latent_size)
        self.attention = nn.MultiheadAttention(latent_size, num_heads, dropout=dropout, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(latent_size, 4 * latent_size),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(4 * latent_size, latent_size),
        )

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, y)[0]
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, latent=96, layers=3, heads=4, classes=10):
        super().__init__()
        self.embedding = InputEmbedding(8, 3, latent, 16)
        self.encoders = nn.ModuleList([EncoderBlock(latent, heads, 0.1) for _ in range(layers)])
        self.head = nn.Sequential(nn.LayerNorm(latent), nn.Linear(latent, latent), nn.Linear(latent, classes))

    def forward(self, x):
        x = self.embedding(x)
        for encoder in self.encoders:
            x = encoder(x)
        return self.head(x[:, 0])


images, labels = torch.rand(96, 3, 32, 32), torch.randint(0, 10, (96,))
loader = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True, drop_last=True)
model = ViT().to(device)
optimizer = optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-3)
scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
print(sum(p.numel() for p in model.parameters()), "parameters")
for epoch in range(2):
    model.train()
    for i, (x, y) in enumerate(loader):
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.float16, enabled=device.type == "cuda"):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        print(f"epoch {epoch} step {i + 1}/{len(loader)} loss {loss.item():.4f}")
