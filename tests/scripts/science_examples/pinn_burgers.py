"""A physics-informed network for Burgers' equation: derivatives by autograd, Adam then L-BFGS."""

import math

import torch
import torch.nn as nn

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
x0 = torch.linspace(-1, 1, 50, device=device).unsqueeze(1)
u0 = -torch.sin(math.pi * x0)
collocation = torch.rand(200, 2, device=device, requires_grad=True)


def residual(points):
    u = net(points)
    grad = torch.autograd.grad(u, points, torch.ones_like(u), create_graph=True)[0]
    u_x, u_t = grad[:, :1], grad[:, 1:]
    u_xx = torch.autograd.grad(u_x, points, torch.ones_like(u_x), create_graph=True)[0][:, :1]
    return u_t + u * u_x - 0.01 / math.pi * u_xx


def loss_function():
    initial = net(torch.cat([x0, torch.zeros_like(x0)], dim=1)) - u0
    return initial.square().mean() + residual(collocation).square().mean()


adam = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(3):
    adam.zero_grad()
    loss = loss_function()
    loss.backward()
    adam.step()
    print(f"adam {step} loss {loss.item():.5f}")
lbfgs = torch.optim.LBFGS(net.parameters(), max_iter=4, line_search_fn="strong_wolfe")


def closure():
    lbfgs.zero_grad()
    loss = loss_function()
    loss.backward()
    return loss


lbfgs.step(closure)
jacobian = torch.func.vmap(torch.func.jacrev(lambda p: net(p).squeeze(-1)))(collocation.detach()[:7])
print(f"lbfgs loss {loss_function().item():.5f}, jacobian {tuple(jacobian.shape)}")
