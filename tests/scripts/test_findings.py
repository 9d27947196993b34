"""Small programs that once came out wrong: each runs by the command and gives what a real GPU, or the CPU, gives."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.data.make import COLLECTION
from tests.needs import HAS_COMPILER
from tests.test_cli import memexplore

PROGRAMS = COLLECTION / "programs"
pytestmark = pytest.mark.skipif(
    not COLLECTION.is_dir() and not os.environ.get("CI"), reason="the collection is not beside this checkout"
)


class Result(NamedTuple):
    """What the report of a program says; the texts are parts of what it prints, of its error and of its notes."""

    printed: tuple[str, ...] = ()
    error: str = ""
    note: str = ""
    peak: int | None = None


MIB = 1024**2
RESULTS = {
    "compiled_extension": Result(error="twice of the compiled extension twice_cpp reads the memory of a tensor"),
    "copy_number": Result(("tensor(5, device='cuda:0', dtype=torch.int32)",)),
    "cpu_offload": Result(("torch.Size([4, 8])",)),
    "default_tensor_type": Result(("cuda:0 cuda:0", "torch.Size([4, 2])")),
    "gather_object_sizes": Result(("peak above start: 2560 B, torch 2.11: 2560 B",)),
    "inference_mode_to": Result(("module.to(device, dtype)          cuda:0",)),
    # The flash kernel, with no mask.
    "mask_of_ones_causal": Result(("MASK None\nMASK None",)),
    "memory_timeline": Result(("True True True",)),
    # One token with 2 choices, 4 with 8, 16 with 32.
    "moe_decoding": Result(
        ("1 tokens: 2 of 32 experts ran", "4 tokens: 8 of 32 experts ran", "16 tokens: 32 of 32 experts ran"),
        note="what unknown scores choose, such as experts, tokens or classes, is spread evenly",
    ),
    "nvidia_smi": Result(("NVIDIA-SMI", "Tesla T4")),
    "pinned": Result(("pinned True True", "loader True")),
    # 20 tensors of 32 MiB in pages of 2 MiB, of which 10 leave gaps; 6 of 46 MiB more, of which the last gap has 36.
    "settings_in_script": Result(("reserved 880.0",)),
    "unknown_bool": Result(("A gpu int  0 of 8",), note="unknown_bool.py:8"),
    "unknown_index": Result(("10",)),
    "rough/closes_its_stdout": Result(peak=4 * MIB),
    "rough/deepcopy_of_a_parameter_that_is_a_view": Result(("4096",)),
    "rough/ends_by_os_exit": Result(peak=4 * MIB),
    "rough/error_that_the_script_catches": Result(("caught",)),
    "rough/float32_into_float16_model": Result(error="mat1 and mat2 must have the same dtype, but got Float and Half"),
    "rough/forked_child_ends_by_sys_exit": Result(peak=8 * MIB),
    "rough/layer_norm_of_another_size": Result(
        error="Given normalized_shape=[64], expected input with shape [*, 64], but got input of size[8, 96]"
    ),
    "rough/save_and_load_a_row": Result((str(4 * MIB),)),
    "rough/thread_that_outlives_the_script": Result(("worker torch.Size([268435456])",), peak=1024 * MIB),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_program_gives_what_a_gpu_gives(name: str, tmp_path: Path) -> None:
    if name == "compiled_extension" and not HAS_COMPILER:
        pytest.skip("no compiler")
    expected = RESULTS[name]
    done = memexplore("run", PROGRAMS / f"{name}.py", "--gpu", "T4", "--json", cwd=tmp_path)
    printed, _, report = done.stdout.rpartition("\n{\n")
    if not report.startswith("{"):
        report = "{\n" + report
    summary = json.loads(report)
    for text in expected.printed:
        assert text in printed + done.stderr
    error = summary["error"] or ""
    assert expected.error in error
    assert bool(expected.error) == bool(error)
    assert expected.note in "\n".join(summary["notes"])
    assert expected.peak in (None, summary["peak_allocated"])
