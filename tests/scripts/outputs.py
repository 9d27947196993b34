"""Compare the lines that a script prints on a virtual GPU with those that it prints on the CPU.

Counts, sizes, names and the order of the lines must be the same; numbers with a decimal point depend on values that a
virtual GPU does not compute, and are left out unless the run computed them (`--values real`).
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from tests.scripts.script_list import Script

FILE = Path(__file__).with_name("outputs.json")

# A run without the value prints `virtual`, with `%` and after `float` 1.0000; Trainer prints numbers as quoted texts.
_FRACTION = re.compile(
    r"\s*[-+]?(\d+\.\d*(e[-+]?\d+)?|\d+e[-+]?\d+|\bnan\b|\binf\b|\bvirtual\b|(?<=['+-])\d+(?='))%?", re.IGNORECASE
)
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d([.,]\d+)?")
_DEVICE = re.compile(r"\bcuda(:0)?\b")


def lines(output: str, exact: bool = False) -> list[str]:
    """Return the lines of an output without devices and times of day, and without fractions unless `exact`.

    >>> lines("2026-11-22 07:50:41,144 step 3 loss 0.25 on cuda:0")
    ['step 3 loss # on cpu']
    """
    found = [_DEVICE.sub("cpu", _MOMENT.sub("", line)).strip() for line in re.split(r"[\r\n]+", output)]
    return [line if exact else _FRACTION.sub(" #", line) for line in found if line]


def missing(expected: list[str], output: list[str]) -> list[str]:
    """Return the expected lines that an output lacks, in order; the output may have other lines between them.

    >>> missing(["a", "b", "c"], ["a", "warning", "c"])
    ['b']
    """
    lost, position = [], 0
    for line in expected:
        # A line may follow unfinished text of stderr.
        found = next((i for i in range(position, len(output)) if output[i].endswith(line)), None)
        if found is None:
            lost.append(line)
        else:
            position = found + 1
    return lost


def digest(script: Script) -> str:
    """Return the digest of a script's text, which tells whether kept lines are those of this text."""
    return hashlib.sha256(script.path.read_bytes()).hexdigest()[:16]


def kept(script: Script) -> list[str] | None:
    """Return the lines that the script printed on the CPU, or None if it has changed since or was not run there."""
    entry = _read().get(script.name)
    return lines("\n".join(entry["lines"])) if entry is not None and entry["digest"] == digest(script) else None


def keep(script: Script, printed: list[str]) -> None:
    """Keep the lines that a script printed on the CPU, as `lines` returns them."""
    entries = _read()
    entries[script.name] = {"digest": digest(script), "lines": printed}
    FILE.write_text(json.dumps(dict(sorted(entries.items())), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _read() -> dict:
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
