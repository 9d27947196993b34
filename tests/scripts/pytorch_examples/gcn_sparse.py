"""Graph convolution with a sparse adjacency matrix, as pytorch/examples/gcn."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Adam

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class GraphConv(nn.Module):
    def __init__(self, input_dim, output_dim, use_bias=False):
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(input_dim, output_dim))
        nn.init.xavier_normal_(self.kernel)
        self.bias = nn.Parameter(torch.zeros(output_dim)) if use_bias else None

    def forward(self, input_tensor, adj_mat):
        support = torch.mm(input_tensor, self.kernel)
        output = torch.spmm(adj_mat, support)
        return output + self.bias if self.bias is not None else output


class GCN(nn.Module):
    def __init__(self, input_dim, hidden_dim, output_dim, dropout_p=0.1):
        super().__init__()
        self.gc1 = GraphConv(input_dim, hidden_dim, True)
        self.gc2 = GraphConv(hidden_dim, output_dim, True)
        self.dropout = nn.Dropout(dropout_p)

    def forward(self, x, adj):
        x = self.dropout(F.relu(self.gc1(x, adj)))
        return F.log_softmax(self.gc2(x, adj), dim=1)


def normalized(edges, n):
    adj = torch.sparse_coo_tensor(edges, torch.ones(edges.shape[1]), (n, n)).to_dense().clamp(max=1)
    adj = (adj + adj.t()).clamp(max=1) + torch.eye(n)
    d = adj.sum(1).pow(-0.5)
    return (d[:, None] * adj * d[None, :]).to_sparse_coo()


n = 140
adj = normalized(torch.randint(0, n, (2, 500)), n).to(device)
features, labels = torch.rand(n, 100).to(device), torch.randint(0, 7, (n,)).to(device)
idx = torch.randperm(n).to(device)
idx_test, idx_val, idx_train = idx[:40], idx[40:60], idx[60:]
gcn = GCN(100, 16, 7).to(device)
optimizer = Adam(gcn.parameters(), lr=0.01, weight_decay=5e-4)
criterion = nn.NLLLoss()
for epoch in range(5):
    gcn.train()
    optimizer.zero_grad()
    output = gcn(features, adj)
    loss = criterion(output[idx_train], labels[idx_train])
    loss.backward()
    optimizer.step()
    gcn.eval()
    with torch.no_grad():
        output = gcn(features, adj)
        acc = (output[idx_val].argmax(1) == labels[idx_val]).double().mean()
    print(f"Epoch {epoch:04d} loss {loss.item():.4f} val acc {acc.item():.4f}")
with torch.no_grad():
    test = gcn(features, adj)[idx_test]
    print("test", tuple(test.shape), f"loss {criterion(test, labels[idx_test]).item():.4f}")
