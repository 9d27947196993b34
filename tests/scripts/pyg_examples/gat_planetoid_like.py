"""GAT on a generated citation graph, as examples/gat.py."""

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GATv2Conv
from torch_geometric.utils import add_self_loops, degree, to_undirected

torch.manual_seed(1)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
edge_index = to_undirected(torch.randint(0, 100, (2, 300)))
data = Data(x=torch.rand(100, 24), edge_index=edge_index, y=torch.randint(0, 5, (100,)))
data.train_mask = torch.zeros(100, dtype=torch.bool)
data.train_mask[:60] = True
data = data.to(device)
print(data, "isolated", data.has_isolated_nodes(), "largest degree", int(degree(data.edge_index[0], 100).max()))


class GAT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = GATConv(24, 8, heads=4, dropout=0.6)
        self.conv2 = GATv2Conv(32, 5, heads=1, concat=False, dropout=0.6)

    def forward(self, x, edge_index):
        x = F.dropout(x, p=0.6, training=self.training)
        x = F.elu(self.conv1(x, edge_index))
        return self.conv2(F.dropout(x, p=0.6, training=self.training), edge_index)


model = GAT().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)
for epoch in range(3):
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    print(f"epoch {epoch} trained on {out[data.train_mask].shape[0]} loss {loss.item():.4f}")
loops, _ = add_self_loops(data.edge_index)
print("edges with loops", loops.shape[1])
