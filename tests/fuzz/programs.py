"""Random programs on the virtual GPU, held against an independent count: the same program on real CPU tensors.

A program has a few variables. Each instruction makes, views, changes or deletes tensors, or changes the size of a
storage. After each of them the bytes that the virtual GPU holds for the program must be the sum of the distinct
storages that the variables of the CPU run have.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import memexplore as mx

BLOCK = 512
SMALL = 1024**2
"""Bytes: smaller blocks are rounded to `BLOCK` and never larger (docs/allocator.md section 2)."""
VARIABLES = 6
SHAPES = ((), (0,), (1,), (7,), (3, 5), (4, 4), (2, 3, 4), (128, 64), (1000, 100), (700, 1000))
DTYPES = (torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float64)

Tensor = torch.Tensor
Variables = list[Any]
"""Tensors or None; those of one run are on one device."""


class Line(NamedTuple):
    """An instruction: its text, and what it does to the variables on a device."""

    text: str
    run: Callable[[Variables, str], object]


def check(number: int, lines: int | None = None) -> str:
    """Run the program of a number on both devices; return `equal` or raise AssertionError with the program."""
    rng = random.Random(number)
    done: list[str] = []
    program = ""
    with warnings.catch_warnings(), mx.virtual("T4"):
        warnings.simplefilter("ignore")
        variables: dict[str, Variables] = {device: [None] * VARIABLES for device in ("cpu", "cuda")}
        for _ in range(lines or rng.randrange(3, 30)):
            line = _line(variables["cpu"], rng)
            # What the CPU refuses is no part of the program.
            if not _runs(line, variables["cpu"], "cpu"):
                continue
            done.append(line.text)
            program = "\n".join(done)
            assert _runs(line, variables["cuda"], "cuda"), f"the last line raised an error\n{program}"
            _compare(variables, program)
        variables["cuda"].clear()
        assert _held() == (0, 0), f"{_held()} bytes are left\n{program}"
    return "equal"


def _runs(line: Line, variables: Variables, device: str) -> bool:
    """Run a line and return whether it raised no error."""
    try:
        line.run(variables, device)
    except (RuntimeError, TypeError, IndexError, NotImplementedError):
        return False
    return True


def _held() -> tuple[int, int]:
    """Return the requested and allocated bytes of the virtual GPU."""
    statistics = torch.cuda.memory_stats()
    return statistics["requested_bytes.all.current"], statistics["allocated_bytes.all.current"]


def _compare(variables: dict[str, Variables], program: str) -> None:
    # A view keeps the tensor that it was made of, also after `view.data = other`.
    tensors = [tensor for each in variables["cpu"] if _is(each) for tensor in (each, each._base) if _is(tensor)]
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
    sizes = list(storages.values())
    requested, allocated = _held()
    assert requested == sum(sizes), f"{requested} bytes are requested, not {sum(sizes)}\n{program}"
    if all(size <= SMALL - BLOCK for size in sizes):
        blocks = sum(-(-size // BLOCK) * BLOCK for size in sizes)
        assert allocated == blocks, f"{allocated} bytes are allocated, not {blocks}\n{program}"
    for real, virtual in zip(variables["cpu"], variables["cuda"], strict=True):
        assert _is(real) == _is(virtual), program
        if _is(real):
            same = (real.shape, real.dtype, real.stride(), real.storage_offset())
            found = (virtual.shape, virtual.dtype, virtual.stride(), virtual.storage_offset())
            assert same == found, f"{found} instead of {same}\n{program}"


def _is(value: Any) -> bool:
    return value is not None


def _line(variables: Variables, rng: random.Random) -> Line:
    """Return a random instruction for variables as those of the CPU run are now."""
    target = rng.randrange(VARIABLES)
    held = [at for at, value in enumerate(variables) if _is(value)]
    if not held or rng.random() < 0.2:
        return _new(target, rng)
    source = rng.choice(held)
    if rng.random() < 0.15:
        return Line(f"del v{source}", lambda values, device: values.__setitem__(source, None))
    if rng.random() < 0.1:
        return _resized(source, variables[source], rng)
    if not _has_memory(variables[source]):
        # Nothing may read it: on the CPU the process would end.
        return _resized(source, variables[source], rng, back=True)
    kind = rng.random()
    if kind < 0.2:
        name, change = rng.choice(list(CHANGES.items()))
        return Line(f"v{source}.{name}", lambda values, device: change(values[source]))
    if kind < 0.35:
        others = [at for at in held if _has_memory(variables[at])]
        return _two(target, source, rng.choice(others), rng, variables[source])
    name, function = rng.choice(list((VIEWS if kind < 0.7 else COPIES).items()))
    return Line(
        f"v{target} = v{source}.{name}", lambda values, device: _assign(values, target, function(values[source]))
    )


def _assign(values: Variables, target: int, value: Tensor) -> None:
    values[target] = value


def _new(target: int, rng: random.Random) -> Line:
    shape, dtype = rng.choice(SHAPES), rng.choice(DTYPES)
    name = rng.choice(("empty", "zeros", "ones"))
    make: Callable[..., Tensor] = getattr(torch, name)
    text = f"v{target} = torch.{name}({shape}, dtype={dtype})"
    return Line(text, lambda values, device: _assign(values, target, make(shape, dtype=dtype, device=device)))


def _resized(source: int, value: Tensor, rng: random.Random, back: bool = False) -> Line:
    """Return a line that changes the size of a storage, to what its tensor needs if `back`."""
    size = _needed(value) if back else rng.choice((0, 0, 1, 512, 513, _needed(value), 100_000, 3_000_000))
    text = f"v{source}.untyped_storage().resize_({size})"
    return Line(text, lambda values, device: values[source].untyped_storage().resize_(size))


def _two(target: int, source: int, other: int, rng: random.Random, value: Tensor) -> Line:
    """Return a line with two operands."""
    # On the virtual GPU a view of a view keeps the latter, so after `view.data = other` it keeps the memory of `other`.
    match rng.randrange(5 if value._base is None else 4):
        case 0:
            text = f"v{target} = torch.cat([v{source}, v{other}])"
            return Line(
                text, lambda values, device: _assign(values, target, torch.cat([values[source], values[other]]))
            )
        case 1:
            text = f"v{target} = torch.eq(v{source}, v{other})"
            return Line(text, lambda values, device: _assign(values, target, torch.eq(values[source], values[other])))
        case 2:
            text = f"v{source}.copy_(v{other})"
            return Line(text, lambda values, device: values[source].copy_(values[other]))
        case 3:
            text = f"v{source}.set_(v{other})"
            return Line(text, lambda values, device: values[source].set_(values[other]))
        case _:
            text = f"v{source}.data = v{other}"
            return Line(text, lambda values, device: setattr(values[source], "data", values[other]))


def _needed(value: Tensor) -> int:
    """Return the bytes that a storage needs for a tensor."""
    if not value.numel():
        return 0
    last = sum((length - 1) * stride for length, stride in zip(value.shape, value.stride(), strict=True))
    return (value.storage_offset() + last + 1) * value.element_size()


def _has_memory(value: Tensor) -> bool:
    return value.untyped_storage().nbytes() >= _needed(value)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "detach()": lambda x: x.detach(),
    "self": lambda x: x,
    "data": lambda x: x.data,
    "t()": lambda x: x.t(),
    "view(-1)": lambda x: x.view(-1),
    "unsqueeze(0)": lambda x: x.unsqueeze(0) if x.dim() < 5 else x,
    "expand(3, ...)": lambda x: x.expand(3, *x.shape) if x.dim() < 5 else x,
    "[:2]": lambda x: x[:2],
    "[..., 1:]": lambda x: x[..., 1:],
    "[1]": lambda x: x[1],
    "chunk(2)[1]": lambda x: x.chunk(2)[1],
    "transpose(0, -1)": lambda x: x.transpose(0, -1),
    "diagonal()": lambda x: x.diagonal(),
    "view(uint8)": lambda x: x.view(torch.uint8),
    "narrow(0, 1, 2)": lambda x: x.narrow(0, 1, 2),
    "squeeze()": lambda x: x.squeeze(),
}
COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "clone()": lambda x: x.clone(),
    "contiguous()": lambda x: x.contiguous(),
    "reshape(-1)": lambda x: x.reshape(-1),
    "flatten()": lambda x: x.flatten(),
    "float()": lambda x: x.float(),
    "half()": lambda x: x.half(),
    "to(int64)": lambda x: x.to(torch.int64),
    "__add__(1)": lambda x: x + 1,
    "__mul__(x)": lambda x: x * x,
    "__eq__(0)": lambda x: x == 0,
    "sum()": lambda x: x.sum(),
    "repeat(2)": lambda x: x.repeat(2, *[1] * max(x.dim() - 1, 0)) if x.numel() < 1_000_000 else x,
    "new_zeros(9)": lambda x: x.new_zeros(9),
    "zeros_like()": torch.zeros_like,
    "[[0, 0]]": lambda x: x[[0, 0]],
    "roll(1)": lambda x: x.roll(1),
    "tril()": lambda x: x.tril(),
}
CHANGES: dict[str, Callable[[Tensor], object]] = {
    "zero_()": lambda x: x.zero_(),
    "fill_(1)": lambda x: x.fill_(1),
    "add_(1)": lambda x: x.add_(1),
    "mul_(2)": lambda x: x.mul_(2),
    "t_()": lambda x: x.t_(),
    "unsqueeze_(0)": lambda x: x.unsqueeze_(0) if x.dim() < 5 else None,
    "squeeze_()": lambda x: x.squeeze_(),
    "resize_(10)": lambda x: x.resize_(10),
    "resize_(2, 400)": lambda x: x.resize_(2, 400),
    "detach_()": lambda x: x.detach_(),
}
