"""The code for a CUDA device: counters, the allocator's history and its join, on a virtual GPU and on real recordings.

The virtual GPU stands for a real one: `torch.cuda` answers from its allocator model, and its history is the one that a
script records. A real recording plays the allocator's part; the recorder's part is made from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import memexplore as mx
from memexplore.analysis.curves import live_rows
from memexplore.live import counters, recording
from memexplore.live import watch as watch_module
from memexplore.live.unseen_requests import joined
from memexplore.recorder import cuda
from memexplore.recorder.allocator_history import since
from memexplore.run import machine
from memexplore.snapshot.history import tape_of
from memexplore.snapshot.recorded import Recorded
from memexplore.tape import Action, Category, Meta, Phase, Source, Tape
from tests.data import kept
from tests.live.training import Loop, watched

MIB = 1024**2
BATCHES = (8, 8, 64, 8, 8, 8)


@pytest.fixture
def real_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A virtual T4 that `watch` takes for a real GPU."""
    with mx.virtual("T4"):
        for module in (watch_module, counters, machine):
            monkeypatch.setattr(module, "active", lambda: None)
        # The mode of the virtual GPU runs the ops and passes none on to modes below it.
        monkeypatch.setattr(recording, "lowest_first", lambda mode: None)
        monkeypatch.setattr(cuda, "meta", lambda device, versions: Meta(Source.MEASURED, str(device)))
        yield


def run(*batches: int, **options: Any) -> Any:
    loop = Loop("cuda")
    with mx.watch(loop.model, loop.optimizer, **options) as live:
        for batch in batches:
            loop.step(batch)
    return live


def test_counters_of_a_cuda_device_are_those_of_the_allocator(real_gpu):
    measured = run(*BATCHES, first=0, every=1000).steps()
    torch.cuda.empty_cache()
    assert set(measured["peak_from"]) <= {"counter", "sampled", "same shapes"}
    assert measured["peak_from"].iloc[0] == "counter"
    assert measured["allocated_after"].nunique() <= 2
    assert (measured["reserved_after"] >= measured["allocated_after"]).all()
    assert measured["outside"].notna().all()


def pair(monkeypatch: pytest.MonkeyPatch, batches: tuple[int, ...], **options: Any) -> tuple[Any, Any]:
    """The steps of a loop on a virtual T4, and on the same one as a real GPU."""
    exact = watched("cuda", *batches, **options).steps()
    with mx.virtual("T4"):
        for module in (watch_module, counters, machine):
            monkeypatch.setattr(module, "active", lambda: None)
        monkeypatch.setattr(recording, "lowest_first", lambda mode: None)
        monkeypatch.setattr(cuda, "meta", lambda device, versions: Meta(Source.MEASURED, str(device)))
        return exact, run(*batches, **options).steps()


def test_a_recorded_step_below_an_earlier_peak_has_the_peak_of_its_history(monkeypatch):
    exact, measured = pair(monkeypatch, (64, 64, 64, 8), first=4, every=1000)
    assert measured["peak_from"].iloc[3] == "recorded"
    assert measured["peak_allocated"].iloc[3] == exact["peak_allocated"].iloc[3]
    assert measured["peak_reserved"].iloc[3] == exact["peak_reserved"].iloc[3]


def test_a_light_step_has_the_peak_of_an_earlier_one_with_its_shapes(monkeypatch):
    exact, measured = pair(monkeypatch, (64,) * 8, first=3, every=1000)
    assert measured["peak_from"].tolist()[3:] == ["same shapes"] * 5
    assert measured["peak_allocated"].tolist() == exact["peak_allocated"].tolist()


def test_peaks_that_rise_are_exact_and_others_are_a_lower_bound(monkeypatch):
    exact, measured = pair(monkeypatch, BATCHES, first=0, every=1000)
    counted = measured["peak_from"] == "counter"
    assert counted.sum() >= 2
    assert measured["peak_allocated"][counted].tolist() == exact["peak_allocated"][counted].tolist()
    assert (measured["peak_allocated"] <= exact["peak_allocated"]).all()
    assert (measured["peak_allocated"] >= exact["allocated_after"]).all()


def test_a_sampled_peak_includes_what_the_forward_pass_keeps(real_gpu):
    rows = run(256, 256, 256, 256, 256, first=0, every=10**6).steps()
    sampled = rows[rows["peak_from"].isin(["sampled", "same shapes"])]
    assert len(sampled)
    # At its end at least the outputs of the first two layers are alive: 256 × 128 float32 each, one of them saved.
    assert (sampled["peak_allocated"] >= rows["allocated_after"].min() + 256 * 128 * 4).all()


def test_a_recorded_step_has_the_rows_of_the_allocator_and_the_layers_of_the_recorder(real_gpu):
    tape = run(8, 8, first=2).tape(2)
    rows = (tape.action == Action.ALLOC) & (tape.phase == Phase.FORWARD) & (tape.module >= 0)
    assert {tape.modules[number] for number in tape.module[rows].tolist()} == {"0", "1", "2"}
    assert (tape.action == Action.SEGMENT_ALLOC).any()
    assert (tape.category == Category.OPTIMIZER_STATE).any()
    assert sorted(set(tape.step.tolist())) == [0, 2]
    assert tape.peak("reserved")[0] > 0


def test_the_tape_of_a_cuda_step_has_the_peak_that_was_counted(real_gpu):
    live = run(8, 8, 8, first=3)
    assert live.tape(1).peak()[0] == live.steps()["peak_allocated"].iloc[0]


