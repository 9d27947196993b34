"""Model families train on the virtual GPU: in three precisions, and in one of them with checkpoints."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.analysis.curves import free_rows
from memexplore.tape import Action, Category, Phase
from tests.families import FAMILIES

pytest.importorskip("transformers")


class Setting(NamedTuple):
    """How a family trains."""

    precision: torch.dtype = torch.float32
    """Of the matrix products: float16 with a GradScaler."""
    checkpointed: bool = False


FULL, HALF, BRAIN = Setting(), Setting(torch.float16), Setting(torch.bfloat16)
CHECKPOINTED = Setting(torch.float16, checkpointed=True)
SETTINGS = {"full": FULL, "half": HALF, "brain": BRAIN, "checkpointed": CHECKPOINTED}


class Run(NamedTuple):
    tape: mx.Tape
    allocated: list[int]
    """`memory_allocated()` after each step, after gradients and batch were freed."""
    requested: list[int]
    """Requested bytes at the same points."""


class Real(NamedTuple):
    """Sizes in bytes of a family's model on the CPU, after a real training step."""

    parameters: list[int]
    trained: list[int]
    """The parameters with a gradient."""
    flat: list[int]
    """The same, with all weights of a recurrent layer as one block, as cuDNN keeps them."""
    buffers: list[int]


def _flat(model: nn.Module, chosen: set[int]) -> list[int]:
    """Return the bytes of the blocks of the chosen parameters, one block per recurrent layer."""
    sizes: dict[int, int] = {}
    for module in model.modules():
        own = [weight for weight in module.parameters(recurse=False) if id(weight) in chosen]
        if isinstance(module, nn.RNNBase):
            sizes[id(module)] = sum(weight.nbytes for weight in own)
        else:
            sizes |= {id(weight): weight.nbytes for weight in own}
    return sorted(sizes.values())


@functools.cache
def real(name: str) -> Real:
    family = FAMILIES[name]
    model = family.build().train()
    for loss in family.losses(model, family.batch("cpu")):
        loss.backward()
    everything = list(model.parameters())
    trained = [weight for weight in everything if weight.grad is not None]
    return Real(
        _flat(model, {id(weight) for weight in everything}),
        [weight.nbytes for weight in trained],
        _flat(model, {id(weight) for weight in trained}),
        sorted(buffer.nbytes for buffer in model.buffers() if buffer.nbytes),
    )


def train(name: str, setting: Setting, steps: int = 3) -> Run:
    family = FAMILIES[name]
    allocated: list[int] = []
    requested: list[int] = []

    def run() -> None:
        model = family.build().to("cuda").train()
        if setting.checkpointed:
            family.checkpoint(model)
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cuda", enabled=setting.precision is torch.float16)
        for _ in range(steps):
            losses = family.losses(model, family.batch("cuda"))
            while True:
                with torch.autocast("cuda", setting.precision, enabled=setting.precision is not torch.float32):
                    loss = next(losses, None)
                if loss is None:
                    break
                scaler.scale(loss).backward()
            del losses
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            allocated.append(torch.cuda.memory_allocated())
            requested.append(torch.cuda.memory_stats()["requested_bytes.all.current"])

    # From torch 2.15 on a matrix product frees its workspace: these tests use the rules of one release.
    # The models are tiny, so with known values a router would choose by its weights, and GradScaler would skip a step.
    return Run(mx.simulate(run, gpu="A100", release="2.13", values="none"), allocated, requested)


@functools.cache
def trained(name: str, setting: Setting) -> Run:
    return train(name, setting)


each = pytest.mark.parametrize("name", FAMILIES)
settings = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)


def every(function):
    return each(settings(function))


def sizes_of(tape: mx.Tape, category: Category) -> list[int]:
    """Return the bytes of the requests of a category."""
    return sorted(tape.size[(tape.action == Action.ALLOC) & (tape.category == category)].tolist())


def _begins(tape: mx.Tape, phase: Phase, step: int = 2) -> int:
    """Return the first row of a phase of a step."""
    return int(np.flatnonzero((tape.action == Action.MARK) & (tape.phase == phase) & (tape.step == step))[0])


