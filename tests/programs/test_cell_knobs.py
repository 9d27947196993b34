"""Knobs of cells act at run time: the requests are those of the same program written with the other value.

Each program of `loops` is run with a knob, and written with the value. The requests are compared in order and size.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import Machine, machine_of
from memexplore.run.programs.cell import Cell
from memexplore.run.run import Run, run
from memexplore.tape import Action, Category
from tests.programs import loops

Loop = Callable[..., str]
LOOPS: list[Loop] = [
    loops.mlp, loops.cnn, loops.sliced, loops.drawn, loops.named, loops.by_name, loops.adversaries, loops.scaled,
    loops.accelerated, loops.lightning,
]  # fmt: skip


@pytest.fixture(scope="module")
def machine() -> Machine:
    return machine_of("T4")


def run_cell(code: str, machine: Machine, knobs: Knobs | None = None) -> Run:
    return run(Cell(code, {}), knobs or Knobs(), machine)


def requests(result: Run) -> list[int]:
    tape = result.tape
    return tape.size[tape.action == Action.ALLOC].tolist()


def written_batch(loop: Loop) -> int:
    (batch, *_) = loop.__defaults__ or ()
    return int(batch)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_half_the_batch(loop: Loop, machine: Machine) -> None:
    half = written_batch(loop) // 2
    result = run_cell(loop(), machine, Knobs(batch=half))
    assert result.applied.texts == (f"batch of {half}",)
    assert requests(result) == requests(run_cell(loop(half), machine))
    assert requests(result) != requests(run_cell(loop(), machine))


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_two_micro_batches(loop: Loop, machine: Machine) -> None:
    result = run_cell(loop(), machine, Knobs(accumulation=2))
    assert result.applied.texts == (f"accumulation over 2 micro-batches of {written_batch(loop) // 2}",)
    written = run_cell(loop(count=2), machine)
    if loop is loops.lightning:
        # It divides each loss by its own number of micro-batches, also by 1: there is one number more.
        assert [size for size in requests(result) if size > 4] == [size for size in requests(written) if size > 4]
    else:
        assert requests(result) == requests(written)


@pytest.mark.parametrize("loop", [loops.mlp, loops.drawn, loops.named], ids=lambda loop: loop.__name__)
def test_a_larger_batch_in_micro_batches(loop: Loop, machine: Machine) -> None:
    result = run_cell(loop(), machine, Knobs(batch=64, accumulation=4))
    assert result.applied.texts == ("batch of 64", "accumulation over 4 micro-batches of 16")
    assert requests(result) == requests(run_cell(loop(batch=64, count=4), machine))


@pytest.mark.parametrize(
    ("knobs", "optimizer"),
    [
        (Knobs(optimizer="SGD"), "torch.optim.SGD(model.parameters(), lr=0.002)"),
        (Knobs(optimizer="SGD with momentum"), "torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)"),
        (Knobs(optimizer="Adafactor"), "torch.optim.Adafactor(model.parameters(), lr=0.002)"),
        (Knobs(update="fused"), "torch.optim.AdamW(model.parameters(), lr=0.002, fused=True)"),
        (Knobs(update="per tensor"), "torch.optim.AdamW(model.parameters(), lr=0.002, foreach=False)"),
        (Knobs(optimizer="Adam", update="fused"), "torch.optim.Adam(model.parameters(), lr=0.002, fused=True)"),
    ],
    ids=str,
)
def test_optimizer_and_update(knobs: Knobs, optimizer: str, machine: Machine) -> None:
    assert requests(run_cell(loops.mlp(), machine, knobs)) == requests(
        run_cell(loops.mlp(optimizer=optimizer), machine)
    )


@pytest.mark.parametrize("loop", [loops.cnn, loops.lightning], ids=lambda loop: loop.__name__)
def test_optimizer_with_state(loop: Loop, machine: Machine) -> None:
    of = "self" if loop is loops.lightning else "model"
    written = loop(optimizer=f"torch.optim.AdamW({of}.parameters(), lr=0.1)")
    assert requests(run_cell(loop(), machine, Knobs(optimizer="AdamW"))) == requests(run_cell(written, machine))


def test_zero_grad(machine: Machine) -> None:
    # The gradients of the first of two steps are not freed: 4 frees less.
    result = run_cell(loops.mlp(), machine, Knobs(zero_grad="set to zero"))
    written = run_cell(loops.mlp(zero_grad="set_to_none=False"), machine)
    assert len(result.tape) == len(written.tape) < len(run_cell(loops.mlp(), machine).tape)


def test_an_optimizer_that_a_knob_has_replaced_is_one_of_the_class_as_written(machine: Machine) -> None:
    code = (
        loops.mlp()
        + """
