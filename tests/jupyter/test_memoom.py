"""`%memoom`, and post-mortems of profiled cells, in an IPython shell on the virtual GPU."""

from __future__ import annotations

import io
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from IPython.core.error import UsageError
from IPython.display import DisplayHandle
from IPython.utils.capture import capture_output

import memexplore
from memexplore.analysis import curves
from memexplore.jupyter import live_page, memoom
from memexplore.out_of_memory.cause import Cause
from memexplore.out_of_memory.failed_program import FailedProgram
from memexplore.out_of_memory.value import PostMortem
from memexplore.run.machine import machine_of
from memexplore.run.run import run
from memexplore.text import ipython_shell
from memexplore.text.units import size_text
from tests.jupyter.magics_shell import Shell

MIB = 1 << 20
TOO_LARGE = 'large = torch.empty(300 << 20, dtype=torch.uint8, device="cuda")'
HELD_BY_FRAME = """
def load():
    kept = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
    more = torch.empty(200 << 20, dtype=torch.uint8, device="cuda")
load()"""


@pytest.fixture
def on_gpu(shell: Shell, found: list[PostMortem]) -> Shell:
    """A shell with a virtual GPU of 256 MiB and post-mortems."""
    shell.run("%memgpu 256MiB").raise_error()
    shell.run("%memoom on").raise_error()
    assert shell.text == "Post-mortems are on.\n"
    return shell


def test_post_mortem_of_any_cell(on_gpu: Shell, found: list[PostMortem]) -> None:
    result = on_gpu.run(TOO_LARGE)
    assert isinstance(result.error_in_exec, torch.OutOfMemoryError)
    assert on_gpu.text.count("Traceback (most recent call last)") == 1
    (post_mortem,) = found
    assert post_mortem.cause is Cause.TOO_MUCH
    assert post_mortem.request is not None
    assert (post_mortem.request.op, post_mortem.request.size) == ("aten::empty", 300 * MIB)
    assert sys.last_value is result.error_in_exec


def test_no_post_mortem_of_other_errors_and_when_off(on_gpu: Shell, found: list[PostMortem]) -> None:
    on_gpu.run("1 / 0")
    on_gpu.run("%memoom off")
    on_gpu.run(TOO_LARGE)
    assert found == []


def test_profiled_cell_shows_one_post_mortem(shell: Shell, found: list[PostMortem]) -> None:
    shell.run("%memoom on")
    shell.run(f"%%memprofile --gpu 256MiB -o tape\n{TOO_LARGE}")
    (post_mortem,) = found
    assert post_mortem.request is not None
    assert post_mortem.request.size == 300 * MIB
    assert isinstance(shell["tape"], memexplore.Tape)


def test_profiled_statement_shows_one_post_mortem(on_gpu: Shell, found: list[PostMortem]) -> None:
    on_gpu.run(f"%memprofile {TOO_LARGE}")
    assert len(found) == 1


def test_cell_after_an_earlier_one_knows_its_tensors(on_gpu: Shell, found: list[PostMortem]) -> None:
    on_gpu.run("model = torch.nn.Linear(4096, 4096, bias=False).cuda()").raise_error()
    on_gpu.run(TOO_LARGE)
    # 4096 × 4096 × 4 bytes
    assert dict(found[0].by_category)["parameter"] == 64 * MIB


def test_cell_that_turns_the_gpu_on_itself_is_shown_as_far_as_it_is_known(
    shell: Shell, found: list[PostMortem]
) -> None:
    shell.run("%memoom on")
    shell.run(
        "%memgpu 256MiB\nmodel = torch.nn.Linear(4096, 4096, bias=False).cuda()\n" + TOO_LARGE,
    )
    (post_mortem,) = found
    assert post_mortem.request is not None
    assert post_mortem.request.size == 300 * MIB
    assert dict(post_mortem.by_category) == {"parameter": 64 * MIB}
    assert any("not recorded" in note for note in post_mortem.tape.meta.notes)


def test_output_of_the_notebook_is_named(on_gpu: Shell, found: list[PostMortem]) -> None:
    on_gpu.run('torch.empty(150 << 20, dtype=torch.uint8, device="cuda")')
    on_gpu.run('x = torch.empty(200 << 20, dtype=torch.uint8, device="cuda")')
    assert found[0].cause is Cause.HELD
    assert "Out[" in found[0].sentences[-1]
    assert found[0].suggestions[0].code == "%memoom free --out"
    on_gpu.run("%memoom free --out").raise_error()
    assert on_gpu.text.startswith(f"Freed {150 * MIB:,} bytes")
    on_gpu.run('x = torch.empty(200 << 20, dtype=torch.uint8, device="cuda")').raise_error()


