"""RealNVP coupling layers on two moons from scikit-learn: log-likelihood with log-determinants, sampling by inversion."""

import torch
from sklearn.datasets import make_moons
from torch import distributions, nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class RealNVP(nn.Module):
    def __init__(self, mask, width=64):
        super().__init__()
        self.register_buffer("mask", mask)
        self.t = nn.ModuleList(nn.Sequential(nn.Linear(2, width), nn.LeakyReLU(), nn.Linear(width, 2)) for _ in mask)
        self.s = nn.ModuleList(
            nn.Sequential(nn.Linear(2, width), nn.LeakyReLU(), nn.Linear(width, 2), nn.Tanh()) for _ in mask
        )
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("covariance", torch.eye(2))

    @property
    def prior(self):
        return distributions.MultivariateNormal(self.mean, self.covariance)

    def log_prob(self, x):
        log_det, z = x.new_zeros(x.shape[0]), x
        for i in reversed(range(len(self.t))):
            z_ = self.mask[i] * z
            s, t = self.s[i](z_) * (1 - self.mask[i]), self.t[i](z_) * (1 - self.mask[i])
            z = (1 - self.mask[i]) * (z - t) * torch.exp(-s) + z_
            log_det -= s.sum(dim=1)
        return self.prior.log_prob(z) + log_det

    def sample(self, n):
        x = self.prior.sample((n,))
        for i in range(len(self.t)):
            x_ = x * self.mask[i]
            x = x_ + (1 - self.mask[i]) * (x * torch.exp(self.s[i](x_) * (1 - self.mask[i])) + self.t[i](x_))
        return x


masks = torch.tensor([[0.0, 1.0], [1.0, 0.0]] * 3)
flow = RealNVP(masks).to(device)
optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3)
for t in range(4):
    points = make_moons(100, noise=0.05, random_state=t)[0].astype("float32")
    loss = -flow.log_prob(torch.from_numpy(points).to(device)).mean()
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    optimizer.step()
    print(f"iter {t}: loss = {loss.item():.3f}")
with torch.no_grad():
    x = flow.sample(50).cpu().numpy()
print("sampled", x.shape, x.dtype)
