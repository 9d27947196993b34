"""Texts of what a step says where a knob changes nothing."""

from __future__ import annotations

import pytest
import torch

from memexplore.run.knobs.control import Explored
from memexplore.run.knobs.knobs import KNOBS
from memexplore.run.programs.written import assigned_batch
from memexplore.tape import Meta, Source, Tape


def test_default_update_is_per_tensor_on_the_cpu() -> None:
    def written(device: str, **settings: bool) -> str:
        tape = Tape.from_columns({}, meta=Meta(Source.MEASURED, device))
        optimizer = torch.optim.AdamW([torch.zeros(1)], **settings)
        return KNOBS["update"].written(Explored(optimizer=optimizer, tape=tape))

    assert written("cpu") == "per tensor"
    assert written("Tesla T4") == "foreach"
    assert written("cpu", foreach=True) == "foreach"


@pytest.mark.parametrize("name", ["num_batches", "n_batch", "batch_idx", "micro_batch", "batches"])
def test_other_numbers_of_batches_are_no_batch_size(name: str) -> None:
    assert assigned_batch({name: 100}) is None


@pytest.mark.parametrize("name", ["batch", "batch_size", "BATCH", "batchSize", "train_batch_size"])
def test_batch_size_of_a_cell(name: str) -> None:
    assert assigned_batch({name: 8}) == (name, 8)
