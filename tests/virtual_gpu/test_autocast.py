"""Autocast on the virtual device by PyTorch's rules for CUDA."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memexplore as mx
from memexplore.recorder.recording import record
from memexplore.run.machine import virtual
from memexplore.tape import Action

MIB = 1024**2


@pytest.fixture
def gpu():
    with virtual("A100", release="2.13") as device:
        yield device


def test_matrix_products_run_in_the_lower_type(gpu):
    x, layer = torch.ones(4, 8, device="cuda"), nn.Linear(8, 8).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16
        assert F.layer_norm(layer(x), (8,)).dtype is torch.float32
        assert torch.softmax(layer(x), -1).dtype is torch.float32


def test_default_type_of_cuda_is_half(gpu):
    x = torch.ones(4, 8, device="cuda")
    with torch.autocast("cuda"):
        assert torch.get_autocast_dtype("cuda") is torch.float16
        assert (x @ x.t()).dtype is torch.float16


def test_widest_type_wins_where_types_are_promoted(gpu):
    with torch.autocast("cuda", torch.float16):
        joined = torch.cat([torch.ones(2, device="cuda"), torch.ones(2, device="cuda", dtype=torch.float16)])
    assert joined.dtype is torch.float32


def test_a_disabled_region_computes_in_float(gpu):
    x = torch.ones(4, 8, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        with torch.autocast("cuda", enabled=False):
            assert (x @ x.t()).dtype is torch.float32
        assert (x @ x.t()).dtype is torch.bfloat16


def test_double_is_not_cast(gpu):
    x = torch.ones(4, 8, device="cuda", dtype=torch.float64)
    with torch.autocast("cuda", torch.bfloat16):
        assert (x @ x.t()).dtype is torch.float64


def test_cast_weight_is_cached_until_the_outermost_context_exits(gpu):
    layer, x = nn.Linear(1024, 1024, bias=False).cuda(), torch.ones(1, 1024, device="cuda")
    layer(x)
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
            layer(x)
        # the cast weight: 1024·1024·2 bytes
        assert torch.cuda.memory_allocated() == before + 2 * MIB
    assert torch.cuda.memory_allocated() == before


def test_weight_is_cast_once_in_a_context(gpu):
    layer, x = nn.Linear(1024, 1024, bias=False).cuda(), torch.ones(1, 1024, device="cuda")
    with record() as recording, torch.autocast("cuda", torch.bfloat16), torch.no_grad():
        layer(x)
        layer(x)
    tape = recording.tape
    assert (tape.size[tape.action == Action.ALLOC] == 2 * MIB).sum() == 1


def test_cast_weights_are_not_cached_with_the_cache_disabled(gpu):
    layer, x = nn.Linear(1024, 1024, bias=False).cuda(), torch.ones(1, 1024, device="cuda")
    layer(x)
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False), torch.no_grad():
        layer(x)
        assert torch.cuda.memory_allocated() == before


def test_weights_that_need_no_gradient_are_not_cached(gpu):
    layer, x = nn.Linear(1024, 1024, bias=False).cuda().requires_grad_(False), torch.ones(1, 1024, device="cuda")
    layer(x)
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        layer(x)
        assert torch.cuda.memory_allocated() == before


def test_binary_cross_entropy_is_refused_as_on_cuda(gpu):
    x = torch.ones(4, device="cuda")
    with torch.autocast("cuda", torch.float16), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(x, x)


def test_custom_function_runs_in_its_declared_type(gpu):
    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx, x):
            seen.append((x.dtype, (x @ x.t()).dtype))
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, gradient):
            return gradient * 2

    seen = []
    with torch.autocast("cuda", torch.float16):
        Double.apply(torch.ones(4, 4, device="cuda", dtype=torch.float16))
    assert seen == [(torch.float32, torch.float32)]


def test_grad_scaler_steps(gpu):
    layer, x = nn.Linear(8, 8).cuda(), torch.ones(4, 8, device="cuda")
    optimizer, scaler = torch.optim.AdamW(layer.parameters()), torch.amp.GradScaler("cuda", init_scale=8.0)
    with torch.autocast("cuda", torch.float16):
        loss = layer(x).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert len(optimizer.state) == 2


READS = [
    lambda weight, rows: weight[rows],
    lambda weight, rows: weight.gather(0, rows[:, None].expand(-1, 1024)),
    lambda weight, rows: weight.take(rows),
    lambda weight, rows: weight.index_select(0, rows),
    lambda weight, rows: weight.max(0)[0],
    lambda weight, rows: F.embedding(rows, weight),
]


def requests_of_backward(inside, read):
    """Bytes of each request of a backward pass that runs inside autocast or after it."""
    weight = nn.Parameter(torch.zeros(4096, 1024, device="cuda"))
    with torch.autocast("cuda", torch.bfloat16):
        loss = read(weight, torch.arange(64, device="cuda")).sum()
    with record() as recording, torch.autocast("cuda", torch.bfloat16, enabled=inside):
        loss.backward()
    tape = recording.tape
    return tape.size[tape.action == Action.ALLOC].tolist()


@pytest.mark.parametrize("read", READS)
def test_backward_inside_autocast_fills_the_same_gradient_in_place(gpu, read):
    assert requests_of_backward(True, read) == requests_of_backward(False, read)


def test_backward_of_gather_inside_autocast_makes_one_gradient(gpu):
    # The loss's gradient, and zeros of the weight's size, 4096 * 1024 * 4 bytes, which scatter_add_ fills.
    assert requests_of_backward(True, READS[1]) == [4, 16 * MIB]


def test_arguments_are_cast_from_the_last_to_the_first():
    def run():
        layer, x = torch.nn.Linear(64, 32).cuda(), torch.ones(8, 64, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            layer(x)

    tape = mx.simulate(run, gpu="H100", release="2.11")
    layer = (tape.action == Action.ALLOC) & (tape.module >= 0) & (tape.op == tape.ops.index("aten::_to_copy"))
    # bias, weight and input in 2 bytes, as measured on an H100
    assert tape.size[layer].tolist()[-3:] == [32 * 2, 32 * 64 * 2, 8 * 64 * 2]


def test_a_recurrent_layer_runs_on_copies_of_its_weights_in_float16():
    def run():
        layer, x = torch.nn.LSTM(8, 16).cuda(), torch.ones(10, 4, 8, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            assert layer(x)[0].dtype is torch.float16

    tape = mx.simulate(run, gpu="H100")
    # 4 gates of 16 units: inputs 8, states 16, two biases, 2 bytes each
    assert 4 * 16 * (8 + 16 + 2) * 2 in tape.size[tape.action == Action.ALLOC]
