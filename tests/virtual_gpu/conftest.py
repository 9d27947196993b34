"""Files of a user, which a program on a virtual GPU must not change."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A working folder with a real checkpoint, a real array and a text file, which must not change."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").mkdir()
    torch.save({"w": torch.arange(3.0), "epoch": 7}, "best.pt")
    torch.save({"w": torch.arange(4.0)}, "old/model.pt")
    pathlib.Path("old/state.json").write_text("{}")
    np.save("array.npy", np.arange(5))
    before = _contents(tmp_path)
    yield tmp_path
    assert {name: found for name, found in _contents(tmp_path).items() if name in before} == before


def _contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
