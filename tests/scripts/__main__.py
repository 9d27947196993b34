"""`python -m tests.scripts [PART ...]` runs all scripts, or those with a PART in their name, and writes the page."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from tests.scripts import outputs, table
from tests.scripts.runs import Run, on_cpu, on_virtual_gpu
from tests.scripts.script_list import LARGE, RANKS, Script, scripts

_LOCK = Lock()


def main() -> int:
    """Run the chosen scripts, print a line for each, and renew their rows of the page; 0 if all passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.scripts", description=__doc__)
    parser.add_argument("part", nargs="*", help="run only scripts whose name contains PART")
    parser.add_argument("--gpu", default="T4")
    parser.add_argument(
        "--values", help="as in memexplore run; `real` compares losses, too, and leaves the page as it is"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--show", action="store_true", help="print the output of scripts that do not pass")
    parser.add_argument("--left", action="store_true", help="run only scripts that have not passed in the last run")
    options = parser.parse_args()
    good_before = {name for name, found in table.read().items() if table.passed(found)} if options.left else set()
    chosen = [script for script in scripts(options.part) if script.name not in good_before]
    lacking = {name for script in chosen for name in script.missing}
    if lacking:
        parser.error(f"not installed: {', '.join(sorted(lacking))}; pip install -r tests/scripts/requirements.txt")
    with ThreadPoolExecutor(options.jobs) as pool:
        good = sum(pool.map(lambda script: _run(script, options), chosen))
    print(f"{good} of {len(chosen)} run as on a CPU")
    return 0 if good == len(chosen) else 1


def _run(script: Script, options: argparse.Namespace) -> bool:
    exact = options.values == "real"
    expected = None if exact else outputs.kept(script)
    run = None
    if expected is None and script.name not in LARGE | RANKS:
        cpu = on_cpu(script, options.timeout)
        if cpu.outcome == "ok":
            expected = outputs.lines(cpu.output, exact)
        else:
            run = Run("error", f"{cpu.output}\non the CPU: {cpu.error}", cpu.seconds, {})
    run = run or on_virtual_gpu(script, options.gpu, options.values, options.timeout)
    lost = outputs.missing(expected or [], outputs.lines(run.output, exact))
    found = table.result(script, run, None if expected is None else len(expected), lost)
    good = table.passed(found)
    text = f"{script.name:55} {run.outcome:7} {found['peak_allocated']:>13,} B {run.seconds:5.1f} s"
    shown = f"\n{run.output[-6000:]}\nnot printed:\n" + "\n".join(lost) if options.show and not good else ""
    with _LOCK:
        if not exact:
            if expected is not None:
                outputs.keep(script, expected)
            table.write(table.read() | {script.name: found}, options.gpu)
        print(text if good else f"{text}  {table.reason(found)[:300]}{shown}", flush=True)
    return good


if __name__ == "__main__":
    sys.exit(main())