def gradients(tape: mx.Tape) -> list[int]:
    """Return the bytes of the gradients alive when the second step's optimizer starts."""
    optimizer = _begins(tape, Phase.OPTIMIZER)
    rows = (tape.action == Action.ALLOC) & (tape.category == Category.GRADIENT) & (free_rows(tape) > optimizer)
    return sorted(tape.size[:optimizer][rows[:optimizer]].tolist())


def alive_after_forward(tape: mx.Tape, step: int = 2) -> int:
    """Return the bytes that a forward pass allocated and that are alive when its backward pass starts."""
    backward = _begins(tape, Phase.BACKWARD, step)
    made = (tape.action == Action.ALLOC) & (tape.phase == Phase.FORWARD) & (tape.step == step)
    made[backward:] = False
    return int(tape.size[made & (free_rows(tape) > backward)].sum())


def assumptions(tape: mx.Tape) -> list[str]:
    # Whether positions are packed is a question of transformers to values that are not computed here.
    return [note for note in tape.meta.notes if note.startswith("assumed") and "masking_utils.py" not in note]


# --- steps and the memory between them ------------------------------------------------------------------------------


@every
def test_three_steps_run_through_all_phases(name, setting):
    tape = trained(name, setting).tape
    assert not (tape.action == Action.OOM).any()
    for step in (1, 2, 3):
        assert {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER} <= set(tape.phase[tape.step == step].tolist())


@every
def test_parameters_and_buffers_have_the_sizes_of_the_cpu_model(name, setting):
    tape = trained(name, setting).tape
    assert sizes_of(tape, Category.PARAMETER) == real(name).parameters
    assert sizes_of(tape, Category.BUFFER) == real(name).buffers


@every
def test_gradients_have_the_sizes_of_the_cpu_model(name, setting):
    # Under autocast each weight of a recurrent layer is copied, and its gradient is a block of its own.
    sizes = real(name).flat if setting is FULL else sorted(real(name).trained)
    assert gradients(trained(name, setting).tape) == sizes


@every
def test_adamw_keeps_two_states_on_the_gpu_and_its_step_count_on_the_cpu(name, setting):
    # exp_avg and exp_avg_sq on the GPU; `step` is a float on the CPU: torch/optim/adam.py, _init_group
    tape = trained(name, setting).tape
    assert sizes_of(tape, Category.OPTIMIZER_STATE) == sorted(2 * real(name).trained)


@every
def test_every_step_ends_with_the_same_memory(name, setting):
    run = trained(name, setting)
    assert len(set(run.allocated)) == len(set(run.requested)) == 1


CUBLAS = 2 * 4 * 1024**2 + 8 * 16 * 1024
"""One cuBLAS workspace of an A100; a model with matrix products has one for each pass."""


@every
def test_requested_bytes_after_a_step_are_the_sum_of_all_tensors(name, setting):
    run, model = trained(name, setting), real(name)
    workspaces = sizes_of(run.tape, Category.WORKSPACE).count(CUBLAS)
    assert workspaces in (0, 2)
    # GradScaler: its scale, a float, and its growth tracker, an int
    scaler = 8 if setting.precision is torch.float16 else 0
    kept = sum(model.parameters) + sum(model.buffers) + 2 * sum(model.trained)
    # cuDNN's random numbers for dropout between recurrent layers: 24 bytes for each resident thread of an A100
    random = 108 * 2048 * 24 if name in ("lstm", "gru") else 0
    assert run.requested[-1] == kept + scaler + random + workspaces * CUBLAS


# --- checkpoints and precision --------------------------------------------------------------------------------------


@each
def test_checkpoints_save_less_for_backward(name):
    plain, saving = trained(name, HALF).tape, trained(name, CHECKPOINTED).tape
    assert alive_after_forward(saving) < alive_after_forward(plain)


@each
def test_checkpoints_do_not_change_gradients(name):
    assert gradients(trained(name, CHECKPOINTED).tape) == gradients(trained(name, HALF).tape)


