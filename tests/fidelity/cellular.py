"""The cellular automata of the recordings conv3d-train-a and conv3d-inference-empty-cache, at several resolutions."""

import torch
import torch.nn.functional as F
from torch import nn


class Automaton2d(nn.Module):
    def __init__(self, channels=16, hidden=64, inputs=3):
        super().__init__()
        self.inputs = inputs
        self.widen = nn.Conv2d(2 * channels, hidden, 1)
        self.narrow = nn.Conv2d(hidden, channels - inputs, 1, bias=False)
        self.seen = nn.Conv2d(channels, channels, 3, padding=1, padding_mode="reflect", groups=channels)

    def change(self, state):
        change = self.seen(state)
        change = torch.cat([state, change], dim=1)
        change = self.widen(change)
        change = F.relu(change)
        change = self.narrow(change)
        return change  # noqa: RET504 - a variable frees its tensor when it is assigned the next one

    def update(self, state):
        change = self.change(state)
        alive = awake(change)
        change = change * alive
        return state[:, self.inputs :] + change

    def forward(self, x, steps):
        state = x.permute(0, 3, 1, 2)
        kept = state[:, : self.inputs]
        for _ in range(steps):
            new = self.update(state)
            state = torch.cat([kept, new], dim=1)
        return state.permute(0, 2, 3, 1)


def awake(change):
    batch, _, height, width = change.shape
    return torch.zeros([batch, 1, height, width], device=change.device).bernoulli_(0.5)


class Automaton3d(nn.Module):
    def __init__(self, channels=16, hidden=64):
        super().__init__()
        self.widen = nn.Linear(2 * channels, hidden)
        self.narrow = nn.Linear(hidden, channels, bias=False)
        self.seen = nn.Conv3d(channels, channels, 3, padding=1, padding_mode="reflect", groups=channels)
        self.norm = nn.BatchNorm3d(hidden, track_running_stats=False)

    def perceive(self, x):
        seen = self.seen(x)
        return torch.cat((x, seen), 1)

    def update(self, state):
        x = state.transpose(1, 4)
        change = self.perceive(x)
        change = change.transpose(1, 4)
        change = self.widen(change)
        change = change.transpose(1, 4)
        change = self.norm(change)
        change = change.transpose(1, 4)
        change = F.relu(change)
        change = self.narrow(change)
        alive = torch.rand([*change.shape[:4], 1]) > 0.5
        alive = alive.float().to(change.device)
        change = change * alive
        x = x + change.transpose(1, 4)
        x = x.transpose(1, 4)
        return x  # noqa: RET504 - the sum exists before the other variables end

    def forward(self, x, steps):
        for _ in range(steps):
            new = self.update(x).clone()
            x = torch.concat((x[..., :1], new[..., 1:]), 4)
        return x


class Octree(nn.Module):
    """Automata from coarse to fine; in training on patches, the first one chosen by the loss of a whole pass."""

    SIZES = ((320, 320, 24), (160, 160, 12), (80, 80, 6), (40, 40, 6), (20, 20, 6))
    STEPS = (5, 5, 5, 5, 20)
    PATCHES = ((80, 80, 6), (80, 80, 6), None, None, (12, 12, 5))

    def __init__(self):
        super().__init__()
        self.automata = nn.ModuleList(Automaton3d() for _ in self.SIZES)

    def forward(self, x, y):
        # Each sample twice, as in the recorded run.
        x = torch.cat([x] * 2, dim=0)
        y = torch.cat([y] * 2, dim=0)
        return self._on_patches(x, y)

    @torch.no_grad()
    def _coarse(self, x, level):
        return F.interpolate(x, size=self.SIZES[level])

    @torch.no_grad()
    def _whole(self, x):
        out = self._levels(x, x, (None,) * len(self.SIZES))
        out.pop("target")
        return out

    @torch.no_grad()
    def _chances(self, loss, level):
        loss = loss.unsqueeze(1)
        loss = F.interpolate(loss, size=self.SIZES[level])
        patches = F.conv3d(loss, torch.ones((1, 1, *self.PATCHES[level]), device=loss.device))
        patches = patches[:, 0]
        patches = patches / torch.sum(patches, dim=(1, 2, 3)).view(patches.shape[0], 1, 1, 1)
        return patches  # noqa: RET504 - a variable frees its tensor when it is assigned the next one

    def _on_patches(self, x, y):
        with torch.no_grad():
            self.eval()
            first = self._whole(x)["logits"]
            self.train()
            loss = torch.zeros(x.shape[:4], device=x.device)
            term = F.binary_cross_entropy_with_logits(first[..., 0], y[..., 0], reduction="none")
            loss += term
        del first
        return self._levels(x, y, self.PATCHES, loss)

    def _levels(self, x, y, patches, loss=None):
        original = x.permute(0, 4, 1, 2, 3)
        new = torch.zeros(x.shape[0], *(patches[-1] or self.SIZES[-1]), 16, device=x.device)
        x = self._coarse(original, -1).permute(0, 2, 3, 4, 1)
        if loss is not None:
            self._chances(loss, -1).cpu()
        height, width, depth = new.shape[1:4]
        new[..., :1] = x[:, :height, :width, :depth]
        x = new
        for level in reversed(range(len(self.SIZES))):
            x = self.automata[level](x, self.STEPS[level])
            if level:
                x = x.permute(0, 4, 1, 2, 3)
                scale = tuple(fine / coarse for fine, coarse in zip(*self.SIZES[level - 1 : level + 1], strict=True))
                x = nn.Upsample(scale_factor=scale, mode="nearest")(x)
                right = self._coarse(original, level - 1)
                height, width, depth = patches[level - 1] or x.shape[2:]
                if patches[level - 1] is not None:
                    new = torch.zeros(*x.shape[:2], height, width, depth, device=x.device)
                    new[:, 1:] = x[:, 1:, :height, :width, :depth]
                    x = new
                x[:, :1] = right[:, :, :height, :width, :depth]
                x = x.permute(0, 2, 3, 4, 1)
        height, width, depth = x.shape[1:4]
        target = torch.zeros(*x.shape[:4], y.shape[4], device=x.device)
        target[:] = y[:, :height, :width, :depth]
        return {"logits": x[..., 1:2], "target": target, "hidden": x[..., :2]}