def test_frames_of_an_earlier_error_are_named(on_gpu: Shell, found: list[PostMortem]) -> None:
    on_gpu.run(HELD_BY_FRAME)
    on_gpu.run('x = torch.empty(200 << 20, dtype=torch.uint8, device="cuda")')
    assert found[1].cause is Cause.HELD
    assert "an earlier error" in found[1].sentences[-1]
    assert found[1].suggestions[0].code == "%memoom free"


def test_free_gives_back_to_the_byte(on_gpu: Shell) -> None:
    on_gpu.run('mine = torch.empty(10 << 20, dtype=torch.uint8, device="cuda")').raise_error()
    before = torch.cuda.memory_allocated()
    on_gpu.run(HELD_BY_FRAME)
    assert torch.cuda.memory_allocated() == before + 100 * MIB
    on_gpu.run("%memoom free").raise_error()
    assert on_gpu.text.startswith(f"Freed {100 * MIB:,} bytes (100 MiB)")
    assert torch.cuda.memory_allocated() == before == 10 * MIB
    assert torch.cuda.memory_reserved() == 10 * MIB
    assert on_gpu["mine"].numel() == 10 * MIB


def test_the_debugger_sees_the_failed_frames_until_they_are_freed(
    on_gpu: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu.run(HELD_BY_FRAME)
    monkeypatch.setattr(sys, "stdin", io.StringIO("kept.numel() // 2**20\nquit\n"))
    on_gpu.run("%debug").raise_error()
    assert "100" in on_gpu.text.split()
    on_gpu.run("%memoom free").raise_error()
    assert torch.cuda.memory_allocated() == 0


def test_free_after_a_failed_backward_pass_gives_back_everything(on_gpu: Shell) -> None:
    on_gpu.run("model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()").raise_error()
    before = torch.cuda.memory_allocated()
    result = on_gpu.run(
        'def step():\n    loss = model(torch.randn(5000, 1024, device="cuda")).sum()\n    loss.backward()\nstep()'
    )
    assert isinstance(result.error_in_exec, torch.OutOfMemoryError)
    on_gpu.run("model.zero_grad()\n%memoom free").raise_error()
    # To the byte, with the workspaces of cuBLAS: 8 519 680 bytes in the forward and in the backward pass.
    assert torch.cuda.memory_allocated() == before


def test_post_mortem_keeps_no_memory(on_gpu: Shell, found: list[PostMortem]) -> None:
    on_gpu.run(HELD_BY_FRAME)
    on_gpu.run("%memoom free")
    assert len(found) == 1
    assert torch.cuda.memory_allocated() == 0


def test_last_post_mortem_is_saved(on_gpu: Shell, found: list[PostMortem], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no post-mortem"):
        on_gpu.run(f"%memoom save {tmp_path / 'page.html'}").raise_error()
    on_gpu.run(HELD_BY_FRAME)
    for name in ("page.html", "tape.tape", "snapshot.pickle"):
        on_gpu.run(f"%memoom save {tmp_path / name}").raise_error()
    assert "Post-mortem" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert memexplore.Tape.load(tmp_path / "tape.tape").equals(found[0].tape)
    assert memexplore.load(tmp_path / "snapshot.pickle")[0].peak()[0] == found[0].tape.peak()[0]
    with pytest.raises(UsageError, match="ending"):
        on_gpu.run("%memoom save page.pdf").raise_error()


def test_unknown_command_says_what_there_is(shell: Shell) -> None:
    with pytest.raises(UsageError, match="%memoom on"):
        shell.run("%memoom maybe").raise_error()


STEP = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)])
    def forward(self, x):
        return self.layers(x).square().mean()
model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(batch):
    loss = model(torch.randn(batch, 1024, device="cuda"))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("batch", [4500, 8000], ids=["backward", "forward"])
