"""pytorch-forecasting's kind of task in plain Lightning-free code: TemporalConv and quantile loss on windows of a pandas frame."""

import numpy as np
import pandas as pd
import torch
import torch.nn as nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, Dataset

np.random.seed(0)
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
frame = pd.DataFrame({"t": np.arange(300)})
frame["value"] = np.sin(frame["t"] / 10) + np.random.randn(300) * 0.1
frame["weekday"] = frame["t"] % 7


class Windows(Dataset):
    def __init__(self, frame, length, horizon):
        self.values = torch.tensor(frame["value"].values, dtype=torch.float32)
        self.weekday = torch.tensor(frame["weekday"].values)
        self.length, self.horizon = length, horizon

    def __len__(self):
        return len(self.values) - self.length - self.horizon + 1

    def __getitem__(self, i):
        j = i + self.length
        return self.values[i:j], self.weekday[i:j], self.values[j : j + self.horizon]


class TCN(nn.Module):
    def __init__(self, horizon, quantiles):
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.convs = nn.ModuleList(weight_norm(nn.Conv1d(i, 16, 3, dilation=d)) for i, d in ((4, 1), (16, 2), (16, 4)))
        self.head = nn.Linear(16, horizon * quantiles)
        self.horizon, self.quantiles = horizon, quantiles

    def forward(self, x, weekday):
        h = torch.cat([x.unsqueeze(1), self.embedding(weekday).transpose(1, 2)], dim=1)
        for conv in self.convs:
            h = torch.relu(conv(nn.functional.pad(h, (conv.dilation[0] * 2, 0))))
        return self.head(h[..., -1]).view(-1, self.horizon, self.quantiles)


def quantile_loss(pred, target, quantiles):
    errors = target.unsqueeze(-1) - pred
    return torch.max((quantiles - 1) * errors, quantiles * errors).mean()


quantiles = torch.tensor([0.1, 0.5, 0.9], device=device)
dataset = Windows(frame, 24, 6)
model = TCN(6, 3).to(device)
optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
for epoch in range(2):
    total = 0.0
    for x, weekday, y in DataLoader(dataset, batch_size=64, shuffle=True, num_workers=1):
        loss = quantile_loss(model(x.to(device), weekday.to(device)), y.to(device), quantiles)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(x)
    print(f"epoch {epoch} windows {len(dataset)} loss {total / len(dataset):.4f}")
with torch.no_grad():
    x, weekday, y = dataset[len(dataset) - 1]
    forecast = model(x[None].to(device), weekday[None].to(device))[0].cpu()
result = pd.DataFrame(forecast.numpy(), columns=["low", "median", "high"])
print(result.shape, list(result.columns))
