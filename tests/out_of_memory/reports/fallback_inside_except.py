# gpu: 4GiB
# cause: the fallback runs inside `except`, where the traceback keeps the failed call's frame, and its scores
# cure: set a flag in `except`, and fall back after it
# report: https://github.com/Comfy-Org/ComfyUI/pull/11038 (merged; its author explains the cause)
import torch
from torch import nn


def full_attention(q, k, v):
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(1, 2)
    weights = scores.softmax(-1)
    return weights @ v


def sliced_attention(q, k, v, slices=2):
    out = torch.empty_like(q)
    for rows in torch.arange(q.shape[1]).chunk(slices):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        out[:, part] = full_attention(q[:, part], k, v)
    return out


def attention(q, k, v):
    try:
        return full_attention(q, k, v)
    except torch.cuda.OutOfMemoryError:
        print("Out of memory with full attention, trying slices")
        return sliced_attention(q, k, v)


class AttentionBlock(nn.Module):
    def __init__(self, channels=512):
        super().__init__()
        self.norm = nn.GroupNorm(32, channels)
        self.q, self.k, self.v = (nn.Conv2d(channels, channels, 1) for _ in range(3))
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (conv(h).flatten(2).transpose(1, 2) for conv in (self.q, self.k, self.v))
        return x + self.proj_out(attention(q, k, v).transpose(1, 2).reshape(x.shape))


model = AttentionBlock().cuda().half().eval()
with torch.no_grad():
    for size in (64, 128, 192):  # height and width of the latents
        image = model(torch.randn(1, 512, size, size, device="cuda", dtype=torch.float16))
        print(size, f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
