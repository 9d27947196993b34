# gpu: 12GiB
# cause: the layer gathers 200 numbers for each of 9 million edges, and multiplies them: two tensors of 6.8 GiB
# cure: the adjacency as a sparse matrix, which sums without messages
# report: https://github.com/pyg-team/pytorch_geometric/issues/459 (the maintainer names the cause; torch.spmm worked)
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import GCNConv

NODES, EDGES, FEATURES, CLASSES = 14049, 9075063, 200, 20


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(NODES, FEATURES))  # one-hot features times the first weight
        self.conv1 = GCNConv(FEATURES, FEATURES, add_self_loops=False, normalize=False)
        self.conv2 = GCNConv(FEATURES, CLASSES, add_self_loops=False, normalize=False)

    def forward(self, edge_index, edge_weight):
        x = F.relu(self.conv1(self.embedding, edge_index, edge_weight))
        return self.conv2(x, edge_index, edge_weight)


edge_index = torch.randint(NODES, (2, EDGES), device="cuda")
edge_weight = torch.rand(EDGES, device="cuda")
labels = torch.randint(CLASSES, (NODES,), device="cuda")
model = Net().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
for epoch in range(3):
    loss = F.cross_entropy(model(edge_index, edge_weight), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(epoch, f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
