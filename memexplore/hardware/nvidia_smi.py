"""Answer as `nvidia-smi` for a virtual GPU: the table, `-L`, `--query-gpu` and `--query-compute-apps`.

What a virtual GPU cannot know, such as its temperature, prints as `nvidia-smi` prints an unsupported value. The program
on the virtual GPU keeps the state in a file (virtual_gpu/patches/nvidia_smi.py), and `main` is what it starts under the
name `nvidia-smi`, in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shutil
import struct
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

_MIB = 1024**2
UNKNOWN = "[N/A]"
"""What `nvidia-smi` prints for a value that the GPU or its driver does not have."""
_DRIVERS = ((13, "580.65.06"), (12.8, "570.86.10"), (12.6, "560.28.03"), (12.4, "550.54.14"), (0, "530.30.02"))
"""The first CUDA version of those with a driver on Linux: table 'CUDA Toolkit and Corresponding Driver Versions' of the
release notes of CUDA."""
_USED = struct.Struct("<q")
FILE_BYTES = 4096
"""Bytes of the file of a state, which is mapped into memory."""


@dataclasses.dataclass(frozen=True)
class State:
    """One or several equal GPUs and the process that uses them; sizes in bytes."""

    name: str
    total: int
    capability: tuple[int, int]
    uuid: str
    cuda: str
    count: int
    pid: int
    process: str
    used: int = 0
    """On each GPU: 0 before the first request of the process, then what its allocator reserved and what is outside."""

    def uuid_of(self, index: int) -> str:
        """Return the identifier of a GPU; they are numbered from that of the first."""
        return f"GPU-{self.uuid[:-2]}{(int(self.uuid[-2:], 16) + index) % 256:02x}"

    def in_file(self) -> bytes:
        """Return the content of the file of the state; its first bytes are `used_in_file`."""
        fields = {name: value for name, value in dataclasses.asdict(self).items() if name != "used"}
        return (used_in_file(self.used) + json.dumps(fields).encode()).ljust(FILE_BYTES, b"\0")


def used_in_file(used: int) -> bytes:
    """Return the first bytes of the file of a state: the memory in use."""
    return _USED.pack(used)


def state_in(content: bytes) -> State | None:
    """Return the state in the content of a file; None while no virtual GPU is on.

    >>> t4 = State("Tesla T4", 16 << 30, (7, 5), "00", "13.0", 1, 7, "python", used=1 << 30)
    >>> state_in(t4.in_file()) == t4, state_in(bytes(FILE_BYTES))
    (True, None)
    """
    fields = content[_USED.size :].rstrip(b"\0")
    if not fields:
        return None
    values = json.loads(fields)
    major, minor = values.pop("capability")
    return State(**values, capability=(major, minor), used=_USED.unpack_from(content)[0])


def driver_version(cuda: str) -> str:
    """Return the driver that came with a version of CUDA.

    >>> driver_version("13.2"), driver_version("12.6")
    ('580.65.06', '560.28.03')
    """
    return next(driver for first, driver in _DRIVERS if float(cuda) >= first)


# --- the command ------------------------------------------------------------------------------------------------------


class _Error(Exception):
    """Ends the command with a text and an exit status."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Error(
            f"memexplore's nvidia-smi for a virtual GPU: {message}; it has the table, -L, --query-gpu and "
            "--query-compute-apps with --format=csv, -i and -l",
            2,
        )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="nvidia-smi", allow_abbrev=False)
    parser.add_argument("-L", "--list-gpus", action="store_true")
    parser.add_argument("--query-gpu")
    parser.add_argument("--query-compute-apps")
    parser.add_argument("--format", default="")
    parser.add_argument("-i", "--id")
    parser.add_argument("-l", "--loop", type=int, nargs="?", const=5)
    parser.add_argument("-lms", "--loop-ms", type=int)
    parser.add_argument("-f", "--filename")
    return parser


