"""A mixture of experts with top-1 routing, capacity and a load-balancing loss, on random tokens."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class MoE(nn.Module):
    def __init__(self, dim, hidden, experts, k=2):
        super().__init__()
        self.gate, self.k = nn.Linear(dim, experts, bias=False), k
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)) for _ in range(experts)
        )

    def forward(self, x):
        shape = x.shape
        x = x.view(-1, shape[-1])
        probs = self.gate(x).softmax(-1)
        weights, chosen = probs.topk(self.k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        fraction = F.one_hot(chosen[:, 0], len(self.experts)).float().mean(0)
        return out.view(shape), len(self.experts) * (fraction * probs.mean(0)).sum()


class Model(nn.Module):
    def __init__(self, vocab=200, dim=64, layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.attn = nn.ModuleList(nn.MultiheadAttention(dim, 4, batch_first=True) for _ in range(layers))
        self.moe = nn.ModuleList(MoE(dim, 128, 4) for _ in range(layers))
        self.norm = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * layers))
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x, aux = self.embed(ids), 0.0
        for i, (attn, moe) in enumerate(zip(self.attn, self.moe)):
            y = self.norm[2 * i](x)
            x = x + attn(y, y, y, need_weights=False)[0]
            y, loss = moe(self.norm[2 * i + 1](x))
            x, aux = x + y, aux + loss
        return self.head(x), aux


model = Model().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(4):
    ids = torch.randint(0, 200, (8, 33), device=device)
    logits, aux = model(ids[:, :-1])
    ce = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    (ce + 0.01 * aux).backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} ce {ce.item():.4f} balance {aux.item():.4f}")
