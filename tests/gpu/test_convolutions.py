"""The script that measures cuDNN's workspaces, with a virtual GPU in the place of the real one."""

from __future__ import annotations

import subprocess
import sys

import pytest

import memexplore as mx
from memexplore.virtual_gpu.kernels.tensor_core_convolutions import HOPPER, Pass, possible_workspaces
from tests.gpu.convolutions import Case, chosen, workspaces

CASES = chosen(HOPPER, 24)


def test_cases_are_of_all_kinds_and_their_assumptions_differ() -> None:
    assert len(CASES) == 24
    assert len({(case.precision, case.channels_last) for case in CASES}) == 6
    for case in CASES:
        assert any(len(set(possible_workspaces(case.convolution(), of))) > 1 for of in Pass)


def _on_virtual_gpu(case: Case) -> list[int]:
    found: list[int] = []
    mx.simulate(lambda: found.extend(workspaces(case)), gpu="H100", release="2.11")
    return found


@pytest.mark.parametrize("case", CASES[::4], ids=str)
def test_what_is_measured_is_the_workspace(case: Case) -> None:
    assert _on_virtual_gpu(case) == [possible_workspaces(case.convolution(), of)[0] for of in Pass]


def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.gpu.convolutions"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "This measures a GPU, and torch sees none.\n")
