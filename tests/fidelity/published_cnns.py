"""Published peaks of convolutional networks: `python -m tests.fidelity.published_cnns` compares them with predictions.

`tests/data/published_cnns.csv` has what other people measured on their GPUs, with the addresses. The rows of a table
come from one process, and so do their predictions (`cnn_programs.py`). Networks come from their packages, which a
folder holds that `--packages FOLDER` names; tables whose package is missing are left out, and the command says which
to install. In an environment with torchvision, all are computed in a minute and a half after:

    pip install opencv-python-headless matplotlib pandas polars psutil pyyaml requests seaborn tqdm "setuptools<81"
    pip install --no-deps --target FOLDER/ultralytics-8.0.166 ultralytics==8.0.166
    pip install --no-deps --target FOLDER/ultralytics-8.4.116 ultralytics==8.4.116
    git clone --branch v7.0 https://github.com/ultralytics/yolov5 FOLDER/yolov5
"""

from __future__ import annotations

import argparse
import csv
import itertools
import logging
import pathlib
import re
import statistics
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import memexplore as mx
from tests.fidelity.cnn_programs import INSTALL, PROGRAMS, importable, is_installed

DATA = pathlib.Path(__file__).parent.parent / "data" / "published_cnns.csv"
MIB = 2**20
OLDEST = "2.0"
"""The oldest release of torch that memexplore knows; it stands for older ones, and for those that are not stated."""
GPUS = {"P40": "TITAN Xp", "not stated": "A100 80GB"}
"""From a row's GPU to the one of the catalogue that stands for it: the P40 has the TITAN Xp's chip."""


class Row(NamedTuple):
    """One peak, measured and predicted in MiB: the columns of the file."""

    id: str
    table: str
    group: str
    source: str
    url: str
    gpu: str
    torch: str
    model: str
    batch: int
    input: str
    precision: str
    quantity: str
    measured: float
    rounding: float
    predicted: float
    note: str

    def error(self) -> float:
        """Return the error of the prediction in percent; none within the rounding of what was printed."""
        difference = self.predicted - self.measured
        return 0.0 if abs(difference) <= self.rounding else difference / self.measured * 100


def rows() -> list[Row]:
    """Return the rows of the file."""
    with DATA.open(newline="") as file:
        return [
            Row._make([*line[:8], int(line[8]), *line[9:12], *map(float, line[12:15]), line[15]])
            for line in itertools.islice(csv.reader(file), 1, None)
        ]


def release(torch: str) -> str:
    """Return the release of torch that a prediction takes for a published one.

    >>> release("2.11.0+cu128"), release("1.9.0+cu111"), release("not stated")
    ('2.11', '2.0', '2.0')
    """
    found = re.match(r"[2-9]\.\d+", torch)
    return found.group() if found else OLDEST


def predicted(table: list[Row], folder: pathlib.Path) -> list[Row]:
    """Return the rows of a table with new predictions."""
    program, sizes = PROGRAMS[table[0].table], [row.batch for row in table]
    found: list[int] = []
    with importable(program.package, folder):
        mx.simulate(
            lambda: found.extend(program.run(program.build(), sizes)),
            gpu=GPUS.get(table[0].gpu, table[0].gpu),
            release=release(table[0].torch),
        )
    return [row._replace(predicted=round(size / MIB, 3)) for row, size in zip(table, found, strict=True)]


def tables(chosen: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield the rows of each table."""
    for _, group in itertools.groupby(chosen, lambda row: row.table):
        yield list(group)


def summary(compared: list[Row]) -> str:
    """Return a markdown table of the errors by group and GPU."""
    lines = ["| GPU | program | quantity | cases | median error | worst error |", "|---|---|---|--:|--:|--:|"]

    def key(row: Row) -> tuple[str, str, str]:
        return row.gpu, row.group, row.quantity

    for name, group in itertools.groupby(sorted(compared, key=key), key):
        lines.append(f"| {' | '.join(name)} | {_errors(list(group))} |")
    return "\n".join([*lines, f"| all | | | {_errors(compared)} |"])


def _errors(compared: list[Row]) -> str:
    errors = [row.error() for row in compared]
    return f"{len(errors)} | {statistics.median(map(abs, errors)):.1f} % | {max(errors, key=abs):+.1f} %"


def listing(compared: list[Row]) -> str:
    """Return a markdown table of every row."""
    lines = ["| GPU | model | batch | input | measured | predicted | error |", "|---|---|--:|---|--:|--:|--:|"]
    for row in compared:
        sizes = f"{row.measured:,.0f} MiB | {row.predicted:,.0f} MiB"
        lines.append(f"| {row.gpu} | {row.model} | {row.batch} | {row.input} | {sizes} | {row.error():+.1f} % |")
    return "\n".join(lines)


def write(compared: list[Row]) -> None:
    """Write the predictions into the file."""
    computed = {row.id: row for row in compared}
    with DATA.open(newline="") as file:
        header = next(csv.reader(file))
    kept = [computed.get(row.id, row) for row in rows()]
    with DATA.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *kept])


def main(arguments: list[str] | None = None) -> None:
    """Print the errors of all rows whose packages are there."""
    parser = argparse.ArgumentParser(description="Compare published peaks of convolutional networks with predictions.")
    parser.add_argument("--packages", type=pathlib.Path, default=pathlib.Path(), metavar="FOLDER")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--write", action="store_true", help="write the predictions into the file")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    compared, missing = [], set()
    for table in tables(rows()):
        package = PROGRAMS[table[0].table].package
        if is_installed(package, options.packages):
            compared += predicted(table, options.packages)
        else:
            missing.add(package)
    print(listing(compared) + "\n" if options.rows else "", end="")
    print(summary(compared))
    for package in sorted(missing):
        print(f"Left out for want of {package}; to install it: {INSTALL[package]}", file=sys.stderr)
    if options.write:
        write(compared)


if __name__ == "__main__":
    main()