assert isinstance(optimizer, torch.optim.AdamW) and isinstance(optimizer, torch.optim.SGD)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** step)
optimizer.step()
scheduler.step()
(group,) = optimizer.param_groups
assert group["lr"] == 0.001 and group["momentum"] == 0.9, group
assert len(optimizer.state) == 4
optimizer.load_state_dict(optimizer.state_dict())
"""
    )
    run_cell(code, machine, Knobs(optimizer="SGD with momentum"))


def test_groups_keep_their_own_learning_rates(machine: Machine) -> None:
    made = (
        'torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}], lr=0.1)'
    )
    code = (
        loops.mlp(optimizer=made)
        + "\nrates = [group['lr'] for group in optimizer.param_groups]\nassert rates == [0.5, 0.1]"
    )
    run_cell(code, machine, Knobs(optimizer="SGD"))


def test_adapters_train_and_the_weights_do_not(machine: Machine) -> None:
    made = "torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=0.002)"
    result = run_cell(loops.mlp(optimizer=made), machine, Knobs(lora="0", lora_rank=4))
    assert "LoRA of rank 4 on 1 linear layer" in result.applied.texts
    tape = result.tape
    states = tape.size[(tape.action == Action.ALLOC) & (tape.category == Category.OPTIMIZER_STATE)]
    # Two states of 4 bytes for each number: of the adapter 4 x 50 and 100 x 4, of the last layer 10 x 100 and 10.
    assert sorted(states[states > 40].tolist()) == sorted(2 * [4 * 4 * 50, 4 * 100 * 4, 4 * 10 * 100])


def test_frozen_layers_have_neither_gradients_nor_states(machine: Machine) -> None:
    tape = run_cell(loops.mlp(), machine, Knobs(frozen="0")).tape
    sizes = tape.size[(tape.action == Action.ALLOC) & (tape.category == Category.OPTIMIZER_STATE)]
    assert 4 * 100 * 50 not in sizes
    assert sizes.tolist().count(4 * 10 * 100) == 2


def test_loaders_and_optimizers_of_earlier_cells(machine: Machine) -> None:
    code = loops.mlp()
    before, loop = code.split("for number, ")
    before = before.replace("data =", "data =") + "loader = DataLoader(data, batch_size=32)\n"
    names: dict[str, object] = {}
    exec(before.replace(".cuda()", ""), names)
    optimizer, loader = names["optimizer"], names["loader"]
    names["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 5)  # type: ignore[arg-type]
    loop = "model.cuda()\nfor number, " + loop.replace("DataLoader(data, batch_size=32, shuffle=True)", "loader")
    cell = Cell(loop, names)
    result = run(cell, Knobs(accumulation=4), machine)
    # 64 samples in micro-batches of 8, 4 to a step
    assert (int(result.tape.step.max()), loader.batch_size, loader.batch_sampler.batch_size) == (2, 32, 32)  # type: ignore[attr-defined]
    assert 8 * 50 * 4 in result.tape.size
    assert cell.unavailable_knobs()["optimizer"] == "this cell makes no optimizer of its own: make it there, not before"


def test_a_loop_that_ends_too_early_for_a_step_is_an_error(machine: Machine) -> None:
    code = loops.mlp().replace("    loss = ", "    if number == 2: break\n    loss = ")
    with pytest.raises(ValueError, match=r"accumulation=8 needs as many passes of the loop for a step, .* after 2"):
        run_cell(code, machine, Knobs(accumulation=8))


LINEAR = "import torch\nmodel = torch.nn.Linear(2, 3)\nmodel(torch.ones(4, 2)).sum().backward()"
ATTENTION = """import torch
model = torch.nn.MultiheadAttention(4, 1)
model(torch.ones(5, 2, 4), torch.ones(6, 2, 4), torch.ones(6, 2, 4))[0].sum().backward()"""
STEP = "\ntorch.optim.SGD(model.parameters()).step()"


@pytest.mark.parametrize(
    ("code", "field", "reason"),
    [
        ("x = 1", "batch", "this cell trains no model"),
        ("x = 1", "optimizer", "this cell makes no optimizer"),
        ("x = 1", "mode", "this cell calls backward itself"),
        (LINEAR, "accumulation", "this cell makes no step of an optimizer"),
        (LINEAR, "zero_grad", "this cell does not call zero_grad"),
        (LINEAR + STEP, "accumulation", "this cell makes one step, and each micro-batch needs a pass of its loop"),
        (
            ATTENTION,
            "batch",
            "this cell builds no DataLoader, and its model's inputs have no common first dimension: (5, 2, 4) and "
            "(6, 2, 4) and (6, 2, 4)",
        ),
    ],
)
def test_what_cannot_act_says_why(code: str, field: str, reason: str) -> None:
    assert Cell(code, {}).unavailable_knobs()[field] == reason


def test_what_can_act_is_available() -> None:
    reasons = Cell(loops.mlp(), {}).unavailable_knobs()
    assert set(reasons) == {
        "input_size", "mode", "gpus", "strategy", "tensor_parallel", "fsdp_precision", "fsdp_offload",
    }  # fmt: skip


def test_an_optimizer_that_calls_the_model_again_has_no_micro_batches(machine: Machine) -> None:
    code = """
