"""Models of the golden scenarios: plain torch, small, each with the typical layers of its family."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Mlp(nn.Module):
    def __init__(self, width=1024, depth=4, classes=100, dropout=0.0):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        for layer in self.layers:
            x = self.dropout(F.gelu(layer(x)))
        return self.head(x)


class SmallCnn(nn.Module):
    """LeNet's shape: convolution, pooling, linear."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 32, 5, padding=2)
        self.second = nn.Conv2d(32, 64, 5, padding=2)
        self.head = nn.Linear(64 * 16 * 16, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        x = F.max_pool2d(F.relu(self.second(x)), 2)
        return self.head(x.flatten(1))


class DoubleConvolution(nn.Sequential):
    def __init__(self, inputs, outputs, inplace):
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=inplace),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=inplace),
        )


class UNet(nn.Module):
    def __init__(self, width=32, inplace=False, checkpointed=False):
        super().__init__()
        self.checkpointed = checkpointed
        self.down = nn.ModuleList(
            (
                DoubleConvolution(3, width, inplace),
                DoubleConvolution(width, 2 * width, inplace),
                DoubleConvolution(2 * width, 4 * width, inplace),
            )
        )
        self.bottom = DoubleConvolution(4 * width, 8 * width, inplace)
        self.up = nn.ModuleList(nn.ConvTranspose2d(k * width, k * width // 2, 2, stride=2) for k in (8, 4, 2))
        self.merge = nn.ModuleList(DoubleConvolution(k * width, k * width // 2, inplace) for k in (8, 4, 2))
        self.head = nn.Conv2d(width, 1, 1)

    def block(self, module, x):
        return checkpoint(module, x, use_reentrant=False) if self.checkpointed else module(x)

    def forward(self, x):
        skips = []
        for module in self.down:
            x = self.block(module, x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.block(self.bottom, x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = self.block(merge, torch.cat([skips.pop(), up(x)], 1))
        return self.head(x)


class ResidualBlock(nn.Module):
    """Bottleneck of a ResNet-50."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        self.reduce = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.expand = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(4 * width)
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x):
        y = F.relu(self.norm1(self.reduce(x)))
        y = F.relu(self.norm2(self.conv(y)))
        return F.relu(self.norm3(self.expand(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, width=32, classes=100):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        self.blocks = nn.Sequential(
            ResidualBlock(width, width, 1),
            ResidualBlock(4 * width, 2 * width, 2),
            ResidualBlock(8 * width, 4 * width, 2),
        )
        self.head = nn.Linear(16 * width, classes)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class DiffusionBlocks(nn.Module):
    """Group norm, SiLU, nearest upsampling: the resolution path of a diffusion UNet."""

    def __init__(self, width=64):
        super().__init__()
        self.enter = nn.Conv2d(4, width, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for _ in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        self.leave = nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, x):
        x = self.enter(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = x + conv(F.silu(norm(x)))
            x = F.interpolate(F.avg_pool2d(x, 2), scale_factor=2.0, mode="nearest")
        return self.leave(x)


class Attention(nn.Module):
    def __init__(self, width, heads, dropout, kind):
        super().__init__()
        self.heads, self.dropout, self.kind = heads, dropout, kind
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, mask=None):
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        if self.kind == "naive":
            scores = q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5
            y = F.dropout(scores.softmax(-1), dropout) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout, is_causal=mask is None)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width, heads, dropout, kind):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout, kind)
        self.norm2 = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask=None):
        x = x + self.dropout(self.attention(self.norm1(x), mask))
        return x + self.dropout(self.narrow(F.gelu(self.wide(self.norm2(x)))))


class Transformer(nn.Module):
    """A small GPT; `kind` is `sdpa` or `naive`, `checkpointing` None, `reentrant` or `non-reentrant`."""

    def __init__(self, *, vocabulary=1000, width=256, depth=3, heads=4, length=128, dropout=0.0, kind="sdpa",
                 checkpointing=None, tied=False):  # fmt: skip
        super().__init__()
        self.checkpointing = checkpointing
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, kind) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens, mask=None):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            if self.checkpointing is None:
                x = block(x, mask)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    def __init__(self, cell, width=256, layers=2, bidirectional=False, dropout=0.0):
        super().__init__()
        self.tokens = nn.Embedding(1000, width)
        self.cells = cell(width, width, layers, batch_first=True, bidirectional=bidirectional, dropout=dropout)
        self.head = nn.Linear(width * (2 if bidirectional else 1), 1000)

    def forward(self, tokens):
        return self.head(self.cells(self.tokens(tokens))[0])


class Bag(nn.Module):
    """Averaged embeddings of many ids, as in recommenders."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(20_000, 64, mode="mean")
        self.head = nn.Linear(64, 10)

    def forward(self, ids, offsets):
        return self.head(self.bag(ids, offsets))