def answer(arguments: Sequence[str], state: State | None) -> tuple[str, int]:
    """Return what `nvidia-smi` prints for the arguments of its command line, and its exit status.

    >>> t4 = State("Tesla T4", 16 << 30, (7, 5), "00", "13.0", 1, 7, "python", used=1 << 30)
    >>> print(answer(["--query-gpu=memory.used,power.draw", "--format=csv,noheader"], t4)[0], end="")
    1024 MiB, [N/A]
    """
    try:
        return _text(_parser().parse_args(arguments), state), 0
    except _Error as error:
        return f"{error.args[0]}\n", error.args[1]


def _text(options: argparse.Namespace, state: State | None) -> str:
    if state is None:
        raise _Error("No devices were found", 6)
    indices = _indices(options.id, state)
    if options.list_gpus:
        return "".join(f"GPU {index}: {state.name} (UUID: {state.uuid_of(index)})\n" for index in indices)
    if options.query_gpu is None and options.query_compute_apps is None:
        return _table(indices, state)
    style = options.format.split(",")
    if "csv" not in style:
        raise _Error("\"--format=\" switch is missing. Please run 'nvidia-smi -h' for help.", 2)
    if options.query_gpu is not None:
        rows = [_gpu(index, state) for index in indices]
        return _csv(options.query_gpu, _GPU_NAMES, rows, style)
    rows = [_process(index, state) for index in indices if state.used]
    return _csv(options.query_compute_apps, _PROCESS_NAMES, rows, style)


def _indices(chosen: str | None, state: State) -> list[int]:
    if chosen is None:
        return list(range(state.count))
    names = {name: index for index in range(state.count) for name in (str(index), state.uuid_of(index), _bus(index))}
    unknown = [name for name in chosen.split(",") if name not in names]
    if unknown:
        raise _Error("No devices were found", 6)
    return sorted({names[name] for name in chosen.split(",")})


def _bus(index: int) -> str:
    return f"00000000:{index:02X}:00.0"


_GPU_NAMES = {
    "gpu_name": "name",
    "gpu_uuid": "uuid",
    "gpu_bus_id": "pci.bus_id",
    **{f"clocks.{clock}": f"clocks.current.{clock}" for clock in ("sm", "gr", "mem", "video")},
    **{f"{clock}_clock": f"clocks.current.{clock}" for clock in ("sm", "gr", "mem")},
}
_PROCESS_NAMES = {"used_memory": "used_gpu_memory", "name": "process_name", "gpu_bus_id": "gpu_bus_id"}
"""Other names of fields, and the names that the header has for them."""
_UNITS = (
    ("MiB", re.compile(r"memory\.(total|reserved|used|free)|used_gpu_memory")),
    ("%", re.compile(r"utilization\..*|fan\.speed")),
    ("W", re.compile(r"(enforced\.)?power\..*")),
    ("MHz", re.compile(r"clocks\.(current|max|applications|default_applications)\..*")),
)


def _gpu(index: int, state: State) -> dict[str, str]:
    return {
        "timestamp": _now(),
        "driver_version": driver_version(state.cuda),
        "count": str(state.count),
        "index": str(index),
        "name": state.name,
        "uuid": state.uuid_of(index),
        "pci.bus_id": _bus(index),
        "memory.total": f"{state.total // _MIB} MiB",
        "memory.used": f"{_mib(state.used)} MiB",
        "memory.free": f"{state.total // _MIB - _mib(state.used)} MiB",
        "compute_cap": ".".join(map(str, state.capability)),
        "compute_mode": "Default",
    }


def _process(index: int, state: State) -> dict[str, str]:
    return {
        "timestamp": _now(),
        "gpu_name": state.name,
        "gpu_bus_id": _bus(index),
        "gpu_uuid": state.uuid_of(index),
        "pid": str(state.pid),
        "process_name": state.process,
        "used_gpu_memory": f"{_mib(state.used)} MiB",
    }


def _mib(size: int) -> int:
    return round(size / _MIB)


def _now() -> str:
    return time.strftime("%Y/%m/%d %H:%M:%S.000")


