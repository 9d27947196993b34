"""Pyro: Bayesian linear regression by stochastic variational inference, posterior samples by Predictive."""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal
from pyro.nn import PyroModule, PyroSample
from torch import nn

pyro.set_rng_seed(1)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class BayesianRegression(PyroModule):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = PyroModule[nn.Linear](in_features, out_features)
        self.linear.weight = PyroSample(
            dist.Normal(torch.tensor(0.0, device=device), 1.0).expand([out_features, in_features]).to_event(2)
        )
        self.linear.bias = PyroSample(
            dist.Normal(torch.tensor(0.0, device=device), 10.0).expand([out_features]).to_event(1)
        )

    def forward(self, x, y=None):
        sigma = pyro.sample("sigma", dist.Uniform(torch.tensor(0.0, device=device), 10.0))
        mean = self.linear(x).squeeze(-1)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("obs", dist.Normal(mean, sigma), obs=y)
        return mean


x = torch.rand(50, 3).to(device)
y = (x @ torch.tensor([1.0, -2.0, 0.5], device=device)) + 0.1 * torch.randn(50, device=device)
model = BayesianRegression(3, 1)
guide = AutoDiagonalNormal(model)
svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.03}), loss=Trace_ELBO())
for j in range(4):
    loss = svi.step(x, y)
    print(f"[iteration {j + 1:04d}] loss: {loss / len(x):.4f}")
samples = Predictive(model, guide=guide, num_samples=20, return_sites=("linear.weight", "obs"))(x)
print({k: tuple(v.shape) for k, v in sorted(samples.items())})
