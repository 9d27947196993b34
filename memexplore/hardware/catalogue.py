"""List GPUs: memory, memory outside the allocator, compute capability and speed of each, with their sources."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from memexplore.hardware import cloud, mig
from memexplore.hardware.outside_allocator import (
    LOADING,
    BytesOutside,
    Library,
    Loading,
    bounded,
    bytes_outside,
    loading_under,
)
from memexplore.text.units import parse_size, size_text

if TYPE_CHECKING:
    import pandas

_MIB = 1024**2


class Flops(NamedTuple):
    """Peak dense FLOP/s by data type; None without hardware support or without a source.

    `tf32`, `fp16` and `bf16` are tensor-core rates that accumulate in fp32, as training does.
    """

    fp32: float | None = None
    tf32: float | None = None
    fp16: float | None = None
    bf16: float | None = None


class Sources(NamedTuple):
    """Sources of the numbers of a catalogue entry, one text each."""

    total: str
    outside: str
    performance: str
    """Source of compute capability, multiprocessors, bandwidth and FLOP/s."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU: sizes in bytes, bandwidth in bytes per second.

    ``name`` is the value of ``torch.cuda.get_device_name()``, ``key`` the short name that users write. ``total`` is
    ``torch.cuda.get_device_properties().total_memory``, which differs between drivers by up to 1 %. ``outside`` is the
    memory outside the allocator in a training process (CUDA context and loaded kernels) under the newest torch release
    with a reading; `for_release` returns the GPU with the value of another release. ``estimated`` lists the fields
    without a reading of this GPU.
    """

    key: str
    name: str
    total: int
    outside: int
    compute_capability: tuple[int, int]
    multiprocessors: int
    bandwidth: int | None
    flops: Flops
    sources: Sources
    aliases: tuple[str, ...] = ()
    estimated: tuple[str, ...] = ()
    note: str = ""
    outside_range: tuple[int, int] = (0, 0)
    """Lowest and highest value of `outside` over workloads."""
    limit: int | None = None
    """Bytes that one process may reserve (`torch.cuda.set_per_process_memory_fraction`), None without a limit."""
    loading: Loading = Loading.LAZY
    """When CUDA loads kernels, which take memory outside the allocator."""

    @property
    def capacity(self) -> int:
        """Bytes that the allocator can reserve: `total` minus `outside`, or `limit` if it is less.

        >>> gpu = find("T4")
        >>> gpu.capacity == gpu.total - gpu.outside, dataclasses.replace(gpu, limit=1 << 30).capacity
        (True, 1073741824)
        """
        return min(self.total - self.outside, self.total if self.limit is None else self.limit)

    def for_release(self, release: str | None) -> Gpu:
        """Return the GPU with the `outside` of a torch release, by default of the newest release with a reading.

        >>> t4 = find("T4")
        >>> (t4.for_release("2.14").outside - t4.for_release("2.11").outside) / 1024**2  # see outside_allocator
        -10.125

        Raises ValueError for a text that is not a release.
        """
        held = self.held_outside(release)
        if held is None:
            return self
        return dataclasses.replace(
            self,
            outside=held.bytes,
            outside_range=(held.low, held.high),
            sources=self.sources._replace(outside=held.source),
        )

    def held_outside(self, release: str | None, libraries: frozenset[Library] | None = None) -> BytesOutside | None:
        """Return what a process holds outside the allocator, None for a GPU that is not of the catalogue.

        `libraries` are those that it has touched, None if that is not known.
        """
        entry = next((gpu for gpu in _CATALOGUE if gpu.key == self.key), None)
        if entry is None:
            return None
        held = bytes_outside(self.key, self.compute_capability, self.multiprocessors, release, self.loading, libraries)
        return held if self.loading is Loading.EAGER else bounded(held, self.key, entry.total)

    def loaded(self, loading: Loading) -> Gpu:
        """Return the GPU where kernels are loaded lazily or eagerly.

        >>> gpu = find("A100 40GB")
        >>> [gpu.loaded(loading).outside >> 20 for loading in Loading]
        [504, 1698]
        """
        return self if loading is self.loading else dataclasses.replace(self, loading=loading).for_release(None)

    def under(self, versions: Mapping[str, str]) -> Gpu:
        """Return the GPU with the `outside` of a tape's versions: of its torch release, and of how kernels are loaded.

        >>> find("A100 40GB").under({"torch": "2.11", "module loading": "EAGER"}).outside >> 20
        1698
        """
        is_eager = versions.get(LOADING) == Loading.EAGER.value.upper()
        return self.loaded(Loading.EAGER if is_eager else Loading.LAZY).for_release(versions.get("torch"))

    def with_driver(self, version: str) -> Gpu:
        """Return the GPU under a driver, which decides how kernels are loaded; raise ValueError for no version.

        >>> find("A100 40GB").with_driver("470.82.01").loading.value
        'eager'
        """
        return self.loaded(loading_under(version))


# --- sources -------------------------------------------------------------------------------------------------------
# Totals are as reported by recent drivers (R570 and later), which torch 2.11 and later need. Older drivers report up to
# 1 % more (a T4: 15 102 MiB under R535, 14 913 MiB under R570).
_ULTRALYTICS = "total_memory as the start line of Ultralytics prints it, "
_LLAMA = "total as the start line of llama.cpp prints it, "
_OOM = "'has a total capacity of' in OutOfMemoryError texts, "
_LIKE = "estimate: no report from a recent driver found; same as "
_UNCHECKED = "; entered from memory, not checked against the document"
_OLDER = "estimate: no report from a recent driver found; that of an older one, "
_LAPTOP = (
    "NVIDIA GeForce laptop comparison: cores and highest boost clock; tensor rates of the desktop chip" + _UNCHECKED
)
_KEPLER = "NVIDIA Tesla K80 board specification, one of its two GPUs" + _UNCHECKED
_GEFORCE_PASCAL = "NVIDIA GeForce GTX 10 and TITAN specifications" + _UNCHECKED
_TURING_GEFORCE = "NVIDIA Turing GPU architecture whitepaper; tensor rates with fp32 accumulation" + _UNCHECKED
_PASCAL = "NVIDIA Tesla P100 PCIe datasheet"
_VOLTA = "NVIDIA V100 datasheet, SXM2"
_TURING = "NVIDIA T4 datasheet"
_AMPERE = "NVIDIA Ampere GA102 architecture whitepaper; tensor rates with fp32 accumulation"
_ADA = "NVIDIA Ada GPU architecture whitepaper; tensor rates with fp32 accumulation"
_BLACKWELL = "NVIDIA RTX Blackwell architecture whitepaper; tensor rates with fp32 accumulation"
_A100 = "NVIDIA A100 datasheet"
_H100 = "NVIDIA H100 datasheet; tensor rates halved, it prints them with sparsity"
_PRO = "NVIDIA RTX Blackwell PRO architecture whitepaper"
_PRO_SCALED = "; tensor rates in proportion to those of the Workstation Edition"
_INSTINCT = " data sheet, rates without sparsity"
_AMD_NOTE = (
    "AMD GPU: its memory and PyTorch's caching allocator, which builds for ROCm have too, are modelled. Assumed, not "
    "proven: kernels, hipBLAS and MIOpen allocate what those of CUDA allocate on a GPU of compute capability 8.0."
)


def _gpu(
    key: str,
    name: str,
    mib: float,
    total_source: str,
    capability: tuple[int, int],
    multiprocessors: int,
    gigabytes_per_second: float,
    teraflops: tuple[float | None, float | None, float | None, float | None],
    performance_source: str,
    *aliases: str,
) -> Gpu:
    """Return a catalogue entry from the units of the sources: MiB, 10^9 bytes per second, 10^12 FLOP/s."""
    total = round(mib * _MIB)
    held = bounded(bytes_outside(key, capability, multiprocessors), key, total)
    estimates = {"total": total_source.startswith("estimate"), "outside": held.estimated}
    return Gpu(
        key=key,
        name=name,
        total=total,
        outside=held.bytes,
        compute_capability=capability,
        multiprocessors=multiprocessors,
        bandwidth=round(gigabytes_per_second * 1e9),
        flops=Flops(*(None if rate is None else rate * 1e12 for rate in teraflops)),
        sources=Sources(total_source, held.source, performance_source),
        aliases=aliases,
        outside_range=(held.low, held.high),
        estimated=tuple(field for field, is_estimate in estimates.items() if is_estimate),
        note=_note(capability),
    )


_OLDEST_WITH_KERNELS = (7, 5)
"""Lowest compute capability for which torch's builds for CUDA 12.8 and later have kernels (pytorch, issue 172352)."""


