"""Scenarios of models, optimizers and training loops: ordinary CUDA code."""

import copy

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
from tests.gpu.training import images, masks, scenario, sentences, token_loss, train, vectors

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
