"""The regressor of light cones of the recording cnn-torch21-no-time, whose input is trained, not its weights."""

import itertools

from torch import nn


class Regressor(nn.Module):
    def __init__(self, depth=30, size=256, channels=(16, 32, 64), features=(200, 100, 20)):
        super().__init__()
        pairs = list(itertools.pairwise((depth, *channels)))
        self.convolutions = nn.ModuleList(nn.Conv2d(before, after, 3, padding="same") for before, after in pairs)
        self.norms = nn.ModuleList(nn.BatchNorm2d(after) for after in channels)
        pairs = itertools.pairwise((channels[-1], *features))
        self.linears = nn.ModuleList(nn.Linear(before, after) for before, after in pairs)
        self.out = nn.Linear(features[-1], 1)
        self.halved = nn.MaxPool2d(2)
        self.largest = nn.MaxPool2d(size // 2 ** len(channels))
        self.dropout = nn.Dropout(0.2)
        self.relu = nn.ReLU()

    def forward(self, x):
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = norm(self.relu(convolution(x)))
            x = self.halved(x)
        x = self.largest(x)
        x = x.flatten(1)
        for linear in self.linears:
            x = self.relu(linear(self.dropout(x)))
        return self.out(x)


def distance(first, second):
    return ((first - second) ** 2).mean()


def contrast(first, second):
    return (first - second) ** 2


class Counterfactual(nn.Module):
    """Loss for a small change of the input and a large change of the model's output."""

    def forward(self, original, output, before, after):
        return distance(after, before) - contrast(output, original)
