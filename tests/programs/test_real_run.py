"""A step on a real device, this machine's CPU; `test_real_run_cuda` has the code for CUDA."""

from __future__ import annotations

import copy
import gc
import math
import random
import traceback
import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import default_name, machine_of, system_memory
from memexplore.run.programs import real_run, step_run
from memexplore.run.programs.out_of_memory import fits
from memexplore.run.programs.outcome import slow_down
from memexplore.run.programs.step import Step
from memexplore.run.run import run
from memexplore.run.search import runners
from memexplore.tape import Action, Category, Phase, Source, Tape
from memexplore.virtual_gpu.device import active
from tests.small import network

MIB = 1024**2
WEIGHTS = [64 * 128, 128, 128 * 10, 10]  # of tests.small.network
PARAMETERS = 4 * sum(WEIGHTS)


def step(batch: int = 8, model: Any = None, **changes: Any) -> Step:
    torch.manual_seed(0)
    inputs = torch.randn(batch, 64), torch.randint(10, (batch,))
    settings = {"loss": nn.functional.cross_entropy, "optimizer": torch.optim.AdamW} | changes
    return Step(network() if model is None else model, inputs, **settings)


def deep(batch: int = 256) -> Step:
    """Eight blocks whose activations are larger than their weights."""
    block = [layer for _ in range(2) for layer in (nn.Linear(32, 32), nn.LeakyReLU())]
    model = nn.Sequential(*(nn.Sequential(*copy.deepcopy(block)) for _ in range(8)))
    return Step(model, torch.randn(batch, 32), loss=lambda output: output.sum(), optimizer=torch.optim.SGD)


def made(tape: Tape, category: Category, step: int | None = None) -> list[int]:
    born = np.isin(tape.action, (Action.ALLOC, Action.PREEXISTING)) & (tape.category == category)
    return sorted(tape.size[born & (True if step is None else tape.step == step)].tolist())


def rows(tape: Tape) -> list[tuple[Any, ...]]:
    """Return the rows of a tape without addresses, and without the layer of the optimizer's temporaries."""
    names = ["action", "size", "category", "phase", "step", "op", "module"]
    table = tape.to_pandas()[names].astype(object)
    table.loc[(table["phase"] == "optimizer") & (table["category"] == "temporary"), "module"] = ""
    return list(table.itertuples(index=False, name=None))


def needed(of: Step, **knobs: Any) -> int:
    return mx.peak(run(of, Knobs(**knobs), machine_of("cpu")).tape, "requested")[0]


# -- the tape, by hand


@pytest.fixture(scope="module")
def measured() -> Tape:
    return run(step(), machine=machine_of("cpu")).tape


def test_tape_is_measured_on_the_cpu(measured: Tape) -> None:
    assert (measured.meta.source, measured.meta.device) == (Source.MEASURED, "cpu")
    assert sorted(set(measured.step.tolist())) == [0, 1, 2]
    assert Action.PREEXISTING not in measured.action


def test_weights_are_copied_once(measured: Tape) -> None:
    assert made(measured, Category.PARAMETER) == sorted(4 * weight for weight in WEIGHTS)


def test_every_step_makes_a_gradient_of_each_weight(measured: Tape) -> None:
    assert [made(measured, Category.GRADIENT, number) for number in (1, 2)] == [sorted(4 * w for w in WEIGHTS)] * 2


def test_adamw_has_two_states_and_a_counter_of_each_weight(measured: Tape) -> None:
    assert made(measured, Category.OPTIMIZER_STATE) == sorted([4 * w for w in WEIGHTS] * 2 + [4] * 4)


def test_batch_is_copied_once(measured: Tape) -> None:
    # 8 x 64 floats, and 8 targets of 8 bytes
    assert made(measured, Category.INPUT) == [8 * 8, 8 * 64 * 4]


def test_activations_are_those_of_the_layers(measured: Tape) -> None:
    # The outputs of both linear layers and of ReLU, log_softmax, the loss, its weight and the gradient it begins with.
    assert made(measured, Category.ACTIVATION, 1) == sorted([8 * 128 * 4, 8 * 128 * 4, 8 * 10 * 4, 8 * 10 * 4, 4, 4, 4])


