"""Checkpoint knob: checkpoints of the model itself, restoring after the block, and the report of skipped sites."""

from __future__ import annotations

import contextlib
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from memexplore.run.knobs.checkpoints.checkpointing import checkpointed
from memexplore.run.knobs.checkpoints.setting import Checkpoint
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import virtual
from memexplore.run.programs.step import Step
from memexplore.run.run import run
from tests.knobs.test_checkpointing import KINDS, gpt2, on
from tests.models import UNet

# --- checkpoints of the model ------------------------------------------------------------------------------------


class OwnCheckpoints(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form, self.calls = form, 0
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)) for _ in range(4))

    def forward(self, x):
        if self.form == "sequential":
            return checkpoint_sequential([self._first, *self.layers], 2, x, use_reentrant=False)
        for number in range(4):
            x = checkpoint(
                self._first if not number else self.layers[number], x, use_reentrant=self.form == "reentrant"
            )
        return x

    def _first(self, x):
        self.calls += 1
        return self.layers[0](x)


@pytest.mark.parametrize("form", ["hooks", "reentrant", "sequential"])
def test_none_disables_checkpoints_in_code_for_the_block(form):
    model, x = OwnCheckpoints(form), torch.ones(1, 4, requires_grad=True)
    with checkpointed(model, on("none")):
        model(x).sum().backward()
    assert model.calls == 1
    model(x).sum().backward()
    assert model.calls == 3  # once in forward and once in backward


def test_a_setting_replaces_checkpoints_of_the_model():
    model, x = OwnCheckpoints("hooks"), torch.ones(1, 4, requires_grad=True)
    with checkpointed(model, on("layers layers.1")):
        model(x).sum().backward()
    assert model.calls == 1  # layers.0 ran once


def test_as_written_keeps_checkpoints_of_the_model():
    model, x = OwnCheckpoints("hooks"), torch.ones(1, 4, requires_grad=True)
    with checkpointed(model, Checkpoint()) as applied:
        model(x).sum().backward()
    assert model.calls == 2
    assert applied.texts == ()


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_none_clears_the_flags_of_transformers_for_the_block():
    model = gpt2()
    model.gradient_checkpointing_enable()
    before = [vars(module).get("gradient_checkpointing") for module in model.modules()]
    assert True in before
    with checkpointed(model, on("none")):
        assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    assert [vars(module).get("gradient_checkpointing") for module in model.modules()] == before


# --- restored ---------------------------------------------------------------------------------------------------------


def _state(model):
    hooks = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]
    norms = [getattr(module, "momentum", None) for module in model.modules()]
    return hooks, norms, [sorted(vars(module)) for module in model.modules()], [*model.buffers()]


@pytest.mark.parametrize("kind", [*KINDS, "layers enc1"])
def test_model_and_torch_are_restored_after_an_exception(kind):
    model = UNet(3, 1, 4)
    before, functions = _state(model), dict(vars(torch.utils.checkpoint))
    with contextlib.suppress(KeyError), checkpointed(model, on(kind)):
        model(torch.randn(1, 3, 16, 16)).sum().backward()
        raise KeyError
    hooks, norms, names, buffers = _state(model)
    assert (hooks, norms, names) == before[:3]
    assert all(mine is its for mine, its in zip(buffers, before[3], strict=True))
    assert dict(vars(torch.utils.checkpoint)) == functions
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda kept: kept):
        model(torch.randn(1, 3, 16, 16))
    assert packed  # the hooks of the knob are gone


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        raise KeyError(self.linear(x).shape)


@pytest.mark.parametrize("kind", [*KINDS, "layers 0"])
def test_no_hook_or_mode_is_left_while_an_error_of_forward_is_held(kind):
    model = nn.Sequential(Failing(), Failing(), Failing())
    with pytest.raises(KeyError) as held, checkpointed(model, on(kind)):
        model(torch.ones(1, 4))
    assert held.value.args == (torch.Size([1, 4]),)
    assert _get_current_dispatch_mode() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_second_backward_with_kept_products_raises():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)) for _ in range(2)))
    with checkpointed(model, on("keep matmuls")):
        loss = model(torch.ones(1, 4)).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="once only"):
            loss.backward()


