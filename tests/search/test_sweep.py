"""Sweeps as mappings and as frames, and their progress."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import machine_of
from memexplore.run.programs.outcome import extra_flops, slow_down
from memexplore.run.programs.step import Step
from memexplore.run.run import run
from memexplore.run.search import progress, runners
from memexplore.run.search.progress import Progress, estimate_seconds_left, shown_progress
from memexplore.run.search.sweep import stream, sweep
from memexplore.tape import Action
from tests.search.sweep_steps import MIB, SameThread, same, step

# -- the mapping


def test_a_sweep_maps_settings_to_their_tapes_in_their_order():
    settings = [Knobs(batch=4), Knobs(), Knobs(batch=2)]
    found = sweep(step(), settings, progress=None)
    assert list(found) == settings
    assert all(same(found[knobs], run(step(), knobs).tape) for knobs in settings)


def test_equal_settings_are_run_once():
    seen = []
    found = sweep(step(), [Knobs(batch=4), Knobs(batch=4), Knobs()], progress=seen.append)
    # batch 4 and as written
    assert (len(found), seen[-1].total, len(seen)) == (2, 2, 2)


def test_a_setting_that_fails_does_not_stop_the_others():
    found = sweep(step(), [Knobs(batch=3, accumulation=2), Knobs(batch=4)], progress=None)
    assert list(found) == [Knobs(batch=4)]
    assert isinstance(found.errors[Knobs(batch=3, accumulation=2)], ValueError)
    with pytest.raises(KeyError, match="does not divide"):
        found[Knobs(batch=3, accumulation=2)]


def test_an_error_keeps_its_traceback_as_a_note_and_no_frames():
    def loss(output):
        raise RuntimeError("no loss today")

    broken = Step(nn.Linear(4, 4), torch.zeros(2, 4), loss=loss)
    (error,) = sweep(broken, [Knobs()], progress=None).errors.values()
    assert error.__traceback__ is None
    assert "test_sweep.py" in error.__notes__[0]


def test_out_of_memory_is_not_an_error():
    found = sweep(step(), [Knobs(), Knobs(gpu="1MiB")], progress=None)
    assert not found.errors
    assert np.any(found[Knobs(gpu="1MiB")].action == Action.OOM)


# -- the table


def test_the_frame_has_a_row_per_setting_and_the_knobs_that_differ():
    table = sweep(
        step(), [Knobs(batch=4), Knobs(precision="bf16"), Knobs(gpu="1MiB"), Knobs(batch=3, accumulation=2)],
        progress=None,
    ).to_pandas()  # fmt: skip
    assert list(table.columns)[:5] == ["precision", "batch", "accumulation", "outcome", "gpu"]
    assert list(table["outcome"]) == ["fits", "fits", "oom", "failed"]
    assert table.loc["batch 4", "batch"] == "4"
    assert "does not divide" in table.loc["batch 3, accumulation 2", "error"]


def test_the_margin_of_a_setting_that_does_not_fit_is_negative():
    found = sweep(step(), [Knobs(gpu="1MiB"), Knobs(gpu="1GiB")], progress=None)
    small, large = found.outcomes[Knobs(gpu="1MiB")], found.outcomes[Knobs(gpu="1GiB")]
    # The runs need the same; one GPU has 1 GiB - 1 MiB less.
    assert small.peak_reserved == large.peak_reserved
    assert large.margin - small.margin == 1023 * MIB
    assert small.margin < 0 < large.margin


def test_flops_and_time_are_compared_per_sample():
    found = sweep(step(), [Knobs(batch=16)], progress=None)
    doubled = found.outcomes[Knobs(batch=16)]
    # The products of a linear layer grow with the batch: twice the samples, twice the FLOPs, the same per sample.
    assert doubled.flops == 2 * found.as_written.flops
    assert extra_flops(doubled, found.as_written) == 0
    # The weights are read once per step: a sample of the larger batch takes less time.
    assert slow_down(doubled, found.as_written) < 1


def test_checkpointing_costs_another_forward():
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    many = Step(layers, torch.zeros(32, 64), loss=torch.mean, optimizer=torch.optim.SGD)
    written, again = run(many).outcome, run(many, Knobs(checkpoint="every 1")).outcome
    # A layer is 1 product forward and 2 backward, the first has no gradient of its input: 4 + 4 + 3 = 11 products.
    # Each of the 4 blocks runs its product again, as GELU's backward reads its result.
    assert extra_flops(again, written) == pytest.approx(4 / 11)


def test_the_points_are_the_settings_that_ran():
    found = sweep(step(), [Knobs(), Knobs(gpu="1MiB"), Knobs(batch=3, accumulation=2)], progress=None)
    assert [(point.setting, point.fits) for point in found.points] == [("as written", True), ("gpu 1MiB", False)]


# -- progress


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=20), st.integers(0, 50))
def test_the_seconds_left_are_the_mean_time_of_a_setting_times_the_settings_left(steps, more):
    finished = np.cumsum(steps).tolist()
    mean = (finished[-1] - finished[0]) / (len(finished) - 1)
    assert estimate_seconds_left(finished, len(finished) + more) == pytest.approx(mean * more)


def test_the_seconds_left_are_unknown_before_the_second_setting():
    assert estimate_seconds_left([], 3) is estimate_seconds_left([1.0], 3) is None


def test_progress_is_reported_after_every_setting():
    seen: list[Progress] = []
    sweep(step(), [Knobs(batch=2), Knobs(batch=3, accumulation=2)], progress=seen.append)
    assert [(one.done, one.failed, one.total) for one in seen] == [(1, 0, 3), (2, 0, 3), (3, 1, 3)]
    assert seen[-1].left == 0


def test_outside_a_terminal_only_the_end_is_printed(capsys):
    show = shown_progress()
    show(Progress(1, 0, 2, 1.0, 1.0))
    show(Progress(2, 1, 2, 3.0, 0.0))
    assert capsys.readouterr().err == "2 of 2 runs, 1 failed in 3 s\n"


class Handle:
    """An output of a notebook: every value that it showed."""

    def __init__(self, value):
        self.shown = [value]

    def update(self, value):
        self.shown.append(value)


@pytest.fixture
def outputs(monkeypatch):
    """The outputs that a notebook shows."""
    shown = []
    monkeypatch.setattr(progress.ipython_shell, "is_notebook", lambda: True)
    monkeypatch.setattr(
        progress.ipython_shell, "display_in_place", lambda value: shown.append(Handle(value)) or shown[-1]
    )
    return shown


def test_an_interrupted_sweep_leaves_no_output_behind(outputs, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Handle, "update", interrupt)
    assert sweep(step(), [Knobs(batch=2), Knobs(batch=3)]).cancelled
    output = weakref.ref(outputs.pop())
    gc.collect()
    assert output() is None


def test_searches_that_alternate_have_a_bar_each(outputs):
    one, other = shown_progress(), shown_progress()
    for done in (1, 2):
        one(Progress(done, 0, 3, 1.0, None))
        other(Progress(done, 0, 2, 1.0, None))
    assert [[value.progress.total for value in output.shown] for output in outputs] == [[3, 3], [2, 2]]


def test_a_notebook_shows_one_bar_for_each_search(outputs, capsys):
    for _ in range(2):
        show = shown_progress()
        show(Progress(1, 0, 2, 1.0, None))
        show(Progress(2, 1, 2, 3.0, 0.0))
    assert [len(output.shown) for output in outputs] == [2, 2]
    page = outputs[0].shown[1]._repr_html_()
    assert 'aria-valuenow="2"' in page
    assert "width:100.0%" in page
    assert "2 of 2 runs, 1 failed in 3 s" in page
    # Nothing on standard error, which a notebook shows in red.
    assert capsys.readouterr().err == ""


def test_an_interrupt_keeps_the_settings_that_ran():
    def interrupt(state):
        if state.done == 2:
            raise KeyboardInterrupt

    found = sweep(step(), [Knobs(batch=2), Knobs(batch=3), Knobs(batch=4)], progress=interrupt)
    # as written comes first, then batch 2
    assert (found.cancelled, list(found)) == (True, [Knobs(batch=2)])
    assert "cancelled" in repr(found)


def test_a_closed_stream_submits_nothing_more():
    executor = SameThread()
    results = stream(step(), [Knobs(batch=size) for size in range(1, 200)], machine_of(), executor)
    next(results)
    results.close()
    assert len(executor.sent) == runners._SUBMITTED


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ([Knobs(), Knobs(lora="nope")], ValueError, "has no layer 'nope'"),
        (Knobs(batch=4), TypeError, r"write \[Knobs\(batch=4\), ...\]"),
        ([{"batch": 4}], TypeError, r"not \{'batch': 4\}"),
    ],
)
def test_settings_that_no_run_can_follow_raise_before_any_run(settings, error, words):
    built = []
    step = Step(lambda: built.append(1) or torch.nn.Linear(8, 4), torch.zeros(4, 8), loss=torch.mean)
    with pytest.raises(error, match=words):
        sweep(step, settings, progress=built.append)
    assert built in ([], [1])  # no progress was reported


def test_error_of_a_setting_is_in_its_row():
    def loss(output, batch=None):
        raise RuntimeError("first line\nsecond")

    found = sweep(Step(torch.nn.Linear(8, 4), torch.zeros(4, 8), loss=loss), [Knobs(batch=2)], progress=None)
    assert "failed   RuntimeError: first line\n" in f"{found}\n"
    assert found.to_pandas()["error"].tolist() == ["RuntimeError: first line"]


@pytest.mark.parametrize("executor", [None, SameThread()], ids=["here", "executor"])
def test_every_run_has_the_operating_system_of_the_sweep(executor):
    done = sweep(step(), [Knobs(batch=2)], gpu="T4", os="wsl", executor=executor, progress=None)
    assert {result.tape.meta.os for result in done.runs.values()} == {"wsl"}
