"""`apply` on real models: the same losses and gradients where the mathematics says so, and everything restored."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

import memexplore as mx
from memexplore.run.knobs.applying.apply import apply
from memexplore.run.knobs.inplace import InPlace
from memexplore.run.knobs.inplace_sites.legal import legal_sites
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.knobs.memory_format import MemoryFormat
from memexplore.run.knobs.offload import Offload
from tests.knobs.knob_sets import OTHER, SAME
from tests.small_nets import Deep, everything, flat, gradients, images, step_of


@pytest.mark.parametrize("knobs", SAME, ids=str)
@pytest.mark.parametrize("make", [Deep, flat, images])
def test_loss_and_gradients_are_the_same(make: Any, knobs: Knobs) -> None:
    step = step_of(make)
    loss, before = gradients(step, step.model)
    statistics = copy.deepcopy(dict(step.model.named_buffers()))
    again = step_of(make)
    with apply(knobs, again.model):
        changed, after = gradients(again, again.model)
    # Channels last sums in another order; double precision has 53 bits.
    torch.testing.assert_close(changed, loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(dict(again.model.named_buffers()), statistics, rtol=1e-12, atol=1e-14)


together = st.fixed_dictionaries(
    {
        "inplace": st.sampled_from(InPlace),
        "checkpoint": st.sampled_from(["as written", "every 2", "sqrt", "keep matmuls", "norms"]),
        "offload": st.sampled_from(Offload),
        "memory_format": st.sampled_from(MemoryFormat),
    }
)


@settings(max_examples=30)
@given(together, st.sampled_from([Deep, flat, images]), st.sampled_from(["as written", "bf16", "all bf16"]))
def test_knobs_that_change_no_result_change_none_together(fields: Any, make: Any, precision: str) -> None:
    dtype = torch.float64 if precision == "as written" else torch.float32
    plain, step = step_of(make, dtype=dtype), step_of(make, dtype=dtype)
    with apply(Knobs(precision=precision), plain.model):
        loss, before = gradients(plain, plain.model)
    with apply(Knobs(**fields, precision=precision), step.model):
        changed, after = gradients(step, step.model)
    # Channels last sums in another order, which bf16 rounds to its 8 bits.
    bits = 1e-12 if precision == "as written" else 2**-6
    torch.testing.assert_close(changed, loss, rtol=bits, atol=bits)
    torch.testing.assert_close(after, before, rtol=bits, atol=bits)


@pytest.mark.parametrize("ends", ["well", "in an error"])
@pytest.mark.parametrize("knobs", SAME + OTHER, ids=str)
@pytest.mark.parametrize("make", [flat, images])
def test_model_is_restored_after_the_block(make: Any, knobs: Knobs, ends: str) -> None:
    model = step_of(make, dtype=torch.float32).model
    model[1].eval()
    model[-1].bias.requires_grad_(False)
    model[-1].weight.grad = torch.ones(3, model[-1].in_features)
    before = everything(model)
    inputs = torch.zeros(1, 8) if make is flat else torch.zeros(2, 3, 4, 4)
    buffers = copy.deepcopy(dict(model.named_buffers()))
    with contextlib.suppress(KeyError), apply(knobs, model):
        model(inputs)
        for name, buffer in model.named_buffers():
            # A forward changes running statistics of batch norm, with knobs or without.
            buffer.copy_(buffers[name.replace("base.", "")])
        if ends == "in an error":
            raise KeyError
    assert everything(model) == before


def test_model_is_restored_after_an_error_of_apply() -> None:
    model = flat()
    before = everything(model)
    with pytest.raises(ValueError, match=r"2\.x"), apply(Knobs(frozen="0", checkpoint="layers 2.x"), model):
        pass
    assert everything(model) == before


def test_a_forward_set_on_the_instance_is_restored() -> None:
    model = flat()
    inner = model.forward
    mine = model.forward = lambda x: inner(x)
    with apply(Knobs(precision="bf16", mode="inference"), model):
        assert model.forward is not mine
    assert model.forward is mine


def test_forward_keeps_its_signature() -> None:
    # The Trainer of transformers reads it to choose the columns of a data set.
    model = Deep()
    with apply(Knobs(precision="bf16"), model):
        assert list(inspect.signature(model.forward).parameters) == ["x"]


@pytest.mark.parametrize("knobs", SAME + OTHER, ids=str)
def test_no_tensor_is_kept_alive(knobs: Knobs) -> None:
    model = step_of(flat, dtype=torch.float32).model
    inputs = torch.randn(2, 8)
    refs = [weakref.ref(inputs), weakref.ref(model), weakref.ref(model[0].weight)]
    with apply(knobs, model):
        output = model(inputs)
        refs.append(weakref.ref(output))
    del inputs, output, model
    gc.collect()
    assert [ref() for ref in refs] == [None] * 4


# --- given sites, notes -----------------------------------------------------------------------------------------------


def test_given_sites_run_in_place() -> None:
    model = flat()
    sites = legal_sites(lambda: model(torch.ones(1, 8)).sum().backward(), model)
    with apply(Knobs(inplace="on"), model, sites):
        assert [model[place].inplace for place in (1, 3, 5)] == [True] * 3
    assert [model[place].inplace for place in (1, 3, 5)] == [False] * 3


def test_notes_name_fields_of_the_training_loop() -> None:
    with apply(Knobs(optimizer="Adam", batch=4, gpu="T4"), flat()) as applied:
        assert applied.texts == ()
        assert [note.split(" belongs")[0] for note in applied.notes] == ["batch 4", "optimizer Adam", "gpu T4"]


@pytest.mark.parametrize(("make", "accumulation", "notes"), [(images, 4, 1), (images, 1, 0), (flat, 4, 0)])
def test_a_note_says_that_batch_norm_sees_one_micro_batch(make: Any, accumulation: int, notes: int) -> None:
    with apply(Knobs(accumulation=accumulation), make()) as applied:
        assert sum("Batch norm" in note for note in applied.notes) == notes


# --- virtual models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knobs", SAME + OTHER, ids=str)
@pytest.mark.parametrize("make", [flat, images])
def test_knobs_work_on_a_virtual_model(make: Any, knobs: Knobs) -> None:
    with mx.virtual("T4"):
        model = make().cuda()
        x = torch.randn(2, 8, device="cuda") if make is flat else torch.randn(2, 3, 8, 8, device="cuda")
        types = [(weight.dtype, weight.stride(), weight.requires_grad) for weight in model.parameters()]
        with apply(knobs, model):
            output = model(x)
            if output.requires_grad:
                functional.cross_entropy(output.float(), torch.zeros(2, dtype=torch.long, device="cuda")).backward()
        assert [(weight.dtype, weight.stride(), weight.requires_grad) for weight in model.parameters()] == types
