"""The explorer without a browser: controls to knobs, knobs to a run, a run to the view."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from memexplore.analysis import curves
from memexplore.jupyter import tabs
from memexplore.jupyter.explore import explore
from memexplore.jupyter.explorer import Explorer
from memexplore.run.knobs.checkpoints.setting import Checkpoint
from memexplore.run.knobs.control import Explored
from memexplore.run.knobs.knobs import KNOBS, Knobs
from memexplore.run.programs.step import Step
from memexplore.run.run import run
from memexplore.run.sentences import percent_text
from tests.jupyter.explorer_actions import position, row, send, sentence, step, turn


@pytest.fixture
def shown() -> Explorer:
    return explore(step())


def test_begins_as_written(shown: Explorer) -> None:
    assert shown.knobs == shown.run.knobs == Knobs()
    assert shown.view.tape is shown.run.tape
    assert sentence(shown) == "As written"
    assert shown.history == (Knobs(),)


@pytest.mark.parametrize(
    ("name", "label", "knobs"),
    [
        ("precision", "bf16 autocast", Knobs(precision="bf16")),
        ("inplace", "on", Knobs(inplace="on")),
        ("checkpoint", "every block", Knobs(checkpoint="every 1")),
        ("offload", "saved tensors on the CPU", Knobs(offload="saved tensors on the CPU")),
        ("mode", "inference", Knobs(mode="inference")),
        ("batch", "32", Knobs(batch=32)),
        ("accumulation", "16", Knobs(accumulation=16)),
        ("optimizer", "Adam", Knobs(optimizer="Adam")),
        ("update", "per tensor", Knobs(update="per tensor")),
        ("zero_grad", "to zeros", Knobs(zero_grad="set to zero")),
        ("frozen", "0", Knobs(frozen="0")),
        ("lora", "0", Knobs(lora="0")),
        ("checkpoint layers", "0 1", Knobs(checkpoint="layers 0 1")),
        ("gpu", "A100 40GB · 39.0 GiB", Knobs(gpu="A100 40GB")),
        ("settings expandable_segments", "on", Knobs(settings="expandable_segments:True")),
        ("settings max_split_size_mb", "64 MiB", Knobs(settings="max_split_size_mb:64")),
    ],
)
def test_each_knob_runs_the_step(shown: Explorer, name: str, label: str, knobs: Knobs) -> None:
    turn(shown, name, label)
    assert shown.knobs == shown.run.knobs == knobs
    # The tape drawn equals that of a run of the setting.
    assert shown.view.tape.replace(stacks=()).equals(run(step(), knobs).tape.replace(stacks=()))


def test_sentence_and_outline_compare_with_the_step_as_written(shown: Explorer) -> None:
    first = shown.view.tape
    for batch in ("32", "16"):
        turn(shown, "batch", batch)
        assert shown.view.before is first
        assert sentence(shown).startswith(f"Batch of {batch}: peak ")
    turn(shown, "batch", "64")
    assert shown.view.before is None
    assert sentence(shown) == "As written"


def test_pinned_setting_is_compared_with(shown: Explorer) -> None:
    peaks = {}
    for batch in ("32", "16"):
        turn(shown, "batch", batch)
        peaks[batch] = shown._shown.outcome.peak_allocated
        if batch == "32":
            pinned = shown.view.tape
            send(shown, "pin")
            assert shown.view.before is None
            assert shown.message()["against"]["pinned"] == ""
    assert shown.view.before is pinned
    assert shown.message()["is_pinned"]
    assert shown.message()["against"] == {
        "written": percent_text(peaks["16"] / shown._results[Knobs()].outcome.peak_allocated),
        "pinned": percent_text(peaks["16"] / peaks["32"]),
    }
    send(shown, "unpin")
    assert shown.view.before is shown._results[Knobs()].tape
    assert shown.message()["against"]["pinned"] == ""


def test_accumulation_offers_divisors_of_the_batch(shown: Explorer) -> None:
    shown.knobs = Knobs(batch=12)
    assert row(shown, "accumulation")["options"] == ["1", "2", "3", "4", "6", "12"]


def test_batch_change_reduces_accumulation_to_a_divisor(shown: Explorer) -> None:
    shown.knobs = Knobs(batch=12, accumulation=6)
    turn(shown, "batch", "32")
    # 4 is the largest divisor of 32 up to 6
    assert shown.knobs == Knobs(batch=32, accumulation=4)
    assert position(shown, "accumulation") == "4"


def test_knobs_set_in_code_are_shown(shown: Explorer) -> None:
    shown.knobs = Knobs(batch=24, checkpoint="layers 0 1", settings="max_split_size_mb:64", frozen=["1"])
    assert position(shown, "batch") == "24"
    assert position(shown, "checkpoint") == "chosen layers"
    assert row(shown, "checkpoint layers")["value"] == "0 1"
    assert position(shown, "settings max_split_size_mb") == "64 MiB"
    assert row(shown, "frozen")["value"] == "1"
    assert shown.run.knobs == shown.knobs


def test_allocator_settings_are_combined(shown: Explorer) -> None:
    turn(shown, "settings expandable_segments", "on")
    turn(shown, "settings max_split_size_mb", "64 MiB")
    assert shown.knobs.settings == "expandable_segments:True,max_split_size_mb:64"
    turn(shown, "settings expandable_segments", "off")
    assert shown.knobs.settings == "max_split_size_mb:64"


def test_setting_that_was_run_is_not_run_again(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Knobs] = []
    original = shown._run_step
    monkeypatch.setattr(shown, "_run_step", lambda knobs: (ran.append(knobs), original(knobs))[1])
    for batch in ("32", "16", "32", "64"):
        turn(shown, "batch", batch)
    assert ran == [Knobs(batch=32), Knobs(batch=16)]
    assert shown.history == (Knobs(), Knobs(batch=32), Knobs(batch=16))


def test_setting_that_fails_is_taken_back_and_says_why_beside_its_knob(shown: Explorer) -> None:
    turn(shown, "batch", "32")
    good = shown.run
    turn(shown, "frozen", "nowhere")
    assert shown.knobs == Knobs(batch=32)
    assert shown.run is good
    assert row(shown, "frozen")["problem"].startswith("Sequential has no layer 'nowhere'")
    assert row(shown, "frozen")["value"] == ""
    # later turns of other knobs succeed, and the reason stays until the knob itself is turned
    turn(shown, "batch", "16")
    assert shown.run.knobs == Knobs(batch=16)
    assert row(shown, "frozen")["problem"]
    turn(shown, "frozen", "0")
    assert shown.run.knobs == Knobs(batch=16, frozen="0")
    assert row(shown, "frozen")["problem"] == ""


def test_failing_setting_in_code_raises(shown: Explorer) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        shown.knobs = Knobs(frozen="nowhere")
    assert shown.knobs == Knobs()
    with pytest.raises(TypeError, match=r"mx.Knobs"):
        shown.knobs = {"batch": 3}  # type: ignore[assignment]


def test_chosen_layers_without_a_layer_says_what_to_do(shown: Explorer) -> None:
    turn(shown, "checkpoint", "chosen layers")
    assert "select a layer" in row(shown, "checkpoint")["problem"]
    assert shown.knobs == Knobs()
    assert position(shown, "checkpoint") == "none (as written)"


@pytest.mark.parametrize(
    ("field", "knobs"),
    [("checkpoint", Knobs(checkpoint="layers 1")), ("frozen", Knobs(frozen="1")), ("lora", Knobs(lora="1"))],
)
def test_layer_action_adds_and_removes_a_layer(shown: Explorer, field: str, knobs: Knobs) -> None:
    def action() -> dict[str, Any]:
        (found,) = (one for one in shown.message()["layer"]["actions"] if one["field"] == field)
        return found

    assert action()["disabled"] == "Select a layer first"
    shown.view.selection = "1"
    assert (action()["disabled"], action()["is_on"]) == ("", False)
    send(shown, "layer action", field=field, layer="1")
    assert shown.run.knobs == knobs
    assert action()["is_on"]
    send(shown, "layer action", field=field, layer="1")
    assert shown.run.knobs == Knobs()


def test_layer_action_that_cannot_apply_says_why_before(shown: Explorer) -> None:
    shown.view.selection = "0.1"
    reasons = {action["field"]: action["disabled"] for action in shown.message()["layer"]["actions"]}
    # 0.1 is a ReLU
    assert reasons == {
        "checkpoint": "",
        "frozen": "This layer has no weights",
        "lora": KNOBS["lora"].why_not_layer(nn.ReLU()),
    }
    send(shown, "layer action", field="lora", layer="0.1")
    assert shown.knobs == Knobs()
    assert row(shown, "lora")["problem"] == reasons["lora"]


def test_options_that_contradict_the_setting_are_disabled_with_the_reason(shown: Explorer) -> None:
    def impossible(name: str) -> dict[str, str]:
        knob = row(shown, name)
        return {label: reason for label, reason in zip(knob["options"], knob["impossible"], strict=False) if reason}

    assert impossible("update") == impossible("optimizer") == {}
    shown.knobs = Knobs(accumulation=2)
    assert impossible("update") == {
        "in backward": "update in backward frees each gradient at once: accumulation=2 needs them until the last "
        "micro-batch"
    }
    shown.knobs = Knobs(update="fused")
    assert list(impossible("optimizer")) == ["Adafactor"]
    assert impossible("optimizer")["Adafactor"].startswith("Adafactor has no fused update; write update= one of ")


def test_layer_actions_are_disabled_for_the_whole_model(shown: Explorer) -> None:
    shown.view.selection = "Sequential"
    assert shown.message()["layer"]["name"] is None


def test_selection_and_zoom_stay_on_an_equal_tape(shown: Explorer) -> None:
    shown.view.selection = "1"
    shown.view._handle_custom_msg({"type": "timeline", "window": [10, 20], "number": 1}, [])
    turn(shown, "batch", "32")
    assert shown.view.selection == "1"
    # the tape has the same events: the same rows
    assert shown.view._screen.window == pytest.approx((10, 20))


def test_click_in_the_history_returns_to_a_setting(shown: Explorer) -> None:
    turn(shown, "batch", "32")
    turn(shown, "precision", "bf16 autocast")
    send(shown, "tab click", tab=tabs.HISTORY, row=1)
    assert shown.run.knobs == Knobs(batch=32)
    assert position(shown, "precision") == "fp32 (as written)"
    rows = shown.view._tabs[tabs.HISTORY]["rows"]
    assert [row["cells"][0] for row in rows] == ["as written", "batch 32", "precision bf16, batch 32"]
    assert [row["current"] for row in rows] == [False, True, False]


def test_click_on_a_tab_without_settings_changes_no_knob(shown: Explorer) -> None:
    turn(shown, "batch", "8")
    before = shown.knobs
    shown.view.put_tabs({"Mine": {"kind": "table", "columns": ["size"], "rows": [["1 B"]]}})
    send(shown, "tab click", tab="Mine", row=0)
    assert shown.knobs == before


def test_code_and_trade_offs_are_those_of_the_setting(shown: Explorer) -> None:
    text = shown.view._tabs[tabs.CODE]["text"]
    assert "The step runs as written" in text
    assert max(map(len, text.split("\n"))) <= 62  # characters in the panel on a page of 1400 pixels
    turn(shown, "precision", "bf16 autocast")
    assert "torch.autocast" in shown.view._tabs[tabs.CODE]["text"]
    figure = shown.view._tabs[tabs.TRADE_OFFS]["figure"]
    points = next(trace for trace in figure["data"] if trace["name"] == "fits")
    assert list(points["y"]) == [curves.peak(shown._results[knobs].tape, "reserved")[0] for knobs in shown.history]


def test_skipped_sites_are_listed_with_reasons(shown: Explorer) -> None:
    # A residual: the old value is added, so the second activation must not overwrite it.
    class Residual(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.nn.functional.relu(x)

    explorer = explore(Step(nn.Sequential(nn.Linear(8, 8), Residual()), torch.zeros(4, 8), loss=torch.mean))
    explorer.knobs = Knobs(inplace="on")
    (skipped,) = explorer.run.applied.skipped
    assert "relu" in skipped.site
    assert explorer.message()["skipped"] == [{"site": skipped.site, "reason": skipped.reason}]


def test_knobs_that_do_not_apply_are_hidden_with_a_reason(shown: Explorer) -> None:
    hidden = shown.message()["hidden"]
    assert {"label": "Input size", "reason": "this batch has neither images nor sequences"} in hidden
    assert {"label": "Memory format", "reason": "the model has no weights for images"} in hidden
    names = {knob["field"] for knob in shown.message()["knobs"]}
    assert not names & {"input_size", "memory_format"}
    images = Step(nn.Conv2d(3, 8, 3), torch.zeros(4, 3, 16, 16), loss=torch.mean)
    with_size = explore(images)
    turn(with_size, "input_size", "32")
    assert with_size.run.knobs == Knobs(input_size=32)
    turn(with_size, "memory_format", "channels last")
    assert with_size.run.knobs == Knobs(input_size=32, memory_format="channels last")
    assert {"label": "LoRA, LoRA rank", "reason": "the model has no linear layer"} in with_size.message()["hidden"]


def test_wrong_arguments_raise() -> None:
    with pytest.raises(TypeError, match="Step"):
        explore(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no GPU"):
        explore(step(), gpu="T44")


def test_model_is_restored() -> None:
    one = step()
    model = one.model
    assert isinstance(model, nn.Module)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    shown = explore(one)
    turn(shown, "mode", "inference")
    turn(shown, "lora", "0.0")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training


def test_static_output_has_the_sentence(shown: Explorer) -> None:
    turn(shown, "batch", "32")
    output = shown.view.static_output(shown._sentence())
    assert sentence(shown) in output["text/plain"]
    assert "Batch of 32" in output["text/html"]
    assert "<img" in output["text/html"]


def test_change_of_many_layers_names_the_first_and_the_last(shown: Explorer) -> None:
    shown.knobs = Knobs(checkpoint="layers 0 1", frozen=["0", "0.0", "0.1", "0.2"])
    texts = [change["text"] for change in shown.message()["changes"]]
    assert texts == ["Checkpoint layers 0 1", "Frozen 0 … 0.2 (4 layers)"]


def test_a_choice_that_says_what_is_written_is_not_listed_twice(shown: Explorer) -> None:
    def options(field: str) -> list[str]:
        return next(row["options"] for row in shown.message()["knobs"] if row["field"] == field)

    assert options("checkpoint")[:2] == ["none (as written)", "every block"]
    assert options("zero_grad") == ["to None (as written)", "to zeros"]
    shown.knobs = Knobs(checkpoint="none")  # in code it can be set; it is listed while it is
    assert options("checkpoint")[:2] == ["none (as written)", "none"]
    assert "SGD, default arguments" in options("optimizer")


def test_checkpoint_outside_the_options_becomes_an_option(shown: Explorer) -> None:
    shown.knobs = Knobs(checkpoint=Checkpoint.parse("every 7"))
    assert position(shown, "checkpoint") == "every 7"


@pytest.mark.parametrize(
    ("own", "least", "most"),
    # a 64th, and 64 times as much where that is not more than 1 024, else 16 times
    [(1, 1, 64), (8, 1, 512), (64, 1, 1024), (4096, 64, 65_536)],
)
def test_range_of_batches(own: int, least: int, most: int) -> None:
    (batches,) = KNOBS["batch"].controls(Explored(batch=own))
    values = [option.value for option in batches.positions(Knobs())]
    assert (values[0], values[-1]) == (least, most)
    assert own in values
