"""Tell the memory outside the allocator in a training process (CUDA context, loaded kernels), by readings.

What the readings show:

- **The torch release has no effect.** A T4 held 140.875 MiB after training steps with torch 2.10 (CUDA 12.8) and with
  2.14 (CUDA 13.0), equal to the byte; RTX 4090s 0.45 to 0.48 GiB with 2.2 to 2.9, with 2.6, with 2.11 and later;
  RTX 5090s 0.49 GiB after loading weights with 2.9 or 2.10 and with 2.11 or later.
- **The workload has an effect.** CUDA loads a kernel at its first call: the T4 held 104.875 MiB before any computation,
  and after training convolutions, with one release, 0.15 or 0.20 GiB.
- **The context without kernels grows with the resident threads of the GPU**, on every architecture: `context_mib`.
- **Eager loading takes far more.** All kernels of a library are then loaded when it is first touched: an A100 held 479
  MiB after its first tensor, and 940 with ``CUDA_MODULE_LOADING=EAGER`` (torch 2.1, CUDA 12.1). PyTorch sets ``LAZY``
  itself since 1.13, but a driver before R515 cannot load lazily (CUDA programming guide): `loading_under`.

So `bytes_outside` takes a reading of the same GPU, of the requested release if available, else of the nearest. A GPU
without a reading gets an estimate: its context, plus the kernels of other GPUs of its compute capability.

Memory that a run has reserved is a reading too: the capacity of the GPU is at least that, and `bounded` lowers the
bytes outside where they would leave less. Only the L40S needs it. Drivers report between 45 457 and 45 599 MiB for it;
the run that reserved 45 166 MiB had one that reports the most, and few kernels loaded.

NCCL's buffers are a range by its communicators (`nccl_bytes`), which no peak contains: they depend on the links between
the GPUs, and on channels and protocols that NCCL chooses when it runs.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

_MIB = 1024**2
_NEWEST = (99, 0)
_ROUNDING = 0.005
"""GiB by which a size in an OutOfMemoryError text can be too large: it has hundredths."""


class Communicator(NamedTuple):
    """A group of processes that has communicated by NCCL."""

    size: int
    """Number of processes."""
    all_to_all: bool = False
    """Whether it has run an all-to-all, for which NCCL connects every pair of GPUs."""


class Workload(enum.Enum):
    """Work of a process before its reading."""

    CONTEXT = "nothing computed"
    FORWARD = "forward passes"
    """Also readings whose source does not name the workload."""
    TRAINING = "training"


class Loading(enum.StrEnum):
    """When CUDA loads the kernels of a library."""

    LAZY = "lazy"
    """Each at its first call."""
    EAGER = "eager"
    """All of them when the library is first touched."""


LOADING = "module loading"
"""Name among the versions of a tape of the value of ``CUDA_MODULE_LOADING``."""
_FIRST_LAZY_DRIVER = 515


def loading_under(driver: str) -> Loading:
    """Return how kernels are loaded under a driver: before R515 eagerly.

    >>> loading_under("470.82.01").value, loading_under("570.86").value
    ('eager', 'lazy')

    Raises ValueError for a text that is not the version of a driver.
    """
    match = re.match(r"(\d{3})(\.\d+)*$", driver)
    if match is None:
        raise ValueError(f"{driver!r} is not a driver version; write one such as 570.86, as nvidia-smi shows it")
    return Loading.EAGER if int(match[1]) < _FIRST_LAZY_DRIVER else Loading.LAZY


class Library(enum.StrEnum):
    """A library whose kernels a process loads beside those of PyTorch."""

    CUBLAS = "cuBLAS"
    CUDNN = "cuDNN"


class Held(NamedTuple):
    """MiB that a process held at the time of a reading."""

    outside: float
    reserved: float = 0
    """At least this much by the allocator; 0 if the source does not say."""


class Reading(NamedTuple):
    """Memory outside the allocator of one process on one GPU, read once."""

    gpu: str
    """Key of the catalogue entry."""
    release: str
    """torch release (`2.11`), releases that print the same text (`2.2-2.9`, `2.11+`), or empty if unknown."""
    cuda: str
    """CUDA toolkit of the torch build, empty if unknown."""
    held: Held
    workload: Workload
    source: str
    tolerance: float = 15
    """Error bound in MiB; most sources print hundredths of a GiB."""

    @property
    def mib(self) -> float:
        """MiB outside the allocator."""
        return self.held.outside


class Reserved(NamedTuple):
    """Bytes that the allocator reserved in a run: at least this is the capacity of the GPU."""

    gpu: str
    """Key of the catalogue entry."""
    bytes: int
    source: str


class BytesOutside(NamedTuple):
    """Bytes outside the allocator, with the range over workloads."""

    bytes: int
    low: int
    high: int
    estimated: bool
    """Whether no training or forward pass on this GPU was read."""
    source: str


class NcclBytes(NamedTuple):
    """Range of the bytes that NCCL holds on one GPU, outside the allocator."""

    low: int
    high: int
    source: str


def _text(in_use: float, allocated: float, unallocated: float) -> Held:
    """Return what an OutOfMemoryError text says in GiB: in use by the process, allocated, reserved but unallocated."""
    return Held(round((in_use - allocated - unallocated) * 1024), (allocated - _ROUNDING + unallocated) * 1024)


_CONTEXT, _FORWARD, _TRAINING = Workload.CONTEXT, Workload.FORWARD, Workload.TRAINING
# The wording of the text shows the release: until 2.1 it suggests max_split_size_mb, from 2.2 expandable_segments, just
# before 2.11 in PYTORCH_ALLOC_CONF, from 2.11 it links to docs.pytorch.org (pytorch/pytorch, pull request 172327).
_OOM = "an OutOfMemoryError text: "
_FITCHECK = "total - free - reserved (github Anassbzdd/fitcheck, data/measurements)"
_YOLO = "the log of a YOLO training run on Colab: "
_LINYUN = "OutOfMemoryError texts of a CS336 language model (github LINYUNLinYun/CS336-assignment2-systems): "
_SEEN = "OutOfMemoryError texts: "

# fmt: off
READINGS: tuple[Reading, ...] = (
    # Pascal to Turing
    Reading("P100", "2.1", "", _text(15.82, 15.36, 168.02 / 1024), _TRAINING,
            _OOM + "a 15.89 GiB GPU (github andimarafioti/florence2-finetuning, issue 17)"),
    Reading("V100 16GB", "2.2-2.9", "", _text(15.75, 14.89, 497.13 / 1024), _TRAINING,
            _OOM + "a vision transformer with autocast on a 15.77 GiB GPU"),
    Reading("V100 32GB", "2.2-2.9", "", _text(31.54, 28.49, 2.68), _TRAINING, _OOM + "backward on a 31.73 GiB GPU"),
    Reading("V100 32GB", "2.2-2.9", "", _text(13.60, 13.07, 162.31 / 1024), _TRAINING,
            _OOM + "training of a capsule network on a 31.73 GiB GPU"),
    Reading("V100 32GB", "2.2-2.9", "", _text(31.72, 29.66, 1.68), _FORWARD, _OOM + "relu on a 31.73 GiB GPU"),
    Reading("V100 32GB", "2.2-2.9", "", _text(7.31, 7.00, 12 / 1024), _CONTEXT,
            _OOM + "KernelBench on a Tesla V100-SXM2-32GB"),
    Reading("T4", "2.14", "13.0", Held(140.875), _TRAINING, _FITCHECK, tolerance=0),
    Reading("T4", "2.10", "12.8", Held(140.875), _TRAINING, _FITCHECK, tolerance=0),
    Reading("T4", "2.11", "12.8", _text(14.54, 13.90, 504.07 / 1024), _TRAINING, _YOLO + "yolo26s at 960 pixels"),
    Reading("T4", "2.11", "12.8", _text(14.56, 13.86, 511.64 / 1024), _TRAINING,
            _YOLO + "yolo26s at 960 pixels after another model"),
    Reading("T4", "2.9-2.10", "", _text(13.75, 13.44, 153.73 / 1024), _TRAINING, _OOM + "unsloth on Kaggle"),
    Reading("T4", "2.8", "12.8", _text(15.22, 15.08, 19.46 / 1024), _FORWARD, _OOM + "fish-speech, first forward"),
    Reading("T4", "2.1", "", _text(14.54, 14.38, 30.60 / 1024), _FORWARD, _OOM + "attention on a 14.58 GiB GPU"),
    Reading("RTX 2080 Ti", "2.2+", "", _text(9.01, 8.76, 65.22 / 1024), _TRAINING,
            _OOM + "a CS336 language model on a 10.57 GiB GPU"),
    Reading("T4", "2.1", "", _text(13.94, 13.20, 621.20 / 1024), _TRAINING,
            _OOM + "a convolutional LSTM (github tsugumi-sys/SA-ConvLSTM-Pytorch, issue 22)"),
    Reading("T4", "2.1", "", _text(14.52, 14.06, 330.42 / 1024), _TRAINING,
            _OOM + "a detector (github FoundationVision/GenerateU, issue 10)"),
    Reading("T4", "2.1", "", _text(14.27, 14.14, 14.04 / 1024), _TRAINING,
            _OOM + "Fourier transforms (github Loli-Eternally/D2NN-with-Pytorch, issue 2)"),
    Reading("T4", "2.10", "12.8", Held(104.875), _CONTEXT, _FITCHECK, tolerance=0),
    # Ampere
    Reading("A100 40GB", "2.11+", "", _text(39.31, 38.33, 499.39 / 1024), _TRAINING,
            _OOM + "cross-attention in training, a 39.49 GiB GPU, August 2026"),
    Reading("A100 80GB", "2.11+", "", _text(79.23, 78.42, 336.78 / 1024), _TRAINING,
            _OOM + "a CS336 language model on a 79.25 GiB GPU"),
    Reading("A100 40GB", "2.5-2.10", "", _text(14.25, 12.87, 912.01 / 1024), _FORWARD,
            _OOM + "diffusion (github TianheWu/CoSeR, issue 10)"),
    Reading("A100 80GB", "2.1", "", Held(481), _FORWARD, "0.47 GiB with lazy loading (github stas00/ml-engineering)"),
    Reading("RTX 3080", "", "", Held(266), _FORWARD, _SEEN + "0.26, 0.26, 0.26, 0.21 GiB on 9.64 GiB GPUs"),
    Reading("RTX 3090", "2.2-2.10", "", _text(17.29, 15.78, 1.21), _TRAINING, _OOM + "backward on a 23.56 GiB GPU"),
    Reading("RTX 3090", "2.2-2.9", "", _text(22.60, 19.46, 2.83), _FORWARD, _OOM + "inference on a 23.56 GiB GPU"),
    Reading("RTX 3090", "2.2-2.9", "", _text(6.62, 5.45, 836.77 / 1024), _FORWARD,
            _OOM + "inference on a 23.56 GiB GPU"),
    Reading("RTX A6000", "2.2+", "", _text(47.34, 45.65, 1.37), _TRAINING,
            _OOM + "first forward of training on a 47.40 GiB GPU, September 2026"),
    Reading("RTX A6000", "2.2-2.9", "", _text(43.59, 38.33, 4.95), _FORWARD, _OOM + "a GRU on a 47.53 GiB GPU"),
    Reading("RTX A6000", "", "", Held(307), _FORWARD, _SEEN + "0.29, 0.30, 0.30, 0.31 GiB on 47.53 GiB GPUs"),
    Reading("A10", "2.2-2.9", "", _text(22.03, 20.51, 1.22), _FORWARD,
            _OOM + "inference on the GPU that Modal gives for A10 and A10G, 22.06 GiB"),
    Reading("A10", "2.1", "", _text(21.87, 21.65, 1.49 / 1024), _CONTEXT, _OOM + "loading, a 21.99 GiB GPU"),
    Reading("A10G", "", "", _text(21.25, 21.00, 0), _CONTEXT, _OOM + "blocks of 1 GiB on a 22.06 GiB GPU"),
    Reading("RTX A4000", "2.2-2.10", "", _text(15.51, 15.01, 301.92 / 1024), _FORWARD,
            _OOM + "reconstruction (github DengKaiCQ/VGGT-Long, issue 6)"),
    Reading("A40", "", "", Held(317), _FORWARD, _SEEN + "0.31 GiB on a 44.42 GiB GPU"),
    # Ada
    Reading("RTX 4070", "", "", Held(246), _FORWARD, _SEEN + "0.24 GiB"),
    Reading("RTX 4090", "2.11", "", Held(471), _TRAINING, _LINYUN + "0.46 GiB", tolerance=5),
    Reading("RTX 4090", "2.11+", "", _text(23.37, 22.53, 376.96 / 1024), _FORWARD, _OOM + "quantizing, July 2026"),
    Reading("RTX 4090", "2.6", "12.1", _text(22.80, 22.10, 222.14 / 1024), _FORWARD,
            _OOM + "generation (github pytorch/torchchat, issue 1341)"),
    Reading("RTX 4090", "2.2-2.9", "", _text(22.14, 21.66, 15.86 / 1024), _FORWARD, _OOM + "batch_norm"),
    Reading("RTX 4090", "2.2-2.9", "", _text(22.90, 21.91, 554.26 / 1024), _FORWARD, _OOM + "attention"),
    Reading("RTX 4090", "2.10", "12.8", Held(386), _CONTEXT,
            _OOM + "github Project-MONAI/MONAI, issue 8735", tolerance=1),
    Reading("RTX 6000 Ada", "2.10", "13.0", Held(426), _CONTEXT,
            "nvidia-smi after mem_get_info (github unslothai/unsloth-zoo, pull request 1053)", tolerance=1),
    Reading("L4", "2.11", "12.8", _text(22.01, 21.62, 135.82 / 1024), _TRAINING, _YOLO + "yolo11s-seg"),
    Reading("L4", "", "", _text(21.96, 21.65, 66.83 / 1024), _FORWARD, _OOM + "a solver on a 22.03 GiB GPU"),
    Reading("L4", "", "", _text(21.96, 21.69, 65.15 / 1024), _CONTEXT, _OOM + "loading on a 22.03 GiB GPU"),
    Reading("L40S", "2.2-2.9", "", _text(44.37, 43.42, 458.52 / 1024), _FORWARD, _OOM + "an export, 44.40 GiB GPU"),
    Reading("L40S", "2.2-2.9", "", _text(17.52, 17.03, 6.95 / 1024), _FORWARD, _OOM + "inference, 44.40 GiB GPU"),
    Reading("L40S", "", "", Held(420), _CONTEXT, _SEEN + "0.41 GiB"),
    # Hopper
    Reading("H100 PCIe", "2.2-2.9", "", _text(79.13, 77.91, 648.28 / 1024), _TRAINING,
            _OOM + "training in float32, GPU named"),
    Reading("H100 SXM", "2.2-2.9", "", _text(61.32, 60.39, 268.86 / 1024), _FORWARD,
            _OOM + "scaled_dot_product_attention on a 79.18 GiB GPU"),
    Reading("H100 NVL", "2.2+", "", _text(92.94, 77.61, 14.58), _TRAINING,
            _OOM + "first batch of training, a 93.10 GiB GPU, August 2026"),
    Reading("H100 NVL", "2.2-2.9", "", _text(15.94, 15.16, 122.11 / 1024), _FORWARD, _OOM + "a 93.10 GiB GPU"),
    Reading("H200", "2.2-2.9", "", _text(139.75, 138.59, 508.12 / 1024), _FORWARD,
            _OOM + "inference on a 139.81 GiB GPU"),
    Reading("H200", "2.2-2.9", "", _text(139.60, 138.14, 824.86 / 1024), _FORWARD, _OOM + "a 139.72 GiB GPU"),
    Reading("H200", "2.11+", "", _text(139.20, 2.05, 136.64), _CONTEXT, _OOM + "loading on a 139.81 GiB GPU"),
    # Blackwell
    Reading("B200", "2.2+", "", _text(168.34, 167.64, 4.62 / 1024), _FORWARD,
            _OOM + "178.35 GiB GPU (github stas00/ml-engineering)"),
    Reading("RTX 5060 Ti 16GB", "2.2+", "12.8", Held(128), _CONTEXT, _OOM + "before loading, GPU named", tolerance=1),
    Reading("RTX 5080", "", "", Held(394), _FORWARD, _SEEN + "0.38, 0.39 GiB on 16 GB Blackwell GPUs"),
    Reading("RTX 5090", "2.2-2.9", "", _text(31.34, 30.74, 19.41 / 1024), _FORWARD,
            _OOM + "github Wan-Video/Wan2.1, issue 465"),
    Reading("RTX 5090", "2.2-2.9", "", _text(31.33, 27.89, 2.84), _FORWARD, _OOM + "inference on a 31.36 GiB GPU"),
    Reading("RTX 5090", "2.11+", "", _text(31.29, 30.80, 2.80 / 1024), _CONTEXT, _OOM + "loading for quantization"),
    Reading("RTX 5090", "2.9-2.10", "", _text(31.33, 30.81, 33.90 / 1024), _CONTEXT,
            _OOM + "loading for quantization"),
    Reading("RTX PRO 6000", "2.11", "", Held(655), _TRAINING, _LINYUN + "0.63 to 0.65 GiB", tolerance=10),
    # AMD
    Reading("MI300X", "2.2+", "", _text(191.98, 191.53, 0.52 / 1024), _FORWARD, _OOM + "generation with transformers"),
    Reading("MI300X", "2.2+", "", _text(191.69 - 186.02, 4.89, 2.25 / 1024), _FORWARD,
            _OOM + "KernelBench on a 191.69 GiB GPU"),
)
# fmt: on

RESERVED: tuple[Reserved, ...] = (
    Reserved("L40S", 47_359_983_616, "max_memory_reserved of a published run with torch 2.12, CUDA 13.0"),
)
"""Largest published reserved memory, of runs whose memory outside the allocator is not known; see `most_reserved`."""

_AMD_WITH_READING = "MI300X"
"""The AMD GPU whose readings stand for all AMD GPUs: the line of CUDA contexts does not apply to ROCm."""

RESIDENT_THREADS = {
    **dict.fromkeys([(3, 7), (5, 2), (6, 0), (6, 1), (7, 0), (8, 0), (9, 0), (10, 0), (10, 3)], 2048),
    (7, 5): 1024,
}
"""Maximum resident threads per multiprocessor by compute capability, 1536 if missing (CUDA programming guide)."""

KERNEL_MIB: dict[tuple[int, int], tuple[int, int, int]] = {
    (6, 0): (66, 66, 66),
    (7, 0): (52, 53, 57),
    (7, 5): (17, 39, 103),
    (8, 0): (61, 66, 72),
    (8, 6): (48, 52, 78),
    (8, 9): (69, 84, 90),
    (9, 0): (147, 158, 246),
    (10, 0): (130, 130, 130),
    (12, 0): (90, 104, 131),
}
"""MiB beyond `context_mib` by compute capability: lowest, median and highest reading of training, else of forward."""

_CONTEXT_LINE = 27, 1.874
"""MiB, and KiB per resident thread: the line through RTX 5060 Ti (128), RTX 4090 (386) and RTX 6000 Ada (426 MiB)."""
_CONTEXT_ERROR = 0.08
"""Largest relative deviation of the other readings from that line."""


def context_mib(capability: tuple[int, int], multiprocessors: int) -> float:
    """Return the MiB of a CUDA context without kernels: 27 MiB + 1.874 KiB per resident thread, within 8 %.

    The driver keeps local memory for each thread that can be resident. The line goes through three GPUs whose context
    was read to the MiB; the other readings deviate by up to 8 %.

    >>> round(context_mib((8, 9), 128))  # an RTX 4090, where 386 MiB were read
    387
    """
    base, kib_per_thread = _CONTEXT_LINE
    return base + kib_per_thread * multiprocessors * RESIDENT_THREADS.get(capability, 1536) / 1024


EAGER_MIB = {Library.CUBLAS: 499, Library.CUDNN: 270}
"""MiB of a library's kernels, all of them, on an A100 with CUDA 11.8 or 12: nvidia-smi's readings of perceptrons (1 429
MiB outside the allocator) and of convolutional networks (1 679, with batch norm 1 719; itu-rad/GPUMemNet, 2024), less
`_EAGER_TORCH` and the context."""
_EAGER_TORCH = 498
"""MiB of PyTorch's own kernels on an A100: 920 and 940 MiB after the first tensor with torch 1.13 and 2.1, less the
context of 432 (stas00/ml-engineering, training/performance)."""
_EAGER_SHARES = {(6, 0): 0.4, (6, 1): 0.4, (7, 0): 0.75, (7, 5): 0.7, (8, 0): 1.0}
"""Size of these kernels as a share of those for an A100, as they were with CUDA 11.0 to 11.6; 1 for later ones."""
_EAGER_ERROR, _EAGER_ERROR_ELSEWHERE = 40, 0.25
"""MiB by which readings of A100s differ, such as 35 more for BERT; share of the kernels on other GPUs."""


@functools.lru_cache(maxsize=512)
def bytes_outside(
    gpu: str,
    capability: tuple[int, int],
    multiprocessors: int,
    release: str | None = None,
    loading: Loading = Loading.LAZY,
    libraries: frozenset[Library] | None = None,
) -> BytesOutside:
    """Return the bytes outside the allocator in a training process on a GPU of the catalogue, with their range.

    `gpu` is the key of the entry, `release` a torch release such as ``2.11``, by default the newest with a reading.
    Readings of training are preferred to forward passes, then readings of a nearer release. `libraries` are those that
    the process has touched, None if that is not known: it matters for eager loading.

    >>> a100 = "A100 40GB", (8, 0), 108
    >>> [round(bytes_outside(*a100, loading=Loading.EAGER, libraries=frozenset(touched)).bytes / 1024**2)
    ...  for touched in ((), (Library.CUBLAS,), tuple(Library))]
    [930, 1429, 1699]

    >>> bytes_outside("T4", (7, 5), 40, "2.14").bytes / 1024**2
    140.875

    Raises ValueError for a text that is not a release.
    """
    if loading is Loading.EAGER and not gpu.startswith("MI"):
        return _eager(capability, multiprocessors, libraries)
    wanted = _NEWEST if release is None else _parse_release(release)
    of_gpu = [reading for reading in READINGS if reading.gpu == gpu]
    computing = [reading for reading in of_gpu if reading.workload is not Workload.CONTEXT]
    if gpu.startswith("MI") and not computing:
        held = bytes_outside(_AMD_WITH_READING, capability, multiprocessors, release)
        return held._replace(estimated=True, source=f"estimate: as on the {_AMD_WITH_READING}, {held.source}")
    if not computing:
        return _estimate(capability, multiprocessors, next(iter(of_gpu), None))
    best = min(
        computing,
        key=lambda reading: (reading.workload is not Workload.TRAINING, _distance(wanted, reading.release)),
    )
    return BytesOutside(
        bytes=round(best.mib * _MIB),
        low=round(min(reading.mib - reading.tolerance for reading in computing) * _MIB),
        high=round(max(reading.mib + reading.tolerance for reading in computing) * _MIB),
        estimated=False,
        source=_source_text(best),
    )


def _eager(capability: tuple[int, int], multiprocessors: int, libraries: frozenset[Library] | None) -> BytesOutside:
    """Return the context and all kernels of PyTorch and of the libraries touched: of all if that is not known."""
    share = _EAGER_SHARES.get(capability, 1.0)
    context = context_mib(capability, multiprocessors)
    # A context by its multiprocessors; the one that this was measured with is the A100's.
    touched = frozenset(Library) if libraries is None else libraries
    kernels = share * (_EAGER_TORCH + sum(EAGER_MIB[library] for library in touched))
    least = kernels if libraries is not None else share * _EAGER_TORCH
    error = _EAGER_ERROR if capability == (8, 0) else _EAGER_ERROR_ELSEWHERE * kernels + _CONTEXT_ERROR * context
    return BytesOutside(
        bytes=round((context + kernels) * _MIB),
        low=round(max(context + least - error, 0) * _MIB),
        high=round((context + kernels + error) * _MIB),
        estimated=True,
        source=f"estimate: a context by its multiprocessors, {context:.0f} MiB, and, as kernels are loaded eagerly, "
        f"{kernels:.0f} MiB for all of {', '.join(['PyTorch', *sorted(touched)])}",
    )


def most_reserved(gpu: str, total: int) -> Reserved | None:
    """Return the most that a run has reserved on a GPU whose driver reports `total` bytes, None without a reading.

    Readings of loading alone are left out: a run that computes loads kernels and has less. So are those of processes
    that used more than `total`: an older driver left them more.
    """
    readings = [
        Reserved(gpu, round(reading.held.reserved * _MIB), _source_text(reading))
        for reading in READINGS
        if reading.gpu == gpu
        and reading.workload is not Workload.CONTEXT
        and (reading.mib + reading.held.reserved) * _MIB <= total
    ]
    known = (*readings, *(reserved for reserved in RESERVED if reserved.gpu == gpu))
    return max(known, key=lambda reserved: reserved.bytes, default=None)


def bounded(held: BytesOutside, gpu: str, total: int) -> BytesOutside:
    """Return the bytes outside the allocator, lowered where a run has reserved more than they leave of `total`.

    >>> l40s = BytesOutside(514 << 20, 480 << 20, 529 << 20, estimated=False, source="")
    >>> bounded(l40s, "L40S", 45599 << 20).bytes == (45599 << 20) - 47_359_983_616
    True
    """
    most = most_reserved(gpu, total)
    if most is None or held.bytes <= total - most.bytes:
        return held
    left = total - most.bytes
    source = f"the total less the {most.bytes:,} B reserved in a run: {most.source}"
    return held._replace(bytes=left, low=min(held.low, left), source=source, estimated=False)


def _estimate(capability: tuple[int, int], multiprocessors: int, context: Reading | None) -> BytesOutside:
    """Return the context (a reading, else `context_mib`) plus the kernels of other GPUs of the compute capability."""
    if context is None:
        mib = context_mib(capability, multiprocessors)
        error, origin = _CONTEXT_ERROR * mib, "a context by its multiprocessors"
    else:
        mib, error, origin = context.mib, context.tolerance, f"its context ({_source_text(context)})"
    family = (
        capability if capability in KERNEL_MIB else max(key for key in KERNEL_MIB if key <= max(capability, (6, 0)))
    )
    lowest, median, highest = KERNEL_MIB[family]
    return BytesOutside(
        bytes=round((mib + median) * _MIB),
        low=round((mib - error + lowest) * _MIB),
        high=round((mib + error + highest) * _MIB),
        estimated=True,
        source=f"estimate: {origin}, {mib:.0f} MiB, and {median} MiB of kernels as on other GPUs of compute "
        f"capability {family[0]}.{family[1]}",
    )


_NCCL_PAIR, _NCCL_GROUP = 544, 688
"""MiB of one communicator of two GPUs, and of more: 4 A100s with NVLink, an all-reduce (NVIDIA/nccl, issue 964)."""
_NCCL_ALONE = 512
"""MiB that a communicator of one GPU can hold, with NCCL 2.28 (issue 2363)."""
_NCCL_ONE, _NCCL_OF_SEVERAL = 1638, 2048
"""MiB of one communicator (1.6 GB), and of each of three or more (about 6 GB), both in issue 864."""
_NCCL_ALL_TO_ALL = 3359
"""MiB more after the first all-to-all of 8 H100s: 1.06 before, 4.34 GB after (issue 1685)."""
_NCCL_SOURCE = "NVIDIA/nccl issues 864, 964, 1685 and 2363"


def nccl_bytes(communicators: Sequence[Communicator]) -> NcclBytes | None:
    """Return the range of the bytes that NCCL holds for groups that have communicated, None without any.

    The lower end is that of the largest group alone, because communicators can share their buffers; the upper end is
    the sum of the largest readings. Sources: issues of NVIDIA/nccl.

    >>> of_eight = nccl_bytes([Communicator(8)])
    >>> of_eight.low // 2**20, of_eight.high // 2**20
    (688, 1638)
    """
    if not communicators:
        return None
    several = [group for group in communicators if group.size > 1]
    low = max((_NCCL_PAIR if group.size == 2 else _NCCL_GROUP for group in several), default=0)
    high = len(several) * (_NCCL_ONE if len(several) < 3 else _NCCL_OF_SEVERAL)
    high += (len(communicators) - len(several)) * _NCCL_ALONE
    high += sum(_NCCL_ALL_TO_ALL for group in several if group.all_to_all)
    return NcclBytes(low * _MIB, high * _MIB, _NCCL_SOURCE)


def _source_text(reading: Reading) -> str:
    release = f"torch {reading.release}" if reading.release else "unknown torch release"
    return f"{release}, {reading.workload.value}: {reading.source}"


def _parse_release(text: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a torch release; write one such as 2.11")
    return int(match[1]), int(match[2])


def _distance(wanted: tuple[int, int], releases: str) -> float:
    """Return the distance of a release from the releases of a reading: 0 if equal, 0.5 within a range of several."""
    if not releases:
        return 1000
    first = _parse_release(releases)
    last = _NEWEST if releases.endswith("+") else _parse_release(releases.partition("-")[2] or releases)
    if first <= wanted <= last:
        return 0 if first == last else 0.5
    nearest = first if wanted < first else last
    return abs(100 * (wanted[0] - nearest[0]) + wanted[1] - nearest[1])
