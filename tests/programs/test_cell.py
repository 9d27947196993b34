"""A cell that is run again with other values and other knobs; everything is restored."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
import torch

from memexplore.analysis import curves
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import machine_of
from memexplore.run.programs import names as cell_names
from memexplore.run.programs.cell import Cell
from memexplore.run.programs.cost import ProgramEnded, interruptible
from memexplore.run.programs.out_of_memory import fits
from memexplore.run.programs.packing import UnsendableCellError
from memexplore.run.run import Run, completed, run
from memexplore.tape import Action, Category, Ending, Source
from memexplore.virtual_gpu.tensors.tensor import is_virtual

NAMES = {"torch": torch}
# A block of 512 bytes holds 128 floats.
BLOCKS = "count = 128\nx = torch.zeros(count, device='cuda')"


def peak(cell: Cell, knobs: Knobs | None = None, gpu: str = "T4") -> int:
    return curves.peak(run(cell, knobs, machine_of(gpu)).tape)[0]


def test_variable_is_replaced_where_it_is_assigned() -> None:
    cell = Cell(BLOCKS, NAMES)
    assert peak(cell) == 512
    assert peak(cell, Knobs(variables={"count": 1280})) == 5120


@pytest.mark.parametrize(
    "code",
    [
        "other, count = 1, 128",
        "count: int = 128",
        "count = other = 128",
        "if True:\n    count = 128",
        "for number in range(1):\n    count = 128",
        "[other, (count, third)] = [1, (128, 3)]",
    ],
)
def test_every_form_of_assignment_is_replaced(code: str) -> None:
    cell = Cell(f"{code}\nx = torch.zeros(count, device='cuda')", NAMES)
    assert cell.assigned()["count"] == 128
    assert peak(cell, Knobs(variables={"count": 1280})) == 5120


def test_assignment_in_a_function_is_not_changed() -> None:
    cell = Cell("def f():\n    count = 128\n    return count\ncount = 1\nx = torch.zeros(f(), device='cuda')", NAMES)
    assert peak(cell, Knobs(variables={"count": 1280})) == 512


def test_variable_that_is_not_assigned_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"assigns no variable 'bach'; it assigns count, x"):
        run(Cell(BLOCKS, NAMES), Knobs(variables={"bach": 1}))


def test_names_of_the_notebook_are_not_changed() -> None:
    names = {"torch": torch, "count": 5}
    run(Cell(BLOCKS, names))
    assert names == {"torch": torch, "count": 5}


def test_cell_uses_the_names_of_the_time_it_was_made() -> None:
    names = {"torch": torch, "count": 128}
    cell = Cell("x = torch.zeros(count, device='cuda')", names)
    names["count"] = 1280
    assert peak(cell) == 512


def training(model: str = "") -> str:
    return f"""{model}
model.cuda()
for _ in range(2):
    model(torch.ones(64, 256, device='cuda')).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def names() -> dict[str, object]:
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.BatchNorm1d(256), torch.nn.ReLU())
    return {"torch": torch, "model": model, "optimizer": torch.optim.Adam(model.parameters())}


def test_models_and_optimizers_of_earlier_cells_are_restored(names: dict[str, object]) -> None:
    model, optimizer = names["model"], names["optimizer"]
    model[0].weight.grad = torch.ones(256, 256)  # type: ignore[index]
    before = {name: value.clone() for name, value in model.state_dict().items()}  # type: ignore[attr-defined]
    code = training("model.eval(); model[0].requires_grad_(False); optimizer.param_groups[0]['lr'] = 5")
    run(Cell(code, names))
    assert {name: value.device.type for name, value in model.state_dict().items()} == dict.fromkeys(before, "cpu")  # type: ignore[attr-defined]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())  # type: ignore[attr-defined]
    assert model.training  # type: ignore[attr-defined]
    assert all(weight.requires_grad for weight in model.parameters())  # type: ignore[attr-defined]
    assert torch.equal(model[0].weight.grad, torch.ones(256, 256))  # type: ignore[index]
    assert not optimizer.state  # type: ignore[attr-defined]
    assert optimizer.param_groups[0]["lr"] == 1e-3  # type: ignore[attr-defined]


def test_random_states_are_restored() -> None:
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    code = "import random, numpy\nrandom.random(); numpy.random.rand(); torch.rand(3)"
    run(Cell(code, NAMES))
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states


def test_every_run_starts_from_the_same_state(names: dict[str, object]) -> None:
    cell = Cell(training(), names)
    first, second = run(cell).tape, run(cell).tape
    assert first.replace(stacks=()).equals(second.replace(stacks=()))


def test_printed_output_is_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    run(Cell("print('step 1')\nimport sys; print('warning', file=sys.stderr)", NAMES))
    assert capsys.readouterr() == ("", "")


