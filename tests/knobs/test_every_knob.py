"""Every knob: its name, its place, its texts, and that applying it is reported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from docs import knobs as docs
from memexplore.run import knobs as folder
from memexplore.run.code.lines import lines
from memexplore.run.knobs.applying import apply
from memexplore.run.knobs.knob import Group, Knob
from memexplore.run.knobs.knobs import KNOBS, Knobs, conflicts
from memexplore.run.knobs.values import OneOf

every_knob = pytest.mark.parametrize("knob", KNOBS.values(), ids=lambda knob: knob.name)


def test_every_file_of_the_folder_has_one_knob() -> None:
    files = {path.stem for path in Path(str(folder.__file__)).parent.glob("*.py")}
    assert files - {"__init__", "control", "knob", "knobs", "values"} == set(KNOBS)


@every_knob
def test_file_name_and_word_are_the_same(knob: Knob) -> None:
    assert type(knob).__module__.rpartition(".")[2] == knob.name
    assert knob.label.lower().replace(" ", "") == knob.name.replace("_", "")


@every_knob
def test_its_values_have_different_texts(knob: Knob) -> None:
    values = [knob.values.default, *knob.values.examples]
    assert len({knob.text(value) for value in values}) == len(values)
    assert len({knob.phrase(value) for value in knob.values.examples}) == len(knob.values.examples)
    assert knob.values.text(knob.values.default) in ("as written", "8")


@every_knob
def test_its_examples_are_settings_that_change_something(knob: Knob) -> None:
    for value in knob.values.examples:
        setting = Knobs(**{knob.name: value})
        assert getattr(setting, knob.name) == value
        assert eval(repr(setting), {"Knobs": Knobs}) == setting
        assert setting.changed() == ({} if knob.part_of else {knob.name: value})
        assert setting.replace(**{knob.name: knob.values.default}) == Knobs()


@every_knob
def test_its_summary_is_a_sentence_that_help_shows(knob: Knob) -> None:
    assert knob.summary.endswith(".")
    assert f"{knob.name}: {knob.summary}" in (Knobs.__doc__ or "")


@every_knob
def test_code_has_lines_for_it(knob: Knob) -> None:
    # What is as the script has it needs none.
    same = {"checkpoint layers 0", "zero grad set to none"}
    for value in knob.values.examples:
        setting = Knobs(**{knob.name: value})
        if setting.changed() and not conflicts(setting) and str(setting) not in same:
            assert lines(None, setting)


@every_knob
def test_what_alters_the_training_is_said_in_a_sentence(knob: Knob) -> None:
    for value in knob.values.examples:
        setting = Knobs(**{knob.name: value})
        if knob.alters_training(value, nn.Sequential(nn.BatchNorm1d(2)), setting):
            assert knob.training_text(value, setting).endswith(".")


def test_the_table_in_the_docs_is_that_of_the_registry() -> None:
    page = docs.PAGE.read_text()
    assert docs.with_table(page) == page, "run python -m docs.knobs"


@pytest.mark.parametrize("knob", [knob for knob in KNOBS.values() if isinstance(knob.values, OneOf)], ids=str)
def test_default_of_a_choice_is_as_written(knob: Knob) -> None:
    assert knob.values.default.value == "as written"


@every_knob
def test_the_report_names_it(knob: Knob) -> None:
    if not knob.changes_model:
        pytest.skip("it does not change a model")
    for value in knob.values.examples:
        model = nn.Sequential(nn.Linear(2, 2))
        with apply.apply(Knobs(**{knob.name: value}), model) as report:
            model(torch.ones(1, 2))
        assert {change.field for change in report.changes} == {knob.name}


def test_every_group_has_a_knob() -> None:
    assert {knob.group for knob in KNOBS.values()} == set(Group)
