"""VQ-VAE with exponential moving averages of the codebook and codebook usage by bincount."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Quantize(nn.Module):
    def __init__(self, dim, n_embed, decay=0.99, eps=1e-5):
        super().__init__()
        self.dim, self.n_embed, self.decay, self.eps = dim, n_embed, decay, eps
        embed = torch.randn(dim, n_embed)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.zeros(n_embed))
        self.register_buffer("embed_avg", embed.clone())

    def forward(self, input):
        flatten = input.reshape(-1, self.dim)
        dist = flatten.pow(2).sum(1, keepdim=True) - 2 * flatten @ self.embed + self.embed.pow(2).sum(0, keepdim=True)
        _, embed_ind = (-dist).max(1)
        embed_onehot = F.one_hot(embed_ind, self.n_embed).type(flatten.dtype)
        embed_ind = embed_ind.view(*input.shape[:-1])
        quantize = F.embedding(embed_ind, self.embed.transpose(0, 1))
        if self.training:
            self.cluster_size.data.mul_(self.decay).add_(embed_onehot.sum(0), alpha=1 - self.decay)
            self.embed_avg.data.mul_(self.decay).add_(flatten.transpose(0, 1) @ embed_onehot, alpha=1 - self.decay)
            n = self.cluster_size.sum()
            cluster_size = (self.cluster_size + self.eps) / (n + self.n_embed * self.eps) * n
            self.embed.data.copy_(self.embed_avg / cluster_size.unsqueeze(0))
        diff = (quantize.detach() - input).pow(2).mean()
        return input + (quantize - input).detach(), diff, embed_ind


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(3, 16, 4, 2, 1), nn.ReLU(inplace=True), nn.Conv2d(16, 16, 4, 2, 1))
        self.quantize = Quantize(16, 32)
        self.dec = nn.Sequential(
            nn.ConvTranspose2d(16, 16, 4, 2, 1), nn.ReLU(inplace=True), nn.ConvTranspose2d(16, 3, 4, 2, 1)
        )

    def forward(self, x):
        quant, diff, ids = self.quantize(self.enc(x).permute(0, 2, 3, 1))
        return self.dec(quant.permute(0, 3, 1, 2)), diff.unsqueeze(0), ids


model = VQVAE().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
for step in range(4):
    img = torch.rand(4, 3, 32, 32).to(device)
    model.zero_grad()
    out, latent_loss, ids = model(img)
    recon_loss = F.mse_loss(out, img)
    loss = recon_loss + 0.25 * latent_loss.mean()
    loss.backward()
    optimizer.step()
    usage = torch.bincount(ids.flatten(), minlength=32)
    share = usage / usage.sum()
    perplexity = torch.exp(-(share * (share + 1e-10).log()).sum())
    print(
        f"step {step} codes {usage.numel()} perplexity {perplexity.item():.3f} loss {loss.item():.4f} mse {recon_loss.item():.5f}"
    )
