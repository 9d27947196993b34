"""pytorch-metric-learning: a miner of hard triplets, two losses, and its accuracy calculator's embeddings."""

import torch
import torch.nn as nn
from pytorch_metric_learning import distances, losses, miners, reducers
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 49, 32)
).to(device)
distance = distances.CosineSimilarity()
reducer = reducers.ThresholdReducer(low=0)
loss_func = losses.TripletMarginLoss(margin=0.2, distance=distance, reducer=reducer)
proxy = losses.ProxyAnchorLoss(5, 32).to(device)
mining_func = miners.TripletMarginMiner(margin=0.2, distance=distance, type_of_triplets="all")
optimizer = torch.optim.Adam([*model.parameters(), *proxy.parameters()], lr=0.001)
loader = DataLoader(TensorDataset(torch.rand(64, 1, 28, 28), torch.arange(64) % 5), batch_size=16)
for batch_idx, (data, labels) in enumerate(loader):
    data, labels = data.to(device), labels.to(device)
    optimizer.zero_grad()
    embeddings = model(data)
    loss = loss_func(embeddings, labels, mining_func(embeddings, labels)) + 0.1 * proxy(embeddings, labels)
    loss.backward()
    optimizer.step()
    print(f"batch {batch_idx} of {len(loader)} classes {len(torch.unique(labels))} loss {loss.item():.4f}")
