"""Post-mortems as HTML."""

from __future__ import annotations

import re

import torch

import memexplore as mx


def test_sizes_in_the_tables_stay_on_one_line() -> None:
    held: list[torch.Tensor] = []

    def fill() -> None:
        for size in (2**28, 2**29, 2**30):
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))

    html = mx.post_mortem(mx.simulate(fill, gpu="1GiB"))._repr_html_()
    cells = re.findall(r'<td style="([^"]*)">([\d.]+ [KMG]iB)<', html)
    assert {"256 MiB", "512 MiB"} <= {size for _, size in cells}
    assert all("white-space:nowrap" in style for style, _ in cells)