def _note(capability: tuple[int, int]) -> str:
    """Return which builds of torch run on an older GPU; empty for one that all builds run on."""
    if capability >= _OLDEST_WITH_KERNELS:
        return ""
    text = ".".join(map(str, capability))
    if capability < (5, 0):
        return f"No build of torch 2.11 or later has kernels for compute capability {text}."
    return (
        f"Of torch 2.11 to 2.14 only the builds for CUDA 12.6 have kernels for compute capability {text}, and later "
        "releases have no such builds."
    )


def _tensor(fp32: float, tf32: float, half: float) -> tuple[float, float, float, float]:
    """Return the TFLOP/s of a GPU whose fp16 and bf16 rates are equal."""
    return fp32, tf32, half, half


def _amd(
    key: str,
    mib: float,
    total_source: str,
    units: int,
    gigabytes_per_second: float,
    teraflops: tuple[float | None, float | None, float | None, float | None],
) -> Gpu:
    """Return a catalogue entry of an AMD GPU; `units` is the number of its compute units."""
    name = f"AMD Instinct {key}"
    gpu = _gpu(key, name, mib, total_source, (8, 0), units, gigabytes_per_second, teraflops, name + _INSTINCT)
    return dataclasses.replace(gpu, note=_AMD_NOTE, estimated=(*gpu.estimated, "compute_capability"))


