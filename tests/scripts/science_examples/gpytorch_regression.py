"""GPyTorch: exact GP regression by marginal likelihood, then a sparse variational GP with mini-batches."""

import math

import gpytorch
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
train_x = torch.linspace(0, 1, 60).to(device)
train_y = torch.sin(train_x * (2 * math.pi)) + torch.randn(train_x.size()).to(device) * 0.2


class ExactGPModel(gpytorch.models.ExactGP):
    def __init__(self, train_x, train_y, likelihood):
        super().__init__(train_x, train_y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


likelihood = gpytorch.likelihoods.GaussianLikelihood().to(device)
model = ExactGPModel(train_x, train_y, likelihood).to(device)
model.train()
likelihood.train()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
for i in range(4):
    optimizer.zero_grad()
    loss = -mll(model(train_x), train_y)
    loss.backward()
    optimizer.step()
    print(
        f"Iter {i + 1}/4 - Loss: {loss.item():.3f} lengthscale: {model.covar_module.base_kernel.lengthscale.item():.3f} noise: {likelihood.noise.item():.3f}"
    )
model.eval()
likelihood.eval()
with torch.no_grad(), gpytorch.settings.fast_pred_var():
    lower, upper = likelihood(model(torch.linspace(0, 1, 21).to(device))).confidence_region()
print("prediction", tuple(lower.shape), tuple(upper.cpu().numpy().shape))


class SVGP(gpytorch.models.ApproximateGP):
    def __init__(self, inducing_points):
        distribution = gpytorch.variational.CholeskyVariationalDistribution(inducing_points.size(0))
        super().__init__(
            gpytorch.variational.VariationalStrategy(self, inducing_points, distribution, learn_inducing_locations=True)
        )
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


x, y = torch.rand(64, 3).to(device), torch.rand(64).to(device)
model, likelihood = SVGP(x[:12].clone()).to(device), gpytorch.likelihoods.GaussianLikelihood().to(device)
optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.01)
mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=64)
for x_batch, y_batch in DataLoader(TensorDataset(x, y), batch_size=32):
    optimizer.zero_grad()
    loss = -mll(model(x_batch), y_batch)
    loss.backward()
    optimizer.step()
    print(f"svgp loss {loss.item():.3f}")