def test_what_would_have_fitted_fits(on_gpu: Shell, found: list[Any], batch: int) -> None:
    on_gpu.run(STEP).raise_error()
    on_gpu.run(f"step({batch})")
    assert found[-1].request.phase == ("backward" if batch == 4500 else "forward")
    on_gpu.run("%memoom advise").raise_error()
    what = found[-1]
    assert what.failed == ""
    assert what.options
    # The largest batch that fits as the step stands is run: it fits, and one that is a quarter larger does not.
    assert 0 < what.largest_batch < batch
    # The gradients that the failed backward pass has made are the user's.
    on_gpu.run("optimizer.zero_grad()\n%memoom free").raise_error()
    on_gpu.run(f"step({what.largest_batch})").raise_error()
    assert isinstance(on_gpu.run(f"step({what.largest_batch * 5 // 4})").error_in_exec, torch.OutOfMemoryError)


BLOCKS = STEP.replace(
    "*[torch.nn.Linear(1024, 1024) for _ in range(8)]",
    "*[torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.GELU()) for _ in range(8)]",
)


def test_a_setting_is_applied_to_the_model_and_undone(on_gpu: Shell, found: list[Any]) -> None:
    on_gpu.run(BLOCKS).raise_error()
    model = on_gpu["model"]
    # 8 blocks keep 2 * 3000 * 1024 * 4 bytes each: 188 MiB, with 32 MiB of weights and 32 MiB of gradients.
    on_gpu.run("step(3000)")
    on_gpu.run("%memoom advise").raise_error()
    number = [option.knobs for option in found[-1].options].index(memexplore.Knobs(checkpoint="every 1")) + 1
    on_gpu.run(f"%memoom apply {number}").raise_error()
    assert on_gpu.text.startswith("Applied to the model: Checkpointing 8 of 8 blocks")
    on_gpu.run("step(3000)").raise_error()
    on_gpu.run("%memoom undo").raise_error()
    assert on_gpu.text == "The model is as it was.\n"
    assert not any("forward" in vars(module) for module in model.modules())
    assert isinstance(on_gpu.run("step(3000)").error_in_exec, torch.OutOfMemoryError)


