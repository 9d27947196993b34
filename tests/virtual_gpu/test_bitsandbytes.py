"""bitsandbytes on a virtual GPU: 8-bit and paged optimizers, 4-bit and 8-bit layers.

Those that need the library run where it is installed; it is not in the `test` extra, because it takes 130 MB.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.virtual_gpu.kernels import bitsandbytes as rules
from memexplore.virtual_gpu.kernels.plan import Constant, Output, Scratch
from memexplore.virtual_gpu.values.value_reads import NotSimulated

PROGRAM = """
import memexplore as mx
with mx.virtual("A100"):
    import bitsandbytes
print("imported")
"""


@pytest.fixture
def gpu() -> Iterator[Any]:
    with mx.virtual("A100", release="2.15") as device:
        yield device


@pytest.fixture
def bnb() -> Iterator[Any]:
    pytest.importorskip("bitsandbytes")
    with mx.virtual("A100", release="2.15"):
        import bitsandbytes

        yield bitsandbytes


# Without the library.


def test_the_native_library_is_not_loaded(gpu):
    library = ctypes.cdll.LoadLibrary("somewhere/libbitsandbytes_cuda130.so")
    library.get_context.restype = ctypes.c_void_p
    assert library.get_context() == 0
    with pytest.raises(NotSimulated, match=r"^cadam32bit of bitsandbytes cannot be simulated"):
        library.cadam32bit()


def test_managed_memory_is_outside_the_allocator_and_takes_no_space(gpu):
    with mx.record() as recording:
        library = ctypes.cdll.LoadLibrary("libbitsandbytes_cuda130.so")
        # A TiB: only pages that are written take memory.
        address = library.cget_managed_ptr(ctypes.c_size_t(2**40))
    assert ctypes.string_at(address, 4) == bytes(4)
    assert any("managed memory" in note for note in recording.tape.meta.notes)
    assert recording.tape.peak()[0] == 0


def test_the_native_library_says_that_it_belonged_to_a_virtual_gpu():
    with mx.virtual("T4"):
        library = ctypes.cdll.LoadLibrary("libbitsandbytes_cuda130.so")
    with pytest.raises(NotSimulated, match="was imported while a virtual GPU was on"):
        library.get_context()


def test_other_libraries_are_loaded(gpu):
    with pytest.raises(OSError, match="no_such_library"):
        ctypes.cdll.LoadLibrary("no_such_library.so")


class _Quantized(nn.Parameter):
    """A parameter that is quantized when it moves, as `Params4bit`."""

    def __new__(cls, data: torch.Tensor) -> Any:
        return torch.Tensor._make_subclass(cls, data, False)

    def to(self, device: Any, *args: Any, **kwargs: Any) -> Any:
        moved = self.data.to(device)
        self.data = torch.zeros(moved.numel() // 2, 1, dtype=torch.uint8, device="cuda")
        self.bnb_quantized = True
        return self


_Quantized.__module__ = "bitsandbytes.nn.modules"


def test_a_parameter_of_a_class_of_its_own_is_quantized_when_it_moves(gpu):
    model = nn.Module()
    # 4 MiB, so that a module built on a virtual GPU has it without values
    model.weight = _Quantized(nn.Linear(1024, 1024, bias=False).weight.data)
    assert isinstance(model.weight, nn.Parameter)
    model.to("cuda")
    assert (model.weight.shape, model.weight.dtype) == ((1024 * 1024 // 2, 1), torch.uint8)
    assert torch.cuda.memory_allocated() == 1024 * 1024 // 2
    assert model.to("cuda").weight.dtype is torch.uint8


def test_rows_in_8_bit_have_a_scale_each(gpu):
    source = torch.empty(4, 8, dtype=torch.half, device="cuda")
    plan = rules.vectorwise_quant((source,), {})
    assert [output.shape for output in plan.outputs[:2]] == [(4, 8), (4,)]
    assert plan.outputs[2] == Constant(None)
    assert plan.requests == [Output(1), Output(0)]


def test_the_search_for_outliers_needs_a_copy_and_a_mask(gpu):
    source = torch.empty(4, 8, dtype=torch.half, device="cuda")
    plan = rules.vectorwise_quant((source, 6.0), {})
    assert plan.outputs[2].shape == (0,)
    # abs of 32 halves, their mask, `any`
    assert [request.size for request in plan.requests if type(request) is Scratch] == [64, 32, 1]


# With the library.


def test_import_prints_nothing_but_what_the_program_prints():
    pytest.importorskip("bitsandbytes")
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert run.stdout == "imported\n"
    assert "error" not in run.stderr.lower()


def _state_bytes(make: Any) -> int:
    """Return the bytes that two steps of an optimizer leave allocated, for 1 000 000 and 100 parameters."""
    model = nn.ParameterList([torch.ones(1000, 1000), torch.ones(100)]).cuda()
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    before = torch.cuda.memory_allocated()
    optimizer = make(model.parameters())
    for _ in range(2):
        optimizer.step()
    return torch.cuda.memory_allocated() - before


# In blocks of 512 bytes: 10^6 states of 1 byte, the maxima of 3907 blocks of 256, a map of 256 numbers; the second
# parameter has fewer than 4096 elements and states of 4 bytes.
STATES, MAXIMA, MAP, SMALL = 1_000_448, 15_872, 1024, 512


@pytest.mark.parametrize(
    ("name", "states"),
    [("Adam8bit", 2), ("AdamW8bit", 2), ("Lion8bit", 1), ("RMSprop8bit", 1), ("Adagrad8bit", 1)],
)
def test_states_of_8_bit_optimizers_have_their_true_size(bnb, name, states):
    # Optimizers with one state make both maps only where they need them.
    size = _state_bytes(lambda parameters: getattr(bnb.optim, name)(parameters, lr=0.1))
    assert size == states * (STATES + MAXIMA + MAP + SMALL)


def test_states_of_paged_optimizers_are_not_in_the_allocator(bnb):
    size = _state_bytes(lambda parameters: bnb.optim.PagedAdamW8bit(parameters, lr=0.1))
    assert size == 2 * (MAXIMA + MAP + SMALL)


def test_a_4_bit_layer_is_quantized_on_the_gpu(bnb):
    layer = bnb.nn.Linear4bit(1024, 1024, bias=False, compute_dtype=torch.bfloat16, compress_statistics=False).cuda()
    # Two weights a byte, a maximum of 4 bytes for each 64 weights, the 16 values of the type
    assert torch.cuda.memory_allocated() == 1024 * 1024 // 2 + 1024 * 1024 // 64 * 4 + 512
    x = torch.ones(2, 1024, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == (2, 1024)


def test_an_8_bit_layer_runs_forward_and_backward(bnb):
    layer = bnb.nn.Linear8bitLt(1024, 512, bias=False, has_fp16_weights=False, threshold=6.0).cuda()
    assert layer.weight.dtype is torch.int8
    x = torch.ones(2, 1024, dtype=torch.half, device="cuda", requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == (2, 1024)
