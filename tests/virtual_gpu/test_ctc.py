"""ctc_loss: the choice of the kernel, and its memory requests."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from memexplore.recorder.recording import record
from memexplore.run.machine import virtual
from memexplore.tape import Action, Category

STEPS, BATCH, LABELS, LENGTH = 50, 4, 20, 10
LOG_PROBS = STEPS * BATCH * LABELS * 4
FULL, TARGETS = [STEPS] * BATCH, [LENGTH] * BATCH


def run(targets, inputs, outputs, **options):
    """Return op, bytes and category of each request of a loss and its gradient, and the notes of the tape."""
    with virtual("A100", release="2.13"):
        log_probs = torch.zeros(STEPS, BATCH, LABELS, device="cuda", requires_grad=True)
        given = [value() if callable(value) else value for value in (targets, inputs, outputs)]
        with record() as recording:
            functional.ctc_loss(log_probs, *given, **options).sum().backward()
        assert log_probs.grad.shape == log_probs.shape
    tape = recording.tape
    rows = [row for row in range(len(tape)) if tape.action[row] == Action.ALLOC]
    names = [tape.ops[tape.op[row]].removeprefix("aten::") for row in rows]
    return [(name, int(tape.size[row]), int(tape.category[row])) for name, row in zip(names, rows, strict=True)], tape


def sizes_of(requests, op):
    return [size for name, size, category in requests if name == op and category != Category.WORKSPACE]


def joined(dtype, device="cpu"):
    return lambda: torch.ones(BATCH * LENGTH, dtype=dtype, device=device)


def numbers(values, dtype=torch.int32, device="cpu"):
    return lambda: torch.tensor(values, dtype=dtype).to(device)


def test_cudnn_computes_the_gradient_together_with_the_losses():
    # empty_like(log_probs), the workspace, one loss a sample: _cudnn_ctc_loss in cudnn/LossCTC.cpp
    requests, tape = run(joined(torch.int32), FULL, TARGETS)
    assert sizes_of(requests, "_cudnn_ctc_loss") == [LOG_PROBS, 4 * BATCH]
    assert not sizes_of(requests, "_ctc_loss_backward")
    assert any("ctc_loss is an estimate" in note for note in tape.meta.notes)


def test_the_native_kernel_keeps_the_forward_variables_of_every_state():
    # 2·10 + 1 states a step: the log-alphas stay, the log-betas of the same size are scratch of the backward pass
    requests, _ = run(joined(torch.int64), FULL, TARGETS)
    alphas = BATCH * STEPS * (2 * LENGTH + 1) * 4
    assert sizes_of(requests, "_ctc_loss")[-2:] == [alphas, 4 * BATCH]
    assert sizes_of(requests, "_ctc_loss_backward")[3:5] == [alphas, LOG_PROBS]


@pytest.mark.parametrize(
    ("targets", "inputs", "outputs", "options"),
    [
        (joined(torch.int32, "cuda"), FULL, TARGETS, {}),
        (joined(torch.int32), [STEPS - 1] * BATCH, TARGETS, {}),
        (joined(torch.int32), FULL, [0, 5, 5, 30], {"blank": 1}),
        (lambda: torch.ones(BATCH, LENGTH, dtype=torch.int32), FULL, TARGETS, {}),
        (joined(torch.int32), numbers(FULL, torch.int64), numbers(TARGETS, torch.int64), {}),
    ],
    ids=["targets on the GPU", "shorter inputs", "another blank", "targets in rows", "64-bit lengths"],
)
def test_the_native_kernel_runs_if_a_condition_of_cudnn_fails(targets, inputs, outputs, options):
    # _use_cudnn_ctc_loss in cudnn/LossCTC.cpp
    requests, _ = run(targets, inputs, outputs, **options)
    assert sizes_of(requests, "_ctc_loss")
    assert not sizes_of(requests, "_cudnn_ctc_loss")


def test_cudnn_takes_lengths_as_int32_tensors_on_the_gpu():
    lengths = (numbers(values, device="cuda") for values in (FULL, TARGETS))
    requests, tape = run(joined(torch.int32, "cuda"), *lengths)
    assert sizes_of(requests, "_cudnn_ctc_loss") == [LOG_PROBS, 4 * BATCH]
    assert not any(note.startswith("assumed") for note in tape.meta.notes)


def test_known_lengths_on_the_gpu_are_those_of_the_program():
    # As transformers gives them: the labels of all samples in a row, and how many each has.
    outputs = [1, 3, 12, 24]
    with torch.backends.cudnn.flags(enabled=False):
        requests, tape = run(joined(torch.int64, "cuda"), numbers(FULL, device="cuda"), numbers(outputs, device="cuda"))
    assert BATCH * STEPS * (2 * 24 + 1) * 4 in sizes_of(requests, "_ctc_loss")
    assert not any(note.startswith("assumed") for note in tape.meta.notes)


def test_unknown_lengths_of_targets_in_a_row_are_together_as_long_as_the_targets():
    def unknown():
        return torch.empty(BATCH, dtype=torch.int64, device="cuda")

    total = BATCH * LENGTH + 3
    with torch.backends.cudnn.flags(enabled=False):
        requests, tape = run(lambda: torch.ones(total, dtype=torch.int64, device="cuda"), unknown, unknown)
    assert BATCH * STEPS * (2 * (LENGTH + 1) + 1) * 4 in sizes_of(requests, "_ctc_loss")
    assert any(note.startswith("assumed: the lengths in ctc_loss") for note in tape.meta.notes)


def test_the_native_kernel_runs_if_cudnn_is_disabled():
    with torch.backends.cudnn.flags(enabled=False):
        requests, _ = run(joined(torch.int32), FULL, TARGETS)
    assert sizes_of(requests, "_ctc_loss")


@pytest.mark.parametrize(("reduction", "size"), [("none", 4 * BATCH), ("sum", 4), ("mean", 4)])
def test_each_reduction_has_its_shape(reduction, size):
    with virtual("A100"):
        log_probs = torch.zeros(STEPS, BATCH, LABELS, device="cuda")
        loss = functional.ctc_loss(log_probs, joined(torch.int32)(), FULL, TARGETS, reduction=reduction)
        assert loss.nbytes == size