def test_peak_of_a_wide_batch_is_in_backward() -> None:
    # 4096 samples of 128 floats are 2 MiB a tensor, and all weights are 37 KiB.
    tape = run(step(4096), machine=machine_of("cpu")).tape
    assert Phase(int(tape.phase[mx.peak(tape)[1]])) is Phase.BACKWARD


# -- knobs change the measured tape


ONE = 256 * 32 * 4  # the output of a layer of `deep`
OF_DEEP = 16 * (32 * 32 + 32) * 4  # its weights


def test_peak_as_written_has_the_outputs_of_all_layers() -> None:
    # 16 of linear layers, kept by LeakyReLU, 15 of LeakyReLU, kept by the next layer, and the first gradient; the
    # batch; the gradients of one layer's weights; the loss and the gradient that it begins with.
    assert needed(deep()) == OF_DEEP + 32 * ONE + ONE + (32 * 32 + 32) * 4 + 8


def test_checkpointing_needs_less() -> None:
    # Of 32 are left the inputs of 7 blocks, 3 outputs of the block that is computed again, and a gradient. By then
    # there are gradients of two layers' weights, not of one.
    assert needed(deep()) - needed(deep(), checkpoint="every 1") == 21 * ONE - (32 * 32 + 32) * 4


def test_in_place_activations_need_less() -> None:
    # 16 outputs and a gradient in place of 32.
    assert needed(deep()) - needed(deep(), inplace="on") == 15 * ONE


def test_micro_batches_need_less() -> None:
    # A quarter of 32 outputs; but gradients of all weights are there from the second micro-batch on.
    assert needed(deep()) - needed(deep(), accumulation=4) == 24 * ONE - OF_DEEP


def test_all_bf16_needs_half() -> None:
    # The batch is in memory in fp32, beside its copy in bf16.
    assert needed(deep(), precision="all bf16") == needed(deep()) // 2 + ONE


def test_batch_of_the_knobs_is_run() -> None:
    tape = run(step(), Knobs(batch=32), machine_of("cpu")).tape
    assert 32 * 64 * 4 in made(tape, Category.INPUT)


@pytest.mark.parametrize(
    "knobs",
    [
        Knobs(precision="bf16"),
        Knobs(precision="fp16"),
        Knobs(precision="off"),
        Knobs(optimizer="Adafactor"),
        Knobs(update="fused"),
        Knobs(update="in backward"),
        Knobs(zero_grad="set to zero"),
        Knobs(memory_format="channels last"),
        Knobs(mode="inference"),
        Knobs(frozen="0"),
        Knobs(lora="2", lora_rank=2),
    ],
    ids=str,
)
def test_every_knob_runs_on_the_cpu(knobs: Knobs) -> None:
    ran = run(step(), knobs, machine_of("cpu"))
    assert fits(ran.tape)
    assert ran.applied.texts == run(step(), knobs).applied.texts


def test_a_note_that_offload_moves_nothing_on_the_cpu() -> None:
    ran = run(step(), Knobs(offload="saved tensors on the CPU"), machine_of("cpu"))
    assert "no tensor had to be moved" in " ".join(ran.applied.notes)


# -- measured and predicted: the same ops, and every difference explained


# On a GPU two threads have a cuBLAS workspace each; from torch 2.15 on every product has one: two forward and three
# backward in each of two steps, as the input needs no gradient.
@pytest.mark.parametrize(("release", "workspaces"), [("2.14", 2), ("2.15", 2 * (2 + 3))])
def test_measured_requests_are_the_predicted_ones_except_those_of_one_device(release: str, workspaces: int) -> None:
    of = step()
    knobs = Knobs(update="per tensor")  # a GPU would take foreach, a CPU does not
    measured = run(of, knobs, machine_of("cpu")).tape
    predicted = run(of, knobs, machine_of("T4", release=release)).tape

    def requests(tape: Tape) -> Counter[tuple[str, int]]:
        born = np.flatnonzero(tape.action == Action.ALLOC)
        names = [tape.ops[number] if number >= 0 else "" for number in tape.op[born]]
        return Counter(zip(names, tape.size[born].tolist(), strict=True))

    here, there = requests(measured), requests(predicted)
    only_here, only_there = here - there, there - here
    # On the CPU the batch is copied once (8 x 64 floats, 8 integers); on a GPU it is moved there in both steps.
    # Adam's counters are on the CPU: they are on the tape of the CPU alone.
    assert only_here == {("aten::clone", 2048): 1, ("aten::clone", 64): 1, ("aten::lift_fresh", 4): 4}
    # 8 519 680 bytes for the kernels of compute capability 7.5
    assert sum(count for (_, size), count in only_there.items() if size == 8_519_680) == workspaces
    rest = {key: count for key, count in only_there.items() if key[1] != 8_519_680}
    assert rest == {("aten::_to_copy", 2048): 2, ("aten::_to_copy", 64): 2}


