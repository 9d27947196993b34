"""Record the golden scenarios on a real NVIDIA GPU: `python -m tests.gpu.record`, from the repository's root.

Needs torch only (no notebook packages), and memexplore for the scenarios with knobs. Each scenario runs in its own
process; a scenario that fails is recorded as failed and the others run. Takes under five minutes and writes one file
into tests/data.
"""

import argparse
import concurrent.futures
import gc
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback

import torch

from tests.gpu import golden
from tests.gpu.scenarios import SCENARIOS

EXCLUSIVE = ("mlp_sgd", "unet_adamw", "transformer_bf16")
"""Scenarios that run one at a time, so that memory outside the allocator can be read from the device."""
DEADLINE_S = 270
SCENARIO_S = 90
MAX_EVENTS = 200_000
PROPERTIES = (
    "name",
    "total_memory",
    "major",
    "minor",
    "multi_processor_count",
    "L2_cache_size",
    "max_threads_per_multi_processor",
    "shared_memory_per_multiprocessor",
    "is_integrated",
)


def used_outside() -> int:
    """Return the bytes in use outside the allocator; correct if no other process uses the device."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def record(name: str) -> dict:
    """Run a scenario in this process, which has not used CUDA yet, and return the allocator's events and statistics."""
    torch.cuda.init()
    outside_before, stats_before = used_outside(), torch.cuda.memory_stats()
    # Stacks of frees lose an exception that unwinds C++ code, as in checkpointing.
    torch.cuda.memory._record_memory_history(
        enabled="all", context="alloc", stacks="python", max_entries=MAX_EVENTS, device=0
    )
    outcome, message = "fits", ""
    started = time.perf_counter()
    torch.manual_seed(0)
    gc.collect()
    # A collection during the run would free at a point that differs between runs.
    gc.disable()
    try:
        SCENARIOS[name].function()
        torch.cuda.synchronize()
    except torch.OutOfMemoryError as error:
        outcome, message = "oom", str(error)
    except Exception:
        outcome, message = "failed", traceback.format_exc()
    snapshot = torch.cuda.memory._snapshot()
    events = snapshot["device_traces"][0]
    if len(events) >= MAX_EVENTS:
        outcome, message = "failed", f"more than {MAX_EVENTS} events: the history is cut"
    return {
        "gpu": gpu_properties(),
        "versions": versions(),
        "scenario": {
            "outcome": outcome,
            "message": message,
            "allocator": SCENARIOS[name].allocator,
            "allocator_settings": plain(snapshot.get("allocator_settings", {})),
            "seconds": round(time.perf_counter() - started, 3),
            "peak_allocated": torch.cuda.max_memory_allocated(),
            "peak_reserved": torch.cuda.max_memory_reserved(),
            "stats_before": dict(stats_before),
            "stats_after": dict(torch.cuda.memory_stats()),
            "outside_before": outside_before,
            "outside_after": used_outside(),
            "alone": name in EXCLUSIVE,
            "events": golden.columns(events),
        },
    }


def plain(value):
    """Return a value as JSON; values that JSON does not support become text."""
    return json.loads(json.dumps(value, default=str))


def gpu_properties() -> dict:
    properties = torch.cuda.get_device_properties(0)
    return {name: getattr(properties, name) for name in PROPERTIES if hasattr(properties, name)}


