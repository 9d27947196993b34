"""The explorer without a browser: widgets to knobs, knobs to a run, a run to the view."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memexplore import targets
from memexplore.analysis import curves
from memexplore.knobs.knobs import Checkpoint, Knobs
from memexplore.notebook import controls, tabs
from memexplore.notebook.controls import Control
from memexplore.notebook.explore import explore, explore_cell
from memexplore.notebook.explorer import Explorer
from memexplore.notebook.main_thread import MainThread
from memexplore.search.advise import advise
from memexplore.search.progress import Progress
from memexplore.steps.cell import Cell
from memexplore.steps.step import Step
from memexplore.steps.trial import run
from memexplore.tape import Source

BATCH = 64


def step(batch: int = BATCH) -> Step:
    block = [layer for _ in range(2) for layer in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(*(nn.Sequential(*block) for _ in range(2)), nn.Linear(64, 10))
    inputs = torch.zeros(batch, 64), torch.zeros(batch, dtype=torch.long)
    return Step(model, inputs, loss=nn.functional.cross_entropy, optimizer=torch.optim.SGD)


@pytest.fixture
def shown() -> Explorer:
    return explore(step())


def control(shown: Explorer, field: str, number: int = 0) -> Control:
    return [one for one in shown._controls if one.field == field][number]


def turn(shown: Explorer, field: str, value: Any, number: int = 0) -> None:
    """Do what the browser does when a person moves a knob."""
    widget = control(shown, field, number).widget
    if hasattr(widget, "index"):
        values = [getattr(worth, "value", worth) for _, worth in widget.options]
        widget.set_state({"index": values.index(value)})
    else:
        widget.set_state({"value": value})


def headline(shown: Explorer) -> str:
    return html.unescape(re.sub(r"<[^>]*>", " ", shown._headline.value)).strip()


def test_begins_as_written(shown: Explorer) -> None:
    assert shown.knobs == shown.trial.knobs == Knobs()
    assert shown.view.tape is shown.trial.tape
    assert headline(shown).startswith("As written: peak ")
    assert shown.history == (Knobs(),)


@pytest.mark.parametrize(
    ("field", "value", "knobs"),
    [
        ("precision", "bf16", Knobs(precision="bf16")),
        ("inplace", "on", Knobs(inplace="on")),
        ("checkpoint", "every 1", Knobs(checkpoint="every 1")),
        ("memory_format", True, Knobs(memory_format="channels last")),
        ("offload", True, Knobs(offload="saved tensors on the CPU")),
        ("mode", True, Knobs(mode="inference")),
        ("batch", 32, Knobs(batch=32)),
        ("accumulation", 16, Knobs(accumulation=16)),
        ("optimizer", "Adam", Knobs(optimizer="Adam")),
        ("update", "per tensor", Knobs(update="per tensor")),
        ("zero_grad", "set to zero", Knobs(zero_grad="set to zero")),
        ("frozen", "0", Knobs(frozen="0")),
        ("gpu", "A100 40GB", Knobs(gpu="A100 40GB")),
        ("settings", True, Knobs(settings="expandable_segments:True")),
    ],
)
def test_each_knob_is_turned_and_drawn(shown: Explorer, field: str, value: Any, knobs: Knobs) -> None:
    turn(shown, field, value)
    assert shown.knobs == shown.trial.knobs == knobs
    # What is drawn is what a run of that setting gives.
    assert shown.view.tape.replace(stacks=()).equals(run(step(), knobs).tape.replace(stacks=()))


def test_sentence_and_outline_compare_with_the_setting_before(shown: Explorer) -> None:
    first = shown.view.tape
    turn(shown, "batch", 32)
    assert shown.view.before is first
    assert headline(shown).startswith("Batch of 32: peak ")
    second = shown.view.tape
    turn(shown, "batch", 16)
    assert shown.view.before is second


def test_accumulation_offers_the_divisors_of_the_batch(shown: Explorer) -> None:
    shown.knobs = Knobs(batch=12)
    assert [value for _, value in control(shown, "accumulation").widget.options] == [1, 2, 3, 4, 6, 12]


def test_batch_takes_accumulation_to_a_divisor(shown: Explorer) -> None:
    shown.knobs = Knobs(batch=12, accumulation=6)
    turn(shown, "batch", 32)
    # 4 is the largest divisor of 32 up to 6
    assert shown.knobs == Knobs(batch=32, accumulation=4)
    assert control(shown, "accumulation").widget.value == 4


def test_knobs_set_from_code_move_the_widgets(shown: Explorer) -> None:
    shown.knobs = Knobs(batch=24, checkpoint="layers 0 1", settings="max_split_size_mb:64", frozen=["1"])
    assert control(shown, "batch").widget.value == 24
    assert control(shown, "checkpoint").widget.value == "layers"
    assert control(shown, "checkpoint", 1).widget.value == "0 1"
    assert control(shown, "settings", 1).widget.value == "64"
    assert control(shown, "frozen").widget.value == "1"
    assert shown.trial.knobs == shown.knobs


def test_settings_of_the_allocator_are_put_together(shown: Explorer) -> None:
    turn(shown, "settings", True)
    turn(shown, "settings", "64", 1)
    assert shown.knobs.settings == "expandable_segments:True,max_split_size_mb:64"
    turn(shown, "settings", False)
    assert shown.knobs.settings == "max_split_size_mb:64"


def test_setting_seen_before_is_not_run_again(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Knobs] = []
    original = shown._run_step
    monkeypatch.setattr(shown, "_run_step", lambda knobs: (ran.append(knobs), original(knobs))[1])
    for batch in (32, 16, 32, 64):
        turn(shown, "batch", batch)
    assert ran == [Knobs(batch=32), Knobs(batch=16)]
    assert shown.history == (Knobs(), Knobs(batch=32), Knobs(batch=16))


def test_failing_setting_keeps_the_last_picture_and_tells_why(shown: Explorer) -> None:
    turn(shown, "batch", 32)
    good = shown.trial
    turn(shown, "frozen", "nowhere")
    assert "nowhere" in headline(shown)
    assert "The chart still shows the previous setting" in headline(shown)
    assert shown.trial is good
    assert shown.view.tape is good.tape
    turn(shown, "frozen", "")
    assert headline(shown).startswith("Batch of 32: peak ")


def test_failing_setting_from_code_is_raised(shown: Explorer) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        shown.knobs = Knobs(frozen="nowhere")
    with pytest.raises(TypeError, match=r"mx.Knobs"):
        shown.knobs = {"batch": 3}  # type: ignore[assignment]


def test_chosen_layers_need_a_layer(shown: Explorer) -> None:
    turn(shown, "checkpoint", "layers")
    assert "click a layer" in headline(shown)
    assert shown.knobs == Knobs()
    assert control(shown, "checkpoint").widget.value == "as written"


@pytest.mark.parametrize(
    ("field", "knobs"),
    [("checkpoint", Knobs(checkpoint="layers 1")), ("frozen", Knobs(frozen="1")), ("lora", Knobs(lora="1"))],
)
def test_selected_layer_is_taken_and_given_back(shown: Explorer, field: str, knobs: Knobs) -> None:
    assert shown._layer_buttons[field].disabled
    shown.view.selection = "1"
    assert not shown._layer_buttons[field].disabled
    shown._layer_buttons[field].click()
    assert shown.trial.knobs == knobs
    shown._layer_buttons[field].click()
    assert shown.trial.knobs == Knobs()


def test_whole_model_is_no_layer_to_choose(shown: Explorer) -> None:
    shown.view.selection = "Sequential"
    assert shown._layer_buttons["frozen"].disabled


def test_selection_that_the_new_tape_lacks_is_dropped_and_zoom_stays(shown: Explorer) -> None:
    shown.view.selection = "1"
    shown.view._handle_custom_msg({"type": "timeline", "window": [10, 20], "number": 1}, [])
    turn(shown, "batch", 32)
    assert shown.view.selection == "1"
    # the tape has the same events: the same rows
    assert shown.view._screen.window == pytest.approx((10, 20))


def test_history_leads_back(shown: Explorer) -> None:
    turn(shown, "batch", 32)
    turn(shown, "precision", "bf16")
    shown.view._handle_custom_msg({"type": "tab click", "tab": tabs.HISTORY, "row": 1}, [])
    assert shown.trial.knobs == Knobs(batch=32)
    assert control(shown, "precision").widget.value.value == "as written"
    rows = shown.view._tabs[tabs.HISTORY]["rows"]
    assert [row["cells"][0] for row in rows] == ["as written", "batch 32", "precision bf16, batch 32"]
    assert [row["current"] for row in rows] == [False, True, False]


def test_code_and_trade_offs_are_those_of_the_setting(shown: Explorer) -> None:
    assert "The step runs as written" in shown.view._tabs[tabs.CODE]["text"]
    turn(shown, "precision", "bf16")
    assert "torch.autocast" in shown.view._tabs[tabs.CODE]["text"]
    figure = shown.view._tabs[tabs.TRADE_OFFS]["figure"]
    points = next(trace for trace in figure["data"] if trace["name"] == "fits")
    assert list(points["y"]) == [
        curves.peak(shown._results[knobs].trial.tape, "reserved")[0] for knobs in shown.history
    ]


def test_what_was_left_out_is_listed_with_its_reason(shown: Explorer) -> None:
    # A residual: the old value is added, so the second activation must not overwrite it.
    class Residual(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.nn.functional.relu(x)

    explorer = explore(Step(nn.Sequential(nn.Linear(8, 8), Residual()), torch.zeros(4, 8), loss=torch.mean))
    explorer.knobs = Knobs(inplace="on")
    (left,) = explorer.trial.applied.skipped
    assert "relu" in left.site
    assert html.escape(left.reason) in explorer._hints.value


def test_the_models_own_input_size_is_greyed_where_there_is_none(shown: Explorer) -> None:
    assert control(shown, "input_size").widget.disabled
    images = Step(nn.Conv2d(3, 8, 3), torch.zeros(4, 3, 16, 16), loss=torch.mean)
    with_size = explore(images)
    turn(with_size, "input_size", 32)
    assert with_size.trial.knobs == Knobs(input_size=32)


def test_wrong_arguments_are_errors() -> None:
    with pytest.raises(TypeError, match="Step"):
        explore(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no GPU"):
        explore(step(), gpu="T44")


def test_model_is_as_it_was() -> None:
    one = step()
    model = one.model
    assert isinstance(model, nn.Module)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    shown = explore(one)
    turn(shown, "mode", True)
    turn(shown, "lora", "0.0")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training


def test_static_picture_has_the_sentence(shown: Explorer) -> None:
    turn(shown, "batch", 32)
    still = shown.view.static_output(shown._sentence())
    assert headline(shown) in still["text/plain"]
    assert "Batch of 32" in still["text/html"]
    assert "<img" in still["text/html"]


# -- a kernel's main thread


class Loop:
    """A main thread that runs when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], Any]] = []
        self.later: list[tuple[float, Callable[[], Any]]] = []

    def add_callback(self, action: Callable[[], Any]) -> None:
        self.waiting.append(action)

    def call_later(self, seconds: float, action: Callable[[], Any]) -> None:
        self.later.append((seconds, action))

    def run(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()

    def pass_time(self, seconds: float) -> None:
        """Let some seconds go by, from when everything was asked for."""
        self.run()
        due = [action for after, action in self.later if after <= seconds]
        self.later = [(after, action) for after, action in self.later if after > seconds]
        for action in due:
            action()
        self.run()


def test_slider_drawn_quickly_runs_the_last_value_only(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    monkeypatch.setattr(shown._thread, "_loop", loop)
    for batch in (1, 2, 4, 8):
        turn(shown, "batch", batch)
    assert shown.knobs == Knobs(batch=8)
    assert shown.trial.knobs == Knobs()
    loop.run()
    assert shown.trial.knobs == Knobs(batch=8)
    assert shown.history == (Knobs(), Knobs(batch=8))


def test_chores_of_a_setting_that_is_passed_are_dropped(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, told = Loop(), []
    monkeypatch.setattr(shown._thread, "_loop", loop)
    monkeypatch.setattr(shown.view, "send_details", lambda: told.append(shown.trial.knobs.batch))
    turn(shown, "batch", 1)
    loop.waiting.pop(0)()  # draws, and leaves the chores for later
    turn(shown, "batch", 2)
    loop.pass_time(2)
    assert told == [2]


def test_chores_wait_for_the_browser_and_no_longer_than_a_second(
    shown: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, told = Loop(), []
    monkeypatch.setattr(shown._thread, "_loop", loop)
    monkeypatch.setattr(shown.view, "send_details", lambda: told.append(shown.trial.knobs.batch))
    turn(shown, "batch", 1)
    loop.pass_time(0.9)
    assert told == []
    shown.view._handle_custom_msg({"type": "drawn", "tape": shown.view._screen.tape_number}, [])
    loop.pass_time(0.1)
    assert told == [1]
    # a browser that is not there says nothing
    turn(shown, "batch", 2)
    loop.pass_time(1)
    assert told == [1, 2]


def test_neighbours_are_prefetchd_and_stop_when_something_comes(
    shown: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn(shown, "batch", 32)
    monkeypatch.setattr(MainThread, "has_pending_events", lambda _: False)
    shown._prefetch(shown._shown)
    assert Knobs(batch=16) in shown._results
    assert shown.history == (Knobs(), Knobs(batch=32))
    turn(shown, "batch", 16)
    # idle at first, and then, amid the run, somebody comes
    answers = iter([False, False, False, *[True] * 1000])
    monkeypatch.setattr(MainThread, "has_pending_events", lambda _: next(answers))
    shown._prefetch(shown._shown)
    assert Knobs(batch=8) not in shown._results
    turn(shown, "batch", 8)
    assert shown.trial.knobs == Knobs(batch=8)


# -- on a real device


@pytest.fixture
def real() -> Explorer:
    return explore(step(), gpu="cpu")


def test_real_device_is_the_first_of_the_list_and_named_in_the_sentence(real: Explorer) -> None:
    options = control(real, "gpu").widget.options
    assert options[0] == ("this machine's CPU", "cpu")
    assert headline(real).startswith("As written: peak ")
    assert "· measured on this machine's CPU, " in headline(real)
    assert real.trial.tape.meta.source is Source.MEASURED


def test_real_device_measures_every_knob_and_predicts_another_gpu(real: Explorer) -> None:
    turn(real, "batch", 32)
    assert headline(real).startswith("Batch of 32: peak ")
    assert "measured on this machine's CPU" in headline(real)
    turn(real, "gpu", "T4")
    assert headline(real).endswith("fits a T4 · predicted")
    assert real.trial.tape.meta.gpu == "T4"
    turn(real, "gpu", "cpu")
    assert real.trial.knobs == Knobs(batch=32)
    assert "measured on this machine's CPU" in headline(real)


def test_knobs_that_a_cpu_does_not_have_are_greyed_with_the_reason(real: Explorer) -> None:
    for number in range(4):
        widget = control(real, "settings", number).widget
        assert (widget.disabled, widget.tooltip) == (True, "a CPU has no caching allocator")
    assert real._advise_button.disabled
    assert "gpu= the name of a GPU" in real._advise_button.tooltip


def test_nothing_is_run_ahead_on_a_real_device(real: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    turn(real, "batch", 32)
    monkeypatch.setattr(MainThread, "has_pending_events", lambda _: False)
    monkeypatch.setattr(real, "_run_step", lambda knobs: pytest.fail(f"{knobs} was run"))
    real._prefetch(real._shown)


def test_tabs_of_a_real_device_tell_time_and_memory(real: Explorer) -> None:
    turn(real, "batch", 32)
    figure = real.view._tabs[tabs.TRADE_OFFS]["figure"]
    points = next(trace for trace in figure["data"] if trace["name"] == "fits")
    assert list(points["y"]) == [curves.peak(real._results[knobs].trial.tape, "reserved")[0] for knobs in real.history]
    assert figure["layout"]["yaxis"]["title"]["text"] == "peak reserved, measured"
    assert [row["cells"][0] for row in real.view._tabs[tabs.HISTORY]["rows"]] == ["as written", "batch 32"]


def test_failing_setting_on_a_real_device_keeps_the_last_picture(real: Explorer) -> None:
    good = real.trial
    turn(real, "frozen", "nowhere")
    assert "nowhere" in headline(real)
    assert real.trial is good


def test_without_a_place_the_gpu_is_the_real_one_or_a_t4(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(targets, "default_target", lambda: asked.append(1) or "A100 40GB")
    assert explore(step()).trial.tape.meta.gpu == "A100 40GB"
    assert asked == [1]


# -- advice


def test_advice_is_a_tab_whose_settings_can_be_taken(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "_search", lambda knobs, told: advise(step(), budget=6, progress=told))
    shown._advise_button.click()
    rows = shown.view._tabs[tabs.ADVICE]["rows"]
    assert rows
    assert shown._advise_button.description == "What would fit?"
    shown.view._handle_custom_msg({"type": "tab click", "tab": tabs.ADVICE, "row": len(rows) - 1}, [])
    assert str(shown.trial.knobs) == rows[-1]["cells"][0]


def test_turned_knob_ends_the_search(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    def search(knobs: Knobs, told: Callable[[Any], object]) -> Any:
        shown._is_requested = True
        told(Progress(1, 0, 10, 1.0, None))
        raise AssertionError("the search went on")

    monkeypatch.setattr(shown, "_search", search)
    shown._advise()
    assert tabs.ADVICE not in shown.view._tabs


# -- a cell

CODE = """batch = 128
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).cuda()
print("running")
model(torch.ones(batch, 64, device="cuda")).sum().backward()"""


@pytest.fixture
def of_cell() -> Explorer:
    cell = Cell(CODE, {"torch": torch})
    return explore_cell(cell, cell.run(), {"batch": [64, 128, 256]})


def test_slider_of_a_cell_changes_its_variable(of_cell: Explorer, capsys: pytest.CaptureFixture[str]) -> None:
    turn(of_cell, "variables", 256)
    assert of_cell.trial.knobs == Knobs(variables={"batch": 256})
    assert headline(of_cell).startswith("Batch = 256: peak ")
    turn(of_cell, "variables", 128)
    assert of_cell.trial.knobs == Knobs()
    assert capsys.readouterr().out == ""


def test_knobs_that_a_cell_cannot_have_are_greyed_with_the_reason(of_cell: Explorer) -> None:
    for field in ("batch", "optimizer", "lora"):
        widget = control(of_cell, field).widget
        assert widget.disabled
        assert widget.tooltip == Cell(CODE, {}).unavailable_knobs()[field]
    assert of_cell._advise_button.disabled
    assert not control(of_cell, "precision").widget.disabled


def test_cell_is_explored_on_the_cpu() -> None:
    code = CODE.replace(".cuda()", "").replace(', device="cuda"', "")
    cell = Cell(code, {"torch": torch})
    explorer = explore_cell(cell, cell.run(gpu="cpu"), {"batch": [64, 128, 256]}, "cpu")
    turn(explorer, "variables", 256)
    assert headline(explorer).startswith("Batch = 256: peak ")
    assert headline(explorer).endswith("· measured on this machine's CPU")


def test_slider_of_a_variable_that_is_not_assigned_is_an_error() -> None:
    cell = Cell(CODE, {"torch": torch})
    with pytest.raises(ValueError, match="assigns no variable 'size'; it assigns batch, model"):
        explore_cell(cell, cell.run(), {"size": [1]})


def test_checkpoint_value_is_one(shown: Explorer) -> None:
    shown.knobs = Knobs(checkpoint=Checkpoint.parse("every 7"))
    assert control(shown, "checkpoint").widget.value == "every 7"


@pytest.mark.parametrize(
    ("own", "least", "most"),
    # a 64th, and 64 times as much where that is not more than 1 024, else 16 times
    [(1, 1, 64), (8, 1, 512), (64, 1, 1024), (4096, 64, 65_536)],
)
def test_batches_reach_as_far_up_as_a_small_batch_is_likely_to_go(own: int, least: int, most: int) -> None:
    (batches, *_) = controls.batch_controls(Step(nn.Linear(2, 2), torch.zeros(own, 2), loss=torch.mean))
    values = [value for _, value in batches.widget.options]
    assert (values[0], values[-1]) == (least, most)
    assert own in values