import torch
model = torch.nn.Linear(4, 1).cuda()
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
x = torch.ones(8, 4, device="cuda")
def closure():
    optimizer.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    return loss
for _ in range(2):
    optimizer.step(closure)
"""
    cell = Cell(code, {})
    assert cell.unavailable_knobs()["accumulation"] == "a step of its optimizer calls the model several times"
    assert 4 * 4 * 4 in run(cell, Knobs(batch=4), machine).tape.size


def test_inputs_that_cannot_be_cut_together_say_what_was_raised(machine: Machine) -> None:
    code = loops.drawn().replace(
        "loss = F.cross_entropy(model(x), y)", "loss = F.cross_entropy(model(x), y, reduction='none')"
    )
    cut = code.replace("loss.backward()", "(loss @ torch.ones(32, device='cuda')).backward()")
    half = cut.replace("randn(32,", "randn(16,").replace("(32,), dev", "(16,), dev").replace("ones(32", "ones(16")
    assert requests(run_cell(cut, machine, Knobs(batch=16))) == requests(run_cell(half, machine))
    # The samples of these weights do not lie along the first dimension.
    row = code.replace("loss.backward()", "(loss * torch.ones(1, 32, device='cuda')).sum().backward()")
    with pytest.raises(
        ValueError, match=r"batch cannot be changed: with inputs of 16 samples this cell raises Runtime"
    ):
        run_cell(row, machine, Knobs(batch=16))


def test_numbers_that_contradict_the_batch(machine: Machine) -> None:
    with pytest.raises(ValueError, match="accumulation=3 does not divide the batch of 32; write one of its divisors"):
        run_cell(loops.mlp(), machine, Knobs(accumulation=3))
    with pytest.raises(ValueError, match="this cell calls it itself; write update= one of 'foreach'"):
        run_cell(loops.mlp(), machine, Knobs(update="in backward"))
    with pytest.raises(ValueError, match="batch= and variables= both set batch_size"):
        run_cell(loops.named(), machine, Knobs(batch=8, variables={"batch_size": 16}))


def test_a_batch_that_does_not_fit_a_gpu_is_predicted_to_its_end(machine: Machine) -> None:
    result = run_cell(loops.mlp(batch=64), machine_of("17MiB"), Knobs(batch=32))
    whole = run_cell(loops.mlp(batch=32), machine)
    assert (result.fits, result.outcome.peak_allocated) == (False, whole.outcome.peak_allocated)


def test_time_is_compared_for_the_samples_that_were_trained(machine: Machine) -> None:
    # 64 samples from a DataLoader of any batch; 4 batches of 32 or of 16 without one
    assert [run_cell(loops.mlp(), machine, knobs).outcome.samples for knobs in (Knobs(), Knobs(batch=8))] == [64, 64]
    assert [run_cell(loops.drawn(), machine, knobs).outcome.samples for knobs in (Knobs(), Knobs(batch=16))] == [
        128,
        64,
    ]


def test_on_the_cpu_of_this_machine_a_loader_gives_another_batch() -> None:
    code = loops.mlp().replace(".cuda()", "")
    result = run_cell(code, machine_of("cpu"), Knobs(batch=16, optimizer="SGD"))
    assert result.applied.texts == ("batch of 16", "SGD")
    assert 16 * 100 * 4 in result.tape.size[result.tape.category == Category.ACTIVATION]
    with pytest.raises(ValueError, match="which only a virtual GPU gives another size"):
        drawn = loops.drawn().replace(".cuda()", "").replace(', device="cuda"', "")
        run_cell(drawn, machine_of("cpu"), Knobs(batch=16))
