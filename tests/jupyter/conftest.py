"""Fixtures of the magics' tests: an IPython shell, and the explorers that it displays."""

from __future__ import annotations

import gc
import pathlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from memexplore.jupyter import memoom, profile
from memexplore.virtual_gpu.tensors.live_storages import live_storages
from tests import python_programs
from tests.jupyter.magics_shell import Shell


@pytest.fixture
def forked_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Kernels named python3 are forked from a process that has imported torch."""
    if python_programs.IS_SUPPORTED:
        python_programs.specify_kernel(tmp_path / "kernels")
        monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[Shell]:
    """A shell with the extension loaded."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    InteractiveShell.clear_instance()
    config = Config({"HistoryManager": {"enabled": False}, "InteractiveShell": {"colors": "nocolor"}})
    shell = Shell(InteractiveShell.instance(config=config))
    monkeypatch.setattr(profile, "show_view", shell.shown.append)
    shell.shell.user_ns["torch"] = torch
    shell.run("%load_ext memexplore")
    yield shell
    shell.run("%unload_ext memexplore")
    with mock.patch("gc.collect"):  # of all objects, which takes a quarter of a second
        shell.shell.reset()
    InteractiveShell.clear_instance()
    # A traceback keeps its frames and their tensors, which the next virtual GPU would count.
    for name in ("last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)
    if live_storages:
        gc.collect()


@pytest.fixture
def explored(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The explorers that profiles display."""
    seen: list[Any] = []
    monkeypatch.setattr(profile, "display", seen.append)
    return seen


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The post-mortems, and what would have fitted, that `%memoom` displays."""
    seen: list[Any] = []
    monkeypatch.setattr(memoom, "display", seen.append)
    return seen
