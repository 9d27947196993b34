"""Graph attention network from scratch on a generated citation graph, as pytorch/examples/gat."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Adam

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--nodes", type=int, default=120)
parser.add_argument("--num-heads", type=int, default=4)
parser.add_argument("--patience", type=int, default=20)
args = parser.parse_args()
torch.manual_seed(13)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class GraphAttentionLayer(nn.Module):
    def __init__(self, in_features, out_features, n_heads, concat=False, dropout=0.4):
        super().__init__()
        self.n_heads, self.concat, self.dropout = n_heads, concat, dropout
        self.n_hidden = out_features // n_heads if concat else out_features
        self.W = nn.Parameter(torch.empty(in_features, self.n_hidden * n_heads))
        self.a = nn.Parameter(torch.empty(n_heads, 2 * self.n_hidden, 1))
        self.leakyrelu = nn.LeakyReLU(0.2)
        nn.init.xavier_normal_(self.W)
        nn.init.xavier_normal_(self.a)

    def forward(self, h, adj_mat):
        n_nodes = h.shape[0]
        h_transformed = F.dropout(torch.mm(h, self.W), self.dropout, training=self.training)
        h_transformed = h_transformed.view(n_nodes, self.n_heads, self.n_hidden).permute(1, 0, 2)
        source = torch.matmul(h_transformed, self.a[:, : self.n_hidden, :])
        target = torch.matmul(h_transformed, self.a[:, self.n_hidden :, :])
        e = self.leakyrelu(source + target.mT)
        e = torch.where(adj_mat > 0, e, -9e16 * torch.ones_like(e))
        attention = F.dropout(F.softmax(e, dim=-1), self.dropout, training=self.training)
        h_prime = torch.matmul(attention, h_transformed)
        return h_prime.permute(1, 0, 2).contiguous().view(n_nodes, -1) if self.concat else h_prime.mean(dim=0)


class GAT(nn.Module):
    def __init__(self, in_features, n_hidden, n_heads, num_classes):
        super().__init__()
        self.gat1 = GraphAttentionLayer(in_features, n_hidden, n_heads, concat=True)
        self.elu = nn.ELU()
        self.gat2 = GraphAttentionLayer(n_hidden, num_classes, 1)

    def forward(self, x, adj):
        return F.log_softmax(self.gat2(self.elu(self.gat1(x, adj)), adj), dim=1)


n = args.nodes
labels = torch.randint(0, 7, (n,)).to(device)
edges = torch.randint(0, n, (2, 400))
adj = torch.sparse_coo_tensor(edges, torch.ones(400), (n, n)).to_dense().clamp(max=1)
adj = (adj + adj.t() + torch.eye(n)).clamp(max=1).to(device)
features = torch.rand(n, 64).to(device)
idx = torch.randperm(n).to(device)
idx_test, idx_val, idx_train = idx[:40], idx[40:60], idx[60:]
print(f"{n} nodes, {int(adj.sum())} entries, {int(labels.max()) + 1} classes")
net = GAT(64, 32, args.num_heads, 7).to(device)
optimizer = Adam(net.parameters(), lr=0.005, weight_decay=5e-4)
criterion = nn.NLLLoss()
for epoch in range(args.epochs):
    net.train()
    optimizer.zero_grad()
    output = net(features, adj)
    loss = criterion(output[idx_train], labels[idx_train])
    loss.backward()
    optimizer.step()
    net.eval()
    with torch.no_grad():
        output = net(features, adj)
        val_loss = criterion(output[idx_val], labels[idx_val])
        acc = output[idx_val].argmax(1).eq(labels[idx_val]).float().mean()
    print(f"Epoch {epoch + 1:04d} train loss: {loss.item():.4f} val loss: {val_loss.item():.4f} acc {acc.item():.4f}")
