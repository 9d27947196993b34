# gpu: 8GiB
# cause: the checkpoint is on the GPU, and its variable keeps a second copy of all weights while the model trains
# cure: checkpoint = None after the last load_state_dict
# report: https://github.com/karpathy/nanoGPT/pull/236 (merged: only a resumed run failed)
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn


class GPT(nn.Module):
    def __init__(self, vocab=50304, d=1024, depth=23, length=512):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(length, d)
        block = {"nhead": 16, "dim_feedforward": 4 * d, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(d, **block) for _ in range(depth)])
        self.head = nn.Linear(d, vocab, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids, targets):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def train(model, optimizer, steps):
    for _ in range(steps):
        ids = torch.randint(50304, (3, 513), device="cuda")
        loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    print(f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


def first_run(path):
    model = GPT().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
    train(model, optimizer, 2)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": 2}, path)


path = Path(tempfile.mkdtemp()) / "ckpt.pt"
first_run(path)
checkpoint = torch.load(path, map_location="cuda")
model = GPT().cuda()
model.load_state_dict(checkpoint["model"])
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
optimizer.load_state_dict(checkpoint["optimizer"])
iter_num = checkpoint["iter_num"]
train(model, optimizer, 3)
