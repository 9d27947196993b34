"""Sweeps in this process, in processes and on executors: tapes, tables, progress, and what is sent to workers."""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import os
import pickle
import signal
import threading
import time
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from memexplore.knobs.knobs import Knobs
from memexplore.search import executors, workers
from memexplore.search.progress import Progress, estimate_seconds_left, print_progress
from memexplore.search.results_table import Line, bar, html_table
from memexplore.search.sweep import Sweep, stream, sweep
from memexplore.search.workers import Done, Failed
from memexplore.steps.outcome import extra_flops, run_outcome, slow_down
from memexplore.steps.step import Step
from memexplore.steps.trial import run
from memexplore.tape import Action, Category
from memexplore.units import size_text

MIB = 1024**2


def step(width=1024, batch=8) -> Step:
    return Step(nn.Linear(width, width), torch.zeros(batch, width), loss=torch.mean, optimizer=torch.optim.SGD)


def same(one, other) -> bool:
    """Return whether tapes are equal but for their stacks, which name the caller."""
    return one.replace(stack=one.stack * 0 - 1, stacks=()).equals(other.replace(stack=other.stack * 0 - 1, stacks=()))


class SameThread(Executor):
    """Runs every task at once in the calling thread; keeps the arguments."""

    def __init__(self):
        self.sent = []

    def submit(self, function, /, *args, **kwargs):
        self.sent.append(args)
        future: Future = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


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
    written, again = run_outcome(many)[1], run_outcome(many, Knobs(checkpoint="every 1"))[1]
    # A layer is 1 product forward and 2 backward, the first has no gradient of its input: 4 + 4 + 3 = 11 products.
    # Each of the 4 blocks runs its product again, as GELU's backward reads its result.
    assert extra_flops(again, written) == pytest.approx(4 / 11)


@functools.cache
def printed() -> Sweep:
    return sweep(step(), [Knobs(), Knobs(gpu="1MiB"), Knobs(batch=3, accumulation=2)], gpu="1GiB", progress=None)


def test_a_sweep_prints_a_title_and_a_row_per_setting():
    title, *rows = repr(printed()).splitlines()
    assert title == "Sweep of 3 settings: 1 fit, 1 out of memory, 1 failed"
    assert [row.split("  ")[0] for row in rows] == ["setting", "as written", "gpu 1MiB", "batch 3, accumulation 2"]


def test_the_printed_sizes_have_binary_units():
    outcome = printed().outcomes[Knobs(gpu="1MiB")]
    # The GPU has 1 MiB, so all but 1 MiB of the memory needed is missing.
    missing = size_text(MIB - outcome.peak_reserved)
    row = repr(printed()).splitlines()[3]
    assert row.split()[2:5] == ["out", "of", "memory"]
    assert f"  {size_text(outcome.peak_reserved)}  " in row
    assert f"  {missing}  " in row
    assert str(outcome.peak_reserved) not in repr(printed())


def test_the_bar_is_the_share_of_the_gpu():
    lines = repr(printed()).splitlines()
    share = printed().outcomes[Knobs()].peak_reserved / 1024**3
    assert f"{bar(share)} {share * 100:3.0f} %" in lines[2]
    # More than the GPU has: a full bar with an arrow.
    assert "█" * 12 + "▶" in lines[3]


def test_a_failed_setting_is_printed_with_its_error():
    row = repr(printed()).splitlines()[-1]
    assert row.split("  failed")[1].strip() == str(printed().errors[Knobs(batch=3, accumulation=2)])


def test_a_notebook_shows_a_sweep_as_an_html_table_with_bars():
    page = printed()._repr_html_()
    assert page.startswith("<table><caption")
    # One row of titles and three settings, of which two have a bar.
    assert (page.count("<tr>"), page.count('role="img"')) == (4, 2)
    assert size_text(printed().outcomes[Knobs()].peak_reserved) in page


def test_texts_in_the_html_table_are_escaped():
    page = html_table(["a < b"], [Line("<script>", None, error="1 > 0")], ["<more>"])
    assert "<script>" not in page
    assert "a &lt; b" in page
    assert "1 &gt; 0" in page
    assert "&lt;more&gt;" in page


def test_the_frame_of_a_sweep_stays_in_bytes():
    table = printed().to_pandas()
    assert table.loc["as written", "peak_reserved"] == printed().outcomes[Knobs()].peak_reserved


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
    print_progress(Progress(1, 0, 2, 1.0, 1.0))
    print_progress(Progress(2, 1, 2, 3.0, 0.0))
    assert capsys.readouterr().err == "2 of 2 settings run, 1 failed in 3 s\n"


