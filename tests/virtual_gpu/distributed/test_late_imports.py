"""Patches of modules that are imported while the virtual GPU is on."""

from __future__ import annotations

import importlib
import sys

from memexplore.virtual_gpu.distributed import patches


def test_a_function_is_called_when_its_module_has_run(tmp_path, monkeypatch):
    (tmp_path / "imported_late.py").write_text("value = 1")
    (tmp_path / "imported_too.py").write_text("value = 2")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    before = list(sys.meta_path)
    patch = patches.after_import({"imported_late": lambda: seen.append(sys.modules["imported_late"].value)})
    undo = patch.undo()
    patch.install()
    try:
        importlib.import_module("imported_too")
        assert seen == []
        module = importlib.import_module("imported_late")
        assert seen == [1]
    finally:
        undo()
    importlib.reload(module)
    assert seen == [1]
    assert sys.meta_path == before
