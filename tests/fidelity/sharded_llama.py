"""Llama 2 7B in bf16 as one rank of FSDP2 that keeps its weights gathered until the backward pass.

Ordinary code for `torchrun`, written anew from the benchmark of lightning-thunder, whose model is that of LitGPT 0.3
(docs/many_gpus.md).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

VOCABULARY, CONTEXT, WIDTH, HEADS, INNER, LAYERS = 32_000, 4_096, 4_096, 32, 11_008, 32
HEAD = WIDTH // HEADS


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        dtype = x.dtype
        x = x.float()
        mean = torch.mean(x * x, dim=-1, keepdim=True)
        normed = x * torch.rsqrt(mean + 1e-5)
        normed = normed.to(dtype)
        return normed * self.weight


def turn(x, cos, sin):
    first, second = x[..., : HEAD // 2], x[..., HEAD // 2 :]
    turned = torch.cat((-second, first), dim=-1)
    return ((x * cos) + (turned * sin)).to(x.dtype)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, cos, sin):
        batch, length, _ = x.shape
        parts = self.attn(x).view(batch, length, HEADS, 3, HEAD).permute(0, 2, 3, 1, 4).split(1, dim=2)
        q, k, v = (part.reshape(batch, HEADS, length, HEAD) for part in parts)
        turned_q = turn(q, cos, sin)
        turned_k = turn(k, cos, sin)
        # LitGPT appends the numbers of a head that are not turned: here none, and a copy of the others.
        q = torch.cat((turned_q, q[..., HEAD:]), dim=-1)
        k = torch.cat((turned_k, k[..., HEAD:]), dim=-1)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, WIDTH))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        gate = self.gate(x)
        up = self.up(x)
        x = functional.silu(gate) * up
        return self.down(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.attn, self.norm_2, self.mlp = Norm(), Attention(), Norm(), Mlp()

    def forward(self, x, cos, sin):
        normed = self.norm_1(x)
        attended = self.attn(normed, cos, sin)
        x = attended + x
        return self.mlp(self.norm_2(x)) + x


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = Norm()
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(CONTEXT, HEAD), persistent=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def train(steps=2):
    """Return the peak allocated by this rank, in bytes."""
    dist.init_process_group("nccl")
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    with torch.device("meta"):
        model = Llama()
    model.to(torch.bfloat16)
    for part in (*model.blocks, model):
        fully_shard(part, reshard_after_forward=False)
    model.to_empty(device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    for _ in range(steps):
        tokens, targets = (torch.randint(0, 100, (1, CONTEXT)).to(device) for _ in range(2))
        logits = model(tokens)
        logits = logits.reshape(-1, VOCABULARY)
        loss = functional.cross_entropy(logits, targets.reshape(-1), ignore_index=-1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_allocated()
