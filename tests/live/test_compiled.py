"""Compiled models that are watched: none is compiled again, on the CPU none is recorded."""

from __future__ import annotations

import warnings

import pytest
import torch

import memexplore as mx
from tests.live.training import Loop, on


def counted(graphs):
    """A backend that adds each graph that is compiled to a list, and runs it as it is."""

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    return backend


def test_a_compiled_model_is_watched_and_not_compiled_again():
    torch.compiler.reset()
    counting = []
    loop = Loop()
    model = torch.compile(loop.model, backend=counted(counting))
    loop.model = model
    loop.step()
    graphs = len(counting)
    with mx.watch(model, first=2) as live:
        for _ in range(5):
            loop.step()
    assert len(counting) == graphs
    assert live.steps()["micro_batches"].tolist() == [1] * 5
    assert live.recorded == []
    assert "The model is compiled" in live.notes[0]


def test_a_compiled_model_runs_eagerly_on_a_virtual_gpu_and_is_recorded():
    with on("cuda"):
        loop = Loop("cuda")
        loop.model = torch.compile(loop.model)
        with mx.watch(loop.model, first=2) as live:
            for _ in range(3):
                loop.step()
    assert live.recorded[:2] == [1, 2]
    assert live.notes == ()


@pytest.mark.parametrize("call", ["compiled", "model"])
def test_a_model_whose_compiled_module_the_loop_calls_is_not_compiled_again(call):
    torch.compiler.reset()
    counting = []
    loop = Loop()
    model = loop.model
    compiled = torch.compile(model, backend=counted(counting))
    loop.model = compiled
    loop.step()
    graphs = len(counting)
    if call == "model":
        loop.model = model
    with warnings.catch_warnings(), mx.watch(model, loop.optimizer, first=3) as live:
        warnings.simplefilter("error")
        for _ in range(5):
            loop.step()
        locked = live.locked().get("checkpoint", "")
    assert len(counting) == graphs
    assert len(live.steps()) == 5
    assert ("compiled" in locked) == (call == "compiled")
    if call == "model":
        # Which of both is called is known after the first step.
        assert (live.recorded, live.notes) == ([2, 3], ())
    else:
        assert live.recorded == []
        assert "The model is compiled" in live.notes[0]
