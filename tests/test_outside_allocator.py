"""Memory outside the allocator: readings by GPU and torch release, and estimates for a GPU without a reading."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import memexplore as mx
from memexplore.hardware import catalogue
from memexplore.hardware.catalogue import find
from memexplore.hardware.outside_allocator import (
    KERNEL_MIB,
    READINGS,
    Library,
    Loading,
    Reading,
    Workload,
    bytes_outside,
    context_mib,
    most_reserved,
    nccl_bytes,
)
from memexplore.run.machine import machine_of
from memexplore.tape import Communicator

MIB = 1024**2
GPUS = {gpu.key: gpu for gpu in catalogue._CATALOGUE}
CUDA_READINGS = [reading for reading in READINGS if not GPUS[reading.gpu].name.startswith("AMD")]
RELEASES = ("2.11", "2.12", "2.13", "2.14", "2.15")


def outside(key: str, release: str | None = None):
    return bytes_outside(key, GPUS[key].compute_capability, GPUS[key].multiprocessors, release)


def beyond_context(reading: Reading) -> float:
    gpu = GPUS[reading.gpu]
    return reading.mib - context_mib(gpu.compute_capability, gpu.multiprocessors)


def reading_id(reading: Reading) -> str:
    return f"{reading.gpu} {reading.release} {reading.mib:.0f}"


@pytest.mark.parametrize("reading", READINGS, ids=reading_id)
def test_reading_has_a_gpu_of_the_catalogue_and_a_source(reading):
    assert reading.gpu in GPUS
    assert reading.source


def test_t4_readings_of_two_releases_are_equal():
    # 140.875 MiB = 147 718 144 bytes.
    assert outside("T4", "2.10").bytes == outside("T4", "2.14").bytes == 147_718_144


def test_out_of_memory_text_is_in_use_minus_allocated_minus_unallocated():
    # 22.01 GiB - 21.62 GiB - 135.82 MiB: 22538.24 - 22138.88 - 135.82 = 263.54 MiB, rounded.
    assert outside("L4", "2.11").bytes == 264 * MIB


@pytest.mark.parametrize(("key", "mib"), [("RTX 4090", 471), ("RTX PRO 6000", 655)])
def test_gpus_of_the_published_peaks_for_their_release(key, mib):
    assert outside(key, "2.11").bytes == mib * MIB


def test_release_without_a_reading_uses_the_nearest():
    # The T4 has readings of 2.10, 2.11 and 2.14: the nearest to 2.12 is 2.11, to 2.13 and 2.15 it is 2.14.
    assert [outside("T4", release).bytes for release in ("2.12", "2.13", "2.15")] == [
        outside("T4", release).bytes for release in ("2.11", "2.14", "2.14")
    ]


def test_default_is_the_newest_reading():
    assert outside("T4").bytes == outside("T4", "2.14").bytes


def test_training_is_preferred_to_forward_of_a_nearer_release():
    # Forward passes with 2.6 held 22.80 GiB - 22.10 GiB - 222.14 MiB = 495 MiB; the only training is with 2.11.
    assert outside("RTX 4090", "2.6").bytes == 471 * MIB
    assert outside("RTX 4090", "2.6").high >= 495 * MIB


@pytest.mark.parametrize("release", [None, *RELEASES])
def test_every_value_is_within_its_range(release):
    for key in GPUS:
        result = outside(key, release)
        assert 0 < result.low <= result.bytes <= result.high, key
        assert result.source.startswith("estimate") == result.estimated, key


def test_estimate_is_context_plus_kernels_of_the_compute_capability():
    # RTX 3070: 46 multiprocessors of 1536 threads of 1.874 KiB are 129.3 MiB, plus 27 are 156.3 MiB of context; kernels
    # take 52 MiB on other GPUs of compute capability 8.6.
    assert outside("RTX 3070").estimated
    assert outside("RTX 3070").bytes / MIB == pytest.approx(27 + 46 * 1536 * 1.874 / 1024 + 52, abs=1e-6)


def test_estimate_uses_a_reading_of_the_context():
    # RTX 6000 Ada: 426 MiB before any computation; kernels take 69 to 90 MiB, median 84.
    result = outside("RTX 6000 Ada")
    assert (result.low, result.bytes, result.high) == ((426 - 1 + 69) * MIB, (426 + 84) * MIB, (426 + 1 + 90) * MIB)


@pytest.mark.parametrize(
    ("libraries", "measured"),
    [
        ((), 920),  # a first tensor with torch 1.13 (stas00/ml-engineering)
        ((), 940),  # with torch 2.1
        ((Library.CUBLAS,), 1429),  # perceptrons and transformers (itu-rad/GPUMemNet)
        ((Library.CUBLAS,), 1464),  # BERT
        ((Library.CUBLAS, Library.CUDNN), 1679),  # networks of convolutions
        ((Library.CUBLAS, Library.CUDNN), 1719),  # with batch norm
    ],
)
def test_eager_loading_takes_what_a100s_have_taken(libraries, measured):
    held = bytes_outside("A100 40GB", (8, 0), 108, "2.4", Loading.EAGER, frozenset(libraries))
    assert held.low <= measured * MIB <= held.high
    assert held.high - held.low <= 200 * MIB


def test_what_eager_loading_takes_without_knowing_the_libraries_contains_all_of_them():
    unknown = bytes_outside("A100 40GB", (8, 0), 108, "2.4", Loading.EAGER)
    none, every = (
        bytes_outside("A100 40GB", (8, 0), 108, "2.4", Loading.EAGER, libraries)
        for libraries in (frozenset(), frozenset(Library))
    )
    assert unknown.low == none.low
    assert (unknown.bytes, unknown.high) == (every.bytes, every.high)


@pytest.mark.parametrize("key", [key for key in GPUS if not key.startswith("MI")])
def test_eager_loading_takes_more_than_lazy_loading(key):
    gpu = GPUS[key]
    assert gpu.loaded(Loading.EAGER).outside > gpu.outside
    assert gpu.loaded(Loading.EAGER).loaded(Loading.LAZY) == gpu.for_release(None)


def test_a_driver_decides_how_kernels_are_loaded():
    # R515 is the first that can load them lazily (CUDA programming guide).
    assert find("A100").with_driver("510.47.03").loading is Loading.EAGER
    assert find("A100").with_driver("515.43.04").loading is Loading.LAZY
    with pytest.raises(ValueError, match=r"'12.4' is not a driver version; write one such as 570.86"):
        find("A100").with_driver("12.4")


def test_the_variable_of_cuda_decides_too(monkeypatch):
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    assert machine_of("A100").capacity < find("A100").capacity - (1 << 30)
    tape = mx.simulate(lambda: torch.ones(1, device="cuda"), gpu=machine_of("A100").gpu)
    assert tape.meta.versions["module loading"] == "EAGER"
    assert find("A100").under(tape.meta.versions).capacity == tape.meta.capacity


def test_text_that_is_no_release_raises():
    with pytest.raises(ValueError, match=r"not a torch release; write one such as 2\.11"):
        outside("T4", "new")


# --- facts about the readings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reading", [reading for reading in READINGS if reading.workload is Workload.CONTEXT], ids=reading_id
)
def test_contexts_are_within_8_per_cent_of_the_line(reading):
    gpu = GPUS[reading.gpu]
    line = context_mib(gpu.compute_capability, gpu.multiprocessors)
    assert abs(reading.mib - line) <= 0.08 * line + reading.tolerance


@pytest.mark.parametrize(
    "reading", [reading for reading in CUDA_READINGS if reading.workload is not Workload.CONTEXT], ids=reading_id
)
def test_processes_that_computed_hold_more_than_a_context(reading):
    assert beyond_context(reading) > 0


@pytest.mark.parametrize("capability", KERNEL_MIB, ids=str)
def test_kernel_mib_agrees_with_the_readings(capability):
    kernels = []
    for key, gpu in GPUS.items():
        of_gpu = [reading for reading in CUDA_READINGS if reading.gpu == key and gpu.compute_capability == capability]
        training = [reading for reading in of_gpu if reading.workload is Workload.TRAINING]
        forward = [reading for reading in of_gpu if reading.workload is Workload.FORWARD]
        kernels += [beyond_context(reading) for reading in training or forward]
    assert KERNEL_MIB[capability] == pytest.approx((min(kernels), statistics.median(kernels), max(kernels)), abs=1)


def test_readings_of_one_gpu_overlap_for_all_releases():
    # RTX 4090: 459, 471, 476, 483 and 495 MiB with 2.2 to 2.9, 2.6, 2.11 and later, each +-15 MiB.
    readings = [
        reading for reading in READINGS if reading.gpu == "RTX 4090" and reading.workload is not Workload.CONTEXT
    ]
    assert len({reading.release for reading in readings}) >= 4
    middle = statistics.median(reading.mib for reading in readings)
    assert all(abs(reading.mib - middle) <= 20 for reading in readings)


# --- memory that runs have reserved ----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [key for key, gpu in GPUS.items() if most_reserved(key, gpu.total)])
def test_no_run_has_reserved_more_than_the_capacity(key):
    most = most_reserved(key, GPUS[key].total)
    for release in (None, *RELEASES):
        assert GPUS[key].for_release(release).capacity >= most.bytes, most.source


def test_capacity_of_the_l40s_is_at_least_what_a_published_run_reserved():
    # 45 599 MiB less 47 359 983 616 B are 433 MiB, less than the 514 MiB of an OutOfMemoryError text.
    gpu = GPUS["L40S"].for_release("2.12")
    assert gpu.capacity == 47_359_983_616
    assert gpu.outside == (45_599 - 45_166) * MIB < outside("L40S").bytes
    assert gpu.outside_range[0] <= gpu.outside
    assert gpu.sources.outside.startswith("the total less the 47,359,983,616 B reserved in a run")


def test_readings_under_older_drivers_and_of_loading_are_no_bound():
    # A T4 with 15.22 GiB in use had a driver that reports more than today's 14.56 GiB. On an RTX 5090 loading weights
    # reserved 30.81 GiB + 33.90 MiB, more than training leaves.
    assert most_reserved("T4", GPUS["T4"].total).bytes < 14.56 * 1024**3
    assert most_reserved("T4", 16 * 1024**3).bytes > 15 * 1024**3
    assert most_reserved("RTX 5090", GPUS["RTX 5090"].total).bytes < 30.8 * 1024**3


def test_amd_gpus_have_the_readings_of_one_of_them():
    # (191.98 - 191.53) GiB - 0.52 MiB = 460 MiB; a second reading, 191.69 - 186.02 - 4.89 GiB - 2 MiB, has 796 MiB.
    held = outside("MI300X")
    assert held.bytes / 1024**2 == pytest.approx(460, abs=1)
    assert held.high / 1024**2 == pytest.approx(796 + 15, abs=1)
    other = outside("MI355X")
    assert (other.bytes, other.estimated, held.estimated) == (held.bytes, True, False)
    assert other.source.startswith("estimate: as on the MI300X")


@given(st.integers(0, 30), st.integers(0, 30))
def test_estimate_does_not_depend_on_the_release(one, other):
    assert outside("RTX 3070", f"2.{one}") == outside("RTX 3070", f"2.{other}")


@given(st.integers(1, 200))
def test_context_grows_with_the_multiprocessors(count):
    assert context_mib((8, 9), count) < context_mib((8, 9), count + 1)


@pytest.mark.parametrize(
    ("groups", "low", "high"),
    [
        ([Communicator(2)], 544, 1638),  # 1.6 GB
        ([Communicator(8), Communicator(2)], 688, 2 * 1638),
        ([Communicator(8)] * 3, 688, 3 * 2048),  # about 6 GB
        ([Communicator(8, all_to_all=True)], 688, 1638 + 3359),  # 4.34 - 1.06 GB
        ([Communicator(1)], 0, 512),
    ],
)
def test_nccl_is_a_range_by_its_communicators(groups: list[Communicator], low: int, high: int) -> None:
    found = nccl_bytes(groups)
    assert found is not None
    assert (found.low, found.high) == (low * 2**20, high * 2**20)


def test_no_communicator_has_no_memory() -> None:
    assert nccl_bytes([]) is None
