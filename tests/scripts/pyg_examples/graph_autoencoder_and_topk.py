"""A variational graph autoencoder, then TopKPooling, whose kept nodes depend on learned scores, as examples/proteins_topk_pool.py."""

import torch
import torch.nn.functional as F
from torch_geometric.data import Batch, Data
from torch_geometric.nn import VGAE, GCNConv, GraphConv, TopKPooling, global_max_pool

torch.manual_seed(5)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.mu, self.logstd = GCNConv(10, 16), GCNConv(16, 8), GCNConv(16, 8)

    def forward(self, x, edge_index):
        x = self.conv1(x, edge_index).relu()
        return self.mu(x, edge_index), self.logstd(x, edge_index)


x, edge_index = torch.rand(50, 10).to(device), torch.randint(0, 50, (2, 160)).to(device)
model = VGAE(Encoder()).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(2):
    optimizer.zero_grad()
    z = model.encode(x, edge_index)
    loss = model.recon_loss(z, edge_index) + (1 / 50) * model.kl_loss()
    loss.backward()
    optimizer.step()
    print(f"vgae {epoch} loss {float(loss):.4f} z {tuple(z.shape)}")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.pool1 = GraphConv(6, 16), TopKPooling(16, ratio=0.8)
        self.conv2, self.pool2 = GraphConv(16, 16), TopKPooling(16, ratio=0.5)
        self.lin = torch.nn.Linear(16, 2)

    def forward(self, x, edge_index, batch):
        x = self.conv1(x, edge_index).relu()
        x, edge_index, _, batch, _, _ = self.pool1(x, edge_index, None, batch)
        x = self.conv2(x, edge_index).relu()
        x, edge_index, _, batch, _, _ = self.pool2(x, edge_index, None, batch)
        return self.lin(global_max_pool(x, batch)), x


batch = Batch.from_data_list(
    [Data(x=torch.rand(n, 6), edge_index=torch.randint(0, n, (2, 3 * n))) for n in (8, 10, 12, 9)]
).to(device)
net = Net().to(device)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
for epoch in range(2):
    out, kept = net(batch.x, batch.edge_index, batch.batch)
    loss = F.cross_entropy(out, torch.tensor([0, 1, 1, 0], device=device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(
        f"topk {epoch} graphs {out.shape[0]} of {batch.num_graphs} nodes kept {kept.shape[0]} of {batch.num_nodes} loss {loss.item():.4f}"
    )
