"""A short run of the fuzzer of changed files; `python -m tests.fuzz --kind files` runs it for long."""

from __future__ import annotations

import os

import pytest

from memexplore.virtual_gpu.files.overlay import Overlay
from tests.fuzz import files


def test_a_program_sees_its_changes_and_the_users_files_stay() -> None:
    assert {files.check(number) for number in range(150)} == {"run", "notebook"}


def test_a_change_of_the_users_files_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Overlay, "diverts", lambda overlay, logical: False)
    with pytest.raises(AssertionError, match="lost by"):
        list(map(files.check, range(20)))


def test_the_working_folder_stays() -> None:
    before = os.getcwd()
    files.check(0)
    assert os.getcwd() == before
