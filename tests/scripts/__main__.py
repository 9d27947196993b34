"""`python -m tests.scripts` runs the scripts and writes docs/scripts.md; with parts of names, it only prints."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.scripts import outputs, table
from tests.scripts.runs import Run, on_cpu, on_virtual_gpu
from tests.scripts.script_list import LARGE, RANKS, Script, scripts

PAGE = Path(__file__).parents[2] / "docs" / "scripts.md"


def main() -> int:
    """Run the chosen scripts, print a line for each, and write the page if all were run; 0 if all passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.scripts", description=__doc__)
    parser.add_argument("part", nargs="*", help="run only scripts whose name contains PART, and write no page")
    parser.add_argument("--gpu", default="T4")
    parser.add_argument("--values", help="as in memexplore run; real compares losses too")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--show", action="store_true", help="print the output of scripts that do not pass")
    options = parser.parse_args()
    chosen = scripts(options.part)
    lacking = {name for script in chosen for name in script.missing}
    if lacking:
        parser.error(f"not installed: {', '.join(sorted(lacking))}; pip install -r tests/scripts/requirements.txt")
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = []
        for row in pool.map(lambda script: _row(script, options), chosen):
            rows.append(row)
            print(_line(row), flush=True)
            if options.show and not row.passed:
                print("\n".join(row.different) or row.run.output[-6000:], flush=True)
    print(f"{sum(row.passed for row in rows)} of {len(rows)} run as on a CPU")
    if not options.part:
        PAGE.write_text(table.markdown(rows, options.gpu, options.values), encoding="utf-8")
    return 0 if all(row.passed for row in rows) else 1


def _row(script: Script, options: argparse.Namespace) -> table.Row:
    exact = options.values == "real"
    expected = None
    if script.name not in LARGE | RANKS:
        expected = None if exact else outputs.kept(script)
        if expected is None:
            cpu = on_cpu(script, options.timeout)
            if cpu.outcome != "ok":
                return table.Row(script, Run("error", f"on the CPU: {cpu.output}", cpu.seconds, {}), 0, [])
            outputs.keep(script, cpu.output)
            expected = outputs.lines(cpu.output, exact)
    run = on_virtual_gpu(script, options.gpu, options.values, options.timeout)
    lost = outputs.missing(expected or [], outputs.lines(run.output, exact))
    return table.Row(script, run, None if expected is None else len(expected), lost)


def _line(row: table.Row) -> str:
    peak = row.run.summary.get("peak_allocated", 0)
    text = f"{row.script.name:55} {row.run.outcome:7} {peak:>13,} B {row.run.seconds:5.1f} s"
    return text if row.passed else f"{text}  {table.reason(row)[:300]}"


if __name__ == "__main__":
    sys.exit(main())
