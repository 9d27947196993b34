"""What `nvidia-smi` prints for a virtual GPU, without the process."""

from __future__ import annotations

import dataclasses
import re

import pytest

from memexplore.hardware.nvidia_smi import State, answer

MIB = 1024**2
UNUSED = State("NVIDIA A100-SXM4-80GB", 81_920 * MIB, (8, 0), "0a1b2c", "13.0", 2, 77, "/usr/bin/python3")
USED = dataclasses.replace(UNUSED, used=5_120 * MIB)


def test_the_table_has_a_frame_of_one_width() -> None:
    text, status = answer([], USED)
    _date, *lines = text.splitlines()
    # 41, 24 and 22 characters in three columns, and four lines between and beside them
    assert {len(line) for line in lines if line} == {91}
    assert all(line[0] in "|+" and line[-1] in "|+" for line in lines if line)
    assert re.findall(r"(\d+)MiB / +(\d+)MiB", text) == [("5120", "81920")] * 2
    assert status == 0


def test_a_process_is_listed_when_it_has_memory() -> None:
    assert "No running processes found" in answer([], UNUSED)[0]
    assert "No running processes found" not in answer([], USED)[0]
    assert answer(["--query-compute-apps=pid", "--format=csv"], UNUSED)[0] == "pid\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("-L", "GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-0a1b2c)\nGPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-0a1b2d)\n"),
        ("-L -i 1", "GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-0a1b2d)\n"),
        ("--query-gpu=index,memory.free --format=csv", "index, memory.free [MiB]\n0, 76800 MiB\n1, 76800 MiB\n"),
        ("--query-gpu memory.used --format csv,noheader,nounits --id=0", "5120\n"),
        ("--query-gpu=gpu_uuid,utilization.gpu --format=csv -i 0", "uuid, utilization.gpu [%]\nGPU-0a1b2c, [N/A]\n"),
        ("--query-gpu=power.draw,temperature.gpu --format=csv,noheader,nounits -i GPU-0a1b2d", "[N/A], [N/A]\n"),
        ("--query-gpu=driver_version,compute_cap --format=csv,noheader -i 0", "580.65.06, 8.0\n"),
        (
            "--query-compute-apps=pid,name,used_memory --format=csv,nounits -i 0",
            "pid, process_name, used_gpu_memory [MiB]\n77, /usr/bin/python3, 5120\n",
        ),
    ],
)  # fmt: skip
def test_answer_is_that_of_nvidia_smi(arguments: str, text: str) -> None:
    assert answer(arguments.split(), USED) == (text, 0)


@pytest.mark.parametrize(
    ("arguments", "text", "status"),
    [
        ("-i 2", "No devices were found", 6),
        ("--query-gpu=name", '"--format=" switch is missing', 2),
        ("topo -m", "it has the table, -L, --query-gpu and --query-compute-apps", 2),
    ],
)
def test_what_it_cannot_answer_has_a_sentence_and_a_status(arguments: str, text: str, status: int) -> None:
    printed, code = answer(arguments.split(), USED)
    assert text in printed
    assert code == status


def test_no_gpu_is_found_when_none_is_on() -> None:
    assert answer([], None) == ("No devices were found\n", 6)
