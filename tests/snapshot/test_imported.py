"""Steps, phases and categories of imported tapes: kept recordings against arithmetic, and predicted runs."""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore import snapshot
from memexplore.analysis import curves
from memexplore.analysis.tables import user_line
from memexplore.snapshot.imported import phases_and_steps
from memexplore.snapshot.stacks import Origin, calls_of, origin_of, parse_label
from memexplore.tape import Action, Category, Frame, Phase, Tape
from tests.data import kept
from tests.sample_tapes import training_tape

FLOAT = 4

MODULE = Frame("/env/torch/nn/modules/module.py", 1790, "_call_impl")
ENGINE = Frame("??", 0, "torch::autograd::Engine::evaluate_function(std::shared_ptr<torch::autograd::GraphTask>&)")


def bytes_by_category(tape: Tape, row: int) -> dict[Category, int]:
    """Requested bytes of each category after a row."""
    sizes = curves.by_category(tape, "requested", slice(row, row + 1))[:, 0]
    return {kind: int(sizes[kind]) for kind in Category}


def end_of(tape: Tape, phase: Phase, step: int = 1) -> int:
    return int(np.flatnonzero((tape.phase == phase) & (tape.step == step))[-1])


def language_model(layers: int, width: int, inner: int, vocabulary: int = 10_000) -> int:
    """Parameter bytes of the language models in the recordings, those of Stanford's CS336, in float32.

    Embedding and output are not tied; a layer has four square projections, three of its feed-forward network (SwiGLU)
    and two norms; one norm stands at the end.
    """
    one_layer = 4 * width * width + 3 * width * inner + 2 * width
    return FLOAT * (2 * vocabulary * width + layers * one_layer + width)


SMALL = language_model(4, 512, 1344)  # 90,785,792 bytes
MEDIUM = language_model(24, 1024, 4096)  # 1,692,733,440 bytes
XL = language_model(32, 2560, 10_240)  # 13,627,238,400 bytes


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("small-lm-train-seq100", SMALL),
        ("small-lm-train-seq200", SMALL),
        ("lm-medium-train-seq128", MEDIUM),
        ("lm-medium-train-seq512", MEDIUM),
        ("lm-xl-train-seq512-bf16", XL),
        ("lm-2.7b-train-seq128-h100", XL),
    ],
)
@pytest.mark.parametrize("phase", [Phase.BACKWARD, Phase.OPTIMIZER])
def test_parameters_gradients_and_state_are_those_of_the_model(name: str, parameters: int, phase: Phase) -> None:
    tape = kept.tape(name)
    sizes = bytes_by_category(tape, end_of(tape, phase))
    assert sizes[Category.PARAMETER] == parameters
    assert sizes[Category.GRADIENT] == parameters
    # Adam keeps two moments; before the first optimizer step of lm-2.7b they do not exist
    without_state = name == "lm-2.7b-train-seq128-h100" and phase is Phase.BACKWARD
    assert sizes[Category.OPTIMIZER_STATE] == (0 if without_state else 2 * parameters)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_an_optimizer_that_replaces_its_tensors_keeps_their_categories(step: int) -> None:
    # its code runs p.data = p.data - update, and the same for both moments: each step allocates all of them again
    tape = kept.tape("small-lm-train-seq100")
    sizes = bytes_by_category(tape, end_of(tape, Phase.OPTIMIZER, step))
    assert (sizes[Category.PARAMETER], sizes[Category.OPTIMIZER_STATE]) == (SMALL, 2 * SMALL)


@pytest.mark.parametrize(
    ("name", "steps"), [("small-lm-train-seq100", 3), ("lm-xl-train-seq512-bf16", 1), ("cnn-torch21-no-time", 10)]
)
def test_steps_end_with_optimizer_or_backward(name: str, steps: int) -> None:
    assert int(kept.tape(name).step.max()) == steps


def test_a_step_goes_from_forward_over_backward_to_the_optimizer() -> None:
    tape = kept.tape("small-lm-train-seq100")
    inside = tape.step == 2
    phases = tape.phase[inside]
    order = phases[np.append(True, phases[1:] != phases[:-1])]
    assert [Phase(phase) for phase in order if phase != Phase.OTHER] == [
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.OPTIMIZER,
    ]


def test_activations_grow_in_forward_and_are_freed_in_backward() -> None:
    tape = kept.tape("lm-xl-train-seq512-bf16")
    forward, backward = (
        bytes_by_category(tape, end_of(tape, Phase.FORWARD)),
        bytes_by_category(tape, end_of(tape, Phase.BACKWARD)),
    )
    # what remains are logits and loss: 2 x 512 words of 10,000 floats, and one float
    assert backward[Category.ACTIVATION] == 2 * 512 * 10_000 * FLOAT + FLOAT
    assert forward[Category.ACTIVATION] > 20 * 1024**3


def test_parameters_of_a_forward_pass_are_recognised() -> None:
    tape = kept.tape("small-lm-forward-seq100")
    assert bytes_by_category(tape, curves.peak(tape)[1])[Category.PARAMETER] == SMALL