def versions() -> dict:
    return {
        "torch": torch.__version__,
        "torch_git": torch.version.git_version,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": driver(),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    return done.stdout.split("\n")[0].strip() or None


def failed(name: str, message: str) -> dict:
    return {"scenario": {"outcome": "failed", "message": message, "allocator": SCENARIOS[name].allocator}}


def record_in_process(name: str, deadline: float) -> dict:
    """Return the result of `record` in a fresh process; a failure is a result, too."""
    left = deadline - time.monotonic()
    if left < 5:
        return failed(name, f"not run: {DEADLINE_S} s were over")
    environment = {key: value for key, value in os.environ.items() if not key.endswith("ALLOC_CONF")}
    if settings := SCENARIOS[name].allocator:
        # The old name, which every release reads, and the new name.
        environment |= {"PYTORCH_CUDA_ALLOC_CONF": settings, "PYTORCH_ALLOC_CONF": settings}
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder, "result.json")
        command = [sys.executable, "-m", "tests.gpu.record", "--child", str(result), name]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=min(left, SCENARIO_S)
            )
        except subprocess.TimeoutExpired as error:
            return failed(name, f"stopped after {error.timeout:.0f} s")
        if done.returncode or not result.exists():
            return failed(name, f"exit status {done.returncode}: {done.stderr[-4000:]}")
        return json.loads(result.read_text())


def keep(folder: pathlib.Path, name: str, result: dict) -> pathlib.Path | None:
    """Add a result to the file of its GPU and release and return its path; None if the process found no GPU."""
    if "gpu" not in result:
        return None
    path = folder / golden.filename(result["gpu"]["name"], result["versions"]["torch"])
    run = golden.read(path) if path.exists() else {"scenarios": {}}
    run |= {"gpu": result["gpu"], "versions": result["versions"]}
    run["scenarios"][name] = result["scenario"]
    golden.write(path, run)
    return path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.record", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="SCENARIO", help="some only; all by default")
    parser.add_argument("--output", type=pathlib.Path, default=golden.FOLDER, help="folder of the file")
    parser.add_argument("--jobs", type=int, default=4, help="scenarios that run at the same time")
    parser.add_argument("--child", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.names) - set(SCENARIOS):
        parser.error(f"no scenario {', '.join(sorted(unknown))}; there are {', '.join(SCENARIOS)}")
    if torch.version.cuda is None or not torch.cuda.is_available():
        print(
            f"tests.gpu.record needs a real NVIDIA GPU: torch {torch.__version__} finds none here. Golden recordings "
            "come from real hardware only; run it on a machine with a GPU and a CUDA build of torch.",
            file=sys.stderr,
        )
        return 2
    if options.child is not None:
        options.child.write_text(json.dumps(record(options.names[0])))
        return 0
    return record_all(options.names or list(SCENARIOS), options.output, options.jobs)


def record_all(names: list[str], folder: pathlib.Path, jobs: int) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    deadline = started + DEADLINE_S
    results: dict[str, dict] = {}

    def run(name: str) -> None:
        results[name] = record_in_process(name, deadline)
        scenario = results[name]["scenario"]
        events = len(scenario["events"]["size"]) if "events" in scenario else 0
        print(f"{name}: {scenario['outcome']}, {events} events {scenario['message'].strip()[-300:]}", flush=True)

    for name in filter(EXCLUSIVE.__contains__, names):
        run(name)
    with concurrent.futures.ThreadPoolExecutor(max(1, jobs)) as pool:
        list(pool.map(run, (name for name in names if name not in EXCLUSIVE)))
    # A process that died before it reported its GPU gets the GPU of the others.
    reached = next((result for result in results.values() if "gpu" in result), None)
    if reached is None:
        print("no scenario reached the GPU; nothing is written", file=sys.stderr)
        return 1
    for name, result in results.items():
        path = keep(folder, name, {**{key: reached[key] for key in ("gpu", "versions")}, **result})
    size = sum(file.stat().st_size for file in folder.glob("golden_*.json.gz"))
    unexpected = [name for name, result in results.items() if result["scenario"]["outcome"] != SCENARIOS[name].outcome]
    print(
        f"{path}: {len(results) - len(unexpected)} of {len(results)} scenarios as expected in "
        f"{time.monotonic() - started:.0f} s; golden files take {size:,} of {golden.LIMIT:,} bytes"
    )
    if unexpected:
        print(f"not as expected: {', '.join(unexpected)}", file=sys.stderr)
    return 1 if unexpected or size > golden.LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
