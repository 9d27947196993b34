"""Tell the bytes of the scratch of cub's device algorithms: sorts, scans, selections, reductions.

Sources are below cub in CCCL 3 (CUDA 13), which torch 2.11 is built with: cub/device/dispatch/dispatch_<algorithm>.cuh
and, for the values of one tile, tuning/ beside it. A request holds its parts, each rounded up to 256 bytes, and 255
bytes (AliasTemporaries in cub/util_device.cuh).
"""

from __future__ import annotations

from memexplore.virtual_gpu.kernels import cuda_build

_PART = 256
_PADDING = 32
"""Descriptors before those of the tiles: TILE_STATUS_PADDING in cub/agent/single_pass_scan_operators.cuh."""


def _round(size: int) -> int:
    return -(-size // _PART) * _PART


def _request(*parts: int) -> int:
    return max(1, sum(_round(part) for part in parts) + _PART - 1)


def _is_hopper() -> bool:
    return cuda_build.current().compute_capability >= (9, 0)


def _radix_tile(key: int, value: int) -> int:
    """Return the values of a tile of a radix sort (OnesweepPolicy in tuning_radix_sort.cuh, with 64-bit offsets)."""
    widest = max(4, key, value)
    if not _is_hopper():
        threads, items = 384, 17 if key == 4 and value else 21
    elif key < 4:
        threads, items = {(1, 8): (384, 18), (2, 0): (512, 19), (2, 8): (512, 23)}.get((key, value), (384, 23))
    elif key == 4:
        threads, items = 384, 29 if value >= 8 else 17 if value else 19
    else:
        threads, items = 384, 24 if value >= 8 else 30
    return threads * max(1, items * 4 // widest)


def radix_sort(count: int, key: int, value: int = 0, bits: int | None = None) -> int:
    """Return the scratch of a radix sort of `count` keys with values, both given in bytes; `bits`: those compared.

    One tile needs none; more need bins for each pass of 8 bits, bins for each tile, copies of keys and values, and
    counters. Measured on an H100: 8000 floats with 64-bit indices, 4096 pairs of 64 bits.

    >>> from unittest import mock
    >>> with mock.patch.object(cuda_build, "_current", cuda_build.Build((2, 11), (9, 0), 132)):
    ...     radix_sort(2048, 8, 8), radix_sort(8000, 4, 8), radix_sort(4096, 8, 8)
    (1, 106751, 83455)
    """
    if count <= 256 * max(1, 19 * 4 // max(4, key, value)):
        return 1
    passes = -(-(8 * key if bits is None else bits) // 8)
    tiles = -(-count // _radix_tile(key, value))
    copies = (count * key, count * value) if passes > 1 else (0, 0)
    return _request(passes * 256 * 8, tiles * 256 * 4, *copies, 4 * passes)


def segmented_sort(count: int, key: int, value: int) -> int:
    """Return the scratch of a sort of many segments: copies of keys and values (dispatch_radix_sort.cuh)."""
    return _request(count * key, count * value)


def _tile_states(tiles: int, word: int, payload: int = 0) -> int:
    """Return the scratch for states of tiles: tile_state_allocation_size in agent/single_pass_scan_operators.cuh."""
    states = tiles + _PADDING
    return _request(_request(states * word, states * payload, states * payload))


def scan(count: int, item: int, primitive: bool = True) -> int:
    """Return the scratch of a scan with an operator of PyTorch's: the default tile of tuning_scan.cuh.

    Half-precision types are not primitive: status and values are separate. Measured: 100 000 integers of 64 bits.

    >>> scan(100_000, 8), scan(5, 4), scan(5, 2, primitive=False)
    (2815, 1023, 1279)
    """
    tiles = -(-count // (128 * max(1, min(15 * 4 // item, 30))))
    return _tile_states(tiles, 2 * max(item, 2)) if primitive else _tile_states(tiles, 4, item)


def select(count: int, item: int = 8, flagged: bool = False) -> int:
    """Return the scratch of a selection among values of `item` bytes, by flags or of distinct ones.

    Tiles are those of tuning_select_if.cuh. Measured: indices of 1 000 000 flags.

    >>> from unittest import mock
    >>> with mock.patch.object(cuda_build, "_current", cuda_build.Build((2, 11), (9, 0), 132)):
    ...     select(1_000_000, flagged=True)
    2815
    """
    if not _is_hopper():
        tile = 128 * max(1, min(10 * 4 // item, 20))
    elif flagged:
        tile = {4: 384 * 15, 8: 384 * 11}.get(item, 448 * 20)
    else:
        tile = {4: 384 * 17, 8: 384 * 11}.get(item, 256 * 22)
    return _tile_states(-(-count // tile), 8)


def unique_by_key(count: int) -> int:
    """Return the scratch of the first values of runs of equal 64-bit keys (tuning_unique_by_key.cuh)."""
    return _tile_states(-(-count // (448 * 11 if _is_hopper() else 64 * 5)), 16)


def scan_by_key(count: int, item: int) -> int:
    """Return the scratch of a scan of runs of equal keys, both of `item` bytes (tuning_scan_by_key.cuh)."""
    tile = {4: 288 * 14, 8: 224 * 11}[item] if _is_hopper() else 256 * 9
    tiles = -(-count // tile)
    return _request(16 * (tiles + _PADDING), item * (tiles + 1))


def reduce(count: int, item: int = 4) -> int:
    """Return the scratch of a sum: none up to one tile, else a sum for each block, five for each that fits the GPU.

    Source: DispatchReduce in dispatch_reduce.cuh, blocks of 256 threads with 16 values of 4 bytes.
    """
    if count <= 256 * (16 * 4 // item):
        return 1
    build = cuda_build.current()
    return _request(5 * build.multiprocessors * (build.resident_threads // 256) * item)