def test_autocast_is_applied_to_a_model_at_its_first_call(names: dict[str, object]) -> None:
    cell = Cell(training(), names)
    as_written, half = run(cell), run(cell, Knobs(precision="bf16"))

    def output(result: Run) -> set[int]:
        tape = result.tape
        linear = (tape.module == tape.modules.index("0")) & (tape.category == Category.ACTIVATION)
        return set(tape.size[linear & (tape.action == Action.ALLOC)].tolist())

    # 64 rows of 256 numbers of 4 bytes, and of 2
    assert 64 * 256 * 4 in output(as_written)
    assert 64 * 256 * 4 not in output(half)
    assert 64 * 256 * 2 in output(half)
    assert half.applied.texts == ("bf16 autocast",)
    model = names["model"]
    assert model(torch.ones(64, 256)).dtype == torch.float32  # type: ignore[operator]


def test_checkpointing_is_applied_to_a_model_of_the_cell() -> None:
    # As written a block saves the outputs of both ReLUs; a checkpointed block saves only its input.
    block = "torch.nn.Sequential(*(part for _ in range(2) for part in (torch.nn.Linear(256, 256), torch.nn.ReLU())))"
    code = f"""model = torch.nn.Sequential(*({block} for _ in range(8))).cuda()
model(torch.ones(4096, 256, device='cuda')).sum().backward()"""
    cell = Cell(code, NAMES)
    assert peak(cell, Knobs(checkpoint="every 1")) < 0.75 * peak(cell)


def test_gpu_and_settings_are_those_of_the_knobs() -> None:
    cell = Cell(BLOCKS, NAMES)
    tape = run(cell, Knobs(gpu="A100", settings="expandable_segments:True")).tape
    assert "A100" in tape.meta.device
    assert tape.meta.settings == "expandable_segments:True"


def test_out_of_memory_ends_the_run_and_is_a_row_of_the_tape() -> None:
    cell = Cell("x = torch.empty(2 * 1024**3, dtype=torch.uint8, device='cuda')", NAMES)
    result = run(cell, machine=machine_of("1GiB"))
    assert Action.OOM in result.tape.action
    # with unlimited memory the tensor takes its 2 GiB
    assert (result.fits, result.outcome.peak_allocated) == (False, 2 * 1024**3)


def test_other_exceptions_are_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        run(Cell("1 / 0", NAMES))


# -- for real, on this machine's CPU

CPU = machine_of("cpu")
REAL = """model.eval()
for _ in range(2):
    model(torch.ones(64, 256)).sum().backward()
    optimizer.step()
"""


def test_cell_is_measured_on_the_cpu(names: dict[str, object]) -> None:
    cell = Cell(f"size = 64\n{REAL.replace('64, 256', 'size, 256')}", names)
    result = run(cell, Knobs(variables={"size": 128}), CPU)
    assert (result.tape.meta.source, result.outcome.source) == (Source.MEASURED, Source.MEASURED)
    # 128 rows of 256 numbers of 4 bytes
    assert 128 * 256 * 4 in result.tape.size[result.tape.category == Category.ACTIVATION]


def test_real_run_restores_weights_gradients_states_and_random_states(names: dict[str, object]) -> None:
    model, optimizer = names["model"], names["optimizer"]
    model(torch.ones(64, 256)).sum().backward()  # type: ignore[operator]
    optimizer.step()  # type: ignore[attr-defined]

    def everything() -> list[object]:
        states = [value for state in optimizer.state.values() for value in state.values()]  # type: ignore[attr-defined]
        weights = list(model.parameters())  # type: ignore[attr-defined]
        tensors = [*model.state_dict().values(), *states, *(weight.grad for weight in weights)]  # type: ignore[attr-defined]
        values = [[tensor.tolist() for tensor in tensors], [weight.data_ptr() for weight in weights]]
        return [
            values,
            model.training,
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
        ]

    before = everything()
    run(Cell(f"import random, numpy\nrandom.random(); numpy.random.rand(); torch.rand(3)\n{REAL}", names), machine=CPU)
    assert everything() == before


def test_knobs_are_applied_in_a_real_run(names: dict[str, object]) -> None:
    result = run(Cell(REAL, names), Knobs(precision="bf16"), CPU)
    assert result.applied.texts == ("bf16 autocast",)
    assert 64 * 256 * 2 in result.tape.size[result.tape.category == Category.ACTIVATION]


def test_weights_are_restored_after_a_cell_that_fails_on_the_cpu(names: dict[str, object]) -> None:
    before = [value.tolist() for value in names["model"].state_dict().values()]  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        run(Cell(f"{REAL}\n1 / 0", names), machine=CPU)
    assert [value.tolist() for value in names["model"].state_dict().values()] == before  # type: ignore[attr-defined]


