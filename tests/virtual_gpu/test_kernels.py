"""Memory requests of CUDA kernels, in the order of PyTorch's source or of a recording."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memexplore.recorder.recording import record
from memexplore.run.machine import virtual
from memexplore.tape import Action, Category
from memexplore.virtual_gpu.dispatch import autograd_engine
from memexplore.virtual_gpu.kernels import reductions
from memexplore.virtual_gpu.kernels.cuda_build import Build
from tests.virtual_gpu.kernel_requests import allocations, requests

# --- composite ops run CUDA's branch --------------------------------------------------------------------------------


def test_dropout_requests_the_mask_then_the_result():
    def make():
        x = torch.ones(4, 1024, device="cuda")
        return lambda: F.dropout(x, 0.1)

    # bool mask 4·1024·1, float result 4·1024·4
    assert allocations(make) == [("native_dropout", 4096), ("native_dropout", 16384)]


@pytest.mark.parametrize(("p", "train"), [(0.0, True), (0.5, None)])
def test_native_dropout_always_makes_a_mask_and_a_result(p, train):
    def make():
        x = torch.ones(4, 1024, device="cuda")
        return lambda: torch.native_dropout(x, p, train)

    # bool mask 4·1024·1, float result 4·1024·4
    assert allocations(make) == [("native_dropout", 4096), ("native_dropout", 16384)]


@pytest.mark.parametrize(("p", "train"), [(1.0, True), (0.5, False)])
def test_native_dropout_of_all_or_nothing_makes_the_result_first(p, train):
    def make():
        x = torch.ones(4, 1024, device="cuda")
        return lambda: torch.native_dropout(x, p, train)

    # float result 4·1024·4, bool mask 4·1024·1
    assert allocations(make) == [("native_dropout", 16384), ("native_dropout", 4096)]


def test_silu_backward_is_one_kernel():
    def make():
        x = torch.ones(4, 1024, device="cuda", requires_grad=True)
        y, gradient = F.silu(x), torch.ones(4, 1024, device="cuda")
        return lambda: y.backward(gradient)

    assert allocations(make) == [("silu_backward", 16384)]


def test_half_softmax_in_float_makes_no_float_copy_of_its_input():
    def make():
        x = torch.ones(4, 1024, device="cuda", dtype=torch.float16)
        return lambda: torch.softmax(x, -1, dtype=torch.float32)

    assert allocations(make) == [("_softmax", 16384)]


def test_batch_norm_in_training_runs_in_cudnn():
    def make():
        layer, x = nn.BatchNorm2d(16).cuda(), torch.ones(2, 16, 8, 8, device="cuda")
        layer.num_batches_tracked = None
        return lambda: layer(x)

    # result 2·16·8·8·4, mean and inverse deviation 16·4 each
    assert allocations(make) == [("cudnn_batch_norm", 8192), ("cudnn_batch_norm", 64), ("cudnn_batch_norm", 64)]


def test_batch_norm_in_bfloat16_runs_in_the_native_kernel():
    def make():
        layer, x = nn.BatchNorm2d(16).cuda(), torch.ones(2, 16, 8, 8, device="cuda", dtype=torch.bfloat16)
        layer.num_batches_tracked = None
        return lambda: layer(x)

    assert {op for op, _ in allocations(make)} == {"native_batch_norm"}


@pytest.mark.parametrize(
    ("release", "ops"),
    [("2.13", {"_fused_rms_norm"}), ("2.8", {"pow", "mean", "rsqrt", "mul"})],
)
def test_rms_norm_is_fused_from_torch_2_9_on(release, ops):
    def make():
        x, weight = torch.ones(4, 1024, device="cuda"), torch.ones(1024, device="cuda")
        return lambda: F.rms_norm(x, (1024,), weight)

    assert {op for op, _ in allocations(make, release=release)} == ops


def test_linear_on_four_dimensions_adds_its_bias_in_place():
    def make():
        x, layer = torch.ones(2, 3, 5, 64, device="cuda"), nn.Linear(64, 8).cuda()
        layer(x)
        return lambda: layer(x)

    # 2·3·5 rows of 8 floats, and nothing for the bias
    assert allocations(make) == [("mm", 960)]


def test_inference_mode_decomposes_composite_ops():
    def make():
        x, layer = torch.ones(4, 64, device="cuda"), nn.LayerNorm(64).cuda()

        def run():
            with torch.inference_mode():
                return layer(x)

        return run

    # result 4·64·4, then mean and root of 4 rows
    assert allocations(make) == [("native_layer_norm", 1024), ("native_layer_norm", 16), ("native_layer_norm", 16)]


def test_lstm_is_one_cudnn_op_with_a_reserve_space_and_a_workspace_that_is_noted_as_an_estimate():
    with virtual("A100"):
        layer, x = nn.LSTM(8, 16).cuda(), torch.ones(10, 4, 8, device="cuda")
        with record() as recording:
            layer(x)
    tape = recording.tape
    rows = [row for row in range(len(tape)) if tape.action[row] == Action.ALLOC]
    assert {tape.ops[tape.op[row]] for row in rows} == {"aten::zeros", "aten::_cudnn_rnn"}
    # 10 steps, 4 sequences, 16 units, 5 values of 4 bytes; 256 bytes more
    assert 10 * 4 * 16 * 5 * 4 + 256 in tape.size[rows]
    assert any("workspace for recurrent layers is an estimate" in note for note in tape.meta.notes)


def test_moving_an_lstm_puts_its_weights_into_one_buffer():
    with virtual("A100"):
        layer = nn.LSTM(8, 16).cuda()
        # 4 gates of 16 units: inputs 8, states 16, two biases; floats, rounded to 512 bytes
        assert torch.cuda.memory_allocated() == 4 * 16 * (8 + 16 + 2) * 4
        assert len({parameter.untyped_storage()._cdata for parameter in layer.parameters()}) == 1


# --- scratch memory of kernels --------------------------------------------------------------------------------------


def test_a_reduction_to_few_results_splits_each_among_blocks():
    # Recorded: mean of 1 966 080 floats on 72 multiprocessors of compute capability 7.5.
    assert reductions.scratch((1, 30, 256, 256), (1966080, 65536, 256, 1), (), 4, Build((2, 1), (7, 5), 72)) == (576, 4)


def test_reduction_over_the_last_dimension_needs_no_buffer():
    assert reductions.scratch((4, 512, 2560), (1310720, 2560, 1), (2,), 4, Build()) is None


def test_sum_of_booleans_makes_an_int64_copy():
    def make():
        mask = torch.ones(4, 1024, device="cuda", dtype=torch.bool)
        return lambda: mask.sum()

    assert allocations(make) == [("sum", 8), ("sum", 4 * 1024 * 8)]


def test_mean_squared_error_allocates_the_unreduced_loss_for_the_call():
    def make():
        x, y = torch.ones(4, 1024, device="cuda"), torch.ones(4, 1024, device="cuda")
        return lambda: F.mse_loss(x, y)

    # The result has the size of the unreduced loss too.
    assert requests(make) == [("mse_loss", 16384), ("mse_loss", 16384), -16384]


def test_binary_cross_entropy_keeps_the_memory_of_the_unreduced_loss():
    def make():
        x, y = torch.ones(4, 1024, device="cuda"), torch.ones(4, 1024, device="cuda")
        return lambda: F.binary_cross_entropy(x, y)

    assert requests(make) == [("binary_cross_entropy", 16384), ("binary_cross_entropy", 4), -4]


def test_embedding_backward_sorts_more_than_3072_indices():
    def make():
        weight = torch.ones(1000, 64, device="cuda", requires_grad=True)
        out = F.embedding(torch.zeros(4096, device="cuda", dtype=torch.int64), weight)
        gradient = torch.ones_like(out)
        return lambda: torch.autograd.grad(out, weight, gradient)

    sizes = [size for _, size in allocations(make)]
    # partial sums: 4096 // 10 + 1000 rows of 64 floats
    assert (409 + 1000) * 64 * 4 in sizes
    assert 1000 * 64 * 4 in sizes


def test_index_backward_makes_the_recorded_requests():
    # Recorded with torch 2.11: 2048 tokens, and a sort of one tile that takes one byte.
    def make():
        weight = torch.ones(10000, 64, device="cuda", requires_grad=True)
        out = weight[torch.zeros(4, 512, device="cuda", dtype=torch.int64), :]
        gradient = torch.ones_like(out)
        return lambda: torch.autograd.grad(out, weight, gradient)

    sizes = [entry if isinstance(entry, int) else entry[1] for entry in requests(make)]
    indices = 4 * 512 * 8
    assert sizes[:12] == [
        10000 * 64 * 4, indices, indices, -indices, indices, indices, indices, 1, -1, -indices, -indices, -indices,
    ]  # fmt: skip


def test_a_gradient_that_only_the_engine_refers_to_is_added_to_in_place():
    def make():
        x = torch.ones(4, 1024, device="cuda", requires_grad=True)
        y = x * 2
        out, gradient = (y * 3, y * 5), torch.ones(4, 1024, device="cuda")
        return lambda: torch.autograd.grad(out, x, (gradient, gradient))

    # three products and no sum
    assert allocations(make) == [("mul", 16384)] * 3


def test_a_gradient_with_another_reference_is_added_to_out_of_place():
    def make():
        x = torch.ones(4, 1024, device="cuda", requires_grad=True)
        y = x * 2
        out, gradient = (y * 5, y + 3), torch.ones(4, 1024, device="cuda")
        return lambda: torch.autograd.grad(out, x, (gradient, gradient))

    # Backward starts with the last op: y + 3 passes on the caller's gradient
    assert ("add", 16384) in allocations(make)


def test_reference_counts_of_a_gradient_hold_for_the_installed_torch():
    references, storages = autograd_engine.sole_owner_counts()
    assert references > 0
    assert storages > 0


def test_a_product_with_an_expanded_gradient_copies_the_gradient():
    # Recorded with torch 2.6: output, then the copy that cuBLAS can read.
    def make():
        first = torch.ones(8, 64, 32, device="cuda")
        second = torch.ones((), device="cuda").expand(8, 32, 16)
        torch.bmm(first, first.transpose(1, 2))
        return lambda: torch.bmm(first, second)

    assert allocations(make) == [("bmm", 8 * 64 * 16 * 4), ("bmm", 8 * 32 * 16 * 4)]


def test_addmm_allocates_1_mib_for_its_epilogue_until_torch_2_8():
    def make():
        layer, x = nn.Linear(64, 32).cuda(), torch.ones(8, 64, device="cuda")
        layer(x)
        return lambda: layer(x)

    assert allocations(make, release="2.8") == [("addmm", 1024), ("addmm", 1024**2)]
    assert allocations(make, release="2.13") == [("addmm", 1024)]


@pytest.mark.parametrize(("rows", "columns", "epilogue"), [(1, 32, [1024**2]), (8, 1, [])])
def test_addmm_has_no_epilogue_only_if_the_weight_has_one_row_or_column(rows, columns, epilogue):
    def make():
        layer, x = nn.Linear(64, columns).cuda(), torch.ones(rows, 64, device="cuda")
        layer(x)
        return lambda: layer(x)

    assert [size for _, size in allocations(make, release="2.2")] == [rows * columns * 4, *epilogue]


def test_softmax_backward_has_a_product_of_gradient_and_result():
    def make():
        x = torch.ones(8, 64, device="cuda", requires_grad=True)
        y, gradient = x.softmax(-1), torch.ones(8, 64, device="cuda")
        return lambda: torch.autograd.grad(y, x, gradient)

    assert allocations(make) == [("_softmax_backward_data", 2048), ("_softmax_backward_data", 2048)]


def test_embedding_copies_indices_that_are_not_contiguous():
    def make():
        layer, ids = nn.Embedding(10, 4).cuda(), torch.zeros(1, 8, dtype=torch.int64, device="cuda").expand(2, 8)
        return lambda: layer(ids)

    # 2 x 8 indices of 8 bytes, then 2 x 8 rows of 4 floats
    assert allocations(make) == [("embedding", 128), ("embedding", 256)]


def test_a_number_to_the_power_of_a_tensor_becomes_a_tensor_on_the_device():
    def make():
        x = torch.ones(32, device="cuda")
        return lambda: (10_000**x, 1**x)

    assert requests(make)[:4] == [("pow", 128), ("pow", 8), -8, ("pow", 128)]


@pytest.mark.parametrize("shape", [(2, 4, 5), (2, 4, 5, 6), (2, 4, 5, 6, 7)])
def test_reflection_padding_copies_a_non_contiguous_input(shape):
    def make():
        x = torch.ones(shape, device="cuda")
        padding = (1, 1) * (len(shape) - 2)
        return lambda: [F.pad(each, padding, mode="reflect") for each in (x, x.transpose(0, 1))]

    result = x = 4
    for number, size in enumerate(shape):
        x *= size
        result *= size + 2 * (number > 1)
    assert [size for _, size in allocations(make)] == [result, result, x]


def test_nearest_upsampling_of_channels_last_volumes_works_on_copies():
    def make():
        x = torch.ones(2, 16, 4, 4, 4, device="cuda")
        last = x.to(memory_format=torch.channels_last_3d)
        return lambda: [F.interpolate(each, scale_factor=2, mode="nearest") for each in (x, last)]

    # 2·16·4·4·4·4 bytes, eight times as many for the result
    small, large = 8192, 65536
    assert requests(make)[:5] == [*[("upsample_nearest3d", size) for size in (large, large, large, small)], -small]


def test_clipping_computes_all_norms_at_once():
    def make():
        parameters = [nn.Parameter(torch.ones(size, device="cuda")) for size in (1000, 200_000)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        return lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0)

    # one number for each of 2 tensors times 4 chunks of 65 536, then a norm each
    assert allocations(make)[:3] == [("_foreach_norm", 32), ("_foreach_norm", 4), ("_foreach_norm", 4)]


def test_a_convolution_workspace_has_category_workspace_and_is_noted_as_an_estimate():
    with virtual("T4"):
        layer, x = nn.Conv2d(16, 32, 3).cuda(), torch.ones(2, 16, 64, 64, device="cuda")
        with record() as recording:
            layer(x)
    tape = recording.tape
    workspaces = tape.size[(tape.action == Action.ALLOC) & (tape.category == Category.WORKSPACE)]
    # As recorded for 16 channels and 32: the weight, 32·16·3·3·4, its transform, 16·16·32·4, and 32·4.
    assert workspaces.tolist() == [51328]
    assert any("workspace" in note and "estimate" in note for note in tape.meta.notes)


def test_a_reduction_of_one_number_needs_no_scratch():
    assert reductions.scratch((), (), (0,), 4, Build()) is None
