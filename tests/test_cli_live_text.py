"""The lines of a status, plain lines, and the times at which they are printed."""

from __future__ import annotations

import pytest

from memexplore.cli import live_display, live_text
from memexplore.cli.live_status import Status, curve
from memexplore.cli.terminal import is_terminal
from memexplore.ranks.rows import StepRow

MIB = 1024**2
ROW = StepRow(1284, 0.412, 13 * MIB, 14 * MIB, 3 * MIB, "", 14 * MIB, 100 * MIB)
STATUS = Status("watching", "Tesla T4", 16 * MIB, ROW, ROW._replace(step=1102, peak_allocated=15 * MIB), 0.412)


def text(status, width=100):
    return live_text.as_text(live_text.lines(status, width))


def test_the_first_lines_have_step_time_peak_and_worst():
    assert text(STATUS)[:3] == [
        "● step 1,284 · 412 ms/step · Tesla T4",
        # 13 of 16 are 81 %, and of 24 columns 19.5, rounded to the even 20.
        "Peak allocated 13.0 MiB of 16.0 MiB (81 %) ████████████████████░░░░",
        "worst so far 15.0 MiB in step 1,102 · reserved 14.0 MiB · at the end of the step 3.00 MiB · "
        "free in cache 11.0 MiB · outside the allocator 100 MiB",
    ]


def test_memory_of_other_processes_is_shown_where_there_is_any():
    shown = text(STATUS._replace(newest=ROW._replace(other_processes=2 * MIB)), 200)
    assert shown[2].endswith("outside the allocator 100 MiB · other processes 2.00 MiB")
    assert "other processes" not in text(STATUS._replace(newest=ROW._replace(other_processes=0)), 200)[2]


def test_a_sampled_peak_is_a_lower_bound():
    shown = text(STATUS._replace(newest=ROW._replace(peak_from="sampled")))
    assert "Peak allocated ≥ 13.0 MiB of 16.0 MiB" in shown[1]


@pytest.mark.parametrize(
    ("full_at", "left"),
    [(1285 + 145, "1 min"), (1284 + 8738, "60 min"), (1284 + 17476, "2 h"), (1284 + 10**6, "5 days")],
)
def test_growth_says_when_the_device_is_full(full_at, left):
    # 145 steps of 0.412 s are one minute, 17 476 are two hours, 10**6 are 4.8 days.
    shown = text(STATUS._replace(growth="Memory grows.", full_at=full_at, held_by=("train.py:57: history.append(x)",)))
    assert f"⚠ Memory grows. That is in about {left}." in shown
    assert "  held by train.py:57: history.append(x)" in shown


def test_long_warnings_are_wrapped_and_other_lines_cut():
    drawn = live_text.drawn(live_text.lines(STATUS._replace(growth="Memory grows. " * 10), 40), 40, None)
    assert max(map(len, drawn)) <= 40
    assert sum("grows" in line for line in drawn) >= 4
    assert drawn[2].endswith("…")


def test_a_step_without_a_peak_says_so():
    row = StepRow(4, 0.5)
    assert "Peak allocated not known: this step was not recorded" in text(Status("watching", "cpu", newest=row))


def test_a_plain_line_has_everything_in_one():
    line = live_text.plain(STATUS._replace(overhead=0.012))
    assert line == (
        "memexplore: step 1,284 · 412 ms/step · Tesla T4 · watching costs 1.2 % · peak 13.0 MiB of 16.0 MiB (81 %)"
        " · worst 15.0 MiB in step 1,102"
    )


def test_plain_lines_of_a_day_are_few():
    times, now = [], 0.0
    while now < 86_400:
        times.append(now)
        now = live_display.next_line(now)
    # Then every ten minutes: 144 in a day.
    assert 120 < len(times) < 160


def test_a_curve_of_many_steps_keeps_the_highest():
    peaks = [(step, 900 if step == 7_777 else 100) for step in range(1, 100_001)]
    assert len(curve(peaks)) == 60
    assert max(curve(peaks)) == 900


def test_a_dumb_terminal_and_a_closed_stream_are_no_terminals(monkeypatch, tmp_path):
    class Tty:
        def isatty(self):
            return True

    assert is_terminal(Tty())
    monkeypatch.setenv("TERM", "dumb")
    assert not is_terminal(Tty())
    with open(tmp_path / "log", "w") as stream:
        pass
    assert not is_terminal(stream)
