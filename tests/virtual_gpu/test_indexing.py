"""Reading and writing by index: indices on the CPU or in int32, and gradients of several indices."""

import torch

from memexplore.recorder.recording import record
from memexplore.run.machine import virtual
from memexplore.tape import Action


def requests(work, release: str = "2.11") -> list[int]:
    """Return the bytes of each request (frees negative) of `work` on values of (512, 1000) and 512 indices."""
    with virtual("T4", release=release):
        values = torch.randn(512, 1000, device="cuda", requires_grad=True)
        columns = torch.randint(0, 1000, (512,), device="cuda")
        with record() as recording:
            work(values, columns)
    tape = recording.tape
    rows = (tape.action == Action.ALLOC) | (tape.action == Action.FREE_REQUESTED)
    signs = [1 if action == Action.ALLOC else -1 for action in tape.action[rows]]
    return [sign * size for sign, size in zip(signs, tape.size[rows].tolist(), strict=True)]


INDEX = 512 * 8
RESULT = 512 * 4


def test_an_index_on_the_cpu_is_copied_to_the_gpu_for_a_read():
    # As recorded with torch 2.6 on an H100: copy, result, free of the copy.
    sizes = requests(lambda values, columns: values[torch.arange(512), columns])
    assert sizes == [INDEX, RESULT, -INDEX, -RESULT]


def test_an_int32_index_is_converted_to_int64_for_a_read():
    def work(values, columns):
        short = columns.int()
        values[short, columns]

    assert requests(work) == [INDEX // 2, INDEX, RESULT, -INDEX, -RESULT, -INDEX // 2]


def test_an_index_on_the_cpu_is_copied_to_the_gpu_for_a_write():
    def work(values, columns):
        with torch.no_grad():
            values[torch.arange(512), columns] = 1.0

    assert INDEX in requests(work)


def backward(first) -> list[int]:
    """Return the requests of the gradient of a read at (first, second), after the zeros that it is summed into."""

    def work(values, columns):
        values[first(columns), columns].sum().backward()

    sizes = requests(work)
    zeros = 512 * 1000 * 4
    return sizes[sizes.index(zeros) + 1 :]


# The gradient of a sum is expanded, so it is copied; then sorted indices, their order, the values that are sorted
# with them, and cub's scratch of one byte, which is freed.
SORTING = [RESULT, INDEX, INDEX, INDEX, 1, -1]


def test_a_second_linear_index_is_added_in_place():
    # computeLinearIndex: each is wrapped and scaled, the second is added to the first.
    wrapped = [INDEX, INDEX, -INDEX]
    assert backward(lambda columns: columns)[:13] == [*wrapped, *wrapped, -INDEX, *SORTING]


def test_the_gradient_makes_an_index_on_the_cpu_linear_on_the_cpu():
    # As recorded with torch 2.6 on an H100: the copy; wrapped and scaled, added; then sorting.
    assert backward(lambda columns: torch.arange(512))[:11] == [INDEX, INDEX, INDEX, -INDEX, -INDEX, *SORTING]


def test_a_write_by_a_mask_makes_its_indices():
    def work(values, columns):
        with torch.no_grad():
            mask = torch.ones(512, 1, dtype=torch.bool, device="cuda").squeeze(1)
            values[mask] = 0.0

    # The mask, and the value on the device; the number of true elements, cub's scratch, their indices.
    assert requests(work)[:6] == [512, 4, 4, 1, -1, INDEX]
