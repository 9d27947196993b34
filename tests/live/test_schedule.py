"""Which steps are recorded completely, and what recording may cost."""

from __future__ import annotations

import pytest

from memexplore.live.schedule import SHARE, Cause, Schedule


def spent(steps: int, light: float, recorded: float) -> tuple[list[int], float]:
    """Steps recorded in a run without events, and the share of the time that recording took beyond light steps."""
    schedule = Schedule(first=3, every=None)
    chosen = []
    for step in range(1, steps + 1):
        if schedule.next(step) is not None:
            chosen.append(step)
            schedule.recorded(recorded)
        else:
            schedule.light(light)
    extra = len(chosen[3:]) * (recorded - light)
    return chosen, extra / (steps * light)


@pytest.mark.parametrize("recorded", [0.015, 0.05, 0.5])
def test_recording_takes_its_share_of_the_time(recorded):
    chosen, share = spent(5000, 0.01, recorded)
    assert chosen[:3] == [1, 2, 3]
    assert 0.5 * SHARE < share <= 1.1 * SHARE


def test_every_nth_step_is_recorded_if_asked_for():
    schedule = Schedule(first=1, every=10)
    assert [step for step in range(1, 31) if schedule.next(step)] == [1, 10, 20, 30]


def test_a_rise_is_recorded_in_the_next_step_once():
    schedule = Schedule(first=1, every=1000)
    schedule.recorded(0.02)
    schedule.light(0.01)
    schedule.ask(Cause.ROSE)
    assert [schedule.next(step) for step in (3, 4)] == [Cause.ROSE, None]


def test_new_shapes_in_every_step_do_not_record_every_step():
    schedule = Schedule(first=1, every=None)
    schedule.recorded(0.1)
    recorded = 0
    for step in range(2, 1000):
        schedule.next(step)
        if schedule.on_new_shapes():
            recorded += 1
            schedule.recorded(0.1)
        else:
            schedule.light(0.01)
    # Ten ahead of their time, and 2 % of ten seconds in steps that take 90 ms more.
    assert 10 <= recorded <= 20


def test_a_step_that_the_user_asks_for_is_recorded_whatever_it_costs():
    schedule = Schedule(first=0, every=1000)
    schedule.light(0.01)
    for _ in range(30):
        schedule.recorded(1.0)
    schedule.ask(Cause.ROSE)
    assert schedule.next(5) is None
    schedule.ask(Cause.ASKED)
    assert schedule.next(6) is Cause.ASKED