def _csv(query: str, names: dict[str, str], rows: list[dict[str, str]], style: list[str]) -> str:
    fields = [names.get(field.strip(), field.strip()) for field in query.split(",")]
    lines = [[row.get(field, UNKNOWN) for field in fields] for row in rows]
    if "nounits" in style:
        # The header keeps the units.
        lines = [[value.removesuffix(" MiB") for value in line] for line in lines]
    if "noheader" not in style:
        lines.insert(0, [field + _unit(field) for field in fields])
    return "".join(", ".join(line) + "\n" for line in lines)


def _unit(field: str) -> str:
    return next((f" [{unit}]" for unit, pattern in _UNITS if pattern.fullmatch(field)), "")


_COLUMNS = 41, 24, 22
"""Widths of the columns of the table of GPUs."""


def _table(indices: list[int], state: State) -> str:
    driver = driver_version(state.cuda)
    columns = "+".join("-" * width for width in _COLUMNS)
    line = f"+{'-' * len(columns)}+"
    gpus, processes = [], []
    for index in indices:
        memory = f"{_mib(state.used)}MiB / {state.total // _MIB:>6}MiB"
        gpus += [
            f"| {index:>3}  {state.name[:30]:<31}N/A | {_bus(index):>18} N/A | {'N/A':>20} |",
            f"| N/A   N/A   N/A {'N/A /  N/A':>23} | {memory:>22} | {'N/A':>8} {'Default':>11} |",
            f"|{'':41}|{'':24}| {'N/A':>20} |",
            f"+{columns}+",
        ]
        size = f"{_mib(state.used)}MiB"
        processes.append(f"|  {index:>3}   N/A  N/A {state.pid:>16}      C   {state.process[-34:]:<34} {size:>10} |")
    text = [
        time.strftime("%a %b %d %H:%M:%S %Y"),
        line,
        f"| NVIDIA-SMI {driver:<22} Driver Version: {driver:<14} CUDA Version: {state.cuda:<8} |",
        f"|{columns}|",
        "| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |",
        "| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |",
        "|                                         |                        |               MIG M. |",
        f"|{columns}|".replace("-", "="),
        *gpus,
        "",
        line,
        f"| {'Processes:':<87} |",
        f"|  {'GPU   GI   CI              PID   Type   Process name                        GPU Memory':<86} |",
        f"|  {'      ID   ID                                                               Usage':<86} |",
        f"|{'=' * len(columns)}|",
        *(processes if state.used else [f"|  {'No running processes found':<86} |"]),
        line,
    ]
    return "\n".join(text) + "\n"


# --- the process ------------------------------------------------------------------------------------------------------


def main(path: str, arguments: Sequence[str]) -> NoReturn:
    """Be `nvidia-smi`: print what it prints for the state in a file, and end the process.

    Where no virtual GPU is on any more, the command of that name further along PATH runs.
    """
    state = _read(path)
    if state is None:
        _run_next(os.path.dirname(path), arguments)
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError), contextlib.ExitStack() as stack:
        pause, filename = _repeated(arguments)
        file = stack.enter_context(open(filename, "w")) if filename else sys.stdout
        while state is not None:
            text, status = answer(arguments, state)
            print(text, end="", file=file, flush=True)
            if not pause:
                sys.exit(status)
            time.sleep(pause)
            state = _read(path)
    sys.exit(0)


def _repeated(arguments: Sequence[str]) -> tuple[float, str | None]:
    """Return the seconds after which the command prints again, 0 for once, and the file that it prints to."""
    try:
        options = _parser().parse_args(arguments)
    except _Error:
        return 0, None
    return options.loop_ms / 1000 if options.loop_ms else options.loop or 0, options.filename


def _read(path: str) -> State | None:
    try:
        with open(path, "rb") as file:
            return state_in(file.read())
    except FileNotFoundError:
        return None


def _run_next(own: str, arguments: Sequence[str]) -> NoReturn:
    folders = [folder for folder in os.environ.get("PATH", os.defpath).split(os.pathsep) if folder != own]
    command = shutil.which("nvidia-smi", path=os.pathsep.join(folders))
    if command is None:
        print("nvidia-smi: command not found (no virtual GPU is on)", file=sys.stderr)
        sys.exit(127)
    os.execv(command, [command, *arguments])
