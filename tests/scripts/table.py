"""The results of all scripts, and their Markdown page docs/scripts.md.

`results.json` holds one result per script; a run of some scripts replaces theirs only. The page is a function of it.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from memexplore.text.units import size_text
from tests.scripts.outputs import digest
from tests.scripts.runs import Run
from tests.scripts.script_list import RANKS, Script, scripts, version

FILE = Path(__file__).with_name("results.json")
PAGE = Path(__file__).parents[2] / "docs" / "scripts.md"

Result = dict[str, Any]
"""`outcome`, `error`, `seconds`, `peak_allocated`, `peak_reserved`, `notes` (their number, or None), `expected` (the
number of lines on the CPU, or None), `different` (those of them that were not printed), `versions`, `digest`."""


def result(script: Script, run: Run, expected: int | None, different: list[str]) -> Result:
    """Return the result of one run."""
    return {
        "digest": digest(script),
        "outcome": run.outcome,
        "error": run.error[:300],
        "seconds": round(run.seconds),
        "peak_allocated": run.summary.get("peak_allocated", 0),
        "peak_reserved": run.summary.get("peak_reserved", 0),
        "notes": len(run.summary["notes"]) if "notes" in run.summary else None,
        "expected": expected,
        "different": different,
        "versions": {name: version(name) for name in script.libraries},
        "python": platform.python_version(),
    }


def passed(found: Result) -> bool:
    """Return whether a run came to its end, used the GPU and printed the lines of the run on the CPU."""
    return found["outcome"] == "fits" and found["peak_allocated"] > 0 and not found["different"]


def reason(found: Result) -> str:
    """Return why a run has not passed, in one line."""
    if found["outcome"] != "fits":
        return found["error"] or "out of memory"
    if not found["peak_allocated"]:
        return "nothing ran on the GPU"
    return f"does not print {' · '.join(found['different'][:2])}"


def read() -> dict[str, Result]:
    """Return the results by script, without those of scripts that are gone or have changed since."""
    kept = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return {s.name: kept[s.name] for s in scripts() if s.name in kept and kept[s.name]["digest"] == digest(s)}


def write(results: dict[str, Result], gpu: str) -> None:
    """Write the results and the page."""
    text = json.dumps(dict(sorted(results.items())), indent=1, ensure_ascii=False)
    FILE.write_text(text + "\n", encoding="utf-8")
    PAGE.write_text(markdown(results, gpu), encoding="utf-8")


_TOP = """# Scripts that run

`python -m tests.scripts` runs the {count} scripts of `tests/scripts/` unmodified with `memexplore run SCRIPT --gpu
{gpu}` and writes this page. They are ordinary scripts, most of them adapted from examples of the library that names
their folder, with small models and generated data: nothing is downloaded. The
tests run 20 of them, one for each way in which a program is special. **{passed} of {count} run as on a CPU.**

- **peaks**: predictions for one {gpu}. {ranks} run as rank 0 of the world size that their environment variables give.
- **time** of the whole process with its imports, on a busy machine with two cores.
- **notes**: the number of assumptions that were made where a value was needed and not known.
- **lines** that the script prints on the virtual GPU, of those that it prints when plain Python runs it on the CPU:
  names, counts, sizes and lengths must be the same, in the same order. Numbers with a decimal point are left out,
  because values that depend on random weights are not computed by default: they print as `virtual`, with `%` and
  after `float(x)` as 1. A dash: the script is too large for a CPU,
  or one rank of several.

Environment: Python {python}, torch {torch}, the extra `[test]` and `tests/scripts/requirements.txt`.

<!-- not run: needs forty libraries -->
```bash
python -m venv scripts && scripts/bin/pip install -e ".[test]" -r tests/scripts/requirements.txt
scripts/bin/python -m tests.scripts            # all; with parts of names, only these: python -m tests.scripts pyg timm
scripts/bin/python -m tests.scripts --values real plain_torch   # losses are compared, too
```
"""


def markdown(results: dict[str, Result], gpu: str) -> str:
    """Return the page: a head, one table per folder, and the reasons of what does not run."""
    top = _TOP.format(
        count=len(results),
        passed=sum(map(passed, results.values())),
        gpu=gpu,
        ranks=", ".join(f"`{name.rpartition('/')[2]}`" for name in sorted(RANKS)),
        python=platform.python_version(),
        torch=version("torch"),
    )
    parts = [top]
    for folder in sorted({name.partition("/")[0] for name in results}):
        own = {name: found for name, found in results.items() if name.partition("/")[0] == folder}
        parts.append(f"\n## {folder}\n\n{_versions(own.values())}\n\n{_table(own)}")
    failed = [f"- `{name}`: {reason(found)}\n" for name, found in sorted(results.items()) if not passed(found)]
    if failed:
        parts.append("\n## What does not run\n\n" + "".join(failed))
    return "".join(parts)


def _versions(found: Iterable[Result]) -> str:
    versions = {name: number for one in found for name, number in one["versions"].items()}
    names = ["torch", *sorted(versions.keys() - {"torch", "numpy"})]
    return ", ".join(f"{name} {versions[name]}" for name in names)


def _table(results: dict[str, Result]) -> str:
    head = (
        "| script | status | peak allocated | peak reserved | time | notes | lines |\n|---|---|--:|--:|--:|--:|--:|\n"
    )
    return head + "".join(f"| {' | '.join(_cells(name, found))} |\n" for name, found in sorted(results.items()))


def _cells(name: str, found: Result) -> list[str]:
    status = {"fits": "**differs**", "oom": "out of memory", "timeout": "**too slow**"}.get(
        found["outcome"], "**stops**"
    )
    status = "runs" if passed(found) else status
    sizes = [size_text(found[key]) if found[key] else "–" for key in ("peak_allocated", "peak_reserved")]
    notes = "–" if found["notes"] is None else str(found["notes"])
    expected = found["expected"]
    lines = "–" if expected is None else f"{expected - len(found['different'])}/{expected}"
    return [f"`{name.rpartition('/')[2]}`", status, *sizes, f"{found['seconds']} s", notes, lines]
