"""Point cloud classification with k-nearest neighbours by cdist and PointNet convolutions, as examples/pointnet2_classification.py."""

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import MLP, PointNetConv, global_max_pool

torch.manual_seed(3)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def knn(pos, batch, k):
    distance = torch.cdist(pos, pos)
    distance[batch[:, None] != batch[None, :]] = float("inf")
    index = distance.topk(k, largest=False).indices
    target = torch.arange(pos.size(0), device=pos.device).repeat_interleave(k)
    return torch.stack([index.flatten(), target])


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = PointNetConv(MLP([3 + 3, 32, 32]), MLP([32, 32]))
        self.conv2 = PointNetConv(MLP([32 + 3, 64]), MLP([64, 64]))
        self.mlp = MLP([64, 32, 4], dropout=0.5, norm=None)

    def forward(self, data):
        edges = knn(data.pos, data.batch, 6)
        x = self.conv1(data.pos, data.pos, edges)
        x = self.conv2(x, data.pos, edges)
        return self.mlp(global_max_pool(x, data.batch)).log_softmax(dim=-1)


data_list = [Data(pos=torch.rand(32, 3), y=torch.tensor([i % 4])) for i in range(16)]
loader = DataLoader(data_list, batch_size=8, shuffle=True)
model = Net().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
for epoch in range(2):
    for data in loader:
        data = data.to(device)
        optimizer.zero_grad()
        out = model(data)
        loss = F.nll_loss(out, data.y)
        loss.backward()
        optimizer.step()
        print(
            f"epoch {epoch} clouds {out.shape[0]} labels {data.y.bincount(minlength=4).sum().item()} loss {loss.item():.4f}"
        )