def test_cublas_workspaces_are_recognised() -> None:
    # one of 4096 x 2 + 16 x 8 KiB for each of the two threads that multiply
    tape = kept.tape("lm-medium-train-seq512")
    assert bytes_by_category(tape, end_of(tape, Phase.BACKWARD))[Category.WORKSPACE] == 2 * 8_519_680


def test_categories_at_the_peak_add_up_to_it() -> None:
    tape = kept.tape("expandable-3gpu-oom", 1)
    size, row = curves.peak(tape)
    assert curves.by_category(tape)[:, row].sum() == size


# --- predicted runs ------------------------------------------------------------------------------------------


def as_recorded(tape: Tape, path: Path) -> Tape:
    """A predicted tape as a snapshot of a GPU shows it: no labels, real stacks, backward in the engine."""
    snapshot.save_snapshot(tape, path)
    content: dict[str, Any] = pickle.loads(path.read_bytes())
    (trace,) = content["device_traces"]
    rows = np.flatnonzero(tape.action != Action.MARK)
    for event, row in zip(trace, rows.tolist(), strict=True):
        event["frames"] = frames_of(tape, row)
    for segment in content["segments"]:
        for block in segment["blocks"]:
            block["frames"] = []
    path.write_bytes(gzip.compress(pickle.dumps(content, protocol=4)))
    return snapshot.load(path)[0]


def frames_of(tape: Tape, row: int) -> list[dict[str, Any]]:
    """The stack that this row would have: by phase, and for a layer's rows the line that calls it."""
    phase, step = Phase(tape.phase[row]), int(tape.step[row])
    layer = tape.modules[tape.module[row]] if tape.module[row] >= 0 else ""
    main = Frame("train.py", 60, "<module>")
    if not step:
        stack = [Frame("model.py", 12, "__init__"), main]
    elif phase is Phase.BACKWARD:
        stack = [ENGINE]
    elif phase is Phase.OPTIMIZER:
        stack = [Frame("/env/torch/optim/adamw.py", 300, "step"), main]
    elif layer:
        inner = Frame(f"{layer}.py", 5, "forward")
        stack = [inner, MODULE, Frame("model.py", 40 + tape.modules.index(layer), "forward"), MODULE, main]
    else:
        stack = [Frame("/env/torch/utils/data/dataloader.py", 700, "__next__"), main]
    return [{"filename": file, "line": line, "name": name} for file, line, name in stack]


def test_categories_from_stacks_agree_with_the_prediction(tmp_path: Path) -> None:
    predicted = training_tape()
    read = as_recorded(predicted, tmp_path / "predicted.pickle")
    rows = np.flatnonzero(predicted.action != Action.MARK)
    births = rows[predicted.action[rows] == Action.ALLOC]
    read_births = np.flatnonzero(read.action == Action.ALLOC)
    assert np.array_equal(predicted.size[births], read.size[read_births])
    agrees = predicted.category[births] == read.category[read_births]
    wrong = {Category(kind) for kind in predicted.category[births][~agrees]}
    # cuDNN's scratch has no C++ frame in this file, so it passes for a temporary, and the buffers of a norm are as long
    # as its weight and its bias, so they pass for parameters; nothing else is mistaken
    assert wrong == {Category.WORKSPACE, Category.BUFFER}
    assert {Category(kind) for kind in read.category[read_births][~agrees]} == {Category.TEMPORARY, Category.PARAMETER}
    row = curves.peak(read)[1]
    differs = curves.by_category(read)[:, row] - curves.by_category(predicted)[:, curves.peak(predicted)[1]]
    # two halves of two norms a level with 64, 128, 256 and 512 floats, in blocks of 512 bytes: 16 KiB of 3.21 GiB
    assert int(np.abs(differs).sum()) // 2 == 2 * 2 * (512 + 512 + 1024 + 2048)
    # batches are brought before the first layer runs, so the steps seem to begin a little later
    batch = predicted.category[births] == Category.INPUT
    assert np.array_equal(predicted.phase[births][~batch], read.phase[read_births][~batch])
    assert np.array_equal(predicted.step[births][~batch], read.step[read_births][~batch])


def test_a_saved_prediction_loads_with_its_layers_and_categories(tmp_path: Path) -> None:
    predicted = training_tape()
    snapshot.save_snapshot(predicted, tmp_path / "saved.pickle")
    read = snapshot.load(tmp_path / "saved.pickle")[0]
    births, read_births = (np.flatnonzero(tape.action == Action.ALLOC) for tape in (predicted, read))
    assert np.array_equal(predicted.category[births], read.category[read_births])
    layers = [
        [tape.modules[number] if number >= 0 else "" for number in tape.module[rows]]
        for tape, rows in ((predicted, births), (read, read_births))
    ]
    assert layers[0] == layers[1]
    assert [predicted.ops[number] for number in predicted.op[births]] == [
        read.ops[number] for number in read.op[read_births]
    ]
    assert curves.peak(read)[0] == curves.peak(predicted)[0]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
