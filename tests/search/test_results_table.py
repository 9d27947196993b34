"""Printed sweeps: rows, binary units, bars, and the HTML of a notebook."""

from __future__ import annotations

import functools

from memexplore.run.knobs.knobs import Knobs
from memexplore.run.search.results_table import Line, bar, html_table, text_table
from memexplore.run.search.sweep import Sweep, sweep
from memexplore.text.units import in_unit, size_text
from tests.search.sweep_steps import MIB, step


@functools.cache
def printed() -> Sweep:
    return sweep(step(), [Knobs(), Knobs(gpu="1MiB"), Knobs(batch=3, accumulation=2)], gpu="1GiB", progress=None)


def test_a_sweep_prints_a_title_and_a_row_per_setting():
    title, *rows = str(printed()).splitlines()
    assert title == "Sweep of 3 settings: 1 fit, 1 out of memory, 1 failed"
    assert [row.split("  ")[0] for row in rows] == ["setting", "as written", "gpu 1MiB", "batch 3, accumulation 2"]


def test_the_printed_sizes_have_binary_units():
    outcome = printed().outcomes[Knobs(gpu="1MiB")]
    # The GPU has 1 MiB, so all but 1 MiB of the memory needed is missing.
    missing = size_text(MIB - outcome.needed)
    row = str(printed()).splitlines()[3]
    assert row.split()[2:5] == ["out", "of", "memory"]
    assert f"  {size_text(outcome.needed)}  " in row
    assert f"  {missing}  " in row
    assert str(outcome.needed) not in str(printed())


def test_the_bar_is_the_share_of_the_gpu():
    lines = str(printed()).splitlines()
    share = printed().outcomes[Knobs()].needed / 1024**3
    assert f"{bar(share)} {share * 100:3.0f} %" in lines[2]
    # More than the GPU has: a full bar with an arrow.
    assert "█" * 12 + "▶" in lines[3]


def test_a_failed_setting_is_printed_with_its_error():
    row = str(printed()).splitlines()[-1]
    assert row.split("  failed")[1].strip() == str(printed().errors[Knobs(batch=3, accumulation=2)])


def test_a_sweep_is_one_line():
    assert repr(printed()) == "<Sweep of 3 settings: 1 fit, 1 out of memory, 1 failed>"


def test_a_notebook_shows_a_sweep_as_an_html_table_with_curves_and_bars():
    page = printed()._repr_html_()
    assert "<b>Sweep of 3 settings: 1 fit, 1 out of memory, 1 failed</b>" in page
    # One row of titles and two settings that ran, each with a sparkline and a bar; the failed one is a sentence.
    assert (page.count("<tr>"), page.count('role="img"'), page.count("<svg")) == (3, 4, 2)
    assert "batch 3, accumulation 2 failed: accumulation=2 does not divide" in page


def test_sizes_of_a_column_of_the_html_table_have_one_unit():
    page = printed()._repr_html_()
    outcome = printed().outcomes[Knobs(gpu="1MiB")]
    unit = size_text(outcome.needed).split()[1]
    assert f"needs, {unit}</th>" in page
    assert f">{in_unit(outcome.needed, unit)}<" in page
    # 1 MiB minus the need: less than nothing is left
    assert f">{in_unit(MIB - outcome.needed, unit)}<" in page


def test_what_is_left_of_a_large_gpu_has_a_unit_of_its_own():
    outcome = printed().outcomes[Knobs()]._replace(needed=238 * MIB, capacity=15 * 1024 * MIB)
    page = html_table(["one"], [Line("one", outcome)])
    assert "needs, MiB</th>" in page
    assert ">238.00<" in page
    assert "left, GiB</th>" in page
    assert ">14.77<" in page  # 15 - 238 / 1024


def test_less_than_a_twentieth_left_is_tight():
    outcome = printed().outcomes[Knobs()]
    tight = outcome._replace(capacity=int(outcome.needed * 1.04))
    assert "  tight  " in text_table([Line("a", tight)])
    assert "  fits  " in text_table([Line("a", tight._replace(capacity=outcome.needed * 2))])


def test_texts_in_the_html_table_are_escaped():
    outcome = printed().outcomes[Knobs()]
    lines = [Line("<script>", None, error="1 > 0"), Line("<script>", outcome, more=("<cell>",))]
    page = html_table(["a < b"], lines, ["<more>"])
    assert "<script>" not in page
    assert "a &lt; b" in page
    assert "1 &gt; 0" in page
    assert "&lt;more&gt;" in page
    assert "&lt;cell&gt;" in page


def test_the_frame_of_a_sweep_stays_in_bytes():
    table = printed().to_pandas()
    assert table.loc["as written", "peak_reserved"] == printed().outcomes[Knobs()].peak_reserved
