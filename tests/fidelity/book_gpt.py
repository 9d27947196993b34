"""GPT-2 small as a textbook writes it, and made cheaper change by change, as its author published peaks on an A100.

Ordinary code, written anew (docs/accuracy.md names the source): two training steps, an evaluation after the first, and
a text generated token by token, which need the memory of the whole epoch.
"""

import enum

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

WIDTH, HEADS, LAYERS, CONTEXT, BATCH, VOCABULARY = 768, 12, 12, 1024, 8, 50_257


class Version(enum.IntEnum):
    """Changes of the series, each with those before it."""

    ORIGINAL = 0
    MASK_ON_THE_FLY = 1
    FUSED_ADAMW = 2
    BF16 = 3
    CLASSES_OF_PYTORCH = 4
    FLASH_ATTENTION = 5


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = x.var(-1, keepdim=True, unbiased=False)
        normed = (x - mean) / torch.sqrt(variance + 1e-5)
        return self.scale * normed + self.shift


class Gelu(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(torch.sqrt(torch.tensor(2.0 / torch.pi)) * (x + 0.044715 * torch.pow(x, 3))))


class Attention(nn.Module):
    """Attention written out, with its mask in a buffer or made in each call."""

    def __init__(self, version):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        if version < Version.MASK_ON_THE_FLY:
            self.register_buffer("mask", torch.triu(torch.ones(CONTEXT, CONTEXT), diagonal=1))

    def forward(self, x):
        batch, length, _ = x.shape
        keys, queries, values = self.key(x), self.query(x), self.value(x)
        keys, queries, values = (
            each.view(batch, length, HEADS, -1).transpose(1, 2) for each in (keys, queries, values)
        )
        scores = queries @ keys.transpose(2, 3)
        if hasattr(self, "mask"):
            mask = self.mask.bool()[:length, :length]
        else:
            mask = torch.triu(torch.ones(length, length, device=x.device), diagonal=1).bool()
        scores.masked_fill_(mask, -torch.inf)
        weights = torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)
        weights = self.dropout(weights)
        context = (weights @ values).transpose(1, 2)
        context = context.reshape(batch, length, WIDTH)
        return self.out(context)


class FlashAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv(x)
        queries, keys, values = qkv.view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        rate = 0.1 if self.training else 0.0
        context = scaled_dot_product_attention(queries, keys, values, dropout_p=rate, is_causal=True)
        return self.out(context.transpose(1, 2).contiguous().view(batch, length, WIDTH))


class Block(nn.Module):
    def __init__(self, version):
        super().__init__()
        has_classes = version >= Version.CLASSES_OF_PYTORCH
        self.attention = FlashAttention() if version >= Version.FLASH_ATTENTION else Attention(version)
        gelu = nn.GELU(approximate="tanh") if has_classes else Gelu()
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), gelu, nn.Linear(4 * WIDTH, WIDTH))
        self.norms = nn.ModuleList((nn.LayerNorm if has_classes else Norm)(WIDTH) for _ in range(2))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        for norm, layer in zip(self.norms, (self.attention, self.perceptron), strict=True):
            shortcut = x
            x = norm(x)
            x = layer(x)
            x = self.dropout(x)
            x = x + shortcut
        return x


class Gpt(nn.Module):
    def __init__(self, version):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.Sequential(*(Block(version) for _ in range(LAYERS)))
        self.norm = (nn.LayerNorm if version >= Version.CLASSES_OF_PYTORCH else Norm)(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        embedded = self.tokens(tokens)
        positions = self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = embedded + positions
        x = self.dropout(x)
        x = self.blocks(x)
        x = self.norm(x)
        return self.head(x)


def batch_loss(model, inputs, targets):
    inputs, targets = inputs.cuda(), targets.cuda()
    logits = model(inputs)
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def generate(model, tokens):
    for _ in range(50):
        logits = model(tokens[:, -CONTEXT:])
        logits = logits[:, -1, :]
        following = torch.argmax(logits, dim=-1, keepdim=True)
        tokens = torch.cat((tokens, following), dim=1)
    return tokens


def train(version: Version) -> int:
    """Train two steps, evaluate and generate; return the bytes reserved at the end."""
    model = Gpt(version)
    model.cuda()
    if version >= Version.BF16:
        model.to(torch.bfloat16)
    more = {"fused": True} if version >= Version.FUSED_ADAMW else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1, **more)
    for step in range(2):
        inputs, targets = (torch.ones(BATCH, CONTEXT, dtype=torch.long) for _ in range(2))
        optimizer.zero_grad()
        loss = batch_loss(model, inputs, targets)
        loss.backward()
        optimizer.step()
        if step == 0:
            model.eval()
            with torch.no_grad():
                for _ in range(2):
                    held = batch_loss(model, inputs, targets)
                    held.item()
            model.train()
    model.eval()
    with torch.no_grad():
        generate(model, torch.ones(1, 4, dtype=torch.long).cuda())
    return torch.cuda.memory_reserved()