# fmt: off
_CATALOGUE: tuple[Gpu, ...] = (
    # GeForce and TITAN, Maxwell to Volta
    _gpu("GTX TITAN X", "NVIDIA GeForce GTX TITAN X", 12206, _OLDER + "11.92 GiB in start lines of TensorFlow, 2020",
         (5, 2), 24, 336.5, (6.7, None, None, None), "NVIDIA GeForce GTX TITAN X specification", "TITAN X Maxwell"),
    _gpu("GTX 1080 Ti", "NVIDIA GeForce GTX 1080 Ti", 11162, _OOM + "10.90 GiB on 11 GB GPUs, 2026; 11 172 MiB by "
         "Ultralytics with torch 2.5",
         (6, 1), 28, 484, (11.3, None, None, None), _GEFORCE_PASCAL),
    _gpu("TITAN X Pascal", "NVIDIA TITAN X (Pascal)", 12193, _OLDER + "total_memory=12193MB printed by torch 2.3",
         (6, 1), 28, 480, (11.0, None, None, None), _GEFORCE_PASCAL, "TITAN X"),
    _gpu("TITAN Xp", "NVIDIA TITAN Xp", 12187, _OLDER + _ULTRALYTICS + "torch 2.3",
         (6, 1), 30, 547.7, (12.1, None, None, None), _GEFORCE_PASCAL),
    _gpu("TITAN V", "NVIDIA TITAN V", 12066, _OLDER + _ULTRALYTICS + "torch 1.12",
         (7, 0), 80, 652.8, (14.9, None, 110, None), "NVIDIA TITAN V specification"),
    # GeForce and TITAN, Turing
    _gpu("RTX 2060", "NVIDIA GeForce RTX 2060", 5745, _OOM + "5.61 GiB, GPU named",
         (7, 5), 30, 336, (6.5, None, 25.8, None), _TURING_GEFORCE),
    _gpu("RTX 2060 12GB", "NVIDIA GeForce RTX 2060", 11833, _LLAMA + "2026",
         (7, 5), 34, 336, (7.2, None, 28.7, None), _TURING_GEFORCE),
    _gpu("RTX 2060 SUPER", "NVIDIA GeForce RTX 2060 SUPER", 7782, _OOM + "7.60 GiB, GPU named",
         (7, 5), 34, 448, (7.2, None, 28.7, None), _TURING_GEFORCE),
    _gpu("RTX 2070", "NVIDIA GeForce RTX 2070", 7785, _LIKE + "the RTX 2070 Max-Q, 7.603 GiB with torch 2.10",
         (7, 5), 36, 448, (7.5, None, 29.9, None), _TURING_GEFORCE),
    _gpu("RTX 2070 SUPER", "NVIDIA GeForce RTX 2070 SUPER", 7785, _LIKE + "the RTX 2070 of the same size",
         (7, 5), 40, 448, (9.1, None, 36.3, None), _TURING_GEFORCE),
    _gpu("RTX 2080", "NVIDIA GeForce RTX 2080", 7785, _LIKE + "the RTX 2070 of the same size",
         (7, 5), 46, 448, (10.1, None, 40.3, None), _TURING_GEFORCE),
    _gpu("RTX 2080 SUPER", "NVIDIA GeForce RTX 2080 SUPER", 7785, _LIKE + "the RTX 2070 of the same size",
         (7, 5), 48, 496, (11.2, None, 44.6, None), _TURING_GEFORCE),
    _gpu("RTX 2080 Ti", "NVIDIA GeForce RTX 2080 Ti", 10825, _ULTRALYTICS + "torch 2.6; 10.57 GiB in OutOfMemoryError "
         "texts, 2026", (7, 5), 68, 616, (13.4, None, 53.8, None), _TURING_GEFORCE),
    _gpu("TITAN RTX", "NVIDIA TITAN RTX", 24023, _LIKE + "the Quadro RTX 6000 of the same chip and size",
         (7, 5), 72, 672, (16.3, None, 130.5, None), _TURING_GEFORCE),
    # GeForce, Ampere
    _gpu("RTX 3050", "NVIDIA GeForce RTX 3050", 7819, _LIKE + "the RTX 3070 of the same size",
         (8, 6), 20, 224, _tensor(9.1, 9.1, 18.2), "NVIDIA GeForce RTX 3050 specification; tensor rates as of GA102"
         + _UNCHECKED),
    _gpu("RTX 3050 6GB", "NVIDIA GeForce RTX 3050", 5803, _LLAMA + "2026",
         (8, 6), 18, 168, _tensor(6.8, 6.8, 13.5), "NVIDIA GeForce RTX 3050 specification; tensor rates as of GA102"
         + _UNCHECKED),
    _gpu("RTX 3060 8GB", "NVIDIA GeForce RTX 3060", 7819, _LIKE + "the RTX 3070 of the same size",
         (8, 6), 28, 240, _tensor(12.7, 12.7, 25.5), _AMPERE),
    _gpu("RTX 3070", "NVIDIA GeForce RTX 3070", 7819, _LLAMA + "2026",
         (8, 6), 46, 448, _tensor(20.3, 20.3, 40.6), _AMPERE),
    _gpu("RTX 3080", "NVIDIA GeForce RTX 3080", 10_351_935_488 / _MIB, "total_memory=10351935488 in a public log, 2026",
         (8, 6), 68, 760, _tensor(29.8, 29.8, 59.5), _AMPERE),
    _gpu("RTX 3060", "NVIDIA GeForce RTX 3060", 11907, _LLAMA + "2026; 11 910 MiB by Ultralytics with torch 2.10",
         (8, 6), 28, 360, _tensor(12.7, 12.7, 25.5), _AMPERE),
    _gpu("RTX 3090", "NVIDIA GeForce RTX 3090", 24123, _LLAMA + "2026; 23.56 GiB in OutOfMemoryError texts",
         (8, 6), 82, 936, _tensor(35.6, 35.6, 71), _AMPERE),
    _gpu("RTX 3080 Ti", "NVIDIA GeForce RTX 3080 Ti", 11_910.625, _ULTRALYTICS + "2026",
         (8, 6), 80, 912, _tensor(34.1, 34.1, 68.2), _AMPERE),
    _gpu("RTX 3090 Ti", "NVIDIA GeForce RTX 3090 Ti", 24112, _LLAMA + "2026; between 24 112 and 24 142 MiB by driver",
         (8, 6), 84, 1008, _tensor(40.0, 40.0, 80.0), _AMPERE),
    # GeForce, Ada
    _gpu("RTX 4060", "NVIDIA GeForce RTX 4060", 8_223_916_032 / _MIB, "totalGlobalMem of a torch profiler trace",
         (8, 9), 24, 272, _tensor(15.1, 15.1, 30.2), _ADA),
    _gpu("RTX 4070", "NVIDIA GeForce RTX 4070", 11866, _LLAMA + "2026; between 11 866 and 11 903 MiB by driver",
         (8, 9), 46, 504, _tensor(29.1, 29.1, 58.3), _ADA),
    _gpu("RTX 4070 Ti", "NVIDIA GeForce RTX 4070 Ti", 11866, _LIKE + "the RTX 4070 of the same size",
         (8, 9), 60, 504, _tensor(40.1, 40.1, 80.2), _ADA),
    _gpu("RTX 4060 Ti 16GB", "NVIDIA GeForce RTX 4060 Ti", 15944, _LLAMA + "2026",
         (8, 9), 34, 288, _tensor(22.1, 22.1, 44.1), _ADA, "RTX 4060 Ti"),
    _gpu("RTX 4070 Ti SUPER", "NVIDIA GeForce RTX 4070 Ti SUPER", 15934, "total_memory printed by torch, 2026",
         (8, 9), 66, 672, _tensor(44.1, 44.1, 88.2), _ADA),
    _gpu("RTX 4080", "NVIDIA GeForce RTX 4080", 15937, _LIKE + "the RTX 4080 SUPER", (8, 9), 76, 716.8,
         _tensor(48.7, 48.7, 97.5), _ADA),
    _gpu("RTX 4080 SUPER", "NVIDIA GeForce RTX 4080 SUPER", 15937, _LLAMA + "2026",
         (8, 9), 80, 736.3, _tensor(52.2, 52.2, 104.4), _ADA),
    _gpu("RTX 4090", "NVIDIA GeForce RTX 4090", 24080, _LLAMA + "2026; 23.52 GiB in OutOfMemoryError texts, torch 2.11",
         (8, 9), 128, 1008, _tensor(82.6, 82.6, 165.2), _ADA),
    # GeForce, Blackwell
    _gpu("RTX 5070", "NVIDIA GeForce RTX 5070", 11776, "11.50 GiB in public logs, 2026", (12, 0), 48, 672,
         _tensor(30.9, 30.9, 61.7), _BLACKWELL),
    _gpu("RTX 5080", "NVIDIA GeForce RTX 5080", 15840, _ULTRALYTICS + "2026", (12, 0), 84, 960,
         _tensor(56.3, 56.3, 112.6), _BLACKWELL),
    _gpu("RTX 5070 Ti", "NVIDIA GeForce RTX 5070 Ti", 15842, _LLAMA + "2026",
         (12, 0), 70, 896, _tensor(43.9, 43.9, 87.9), _BLACKWELL),
    _gpu("RTX 5060 Ti 16GB", "NVIDIA GeForce RTX 5060 Ti", 15848, _ULTRALYTICS + "torch 2.12",
         (12, 0), 36, 448, _tensor(23.7, 23.7, 47.4), _BLACKWELL, "RTX 5060 Ti"),
    _gpu("RTX 5090", "NVIDIA GeForce RTX 5090", 32120, _ULTRALYTICS + "2026; 31.37 GiB in OutOfMemoryError texts",
         (12, 0), 170, 1792, _tensor(104.8, 104.8, 209.5), _BLACKWELL),
    # GeForce, laptops
    _gpu("RTX 3060 Laptop", "NVIDIA GeForce RTX 3060 Laptop GPU", 5806, "total in a public log, 2026",
         (8, 6), 30, 336, _tensor(13.1, 13.1, 26.2), _LAPTOP),
    _gpu("RTX 3070 Laptop", "NVIDIA GeForce RTX 3070 Laptop GPU", 7850, _LIKE + "the RTX 3070 Ti Laptop (llama.cpp, "
         "2026)", (8, 6), 40, 448, _tensor(16.6, 16.6, 33.2), _LAPTOP),
    _gpu("RTX 3080 Laptop 16GB", "NVIDIA GeForce RTX 3080 Laptop GPU", 15993, _ULTRALYTICS + "torch 2.8",
         (8, 6), 48, 448, _tensor(21.0, 21.0, 42.0), _LAPTOP, "RTX 3080 Laptop"),
    _gpu("RTX 4060 Laptop", "NVIDIA GeForce RTX 4060 Laptop GPU", 7815, _LLAMA + "2026",
         (8, 9), 24, 256, _tensor(14.6, 14.6, 29.1), _LAPTOP),
    _gpu("RTX 4070 Laptop", "NVIDIA GeForce RTX 4070 Laptop GPU", 7806, _ULTRALYTICS + "torch 2.7",
         (8, 9), 36, 256, _tensor(20.0, 20.0, 40.1), _LAPTOP),
    _gpu("RTX 4080 Laptop", "NVIDIA GeForce RTX 4080 Laptop GPU", 11866, _LIKE + "the RTX 4070 of the same size",
         (8, 9), 58, 432, _tensor(33.9, 33.9, 67.7), _LAPTOP),
    _gpu("RTX 4090 Laptop", "NVIDIA GeForce RTX 4090 Laptop GPU", 15944, _LIKE + "the RTX 4060 Ti 16GB",
         (8, 9), 76, 576, _tensor(39.7, 39.7, 79.4), _LAPTOP),
    # Workstation
    _gpu("Quadro RTX 6000", "Quadro RTX 6000", 24023, _OOM + "23.46 GiB, 2026",
         (7, 5), 72, 672, (16.3, None, 130.5, None), _TURING_GEFORCE),
    _gpu("Quadro RTX 8000", "Quadro RTX 8000", 48380, _ULTRALYTICS + "2026",
         (7, 5), 72, 672, (16.3, None, 130.5, None), _TURING_GEFORCE),
    _gpu("RTX A4000", "NVIDIA RTX A4000", 15937, _LIKE + "the RTX 4080 of the same size; 15.6 GiB in public logs",
         (8, 6), 48, 448, _tensor(19.2, 38.3, 76.7), _AMPERE),
    _gpu("RTX 4000 Ada", "NVIDIA RTX 4000 Ada Generation", 20055, _LIKE + "the RTX 4000 SFF Ada of the same size "
         "(Ultralytics, torch 2.8); 19.5 GiB with torch 2.12", (8, 9), 48, 360, _tensor(26.7, 40.9, 81.9),
         "NVIDIA RTX 4000 Ada datasheet; tensor rates a quarter of its FP8 rate with sparsity"),
    _gpu("RTX A5000", "NVIDIA RTX A5000", 24123, _LIKE + "the RTX 3090 of the same chip and size",
         (8, 6), 64, 768, _tensor(27.8, 27.8 * 2, 111.1), _AMPERE),
    _gpu("RTX A6000", "NVIDIA RTX A6000", 48539, _OOM + "47.40 GiB", (8, 6), 84, 768,
         _tensor(38.7, 77.4, 154.8), _AMPERE),
    _gpu("RTX 6000 Ada", "NVIDIA RTX 6000 Ada Generation", 48520, _ULTRALYTICS + "torch 2.7",
         (8, 9), 142, 960, _tensor(91.1, 182.1, 364.2), _ADA),
    _gpu("RTX PRO 6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97247, _LLAMA + "2026; 94.97 GiB in "
         "OutOfMemoryError texts, torch 2.11", (12, 0), 188, 1792,
         _tensor(126.0, 251.9, 503.8), _PRO, "RTX PRO 6000 Blackwell"),
    _gpu("RTX PRO 6000 Max-Q", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 97247,
         _LIKE + "the RTX PRO 6000; 97 249 MiB in a public log", (12, 0), 188, 1792, _tensor(110, 219.9, 439.8),
         "NVIDIA RTX PRO 6000 Blackwell Max-Q datasheet" + _PRO_SCALED),
    _gpu("RTX PRO 6000 Server", "NVIDIA RTX PRO 6000 Blackwell Server Edition", 97250, "total_memory=97250MB printed "
         "by torch 2.7", (12, 0), 188, 1597, _tensor(120, 239.9, 479.8),
         "NVIDIA RTX PRO 6000 Blackwell Server Edition datasheet" + _PRO_SCALED, "RTX PRO 6000 Server Edition",
         "RTX PRO 6000 Blackwell Server"),
    # Data centre, Kepler to Turing
    _gpu("K80", "Tesla K80", 11441, _OLDER + _ULTRALYTICS + "torch 1.10; one of the two GPUs of the board",
         (3, 7), 13, 240, (4.4, None, None, None), _KEPLER),
    _gpu("P100", "Tesla P100-PCIE-16GB", 16269, _ULTRALYTICS + "torch 2.11",
         (6, 0), 56, 732, (9.3, None, 18.7, None), _PASCAL),
    _gpu("V100 16GB", "Tesla V100-SXM2-16GB", 16144, "estimate: 16 160 MiB under older drivers (Ultralytics), less the "
         "change seen at the V100 32GB",
         (7, 0), 80, 900, (15.7, None, 125, None), _VOLTA, "V100"),
    _gpu("V100 32GB", "Tesla V100-SXM2-32GB", 32494, _ULTRALYTICS + "torch 2.6",
         (7, 0), 80, 900, (15.7, None, 125, None), _VOLTA),
    _gpu("T4", "Tesla T4", 14913, _ULTRALYTICS + "torch 2.6 and 2.10; 14.56 GiB in OutOfMemoryError texts",
         (7, 5), 40, 320,
         (8.1, None, 65, None), _TURING),
    # Data centre, Ampere and Ada
    _gpu("A10", "NVIDIA A10", 22731, _LLAMA + "2026", (8, 6), 72, 600,
         _tensor(31.2, 62.5, 125), "NVIDIA A10 datasheet"),
    _gpu("A10G", "NVIDIA A10G", 22587, "total_memory=22587MB printed by a torch built for CUDA 13.0",
         (8, 6), 80, 600, _tensor(31.5, 35, 70), "NVIDIA A10G datasheet"),
    _gpu("L4", "NVIDIA L4", 22563, _OOM + "22.03 GiB",
         (8, 9), 58, 300, _tensor(30.3, 60, 121), "NVIDIA L4 datasheet, without sparsity"),
    _gpu("A40", "NVIDIA A40", 45486, _OOM + "44.42 GiB",
         (8, 6), 84, 696, _tensor(37.4, 74.8, 149.7), "NVIDIA A40 datasheet"),
    _gpu("L40S", "NVIDIA L40S", 45599, _OOM + "44.53 GiB, 2026; between 45 457 and 45 599 MiB by driver",
         (8, 9), 142, 864, _tensor(91.6, 183, 362), "NVIDIA L40S datasheet"),
    _gpu("A100 40GB", "NVIDIA A100-SXM4-40GB", 40438, _OOM + "39.49 GiB",
         (8, 0), 108, 1555, _tensor(19.5, 156, 312), _A100, "A100", "A100 SXM 40GB"),
    _gpu("A100 80GB", "NVIDIA A100-SXM4-80GB", 81152, _LLAMA + "2026 (81 151 MiB); 79.25 GiB in OutOfMemoryError texts",
         (8, 0), 108, 2039, _tensor(19.5, 156, 312), _A100, "A100 SXM 80GB"),
    _gpu("A100 PCIe 80GB", "NVIDIA A100 80GB PCIe", 81154, _ULTRALYTICS + "torch 2.6",
         (8, 0), 108, 1935, _tensor(19.5, 156, 312), _A100),
    _gpu("A800 SXM", "NVIDIA A800-SXM4-80GB", 81152, _LIKE + "the A100 80GB, of which it is a variant",
         (8, 0), 108, 2039, _tensor(19.5, 156, 312), _A100 + "; an A800 differs in NVLink only", "A800"),
    _gpu("A800 PCIe", "NVIDIA A800 80GB PCIe", 81051, _ULTRALYTICS + "torch 2.8",
         (8, 0), 108, 1935, _tensor(19.5, 156, 312), _A100 + "; an A800 differs in NVLink only"),
    # Data centre, Hopper and Blackwell
    _gpu("H100 PCIe", "NVIDIA H100 PCIe", 81008, "total_memory=81008MB printed by torch",
         (9, 0), 114, 2039, _tensor(51.2, 378, 756), _H100),
    _gpu("H100 SXM", "NVIDIA H100 80GB HBM3", 81081, _LLAMA + "2026; 79.18 GiB in OutOfMemoryError texts",
         (9, 0), 132, 3352, _tensor(66.9, 494.7, 989.4), _H100,
         "H100"),
    _gpu("H100 NVL", "NVIDIA H100 NVL", 95320, _ULTRALYTICS + "torch 2.13; 93.09 GiB in OutOfMemoryError texts",
         (9, 0), 132, 3938, _tensor(60, 417.5, 835.5), _H100),
    _gpu("H800 SXM", "NVIDIA H800", 81081, _LIKE + "the H100 SXM; nvidia-smi prints 81 559 MiB for both",
         (9, 0), 132, 3352, _tensor(66.9, 494.7, 989.4), _H100 + "; an H800 differs in NVLink and fp64 only"),
    _gpu("H800 PCIe", "NVIDIA H800 PCIe", 81008, _LIKE + "the H100 PCIe, of which it is a variant",
         (9, 0), 114, 2039, _tensor(51.2, 378, 756), _H100 + "; an H800 differs in NVLink and fp64 only"),
    _gpu("H20", "NVIDIA H20", 97285, "total_memory=97285MB, 78 multiprocessors printed by torch; 95.00 GiB in a public "
         "log", (9, 0), 78, 4000, _tensor(44, 74, 148), "NVIDIA H20 datasheet, without sparsity"),
    _gpu("GH200", "NVIDIA GH200 480GB", 96768, _OOM + "94.50 GiB on 96 GB Hopper GPUs",
         (9, 0), 132, 4000, _tensor(67, 494, 990),
         "NVIDIA GH200 datasheet, 96 GB HBM3; tensor rates halved, it prints them with sparsity"),
    _gpu("H200", "NVIDIA H200", 143156, _ULTRALYTICS + "torch 2.11; 139.80 GiB in OutOfMemoryError texts",
         (9, 0), 132, 4800, _tensor(67, 494.5, 989.5),
         "NVIDIA H200 datasheet; tensor rates halved, it prints them with sparsity"),
    _gpu("B200", "NVIDIA B200", 182630, _OOM + "178.35 GiB", (10, 0), 148, 8000, _tensor(80, 1100, 2250),
         "NVIDIA Blackwell datasheet, HGX B200, per GPU without sparsity"),
    _gpu("GB200", "NVIDIA GB200", 188733, _OOM + "184.31 GiB", (10, 0), 152, 8000, _tensor(80, 1250, 2500),
         "NVIDIA GB200 NVL72 datasheet, per GPU without sparsity"),
    _gpu("B300", "NVIDIA B300 SXM6 AC", 274115, _OOM + "267.69 GiB", (10, 3), 148, 8000, _tensor(75, 1125, 2250),
         "NVIDIA HGX B300 datasheet, per GPU without sparsity"),
    # AMD, data centre
    _amd("MI210", 65520, _LIKE + "a die of the MI250X of the same size", 104, 1638, (22.6, None, 181, 181)),
    _amd("MI250X", 65520, "total_memory=65520MB printed by torch for one of its two dies", 110, 1638,
         (23.9, None, 191.5, 191.5)),
    _amd("MI300X", 196592, "total_memory=196592MB printed by torch 2.6 (github ROCm/ROCm, issue 4203); 191.98 GiB in "
         "OutOfMemoryError texts", 304, 5300, _tensor(163.4, 653.7, 1307.4)),
    _amd("MI325X", 262124, _OOM + "255.98 GiB", 304, 6000, _tensor(163.4, 653.7, 1307.4)),
    _amd("MI350X", 294892, _OOM + "287.98 GiB", 256, 8000, (144.2, None, 2306.9, 2306.9)),
    _amd("MI355X", 294892, _OOM + "287.98 GiB", 256, 8000, (157.3, None, 2516.6, 2516.6)),
)
# fmt: on