def test_knobs_that_do_not_apply_to_a_cell() -> None:
    cell = Cell(BLOCKS, NAMES)
    unavailable = cell.unavailable_knobs()
    assert {"batch", "accumulation", "optimizer"} <= set(unavailable)
    assert not {"inplace", "checkpoint", "precision", "settings", "gpu", "variables"} & set(unavailable)
    with pytest.raises(ValueError, match="batch cannot be changed: this cell trains no model"):
        run(cell, Knobs(batch=4))


def test_cell_that_awaits_is_an_error() -> None:
    with pytest.raises(ValueError, match="take the await out"):
        Cell("import asyncio\nawait asyncio.sleep(0)", NAMES)


def test_the_operating_system_is_that_of_the_run():
    cell = Cell("import torch\nx = torch.zeros(10, device='cuda')", {})
    result = run(cell, machine=machine_of("T4", os="wsl"))
    assert result.tape.meta.os == "wsl"
    assert result.fits


@pytest.fixture
def cpu_as_real_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cell_names, "_is_on_real_gpu", lambda value: isinstance(value, torch.Tensor) and not is_virtual(value)
    )


@pytest.mark.usefixtures("cpu_as_real_gpu")
def test_what_is_on_a_real_gpu_goes_onto_the_virtual_one_for_the_run() -> None:
    model, x = torch.nn.Linear(256, 256, bias=False), torch.zeros(8, 256)
    optimizer = torch.optim.Adam(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    weight, gradient = model.weight, model.weight.grad
    before, state = weight.tolist(), dict(optimizer.state[weight])
    cell = Cell("model(x).sum().backward()\noptimizer.step()", {"model": model, "optimizer": optimizer, "x": x})
    # 256 x 256 weights of 4 bytes, their gradient, two states and a counter, 8 x 256 inputs
    assert cell.bytes_on(torch.device("cpu")) == (4 * 256 * 256 + 1 + 8 * 256) * 4
    tape = run(cell, machine=machine_of("T4")).tape
    assert np.count_nonzero(tape.size == 256 * 256 * 4) >= 4
    assert (model.weight is weight, weight.tolist(), weight.device.type) == (True, before, "cpu")
    assert weight.grad is gradient
    assert all(optimizer.state[weight][name] is state[name] for name in ("exp_avg", "exp_avg_sq"))
    assert (optimizer.state[weight]["step"].item(), x.device.type) == (1, "cpu")


@pytest.mark.usefixtures("cpu_as_real_gpu")
@pytest.mark.parametrize("names", [{"ballast": torch.zeros(30 << 18)}, {"model": torch.nn.Linear(1024, 30 * 256)}])
def test_variables_that_do_not_fit_end_the_run_before_the_cell(names: dict[str, object]) -> None:
    # 30 MiB each, and 30 KiB of bias
    code = "ran.append(torch.ones(4 << 20, dtype=torch.uint8, device='cuda'))"
    ran: list[object] = []
    cell = Cell(code, {"torch": torch, "ran": ran, **names})
    execution = cell.execute(Knobs(), machine_of("24MiB"))
    assert (fits(execution.tape), ran) == (False, [])
    assert execution.tape.meta.notes[-1] == (
        "The notebook's variables alone need 30.0 MiB, and do not fit: the cell did not run."
    )
    outcome = completed(cell, execution, machine_of("24MiB")).outcome
    # With room the cell runs: its 4 MiB are in the need.
    assert not outcome.fits
    assert outcome.peak_allocated >= 34 << 20


def test_a_packed_cell_has_its_own_copy_of_the_names_that_it_reads() -> None:
    names = {"torch": torch, "sizes": iter([1 << 20, 1 << 22]), "unused": lambda: names}
    cell = pickle.loads(Cell("x = torch.zeros(next(sizes), device='cuda')", names).packed())
    # 2²⁰ numbers of 4 bytes, each time
    assert [peak(cell), peak(cell)] == [4 << 20, 4 << 20]
    with pytest.raises(ValueError, match="run it on a virtual GPU"):
        run(cell, machine=CPU)


def test_a_name_that_cannot_be_packed_is_named() -> None:
    names = {"sizes": (size for size in (1, 2))}
    with pytest.raises(UnsendableCellError, match="sizes, a generator, cannot be copied"):
        Cell("next(sizes)", names).packed()


def test_a_check_can_end_a_cell_as_if_it_had_come_to_its_end() -> None:
    ops = iter(range(3))

    def end_after_three_ops() -> None:
        if next(ops, None) is None:
            raise ProgramEnded

    with interruptible(end_after_three_ops):
        tape = run(
            Cell("import torch\nwhile True: x = torch.zeros(10, device='cuda')", {}), machine=machine_of("T4")
        ).tape
    assert (np.count_nonzero(tape.action == Action.ALLOC), tape.meta.ending) == (3, Ending.COMPLETED)