def test_an_exception_in_the_recomputation_restores_statistics():
    class Failing(nn.Module):
        fails = False

        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x):
            if self.fails:
                raise KeyError
            return self.linear(self.norm(x).tanh())

    model = nn.Sequential(Failing(), Failing())
    with checkpointed(model, on("sqrt")):
        loss = model(torch.randn(4, 4)).sum()
        model[1].fails = True
        with pytest.raises(KeyError):
            loss.backward()
    assert model[0].norm.momentum == 0.1
    assert model[0].norm.num_batches_tracked == 1


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_is_kept_after_backward(kind):
    model = UNet(3, 1, 4)
    refs = []
    hook = model.mid.register_forward_hook(lambda module, args, result: refs.extend(map(weakref.ref, (*args, result))))
    gc.collect()
    gc.disable()
    try:
        with checkpointed(model, on(kind)):
            x = torch.randn(1, 3, 16, 16)
            refs.append(weakref.ref(x))
            model(x).sum().backward()
            del x
            assert [ref() for ref in refs] == [None] * len(refs)
    finally:
        gc.enable()
        hook.remove()


# --- report ---------------------------------------------------------------------------------------------------------


def test_an_unknown_layer_raises_with_similar_names():
    with pytest.raises(ValueError, match=r"no layer 'transformer.h.11'; there are .*transformer\.h\.1"):
        checkpointed(gpt2(), on("layers transformer.h.11")).__enter__()


def test_a_part_of_a_named_layer_is_skipped():
    model = UNet(3, 1, 4)
    with checkpointed(model, on("layers enc1.0 enc1")) as applied:
        model(torch.randn(1, 3, 16, 16)).sum().backward()
    report = applied.completed()
    assert report.texts == ("Checkpointing 1 of 2 named layers",)
    assert [entry.site for entry in report.skipped] == ["enc1.0"]


def test_a_list_of_layers_is_skipped():
    with checkpointed(gpt2(), on("layers transformer.h")) as applied:
        pass
    assert "never called" in applied.skipped[0].reason


def test_blocks_not_called_or_without_gradients_are_skipped():
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

        def forward(self, x):
            with torch.no_grad():
                x = self.layers[0](x)
            return self.layers[2](x)

    model = Partly()
    with checkpointed(model, on("every 1")) as applied:
        model(torch.ones(1, 4)).sum().backward()
    assert applied.texts == ("Checkpointing 3 of 3 blocks",)
    report = applied.completed()
    assert report.texts == ("Checkpointing 1 of 3 blocks",)
    assert {entry.site: entry.reason.split(",")[0] for entry in report.skipped} == {
        "layers.0": "it ran without gradients",
        "layers.1": "it was not called",
    }


def test_a_model_without_repeated_blocks_is_skipped():
    with checkpointed(nn.LSTM(4, 4), on("every 1")) as applied:
        pass
    assert applied.texts == ("Checkpointing 0 of 0 blocks",)
    assert "name the layers" in applied.skipped[0].reason


def test_activation_functions_that_save_no_memory_are_skipped():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 4))
    with checkpointed(model, on("norms")) as applied:
        model(torch.ones(1, 4)).sum().backward()
    report = applied.completed()
    assert report.texts == ("Recomputing 1 normalisation and 1 activation function",)
    assert [entry.site for entry in report.skipped] == ["1"]


def test_report_counts_the_run_and_can_be_pickled():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    result = run(
        Step(model, torch.ones(2, 4), compute_loss=lambda model, x: model[0](x).sum()), Knobs(checkpoint="every 1")
    )
    assert result.applied.texts == ("Checkpointing 1 of 3 blocks",)
    assert pickle.loads(pickle.dumps(result.applied)) == result.applied


@pytest.mark.parametrize("asked", [None, "cpu"])
def test_random_state_of_the_virtual_gpu_is_saved_after_a_checkpoint_on_the_cpu(asked, monkeypatch):
    # torch stores for the whole process which accelerator it found; "cpu" stands for none.
    kind = torch.utils.checkpoint.DefaultDeviceType
    monkeypatch.setattr(kind, "_default_device_type", asked)
    with virtual("T4"):
        states = torch.utils.checkpoint.get_device_states(torch.ones(1, device="cuda"))
        torch.utils.checkpoint.set_device_states(*states)
        assert kind.get_device_type() == "cuda"
    assert kind._default_device_type == asked
