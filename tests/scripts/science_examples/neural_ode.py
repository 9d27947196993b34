"""torchdiffeq: a neural ODE with the adjoint method and fixed steps, and an adaptive solver on known dynamics, as ode_demo.py."""

import torch
import torch.nn as nn
import torch.optim as optim
from torchdiffeq import odeint, odeint_adjoint

torch.manual_seed(0)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
true_y0, t = torch.tensor([[2.0, 0.0]]).to(device), torch.linspace(0.0, 1.0, 10).to(device)
true_A = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]]).to(device)


class Lambda(nn.Module):
    def forward(self, t, y):
        return torch.mm(y**3, true_A)


with torch.no_grad():
    true_y = odeint(Lambda(), true_y0, t, method="rk4")
print("truth", tuple(true_y.shape))


class ODEFunc(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 2))
        for m in self.net.modules():
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, mean=0, std=0.1)
                nn.init.constant_(m.bias, val=0)

    def forward(self, t, y):
        return self.net(y**3)


func = ODEFunc().to(device)
optimizer = optim.RMSprop(func.parameters(), lr=1e-3)
for itr in range(3):
    optimizer.zero_grad()
    s = torch.tensor([0, 2, 4])
    batch_y0, batch_y = true_y[s], torch.stack([true_y[s + i] for i in range(5)], dim=0)
    pred_y = odeint_adjoint(func, batch_y0, t[:5], method="rk4").to(device)
    loss = torch.mean(torch.abs(pred_y - batch_y))
    loss.backward()
    optimizer.step()
    print(f"Iter {itr:04d} | Total Loss {loss.item():.6f} | {tuple(pred_y.shape)}")
