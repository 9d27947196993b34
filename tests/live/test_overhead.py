"""What watching costs, as `live.overhead` says it."""

from __future__ import annotations

import pytest

from tests.live.training import watched


@pytest.mark.parametrize(("first", "every"), [(0, 1000), (1, 2)])
def test_the_shares_add_up(first, every):
    # Which of them is larger depends on the machine: python -m tests.bench.bench_live.
    overhead = watched("cuda", *[8] * 30, first=first, every=every).overhead
    assert abs(overhead.share - overhead.light - overhead.recorded) < 1e-9
    assert overhead.light > 0
    assert overhead.recorded >= 0


def test_a_step_can_be_recorded_on_demand():
    import memexplore as mx
    from tests.live.training import Loop

    loop = Loop()
    with mx.watch(loop.model, first=1, every=1000) as live:
        loop.step()
        loop.step()
        live.record_next()
        loop.step()
        loop.step()
    assert live.recorded == [1, 4]
    assert live.steps()["recorded"].tolist()[3] == "asked for"
