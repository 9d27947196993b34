"""State that every test restores, and how pytest-xdist distributes tests over its processes."""

from __future__ import annotations

import _imp
import collections
import contextlib
import gc
import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import pytest
from xdist.scheduler import LoadFileScheduling

from tests import threads

# Before torch is imported, here and in the processes that tests start: with more threads than free processors, each
# parallel op waits until its threads are scheduled, which makes small ops ten times as slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes depends on the machine. The rest is as Hypothesis has it, here and in CI.
hypothesis.settings.register_profile("memexplore", parent=hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("memexplore")


SLOW = (
    "tests/browser/",
    "tests/code/test_lines_tapes.py",
    "tests/fidelity/",
    "tests/fuzz/",
    "tests/integrations/",
    "tests/jupyter/test_memgpu.py::test_in_a_kernel",
    "tests/jupyter/test_memoom.py::test_the_failed_cell",
    "tests/jupyter/test_memoom.py::test_what_would_have_fitted",
    "tests/jupyter/test_memoom_cell.py",
    "tests/jupyter/test_notebooks.py::test_claims",
    "tests/jupyter/test_notebooks.py::test_notebook_runs",
    "tests/jupyter/test_notebooks.py::test_solution_runs",
    "tests/jupyter/test_reopened_pages.py",
    "tests/live/test_long_runs.py",
    "tests/out_of_memory/test_corpus.py",
    "tests/out_of_memory/test_owners.py",
    "tests/out_of_memory/test_what_fits.py",
    "tests/programs/test_real_run.py",
    "tests/programs/test_real_run_cuda.py",
    "tests/programs/test_smallest_capacity.py",
    "tests/ranks/test_torchrun.py",
    "tests/scripts/",
    "tests/search/test_advise.py",
    "tests/search/test_loop_search.py",
    "tests/search/test_workers.py",
    "tests/test_binder.py",
    "tests/test_cli_ends.py",
    "tests/test_cli_equal_ranks.py",
    "tests/test_cli_files_of_ranks.py",
    "tests/test_cli_folder.py",
    "tests/test_cli_live.py",
    "tests/test_cli_live_terminal.py",
    "tests/test_cli_ranks.py",
    "tests/test_cli_run.py",
    "tests/test_documents.py::test_snippets_run",
    "tests/test_site.py",
    "tests/virtual_gpu/distributed/test_against_gloo.py",
    "tests/virtual_gpu/test_kernel_refusals.py::test_calls_that_the_cpu_refuses_are_refused",
    "tests/virtual_gpu/test_kernel_refusals.py::test_inputs_with_errors_of_the_op_database_are_refused",
    "tests/virtual_gpu/test_measured_ops.py",
)
"""Browsers, models of the usual size, fuzzers, other libraries' loops, processes, notebooks, scripts, documents.
Also slow are all tests that interrupt a program at any line."""
_BROWSER = "tests/browser/test_"
THOROUGH = (
    f"{_BROWSER}accessibility_in_lab.py::test_theme_of_the_page_is_followed_while_it_changes[body",
    f"{_BROWSER}ended_kernel_in_lab.py::test_kernel_that_lost_the_widget",
    f"{_BROWSER}explorer_in_lab.py::test_every_knob_by_keyboard",
    f"{_BROWSER}explorer_in_lab.py::test_nothing_overflows[1000]",
    f"{_BROWSER}explorer_kernel_in_lab.py::test_held_key_ends_with_slider_and_picture_of_the_same_setting[7",
    f"{_BROWSER}explorer_kernel_in_lab.py::test_slider_of_a_cell_on_several_kernels[7",
    f"{_BROWSER}live_in_lab.py::test_a_page_reloaded_before_its_notebook_was_saved",
    f"{_BROWSER}live_in_lab.py::test_an_old_kernel_streams_too",
    f"{_BROWSER}live_in_lab.py::test_two_pages_show_the_run",
    f"{_BROWSER}lost_messages_in_lab.py::test_nothing_is_sent_twice",
    f"{_BROWSER}memoom_in_lab.py::test_from_the_button_to_the_finished_cell[a loop ",
    f"{_BROWSER}memoom_in_lab.py::test_from_the_button_to_the_finished_cell[a profiled",
    f"{_BROWSER}memoom_in_lab.py::test_the_failed_cell_comes_again_changed_and_runs_to_its_end[%",
    f"{_BROWSER}narrow_page_in_lab.py::test_changes_show_their_new_values[1400]",
    f"{_BROWSER}narrow_page_in_lab.py::test_lists_show_their_whole_value[1",
    f"{_BROWSER}narrow_page_in_lab.py::test_more_knobs_names_how_many_are_changed[1400]",
    f"{_BROWSER}narrow_page_in_lab.py::test_nothing_moves_or_overlaps_while_knobs_turn[9",
    f"{_BROWSER}narrow_page_in_lab.py::test_nothing_moves_or_overlaps_while_knobs_turn[1",
    f"{_BROWSER}narrow_page_in_lab.py::test_several_gpus_by_keyboard[1400]",
    f"{_BROWSER}notebook_in_lab.py::test_first_notebook[7",
    f"{_BROWSER}seen_settings_in_lab.py::test_only_the_last_of_several",
    f"{_BROWSER}seen_settings_in_lab.py::test_what_the_kernel_sends",
    f"{_BROWSER}view_in_lab.py::test_zoom_fetches_every_row_and_double_click_shows_all[4",
    f"{_BROWSER}view_in_lab.py::test_zoom_fetches_every_row_and_double_click_shows_all[9",
    "tests/fidelity/test_many_gpus.py::test_a_published_peak_lies_in_the_range_that_timing_decides[None]",
    "tests/fidelity/test_many_gpus.py::test_a_sharded_optimizer_has_the_published_peaks",
    "tests/fidelity/test_others.py::test_a_",
    "tests/fidelity/test_others.py::test_mem_tracker_",
    "tests/fidelity/test_others.py::test_two_runs",
    "tests/integrations/test_ended_fits.py::test_both_names_of_lightning_work_in_any_order_of_imports[after",
    "tests/jupyter/test_memoom.py::test_the_failed_cell_is_put_into_the_next_one_changed_so_that_it_runs[%",
    "tests/jupyter/test_memoom.py::test_what_would_have_fitted_fits[backward]",
    "tests/jupyter/test_notebooks.py::test_claims_hold_where_convolutions_take_scratch_memory[05",
    "tests/jupyter/test_notebooks.py::test_claims_hold_where_convolutions_take_scratch_memory[06",
    "tests/jupyter/test_notebooks.py::test_solution_runs_after_the_exercise_is_solved[05",
    "tests/live/test_long_runs.py::test_memory_is_flat",
    "tests/live/test_long_runs.py::test_twenty_changes_of_settings_do_not_end_a_run_of_a_thousand_steps_on_a_full_gpu[no",
    "tests/programs/test_real_run_cuda.py::test_run_beside_unrelated_tensors_is_the_run_of_a_fresh_process[batch",
    "tests/programs/test_real_run_cuda.py::test_run_beside_unrelated_tensors_is_the_run_of_a_fresh_process[checkpoint",
    "tests/programs/test_real_run_cuda.py::test_run_beside_unrelated_tensors_is_the_run_of_a_fresh_process[lora",
    "tests/programs/test_real_run_cuda.py::test_run_beside_unrelated_tensors_is_the_run_of_a_fresh_process[mode",
    "tests/programs/test_real_run_cuda.py::test_run_beside_unrelated_tensors_is_the_run_of_a_fresh_process[offload",
    "tests/programs/test_real_run_cuda.py::test_run_beside_unrelated_tensors_is_the_run_of_a_fresh_process[update",
    "tests/ranks/test_torchrun.py::test_a_script_of_torchrun_writes_its_steps_without_a_line_of_its_own[fsdp2",
    "tests/ranks/test_torchrun.py::test_each_rank_of_torchrun_writes_its_steps_and_the_worst_comes_first[ddp-4",
    "tests/ranks/test_torchrun.py::test_each_rank_of_torchrun_writes_its_steps_and_the_worst_comes_first[fsdp2-4",
    "tests/search/test_advise.py::test_a_smaller_input_and_frozen_blocks",
    "tests/search/test_advise.py::test_advice_for_another_batch",
    "tests/search/test_advise.py::test_batch_norm_makes_micro_batches",
    "tests/search/test_advise.py::test_equal_searches",
    "tests/search/test_workers.py::test_workers_are_forks_of_one_process_where_no_gpu_is[T4]",
    "tests/test_cli_files_of_ranks.py::test_a_rank_reads_the_files",
    "tests/test_cli_run.py::test_advice_for_a_model_of_a_module",
    "tests/virtual_gpu/test_interrupts.py::test_changes_of_the_block",
    "tests/virtual_gpu/test_interrupts.py::test_stance_of_the_compiler",
    "tests/virtual_gpu/test_kernel_refusals.py::test_calls_that_the_cpu_refuses",
)
"""Slow tests that CI leaves out for their time. Of most it runs a variant: another width, kernel, knob or program. Of
the others nothing: tables of other tools and of ops, a sharded optimizer, some reloads of pages, lost messages
and interrupts, and some searches. They run by command, before a release and where what they are about changes."""
_NOT_SLOW = "not slow"
TORCH = (
    "tests/torch_internals/",
    "tests/virtual_gpu/",
    "tests/recorder/",
    "tests/knobs/test_apply.py",
    "tests/knobs/test_checkpointing.py",
    "tests/knobs/test_every_knob.py",
)
"""What uses private names of torch."""
NOT_TORCH = (
    "tests/virtual_gpu/test_golden.py",
    "tests/virtual_gpu/test_kept_files.py",
    "tests/virtual_gpu/test_nvidia_smi.py",
    "tests/virtual_gpu/test_processes.py",
    "tests/virtual_gpu/distributed/test_pipelines.py",
)
"""What is in these folders and does not: files, processes, and runs whose release is given."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no files whose tests would all be left out."""
    name = collection_path.relative_to(config.rootpath).as_posix()
    is_slow = f"{name}/".startswith(SLOW) or (name.endswith(".py") and name in SLOW)
    return True if is_slow and config.option.markexpr == _NOT_SLOW else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by the place where they stand, before `-m` chooses among them."""
    for item in items:
        if item.nodeid.startswith(SLOW) or "at_any_line" in item.name:
            item.add_marker(pytest.mark.slow)
        if item.nodeid.startswith(THOROUGH):
            item.add_marker(pytest.mark.thorough)
        if item.nodeid.startswith(TORCH) and not item.nodeid.startswith(NOT_TORCH):
            item.add_marker(pytest.mark.torch)


_count_frozen = gc.get_freeze_count


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Keep the garbage collector from scanning the tests of a process, some two million objects, again and again."""
    gc.collect()
    gc.freeze()
    # Each run of a step asks for their number, and counting them takes 20 ms.
    frozen = gc.get_freeze_count()
    gc.get_freeze_count = lambda: frozen


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """Run the tests of one file in one process, which caches shared values, and all browser tests in one process."""
    return _ByFile(config, log)


class _ByFile(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return "tests/browser" if nodeid.startswith("tests/browser/") else super()._split_scope(nodeid)


# --- other tests give way to browser tests ---------------------------------------------------------------------------

_SLOWEST = 40
_SHARED = "MEMEXPLORE_TEST_FOLDER"
_NICE = 19
"""A process of this niceness gets a processor that no other process wants."""


def pytest_configure(config: pytest.Config) -> None:
    """Leave slow tests out of a run of all tests; make a folder that all processes of pytest-xdist share."""
    # Workers parse the command line too, without what was changed here.
    if config.args_source is not config.ArgsSource.ARGS and not config.option.markexpr:
        config.option.markexpr = _NOT_SLOW
    if not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory(prefix="memexplore-tests-", ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        os.environ[_SHARED] = folder.name
        # Files with values that programs on a virtual GPU write stay in temporary folders. Those of pytest stay where
        # they are.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        os.environ["TMPDIR"] = folder.name
        tempfile.tempdir = None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Run other tests at the lowest priority while browser tests run, which measure and wait in real time."""
    if not hasattr(item.config, "workerinput") or sys.platform == "win32":
        return (yield)
    is_browser_running = Path(os.environ[_SHARED]) / "browser"
    if _is_browser(item):
        is_browser_running.touch()
    else:
        _set_priority(_NICE if is_browser_running.exists() else 0)
    try:
        return (yield)
    finally:
        if _is_browser(item) and not _is_browser(nextitem):
            is_browser_running.unlink(missing_ok=True)


def _is_browser(item: pytest.Item | None) -> bool:
    return item is not None and item.get_closest_marker("browser") is not None


def _set_priority(nice: int) -> None:
    """Set the niceness of all threads of this process and of what they start; without root it cannot fall again."""
    threads = Path("/proc/self/task")
    for thread in (int(each.name) for each in threads.iterdir()) if threads.is_dir() else (0,):
        with contextlib.suppress(PermissionError, ProcessLookupError):
            if os.getpriority(os.PRIO_PROCESS, thread) != nice:
                os.setpriority(os.PRIO_PROCESS, thread, nice)


@pytest.hookimpl(optionalhook=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print in CI which files take the time, as it has to stay below an hour."""
    if not os.environ.get("CI"):
        return
    seconds: collections.Counter[str] = collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            seconds[getattr(report, "nodeid", "").partition("::")[0]] += getattr(report, "duration", 0)
    terminalreporter.write_sep("=", f"files that take most of {sum(seconds.values()):.0f} s")
    for name, taken in seconds.most_common(_SLOWEST):
        terminalreporter.write_line(f"{taken:7.1f} s {name}")


@pytest.fixture
def every_setting_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watched runs know of every setting that it fits, without a prediction."""
    monkeypatch.setattr("memexplore.live.control.Control._is_safe", lambda self, knobs: True)


@pytest.fixture(autouse=True)
def threads_of_earlier_tests() -> None:
    """Note the threads that earlier tests have left: that one ends is nothing that this test has changed."""
    threads.EARLIER.clear()
    threads.EARLIER.update(threading.enumerate())


@pytest.fixture(autouse=True)
def forgotten_compilers() -> Iterator[None]:
    """Forget that something was compiled, after which each watched run searches the objects of all tests before."""
    yield
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is not None:
        compiler.cached_backends.clear()


# --- workers that are forked ------------------------------------------------------------------------------------------

_FRESH = {"tests/search/test_workers.py"}
"""Test files in which memexplore starts its processes as it does for users."""
_PRELOADED = ["torch._dynamo.config", "memexplore.run.search.workers"]
_ENVIRONMENT = dict(os.environ)


@pytest.fixture(autouse=True)
def forked_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fork memexplore's processes from one that has imported torch, which takes a new one some seconds.

    Not with `monkeypatch`, which would then be undone after all other fixtures of the test.
    """
    workers = sys.modules.get("memexplore.run.search.workers")
    if workers is None or sys.platform != "linux" or request.node.nodeid.partition("::")[0] in _FRESH:
        yield
        return

    def start(process: Any) -> Any:
        with mock.patch.dict(os.environ, _ENVIRONMENT, clear=True):  # not that of the first test that comes here
            multiprocessing.set_forkserver_preload(_PRELOADED)
            multiprocessing.forkserver.ensure_running()
        return workers.start_without_script(multiprocessing.context.ForkServerProcess, process)

    with mock.patch.object(workers._Process, "_Popen", staticmethod(start)):
        yield


@pytest.fixture(autouse=True)
def main_module() -> Iterator[None]:
    """Restore `__main__`: an IPython shell replaces it, and spawned processes import it."""
    before = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = before


@pytest.fixture(autouse=True)
def modes_of_the_process() -> Iterator[None]:
    """Fail the test that leaves a mode of torch or a lock, not a later test of the same process."""
    before = _modes()
    yield
    after = _modes()
    assert after == (before or after)
    assert not _is_import_lock_held(), "Python's import lock was left taken: no other thread can import any more"


@pytest.fixture
def unfrozen_objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have no object frozen, as a user's process has none."""
    monkeypatch.setattr(gc, "get_freeze_count", _count_frozen)
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


def _is_import_lock_held() -> bool:
    """Return whether the import lock is held for a second, and not just by an import of another thread."""
    for _ in range(100):
        if not _imp.lock_held():
            return False
        time.sleep(0.01)
    return True


def _modes() -> tuple[object, ...] | None:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "is_autocast_enabled"):
        return None
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    virtual = sys.modules.get("memexplore.virtual_gpu.tensors.tensor")
    gpu = None if virtual is None else virtual.DeviceState.gpu_name
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack(), torch._C._len_torch_function_stack()
    return (
        autocast,
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(),
        gpu,
        modes,
    )