@pytest.mark.parametrize("precision", [torch.float32, torch.float16])
def test_categories_of_a_snapshot_with_stacks_of_python_are_those_of_the_recording(
    optimizer: Callable[..., torch.optim.Optimizer], precision: torch.dtype, tmp_path: Path
) -> None:
    path = tmp_path / "written.pickle"
    with mx.virtual("T4"):
        torch.cuda.memory._record_memory_history(stacks="python")
        with mx.record() as recording:
            model = nn.Sequential(Block(), nn.ReLU(), Block()).cuda()
            updates = optimizer(model.parameters(), lr=0.1)
            for _ in range(3):
                images = torch.ones(32, 64, device="cuda")
                with torch.autocast("cuda", precision, enabled=precision != torch.float32):
                    loss = model(images).square().mean()
                loss.backward()
                updates.step()
                updates.zero_grad()
            torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
    predicted, read = recording.tape, mx.load(path)[0]
    births, read_births = (np.flatnonzero(tape.action == Action.ALLOC) for tape in (predicted, read))
    assert np.array_equal(predicted.size[births], read.size[read_births])
    agrees = predicted.category[births] == read.category[read_births]
    # The gradient of the loss, one number in each step, is made by the first line of `backward`.
    assert predicted.size[births][~agrees].tolist() == [FLOAT] * 3
    assert {Category(kind) for kind in predicted.category[births][~agrees]} == {Category.ACTIVATION}


# --- pieces --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stack", "origin"),
    [
        ([], Origin.NONE),
        ([Frame("train.py", 3, "main")], Origin.USER),
        ([Frame("optimizer.py", 3, "step")], Origin.USER),
        ([Frame("my_optim.py", 9, "step"), Frame("/e/torch/optim/optimizer.py", 533, "wrapper")], Origin.OPTIMIZER),
        ([Frame("/e/torch/optim/optimizer.py", 1, "Optimizer.zero_grad"), MODULE], Origin.ZERO_GRAD),
        ([Frame("model.py", 3, "Net.forward"), MODULE], Origin.FORWARD),
        ([ENGINE], Origin.BACKWARD),
        ([Frame("model.py", 3, "forward"), MODULE, ENGINE], Origin.RECOMPUTE),
        ([Frame("??", 0, "torch::autograd::AccumulateGrad::apply(...)"), ENGINE], Origin.ACCUMULATE),
        ([Frame("/e/torch/autograd/__init__.py", 9, "backward")], Origin.BACKWARD),
        ([Frame("model.py", 3, "Net.__init__"), Frame("train.py", 3, "main")], Origin.MODEL),
        ([Frame("/e/torch/nn/modules/module.py", 900, "Module._apply")], Origin.MODEL),
        ([Frame("/e/torch/nn/modules/module.py", 1096, "Module.cuda"), Frame("train.py", 3, "main")], Origin.MODEL),
        ([Frame("/e/torch/utils/data/_utils/pin_memory.py", 900, "pin_memory")], Origin.DATA),
        ([Frame("??", 0, "at::cuda::getNewWorkspace()"), Frame("model.py", 3, "forward"), MODULE], Origin.WORKSPACE),
    ],
)
def test_origin_follows_from_the_stack(stack: list[Frame], origin: Origin) -> None:
    assert origin_of(tuple(stack)) is origin


def test_a_call_continues_while_its_lines_change() -> None:
    def stack(line: int) -> tuple[Frame, ...]:
        return (Frame("net.py", line, "forward"), MODULE, Frame("train.py", 7, "main"))

    assert calls_of(stack(3)) == calls_of(stack(4))
    assert len(calls_of(stack(3))) == 1


def test_phase_of_rows_between_rows_with_evidence() -> None:
    none = -1
    evidence = [none, Phase.FORWARD, none, Phase.FORWARD, none, Phase.BACKWARD, none, Phase.OPTIMIZER, none]
    phases, steps = phases_and_steps(np.array(evidence))
    assert [Phase(phase).text for phase in phases] == [
        "other",
        "forward",
        "forward",
        "forward",
        "forward",  # the loss
        "backward",
        "other",  # gradients are clipped
        "optimizer",
        "other",
    ]
    assert steps.tolist() == [0, 1, 1, 1, 1, 1, 1, 1, 1]


def test_micro_batches_form_one_step_if_an_optimizer_runs() -> None:
    once = [Phase.FORWARD, Phase.BACKWARD]
    assert phases_and_steps(np.array([*once, *once, Phase.OPTIMIZER, *once]))[1].tolist() == [1, 1, 1, 1, 1, 2, 2]
    assert phases_and_steps(np.array([*once, *once, *once]))[1].tolist() == [1, 1, 2, 2, 3, 3]


def test_a_frame_of_the_user_is_not_taken_for_a_label() -> None:
    assert parse_label(Frame("train.py", 12, "step (gradient)")) is None
    assert parse_label(Frame("train.py", 0, "step (nothing)")) is None


def test_a_row_of_the_engine_is_named_after_its_node() -> None:
    node = Frame("??", 0, "torch::autograd::generated::MulBackward0::apply(std::vector<at::Tensor>&&)")
    assert user_line((node, ENGINE)) == "MulBackward0 (autograd)"
    assert user_line((ENGINE,)) == "autograd engine"