_NOISE = re.compile(r"nvidia|geforce|tesla|quadro|amd|instinct|generation|workstation edition|[^a-z0-9]")
_NAME_AND_SIZE = re.compile(r"(.+?)[\s_-]+(\d+)\s*gi?b\s*", re.IGNORECASE)


def _normalised(text: str) -> str:
    """Return a name in lower case without spaces, punctuation and brand words."""
    return _NOISE.sub("", text.lower())


@functools.cache
def _names() -> dict[str, Gpu]:
    """Return entries by normalised name; of equal names the first counts, keys before aliases before torch's names."""
    names: dict[str, Gpu] = {}
    for texts in (lambda gpu: (gpu.key,), lambda gpu: gpu.aliases, lambda gpu: (gpu.name,)):
        for gpu in _CATALOGUE:
            for text in texts(gpu):
                names.setdefault(_normalised(text), gpu)
    for name, gpu in list(names.items()):
        # Users often omit RTX: 4090, A6000, PRO 6000.
        names.setdefault(name.removeprefix("rtx"), gpu)
    return names


def find(text: str) -> Gpu:
    """Return the GPU of a catalogue name, an alias or a size; case, spaces and hyphens are ignored.

    A family name is the first GPU of that family: ``A100`` the 40 GB one, ``V100`` the 16 GB one. The marketed size can
    follow the name (``RTX 4090 24GB``), and a count can stand before or after it (``8xH100``). A MIG profile after the
    name is that part of the GPU (``H100 MIG 1g.10gb``). An instance type of a cloud provider is one of its GPUs
    (`cloud`). A size without a name is an unknown GPU of compute capability 8.0
    whose allocator can use all of it, as its ``note`` says.

    >>> find("rtx4090").name, find("24GiB").compute_capability
    ('NVIDIA GeForce RTX 4090', (8, 0))
    >>> find("p4d.24xlarge").key, find("MI300X").name
    ('A100 40GB', 'AMD Instinct MI300X')
    >>> find("A100 MIG 3g.20gb").multiprocessors
    42

    Raises ValueError, with the most similar catalogue names, for any other text.
    """
    names = _names()
    text = cloud.key_of(text) or text
    gpu = names.get(_normalised(text))
    if gpu is not None:
        return gpu
    if parts := _NAME_AND_SIZE.fullmatch(text):
        gpu = names.get(_normalised(parts[1]))
        # torch reports between 14.5 and 16 GiB for a GPU sold with 16 GB.
        if gpu is not None and 0.88 < gpu.total / (int(parts[2]) * 1024**3) <= 1:
            return gpu
    if (rented := cloud.one_of(text)) is not None:
        return find(rented)
    if (part := mig.parts_of(text)) is not None:
        return _slice(find(part[0]), part[1])
    try:
        size = parse_size(text)
    except ValueError:
        similar = difflib.get_close_matches(_normalised(text), names, n=6, cutoff=0.5)
        keys = list(dict.fromkeys(names[name].key for name in similar))[:3]
        hint = f"did you mean {', '.join(keys)}? " if keys else ""
        raise ValueError(
            f"no GPU {text!r} in the catalogue: {hint}`memexplore gpus` lists all; a size such as 24GiB works too"
        ) from None
    if size <= 0:
        raise ValueError(f"a GPU of {text!r} has no memory: write a size such as 24GiB")
    return Gpu(
        key=size_text(size),
        name=f"GPU with {size_text(size)}",
        total=size,
        outside=0,
        compute_capability=(8, 0),
        multiprocessors=108,
        bandwidth=None,
        flops=Flops(),
        sources=Sources("the given size", "none subtracted", "estimate: compute capability 8.0 as the A100"),
        estimated=("outside", "compute_capability", "multiprocessors"),
        note="Compute capability 8.0 is assumed, and that the allocator can use the whole size: "
        "on a real GPU the driver, the CUDA context and kernels take 1 to 3 %.",
    )


