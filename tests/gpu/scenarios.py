"""Training steps whose memory is recorded on a real GPU and predicted on the virtual one: ordinary CUDA code.

They need torch only, and memexplore for the scenarios with knobs. Each scenario is a function without arguments;
`SCENARIOS` maps its name to the function and its allocator settings. No scenario makes a reference cycle with a tensor,
so that memory is freed at the same point in every run.
"""

import contextlib
import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from tests.gpu.models import (
    Bag,
    DiffusionBlocks,
    Mlp,
    Recurrent,
    ResNet,
    SmallCnn,
    Transformer,
    UNet,
)

MIB = 1024**2


class Scenario(NamedTuple):
    function: Callable[[], None]
    allocator: str = ""
    """Value of PYTORCH_CUDA_ALLOC_CONF, which is read once in a process: each scenario has its own."""
    outcome: str = "fits"


SCENARIOS: dict[str, Scenario] = {}


def scenario(allocator="", outcome="fits"):
    def register(function):
        SCENARIOS[function.__name__] = Scenario(function, allocator, outcome)
        return function

    return register


# --- shared by the scenarios: an ordinary training loop, and data ---------------------------------------------------


def train(
    model,
    optimizer,
    inputs,
    targets,
    loss_function,
    *,
    steps=2,
    dtype=None,
    scaler=None,
    clip=None,
    micro_batches=1,
    set_to_none=True,
):
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        for part, target in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
            with torch.autocast("cuda", dtype) if dtype is not None else contextlib.nullcontext():
                loss = loss_function(model(part), target) / micro_batches
            (scaler.scale(loss) if scaler is not None else loss).backward()
        if clip is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()


def vectors(batch=256, width=1024, classes=100):
    return torch.randn(batch, width, device="cuda"), torch.randint(classes, (batch,), device="cuda")


def images(batch=8, size=128, classes=100):
    return torch.randn(batch, 3, size, size, device="cuda"), torch.randint(classes, (batch,), device="cuda")


def masks(batch=4, size=128):
    return torch.randn(batch, 3, size, size, device="cuda"), torch.rand(batch, 1, size, size, device="cuda")


def sentences(batch=8, length=128):
    tokens = torch.randint(1000, (batch, length), device="cuda")
    return tokens, torch.randint(1000, (batch, length), device="cuda")


def token_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# --- multi-layer perceptrons: optimizers and the loop ---------------------------------------------------------------


@scenario()
def mlp_sgd():
    model = Mlp().cuda()
    train(model, torch.optim.SGD(model.parameters(), 0.1), *vectors(), F.cross_entropy, steps=3)


@scenario()
def mlp_sgd_momentum():
    model = Mlp(dropout=0.1).cuda()
    train(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), *vectors(), F.cross_entropy, steps=3)


@scenario()
def mlp_adamw_foreach():
    model = Mlp().cuda()
    train(model, torch.optim.AdamW(model.parameters()), *vectors(), F.cross_entropy)


@scenario()
def mlp_adamw_per_tensor():
    model = Mlp().cuda()
    train(model, torch.optim.AdamW(model.parameters(), foreach=False), *vectors(), F.cross_entropy)


@scenario()
def mlp_adamw_fused():
    model = Mlp().cuda()
    train(model, torch.optim.AdamW(model.parameters(), fused=True), *vectors(), F.cross_entropy)


@scenario()
def mlp_adam_clipped_set_to_zero():
    model = Mlp().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, *vectors(), F.cross_entropy, steps=3, clip=1.0, set_to_none=False)


@scenario()
def mlp_fp16_scaler_clipped():
    model = Mlp().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    train(model, optimizer, *vectors(), F.cross_entropy, dtype=torch.float16, scaler=scaler, clip=1.0)


@scenario()
def mlp_ema():
    model = Mlp().cuda()
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    inputs, targets = vectors()
    for _ in range(2):
        train(model, optimizer, inputs, targets, F.cross_entropy, steps=1)
        with torch.no_grad():
            for kept, parameter in zip(average.parameters(), model.parameters(), strict=True):
                kept.mul_(0.99).add_(parameter, alpha=0.01)


