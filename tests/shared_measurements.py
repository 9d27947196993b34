"""Files that people share: `python -m tests.shared_measurements FOLDER` keeps them and prints the table of the docs.

`memexplore compare --share` writes such a file. The known ones are in `tests/data/shared_measurements.json`; a file
that is no measurement, or of another format, is named and left out.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

from memexplore.analysis.comparison import Peaks
from memexplore.run.shared_measurement import FORMAT

KEPT = pathlib.Path(__file__).parent / "data" / "shared_measurements.json"


def read(path: pathlib.Path) -> dict[str, Any]:
    """Return a shared measurement. Raises ValueError for another file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["memexplore measurement"] != FORMAT:
            raise ValueError(f"{path} has format {content['memexplore measurement']}, this reads {FORMAT}")
        row(content)
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError(f"{path} is no file of memexplore compare --share") from None
    return content  # type: ignore[no-any-return]


def row(content: dict[str, Any]) -> str:
    """Return the row of the table."""
    versions = content["versions"]
    peaks = [Peaks(**content["peaks"][name]).text for name in ("allocated", "reserved")]
    outside = (
        Peaks(content["outside"]["measured"], content["outside"]["predicted"]).text if "outside" in content else "—"
    )
    requests = content["requests"]
    kinds = {
        f"{each['library'] or each['category']} in {each['op'] or 'an op of a library'}"
        for each in content["differing"]
    }
    cells = [
        content["gpu"],
        f"{versions['torch']}, cuDNN {versions.get('cudnn', 'unknown')}, driver {versions.get('driver', 'unknown')}",
        *peaks,
        outside,
        f"{requests['equal']:,} of {requests['measured']:,}",
        "; ".join(sorted(kinds)) or "nothing",
    ]
    return f"| {' | '.join(cells)} |"


def table(measurements: list[dict[str, Any]]) -> str:
    """Return the table of some measurements, by GPU."""
    head = "| GPU | torch | allocated | reserved | outside | equal requests | what differs |"
    return "\n".join([head, "|---|---|--:|--:|--:|--:|---|", *sorted(map(row, measurements))])


def main(folder: pathlib.Path) -> int:
    """Add the files of a folder to those that are kept, each once, and print the table of all."""
    kept: list[dict[str, Any]] = json.loads(KEPT.read_text()) if KEPT.exists() else []
    status = 0
    for path in sorted(folder.glob("*.json")):
        try:
            content = read(path)
        except ValueError as error:
            print(error, file=sys.stderr)
            status = 1
            continue
        if content not in kept:
            kept.append(content)
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    print(table(kept))
    return status


if __name__ == "__main__":
    raise SystemExit(main(pathlib.Path(sys.argv[1])))
