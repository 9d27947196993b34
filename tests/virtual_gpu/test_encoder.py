"""Fast path of transformer layers in inference: when torch takes it, and the requests of its CUDA kernels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memexplore.recorder.recording import record
from memexplore.run.machine import virtual
from memexplore.tape import Action, Category

BATCH, STEPS, WIDTH, HEADS, WIDE = 2, 16, 64, 4, 128
ROWS = BATCH * STEPS * WIDTH * 4
"""Bytes of one activation in float32; a norm has one float per row for the mean and one for the root."""
STATISTICS = BATCH * STEPS * 4


def allocations(function, gpu="A100"):
    """Return op and bytes of each request except workspaces."""
    with virtual(gpu, release="2.13"):
        run = function()
        with record() as recording:
            result = run()
        del result
    tape = recording.tape
    rows = range(len(tape))
    chosen = [row for row in rows if tape.action[row] == Action.ALLOC and tape.category[row] != Category.WORKSPACE]
    return [(tape.ops[tape.op[row]].removeprefix("aten::"), int(tape.size[row])) for row in chosen]


def layer(device="cuda", **options):
    made = nn.TransformerEncoderLayer(WIDTH, HEADS, WIDE, batch_first=True, **options).to(device).eval()
    return made, torch.ones(BATCH, STEPS, WIDTH, device=device)


def inference(call):
    def make():
        made, x = layer()

        def run():
            with torch.no_grad():
                return call(made, x)

        return run

    return make


def norm():
    return [("native_layer_norm", ROWS), ("native_layer_norm", STATISTICS), ("native_layer_norm", STATISTICS)]


FEED_FORWARD = [("_addmm_activation", BATCH * STEPS * WIDE * 4), ("addmm", ROWS)]


def test_without_a_mask_attention_is_fused_and_sums_are_in_place():
    # One product for query, key and value; nothing for the sums, nothing for ReLU: transformer.cpp
    requests = allocations(inference(lambda made, x: made(x)))
    attention = [("addmm", 3 * ROWS), ("_scaled_dot_product_efficient_attention", ROWS), ("addmm", ROWS)]
    assert requests == [*attention, *norm(), *FEED_FORWARD, *norm()]


def test_a_padding_mask_leads_to_unfused_attention():
    def call(made, x):
        return made(x, src_key_padding_mask=torch.ones(BATCH, STEPS, dtype=torch.bool, device="cuda"))

    requests = allocations(inference(call))
    scores = BATCH * HEADS * STEPS * STEPS * 4
    # query, key and value packed; scores; the mask as bool; softmax out of place; the heads merged
    written = [("mm", 3 * ROWS), ("new_empty", 3 * ROWS), ("bmm", scores), ("_to_copy", BATCH * STEPS)]
    written += [("empty_like", scores), ("clone", ROWS), ("addmm", ROWS)]
    start = requests.index(("mm", 3 * ROWS))
    assert requests[start:] == [*written, *norm(), *FEED_FORWARD, *norm()]


def test_rows_of_more_than_1024_are_masked_in_a_copy():
    steps = 1032

    def make():
        made, _ = layer()
        x = torch.ones(1, steps, WIDTH, device="cuda")
        mask = torch.ones(1, steps, dtype=torch.bool, device="cuda")

        def run():
            with torch.no_grad():
                return made(x, src_key_padding_mask=mask)

        return run

    # masked_softmax_cuda drops its own result for that of masked_fill and softmax
    scores = HEADS * steps * steps * 4
    requests = [op for op, size in allocations(make) if size == scores]
    assert requests == ["bmm", "empty_like", "masked_fill", "_softmax"]


def test_attention_that_returns_its_weights_is_unfused():
    def make():
        made, x = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).cuda().eval(), torch.ones(2, 16, 64).cuda()

        def run():
            with torch.no_grad():
                return made(x, x, x)

        return run

    assert ("sum", BATCH * STEPS * STEPS * 4) in allocations(make)
    assert "new_empty" in dict(allocations(make))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_shapes_equal_those_of_the_cpu(norm_first, activation):
    with virtual("A100"), torch.no_grad():
        made, x = layer(norm_first=norm_first, activation=activation)
        assert made(x).shape == x.shape
        attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).cuda().eval()
        result, weights = attention(x, x, x)
        assert result.shape == x.shape
        assert weights.shape == (BATCH, STEPS, STEPS)
        assert attention(x, x, x, average_attn_weights=False)[1].shape == (BATCH, HEADS, STEPS, STEPS)
        assert attention(x, x, x, need_weights=False)[0].shape == x.shape


def test_training_and_gradients_leave_the_fast_path():
    def with_gradients():
        made, x = layer()
        return lambda: made(x)

    def in_training():
        made, x = layer()
        made.train()

        def run():
            with torch.no_grad():
                return made(x)

        return run

    for make in (with_gradients, in_training):
        assert "_addmm_activation" not in dict(allocations(make))


def test_inference_mode_takes_the_fast_path():
    def make():
        made, x = layer()

        def run():
            with torch.inference_mode():
                return made(x)

        return run

    assert "_addmm_activation" in dict(allocations(make))


class Mine(torch.Tensor):
    """A tensor class with a `__torch_function__`, the inherited one."""


def test_tensor_classes_of_the_user_leave_the_fast_path():
    before = torch.overrides.has_torch_function
    with virtual("A100"):
        mine = torch.ones(2).as_subclass(Mine)
        assert torch.overrides.has_torch_function((mine,))
        assert not torch.overrides.has_torch_function((torch.ones(2, device="cuda"), nn.Parameter(torch.ones(2))))
    assert torch.overrides.has_torch_function is before


def test_a_cpu_layer_gives_the_same_values_while_a_virtual_gpu_is_on():
    made, x = layer("cpu")
    with torch.no_grad():
        without_gpu = made(x)
        with virtual("A100"):
            with_gpu = made(x)
    assert torch.equal(without_gpu, with_gpu)
