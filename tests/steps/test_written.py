"""Texts of what a step says where a knob changes nothing."""

from __future__ import annotations

import pytest
import torch

from memexplore.steps.written import assigned_batch, update_text


def test_default_update_is_per_tensor_on_the_cpu() -> None:
    optimizer = torch.optim.AdamW([torch.zeros(1)])
    assert update_text(optimizer, "cpu") == "per tensor"
    assert update_text(optimizer, "Tesla T4") == "foreach"
    assert update_text(torch.optim.AdamW([torch.zeros(1)], foreach=True), "cpu") == "foreach"


@pytest.mark.parametrize("name", ["num_batches", "n_batch", "batch_idx", "micro_batch", "batches"])
def test_other_numbers_of_batches_are_no_batch_size(name: str) -> None:
    assert assigned_batch({name: 100}) is None


@pytest.mark.parametrize("name", ["batch", "batch_size", "BATCH", "batchSize", "train_batch_size"])
def test_batch_size_of_a_cell(name: str) -> None:
    assert assigned_batch({name: 8}) == (name, 8)