@scenario()
def mlp_evaluation():
    model = Mlp().cuda().eval()
    inputs, targets = vectors()
    right = torch.zeros((), device="cuda")
    with torch.no_grad():
        for part, target in zip(inputs.split(64), targets.split(64), strict=True):
            right += (model(part).argmax(1) == target).sum()


# --- convolutional networks -----------------------------------------------------------------------------------------


@scenario()
def cnn_sgd():
    model = SmallCnn().cuda()
    train(model, torch.optim.SGD(model.parameters(), 0.1), *images(32, 64, 10), F.cross_entropy)


@scenario()
def unet_adamw():
    model = UNet().cuda()
    train(model, torch.optim.AdamW(model.parameters()), *masks(), F.binary_cross_entropy_with_logits)


@scenario()
def unet_inplace():
    model = UNet(inplace=True).cuda()
    train(model, torch.optim.AdamW(model.parameters()), *masks(), F.binary_cross_entropy_with_logits)


@scenario()
def unet_checkpointed():
    model = UNet(checkpointed=True).cuda()
    train(model, torch.optim.AdamW(model.parameters()), *masks(), F.binary_cross_entropy_with_logits)


@scenario()
def unet_bf16():
    model = UNet().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, *masks(), F.binary_cross_entropy_with_logits, dtype=torch.bfloat16)


@scenario()
def unet_fp16_scaler():
    model = UNet().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    train(model, optimizer, *masks(), F.binary_cross_entropy_with_logits, dtype=torch.float16, scaler=scaler)


@scenario()
def resnet_momentum():
    model = ResNet().cuda()
    train(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), *images(), F.cross_entropy)


@scenario()
def resnet_channels_last_bf16():
    model = ResNet().cuda().to(memory_format=torch.channels_last)
    inputs, targets = images()
    inputs = inputs.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    train(model, optimizer, inputs, targets, F.cross_entropy, dtype=torch.bfloat16)


@scenario()
def resnet_accumulated():
    model = ResNet().cuda()
    train(model, torch.optim.SGD(model.parameters(), 0.1), *images(), F.cross_entropy, micro_batches=4)


@scenario()
def resnet_frozen():
    model = ResNet().cuda()
    model.blocks.requires_grad_(False).eval()
    model.stem.requires_grad_(False).eval()
    train(model, torch.optim.Adam(model.head.parameters()), *images(), F.cross_entropy)


@scenario()
def diffusion_mse():
    model = DiffusionBlocks().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    noise = torch.randn(4, 4, 64, 64, device="cuda")
    train(model, optimizer, noise, torch.randn_like(noise), F.mse_loss)


# --- transformers ---------------------------------------------------------------------------------------------------


@scenario()
def transformer_adamw():
    model = Transformer().cuda()
    train(model, torch.optim.AdamW(model.parameters()), *sentences(), token_loss)


@scenario()
def transformer_bf16():
    model = Transformer().cuda()
    train(model, torch.optim.AdamW(model.parameters()), *sentences(), token_loss, dtype=torch.bfloat16)


@scenario()
def transformer_bf16_weights():
    model = Transformer().cuda().bfloat16()
    train(model, torch.optim.AdamW(model.parameters(), fused=True), *sentences(), token_loss)