def test_an_interrupt_keeps_the_settings_that_ran():
    def interrupt(progress):
        if progress.done == 2:
            raise KeyboardInterrupt

    found = sweep(step(), [Knobs(batch=2), Knobs(batch=3), Knobs(batch=4)], progress=interrupt)
    # as written comes first, then batch 2
    assert (found.cancelled, list(found)) == (True, [Knobs(batch=2)])
    assert "cancelled" in repr(found)


def test_a_closed_stream_submits_nothing_more():
    executor = SameThread()
    results = stream(step(), [Knobs(batch=size) for size in range(1, 200)], executor=executor)
    next(results)
    results.close()
    assert len(executor.sent) == executors._WINDOW


# -- executors


def test_an_executor_of_threads_is_refused():
    with ThreadPoolExecutor(1) as executor, pytest.raises(TypeError, match="process-wide"):
        sweep(step(), [Knobs()], executor=executor, progress=None)


class Threads(Executor):
    """Threads of another executor class than that of the standard library."""

    def submit(self, function, /, *args, **kwargs):
        future: Future = Future()

        def work():
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work).start()
        return future


def test_an_unknown_executor_of_threads_is_refused():
    with pytest.raises(TypeError, match="threads of the calling process"):
        sweep(step(), [Knobs()], executor=Threads(), progress=None)


@pytest.fixture(scope="module")
def pool():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        yield executor


