"""A character GPT with DDP, AMP, gradient clipping and snapshots, as pytorch/examples/distributed/minGPT-ddp."""

import math
import os
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

TEXT = "the quick brown fox jumps over the lazy dog and runs away from the sleeping cat. " * 30


@dataclass
class GPTConfig:
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    vocab_size: int = 64
    block_size: int = 64
    dropout: float = 0.1


class CharDataset(Dataset):
    def __init__(self, text, block_size):
        chars = sorted(set(text))
        self.stoi = {ch: i for i, ch in enumerate(chars)}
        self.block_size, self.data, self.vocab_size = block_size, text, len(chars)

    def __len__(self):
        return len(self.data) - self.block_size

    def __getitem__(self, idx):
        dix = [self.stoi[s] for s in self.data[idx : idx + self.block_size + 1]]
        return torch.tensor(dix[:-1], dtype=torch.long), torch.tensor(dix[1:], dtype=torch.long)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(c.n_embd), nn.LayerNorm(c.n_embd)
        self.attn = nn.MultiheadAttention(c.n_embd, c.n_head, dropout=c.dropout, batch_first=True)
        self.register_buffer("mask", torch.triu(torch.ones(c.block_size, c.block_size), 1).bool())
        self.mlp = nn.Sequential(
            nn.Linear(c.n_embd, 4 * c.n_embd), nn.GELU(), nn.Linear(4 * c.n_embd, c.n_embd), nn.Dropout(c.dropout)
        )

    def forward(self, x):
        t = x.size(1)
        y = self.ln1(x)
        x = x + self.attn(y, y, y, attn_mask=self.mask[:t, :t], need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok_emb, self.pos_emb = (
            nn.Embedding(c.vocab_size, c.n_embd),
            nn.Parameter(torch.zeros(1, c.block_size, c.n_embd)),
        )
        self.blocks, self.ln_f = nn.Sequential(*[Block(c) for _ in range(c.n_layer)]), nn.LayerNorm(c.n_embd)
        self.head = nn.Linear(c.n_embd, c.vocab_size, bias=False)

    def forward(self, idx, targets):
        x = self.ln_f(self.blocks(self.tok_emb(idx) + self.pos_emb[:, : idx.size(1)]))
        logits = self.head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    dataset = CharDataset(TEXT, 64)
    config = GPTConfig(vocab_size=dataset.vocab_size)
    model = DistributedDataParallel(GPT(config).to(device), device_ids=[local_rank] if cuda else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=cuda)
    loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset), num_workers=1, pin_memory=cuda)
    scaler = torch.amp.GradScaler("cuda", enabled=cuda)
    print("rank", dist.get_rank(), "of", dist.get_world_size(), asdict(config), len(loader))
    for it, (source, targets) in enumerate(loader):
        source, targets = source.to(device), targets.to(device)
        # gradients are accumulated over two batches; the first needs no synchronisation
        with model.no_sync() if it % 2 == 0 else nullcontext():
            with torch.autocast("cuda", dtype=torch.float16, enabled=cuda):
                _, loss = model(source, targets)
            scaler.scale(loss / 2).backward()
        if it % 2 == 1:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            print(
                f"[RANK{dist.get_rank()}] Iter {it} | Train Loss {loss.item():.5f} ppl {math.exp(min(loss.item(), 20)):.2f}"
            )
        if it == 7:
            break
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, "gpt_snapshot.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