def test_no_step_ends_while_a_cuda_graph_is_captured(real_gpu, monkeypatch):
    # A real driver refuses to synchronize then, and the capture of the program fails.
    loop = Loop("cuda", torch.optim.SGD)
    with mx.watch(loop.model, loop.optimizer, first=1) as live:
        with monkeypatch.context() as patched:
            patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            patched.setattr(torch.cuda, "synchronize", lambda *device: pytest.fail("synchronized in a capture"))
            loop.step(8)
        assert len(live.steps()) == 0
        loop.step(8)
        assert len(live.steps()) == 1


def test_the_history_ends_with_the_recorded_steps(real_gpu):
    run(8, 8, 8, first=1, every=1000)
    assert torch.cuda.memory._snapshot()["device_traces"] == [[]]


def test_a_history_of_the_user_goes_on_with_its_settings(real_gpu, monkeypatch):
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    calls: list[Any] = []
    record = torch.cuda.memory._record_memory_history
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **kwargs: calls.append(kwargs) or record())
    live = run(8, 8, 8, first=3)
    assert calls == []
    before = len(torch.cuda.memory._snapshot()["device_traces"][0])
    torch.empty(MIB, device="cuda")
    assert len(torch.cuda.memory._snapshot()["device_traces"][0]) > before
    # The tape of the second step holds that step only.
    tape = live.tape(2)
    assert (tape.action == Action.ALLOC).sum() < 100
    assert sorted(set(tape.step.tolist())) == [0, 2]


def recordings() -> list[str]:
    names = sorted(path.name for path in kept.RECORDINGS.glob("*.json.gz"))
    return [name for name in names if not name.startswith(("layout", "synthetic", "truncated"))]


def played(name: str) -> Recorded:
    """The device with the most events of a recording, with a clock that counts microseconds from 1000 on."""
    device = max(kept.devices(name.removesuffix(".json.gz")).values(), key=lambda each: len(each.action))
    return dataclasses.replace(device, time=1000 + np.arange(len(device.action)))


@pytest.mark.parametrize("name", recordings())
def test_the_events_of_a_step_are_cut_out_of_a_longer_history(name):
    device = played(name)
    middle = len(device.action) // 2
    step = since(device, 1000 + middle)
    assert step.action.tolist() == device.action[middle:].tolist()
    whole, part = tape_of(device), tape_of(step)
    assert mx.peak(part)[0] <= mx.peak(whole)[0]
    assert (part.action == Action.ALLOC).sum() == (step.action == Action.ALLOC).sum()
    assert live_blocks(part) == live_blocks(whole)


def live_blocks(tape: Tape) -> list[tuple[int, int]]:
    """Address and size of the blocks at the end of a tape."""
    rows = live_rows(tape, len(tape) - 1)
    rows = rows[tape.size[rows] > 0]
    return sorted(zip(tape.address[rows].tolist(), tape.size[rows].tolist(), strict=True))


@pytest.mark.parametrize("name", recordings())
def test_a_real_history_is_joined_with_the_ops_of_a_recorder(name):
    device = played(name)
    history = tape_of(since(device, 1000 + len(device.action) // 2))
    noted, seen = recorder_of(history)
    tape = joined(history, noted)
    allocs = tape.action == Action.ALLOC
    for column in ("address", "size"):
        rows = getattr(tape, column)[tape.action != Action.MARK]
        assert rows.tolist() == getattr(history, column).tolist()
    # Blocks that the recorder saw have the op and the layer that it noted.
    named = tape.op[allocs][seen]
    assert (named == noted.op[noted.action == Action.ALLOC]).all()
    assert (tape.module[allocs][seen] == noted.module[noted.action == Action.ALLOC]).all()
    # The others belong to the op before them, as temporaries or workspaces.
    first = int(np.flatnonzero(seen)[0])
    others = ~seen[first:]
    assert (tape.op[allocs][first:][others] >= 0).all()
    kinds = set(tape.category[allocs][first:][others].tolist())
    assert kinds <= {Category.TEMPORARY, Category.WORKSPACE}
    assert any("attributed to no op" in note for note in tape.meta.notes) == (first > 0)


def recorder_of(history: Tape) -> tuple[Tape, np.ndarray]:
    """The tape of a recorder that saw two of three requests of a history, and which of its allocs it saw."""
    allocs = np.flatnonzero(history.action == Action.ALLOC)
    random = np.random.default_rng(0)
    seen = random.random(len(allocs)) < 2 / 3
    # Blocks of equal address and size are told apart by their order, so of these all are seen, or none.
    places = list(zip(history.address[allocs].tolist(), history.size[allocs].tolist(), strict=True))
    first = {place: bool(flag) for place, flag in reversed(list(zip(places, seen, strict=True)))}
    seen = np.array([first[place] for place in places])
    rows = allocs[seen]
    count = len(rows)
    marks = {"action": [Action.MARK], "address": [-1], "size": [0], "op": [-1], "module": [-1]}
    columns = {
        "action": [Action.ALLOC] * count,
        "address": history.address[rows].tolist(),
        "size": history.size[rows].tolist(),
        "op": (np.arange(count) % 5).tolist(),
        "module": (np.arange(count) % 3).tolist(),
    }
    merged = {name: [*marks[name], *columns[name]] for name in columns}
    merged |= {"phase": [Phase.FORWARD] * (count + 1), "step": [7] * (count + 1)}
    noted = Tape.from_columns(
        merged,
        meta=Meta(Source.MEASURED, "cuda:0"),
        ops=[f"aten::op{number}" for number in range(5)],
        modules=["a", "b", "c"],
    )
    return noted, seen