# -- everything is restored


def everything(of: Step) -> list[Any]:
    model = of.model
    assert isinstance(model, nn.Module)
    tensors = [*model.parameters(), *model.buffers(), *of.batch]
    return [
        [(id(value), value.data_ptr(), value.clone().tolist(), value.requires_grad) for value in tensors],
        [weight.grad for weight in model.parameters()],
        [(module.training, list(vars(module)), list(module._forward_hooks)) for module in model.modules()],
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
    ]


class Careless(nn.Module):
    """Changes all of its attributes, and draws from every random number generator."""

    def __init__(self, then: str = "") -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(64, 16), nn.BatchNorm1d(16)
        self.second, self.then, self.calls = nn.Linear(16, 10), then, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        random.random(), np.random.rand(), x.add_(1)
        self.calls += 1
        self.last = hidden = torch.dropout(self.norm(self.first(x)), 0.5, True)
        if self.then == "fails":
            raise ZeroDivisionError
        return self.second(hidden)


@pytest.mark.parametrize("knobs", [Knobs(), Knobs(precision="all bf16"), Knobs(lora="first"), Knobs(mode="inference")])
def test_model_batch_and_random_states_are_restored(knobs: Knobs) -> None:
    of = step(model=Careless())
    weights = list(of.model.parameters())  # type: ignore[union-attr]
    weights[0].grad = torch.ones(16, 64)
    before = everything(of)
    run(of, knobs, machine_of("cpu"))
    assert everything(of) == before
    assert weights[0].grad.sum() == 16 * 64


def test_everything_is_restored_after_an_error_and_the_error_holds_no_tensor() -> None:
    of = step(model=Careless("fails"))
    before = everything(of)
    seen: list[weakref.ref[Any]] = []
    of.model.norm.register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))  # type: ignore[union-attr]
    before = everything(of)
    with pytest.raises(ZeroDivisionError) as caught:
        run(of, machine=machine_of("cpu"))
    gc.collect()
    assert everything(of) == before
    assert seen
    assert not any(reference() is not None for reference in seen)
    # The traceback still has the lines.
    assert "raise ZeroDivisionError" in "".join(traceback.format_exception(caught.value))


def test_nothing_of_a_run_stays_alive() -> None:
    seen: list[weakref.ref[Any]] = []
    of = step()
    of.model[0].register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))  # type: ignore[index]
    ran = run(of, machine=machine_of("cpu"))
    gc.collect()
    assert len(ran.tape)
    assert seen
    assert not any(reference() is not None for reference in seen)


def test_building_function_is_called_once_on_a_real_device() -> None:
    calls = []
    of = step(model=lambda: calls.append(active()) or network())
    run(of, machine=machine_of("cpu"))
    run(of, Knobs(batch=4), machine_of("cpu"))
    assert [on is None for on in calls] == [False, True]  # for the prediction, and for real


def test_optimizer_object_keeps_its_groups() -> None:
    model = network()
    groups = [{"params": model[0].parameters(), "momentum": 0.9}, {"params": model[2].parameters()}]
    ran = run(step(model=model, optimizer=torch.optim.SGD(groups, lr=0.1)), machine=machine_of("cpu"))
    # Only the first layer's weights have momentum.
    assert made(ran.tape, Category.OPTIMIZER_STATE) == sorted(4 * weight for weight in WEIGHTS[:2])


def test_loss_that_holds_the_model_itself_has_the_weights_of_the_run() -> None:
    model = network()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target) + model[0].weight.pow(2).sum()

    before = model[0].weight.clone()
    assert fits(run(step(model=model, loss=loss), machine=machine_of("cpu")).tape)
    assert torch.equal(model[0].weight, before)


