"""MAML on sine waves with torch.func: functional_call, grad, vmap over tasks, second-order meta gradients."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
net = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1)).to(device)
params = dict(net.named_parameters())
optimizer = torch.optim.Adam(params.values(), lr=1e-3)


def sample_tasks(num_tasks, k):
    amplitude, phase = torch.rand(num_tasks, 1, 1) * 4.9 + 0.1, torch.rand(num_tasks, 1, 1) * 3.14
    x1, x2 = torch.rand(num_tasks, k, 1) * 10 - 5, torch.rand(num_tasks, k, 1) * 10 - 5
    return [t.to(device) for t in (x1, amplitude * torch.sin(x1 + phase), x2, amplitude * torch.sin(x2 + phase))]


def loss_for(params, x, y):
    return nn.functional.mse_loss(functional_call(net, params, (x,)), y)


def meta_loss(x1, y1, x2, y2):
    grads = grad(loss_for)(params, x1, y1)
    adapted = {name: params[name] - 0.1 * grads[name] for name in params}
    return loss_for(adapted, x2, y2)


for it in range(3):
    losses = vmap(meta_loss)(*sample_tasks(8, 10))
    loss = losses.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"iteration {it} tasks {len(losses)} loss {loss.item():.4f}")
