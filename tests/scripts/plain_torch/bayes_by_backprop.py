"""Bayes by backprop: weights sampled from Gaussians, KL to a scale mixture, Monte Carlo uncertainty."""

import math

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class BayesianLinear(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.weight_mu, self.weight_rho = (
            nn.Parameter(torch.empty(o, i).uniform_(-0.2, 0.2)),
            nn.Parameter(torch.empty(o, i).uniform_(-5, -4)),
        )
        self.bias_mu, self.bias_rho = nn.Parameter(torch.zeros(o)), nn.Parameter(torch.full((o,), -5.0))
        self.normal = torch.distributions.Normal(0, 1)

    def sample(self, mu, rho):
        sigma = torch.log1p(torch.exp(rho))
        w = mu + sigma * self.normal.sample(rho.size()).to(mu.device)
        log_q = (-math.log(math.sqrt(2 * math.pi)) - torch.log(sigma) - ((w - mu) ** 2) / (2 * sigma**2)).sum()
        one, two = (
            torch.exp(torch.distributions.Normal(0, 1).log_prob(w)),
            torch.exp(torch.distributions.Normal(0, math.exp(-6)).log_prob(w)),
        )
        return w, log_q - torch.log(0.5 * one + 0.5 * two + 1e-9).sum()

    def forward(self, x):
        weight, kl_w = self.sample(self.weight_mu, self.weight_rho)
        bias, kl_b = self.sample(self.bias_mu, self.bias_rho)
        self.kl = kl_w + kl_b
        return F.linear(x, weight, bias)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([BayesianLinear(16, 32), BayesianLinear(32, 3)])

    def forward(self, x):
        return self.layers[1](F.relu(self.layers[0](x)))


net = Net().to(DEVICE)
optimizer = torch.optim.Adam(net.parameters())
x, y = torch.rand(60, 16).to(DEVICE), torch.randint(0, 3, (60,)).to(DEVICE)
for epoch in range(3):
    net.zero_grad()
    outputs, kl = torch.zeros(2, 60, 3).to(DEVICE), torch.zeros(2).to(DEVICE)
    for i in range(2):
        outputs[i] = F.log_softmax(net(x), dim=1)
        kl[i] = sum(layer.kl for layer in net.layers)
    loss = kl.mean() / 10 + F.nll_loss(outputs.mean(0), y, reduction="sum")
    loss.backward()
    optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")
with torch.no_grad():
    samples = torch.stack([net(x).softmax(1) for _ in range(5)])
print("uncertainty", tuple(samples.std(0).shape), tuple(samples.cpu().numpy().shape))
