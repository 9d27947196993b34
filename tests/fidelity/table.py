"""The fidelity table: every measured case, and the answers of the virtual GPU and of three other tools."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import gc
import io
import multiprocessing
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from memexplore.analysis.curves import peak
from memexplore.hardware import catalogue
from tests.fidelity import cases, compared, formulas, others, recorded, recorded_models, recorded_training
from tests.fidelity.cases import Case
from tests.gpu import golden
from tests.gpu.scenarios import SCENARIOS

TOOLS = ("memexplore", "MemTracker", "formula", "torchinfo")
LEGEND = """\
Difference from the measured value in brackets; a dash where a tool has no answer. An out-of-memory row is right if
the tool's answer exceeds what the GPU gives. memexplore is compared to the printed digit, a recording to the byte.
- MemTracker: the peak of its total, on fake CPU tensors (fake CUDA tensors need a CUDA build of torch), so
  without rounding to 512 bytes, and with the CPU's lists of ops under autocast: einsum is on none, so a bf16 forward
  keeps no bf16 copies of the weights, and exp and sum stay in bf16, which CUDA runs in fp32.
  Tensors that a script keeps on the CPU count too.
- formula: weights + gradients + AdamW + the activations of Korthikanti et al. 2022 for a training step, without
  gradients and AdamW for a forward pass that keeps its graph, weights + logits for one that does not; for one operation
  parameters, inputs and outputs, twice where they have a gradient; for attention Q, K, V, the softmax's result and the
  output, and gradients; for other networks parameters, inputs and what their layers return.
