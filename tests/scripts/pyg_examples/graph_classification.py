"""Graph classification with mini-batches, GIN and global_mean_pool, on generated graphs, as examples/mutag_gin.py."""

import torch
import torch.nn.functional as F
from torch.nn import BatchNorm1d, Linear, ReLU, Sequential
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINConv, global_add_pool, global_mean_pool

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def graph(i):
    g = torch.Generator().manual_seed(i)
    n = int(torch.randint(6, 15, (1,), generator=g))
    edges = torch.randint(0, n, (2, 3 * n), generator=g)
    return Data(x=torch.rand(n, 8, generator=g), edge_index=edges, y=torch.tensor([i % 2]))


graphs = [graph(i) for i in range(40)]
train_loader, test_loader = (
    DataLoader(graphs[:32], batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1)),
    DataLoader(graphs[32:], batch_size=8),
)


class Net(torch.nn.Module):
    def __init__(self, channels=32):
        super().__init__()
        self.convs = torch.nn.ModuleList(
            GINConv(Sequential(Linear(i, channels), BatchNorm1d(channels), ReLU(), Linear(channels, channels), ReLU()))
            for i in (8, channels)
        )
        self.lin1, self.lin2 = Linear(2 * channels, channels), Linear(channels, 2)

    def forward(self, x, edge_index, batch):
        for conv in self.convs:
            x = conv(x, edge_index)
        x = torch.cat([global_add_pool(x, batch), global_mean_pool(x, batch)], 1)
        x = F.dropout(self.lin1(x).relu(), p=0.5, training=self.training)
        return self.lin2(x)


model = Net().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(2):
    model.train()
    total_loss = 0
    for data in train_loader:
        data = data.to(device)
        optimizer.zero_grad()
        out = model(data.x, data.edge_index, data.batch)
        loss = F.cross_entropy(out, data.y)
        loss.backward()
        optimizer.step()
        total_loss += float(loss) * data.num_graphs
        print(data.num_graphs, "graphs", data.num_nodes, "nodes, output", tuple(out.shape))
    model.eval()
    correct = 0
    with torch.no_grad():
        for data in test_loader:
            data = data.to(device)
            out = model(data.x, data.edge_index, data.batch)
            print("test", tuple(out.shape), "in the last graph", int((data.batch == data.num_graphs - 1).sum()))
            correct += int((out.argmax(dim=-1) == data.y).sum())
    print(f"epoch {epoch} loss {total_loss / 32:.4f} test {correct / 8:.4f}")
