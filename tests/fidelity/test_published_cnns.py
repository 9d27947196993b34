"""Published peaks of convolutional networks: those that need torch alone are compared, the file is checked."""

from __future__ import annotations

import pathlib

import pytest

from tests.fidelity.cnn_programs import INSTALL, PROGRAMS
from tests.fidelity.published_cnns import Row, listing, main, predicted, rows, summary, tables

WITHOUT_PACKAGES = {"layers-t4": 2.0, "layers-v100": 18.0, "unet-p40": 9.0}
"""Table -> the largest error in percent: 1.5, 17.1, and 8.3 were computed."""


@pytest.mark.parametrize("name", WITHOUT_PACKAGES)
def test_predictions_are_as_near_as_computed_before(name: str) -> None:
    (table,) = (each for each in tables(rows()) if each[0].table == name)
    errors = [row.error() for row in predicted(table, pathlib.Path())]
    assert max(map(abs, errors)) < WITHOUT_PACKAGES[name]


def test_first_layers_are_predicted_to_the_printed_digit() -> None:
    focus = [row for row in rows() if row.id in ("layers-t4-1", "layers-v100-1")]
    assert [row.error() for row in focus] == [0, 0]


def test_the_file_has_many_rows_of_many_gpus() -> None:
    known = rows()
    assert len(known) >= 60
    assert len({row.gpu for row in known} - {"not stated"}) >= 5
    assert len({row.id for row in known}) == len(known)
    assert all(row.url.startswith("https://github.com/") for row in known if row.url)
    assert min(min(row.measured, row.rounding, row.predicted) for row in known) > 0


def test_every_table_has_a_program_and_every_package_a_command() -> None:
    assert {row.table for row in rows()} == set(PROGRAMS)
    assert {program.package for program in PROGRAMS.values()} == {"", *INSTALL}


def test_an_error_within_the_rounding_is_none() -> None:
    row = rows()[0]._replace(measured=100.0, rounding=0.5)
    assert [row._replace(predicted=predicted).error() for predicted in (100.4, 99.5, 102.0)] == [0, 0, 2]


def _row(predicted: float) -> Row:
    return rows()[0]._replace(gpu="T4", model="M", measured=100.0, rounding=0.5, predicted=predicted)


def test_summary_has_the_median_and_the_signed_worst_error() -> None:
    assert "| 3 | 4.0 % | -10.0 % |" in summary([_row(100.0), _row(104.0), _row(90.0)]).splitlines()[2]


def test_listing_has_every_row() -> None:
    assert "| 100 MiB | 104 MiB | +4.0 % |" in listing([_row(104.0)])


def test_missing_packages_are_named_with_their_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    chosen = [row for row in rows() if row.table == "yolov5s-a100"]
    layers = rows_of_layers()
    monkeypatch.setattr("tests.fidelity.published_cnns.rows", lambda: [*chosen, *layers])
    main(["--packages", str(tmp_path)])
    printed = capsys.readouterr()
    assert f"Left out for want of yolov5; to install it: {INSTALL['yolov5']}" in printed.err
    assert "YOLOv5 profile of layers" in printed.out


def rows_of_layers() -> list[Row]:
    """Return the rows of a short table."""
    return [row for row in rows() if row.table == "layers-v100"]
