"""Masked autoencoder: random masking by argsort, encoder on visible patches, decoder with mask tokens."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class MAE(nn.Module):
    def __init__(self, patch=8, size=64, dim=96, decoder_dim=64, depth=2):
        super().__init__()
        self.patch, n = patch, (size // patch) ** 2
        self.embed = nn.Conv2d(3, dim, patch, patch)
        self.cls, self.pos = nn.Parameter(torch.zeros(1, 1, dim)), nn.Parameter(torch.randn(1, n + 1, dim) * 0.02)

        def layers(d, k):
            return nn.TransformerEncoder(
                nn.TransformerEncoderLayer(d, 4, 4 * d, 0.0, "gelu", batch_first=True, norm_first=True),
                k,
                enable_nested_tensor=False,
            )

        self.encoder, self.decoder = layers(dim, depth), layers(decoder_dim, 1)
        self.to_decoder = nn.Linear(dim, decoder_dim)
        self.mask_token, self.decoder_pos = (
            nn.Parameter(torch.zeros(1, 1, decoder_dim)),
            nn.Parameter(torch.randn(1, n + 1, decoder_dim) * 0.02),
        )
        self.pred = nn.Linear(decoder_dim, patch * patch * 3)

    def patchify(self, imgs):
        p = self.patch
        h = w = imgs.shape[2] // p
        x = imgs.reshape(imgs.shape[0], 3, h, p, w, p)
        return torch.einsum("nchpwq->nhwpqc", x).reshape(imgs.shape[0], h * w, p * p * 3)

    def random_masking(self, x, ratio):
        N, L, D = x.shape
        keep = int(L * (1 - ratio))
        ids_shuffle = torch.argsort(torch.rand(N, L, device=x.device), dim=1)
        ids_restore = torch.argsort(ids_shuffle, dim=1)
        x_masked = torch.gather(x, 1, ids_shuffle[:, :keep].unsqueeze(-1).repeat(1, 1, D))
        mask = torch.ones([N, L], device=x.device)
        mask[:, :keep] = 0
        return x_masked, torch.gather(mask, 1, ids_restore), ids_restore

    def forward(self, imgs, ratio=0.75):
        x = self.embed(imgs).flatten(2).transpose(1, 2) + self.pos[:, 1:]
        x, mask, ids_restore = self.random_masking(x, ratio)
        x = self.encoder(torch.cat([(self.cls + self.pos[:, :1]).expand(x.shape[0], -1, -1), x], 1))
        x = self.to_decoder(x)
        tokens = self.mask_token.repeat(x.shape[0], ids_restore.shape[1] + 1 - x.shape[1], 1)
        x_ = torch.gather(torch.cat([x[:, 1:], tokens], 1), 1, ids_restore.unsqueeze(-1).repeat(1, 1, x.shape[2]))
        x = self.pred(self.decoder(torch.cat([x[:, :1], x_], 1) + self.decoder_pos))[:, 1:]
        target = self.patchify(imgs)
        target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1e-6) ** 0.5
        loss = ((x - target) ** 2).mean(-1)
        return (loss * mask).sum() / mask.sum(), mask


model = MAE().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-4, betas=(0.9, 0.95))
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=6)
for epoch in range(2):
    for images in DataLoader(torch.rand(24, 3, 64, 64), batch_size=8):
        loss, mask = model(images.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        print(
            f"epoch {epoch} masked {int(mask.sum())} of {mask.numel()} loss {loss.item():.4f} lr {schedule.get_last_lr()[0]:.2e}"
        )
