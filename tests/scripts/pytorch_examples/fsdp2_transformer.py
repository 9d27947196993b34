"""Fully sharded training of a transformer with mixed precision, as pytorch/examples/distributed/FSDP2."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.w1, self.w2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.heads = heads

    def forward(self, x):
        b, t, d = x.shape
        y = self.attention_norm(x)
        q, k, v = (w(y).view(b, t, self.heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).reshape(b, t, d))
        return x + self.w2(F.gelu(self.w1(self.ffn_norm(x))))


class Transformer(nn.Module):
    def __init__(self, vocab=1024, dim=256, layers=6, heads=8, max_len=128):
        super().__init__()
        self.tok_embeddings, self.pos_embeddings = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.layers = nn.ModuleList([Block(dim, heads) for _ in range(layers)])
        self.norm, self.output = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens) + self.pos_embeddings(torch.arange(tokens.size(1), device=tokens.device))
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))


def main():
    rank = int(os.environ["LOCAL_RANK"])
    if torch.accelerator.is_available():
        device = torch.device(f"{torch.accelerator.current_accelerator().type}:{rank}")
        torch.accelerator.set_device_index(rank)
    else:
        device = torch.device("cpu")
    dist.init_process_group(
        backend=dist.get_default_backend_for_device(device), device_id=device if device.type == "cuda" else None
    )
    torch.manual_seed(0)
    model = Transformer().to(device)
    policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    for layer in model.layers:
        fully_shard(layer, **policy)
    fully_shard(model, **policy)
    assert isinstance(model, FSDPModule)
    print("rank", rank, "of", dist.get_world_size(), type(next(model.parameters())).__name__)
    print(
        "local elements",
        sum(p.to_local().numel() for p in model.parameters()),
        "of",
        sum(p.numel() for p in model.parameters()),
    )
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(3):
        x = torch.randint(0, 1024, (4, 128), device=device)
        loss = F.cross_entropy(model(x).view(-1, 1024).float(), x.view(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optim.step()
        optim.zero_grad()
        print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
