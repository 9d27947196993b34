"""Files of golden recordings: allocator events of each scenario on one GPU and torch release. Needs no packages.

A file is gzipped JSON: `gpu` (properties), `versions`, and `scenarios` by name. A scenario holds its outcome and its
events as columns, one row an event of the allocator in time order: `action` (a number into `ACTIONS`), `size` in
bytes (requested, or of the segment), `address` (less the lowest one of the run; -1 for none), `stream` and `frame` (a
number into `frames`, -1 for none, as in backward).
"""

import gzip
import json
import pathlib
from typing import Any

ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "snapshot",
    "oom",
)
FORMAT = 1
LIMIT = 1_000_000
"""Largest size of all golden files together, in bytes."""
FOLDER = pathlib.Path(__file__).parent.parent / "data"


def columns(events: list[dict[str, Any]]) -> dict[str, list]:
    """Return columns and frames of a `device_traces` entry of `torch.cuda.memory._snapshot()`."""
    addresses = [event["addr"] for event in events if event.get("addr") is not None]
    lowest = min(addresses, default=0)
    frames: dict[str, int] = {}
    return {
        "action": [ACTIONS.index(event["action"]) for event in events],
        "size": [event["size"] for event in events],
        "address": [-1 if event.get("addr") is None else event["addr"] - lowest for event in events],
        "stream": [event.get("stream", 0) for event in events],
        "frame": [
            frames.setdefault(text, len(frames)) if (text := _where(event.get("frames") or ())) else -1
            for event in events
        ],
        "frames": list(frames),
    }


def _where(stack) -> str:
    """Return the innermost Python frame and the innermost frame of the scenario, as `file:line function`."""
    own = next((frame for frame in stack if "/tests/gpu/" in frame["filename"].replace("\\", "/")), None)
    frames = [frame for frame in (stack[0] if stack else None, own) if frame is not None]
    texts = [f"{pathlib.PurePath(frame['filename']).name}:{frame['line']} {frame['name']}" for frame in frames]
    return " < ".join(dict.fromkeys(texts))


def filename(gpu: str, torch: str) -> str:
    """Return the name of the file of a GPU and a torch release.

    >>> filename("NVIDIA H200", "2.11.0+cu130")
    'golden_nvidia_h200_torch_2.11.0.json.gz'
    """
    return f"golden_{'_'.join(gpu.lower().split())}_torch_{torch.split('+')[0]}.json.gz"


def write(path: pathlib.Path, run: dict[str, Any]) -> int:
    """Write a run and return the size of its file in bytes; the same run gives the same bytes."""
    text = json.dumps({"format": FORMAT, **run}, separators=(",", ":"), sort_keys=True)
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    return path.stat().st_size


def read(path: pathlib.Path) -> dict[str, Any]:
    """Read a run that `write` wrote. Raises ValueError for another format."""
    run = json.loads(gzip.decompress(path.read_bytes()))
    if run.get("format") != FORMAT:
        raise ValueError(f"{path.name} has format {run.get('format')}, this test reads {FORMAT}: record it anew")
    return run