def _slice(gpu: Gpu, profile: str) -> Gpu:
    """Return the part of a GPU that a MIG profile names.

    Raises ValueError for a profile that the GPU does not have.
    """
    part = mig.slice_of(gpu.key, profile)
    held = bytes_outside(f"{gpu.key} MIG {profile}", gpu.compute_capability, part.multiprocessors)
    share = part.multiprocessors / gpu.multiprocessors
    return dataclasses.replace(
        gpu,
        key=f"{gpu.key} MIG {profile}",
        name=f"{gpu.name} MIG {profile}",
        total=round(part.gib * 1024**3),
        outside=held.bytes,
        outside_range=(held.low, held.high),
        multiprocessors=part.multiprocessors,
        bandwidth=None if gpu.bandwidth is None else round(gpu.bandwidth * part.memory_share),
        flops=Flops(*(None if rate is None else rate * share for rate in gpu.flops)),
        sources=Sources(mig.SOURCE, held.source, f"by its share of the {gpu.key}: {gpu.sources.performance}"),
        aliases=(),
        estimated=("outside",),
    )


def offered(release: str | None = None) -> list[Gpu]:
    """Return the GPUs that a run can be moved to, smallest first.

    Laptops are left out, and GPUs for which torch's builds for current CUDA toolkits have no kernels.

    >>> offered()[0].key
    'RTX 2060'
    """
    movable = [gpu for gpu in _CATALOGUE if gpu.compute_capability >= _OLDEST_WITH_KERNELS and "Laptop" not in gpu.name]
    return sorted((gpu.for_release(release) for gpu in movable), key=lambda gpu: gpu.total)


