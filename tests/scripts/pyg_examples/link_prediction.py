"""Link prediction with RandomLinkSplit and negative sampling, as examples/link_pred.py."""

import torch
import torch_geometric.transforms as T
from sklearn.metrics import roc_auc_score
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from torch_geometric.utils import negative_sampling, to_undirected

torch.manual_seed(2)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
data = Data(x=torch.rand(80, 16), edge_index=to_undirected(torch.randint(0, 80, (2, 240))))
transform = T.Compose(
    [
        T.NormalizeFeatures(),
        T.ToDevice(device),
        T.RandomLinkSplit(num_val=0.05, num_test=0.1, is_undirected=True, add_negative_train_samples=False),
    ]
)
train_data, val_data, test_data = transform(data)
print(
    "training edges",
    train_data.edge_index.size(1),
    "labels",
    train_data.edge_label.size(0),
    test_data.edge_label.size(0),
)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(16, 32), GCNConv(32, 16)

    def encode(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)

    def decode(self, z, edge_label_index):
        return (z[edge_label_index[0]] * z[edge_label_index[1]]).sum(dim=-1)


model = Net().to(device)
optimizer = torch.optim.Adam(params=model.parameters(), lr=0.01)
criterion = torch.nn.BCEWithLogitsLoss()
for epoch in range(3):
    model.train()
    optimizer.zero_grad()
    z = model.encode(train_data.x, train_data.edge_index)
    neg_edge_index = negative_sampling(
        edge_index=train_data.edge_index,
        num_nodes=train_data.num_nodes,
        num_neg_samples=train_data.edge_label_index.size(1),
        method="sparse",
    )
    edge_label_index = torch.cat([train_data.edge_label_index, neg_edge_index], dim=-1)
    edge_label = torch.cat([train_data.edge_label, train_data.edge_label.new_zeros(neg_edge_index.size(1))], dim=0)
    loss = criterion(model.decode(z, edge_label_index).view(-1), edge_label)
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        out = (
            model.decode(model.encode(test_data.x, test_data.edge_index), test_data.edge_label_index).view(-1).sigmoid()
        )
    auc = roc_auc_score(test_data.edge_label.cpu().numpy(), out.cpu().numpy())
    print(f"Epoch: {epoch:03d}, positive {int(test_data.edge_label.sum())}, Loss: {loss:.4f}, Test: {auc:.4f}")