IN_CELL = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(3000, 1024, device="cuda")
    loss = model(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("magic", ["", "%%memprofile\n"])
def test_the_failed_cell_is_put_into_the_next_one_changed_so_that_it_runs(on_gpu: Shell, magic: str) -> None:
    on_gpu.run(BLOCKS).raise_error()
    assert isinstance(on_gpu.run(f"{magic}{IN_CELL}").error_in_exec, torch.OutOfMemoryError)
    on_gpu.run("%memoom cell").raise_error()
    cell = on_gpu.shell.rl_next_input
    assert cell.startswith(f"{magic}%memoom free\n")
    # A copy of the cell, with lines of the setting.
    assert all(line in cell for line in IN_CELL.strip().splitlines())
    assert "\n+ " in on_gpu.text
    on_gpu.run(cell).raise_error()


def test_a_cell_without_a_loop_is_not_changed(on_gpu: Shell) -> None:
    on_gpu.run(BLOCKS).raise_error()
    on_gpu.run("step(3000)")
    on_gpu.run("%memoom cell").raise_error()
    assert on_gpu.text.startswith("None of the settings that fit can be written into this cell")


def test_lines_that_only_the_code_can_have_are_put_into_the_next_cell(on_gpu: Shell, found: list[Any]) -> None:
    on_gpu.run(BLOCKS).raise_error()
    on_gpu.run(IN_CELL)
    on_gpu.run("%memoom advise").raise_error()
    settings = [option.knobs.changed().keys() for option in found[-1].options]
    number = settings.index({"accumulation"}) + 1
    on_gpu.run(f"%memoom apply {number}").raise_error()
    assert on_gpu.text.startswith("Only the code can have accumulation ")
    assert on_gpu.shell.rl_next_input == found[-1].options[number - 1].code
    on_gpu.run("%memoom undo").raise_error()
    assert on_gpu.text == "No setting is applied.\n"


def test_a_model_that_the_failed_cell_makes_is_not_changed(on_gpu: Shell, found: list[Any]) -> None:
    on_gpu.run(BLOCKS + "step(3000)")
    on_gpu.run("%memoom advise").raise_error()
    number = [option.knobs for option in found[-1].options].index(memexplore.Knobs(checkpoint="every 1")) + 1
    on_gpu.run(f"%memoom apply {number}").raise_error()
    assert on_gpu.text.startswith("The failed cell makes the model itself")
    assert on_gpu.shell.rl_next_input == found[-1].options[number - 1].code


def test_a_model_that_is_called_with_keywords_gets_settings(on_gpu: Shell, found: list[Any]) -> None:
    on_gpu.run(STEP.replace("self, x)", "self, *, x)").replace("model(torch", "model(x=torch")).raise_error()
    on_gpu.run("step(4500)")
    assert found[-1].request.phase == "backward"
    on_gpu.run("%memoom advise").raise_error()
    assert (found[-1].failed, found[-1].fits) == ("", False)
    assert "checkpoint" in {name for option in found[-1].options for name in option.knobs.changed()}


CLASSIFIER = """
from torch import nn
from torch.nn import functional as F
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4096)).cuda()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
LOOP = """
x, y = torch.randn(4096, 64, device="cuda"), torch.randint(0, 4096, (4096,), device="cuda")
for _ in range(2):
    optimizer.zero_grad()
    out = model(x)
    loss = criterion(out, y)
    loss.backward()
    optimizer.step()
"""
FUNCTIONAL = LOOP.replace("criterion(", "F.cross_entropy(")
WATCHED = "import memexplore as mx\nwith mx.watch(model, optimizer):"


@pytest.mark.parametrize("loop", [LOOP, FUNCTIONAL], ids=["module", "function"])
@pytest.mark.parametrize("form", ["profiled", "cell", "watched"])
def test_the_predicted_peak_has_the_loss_of_the_cell(
    shell: Shell, found: list[Any], monkeypatch: pytest.MonkeyPatch, loop: str, form: str
) -> None:
    shell.run("%memoom on").raise_error()
    if form == "profiled":
        cell = f"%%memprofile --gpu 256MiB\n{CLASSIFIER}{loop}"
    else:
        shell.run("%memgpu 256MiB").raise_error()
        shell.run(CLASSIFIER).raise_error()
        cell = WATCHED + loop.replace("\n", "\n    ") if form == "watched" else loop
        monkeypatch.setattr(ipython_shell, "is_notebook", lambda: form == "watched")
        monkeypatch.setattr(live_page, "display", lambda *values, **options: DisplayHandle())
    assert isinstance(shell.run(cell).error_in_exec, torch.OutOfMemoryError)
    shell.run("%memgpu off").raise_error()
    step = memoom.of_shell(shell.shell).failed
    assert isinstance(step, FailedProgram)
    assert [text.partition(" was run again")[0] for text in step.assumed] == ["The cell"]
    predicted = run(pickle.loads(step.packed), machine=machine_of("80GiB"))
    # The logits, 64 MiB, are held by `out`, and cross entropy keeps as much; their gradients are as large.
    with memexplore.virtual("80GiB"):
        exec(CLASSIFIER + loop, {"torch": torch})
        assert curves.peak(predicted.tape)[0] == torch.cuda.max_memory_allocated()


def test_an_evaluation_gets_no_setting_for_training(on_gpu: Shell, found: list[Any]) -> None:
    on_gpu.run(STEP).raise_error()
    on_gpu.run("step(100)").raise_error()
    on_gpu.run(
        'with torch.no_grad():\n    outputs = [model.layers(torch.randn(9000, 1024, device="cuda")) for _ in range(9)]'
    )
    assert found[-1].request.phase == "forward"
    on_gpu.run("%memoom advise").raise_error()
    assert [{*option.knobs.changed()} for option in found[-1].options] == [{"gpu"}]
    assert found[-1].largest_batch is None


def test_a_cell_that_fits_without_what_is_held_is_freed_and_not_changed(on_gpu: Shell, found: list[Any]) -> None:
    on_gpu.run(STEP).raise_error()
    on_gpu.run('held = torch.empty(150 << 20, dtype=torch.uint8, device="cuda")').raise_error()
    on_gpu.run("step(2000)")
    on_gpu.run("%memoom advise").raise_error()
    # By itself the cell has room, so no setting is shown: what was held is what it lacked.
    margin = size_text(found[-1].advice.as_written.margin)
    assert found[-1].text.startswith(f"As written it fits by {margin}, run by itself: it needs ")
    assert "What the failed cell's process held besides" in found[-1].text
    assert "\n" not in found[-1].text
    on_gpu.run("%memoom cell").raise_error()
    assert on_gpu.text == f"{found[-1].text}\n"
    on_gpu.run("%memoom apply 1").raise_error()
    assert on_gpu.text.startswith("The cell fits as it stands, without what the failed one holds.")


def test_a_step_with_an_applied_setting_asks_for_undo(on_gpu: Shell, found: list[Any]) -> None:
    on_gpu.run(BLOCKS).raise_error()
    on_gpu.run("step(3000)")
    on_gpu.run("%memoom advise").raise_error()
    settings = [option.knobs.changed().keys() for option in found[-1].options]
    on_gpu.run(f"%memoom apply {settings.index({'checkpoint'}) + 1}").raise_error()
    on_gpu.run("step(20000)")
    on_gpu.run("%memoom advise").raise_error()
    assert found[-1].failed.endswith("run %memoom undo, then the cell again.")
    on_gpu.run("%memoom undo").raise_error()


def test_a_lazy_object_of_the_notebook_is_not_asked_for_its_attributes(on_gpu: Shell, found: list[Any]) -> None:
    on_gpu.run("import weakref\nclass Some: pass\nlazy = weakref.proxy(Some())").raise_error()
    on_gpu.run(STEP).raise_error()
    assert on_gpu.text == ""
    on_gpu.run("step(8000)")
    assert found[0].request.phase == "forward"


def test_a_packed_sequence_goes_into_its_model(on_gpu: Shell) -> None:
    on_gpu.run(
        "model = torch.nn.LSTM(2, 2).cuda()\n"
        "x = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)]).to('cuda')\n"
        "model(x)"
    ).raise_error()


def test_a_setting_that_was_not_found_is_not_applied(on_gpu: Shell) -> None:
    on_gpu.run(BLOCKS).raise_error()
    on_gpu.run("step(3000)")
    with pytest.raises(UsageError, match="run %memoom advise first"):
        on_gpu.run("%memoom apply 1").raise_error()


def test_globals_of_a_running_function_are_not_held_by_mistake(on_gpu: Shell, found: list[Any]) -> None:
    on_gpu.run(STEP.replace("SGD(model.parameters(), lr=0.1)", "Adam(model.parameters())")).raise_error()
    on_gpu.run("step(100)").raise_error()
    on_gpu.run("step(8000)")
    assert found[0].request.phase == "forward"
    # Adam's state, 2 × 8 × (1024 × 1024 + 1024) × 4 bytes, is needed at the end of the step.
    assert dict(found[0].by_category)["optimizer state"] >= 2 * 8 * (1024 * 1024 + 1024) * 4
    assert found[0].held == ()


def test_advice_without_a_model_is_another_gpu(on_gpu: Shell, found: list[Any]) -> None:
    with pytest.raises(UsageError, match="Nothing has run out"):
        on_gpu.run("%memoom advise").raise_error()
    on_gpu.run(TOO_LARGE)
    on_gpu.run("%memoom advise").raise_error()
    assert [{*option.knobs.changed()} for option in found[-1].options] == [{"gpu"}]
    on_gpu.run("%memoom apply 1").raise_error()
    assert on_gpu.text.startswith("No model of the failed step is known that still exists")


def test_watched_run_shows_a_post_mortem(shell: Shell, found: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipython_shell, "is_notebook", lambda: True)
    monkeypatch.setattr(live_page, "display", lambda *values, **options: DisplayHandle())
    shell.run("%memgpu 256MiB").raise_error()
    shell.run(STEP).raise_error()
    result = shell.run("import memexplore as mx\nwith mx.watch(model, optimizer):\n    step(100)\n    step(8000)")
    assert isinstance(result.error_in_exec, torch.OutOfMemoryError)
    (post_mortem,) = found
    assert post_mortem.request.step == 2
    assert post_mortem.request.phase == "forward"


@pytest.mark.parametrize("silent", [False, True])
def test_the_traceback_stands_below_the_answer_and_is_never_lost(
    on_gpu: Shell, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    monkeypatch.setattr(ipython_shell, "is_notebook", lambda: True)
    monkeypatch.setattr(memoom, "display", lambda value: print("ANSWER"))
    on_gpu.shell.events.register("post_run_cell", lambda result: print("OTHER"))
    with capture_output() as captured:
        on_gpu.shell.run_cell(TOO_LARGE, silent=silent)
    words = re.findall("ANSWER|OTHER|Traceback", captured.stdout)
    # The end of a silent cell is announced to nobody.
    assert words == (["Traceback"] if silent else ["ANSWER", "OTHER", "Traceback"])
