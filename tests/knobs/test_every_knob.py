"""Completeness of every knob: each file that `memexplore/knobs/__init__.py` names handles each field of `Knobs`."""

from __future__ import annotations

import ast
import dataclasses
import enum
from pathlib import Path

import pytest
import torch

from memexplore import codegen, notebook, steps
from memexplore.knobs import apply, knobs
from memexplore.knobs.facts import Change
from memexplore.knobs.knobs import Knobs
from memexplore.knobs.report_text import change_text

FIELDS = [field.name for field in dataclasses.fields(Knobs)]
PART_OF_ANOTHER = {"lora_rank": "lora"}
"""Fields that are applied and set together with another one."""


def attributes_read(package: object) -> set[str]:
    """Return the names of all attributes, strings and keywords in the code of a package."""
    names: set[str] = set()
    for path in Path(str(package.__file__)).parent.rglob("*.py"):  # type: ignore[attr-defined]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    return names


@pytest.mark.parametrize("field", FIELDS)
def test_apply_handles_the_field(field: str) -> None:
    handled = field in apply.MODEL_FIELDS, field in apply.LOOP_FIELDS, field in PART_OF_ANOTHER
    assert sum(handled) == 1, (
        f"enter {field!r} either in MODEL_FIELDS (it changes the model) or in LOOP_FIELDS of memexplore/knobs/apply.py"
    )


@pytest.mark.parametrize("field", FIELDS)
def test_type_checkers_see_the_parameter(field: str) -> None:
    tree = ast.parse(Path(knobs.__file__).read_text())
    (stub,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__" and len(node.args.args) > 1
    )
    parameters = [argument.arg for argument in stub.args.args[1:]]
    assert field in parameters, f"add {field!r} to the __init__ for type checkers in memexplore/knobs/knobs.py"
    assert parameters == FIELDS, "the __init__ for type checkers has the fields in their order"


@pytest.mark.parametrize("field", Knobs.CHOICES)
def test_default_of_a_choice_is_as_written(field: str) -> None:
    default = getattr(Knobs(), field)
    assert default is next(iter(type(default))), f"the first member of {type(default).__name__} is the default"
    assert default.value == "as written"


@pytest.mark.parametrize("field", Knobs.CHOICES)
def test_each_value_of_a_choice_has_its_own_phrase(field: str) -> None:
    values = [value for value in Knobs.CHOICES[field] if value.value != "as written"]
    texts = {change_text(Change(field, value)) for value in values}
    assert len(texts) == len(values), f"write a phrase for each value of {field!r} in memexplore/knobs/report_text.py"


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(
    ("package", "task"),
    [
        (steps, "follow it in memexplore/steps"),
        (codegen, "write its lines in memexplore/codegen"),
        (notebook, "add a control in memexplore/notebook/knob_table.py"),
    ],
    ids=["steps", "codegen", "notebook"],
)
def test_other_packages_read_the_field(package: object, task: str, field: str) -> None:
    if package is steps and field in apply.MODEL_FIELDS:
        return  # `apply` does it
    if package is notebook and field == "variables":
        return  # sliders of a cell, by the names of its variables
    assert field in attributes_read(package), f"no code reads Knobs.{field}: {task}"


@pytest.mark.parametrize("field", apply.MODEL_FIELDS)
def test_the_report_names_the_field(field: str) -> None:
    given: object = "0" if field in ("frozen", "lora") else None
    if field in Knobs.CHOICES:
        given = list(Knobs.CHOICES[field])[-1]
    if field == "checkpoint":
        given = "none"
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with apply.apply(Knobs().replace(**{field: given}), model) as report:
        changed = {change.field for change in report.changes}
    assert isinstance(given, enum.Enum | str), f"say in this test how to set {field!r}"
    assert changed == {field}
