"""GCN on Karate Club, which torch_geometric ships, as examples/gcn.py."""

import argparse

import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from torch_geometric.datasets import KarateClub
from torch_geometric.logging import log
from torch_geometric.nn import GCNConv

parser = argparse.ArgumentParser()
parser.add_argument("--hidden_channels", type=int, default=16)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--epochs", type=int, default=5)
args = parser.parse_args()
torch.manual_seed(0)
if torch.cuda.is_available():
    device = torch.device("cuda")
else:
    device = torch.device("cpu")
dataset = KarateClub(transform=T.Compose([T.ToUndirected(), T.NormalizeFeatures()]))
data = dataset[0].to(device)
print(
    data.num_nodes,
    "nodes",
    data.num_edges,
    "edges",
    int(data.train_mask.sum()),
    "to train on",
    dataset.num_classes,
    "classes",
)


class GCN(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels):
        super().__init__()
        self.conv1 = GCNConv(in_channels, hidden_channels, cached=True)
        self.conv2 = GCNConv(hidden_channels, out_channels, cached=True)

    def forward(self, x, edge_index, edge_weight=None):
        x = F.dropout(x, p=0.5, training=self.training)
        x = self.conv1(x, edge_index, edge_weight).relu()
        x = F.dropout(x, p=0.5, training=self.training)
        return self.conv2(x, edge_index, edge_weight)


model = GCN(dataset.num_features, args.hidden_channels, dataset.num_classes).to(device)
optimizer = torch.optim.Adam(
    [dict(params=model.conv1.parameters(), weight_decay=5e-4), dict(params=model.conv2.parameters(), weight_decay=0)],
    lr=args.lr,
)


def train():
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index, data.edge_attr)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    return float(loss)


@torch.no_grad()
def test():
    model.eval()
    pred = model(data.x, data.edge_index, data.edge_attr).argmax(dim=-1)
    return [int((pred[mask] == data.y[mask]).sum()) / int(mask.sum()) for mask in (data.train_mask, ~data.train_mask)]


for epoch in range(1, args.epochs + 1):
    loss = train()
    train_acc, test_acc = test()
    log(Epoch=epoch, Loss=loss, Train=train_acc, Test=test_acc)
