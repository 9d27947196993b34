"""Optimizers of several packages on one network: schedule-free, Lion, AdaBelief, Adafactor, NAdam, RAdam, ASGD, Rprop, Muon."""

import torch
from adabelief_pytorch import AdaBelief
from lion_pytorch import Lion
from schedulefree import AdamWScheduleFree
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
factories = {
    "schedule-free": lambda p: AdamWScheduleFree(p, lr=1e-3, warmup_steps=2),
    "lion": lambda p: Lion(p, lr=1e-4),
    "adabelief": lambda p: AdaBelief(p, lr=1e-3, eps=1e-16, print_change_log=False),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "muon": lambda p: torch.optim.Muon([w for w in p if w.ndim == 2]),
    "adam foreach": lambda p: torch.optim.Adam(p, foreach=True, amsgrad=True),
}
for name, factory in factories.items():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
    optimizer = factory(list(model.parameters()))
    if hasattr(optimizer, "train"):
        optimizer.train()
    for _ in range(3):
        x, y = torch.rand(16, 32, device=device), torch.randint(0, 8, (16,), device=device)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    state = sum(v.numel() for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v) and v.ndim > 0)
    print(f"{name}: {state} elements of state, loss {loss.item():.4f}")
