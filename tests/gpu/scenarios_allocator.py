"""Scenarios of the allocator: expandable segments, changing sizes, the limit, and out of memory."""

import torch
import torch.nn.functional as F

from tests.gpu.models import (
    Mlp,
    Transformer,
    UNet,
)
from tests.gpu.training import masks, scenario, sentences, token_loss, train, vectors

MIB = 1024**2


@scenario(allocator="expandable_segments:True")
def expandable_transformer():
    model = Transformer(width=512).cuda()
    train(model, torch.optim.AdamW(model.parameters()), *sentences(), token_loss, dtype=torch.bfloat16)


@scenario(allocator="expandable_segments:True")
def expandable_unet_changing_size():
    model = UNet().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for size in (64, 128, 96):
        train(model, optimizer, *masks(4, size), F.binary_cross_entropy_with_logits, steps=1)
    torch.cuda.empty_cache()


@scenario()
def unet_changing_size_empty_cache():
    model = UNet().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for size in (64, 128, 96):
        train(model, optimizer, *masks(4, size), F.binary_cross_entropy_with_logits, steps=1)
        torch.cuda.empty_cache()


def limit_memory(size):
    """Limit the bytes that the allocator reserves, to an odd number of MiB: every segment is a multiple of 2 MiB."""
    torch.cuda.set_per_process_memory_fraction(size / torch.cuda.get_device_properties(0).total_memory)


@scenario()
def cache_given_back_at_the_limit():
    limit_memory(129 * MIB)
    for size in (40, 60, 90, 120):
        # 40 and 60 fit together, 90 and 120 only after the cached segments are freed.
        block = torch.empty(size * MIB, dtype=torch.uint8, device="cuda")
        del block


@scenario(outcome="oom")
def oom_forward():
    limit_memory(257 * MIB)
    model = UNet().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in (2, 4, 8, 16, 32, 64):
        train(model, optimizer, *masks(batch), F.binary_cross_entropy_with_logits, steps=1)


@scenario(outcome="oom")
def oom_optimizer():
    model = Mlp(depth=8).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, targets = vectors(16)
    F.cross_entropy(model(inputs), targets).backward()
    # 8 layers of 1024 x 1024 fp32 are 32 MiB: the two states of AdamW need 64 MiB more.
    limit_memory(torch.cuda.memory_reserved() + 21 * MIB)
    optimizer.step()


@scenario(allocator="expandable_segments:True", outcome="oom")
def oom_expandable():
    limit_memory(201 * MIB)
    model = Transformer().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in (4, 8, 16, 32, 64, 128):
        train(model, optimizer, *sentences(batch), token_loss, steps=1)
