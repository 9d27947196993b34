"""Answers to programs of public reports; the whole table is a command (`corpus`)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.out_of_memory.corpus import PROGRAMS, post_mortem, wrong

pytestmark = pytest.mark.skipif(
    not PROGRAMS.is_dir() and not os.environ.get("CI"), reason="the collection is not beside this checkout"
)


@pytest.mark.parametrize(
    "name",
    [
        "create_graph_on_leaf_gradients",
        "folds_kept_by_cycles",
        "parametrize_cache_stays_on",
        "predictions_concatenated",
        "state_not_detached",
    ],
)
def test_the_answer_to_a_public_report_is_right(name: str, tmp_path: Path) -> None:
    assert wrong(name, post_mortem(name, tmp_path)) == []
