"""Random programs on the virtual GPU, whose known values must be those of the same program on the CPU.

A program has a few variables `v`. Each line makes, views, writes or exchanges tensors or their storages, or runs
autograd (value_lines.py). After each line every value of the virtual run must be that of the CPU run, or unknown.
"""

from __future__ import annotations

import copy
import random
import re
import threading
import warnings
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch.nn import functional

import memexplore as mx
from memexplore.virtual_gpu.dispatch import value_lane
from memexplore.virtual_gpu.values import known_values
from tests.fuzz import value_lines

VARIABLES = 6
FAILURES = (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError, AttributeError, AssertionError)
_DATA_DEPENDENT = "nonzero", "unique", "bincount", "masked_select", " > ", "one_hot"
"""Parts of lines whose results have a shape that depends on values."""

Variables = list[Any]
"""Tensors or None; those of one run are on one device."""


def check(number: int) -> str:
    """Run the program of a number on both devices, and return `equal`, or `refused` if only the GPU refuses a line.

    Raises AssertionError, with the program, where a known value or a shape differs.
    """
    rng = random.Random(number)
    setting = rng.choice(("known", "real"))
    budgets = {"FLOAT_BYTES": rng.choice((20, 48, 1 << 16)), "INTEGER_BYTES": rng.choice((32, 96, 4 << 20))}
    done = [f"# values={setting!r}, {budgets}"]
    with warnings.catch_warnings(), mock.patch.multiple(value_lane, **budgets), mx.virtual("T4", values=setting):
        warnings.simplefilter("ignore")
        cpu, gpu = _scope("cpu"), _scope("cuda")
        for _ in range(rng.randrange(3, 40)):
            line = _line(cpu["v"], gpu["v"], rng)
            shapes_follow = _shapes_follow(line, gpu["v"])
            contents, before = _contents(cpu["v"]), torch.get_rng_state()
            refused = _error(line, cpu)
            if refused and _contents(cpu["v"]) != contents:
                # Some ops write, or resize their output, before they raise an error.
                break
            if refused and rng.random() < 0.8:
                continue
            done.append(line)
            # With "real" both devices draw from one generator.
            after = torch.get_rng_state()
            torch.set_rng_state(before)
            failed = _on_gpu(line, gpu, rng.random() < 0.05)
            torch.set_rng_state(after)
            if failed and not refused:
                return "refused"
            if refused and not failed:
                break
            program = "\n".join(done)
            if _metadata(cpu["v"]) != _metadata(gpu["v"]):
                assert refused or not shapes_follow, f"{_metadata(gpu['v'])} and {_metadata(cpu['v'])}\n{program}"
                break
            _compare(cpu["v"], gpu["v"], program)
    return "equal"


def _scope(device: str) -> dict[str, Any]:
    """Return the names that the lines of a program use."""
    functions = (value_lines.empty, value_lines.empty_again, value_lines.grow, value_lines.exchange)
    names = {"v": [None] * VARIABLES, "dev": device, "g": torch.Generator(device)}
    return {
        **names,
        **{each.__name__: each for each in functions},
        "torch": torch,
        "functional": functional,
        "copy": copy,
    }


def _error(line: str, scope: dict[str, Any]) -> Exception | None:
    """Run a line and return the error that it raises."""
    try:
        exec(line, scope)
    except FAILURES as error:
        # The frames hold tensors.
        return error.with_traceback(None)
    return None


def _on_gpu(line: str, scope: dict[str, Any], in_thread: bool) -> Exception | None:
    if not in_thread:
        return _error(line, scope)
    found: list[Exception | None] = []
    thread = threading.Thread(target=lambda: found.append(_error(line, scope)))
    thread.start()
    thread.join()
    return found[0]


def _line(real: Variables, virtual: Variables, rng: random.Random) -> str:
    """Return a random line for variables as those of the two runs are now."""
    target = f"v[{rng.randrange(VARIABLES)}]"
    held = [at for at, value in enumerate(real) if value is not None]
    numbers = {"n": rng.randrange(6), "seed": rng.randrange(99), "s": rng.choice(value_lines.SHAPES)}
    numbers["t"] = f"torch.{rng.choice(value_lines.DTYPES)}"
    if not held or rng.random() < 0.2:
        return f"{target} = {rng.choice(value_lines.MAKES).format(**numbers)}"
    if rng.random() < 0.05:
        return f"v[{rng.choice(held)}] = None"
    first = rng.choice(held)
    alike = [at for at in held if real[at].shape == real[first].shape]
    known = [at for at in held if known_values.is_known(virtual[at])]
    operands = {
        "a": f"v[{first}]",
        **{name: f"v[{rng.choice(alike if rng.random() < 0.7 else held)}]" for name in "bc"},
        "known": f"v[{rng.choice(known)}]" if known else "torch.zeros(2)",
    }
    kind = rng.random()
    if kind < 0.4:
        return rng.choice(value_lines.WRITES).format(**operands, **numbers)
    templates = value_lines.VIEWS if kind < 0.65 else value_lines.OPS if kind < 0.95 else value_lines.TAKES
    return f"{target} = {rng.choice(templates).format(**operands, **numbers)}"


def _shapes_follow(line: str, variables: Variables) -> bool:
    """Return whether the shapes of a line's results follow from what is known."""
    if not any(part in line for part in _DATA_DEPENDENT):
        return True
    if min(value_lane.FLOAT_BYTES, value_lane.INTEGER_BYTES) < 1 << 10:
        # An intermediate result may be beyond the budget.
        return False
    read = [variables[int(number)] for number in re.findall(r"v\[(\d)\]", line)]
    return all(value is None or known_values.is_known(value) for value in read)


def _metadata(variables: Variables) -> list[Any]:
    tensors = [each for value in variables if value is not None for each in (value, _gradient(value))]
    return [each if each is None else (each.shape, each.dtype, each.requires_grad) for each in tensors]


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    try:
        return tensor.grad if tensor.is_leaf else None
    except RuntimeError:
        # A view whose base was written to has its history made again, which some views refuse.
        return None


def _contents(variables: Variables) -> tuple[Any, ...]:
    """Return metadata and values of the variables of the CPU run, to be compared."""
    return _metadata(variables), [None if each is None else str(each.detach().tolist()) for each in variables]


def _compare(real: Variables, virtual: Variables, program: str) -> None:
    for one, other in zip(real, virtual, strict=True):
        if one is not None:
            _compare_values(one, other, program)
            gradient, found = _gradient(one), _gradient(other)
            if gradient is not None and found is not None:
                _compare_values(gradient, found, program)


def _compare_values(real: torch.Tensor, virtual: torch.Tensor, program: str) -> None:
    with torch.no_grad():
        known = known_values.of(virtual)
        if known is not None:
            real = real.detach()
            equal = (real == known) | ((real != real) & (known != known))
            assert bool(equal.all()), f"{known} instead of {real}\n{program}"
