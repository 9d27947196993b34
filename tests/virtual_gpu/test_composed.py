"""Requests of ops whose CUDA implementation calls other ops, as measured with torch 2.11 on an H100."""

import torch
import torch.nn.functional as F

from tests.virtual_gpu.kernel_requests import requests


def events(function, *shapes, dtype=torch.float32):
    """Return the bytes of requests and frees (negative) up to the free of the result."""

    def make():
        tensors = [torch.ones(shape, dtype=dtype, device="cuda") for shape in shapes]
        return lambda: function(*tensors)

    found = requests(make, gpu="H100", release="2.11")
    return [entry if isinstance(entry, int) else entry[1] for entry in found]


def test_logsumexp_makes_maxima_exponentials_and_their_sum():
    # maxima 64·4; their size and whether it is infinite; exponentials 64·100·4; sums
    expected = [256, 256, 64, -64, -256, 25_600, 256, -25_600, -256]
    assert events(lambda x: x.logsumexp(-1), (64, 100)) == expected


def test_distances_are_one_product_of_rows_with_their_norms():
    # squares, their sums, ones, of both; rows with norms 1000·66·4 and 1200·66·4; distances
    expected = [256_000, 4000, 4000, 307_200, 4800, 4800, 256_000, 264_000, 316_800, 4_800_000]
    found = events(torch.cdist, (1000, 64), (1200, 64))
    assert [size for size in found if size > 0] == expected


def test_unfolded_windows_begin_with_the_size_of_the_image():
    image, windows = 4 * 32 * 64 * 64 * 4, 4 * 32 * 9 * 4096 * 4
    assert events(lambda x: F.unfold(x, 3, padding=1), (4, 32, 64, 64)) == [image, windows, -image]


def test_a_folded_image_keeps_the_size_of_the_windows():
    windows = 4 * 32 * 9 * 4096 * 4
    assert events(lambda x: F.fold(x, (64, 64), 3, padding=1), (4, 32 * 9, 4096)) == [windows]


def test_a_roll_along_two_dimensions_makes_a_copy_for_each():
    size = 8 * 56 * 56 * 96 * 4
    assert events(lambda x: x.roll((3, 3), (1, 2)), (8, 56, 56, 96)) == [size, size, -size]


def test_magnitudes_of_complex_values_are_complex_first():
    # the transform 16·501·8, magnitudes 16·501·4, and complex ones
    assert events(lambda x: torch.fft.rfft(x).abs(), (16, 1000))[:3] == [64_128, 32_064, 64_128]


def test_an_inverse_real_transform_copies_its_input():
    assert events(lambda x: torch.fft.irfft(torch.fft.rfft(x)), (16, 1000))[:3] == [64_128, 64_000, 64_128]


def test_a_mean_squared_error_keeps_the_memory_of_an_unreduced_loss():
    def make():
        x, y = torch.ones(1024, 16, device="cuda"), torch.zeros(1024, 16, device="cuda")
        return lambda: F.mse_loss(x, y)

    found = [entry if isinstance(entry, int) else entry[1] for entry in requests(make, gpu="H100", release="2.11")]
    # the result and the unreduced loss, 1024·16·4 each
    assert [size for size in found if size >= 65_536] == [65_536, 65_536]
    assert found[-1] == -65_536


def test_the_loss_of_multiple_classes_with_margin_makes_one_for_each_row():
    def make():
        x, y = torch.ones(64, 100, device="cuda"), torch.zeros(64, dtype=torch.int64, device="cuda")
        return lambda: F.multi_margin_loss(x, y)

    found = requests(make, gpu="H100", release="2.11")
    assert [entry[1] for entry in found if not isinstance(entry, int)] == [4, 256]


def test_factors_of_group_norm_are_allocated_last():
    def make():
        x = torch.ones(4, 512, 7, 7, device="cuda", requires_grad=True)
        weights = [torch.ones(512, device="cuda", requires_grad=True) for _ in range(2)]
        y = F.group_norm(x, 32, *weights)
        gradient = torch.ones_like(y)
        return lambda: torch.autograd.grad(y, [x, *weights], gradient)

    found = [entry[1] for entry in requests(make, gpu="H100", release="2.11") if not isinstance(entry, int)]
    # gradients; sums 4·512·4 twice, for groups 4·32·4 twice, factors of the channels 4·512·4
    assert found == [401_408, 2048, 2048, 8192, 8192, 512, 512, 8192]


def test_the_gradient_of_a_convolutions_bias_is_reduced_in_blocks():
    def make():
        x = torch.ones(16, 32, 128, 128, device="cuda", requires_grad=True)
        weight, bias = (torch.ones(size, device="cuda", requires_grad=True) for size in ((32, 32, 1, 1), (32,)))
        y = F.conv2d(x, weight, bias)
        gradient = torch.ones_like(y)
        return lambda: torch.autograd.grad(y, [bias], gradient)

    found = [entry[1] for entry in requests(make, gpu="H100", release="2.11") if not isinstance(entry, int)]
    # 32 sums in 17 blocks each, a semaphore for each sum
    assert found == [128, 32 * 17 * 4, 32 * 4]
