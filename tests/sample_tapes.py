"""Tapes for tests: a small one with known bytes, a training run, an out-of-memory run, a tape with many rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from memexplore.allocator import replay
from memexplore.tape import Action, Category, Ending, Frame, Meta, Phase, Source, Tape
from memexplore.text.tensor_text import interned

MIB = 1024**2
GIB = 1024**3

T4 = Meta(
    Source.PREDICTED,
    "Tesla T4",
    gpu="T4",
    capacity=15_655_829_504,
    total=15_843_721_216,
    versions={"torch": "2.13.0+cpu", "memexplore": "0.1.0"},
    notes=("The workspace of cuDNN is assumed to be 0 bytes.",),
)
CPU = Meta(Source.MEASURED, "cpu", versions={"torch": "2.13.0"})


class Program:
    """Builder of a tape row by row; each block has its own address until `replay` places the tape."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, ...]] = []
        self.ops: dict[str, int] = {}
        self.modules: dict[str, int] = {}
        self.stacks: dict[tuple[Frame, ...], int] = {}
        self.tensors: dict[int, str] = {}
        self.step, self.phase = 0, Phase.OTHER
        self.address = 0
        self.held: dict[int, tuple[int, ...]] = {}

    def mark(self, step: int, phase: Phase) -> None:
        """Start a step or a phase."""
        self.step, self.phase = step, phase
        self.rows.append((Action.MARK, -1, 0, Category.UNKNOWN, phase, step, -1, -1, -1))

    def alloc(
        self, size: int, category: Category, op: str = "", module: str = "", line: int = 0, tensor: str = ""
    ) -> int:
        """Allocate a block and return its address for `free`; `tensor` is a shape and dtype as `float32[2, 3]`."""
        self.tensors[len(self.rows)] = tensor
        stack = (Frame("/env/site-packages/torch/nn/modules/conv.py", 548, "forward"), Frame("train.py", line, "step"))
        names = (
            self.ops.setdefault(op, len(self.ops)) if op else -1,
            self.modules.setdefault(module, len(self.modules)) if module else -1,
            self.stacks.setdefault(stack, len(self.stacks)) if line else -1,
        )
        row = (self.address, size, category, self.phase, self.step, *names)
        self.rows.append((Action.ALLOC, *row))
        self.held[self.address] = row
        self.address += (size // 512 + 1) * 512
        return row[0]

    def free(self, *addresses: int) -> None:
        """Free blocks: `free_requested` and `free_completed` in consecutive rows."""
        for address in addresses:
            _, size, category, _, _, op, module, stack = self.held.pop(address)
            row = (address, size, category, self.phase, self.step, op, module, stack)
            self.rows += [(Action.FREE_REQUESTED, *row), (Action.FREE_COMPLETED, *row)]

    def oom(self, size: int, op: str, module: str, line: int) -> None:
        """Add a failed request."""
        self.alloc(size, Category.UNKNOWN, op, module, line)
        self.rows[-1] = (Action.OOM, -1, *self.rows[-1][2:])

    def tape(self, meta: Meta = CPU) -> Tape:
        """Return the tape so far, not placed by the allocator model."""
        names = ("action", "address", "size", "category", "phase", "step", "op", "module", "stack")
        columns: dict[str, Any] = dict(
            zip(names, np.array(self.rows, dtype=np.int64).reshape(-1, len(names)).T, strict=True)
        )
        columns["tensor"], texts = interned(self.tensors.get(row, "") for row in range(len(self.rows)))
        tables = {"ops": list(self.ops), "modules": list(self.modules), "stacks": list(self.stacks)}
        return Tape.from_columns(columns, meta=meta, tensor_texts=texts, **tables)


def small_tape() -> Tape:
    """Return one training step of a model `Net` with a layer `fc` on a CPU; comments give the bytes after each row."""
    program = Program()
    weight = program.alloc(400, Category.PARAMETER, "empty", "fc", 3)  # row 0: 400
    program.mark(1, Phase.FORWARD)  # row 1
    given = program.alloc(100, Category.INPUT, "randn", "", 5)  # row 2: 500
    kept = program.alloc(200, Category.ACTIVATION, "addmm", "fc", 6)  # row 3: 700
    scratch = program.alloc(50, Category.TEMPORARY, "relu", "Net", 7)  # row 4: 750, the peak
    program.free(scratch)  # rows 5, 6: 700
    program.mark(1, Phase.BACKWARD)  # row 7
    program.free(kept)  # rows 8, 9: 500
    program.alloc(240, Category.GRADIENT, "mm", "fc", 8)  # row 10: 740
    program.free(given)  # rows 11, 12: 640
    program.mark(1, Phase.OPTIMIZER)  # row 13
    program.alloc(80, Category.OPTIMIZER_STATE, "zeros_like", "fc", 9)  # row 14: 720
    assert weight == 0
    return program.tape()


def _network(depth: int) -> list[tuple[str, int]]:
    """Return names and channels of convolution, batch norm and ReLU layers of an encoder and a decoder."""
    names = []
    for half, order in (("encoder", range(depth)), ("decoder", reversed(range(depth)))):
        for number, level in enumerate(order):
            for position, kind in enumerate(("conv", "norm", "relu") * 2):
                names.append((f"{half}.{number}.block.{position}.{kind}", 64 * 2**level))
    return [*names, ("head.conv", 64)]


def training_tape(steps: int = 3, depth: int = 4, pixels: int = 256, batch: int = 8, meta: Meta = T4) -> Tape:
    """Return a placed tape of `steps` steps of a UNet-like model with AdamW; every category except unknown occurs."""
    program = Program()
    network = _network(depth)
    weights = _weights(program, network)
    for step in range(1, steps + 1):
        program.mark(step, Phase.FORWARD)
        program.phase = Phase.FORWARD
        given = program.alloc(batch * 3 * pixels * pixels * 4, Category.INPUT, "randn", "", 20)
        kept = _forward(program, network, pixels, batch)
        program.mark(step, Phase.BACKWARD)
        gradients = _backward(program, kept, weights)
        program.free(given)
        program.mark(step, Phase.OPTIMIZER)
        if step == 1:
            for (name, _), size in weights.items():
                for _ in range(2):
                    program.alloc(size, Category.OPTIMIZER_STATE, "zeros_like", name, 50)
        scratch = program.alloc(sum(weights.values()), Category.TEMPORARY, "_foreach_sqrt", "", 51)
        program.free(scratch, *gradients)
    program.modules.setdefault("UNet", len(program.modules))
    return replay(program.tape(meta))


def _weights(program: Program, network: list[tuple[str, int]]) -> dict[tuple[str, str], int]:
    """Allocate the parameters and buffers of a network; return the bytes of each parameter."""
    weights = {}
    for name, channels in network:
        for part in ("weight", "bias"):
            size = channels * channels * 9 * 4 if (part, name[-4:]) == ("weight", "conv") else channels * 4
            if not name.endswith("relu"):
                program.alloc(size, Category.PARAMETER, "empty", name, 11)
                weights[name, part] = size
        if name.endswith("norm"):
            program.alloc(channels * 4, Category.BUFFER, "zeros", name, 11)
    return weights


def _forward(program: Program, network: list[tuple[str, int]], pixels: int, batch: int) -> list[tuple[str, int, int]]:
    """Allocate the activations of a network; return their layer, bytes and address."""
    kept = []
    for name, channels in network:
        side = pixels * 64 // channels
        size = batch * channels * side * side * 4
        if name.endswith("conv"):
            workspace = program.alloc(32 * MIB, Category.WORKSPACE, "convolution", name, 30)
            scratch = program.alloc(size // 4, Category.TEMPORARY, "convolution", name, 30)
        text = f"float32[{batch}, {channels}, {side}, {side}]"
        kept.append((name, size, program.alloc(size, Category.ACTIVATION, name.split(".")[-1], name, 31, text)))
        if name.endswith("conv"):
            program.free(scratch, workspace)
    return kept


def _backward(program: Program, kept: list[tuple[str, int, int]], weights: dict[tuple[str, str], int]) -> list[int]:
    """Free the activations, last one first; return the addresses of the gradients."""
    gradients = []
    for name, size, address in reversed(kept):
        gradient_of_output = program.alloc(size, Category.TEMPORARY, f"{name.split('.')[-1]}_backward", name, 41)
        for part in ("weight", "bias"):
            if (name, part) in weights:
                gradients.append(
                    program.alloc(weights[name, part], Category.GRADIENT, "convolution_backward", name, 42)
                )
        program.free(address, gradient_of_output)
    return gradients


def leaking_tape(steps: int, leaked: int = 100, meta: Meta = CPU) -> Tape:
    """Return a tape whose steps keep the `leaked` bytes of their loss, from line 9, and free their other block."""
    program = Program()
    program.alloc(1000, Category.PARAMETER, "empty", "fc", 3)
    for step in range(1, steps + 1):
        program.mark(step, Phase.FORWARD)
        held = program.alloc(500, Category.ACTIVATION, "mm", "fc", 8)
        program.alloc(leaked, Category.ACTIVATION, "sum", "", 9)
        program.mark(step, Phase.BACKWARD)
        program.free(held)
    return program.tape(meta)


def oom_tape() -> Tape:
    """Return a forward that requests 2 GiB when 1 GiB of 4 GiB is left."""
    program = Program()
    program.alloc(1 * GIB, Category.PARAMETER, "empty", "layer1", 3)
    program.mark(1, Phase.FORWARD)
    program.alloc(2 * GIB, Category.ACTIVATION, "convolution", "layer1", 6)
    program.oom(2 * GIB, "convolution", "layer2.conv", 7)
    rows = program.rows
    for position, size in ((2, 2 * GIB), (0, 1 * GIB)):
        rows.insert(position, (Action.SEGMENT_ALLOC, rows[position][1], size, *rows[position][3:]))
    return program.tape(T4._replace(capacity=4 * GIB, total=5 * GIB, device="4.00 GiB GPU"))


def unwound_tape() -> Tape:
    """Return a tape whose Python code frees everything after the failed request."""
    program = Program()
    program.mark(1, Phase.FORWARD)
    held = program.alloc(GIB, Category.ACTIVATION, "mm", "fc", 3)
    program.oom(4 * GIB, "mm", "fc", 4)
    program.free(held)
    return program.tape(T4._replace(capacity=2 * GIB, ending=Ending.OUT_OF_MEMORY))


def big_tape(rows: int = 1_000_000, seed: int = 0) -> Tape:
    """Return `rows` allocs and frees of a CPU at 20 000 addresses with random order, names and sizes."""
    random = np.random.default_rng(seed)
    address = random.integers(0, 20_000, rows) * 4096
    order = np.argsort(address, kind="stable")
    # Visits of an address alternate between alloc and free.
    starts = np.flatnonzero(np.diff(address[order], prepend=-1))
    visit = np.empty(rows, dtype=np.int64)
    visit[order] = np.arange(rows) - np.repeat(starts, np.diff(starts, append=rows))
    return Tape.from_columns(
        {
            "action": np.where(visit % 2 == 0, Action.ALLOC, Action.FREE_REQUESTED),
            "address": address,
            "size": random.integers(1, 4096, rows),
            "category": random.integers(0, len(Category), rows),
            "phase": np.arange(rows) // 10_000 % 4,
            "step": np.arange(rows) // 40_000,
            "op": random.integers(0, 50, rows),
            "module": random.integers(0, 300, rows),
            "stack": random.integers(0, 400, rows),
        },
        meta=CPU,
        ops=[f"op{number}" for number in range(50)],
        modules=["Net", *(f"layer{number // 10}.{number % 10}" for number in range(299))],
        stacks=[(Frame("train.py", number, "step"),) for number in range(400)],
    )
