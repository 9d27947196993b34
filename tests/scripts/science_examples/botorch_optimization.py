"""BoTorch: a GP fitted by L-BFGS from SciPy, expected improvement, three rounds of Bayesian optimisation."""

import warnings

import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf
from gpytorch.mlls import ExactMarginalLogLikelihood

warnings.filterwarnings("ignore")
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
train_X = torch.rand(8, 2, dtype=torch.double, device=device)


def objective(X):
    return 1 - (X - 0.5).norm(dim=-1, keepdim=True)


train_Y = objective(train_X)
bounds = torch.stack([torch.zeros(2), torch.ones(2)]).to(train_X)
for _ in range(2):
    gp = SingleTaskGP(train_X, train_Y)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(gp.likelihood, gp), optimizer_kwargs={"options": {"maxiter": 3}})
    candidate, _ = optimize_acqf(
        LogExpectedImprovement(gp, best_f=train_Y.max()),
        bounds=bounds,
        q=1,
        num_restarts=2,
        raw_samples=8,
        options={"maxiter": 3},
    )
    train_X, train_Y = torch.cat([train_X, candidate]), torch.cat([train_Y, objective(candidate)])
    print("points", train_X.shape[0], f"best {train_Y.max().item():.4f}")
