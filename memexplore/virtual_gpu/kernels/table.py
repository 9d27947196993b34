"""Keep the table of kernels: op -> facts about its CUDA kernel beyond the outputs of torch's fake kernel.

A rule is entered where it is written, with `rule`: its kind, the file in PyTorch that it follows, and its ops. The file
is below aten/src/ATen/native unless it begins with aten/, torch/ or the name of another library. An op may have rules
of several kinds. An op without a rule requests the storages of its outputs, in order, and nothing else. Importing the
package `kernels` fills the table.

Two kinds of facts have tables of their own, because they are not about memory: values/value_hints.py (values) and
dispatch/shape_rules.py (faster ways to the shapes that torch's fake kernels give).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

Rule = TypeVar("Rule")


class Kind(enum.Enum):
    """Kinds of rules, each with the signature of its rule."""

    REQUESTS = "memory requests in addition to the outputs"
    """`(args, kwargs, outputs) -> Requests | None`; None: the storages of the outputs and nothing else."""
    REFUSAL = "arguments that the kernel refuses, and torch's fake kernel accepts"
    """The op's own signature; raises torch's error, returns nothing."""
    PLAN = "outputs and memory requests, where torch's fake kernel is missing or differs from CUDA"
    """`(args, kwargs) -> Plan`"""
    CUBLAS = "cuBLAS workspace"
    """`(args, kwargs, requests, outputs, workspaces) -> (requests, libraries whose workspaces the thread must have)`"""
    FAKE = "result in place of that of torch's fake kernel"
    """`(*args, **kwargs) -> result`"""
    OPS = "run by other ops or plans"
    """`(runner, func, args, kwargs) -> result`, or NotImplemented: run it as any other op."""
    DATA_DEPENDENT = "output shape or result depends on values: a noted assumption stands for them"
    """As OPS."""
    COMPOSITE = "composite op that branches on the device in C++"
    """The op's own signature; called with autograd, before the dispatch mode."""
    SETTINGS = "global settings of torch that decide a plan, besides the arguments"
    """`() -> settings`, hashable; the default dtype counts for every op."""
    TF32 = "whether torch may compute it in TF32 where it gets float32"
    """`() -> bool`, a setting that decides the plan too"""
    IN_PLACE = "op that a formula of autograd runs in place on a real GPU"
    """An `InPlace`: the in-place op, and where it applies."""


class Entry(NamedTuple):
    """Entry of an op: a rule of one kind, and the PyTorch file that the rule follows."""

    kind: Kind
    rule: Any
    source: str


TABLE: dict[Any, dict[Kind, Entry]] = {}
"""Op, or the name of one that a library registers when it is imported -> its entries, one for each kind."""


def rule(kind: Kind, source: str, *ops: Any) -> Callable[[Rule], Rule]:
    """Return a decorator that enters a rule in the table.

    Raises ValueError for an op that has a rule of the kind.
    """

    def enter(function: Rule) -> Rule:
        for op in ops:
            entries = TABLE.setdefault(op, {})
            if kind in entries:
                raise ValueError(f"{op} has two rules of kind {kind.name}: keep one of them")
            entries[kind] = Entry(kind, function, source)
        return function

    return enter


def find(op: Any, kind: Kind) -> Any:
    """Return the rule of a kind for an op, None if the table has none."""
    entries = TABLE.get(op)
    if entries is None:
        entries = TABLE.get(str(op), {})
    entry = entries.get(kind)
    return entry.rule if entry is not None else None


def of_kind(kind: Kind) -> dict[Any, Any]:
    """Return op -> rule for all entries of a kind."""
    return {op: entries[kind].rule for op, entries in TABLE.items() if kind in entries}
