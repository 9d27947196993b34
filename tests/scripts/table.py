"""The runs of all scripts as Markdown tables, docs/scripts.md."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from typing import NamedTuple

from memexplore.units import size_text
from tests.scripts.runs import Run
from tests.scripts.script_list import LARGE, RANKS, Script, version


class Row(NamedTuple):
    """A script, its run on the virtual GPU, the number of lines that it prints on the CPU and those that differ."""

    script: Script
    run: Run
    expected: int | None
    different: list[str]

    @property
    def passed(self) -> bool:
        """Whether it ran to its end, used the GPU and printed the lines of the CPU run."""
        return self.run.outcome == "fits" and self.run.summary.get("peak_allocated", 0) > 0 and not self.different


_TOP = """# Scripts that run

`python -m tests.scripts` runs the {count} scripts below unmodified with `memexplore run SCRIPT --gpu {gpu}` and writes
this page. They are ordinary scripts, most of them adapted from examples of the library that names their folder, with
small models and generated data: nothing is downloaded. {passed} of {count} run as on a CPU.

- **peaks**: predictions for one {gpu}. {ranks} run as rank 0 of the world size that their environment variables give.
- **time** of the whole process with its imports, on a machine with two cores.
- **notes**: the number of assumptions.
- **lines** that the script prints on the virtual GPU, of those that it prints when plain Python runs it on the CPU:
  names, counts, sizes and lengths must be the same and in the same order. Numbers with a decimal point are left out,
  because {left_out}. A dash: the script is too large for a CPU, or one rank of several.

Environment: Python {python}, torch {torch}, and the libraries of `tests/scripts/requirements.txt`:

```bash
pip install -e ".[test]" -r tests/scripts/requirements.txt && python -m tests.scripts
```
"""


def markdown(rows: list[Row], gpu: str, values: str | None) -> str:
    """Return the page: a head, and one table per folder."""
    left_out = {
        None: "values that depend on random weights are not computed",
        "none": "no values are computed",
        "real": "(not with `--values real`, as here: they are the same, too)",
    }.get(values, "values that depend on random weights are not computed")
    top = _TOP.format(
        count=len(rows),
        passed=sum(row.passed for row in rows),
        gpu=gpu,
        ranks=", ".join(f"`{name}`" for name in sorted(RANKS)),
        left_out=left_out,
        python=platform.python_version(),
        torch=version("torch"),
    )
    parts = [top]
    for folder in sorted({row.script.path.parent.name for row in rows}):
        own = [row for row in rows if row.script.path.parent.name == folder]
        parts.append(f"\n## {folder}\n\n{_versions(own)}\n\n{_table(own)}")
    failed = [row for row in rows if not row.passed]
    if failed:
        parts.append(
            "\n## What does not run\n\n" + "\n".join(f"- `{row.script.name}`: {reason(row)}" for row in failed) + "\n"
        )
    return "".join(parts)


def reason(row: Row) -> str:
    """Return why a row has not passed, in one line."""
    if row.run.outcome != "fits":
        return row.run.error or "out of memory"
    if not row.run.summary.get("peak_allocated", 0):
        return "nothing ran on the GPU"
    return f"other lines than on the CPU: {' · '.join(row.different[:2])}"


def _versions(rows: Iterable[Row]) -> str:
    names = sorted({library for row in rows for library in row.script.libraries} - {"numpy", "torch"})
    return "Libraries: " + ", ".join(f"{name} {version(name)}" for name in ("torch", *names)) + "."


def _table(rows: list[Row]) -> str:
    head = (
        "| script | status | peak allocated | peak reserved | time | notes | lines |\n|---|---|--:|--:|--:|--:|--:|\n"
    )
    return head + "".join(f"| {' | '.join(_cells(row))} |\n" for row in rows)


def _cells(row: Row) -> list[str]:
    result = row.run.summary
    if row.passed:
        status = "runs"
    else:
        status = {"fits": "**differs**", "oom": "out of memory", "timeout": "**too slow**"}.get(
            row.run.outcome, "**stops**"
        )
    notes = len(result["notes"]) if "notes" in result else "–"
    if row.expected is None:
        assert row.script.name in LARGE | RANKS
        lines = "–"
    else:
        lines = f"{row.expected - len(row.different)}/{row.expected}"
    sizes = [size_text(result[key]) if result.get(key) else "–" for key in ("peak_allocated", "peak_reserved")]
    return [f"`{row.script.path.name}`", status, *sizes, f"{row.run.seconds:.0f} s", str(notes), lines]
