"""Attention variants: scaled_dot_product_attention with masks and GQA, nested jagged tensors, and flex_attention with a block mask."""

import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
B, H, T, D = 2, 4, 128, 16
q = torch.randn(B, H, T, D, device=device, requires_grad=device == "cuda")
k, v = torch.randn(B, H, T, D, device=device), torch.randn(B, H, T, D, device=device)
mask = torch.ones(T, T, dtype=torch.bool, device=device).tril()
print("sdpa", tuple(scaled_dot_product_attention(q, k, v, attn_mask=mask).shape), "allowed", int(mask.sum()))
print("gqa", tuple(scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True).shape))
block_mask = create_block_mask(
    lambda b, h, i, j: (i >= j) & (i - j < 64), B=None, H=None, Q_LEN=T, KV_LEN=T, device=device
)
out = flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score - 0.1 * (i - j), block_mask=block_mask)
if device == "cuda":
    out.sum().backward()
print("flex", tuple(out.shape), "blocks", tuple(block_mask.shape))
linear = nn.Linear(16, 8).to(device)
nested = torch.nested.nested_tensor([torch.rand(n, 16) for n in (3, 7, 5)], layout=torch.jagged, device=device)
result = linear(nested)
print("nested", [tuple(t.shape) for t in result.unbind()], tuple(torch.nested.to_padded_tensor(result, 0.0).shape))
