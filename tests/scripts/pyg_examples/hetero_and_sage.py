"""Heterogeneous GraphSAGE by to_hetero on users and items, as examples/hetero/to_hetero_mag.py, without sampling."""

import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from torch_geometric.data import HeteroData
from torch_geometric.nn import SAGEConv, to_hetero

torch.manual_seed(4)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
data = HeteroData()
data["user"].x, data["item"].x = torch.rand(40, 8), torch.rand(60, 12)
data["user"].y = torch.randint(0, 3, (40,))
data["user", "buys", "item"].edge_index = torch.stack([torch.randint(0, 40, (150,)), torch.randint(0, 60, (150,))])
data = T.ToUndirected()(data).to(device)


class GNN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = SAGEConv((-1, -1), 32), SAGEConv((-1, -1), 3)

    def forward(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


model = to_hetero(GNN(), data.metadata(), aggr="sum").to(device)
with torch.no_grad():
    out = model(data.x_dict, data.edge_index_dict)
print(sorted(data.node_types), len(data.edge_types), {k: tuple(v.shape) for k, v in sorted(out.items())})
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(3):
    optimizer.zero_grad()
    out = model(data.x_dict, data.edge_index_dict)["user"]
    loss = F.cross_entropy(out, data["user"].y)
    loss.backward()
    optimizer.step()
    print(f"epoch {epoch} loss {float(loss):.4f}")
