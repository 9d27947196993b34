"""Where settings run: in this process, in workers, on executors."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor

import pytest
import torch
from torch import nn

from memexplore import virtual
from memexplore.run.code.lines import lines
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import machine_of
from memexplore.run.programs.packing import unpacked
from memexplore.run.programs.step import Step
from memexplore.run.run import Want, run
from memexplore.run.search import runners, workers
from memexplore.run.search.results import Done, Failed
from memexplore.run.search.runners import LocalRunner, Origin, runner_of
from memexplore.run.search.sweep import stream, sweep
from memexplore.tape import Category
from memexplore.virtual_gpu.dispatch import autograd_engine
from tests.search.sweep_steps import SameThread, same, step

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


def local_optimizer():
    class Scheduled(torch.optim.Optimizer):
        def __init__(self, parameters, lr=0.1, schedule=None):
            super().__init__(parameters, {"lr": lr})
            self.schedule, self.lock = schedule or [1.0], threading.Lock()
            # Values that lead back to the optimizer
            self.first, self.second, self.third = self.keep, self.keep, [self]

        def keep(self):
            return self.schedule

        @torch.no_grad()
        def step(self, closure=None):
            for weight in self.param_groups[0]["params"]:
                self.state[weight].setdefault("mean", torch.zeros_like(weight)).add_(weight.grad)

    return Scheduled


def test_an_optimizer_of_a_local_class_is_sent_while_a_virtual_gpu_is_on(pool):
    model = nn.Linear(1024, 1024)
    with virtual("T4"):
        optimizer = local_optimizer()(model.parameters(), schedule=[0.5])
        model(torch.zeros(8, 1024)).mean().backward()
        optimizer.step()
        sent = Step(model, torch.zeros(8, 1024), loss=torch.mean, optimizer=optimizer)
        there = unpacked(sent.packed()).optimizer
        # Its attributes go too, but for those that cannot be pickled.
        assert (there.schedule, hasattr(there, "lock"), type(there).step.hooked) == ([0.5], False, True)
        assert (there.second(), there.third[0] is there) == ([0.5], True)
        assert type(there).keep.__code__.co_filename == __file__
    tape = sweep(sent, [Knobs()], executor=pool, progress=None)[Knobs()]
    assert int(tape.size[tape.category == Category.OPTIMIZER_STATE].sum()) == 1024 * 1024 * 4 + 1024 * 4


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


# -- own processes


def in_processes(monkeypatch):
    """Run all settings but the first two in processes."""
    monkeypatch.setattr(runners, "_SECONDS_TO_START", -1.0)
    monkeypatch.setattr(runners, "processor_count", lambda: 2)


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
    monkeypatch.setattr(runners, "Workers", lambda *_: pytest.fail("processes were started"))
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
    results = stream(step(), [Knobs(batch=size) for size in range(1, 30)], machine_of())
    for _ in range(4):
        next(results)
    results.close()
    for _ in range(600):
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
    results = list(stream(step(), [Knobs(batch=4), Knobs(batch=3, accumulation=2)], machine_of(), SameThread()))
    assert [type(result) for result in results] == [Done, Failed]


class OtherFlags(SameThread):
    """Runs every task with other flags of cuDNN than those of the caller."""

    def submit(self, function, /, *args, **kwargs):
        with torch.backends.cudnn.flags(enabled=False, benchmark=False, deterministic=True, allow_tf32=True):
            return super().submit(function, *args, **kwargs)


def test_flags_of_cudnn_are_sent_where_assignments_to_them_are_forbidden(monkeypatch):
    # `torch.backends.disable_global_flags`, which the import of torch's test utilities calls, cannot be undone.
    monkeypatch.setattr(torch.backends, "flags_frozen", lambda: True)

    def loss(output):
        cudnn = torch.backends.cudnn
        assert (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32) == (True, True, False, False)
        return output.mean()

    checked = Step(nn.Linear(64, 64), torch.zeros(2, 64), loss=loss)
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=False):
        found = sweep(checked, [Knobs()], executor=OtherFlags(), progress=None)
    assert not found.errors
    assert list(found) == [Knobs()]


def test_runs_in_workers_give_the_tapes_of_runs_here(monkeypatch):
    in_processes(monkeypatch)
    settings = [Knobs(batch=size) for size in range(2, 7)]
    done = sweep(step(), settings, gpu="T4", progress=None)
    for knobs in settings:
        here = run(step(), knobs, machine_of("T4"))
        assert same(done[knobs], here.tape)
        assert done.outcomes[knobs] == here.outcome


def step_that_names_its_process() -> Step:
    def loss(output):
        # An error is sent back as it is.
        raise RuntimeError(str(os.getpid()))

    return Step(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), torch.zeros(8, 64), loss=loss)


def processes(runner: LocalRunner, settings: list[Knobs]) -> list[str]:
    """The processes in which a runner runs settings."""
    runner.submit(settings)
    results = [runner.next_result() for _ in settings]
    ran = {result.knobs: str(result.error) for result in results}
    return [ran[knobs] for knobs in settings]


@pytest.mark.parametrize("more", [Knobs(settings="expandable_segments:True"), Knobs(batch=4)], ids=["trace", "code"])
def test_a_setting_is_run_where_what_it_can_reuse_is(monkeypatch, more):
    in_processes(monkeypatch)
    with contextlib.closing(LocalRunner(step_that_names_its_process(), machine_of("T4"), Want.TAPE, 99)) as runner:
        here = processes(runner, [Knobs(), Knobs(batch=1)])
        first, second = Knobs(checkpoint="every 1"), Knobs(precision="bf16")
        before = processes(runner, [first, second])
        # In the other order, and a setting between them that can reuse nothing.
        again = [knobs.replace(**more.changed()) for knobs in (second, first)]
        after = processes(runner, [again[0], Knobs(accumulation=2), again[1]])
    assert set(here) == {str(os.getpid())}
    assert len({*here, *before}) == 3
    assert [after[0], after[2]] == before[::-1]


def test_an_error_of_the_function_that_builds_the_model_is_that_of_each_setting(monkeypatch):
    in_processes(monkeypatch)
    home = os.getpid()

    def build():
        if os.getpid() != home:
            raise RuntimeError("no model here")
        return nn.Linear(4, 4)

    done = sweep(
        Step(build, torch.zeros(2, 4), loss=torch.mean),
        [Knobs(), Knobs(batch=1), Knobs(gpu="A100"), Knobs(gpu="V100")],
        progress=None,
    )
    assert ["no model here" in str(error) for error in done.errors.values()] == [True, True]


def test_in_place_sites_come_back_with_the_run_that_found_them():
    layers = [layer for _ in range(2) for layer in (nn.Linear(256, 256), nn.ReLU())]
    given = Step(nn.Sequential(*layers), torch.zeros(8, 256), loss=torch.mean)
    settings = [Knobs(), Knobs(inplace="on")]
    plain, inplace = stream(given, settings, machine_of("T4"), SameThread())
    assert plain.sites is None
    assert lines(given, Knobs(inplace="on"), inplace.sites) != lines(given, Knobs(inplace="on"))
    run(given, Knobs(inplace="on"), machine_of("T4"))
    assert lines(given, Knobs(inplace="on"), inplace.sites) == lines(given, Knobs(inplace="on"))


def test_settings_submitted_between_results_are_run_too():
    with contextlib.closing(runner_of(step(), machine_of("T4"), None, Want.TAPE, 2)) as runner:
        runner.submit([Knobs(batch=1)])
        first = runner.next_result()
        runner.submit([Knobs(batch=2)])
        assert [first.knobs, runner.next_result().knobs] == [Knobs(batch=1), Knobs(batch=2)]


# -- forks of this process


@pytest.mark.skipif(not workers.can_fork(), reason="no forks")
def test_forks_share_the_model_that_was_built_before():
    # In a fresh process, as this one may have run a backward pass, after which torch refuses one in a fork.
    process = workers._Process(target=_fork_and_run, args=(queue := multiprocessing.get_context("spawn").Queue(),))
    process.start()
    built, result = queue.get(timeout=200)
    process.join()
    assert built == [process.pid]
    assert result.startswith("Done")


def _fork_and_run(queue):
    builders = []

    def build():
        builders.append(os.getpid())
        return nn.Linear(64, 64)

    given = Step(build, torch.zeros(8, 64), loss=torch.mean)
    workers.build(given)
    with contextlib.closing(LocalRunner(given, machine_of("T4"), Want.NUMBERS, 9, Origin.FORKED)) as runner:
        runner.submit([Knobs()])
        queue.put((builders, str(runner.next_result())))


@pytest.mark.skipif(not workers.can_fork(), reason="no forks")
def test_settings_run_here_where_torch_refuses_a_backward_pass_in_forked_processes(monkeypatch):
    monkeypatch.setattr(runners, "processor_count", lambda: 2)

    def refused():
        raise RuntimeError("Unable to handle autograd's threading")

    before = autograd_engine.sole_owner_counts()
    monkeypatch.setattr(autograd_engine, "sole_owner_counts", lambda: before if os.getpid() == home else refused())
    home = os.getpid()
    with contextlib.closing(LocalRunner(step(), machine_of("T4"), Want.NUMBERS, 9, Origin.FORKED)) as runner:
        runner.submit([Knobs(batch=2), Knobs(batch=4)])
        assert {type(runner.next_result()) for _ in range(2)} == {Done}
