"""The table of cures that belong to libraries: its classes exist, and its first row for an object is the right one."""

from __future__ import annotations

import importlib

import pytest

from memexplore.out_of_memory.cures import CURES, GRADIENT, cure_of, names_of_classes


@pytest.mark.parametrize("name", sorted(CURES.keys() - {GRADIENT}))
def test_a_class_of_the_table_exists(name: str) -> None:
    module, _, kind = name.rpartition(".")
    pytest.importorskip(module.partition(".")[0])
    assert isinstance(getattr(importlib.import_module(module), kind), type)


def test_the_most_derived_class_counts_and_names_itself() -> None:
    classification = pytest.importorskip("torchmetrics.classification")
    curve = cure_of(names_of_classes(classification.BinaryAveragePrecision))
    assert curve is not None
    assert curve.code.startswith("BinaryAveragePrecision(thresholds=100)")
    other = cure_of(names_of_classes(classification.BinaryAccuracy))
    assert other is not None
    assert other.code.startswith("BinaryAccuracy(compute_on_cpu=True)")


def test_another_class_has_no_cure() -> None:
    assert cure_of(names_of_classes(dict)) is None
