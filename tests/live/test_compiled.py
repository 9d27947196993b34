"""Compiled code in a watched run: a compiled model is not compiled again, functions are as without watching."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch

import memexplore as mx
from memexplore.live.recording import COMPILED_FUNCTIONS, MOST_CALLS
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
    with warnings.catch_warnings(), mx.watch(model, loop.optimizer, first=3, every=1000) as live:
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


def compiled_in_the_loop(what, first, steps=6):
    """Train with one part compiled from the third step on; return the losses, the graphs compiled and the `Live`."""
    torch.compiler.reset()
    torch.manual_seed(1)
    graphs, losses = [], []
    loop = Loop()
    call, loss, update = loop.model, lambda out: out.square().mean(), loop.optimizer.step
    watching = nullcontext() if first is None else mx.watch(loop.model, loop.optimizer, first=first)
    with warnings.catch_warnings(), watching as live:
        warnings.simplefilter("ignore")
        for number in range(steps):
            if number == 2:
                call = torch.compile(call, backend=counted(graphs)) if what == "model" else call
                loss = torch.compile(loss, backend=counted(graphs)) if what == "loss" else loss
                update = torch.compile(update, backend=counted(graphs)) if what == "optimizer" else update
            value = loss(call(torch.randn(8, 64)))
            value.backward()
            update()
            loop.optimizer.zero_grad()
            losses.append(value.item())
    return losses, len(graphs), live


@pytest.mark.parametrize("what", ["model", "loss"])
def test_what_the_loop_compiles_in_a_recorded_step_is_compiled_as_without_watching(what):
    losses, graphs, _ = compiled_in_the_loop(what, None)
    watched_losses, watched_graphs, live = compiled_in_the_loop(what, first=6)
    # No function of memexplore is compiled, and none of the loop runs eagerly because of the recording.
    assert (watched_losses, watched_graphs) == (losses, graphs)
    assert live.recorded == [1, 2, 3, 4, 5, 6]
    assert live.tape(2).meta.notes == ()
    assert live.tape(3).meta.notes == (COMPILED_FUNCTIONS,)


def test_a_compiled_step_of_an_optimizer_that_is_not_seen_has_a_note():
    losses, graphs, _ = compiled_in_the_loop("optimizer", None, steps=2 + MOST_CALLS)
    watched_losses, watched_graphs, live = compiled_in_the_loop("optimizer", first=6, steps=2 + MOST_CALLS)
    assert (watched_losses, watched_graphs) == (losses, graphs)
    if len(live.steps()) > 2:
        # This release of torch calls the hooks of a compiled step, so it is seen.
        assert live.recorded[:6] == [1, 2, 3, 4, 5, 6]
    else:
        assert live.recorded == [1, 2]
        assert live.notes[0].endswith("an optimizer's step that is compiled is not seen.")