class Scaled(nn.Module):
    """A layer inside of a local class, which another process cannot import."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1024, 1024)
        self.register_buffer("scale", torch.ones(1024))

    def forward(self, x):
        return self.linear(x) * self.scale


def local_step():
    class Local(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Scaled()

        def forward(self, x):
            return self.inner(x).relu()

    return Step(Local(), torch.zeros(8, 1024), loss=lambda output: output.mean(), optimizer=torch.optim.Adam)


def test_lambdas_and_local_models_give_equal_tapes_in_another_process(pool):
    settings = [Knobs(), Knobs(batch=4), Knobs(precision="bf16")]
    there, here = (
        sweep(local_step(), settings, executor=pool, progress=None),
        sweep(local_step(), settings, progress=None),
    )
    assert not there.errors
    assert list(there) == settings
    assert all(same(there[knobs], here[knobs]) for knobs in settings)
    assert there.outcomes == here.outcomes


def test_a_function_that_builds_the_model_is_sent(pool):
    width = 512
    built = Step(lambda: nn.Linear(width, width), torch.zeros(8, 512), loss=torch.mean)
    tape = sweep(built, [Knobs()], executor=pool, progress=None)[Knobs()]
    # 512 * 512 weights and 512 biases of 4 bytes
    assert int(tape.size[tape.category == Category.PARAMETER].sum()) == (512 * 512 + 512) * 4


def test_global_settings_of_torch_are_sent(pool):
    torch.set_default_dtype(torch.float64)
    try:
        built = Step(lambda: nn.Linear(512, 512, bias=False), torch.zeros(8, 512), loss=torch.mean)
        tape = sweep(built, [Knobs()], executor=pool, progress=None)[Knobs()]
    finally:
        torch.set_default_dtype(torch.float32)
    # 8 bytes per weight
    assert int(tape.size[tape.category == Category.PARAMETER].sum()) == 512 * 512 * 8


class Odd(Exception):
    """Can be pickled but not unpickled."""

    def __init__(self, one, two):
        super().__init__(one)


def test_an_exception_that_cannot_be_unpickled_comes_back_as_text(pool):
    def loss(output):
        raise Odd("strange", "error")

    broken = Step(nn.Linear(4, 4), torch.zeros(2, 4), loss=loss)
    (error,) = sweep(broken, [Knobs()], executor=pool, progress=None).errors.values()
    assert str(error) == "Odd: strange"


def test_a_step_that_cannot_be_pickled_is_refused(pool):
    lock = threading.Lock()
    held = Step(nn.Linear(4, 4), torch.zeros(2, 4), loss=lambda output: output.mean() if lock else output.sum())
    with pytest.raises(TypeError, match="cannot be sent to another process"):
        sweep(held, [Knobs()], executor=pool, progress=None)


# -- packed steps


def test_weights_and_large_batches_are_sent_as_shapes():
    model = nn.Linear(4096, 4096)
    adam = torch.optim.Adam(model.parameters())
    model(torch.zeros(1, 4096)).sum().backward()
    adam.step()
    packed = workers.pack_step(Step(model, torch.zeros(1024, 4096), loss=torch.mean, optimizer=adam))
    # 64 MiB of weights, twice as much state and 16 MiB of batch are a few KiB of shapes.
    assert len(packed) < 16 * 1024


def test_unpacked_weights_have_the_shapes_strides_and_flags_of_the_packed():
    model = nn.Conv2d(64, 64, 3).to(memory_format=torch.channels_last)
    model.bias.requires_grad_(False)
    model.weight.group = "slow"
    sent = Step(model, torch.zeros(2, 64, 8, 8), loss=torch.mean)
    unpacked = pickle.loads(workers.pack_step(sent)).model
    for mine, its in zip(model.parameters(), unpacked.parameters(), strict=True):
        assert (its.shape, its.stride(), its.dtype, its.requires_grad) == (
            mine.shape, mine.stride(), mine.dtype, mine.requires_grad,
        )  # fmt: skip
    assert unpacked.weight.group == "slow"


def test_tied_weights_stay_tied():
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    model[1].weight = model[0].weight
    unpacked = pickle.loads(workers.pack_step(Step(model, torch.zeros(2, 512), loss=torch.mean))).model
    assert unpacked[1].weight is unpacked[0].weight


def test_small_batches_keep_their_values():
    lengths = torch.tensor([3, 1, 2])
    sent = Step(nn.Linear(4, 4), (torch.zeros(3, 4), lengths), loss=lambda output, lengths: output.mean())
    assert torch.equal(pickle.loads(workers.pack_step(sent)).batch[1], lengths)


def test_packing_does_not_change_the_step():
    sent = step()
    before = [weight.clone() for weight in sent.model.parameters()]
    workers.pack_step(sent)
    assert all(torch.equal(one, other) for one, other in zip(before, sent.model.parameters(), strict=True))


# -- own processes


def in_processes(monkeypatch):
    """Run all settings but the first two in processes."""
    monkeypatch.setattr(executors, "_START", -1.0)
    monkeypatch.setattr(workers, "processor_count", lambda: 2)


def test_processes_are_started_where_they_save_time(monkeypatch):
    in_processes(monkeypatch)
    home = os.getpid()

    def loss(output):
        # An error names the process, as only the worker knows it.
        if os.getpid() != home:
            raise RuntimeError("elsewhere")
        return output.mean()

    there = Step(nn.Linear(64, 64), torch.zeros(2, 64), loss=loss)
    found = sweep(there, [Knobs(batch=size) for size in range(3, 8)], progress=None)
    # as written and batch 3 here, 4 to 7 elsewhere
    assert (list(found), sorted(knobs.batch for knobs in found.errors)) == ([Knobs(batch=3)], [4, 5, 6, 7])


@pytest.mark.parametrize("count", [1, 2])
def test_a_sweep_of_one_or_two_settings_starts_no_processes(monkeypatch, count):
    in_processes(monkeypatch)
    monkeypatch.setattr(workers, "spawn_pool", lambda _: pytest.fail("processes were started"))
    # With the step as written 2 and 3 runs: of the third nothing is saved elsewhere.
    done = sweep(step(), [Knobs(batch=size) for size in range(2, 2 + count)], gpu="T4", progress=None)
    assert len(done) == count


def test_a_worker_that_dies_fails_one_setting(monkeypatch):
    in_processes(monkeypatch)
    home = os.getpid()

    def loss(output):
        if os.getpid() != home and output.shape[0] == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return output.mean()

    deadly = Step(nn.Linear(64, 64), torch.zeros(2, 64), loss=loss)
    found = sweep(deadly, [Knobs(batch=size) for size in range(3, 9)], progress=None)
    assert list(found.errors) == [Knobs(batch=6)]
    assert "died" in str(found.errors[Knobs(batch=6)])
    assert [knobs.batch for knobs in found] == [3, 4, 5, 7, 8]


def test_no_process_is_left_behind(monkeypatch):
    in_processes(monkeypatch)
    before = {child.pid for child in multiprocessing.active_children()}
    results = stream(step(), [Knobs(batch=size) for size in range(1, 30)])
    for _ in range(4):
        next(results)
    results.close()
    for _ in range(100):
        if {child.pid for child in multiprocessing.active_children()} <= before:
            break
        time.sleep(0.1)
    assert {child.pid for child in multiprocessing.active_children()} <= before


def test_a_step_that_cannot_be_pickled_runs_in_this_process(monkeypatch):
    in_processes(monkeypatch)
    lock = threading.Lock()
    held = Step(nn.Linear(4, 4), torch.zeros(2, 4), loss=lambda output: output.mean() if lock else output.sum())
    found = sweep(held, [Knobs(batch=size) for size in range(1, 6)], progress=None)
    assert len(found) == 5


def test_a_broken_executor_fails_each_setting():
    class Broken(Executor):
        def submit(self, function, /, *args, **kwargs):
            raise concurrent.futures.BrokenExecutor("it broke")

    found = sweep(step(), [Knobs(), Knobs(batch=2)], executor=Broken(), progress=None)
    assert [str(error) for error in found.errors.values()] == ["it broke", "it broke"]


def test_the_stream_yields_failures_as_values():
    results = list(stream(step(), [Knobs(batch=4), Knobs(batch=3, accumulation=2)], executor=SameThread()))
    assert [type(result) for result in results] == [Done, Failed]
