"""A small GPT trained with gradient accumulation, autocast, torch.compile and cosine schedule, then sampled."""

import math
from contextlib import nullcontext

import torch
import torch.nn as nn
import torch.nn.functional as F

batch_size, block_size, accumulate, max_iters, eval_iters = 8, 64, 2, 4, 2
n_layer, n_head, n_embd, learning_rate, min_lr, warmup = 2, 4, 64, 1e-3, 1e-4, 2
device = "cuda" if torch.cuda.is_available() else "cpu"
device_type = "cuda" if "cuda" in device else "cpu"
dtype = "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float32"
ctx = nullcontext() if dtype == "float32" else torch.amp.autocast(device_type=device_type, dtype=torch.bfloat16)
torch.manual_seed(1337)
torch.backends.cuda.matmul.allow_tf32 = True

text = "to be or not to be that is the question whether tis nobler in the mind to suffer " * 40
chars = sorted(set(text))
stoi = {c: i for i, c in enumerate(chars)}
data = torch.tensor([stoi[c] for c in text])
split = {"train": data[: int(0.9 * len(data))], "val": data[int(0.9 * len(data)) :]}


def get_batch(name):
    source = split[name]
    ix = torch.randint(len(source) - block_size, (batch_size,))
    x = torch.stack([source[i : i + block_size] for i in ix])
    y = torch.stack([source[i + 1 : i + 1 + block_size] for i in ix])
    if device_type == "cuda":
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    return x.to(device), y.to(device)


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(n_embd, dim=2)
        q, k, v = (t.view(B, T, n_head, C // n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(n_embd), CausalSelfAttention(), nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, n_embd), nn.Embedding(block_size, n_embd)
        self.h, self.ln_f = nn.ModuleList(Block() for _ in range(n_layer)), nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=0.8, top_k=10):
        for _ in range(max_new_tokens):
            logits, _ = self(idx[:, -block_size:])
            logits = logits[:, -1, :] / temperature
            v, _ = torch.topk(logits, min(top_k, logits.size(-1)))
            logits[logits < v[:, [-1]]] = -float("Inf")
            idx = torch.cat((idx, torch.multinomial(F.softmax(logits, dim=-1), num_samples=1)), dim=1)
        return idx


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for name in split:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(name)
            with ctx:
                _, loss = model(X, Y)
            losses[k] = loss.item()
        out[name] = losses.mean()
    model.train()
    return out


def get_lr(it):
    if it < warmup:
        return learning_rate * (it + 1) / (warmup + 1)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * (it - warmup) / (max_iters - warmup))) * (learning_rate - min_lr)


raw = GPT(len(chars)).to(device)
decay = [p for p in raw.parameters() if p.dim() >= 2]
other = [p for p in raw.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}],
    lr=learning_rate,
    betas=(0.9, 0.95),
    fused=device_type == "cuda",
)
scaler = torch.amp.GradScaler(device_type, enabled=dtype == "float16")
model = torch.compile(raw) if device_type == "cuda" else raw
print(f"{len(chars)} characters, {sum(p.numel() for p in raw.parameters())} parameters, {len(decay)} decayed")
best = 1e9
for it in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    if it % 2 == 0:
        losses = estimate_loss()
        print(f"step {it}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if losses["val"] < best:
            best = losses["val"]
            torch.save(
                {"model": raw.state_dict(), "optimizer": optimizer.state_dict(), "iter": it, "best": best}, "ckpt.pt"
            )
    for _ in range(accumulate):
        X, Y = get_batch("train")
        with ctx:
            _, loss = model(X, Y)
        scaler.scale(loss / accumulate).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(raw.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    print(f"iter {it}: loss {loss.item():.4f}, lr {get_lr(it):.6f}")
raw.eval()
out = raw.generate(torch.zeros((1, 1), dtype=torch.long, device=device), 50)
print("sampled", out.shape[1], "tokens,", len("".join(chars[i] for i in out[0].tolist())), "characters")