def gpus(release: str | None = None) -> pandas.DataFrame:
    """Return the catalogue, one row per GPU, smallest first: sizes in bytes, bandwidth in bytes/s, rates in FLOP/s.

    `outside` and `capacity` are those of a torch release, by default of the newest release with a reading.

    >>> table = gpus()
    >>> int(table.loc["T4", "multiprocessors"])
    40
    """
    import pandas

    rows = [
        {
            "gpu": gpu.key,
            "name": gpu.name,
            "capacity": gpu.capacity,
            "total": gpu.total,
            "outside": gpu.outside,
            "outside_low": gpu.outside_range[0],
            "outside_high": gpu.outside_range[1],
            "estimated": ", ".join(gpu.estimated),
            "compute_capability": f"{gpu.compute_capability[0]}.{gpu.compute_capability[1]}",
            "multiprocessors": gpu.multiprocessors,
            "bandwidth": gpu.bandwidth,
            **{f"flops_{kind}": rate for kind, rate in gpu.flops._asdict().items()},
            **{f"source_{field}": source for field, source in gpu.sources._asdict().items()},
        }
        for gpu in sorted((gpu.for_release(release) for gpu in _CATALOGUE), key=lambda gpu: gpu.total)
    ]
    return pandas.DataFrame(rows).set_index("gpu")