# Kernels that PyTorch has for float16 only, and the ops that differ.
_FLOAT16_ONLY = {
    # Depthwise convolutions: use_cudnn_depthwise in Convolution.cpp
    "efficientnet": {"convolution", "convolution_backward"},
    # Batch norm of channels_last: cuDNN's is not for bfloat16, Normalization.cpp
    "segformer": {"cudnn_batch_norm", "cudnn_batch_norm_backward", "native_batch_norm", "native_batch_norm_backward"},
    # float16 to float32 within one softmax kernel: SoftMax.cpp
    # Recurrent layers run in float16 under any autocast: cudnn/RNN.cpp
    "lstm": {"_to_copy", "_cudnn_rnn_backward"},
    "gru": {"_to_copy", "_cudnn_rnn_backward"},
    "mixtral": {"_softmax", "_softmax_backward_data", "_to_copy"},
    "qwen2moe": {"_softmax", "_softmax_backward_data", "_to_copy"},
    "wav2vec2": {"_log_softmax", "_log_softmax_backward_data", "_to_copy"},
}


@each
def test_float16_and_bfloat16_make_the_same_requests_in_the_model(name):
    def within(setting: Setting) -> list[int]:
        tape = trained(name, setting).tape
        apart = [f"aten::{op}" in tape.ops and tape.ops.index(f"aten::{op}") for op in _FLOAT16_ONLY.get(name, ())]
        chosen = (tape.action == Action.ALLOC) & (tape.step == 2) & (tape.module >= 0) & ~np.isin(tape.op, apart)
        # cuDNN chooses its algorithms by the type.
        return tape.size[chosen & (tape.category != Category.WORKSPACE)].tolist()

    assert within(HALF) == within(BRAIN)


def products(tape: mx.Tape) -> int:
    """Return the bytes of the results of linear layers and convolutions in the second forward pass.

    Batched products are left out: whether there are any depends on the kernel of attention, which the type chooses.
    """
    numbers = [number for number, op in enumerate(tape.ops) if op in ("aten::convolution", "aten::addmm", "aten::mm")]
    made = (tape.action == Action.ALLOC) & (tape.phase == Phase.FORWARD) & (tape.step == 2)
    return int(tape.size[made & np.isin(tape.op, numbers) & (tape.category != Category.WORKSPACE)].sum())


@each
def test_products_have_half_the_bytes_under_autocast(name):
    full, half = trained(name, FULL).tape, trained(name, HALF).tape
    # 4 bytes a number before, 2 after
    assert products(full) == 2 * products(half)


# Small batches: the half-precision copies of the weights, saved for backward, outweigh what the layers save.
_MORE_WEIGHT_THAN_WORK = {"detector", "vae", "vit", "mamba", "whisper", "lstm", "gru", "operator"}


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - _MORE_WEIGHT_THAN_WORK))
def test_autocast_saves_less_for_backward(name):
    full, half = trained(name, FULL).tape, trained(name, HALF).tape
    assert alive_after_forward(half) < alive_after_forward(full)


# --- assumptions about values ---------------------------------------------------------------------------------------


@every
def test_the_notes_are_the_assumptions_of_the_family(name, setting):
    notes = assumptions(trained(name, setting).tape)
    for words in FAMILIES[name].assumed:
        assert any(words in note for note in notes)
    assert bool(notes) == bool(FAMILIES[name].assumed)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.assumed])
def test_an_assumption_names_its_line(name):
    for note in assumptions(trained(name, FULL).tape):
        path, _, line = note.rstrip(")").rpartition(":")
        assert path.endswith(".py")
        assert int(line) > 0


@pytest.mark.parametrize("name", ["unet", "gpt2", "lstm"])
def test_the_same_steps_give_the_same_tape(name):
    first, again = trained(name, FULL).tape, train(name, FULL).tape
    # The stacks differ: those of the second run hold this test.
    assert again.replace(stack=first.stack, stacks=first.stacks).equals(first)