# -- numbers


def test_time_is_measured_and_flops_are_those_of_the_prediction() -> None:
    measured = run(step(), machine=machine_of("cpu"))
    numbers = measured.outcome
    assert 0 < measured.seconds < 60
    assert numbers.seconds == measured.seconds
    assert numbers.source is Source.MEASURED
    # forward and the gradient of the weights of both layers, and of the input of the second; a multiply-add is two
    assert numbers.flops == 2 * 8 * (2 * 64 * 128 + 3 * 128 * 10)
    assert numbers.capacity == system_memory()


def test_time_of_a_step_is_that_of_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    # Three steps of 0.5, 0.2 and 0.4 s are more than a second.
    times = iter([0.0, 0.5, 0.5, 0.7, 0.7, 1.1])
    monkeypatch.setattr(real_run, "_clock", lambda device: times.__next__)
    assert run(step(), machine=machine_of("cpu")).seconds == pytest.approx(0.2)


def test_measured_and_predicted_times_are_not_compared() -> None:
    of = step()
    as_written, elsewhere = (run(of, knobs, machine_of("cpu")).outcome for knobs in (Knobs(), Knobs(gpu="T4")))
    assert elsewhere.source is Source.PREDICTED
    assert math.isnan(slow_down(elsewhere, as_written))


def test_gpu_of_the_knobs_is_virtual() -> None:
    ran = run(step(), Knobs(gpu="T4"), machine_of("cpu"))
    assert ran.tape.replace(stacks=()).equals(run(step()).tape.replace(stacks=()))


def test_sweep_on_the_cpu_runs_here_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "Workers", lambda *_: pytest.fail("a process was started"))
    found = mx.sweep(step(), [Knobs(batch=size) for size in (2, 4, 16)], gpu="cpu", progress=None)
    table = found.to_pandas()
    assert set(table["source"]) == {"measured"}
    assert set(table["gpu"]) == {"cpu"}
    assert table["slow_down"].notna().all()


# -- errors


def test_allocator_settings_need_a_gpu() -> None:
    with pytest.raises(ValueError, match="which a CPU does not have"):
        run(step(), Knobs(settings="expandable_segments:True"), machine_of("cpu"))


def test_cuda_without_a_usable_gpu_is_an_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert default_name() == "T4"
    with pytest.raises(ValueError, match="finds no GPU on this machine"):
        run(step(), machine=machine_of("cuda"))


def test_real_device_follows_the_torch_that_is_installed() -> None:
    with pytest.raises(ValueError, match="name a virtual GPU for another release"):
        run(step(), machine=machine_of("cpu", release="2.11"))


def test_real_device_is_an_error_while_a_virtual_gpu_is_on() -> None:
    with mx.virtual("T4"), pytest.raises(RuntimeError, match="a virtual Tesla T4 is on"):
        run(step(), machine=machine_of("cpu"))


def test_model_of_a_virtual_gpu_has_no_values_to_run_with() -> None:
    with mx.virtual("T4"):
        model = network().cuda()
    with pytest.raises(ValueError, match="has no values"):
        run(step(model=model), machine=machine_of("cpu"))


def test_executor_with_a_real_device_is_an_error() -> None:
    with pytest.raises(TypeError, match="one setting after another"):
        mx.sweep(step(), [], gpu="cpu", executor=object(), progress=None)  # type: ignore[arg-type]


def test_setting_that_needs_more_memory_than_the_machine_has_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_run, "available_system_memory", lambda: MIB)
    monkeypatch.setattr(real_run, "run", lambda *_: pytest.fail("it was run"))
    with pytest.raises(MemoryError, match=r"batch 65536: not run, as it would need \d+ MiB by prediction"):
        run(step(), Knobs(batch=65536), machine_of("cpu"))


def test_step_that_no_virtual_gpu_can_run_is_run_without_flops() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if model[0].weight.is_cuda:  # type: ignore[index,union-attr]
            raise NotImplementedError("needs values")
        return model(batch[0]).sum()

    ran = run(step(loss=None, compute_loss=loss), machine=machine_of("cpu"))
    assert ran.cost.flops == 0
    assert ran.applied.notes == (
        "FLOPs are unknown, since no virtual GPU can run this step: NotImplementedError: needs values",
    )
