"""Every snippet in the README and in docs/ runs, in the order of its page."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests import python_programs
from tests.documents import PAGES, REPOSITORY, Kind, blocks_of, languages_of

WITH_CODE = [page for page in PAGES if any(True for _ in blocks_of(page))]


def names(page: pathlib.Path) -> str:
    return page.name


@pytest.mark.parametrize("page", WITH_CODE, ids=names)
def test_snippets_run(page: pathlib.Path, tmp_path: pathlib.Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    blocks = list(blocks_of(page))
    for block in blocks:
        if block.kind is Kind.FILE:
            (tmp_path / block.name).write_text(block.code)
    cells = [(block.line, block.code) for block in blocks if block.kind is Kind.CELL]
    (tmp_path / "cells.json").write_text(json.dumps(cells))
    words = python_programs.command("tests.run_cells", "cells.json")
    ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:] + ended.stdout[-1000:]
    for block in blocks:
        if block.kind is Kind.SHELL:
            words = ["bash", "-euo", "pipefail", "-c", block.code]
            ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
            assert ended.returncode == 0, f"line {block.line}: {ended.stderr[-3000:]}"


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_every_block_names_its_language(page: pathlib.Path) -> None:
    assert "" not in languages_of(page)
