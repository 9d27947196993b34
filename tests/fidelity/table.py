"""Every case beside what the virtual GPU and three other tools say of it."""

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
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from memexplore import devices, measure
from tests.fidelity import cases, formulas, others, recorded
from tests.fidelity.cases import Case
from tests.gpu import golden
from tests.gpu.scenarios import SCENARIOS

TOOLS = ("memexplore", "MemTracker", "formula", "torchinfo")
LEGEND = """\
Difference from the measured value in brackets; a dash where a tool has no answer. An out-of-memory row is right where
the tool says more than the card gives. memexplore is compared to the printed digit, a recording to the byte.
- MemTracker: the peak of its total, on fake CPU tensors (fake CUDA tensors need a CUDA build of torch), so
  without rounding to 512 bytes, and with the CPU's lists of ops under autocast: einsum is on none, so a bf16 forward
  keeps no bf16 copies of the weights, and exp and sum stay in bf16, which CUDA runs in fp32.
- formula: weights + gradients + AdamW + the activations of Korthikanti et al. 2022 for a training step, weights +
  logits for a forward pass; for one operation parameters, inputs and outputs, twice where they have a gradient; for
  attention Q, K, V, the softmax's result and the output, and gradients.
- torchinfo: its estimated total size; it knows no optimizer, and only modules: a dash where a script calls none."""


class Row(NamedTuple):
    """A case and what each of TOOLS says: bytes, infinite for out of memory, None where it has no answer."""

    name: str
    torch: str
    unit: str
    measured: float
    text: str
    """What was measured, as it was printed."""
    capacity: int
    said: tuple[float | None, ...]
    reasons: tuple[str, ...] = ()


def everything() -> Iterator[Case]:
    """Published rows, recordings, and the golden recordings of tests/data where there are any."""
    if cases.PUBLISHED.exists():
        yield from cases.published()
        yield from (_recording(case) for case in recorded.RECORDED)
    yield from golden_cases()


def _recording(case: recorded.Recorded) -> Case:
    def formula(found: others.Subject) -> float:
        if found.module is None:
            return formulas.attention(8, 4096, 16, "max_memory_allocated fwd+bwd")
        kind, context = ("step", 512) if found.optimizer is not None else ("forward", 2048)
        return cases._lm_formula(kind, context, torch.bfloat16, found)

    size = measure.peak(recorded.measured(case))[0]
    name = f"recording {case.file.partition('.')[0]}"
    return Case(name, case.gpu, case.torch, str(size), "B", functools.partial(recorded.peak, case), formula)


def golden_cases() -> Iterator[Case]:
    """The scenarios of tests/data's golden files that ended as they should."""
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
    _, outputs = others.called(found)
    return formulas.training(found.module, outputs, found.optimizer)


def row(case: Case) -> Row:
    """Run a case under every tool."""
    unit = cases.UNITS.get(case.unit, 1)
    predicted = case.predicted()
    ours = float("inf") if predicted == "OOM" else float(predicted) * (unit if case.measured != "OOM" else cases.GIB)
    script = case.short or case.run
    said: list[float | None] = [ours]
    reasons = []
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            said.append(others.mem_tracker(script))
        except Exception as error:
            reasons.append(_reason(f"MemTracker, {case.name}", error))
            said.append(None)
        gc.collect()
        try:
            with others.on_fake_cpu():
                found = others.subject(script)
                said += [case.formula(found), others.summarised(found)]
                del found
        except Exception as error:
            reasons.append(_reason(f"formula and torchinfo, {case.name}", error))
            said += [None] * (len(TOOLS) - len(said))
        gc.collect()
    measured = float("inf") if case.measured == "OOM" else float(case.measured) * unit
    capacity = devices.find(case.gpu).under(case.torch).capacity
    text = case.measured if case.measured == "OOM" else f"{case.measured} {case.unit}"
    return Row(case.name, case.torch, case.unit, measured, text, capacity, tuple(said), tuple(reasons))


def _reason(of: str, error: Exception) -> str:
    return f"{of}: {type(error).__name__}: {next(iter(str(error).splitlines()), '')[:120]}"


def error(each: Row, tool: int) -> float | None:
    """A tool's relative error, in per cent; None where there is none: no answer, or out of memory."""
    said = each.said[tool]
    if said is None or said == float("inf") or each.measured == float("inf"):
        return None
    return 100 * (said - each.measured) / each.measured


def runs_out(each: Row, tool: int) -> bool:
    """Whether a tool says that a case does not fit: what it says is more than the allocator can get of the card."""
    said = each.said[tool]
    return said is not None and said > each.capacity


def _cell(each: Row, tool: int) -> str:
    said = each.said[tool]
    if said is None:
        return "—"
    if said == float("inf"):
        return "OOM (same)" if each.text == "OOM" else "OOM (wrong)"
    if each.text == "OOM":
        return f"{said / cases.GIB:.1f} GiB ({'does not fit: right' if runs_out(each, tool) else 'fits: wrong'})"
    size = cases.printed(said, each.unit) if each.unit != "MB" else f"{said / cases.MIB:.6g}"
    return f"{size} ({_per_cent(error(each, tool))})"


def _per_cent(difference: float) -> str:
    if difference == 0:
        return "0"
    if abs(difference) < 0.005:
        return "< 0.01 %"
    return f"{difference:+.2f} %" if abs(difference) < 10 else f"{difference:+.0f} %"


def markdown(rows: Sequence[Row]) -> str:
    """The table, its summary rows and its legend."""
    lines = ["| case | torch | measured | " + " | ".join(TOOLS) + " |", "|---" * (len(TOOLS) + 3) + "|"]
    for each in rows:
        cells = [_cell(each, tool) for tool in range(len(TOOLS))]
        lines.append(f"| {each.name} | {each.torch} | {each.text} | {' | '.join(cells)} |")
    lines += summary(rows)
    return "\n".join([*lines, "", LEGEND, *(f"- {reason}" for each in rows for reason in each.reasons)])


def summary(rows: Sequence[Row]) -> list[str]:
    """Median and worst absolute error of each tool over the rows that it answers, and outcomes foreseen."""
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


def _numbered(number: int) -> Row:
    torch.set_num_threads(1)
    for at, case in enumerate(everything()):
        if at == number:
            return row(case)
    raise IndexError(number)


def computed(matching: str = "") -> list[Row]:
    """The rows whose name contains a text, each computed in one of as many processes as there are cores."""
    names = {number: case.name for number, case in enumerate(everything()) if matching in case.name}
    numbers = list(names)
    spawn = multiprocessing.get_context("spawn")
    rows: dict[int, Row] = {}
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), spawn, max_tasks_per_child=None) as pool:
        # Those that take longest first: the large model's training steps, then its forward passes.
        longest = sorted(
            numbers, key=lambda number: ("lm-xl" in names[number]) * (1 + ("forward" not in names[number]))
        )
        waiting = {pool.submit(_numbered, number): number for number in reversed(longest)}
        for done in concurrent.futures.as_completed(waiting):
            rows[waiting[done]] = done.result()
            print(f"{len(rows)} of {len(numbers)}", end="\r", file=sys.stderr, flush=True)
    return [rows[number] for number in numbers]
