"""Cases of single ops with inputs of ordinary size, measured on a real GPU: name -> function and makers of its inputs.

Names are those of tests/data/op_requests.json.gz. The values are the same on a real and on a virtual GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

cases: dict[str, tuple[Callable[..., Any], tuple[Callable[[str], torch.Tensor], ...]]] = {}
HALF, BFLOAT = torch.float16, torch.bfloat16


def values(*shape, dt=torch.float32, g=True):
    """Return a maker of random numbers."""
    return lambda device: (
        torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dt).to(device).requires_grad_(g)
    )


def indices(high, *shape):
    """Return a maker of random indices."""
    return lambda device: torch.randint(high, shape, generator=torch.Generator().manual_seed(2)).to(device)


def add(name, function, *makers):
    cases[name] = (function, makers)


for dt, n in ((torch.float32, "f32"), (HALF, "f16"), (BFLOAT, "bf16")):
    for shape in ((8, 64, 56, 56), (2, 320, 64, 64), (16, 32, 128, 128), (4, 512, 7, 7), (1, 1280, 8, 8)):
        s = "x".join(map(str, shape))
        C = shape[1]
        w, b = values(C, dt=dt), values(C, dt=dt)
        add(f"group_norm {s} {n}", lambda x, w, b: F.group_norm(x, 32, w, b), values(*shape, dt=dt), w, b)
        add(
            f"group_norm nhwc {s} {n}",
            lambda x, w, b: F.group_norm(x.contiguous(memory_format=torch.channels_last), 32, w, b),
            values(*shape, dt=dt),
            w,
            b,
        )
        add(f"group_norm nograd-weight {s} {n}", lambda x: F.group_norm(x, 32), values(*shape, dt=dt))
        for fmt in (torch.contiguous_format, torch.channels_last):
            f_ = "nhwc" if fmt is torch.channels_last else "nchw"

            def mk(d, shape=shape, dt=dt, fmt=fmt):
                return values(*shape, dt=dt, g=False)(d).contiguous(memory_format=fmt).requires_grad_()

            def bn(x, w, b, C=C, dt=dt):
                return F.batch_norm(x, torch.zeros(C, device=x.device), torch.ones(C, device=x.device), w, b, True)

            add(f"batch_norm train {f_} {s} {n}", bn, mk, values(C), values(C))
            if dt is not torch.float32:
                add(
                    f"batch_norm train half-weight {f_} {s} {n}",
                    lambda x, w, b, C=C, dt=dt: F.batch_norm(
                        x,
                        torch.zeros(C, device=x.device, dtype=dt),
                        torch.ones(C, device=x.device, dtype=dt),
                        w,
                        b,
                        True,
                    ),
                    mk,
                    values(C, dt=dt),
                    values(C, dt=dt),
                )
            add(
                f"batch_norm eval {f_} {s} {n}",
                lambda x, w, b, C=C: F.batch_norm(
                    x, torch.zeros(C, device=x.device), torch.ones(C, device=x.device), w, b, False
                ),
                mk,
                values(C),
                values(C),
            )
            add(f"maxpool {f_} {s} {n}", lambda x: F.max_pool2d(x, 2), mk)
            add(f"avgpool {f_} {s} {n}", lambda x: F.avg_pool2d(x, 2), mk)
            add(f"adaptive {f_} {s} {n}", lambda x: F.adaptive_avg_pool2d(x, 1), mk)
            add(f"adaptive3 {f_} {s} {n}", lambda x: F.adaptive_avg_pool2d(x, 3), mk)
            add(f"up nearest {f_} {s} {n}", lambda x: F.interpolate(x, scale_factor=2), mk)
            add(f"up bilinear {f_} {s} {n}", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), mk)
            add(f"mean {f_} {s} {n}", lambda x: x.mean((2, 3)), mk)
            add(f"sum all {f_} {s} {n}", lambda x: x.sum(), mk)
            add(f"var {f_} {s} {n}", lambda x: x.var(), mk)
            add(f"norm {f_} {s} {n}", lambda x: x.norm(), mk)
            add(f"pixel_shuffle {f_} {s} {n}", lambda x: F.pixel_shuffle(x, 2), mk)
            add(f"pad reflect {f_} {s} {n}", lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), mk)
        add(f"instance_norm {s} {n}", lambda x: F.instance_norm(x), values(*shape, dt=dt))
    for shape in ((16, 512, 768), (4, 1024, 4096), (64, 100), (8192, 1000), (2, 7, 50257)):
        s = "x".join(map(str, shape))
        C = shape[-1]
        add(
            f"layer_norm {s} {n}",
            lambda x, w, b, C=C: F.layer_norm(x, (C,), w, b),
            values(*shape, dt=dt),
            values(C, dt=dt),
            values(C, dt=dt),
        )
        add(f"rms_norm {s} {n}", lambda x, w, C=C: F.rms_norm(x, (C,), w), values(*shape, dt=dt), values(C, dt=dt))
        add(f"softmax {s} {n}", lambda x: x.softmax(-1), values(*shape, dt=dt))
        add(f"log_softmax0 {s} {n}", lambda x: x.log_softmax(0), values(*shape, dt=dt))
        add(f"gelu {s} {n}", lambda x: F.gelu(x), values(*shape, dt=dt))
        add(f"silu {s} {n}", lambda x: F.silu(x), values(*shape, dt=dt))
        add(f"glu {s} {n}", lambda x: F.glu(x[..., : x.shape[-1] // 2 * 2]), values(*shape, dt=dt))
        add(f"dropout {s} {n}", lambda x: F.dropout(x, 0.1), values(*shape, dt=dt))
        add(
            f"cross_entropy {s} {n}",
            lambda x, C=C: F.cross_entropy(
                x.flatten(0, -2), torch.zeros(x.numel() // C, dtype=torch.long, device=x.device)
            ),
            values(*shape, dt=dt),
        )
        add(
            f"cross_entropy smooth {s} {n}",
            lambda x, C=C: F.cross_entropy(
                x.flatten(0, -2), torch.zeros(x.numel() // C, dtype=torch.long, device=x.device), label_smoothing=0.1
            ),
            values(*shape, dt=dt),
        )
        add(
            f"cross_entropy soft {s} {n}",
            lambda x, C=C: F.cross_entropy(x.flatten(0, -2), x.detach().flatten(0, -2).softmax(-1)),
            values(*shape, dt=dt),
        )
        for r in (
            "sum",
            "mean",
            "amax",
            "argmax",
            "cumsum",
            "logsumexp",
            "std",
            "prod",
            "norm",
            "cumprod",
            "logcumsumexp",
            "median",
            "mode",
            "kthvalue",
        ):
            if r in ("prod", "mode", "kthvalue", "logcumsumexp", "cumprod") and dt is not torch.float32:
                continue
            for dim in (
                (-1, 0, None)
                if r not in ("cumsum", "logsumexp", "cumprod", "logcumsumexp", "mode", "kthvalue")
                else (-1, 0)
            ):
                if dim is None and r in ("argmax",):
                    continue

                def red(x, r=r, dim=dim):
                    if r == "kthvalue":
                        return x.kthvalue(2, dim)[0]
                    y = getattr(x, r)(dim) if dim is not None else getattr(x, r)()
                    return y[0] if isinstance(y, tuple) else y

                add(f"{r} {dim} {s} {n}", red, values(*shape, dt=dt))
        add(f"sort {s} {n}", lambda x: x.sort(-1)[0], values(*shape, dt=dt))
        add(f"sort0 {s} {n}", lambda x: x.sort(0)[0], values(*shape, dt=dt))
        add(f"sort desc stable {s} {n}", lambda x: x.sort(-1, descending=True, stable=True)[0], values(*shape, dt=dt))
        add(f"topk {s} {n}", lambda x: x.topk(5, -1)[0], values(*shape, dt=dt))
        add(
            f"linear {s} {n}",
            lambda x, w, b: F.linear(x, w, b),
            values(*shape, dt=dt),
            values(256, C, dt=dt),
            values(256, dt=dt),
        )
        add(f"isnan any {s} {n}", lambda x: x.isnan().any(), values(*shape, dt=dt, g=False))
        add(f"where {s} {n}", lambda x: torch.where(x > 0, x, 0.0), values(*shape, dt=dt))
        add(f"clamp {s} {n}", lambda x: x.clamp(-1, 1), values(*shape, dt=dt))
        add(f"mse {s} {n}", lambda x: F.mse_loss(x, x.detach() * 2), values(*shape, dt=dt))
        add(f"smooth_l1 {s} {n}", lambda x: F.smooth_l1_loss(x, x.detach() * 2), values(*shape, dt=dt))
        add(
            f"bce logits {s} {n}",
            lambda x: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid()),
            values(*shape, dt=dt),
        )
        add(
            f"kl {s} {n}",
            lambda x: F.kl_div(x.log_softmax(-1), x.detach().softmax(-1), reduction="batchmean"),
            values(*shape, dt=dt),
        )
        add(f"cosine {s} {n}", lambda x: F.cosine_similarity(x, x.detach() * 2), values(*shape, dt=dt))
        add(f"normalize {s} {n}", lambda x: F.normalize(x, dim=-1), values(*shape, dt=dt))
    for q in ((4, 12, 512, 64), (2, 16, 1024, 128), (8, 8, 77, 40), (1, 4, 2048, 64)):
        s = "x".join(map(str, q))
        for causal in (False, True):
            add(
                f"sdpa {causal} {s} {n}",
                lambda q, k, v, causal=causal: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
                values(*q, dt=dt),
                values(*q, dt=dt),
                values(*q, dt=dt),
            )
        add(
            f"sdpa mask {s} {n}",
            lambda q, k, v: F.scaled_dot_product_attention(
                q, k, v, attn_mask=torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril()
            ),
            values(*q, dt=dt),
            values(*q, dt=dt),
            values(*q, dt=dt),
        )
        add(
            f"sdpa float mask {s} {n}",
            lambda q, k, v: F.scaled_dot_product_attention(
                q, k, v, attn_mask=torch.zeros(1, 1, q.shape[-2], q.shape[-2], dtype=q.dtype, device=q.device)
            ),
            values(*q, dt=dt),
            values(*q, dt=dt),
            values(*q, dt=dt),
        )
        add(
            f"sdpa dropout {s} {n}",
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1),
            values(*q, dt=dt),
            values(*q, dt=dt),
            values(*q, dt=dt),
        )
        add(
            f"sdpa gqa {s} {n}",
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
            values(*q, dt=dt),
            values(q[0], q[1] // 4, *q[2:], dt=dt),
            values(q[0], q[1] // 4, *q[2:], dt=dt),
        )
        add(f"bmm {s} {n}", lambda q, k: torch.matmul(q, k.transpose(-1, -2)), values(*q, dt=dt), values(*q, dt=dt))
        add(f"einsum {s} {n}", lambda q, k: torch.einsum("bhqd,bhkd->bhqk", q, k), values(*q, dt=dt), values(*q, dt=dt))
