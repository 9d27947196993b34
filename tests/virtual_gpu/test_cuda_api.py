"""`torch.cuda`, `torch.accelerator` and names of `torch` on a virtual GPU, as on a machine with one GPU."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import os
import pickle
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.cuda.tunable
import torch.utils.benchmark
from torch import nn

import memexplore as mx
from memexplore.virtual_gpu.device import turn_off
from memexplore.virtual_gpu.values.value_reads import NotSimulated


@pytest.fixture(autouse=True)
def gpu() -> Iterator[Any]:
    with mx.virtual("A100 40GB", release="2.13") as device:
        yield device


def _one() -> torch.Tensor:
    return torch.ones(1, device="cuda")


# Every public function, with its arguments; without an entry it is called without arguments.

_MODULES = (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.accelerator, torch.accelerator.memory)
_ARGUMENTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "caching_allocator_alloc": lambda: (1000,),
    "caching_allocator_delete": lambda: (torch.cuda.caching_allocator_alloc(1000),),
    "can_device_access_peer": lambda: (0, 0),
    "change_current_allocator": lambda: (None,),
    "check_error": lambda: (0,),
    "CudaError": lambda: (2,),
    "device": lambda: (0,),
    "device_index": lambda: (0,),
    "device_of": lambda: (_one(),),
    "ExternalStream": lambda: (1234,),
    "get_stream_from_external": lambda: (1234,),
    "make_graphed_callables": lambda: (nn.Linear(1, 1), ()),
    "manual_seed": lambda: (0,),
    "manual_seed_all": lambda: (0,),
    "set_device": lambda: (0,),
    "set_device_idx": lambda: (0,),
    "set_device_index": lambda: (0,),
    "set_per_process_memory_fraction": lambda: (0.5,),
    "set_rng_state": lambda: (torch.cuda.get_rng_state(),),
    "set_rng_state_all": lambda: (torch.cuda.get_rng_state_all(),),
    "set_stream": lambda: (torch.cuda.Stream(),),
    "set_sync_debug_mode": lambda: ("warn",),
    "stream": lambda: (torch.cuda.Stream(),),
    "StreamContext": lambda: (torch.cuda.Stream(),),
    "use_mem_pool": lambda: (None,),
}


def _public(module: ModuleType) -> list[str]:
    names = getattr(module, "__all__", None) or vars(module)
    return sorted(
        name
        for name in names
        if not name.startswith("_") and callable(getattr(module, name)) and not inspect.ismodule(getattr(module, name))
    )


@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module in _MODULES for name in _public(module)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_every_public_function_works_or_says_in_one_sentence_that_it_cannot_be_simulated(module, name):
    function = getattr(module, name)
    with contextlib.suppress(NotSimulated):
        try:
            function(*_ARGUMENTS.get(name, tuple)())
        except NotSimulated as error:
            assert str(error).count(". ") == 0
            assert "cannot be simulated on a virtual GPU: " in str(error)
            raise


def test_the_public_functions_that_are_refused():
    refused = set()
    for module in (torch.cuda, torch.accelerator):
        for name in _public(module):
            try:
                getattr(module, name)(*_ARGUMENTS.get(name, tuple)())
            except NotSimulated:
                refused.add(name)
    storages = {name for name in refused if name.endswith("Storage")}
    assert refused - storages <= {
        *("CUDAGraph", "graph", "graph_pool_handle", "make_graphed_callables", "Graph"),
        *("export_dot", "export_graph_data"),
        *("MemPool", "use_mem_pool", "CUDAPluggableAllocator", "change_current_allocator", "GreenContext"),
    }


@pytest.mark.parametrize("name", torch.cuda.tunable.__all__)
def test_nothing_is_tuned(name):
    function = getattr(torch.cuda.tunable, name)
    if name.endswith("is_enabled"):
        assert function() is False
    else:
        with pytest.raises(NotSimulated, match="a tunable operator"):
            function()


def test_submodules_have_the_same_functions():
    assert torch.cuda.memory.is_initialized()
    assert torch.cuda.random.device_count() == 1
    assert torch.cuda.streams.Event is torch.cuda.Event
    assert torch.cuda.memory.get_per_process_memory_fraction() == 1.0


# Memory.


def test_memory_functions_agree():
    kept = torch.ones(1024, 1024, device="cuda")
    # 4 MiB in a segment of 20 MiB
    assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated() == kept.nbytes
    free, total = torch.cuda.mem_get_info()
    if hasattr(torch.accelerator, "get_memory_info"):
        assert torch.accelerator.get_memory_info() == (free, total)
    assert torch.cuda.cudart().cudaMemGetInfo(0) == (free, total)
    assert torch.cuda.device_memory_used() == total - free
    assert f"{os.getpid()}" in torch.cuda.list_gpu_processes()
    assert f"{(total - free) / 1024**2:.3f} MB" in torch.cuda.list_gpu_processes()


def test_a_block_of_the_caching_allocator_is_recorded():
    with mx.record() as recording:
        address = torch.cuda.caching_allocator_alloc(1000)
        # in blocks of 512 bytes
        assert torch.cuda.memory_allocated() == 1024
        torch.cuda.caching_allocator_delete(address)
        assert torch.cuda.memory_allocated() == 0
    assert recording.tape.peak("requested")[0] == 1000
    with pytest.raises(ValueError, match="invalid device pointer"):
        torch.cuda.caching_allocator_delete(address)


def test_clearing_the_workspaces_of_cublas_frees_them():
    x = torch.ones(16, 16, device="cuda")
    x @ x
    # 16 x 16 x 4 = 1024 bytes of x, and 2 x 4 MiB + 8 x 16 KiB of workspace
    assert torch.cuda.memory_allocated() == 1024 + 8_519_680
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() == 1024
    x @ x
    assert torch.cuda.memory_allocated() == 1024 + 8_519_680


# Devices by number.


def test_a_number_is_a_cuda_device():
    assert torch.device(0) == torch.device("cuda", 0) == torch.device("cuda:0")
    assert isinstance(torch.device("cpu"), torch.device)
    assert not isinstance("cpu", torch.device)
    with torch.device(0):
        assert torch.ones(1).is_cuda


def test_a_device_is_copied_and_pickled():
    device = torch.device(0)
    assert copy.deepcopy(device) == pickle.loads(pickle.dumps(device)) == device


def test_a_scripted_function_takes_a_device():
    def move(x: torch.Tensor, device: torch.device) -> torch.Tensor:
        return x.to(device)

    move.__annotations__ = {"x": torch.Tensor, "device": torch.device, "return": torch.Tensor}
    assert torch.jit.script(move)(torch.ones(2), torch.device("cpu")).tolist() == [1, 1]


def test_a_device_made_on_a_virtual_gpu_is_torchs_own():
    device = torch.device(0)
    turn_off()
    assert type(device) is torch.device


@pytest.mark.parametrize(
    "where", [0, "cuda", torch.device("cuda", 0), {"cpu": "cuda:0"}, lambda storage, saved: storage.cuda(0)]
)
def test_map_location_names_the_gpu(where):
    file = io.BytesIO()
    torch.save({"weight": torch.ones(3)}, file)
    file.seek(0)
    assert torch.load(file, map_location=where)["weight"].is_cuda


# Streams and events.


def test_the_time_between_events_is_that_of_the_ops():
    start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    x = torch.ones(8192, 8192, device="cuda")
    start.record()
    x @ x
    middle.record()
    x @ x, x @ x
    end.record()
    torch.cuda.synchronize()
    # 2 x 8192^3 FLOPs at 19.5 TFLOP/s (fp32)
    assert start.elapsed_time(middle) == pytest.approx(2 * 8192**3 / 19.5e12 * 1000)
    assert middle.elapsed_time(end) == pytest.approx(2 * start.elapsed_time(middle))
    assert end.elapsed_time(start) == pytest.approx(-3 * start.elapsed_time(middle))


def test_the_time_between_events_without_an_op_is_that_of_a_launch():
    start, end = torch.cuda.Event(enable_timing=True), torch.Event("cuda", enable_timing=True)
    start.record()
    end.record()
    assert start.elapsed_time(end) == 0.005


def test_events_without_timing_or_record_have_no_time():
    # enable_timing, blocking, interprocess
    timed = torch.cuda.Event(True, False, False)
    with pytest.raises(ValueError, match="enable_timing=True"):
        timed.elapsed_time(torch.cuda.current_stream().record_event())
    with pytest.raises(ValueError, match="must be recorded"):
        timed.elapsed_time(torch.cuda.Event(enable_timing=True))


def test_a_block_on_a_stream_has_it_as_the_current_one():
    default, stream = torch.cuda.default_stream(), torch.cuda.Stream(priority=-1)
    assert torch.cuda.current_stream() == default != stream
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream
        assert torch._C._cuda_getCurrentRawStream(0) == stream.cuda_stream
        with torch.cuda.stream(None):
            assert torch.cuda.current_stream() == stream
    assert torch.cuda.current_stream() == default
    assert stream.priority == -1


def test_streams_and_events_of_torch_are_those_of_the_gpu():
    assert isinstance(torch.Stream(device="cuda"), torch.cuda.Stream)
    assert isinstance(torch.Event(), torch.cuda.Event)
    assert isinstance(torch.cuda.Stream(), torch.Stream)
    assert not isinstance(torch.cuda.Stream(), torch.Event)


# What a CUDA build has.


def test_the_version_of_cuda_is_that_of_the_release():
    assert torch.version.cuda is not None
    assert torch.backends.cuda.is_built()
    assert torch.backends.cudnn.is_available()
    assert torch.backends.cudnn.version() > 90000


def test_properties_have_the_fields_of_a_cuda_build():
    properties = torch.cuda.get_device_properties(0)
    assert (properties.name, properties.major, properties.multi_processor_count) == ("NVIDIA A100-SXM4-40GB", 8, 108)
    # CUDA C++ programming guide, compute capability 8.0: 164 KB, of which one block can have 163.
    assert properties.shared_memory_per_multiprocessor == 164 * 1024
    assert properties.shared_memory_per_block_optin == 163 * 1024
    assert (properties.max_threads_per_multi_processor, properties.L2_cache_size) == (2048, 40 * 1024**2)
    assert str(properties.uuid) == str(torch.cuda.get_device_properties("cuda").uuid)


def test_an_error_of_the_runtime_is_a_cuda_error():
    torch.cuda.check_error(0)
    with pytest.raises(torch.cuda.CudaError, match=r"\(2\)"):
        torch.cuda.check_error(2)
    with torch.cuda.profiler.profile():
        pass


def test_the_default_tensor_type_may_be_one_of_cuda():
    assert torch.ones(1, device="cuda").dtype is torch.float
    torch.set_default_tensor_type("torch.cuda.HalfTensor")
    assert (torch.ones(1).dtype, torch.ones(1).is_cuda, nn.Linear(1, 1).weight.is_cuda) == (torch.half, True, True)
    torch.set_default_tensor_type(torch.FloatTensor)
    assert (torch.ones(1).dtype, torch.ones(1).is_cuda) == (torch.float, False)
    with pytest.raises(TypeError, match="floating-point"):
        torch.set_default_tensor_type(torch.cuda.LongTensor)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: torch.cuda.FloatTensor(3, 4), (3, 4)),
        (lambda: torch.cuda.FloatTensor([1, 2]), (2,)),
        (lambda: torch.cuda.FloatTensor(np.zeros((2, 3))), (2, 3)),
        (lambda: torch.cuda.FloatTensor(torch.Size([2, 3])), (2, 3)),
        (lambda: torch.cuda.FloatTensor(), (0,)),
    ],
)
def test_legacy_constructors_make_tensors(make, shape):
    assert make().shape == shape
    assert make().type() == "torch.cuda.FloatTensor"


def test_the_profiler_with_cuda_activity_prints_no_errors(capfd):
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    x = torch.ones(10, 10, device="cuda")
    with torch.profiler.profile(activities=activities, profile_memory=True, record_shapes=True) as profiler:
        x @ x
    assert "aten::mm" in profiler.key_averages().table(sort_by="cuda_time_total")
    assert "Failed" not in capfd.readouterr().err


def test_a_benchmark_timer_runs():
    timer = torch.utils.benchmark.Timer("x @ x", globals={"x": torch.ones(4, 4, device="cuda")})
    assert timer.timeit(2).mean > 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_tensor_is_converted_to_a_class_of_tensors(device):
    x = torch.ones(2, device=device)
    for kind, dtype, target in (
        (torch.cuda.LongTensor, torch.int64, "cuda"),
        (torch.LongTensor, torch.int64, "cpu"),
        ("torch.cuda.HalfTensor", torch.float16, "cuda"),
        (torch.float64, torch.float64, device),
    ):
        result = x.type(kind)
        assert (result.dtype, result.device.type) == (dtype, target)


@pytest.mark.parametrize(
    ("make", "device", "shape"),
    [
        # legacy_tensor_ctor in torch/csrc/utils/tensor_new.cpp takes the default type for sizes and data only.
        (lambda: torch.Tensor([1.0, 2.0]), "cuda", (2,)),
        (lambda: torch.Tensor(2, 3), "cuda", (2, 3)),
        (lambda: torch.Tensor(torch.Size([4])), "cuda", (4,)),
        (lambda: torch.Tensor(), "cuda", (0,)),
        (lambda: torch.Tensor(np.ones(3)), "cuda", (3,)),
        (lambda: torch.Tensor([1.0], device="cuda"), "cuda", (1,)),
        (lambda: torch.Tensor(torch.ones(2, device="cpu")), "cpu", (2,)),
        # A type of its own, whatever the default type is.
        (lambda: torch.FloatTensor([1.0]), "cpu", (1,)),
        (lambda: torch.FloatTensor(2, 3), "cpu", (2, 3)),
        # torch.tensor takes the default type for data, and a tensor stays where it is.
        (lambda: torch.tensor([1.0]), "cuda", (1,)),
        (lambda: torch.as_tensor(np.ones(3, np.float32)), "cuda", (3,)),
        (lambda: torch.as_tensor(torch.ones(2, device="cpu")), "cpu", (2,)),
        (lambda: torch.from_numpy(np.ones(3, np.float32)), "cpu", (3,)),
    ],
)
def test_constructors_follow_the_default_tensor_type(make, device, shape):
    torch.set_default_tensor_type("torch.cuda.FloatTensor")
    made = make()
    assert (made.device.type, made.dtype, tuple(made.shape)) == (device, torch.float, shape)
    torch.set_default_tensor_type(torch.FloatTensor)
    assert torch.Tensor([1.0]).device.type == "cpu"


def test_a_default_tensor_type_of_cuda_refuses_the_cpu():
    torch.set_default_tensor_type("torch.cuda.FloatTensor")
    with pytest.raises(RuntimeError, match="legacy constructor expects device type: cuda but device type: cpu was pas"):
        torch.Tensor([1.0], device="cpu")


def test_the_default_tensor_type_ends_with_the_gpu():
    torch.set_default_tensor_type("torch.cuda.FloatTensor")
    turn_off()
    assert (torch.Tensor([1.0]).device.type, torch.rand(1).device.type) == ("cpu", "cpu")


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_a_default_device_takes_tensors_too():
    torch.set_default_device("cuda")
    x = torch.ones(2, device="cpu")
    # The function mode of torch/utils/_device.py adds the device to these calls, and not to torch.Tensor.
    assert [make(x).device.type for make in (torch.tensor, torch.as_tensor, torch.Tensor)] == ["cuda", "cuda", "cpu"]
    torch.set_default_device(None)