- torchinfo: its estimated total size; it knows no optimizer, and only one module: a dash if a script calls none."""
RECORDINGS = {
    f"recording {case.name}": case
    for case in (*recorded.RECORDED, *recorded_training.RECORDED, *recorded_models.RECORDED, recorded_models.LATE)
}
"""Every compared recording, by the name of its row."""
NOTES = {
    "recording small-lm-forward-seq100": "three forward passes and no backward pass: the hooks of MemTracker hold the "
    "graph of each to the end",
    "recording small-lm-forward-seq200-bf16": "as small-lm-forward-seq100; its answer varies by some MiB with the "
    "runs of Python's garbage collector",
    "recording cnn-torch21-no-time": "MemTracker puts a hook on every parameter, and frozen ones, as here, refuse it",
    "recording conv3d-inference-empty-cache": "four models in turn, and the largest state is changed by layers of a "
    "fifth; MemTracker's difference is the slide and its resized copy, which are on the CPU",
}
"""Row -> why a tool has no answer, or one that is too high."""


class Row(NamedTuple):
    """A case and the answer of each of TOOLS: bytes, infinite for out of memory, None for no answer."""

    name: str
    torch: str
    unit: str
    measured: float
    text: str
    """The measured value as it was printed."""
    capacity: int
    answers: tuple[float | None, ...]
    reasons: tuple[str, ...] = ()
    comparison: compared.Comparison | None = None


def all_cases() -> Iterator[Case]:
    """Yield the published rows, the recordings, and the golden recordings in tests/data."""
    yield from cases.published()
    yield from (_recording(name, case) for name, case in RECORDINGS.items())
    yield from golden_cases()


def _recording(name: str, case: recorded.RecordedRun) -> Case:
    size = peak(recorded.measured(case))[0]
    run = functools.partial(recorded.peak, case)
    short = functools.partial(recorded.peak, case._replace(run=_without_others(case.run)))
    return Case(name, case.gpu, case.torch, str(size), "B", run, _estimated, short=short, os=case.os)


def _without_others(run: Callable) -> Callable:
    """Return a recorded run without the earlier forward passes of other models.

    These leave segments and cuBLAS's workspace behind, which the other tools do not model.
    """
    if isinstance(run, functools.partial) and "forwards" in run.keywords:
        return functools.partial(run.func, *run.args, **{**run.keywords, "forwards": ()})
    return run


def _estimated(found: others.Subject) -> float:
    """Return the estimate for a recorded script: a language model, a network or, without a module, attention."""
    if found.module is None:
        return formulas.attention(8, 4096, 16, "max_memory_allocated fwd+bwd")
    if not hasattr(found.module, "layers"):
        return formulas.network(found.module, found.inputs, others.outputs_of(found)[1])
    shape = formulas.shape(found.module, found.inputs[0], 4 if found.autocast is None else found.autocast.itemsize)
    parameters = sum(parameter.numel() for parameter in found.module.parameters())
    graph = formulas.Run.GRAPH if found.gradients else formulas.Run.FORWARD
    return formulas.language_model(parameters, shape, graph if found.optimizer is None else formulas.Run.STEP)


def golden_cases() -> Iterator[Case]:
    """Yield the scenarios of the golden files in tests/data, except failed ones."""
    for path in sorted(golden.FOLDER.glob("golden_*.json.gz")):
        run = golden.read(path)
        gpu, release = run["gpu"]["name"], run["versions"]["torch"].split("+")[0]
        for name, scenario in run["scenarios"].items():
            if scenario["outcome"] == "failed":
                continue
            measured = "OOM" if scenario["outcome"] == "oom" else str(scenario["peak_allocated"])
            what = functools.partial(_scenario, name)
            text = f"golden {name} on {gpu.removeprefix('NVIDIA ')}"
            yield Case(text, gpu, release, measured, "B", what, _any_model, SCENARIOS[name].allocator)


def _scenario(name: str) -> float:
    torch.cuda.reset_peak_memory_stats()
    SCENARIOS[name].function()
    return torch.cuda.max_memory_allocated()


def _any_model(found: others.Subject) -> float | None:
    if found.module is None:
        return None
    _, outputs = others.outputs_of(found)
    return formulas.training(found.module, outputs, found.optimizer)


def row(case: Case) -> Row:
    """Run a case with every tool."""
    unit = cases.UNITS.get(case.unit, 1)
    predicted = case.predicted()
    ours = float("inf") if predicted == "OOM" else float(predicted) * (unit if case.measured != "OOM" else cases.GIB)
    script = case.short or case.run
    answers: list[float | None] = [ours]
    reasons: list[str] = []

    def answer(tool: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:
            reasons.append(_reason(f"{tool}, {case.name}", error))
            return None
        finally:
            gc.collect()

    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        answers.append(answer("MemTracker", lambda: others.mem_tracker(script)))
        with others.on_fake_cpu():
            found = answer("formula and torchinfo", lambda: others.subject(script))
            for tool, function in (("formula", case.formula), ("torchinfo", others.torchinfo_total)):
                answers.append(None if found is None else answer(tool, functools.partial(function, found)))
            del found
        gc.collect()
    measured = float("inf") if case.measured == "OOM" else float(case.measured) * unit
    gpu = catalogue.find(case.gpu) if isinstance(case.gpu, str) else case.gpu
    capacity = gpu.for_release(case.torch).capacity
    text = case.measured if case.measured == "OOM" else f"{case.measured} {case.unit}"
    comparison = compared.compare_run(RECORDINGS[case.name]) if case.name in RECORDINGS else None
    reasons += [f"{case.name}: {note}." for note in _notes(case.name, ours - measured, comparison)]
    return Row(case.name, case.torch, case.unit, measured, text, capacity, tuple(answers), tuple(reasons), comparison)


def _notes(name: str, difference: float, comparison: compared.Comparison | None) -> Iterator[str]:
    """Yield explanations for the row of a recording."""
    if name in NOTES:
        yield NOTES[name]
    if comparison is None:
        return
    ours, theirs = comparison.allocated
    if comparison.absorbed_before:
        yield (
            f"the file understates its own peak by {comparison.absorbed_before} B, in blocks that it does not record; "
            f"beyond them memexplore differs by {difference - comparison.absorbed_before:.0f} B"
        )
    elif difference != ours - theirs:
        yield f"with the recorded segment addresses memexplore differs by {ours - theirs} B"
    elif difference and comparison.requested[0] == comparison.requested[1]:
        yield "the difference is in blocks larger than requested: the peak requested is the same"


def _reason(of: str, error: Exception) -> str:
    return f"{of}: {type(error).__name__}: {next(iter(str(error).splitlines()), '')[:120]}"


def error(each: Row, tool: int) -> float | None:
    """Return a tool's relative error in per cent; None without an answer or for out of memory."""
    size = each.answers[tool]
    if size is None or size == float("inf") or each.measured == float("inf"):
        return None
    return 100 * (size - each.measured) / each.measured