@scenario()
def transformer_fp16_scaler_dropout():
    model = Transformer(dropout=0.1).cuda()
    scaler = torch.amp.GradScaler("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, *sentences(), token_loss, dtype=torch.float16, scaler=scaler)


@scenario()
def transformer_naive_attention():
    model = Transformer(kind="naive", dropout=0.1).cuda()
    train(model, torch.optim.AdamW(model.parameters()), *sentences(), token_loss)


@scenario()
def transformer_masked_tied():
    model = Transformer(tied=True).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens, targets = sentences()
    mask = torch.ones(8, 1, 128, 128, dtype=torch.bool, device="cuda").tril()
    for _ in range(2):
        optimizer.zero_grad()
        loss = token_loss(model(tokens, mask), targets)
        loss.backward()
        optimizer.step()
        loss.item()


@scenario()
def transformer_checkpoint_reentrant():
    model = Transformer(checkpointing="reentrant").cuda()
    train(model, torch.optim.AdamW(model.parameters()), *sentences(), token_loss)


@scenario()
def transformer_checkpoint_bf16():
    model = Transformer(checkpointing="non-reentrant", dropout=0.1).cuda()
    train(model, torch.optim.AdamW(model.parameters()), *sentences(), token_loss, dtype=torch.bfloat16)


@scenario()
def transformer_accumulated_bf16():
    model = Transformer().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, *sentences(16), token_loss, dtype=torch.bfloat16, micro_batches=4, clip=1.0)


# --- recurrent networks, embeddings ---------------------------------------------------------------------------------


@scenario()
def lstm_adam():
    model = Recurrent(nn.LSTM, dropout=0.1).cuda()
    train(model, torch.optim.Adam(model.parameters()), *sentences(), token_loss)


@scenario()
def gru_bidirectional_fp16_scaler():
    model = Recurrent(nn.GRU, bidirectional=True).cuda()
    scaler = torch.amp.GradScaler("cuda")
    train(model, torch.optim.Adam(model.parameters()), *sentences(), token_loss, dtype=torch.float16, scaler=scaler)


@scenario()
def embedding_bag():
    model = Bag().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    ids = torch.randint(20_000, (4096,), device="cuda")
    offsets = torch.arange(0, 4096, 16, device="cuda")
    targets = torch.randint(10, (256,), device="cuda")
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(ids, offsets), targets).backward()
        optimizer.step()


# --- knobs: runs of the explorer, measured here and predicted --------------------------------------------------------


def with_knobs(model, data, loss, **settings):
    """Train two steps with knobs, with the code that the explorer runs on real and virtual GPUs."""
    from memexplore.knobs.apply import apply
    from memexplore.knobs.knobs import Knobs
    from memexplore.steps import training_loop
    from memexplore.steps.step import Step

    knobs = Knobs(**settings)
    model.cuda()
    kept = []
    with apply(training_loop.knobs_to_apply(knobs), model):
        training_loop.train(Step(model, data, loss=loss), knobs, model, range(2), kept)


def on_host(batch):
    return tuple(tensor.cpu() for tensor in batch)


@scenario()
def knobs_mlp_fused_accumulated():
    with_knobs(Mlp(), on_host(vectors()), F.cross_entropy, update="fused", accumulation=4)


@scenario()
def knobs_mlp_optimizer_in_backward():
    with_knobs(Mlp(), on_host(vectors()), F.cross_entropy, optimizer="Adam", update="in backward")


@scenario()
def knobs_mlp_lora():
    with_knobs(Mlp(), on_host(vectors()), F.cross_entropy, lora=("layers.0", "layers.2"))


@scenario()
def knobs_mlp_offloaded():
    with_knobs(Mlp(), on_host(vectors()), F.cross_entropy, offload="saved tensors on the CPU")


@scenario()
def knobs_resnet_channels_last_fp16():
    with_knobs(ResNet(), on_host(images()), F.cross_entropy, memory_format="channels last", precision="fp16")


@scenario()
def knobs_resnet_inference():
    with_knobs(ResNet(), on_host(images()), F.cross_entropy, mode="inference", batch=16)


@scenario()
def knobs_transformer_checkpointed_bf16():
    with_knobs(Transformer(), on_host(sentences()), token_loss, checkpoint="every 1", precision="bf16")


@scenario()
def knobs_transformer_keeping_matmuls():
    with_knobs(Transformer(), on_host(sentences()), token_loss, checkpoint="keep matmuls")


@scenario()
def knobs_transformer_all_bf16():
    with_knobs(Transformer(), on_host(sentences()), token_loss, precision="all bf16", optimizer="Adafactor")


# --- the allocator --------------------------------------------------------------------------------------------------


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
