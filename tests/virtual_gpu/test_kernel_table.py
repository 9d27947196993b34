"""The table of kernels: every entry has a source, a rule with the signature of its kind, and no second rule."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch

from memexplore import virtual_gpu
from memexplore.virtual_gpu.kernels import cublas, table
from memexplore.virtual_gpu.kernels.autograd_in_place import InPlace
from memexplore.virtual_gpu.kernels.table import TABLE, Kind

ROOT = Path(virtual_gpu.__file__).parent
ENTRIES = [(op, entry) for op, entries in TABLE.items() for entry in entries.values()]
PARAMETERS = {
    Kind.REQUESTS: ["args", "kwargs", "outputs"],
    Kind.PLAN: ["args", "kwargs"],
    Kind.CUBLAS: ["args", "kwargs", "requests", "outputs", "workspaces"],
    Kind.OPS: ["runner", "func", "args", "kwargs"],
    Kind.SETTINGS: [],
    Kind.DATA_DEPENDENT: ["runner", "func", "args", "kwargs"],
}
BELOW = {"values": 0, "tensors": 1, "kernels": 2, "dispatch": 3}


def test_every_entry_names_a_source_file_of_pytorch():
    for op, entry in ENTRIES:
        assert re.fullmatch(r"[\w/]+\.(cpp|cu|cuh|h)|bitsandbytes/[\w/]+\.py", entry.source), op


def test_every_rule_has_the_parameters_of_its_kind():
    for op, entry in ENTRIES:
        if entry.kind in PARAMETERS:
            assert list(inspect.signature(entry.rule).parameters) == PARAMETERS[entry.kind], op
        elif entry.kind is Kind.IN_PLACE:
            assert isinstance(entry.rule, InPlace), op


def test_every_rule_has_a_docstring():
    for op, entry in ENTRIES:
        if inspect.isfunction(entry.rule) and entry.kind in PARAMETERS:
            assert entry.rule.__doc__, op


def test_a_second_rule_of_a_kind_for_an_op_raises():
    enter = table.rule(Kind.REQUESTS, "cuda/Blas.cpp", torch.ops.aten.mm.default)
    with pytest.raises(ValueError, match=r"aten\.mm\.default has two rules of kind REQUESTS"):
        enter(cublas.two_operands)


def test_an_op_without_an_entry_has_no_rule():
    assert table.find(torch.ops.aten.relu.default, Kind.REQUESTS) is None


@pytest.mark.parametrize("room", BELOW)
def test_rooms_import_one_way(room):
    for path in (ROOT / room).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("memexplore.virtual_gpu."):
                other = str(node.module).split(".")[2]
                assert BELOW.get(other, 0) <= BELOW[room], f"{path.name} of {room} imports {node.module}"