def runs_out(each: Row, tool: int) -> bool:
    """Return whether a tool's answer exceeds the memory of the GPU that the allocator can get."""
    size = each.answers[tool]
    return size is not None and size > each.capacity


def _cell(each: Row, tool: int) -> str:
    size = each.answers[tool]
    if size is None:
        return "—"
    if size == float("inf"):
        return "OOM (same)" if each.text == "OOM" else "OOM (wrong)"
    if each.text == "OOM":
        return f"{size / cases.GIB:.1f} GiB ({'does not fit: right' if runs_out(each, tool) else 'fits: wrong'})"
    text = cases.printed(size, each.unit) if each.unit != "MB" else f"{size / cases.MIB:.6g}"
    return f"{text} ({_per_cent(error(each, tool))})"


def _per_cent(difference: float) -> str:
    if difference == 0:
        return "0"
    if abs(difference) < 0.005:
        return "< 0.01 %"
    return f"{difference:+.2f} %" if abs(difference) < 10 else f"{difference:+.0f} %"


def markdown(rows: Sequence[Row]) -> str:
    """Return the table with summary rows and legend, then the table of the recordings, request by request."""
    lines = ["| case | torch | measured | " + " | ".join(TOOLS) + " |", "|---" * (len(TOOLS) + 3) + "|"]
    for each in rows:
        cells = [_cell(each, tool) for tool in range(len(TOOLS))]
        lines.append(f"| {each.name} | {each.torch} | {each.text} | {' | '.join(cells)} |")
    lines += summary(rows)
    lines += ["", LEGEND, *(f"- {reason}" for each in rows for reason in each.reasons)]
    found = [each.comparison for each in rows if each.comparison is not None]
    return "\n".join([*lines, "", compared.markdown(found)] if found else lines)


def summary(rows: Sequence[Row]) -> list[str]:
    """Return median and worst absolute error of each tool over the rows that it answers, and its predicted outcomes."""
    sized = [each for each in rows if each.text != "OOM"]
    over = [each for each in rows if each.text == "OOM"]
    cells: dict[str, list[str]] = {"median": [], "worst": [], "answered": [], "oom": []}
    for tool in range(len(TOOLS)):
        errors = [abs(found) for each in sized if (found := error(each, tool)) is not None]
        cells["median"].append(f"{statistics.median(errors):.2f} %" if errors else "—")
        cells["worst"].append(f"{max(errors):.2f} %" if errors else "—")
        cells["answered"].append(f"{len(errors)}")
        cells["oom"].append(f"{sum(runs_out(each, tool) for each in over)}")
    names = {
        "median": ("median absolute error", ""),
        "worst": ("worst absolute error", ""),
        "answered": ("rows answered", f"{len(sized)}"),
        "oom": ("out of memory foreseen", f"{len(over)}"),
    }
    return [f"| **{text}** | | {count} | {' | '.join(cells[key])} |" for key, (text, count) in names.items()]


@functools.cache
def _all() -> tuple[Case, ...]:
    return tuple(all_cases())


def _numbered(number: int) -> Row:
    torch.set_num_threads(1)
    return row(_all()[number])


SLOW = (("lm-xl", "step"), ("train", ""), ("lm-", ""))
"""Texts in the names of the slowest cases, slowest first."""


def _start_order(name: str) -> int:
    return next((order for order, texts in enumerate(SLOW) if all(text in name for text in texts)), len(SLOW))


def computed(matching: str = "") -> list[Row]:
    """Compute the rows whose name contains a text, in one process for each core."""
    names = {number: case.name for number, case in enumerate(_all()) if matching in case.name}
    spawn = multiprocessing.get_context("spawn")
    rows: dict[int, Row] = {}
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), spawn, max_tasks_per_child=None) as pool:
        longest = sorted(names, key=lambda number: _start_order(names[number]))
        futures = {pool.submit(_numbered, number): number for number in longest}
        for done in concurrent.futures.as_completed(futures):
            rows[futures[done]] = done.result()
            print(f"{len(rows)} of {len(names)}", end="\r", file=sys.stderr, flush=True)
    return [rows[number] for number in names]
