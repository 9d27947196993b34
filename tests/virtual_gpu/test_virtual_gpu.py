"""Ordinary CUDA code on the virtual GPU: devices, CPU tensors, and `torch.cuda`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from memexplore.torch_internals.dispatch import disable_current_modes
from memexplore.virtual_gpu.tensors.tensor import DeviceState
from tests.small import allocated, batch, network, on_a_t4


@pytest.fixture(autouse=True)
def gpu() -> Iterator[Any]:
    yield from on_a_t4()


# Devices.

SPELLINGS = ["cuda", "cuda:0", 0, torch.device("cuda"), torch.device("cuda", 0)]


@pytest.mark.parametrize("device", SPELLINGS)
@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.ones(3, device=device),
        lambda device: torch.ones(3).to(device),
        lambda device: torch.ones(3).to(device=device, dtype=torch.float16, non_blocking=True),
        lambda device: torch.ones(3).to(device, torch.float16),
        lambda device: torch.ones(3).cuda(device if device != "cuda:0" else None),
        lambda device: torch.tensor([1.0, 2.0], device=device),
        lambda device: torch.as_tensor(np.ones(3), device=device),
        lambda device: torch.asarray([1, 2], device=device),
        lambda device: torch.ones(3).new_zeros(2, device=device),
        lambda device: torch.ones(3).new_tensor([2.0], device=device),
        lambda device: torch.zeros_like(torch.ones(3), device=device),
        lambda device: torch.arange(3, device=device),
        lambda device: torch.randperm(3, device=device),
    ],
)
def test_tensors_are_on_the_gpu_for_every_spelling_of_the_device(
    device: Any, make: Callable[[Any], torch.Tensor]
) -> None:
    if device == "cuda" and make.__code__.co_names[-1:] == ("cuda",):
        device = None  # `.cuda("cuda")` has no index, which torch refuses
    made = make(device) if device is not None else torch.ones(3).cuda()
    assert made.is_cuda
    assert made.device == torch.device("cuda", 0)
    assert made.get_device() == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.new_ones(4),
        lambda x: x.new_tensor([1, 2]),
        lambda x: x.new_empty(3),
        lambda x: x.new(2, 3),
        lambda x: x.new([1.0, 2.0]),
        lambda x: x.new(x.shape),
        lambda x: x.new(x),
        lambda x: x.new_full((2, 2), 1.0),
        lambda x: torch.rand_like(x),
        lambda x: torch.ones(3).to(x),
        lambda x: torch.ones(3).type_as(x),
        lambda x: torch.tensor(x),
        lambda x: torch.bernoulli(x),
        lambda x: torch.multinomial(x, 2),
        lambda x: torch.ones(3, device=x.device),
        lambda x: torch.cuda.FloatTensor(3),
        lambda x: torch.ones(3).type("torch.cuda.HalfTensor"),
        lambda x: x[[0, 1]],
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x * torch.tensor(2.0),
        lambda x: torch.from_numpy(np.ones(3)).cuda(),
        lambda x: torch.empty(3, pin_memory=True).to("cuda", non_blocking=True),
    ],
)
def test_a_tensor_made_from_a_gpu_tensor_is_on_the_gpu(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert make(torch.ones(3, device="cuda")).is_cuda


def test_dtypes_are_kept() -> None:
    assert torch.tensor([[1, 2], [3, 4]], device="cuda").dtype is torch.int64
    assert torch.tensor(np.ones(2), device="cuda").dtype is torch.float64
    assert torch.tensor(3.0, device="cuda", requires_grad=True).is_leaf
    assert torch.ones(2, dtype=torch.float64).to(torch.ones(1, device="cuda")).dtype is torch.float32
    assert torch.ones(3, device="cuda").type() == "torch.cuda.FloatTensor"
    assert isinstance(torch.ones(3, device="cuda"), torch.cuda.FloatTensor)
    assert not isinstance(torch.ones(3), torch.cuda.FloatTensor)


def test_a_tensor_moves_back_to_the_cpu() -> None:
    for back in (torch.ones(3, device="cuda").cpu(), torch.ones(3, device="cuda").to("cpu")):
        assert back.is_cpu
        assert back.device == torch.device("cpu")


def test_a_default_device_holds_until_it_is_reset() -> None:
    torch.set_default_device("cuda")
    assert torch.get_default_device() == torch.device("cuda", 0)
    assert torch.ones(3).is_cuda
    assert torch.tensor([1.0]).is_cuda
    assert nn.Linear(2, 2).weight.is_cuda
    assert torch.ones(3, device="cpu").is_cpu
    torch.set_default_device(None)
    assert torch.ones(3).is_cpu


def test_a_device_context_holds_in_its_block() -> None:
    with torch.device("cuda"):
        assert torch.zeros(3).is_cuda
        assert torch.tensor([1.0]).is_cuda
    assert torch.zeros(3).is_cpu


def test_meta_tensors_of_the_user_stay_meta() -> None:
    x = torch.ones(3, 4, device="meta")
    for made in (x + x, x @ x.T, torch.empty_like(x), x.new_zeros(3), torch.ones(3).to("meta")):
        assert made.is_meta
    for made in (
        torch.ones(3, device="cuda").to("meta"),
        torch.empty_like(torch.ones(3, device="cuda"), device="meta"),
    ):
        assert type(made) is torch.Tensor
        assert made.is_meta
    assert torch.zeros_like(x, device="cuda").is_cuda


@pytest.mark.parametrize(
    "use",
    [
        lambda: torch.ones(3, device="cuda:1"),
        lambda: torch.ones(3).to("cuda:1"),
        lambda: torch.ones(3).cuda(1),
        lambda: network().to("cuda:1"),
        lambda: torch.cuda.set_device(1),
        lambda: torch.cuda.get_device_properties(1),
        lambda: torch.cuda.memory_allocated("cuda:1"),
    ],
)
def test_a_second_gpu_raises_an_error(use: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match=r"invalid device ordinal.* one device, cuda:0"):
        use()


@pytest.mark.parametrize(
    ("mix", "advice"),
    [
        (lambda: network()(batch()[0]), "a parameter of shape .* move the model with model.to"),
        (lambda: network().cuda()(torch.randn(8, 64)), r"the model .* its data of shape \(8, 64\) .* move the data"),
        (lambda: torch.ones(3) + torch.ones(3, device="cuda"), r"a tensor of shape \(3,\) is on the CPU: move it"),
        (
            lambda: nn.Conv2d(3, 4, 3)(torch.ones(1, 3, 8, 8, device="cuda")),
            "a parameter of shape .* move the model with",
        ),
        (lambda: nn.Embedding(4, 4).cuda()(torch.tensor([1])), "the model is on the GPU and its data"),
        (
            lambda: functional.cross_entropy(torch.ones(2, 4, device="cuda"), torch.tensor([0, 1])),
            r".* \(2,\) .* move it",
        ),
        (lambda: torch.ones(3)[torch.tensor([0], device="cuda")], r".* \(3,\) is on the CPU: move it"),
    ],
)
def test_mixed_devices_raise_an_error_that_says_what_to_move(mix: Callable[[], object], advice: str) -> None:
    with pytest.raises(RuntimeError, match=r"on the same device, but found .* cuda:0 and cpu! In \w+, " + advice):
        mix()


def test_a_tensor_used_while_the_modes_of_torch_are_disabled_raises_a_clear_error() -> None:
    x = torch.ones(3, device="cuda")
    with disable_current_modes(), pytest.raises(RuntimeError, match="while its modes are disabled"):
        x + 1


def test_a_tensor_used_while_the_gpu_is_off_raises_a_clear_error(monkeypatch) -> None:
    x = torch.ones(3, device="cuda")
    monkeypatch.setattr(DeviceState, "gpu_name", None)
    monkeypatch.setattr(DeviceState, "run_without_mode", None)
    with disable_current_modes(), pytest.raises(RuntimeError, match="which is off now"):
        x + 1


# CPU tensors.


def test_a_loop_on_the_cpu_converges() -> None:
    torch.manual_seed(0)
    x, truth = torch.randn(256, 4), torch.tensor([1.0, -2.0, 3.0, 0.5])
    y, model = x @ truth, nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(200):
        loss = ((model(x).squeeze(-1) - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 1e-6
    assert torch.allclose(model.weight.detach(), truth[None], atol=1e-3)
    assert allocated() == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shuffled_loader_feeds_the_device(workers: int) -> None:
    data = TensorDataset(torch.randn(64, 64), torch.randint(10, (64,)))
    model, batches = network().cuda(), 0
    for x, y in DataLoader(data, 16, shuffle=True, num_workers=workers, pin_memory=True):
        assert x.is_cpu
        x, y = x.to("cuda", non_blocking=True), y.cuda(non_blocking=True)
        functional.cross_entropy(model(x), y).backward()
        batches += 1
    assert batches == 4  # 64 / 16


def test_generators_of_both_devices_work() -> None:
    generator = torch.Generator(device="cuda")
    assert isinstance(generator.manual_seed(3), torch.Generator)
    assert generator.device.type == "cuda"
    assert torch.randn(3, device="cuda", generator=generator).is_cuda
    assert torch.empty(3, device="cuda").normal_(generator=generator).is_cuda
    seeded = torch.Generator().manual_seed(1)
    assert torch.equal(torch.randn(3, generator=seeded), torch.randn(3, generator=torch.Generator().manual_seed(1)))


# torch.cuda.


def test_device_properties_are_those_of_the_named_gpu() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    assert torch.cuda.current_device() == 0
    assert torch.cuda.get_device_name(0) == "Tesla T4"
    assert torch.cuda.get_device_capability() == (7, 5)
    properties = torch.cuda.get_device_properties("cuda")
    assert (properties.name, properties.major, properties.minor) == ("Tesla T4", 7, 5)
    assert properties.multi_processor_count == 40
    free, total = torch.cuda.mem_get_info()
    assert free < total == properties.total_memory
    assert torch.cuda.is_bf16_supported()
    assert not torch.cuda.is_bf16_supported(including_emulation=False)


def test_memory_is_counted_as_pytorch_counts_it() -> None:
    x = torch.ones(1000, 1000, device="cuda")
    # 4_000_000 bytes in blocks of 512; requests from 1 MiB to 10 MiB get segments of 20 MiB
    assert allocated() == torch.cuda.memory_allocated("cuda:0") == 4_000_256
    assert torch.cuda.memory_reserved() == 20 * 1024**2
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == 4_000_256
    assert torch.cuda.memory_stats()["requested_bytes.all.current"] == 4_000_000
    assert torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["large_pool"]["current"] == 4_000_256
    del x
    assert allocated() == 0
    assert torch.cuda.max_memory_allocated() == 4_000_256
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 0
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    assert torch.cuda.max_memory_reserved() == 20 * 1024**2


def test_memory_summary_has_the_format_of_pytorch() -> None:
    x = torch.ones(1024, 1024, device="cuda")
    summary = torch.cuda.memory_summary()
    assert "PyTorch CUDA memory summary, device ID 0" in summary
    assert re.search(r"Allocated memory +\| +4096 KiB \| +4096 KiB \| +4096 KiB \| +0 B", summary)
    assert "from small pool" not in torch.cuda.memory_summary(abbreviated=True)
    del x


def test_streams_and_events_work() -> None:
    side = torch.cuda.Stream()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(side):
        x = torch.ones(3, device="cuda")
    x.record_stream(side)
    torch.cuda.current_stream().wait_stream(side)
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) >= 0
    assert side.query()


def test_random_state_can_be_read_and_set() -> None:
    torch.cuda.manual_seed(0)
    torch.cuda.manual_seed_all(0)
    torch.cuda.set_rng_state(torch.cuda.get_rng_state())
    with torch.random.fork_rng(devices=[0]):
        torch.manual_seed(0)


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.cuda.synchronize("cuda"),
        lambda: torch.cuda.ipc_collect(),
        lambda: torch.cuda.set_per_process_memory_fraction(0.5),
        lambda: torch.cuda.get_allocator_backend(),
        lambda: torch.cuda.nvtx.range_push("step"),
        lambda: torch.cuda.device(0).__enter__(),
        lambda: torch.accelerator.current_accelerator(),
        lambda: torch.accelerator.memory_allocated(),
        lambda: torch.get_device_module().memory_allocated(),
        lambda: torch.cuda.memory.memory_allocated(),
        lambda: torch.cuda.memory_snapshot(),
    ],
)
def test_further_functions_of_torch_cuda_work(call: Callable[[], object]) -> None:
    call()


def test_cuda_graphs_raise_a_clear_error() -> None:
    with pytest.raises(RuntimeError, match="a CUDA graph cannot be simulated on a virtual GPU"):
        torch.cuda.CUDAGraph()


def test_tensors_inside_torch_func_are_on_the_gpu() -> None:
    def per_row(x: torch.Tensor) -> torch.Tensor:
        assert (str(x.device), x.is_cuda, x.is_meta) == ("cuda:0", True, False)
        return x + torch.ones(4, device=x.device) + x.new_ones(4)

    x = torch.ones(3, 4, device="cuda")
    assert torch.func.vmap(per_row)(x).is_cuda
    assert torch.func.grad(lambda x: per_row(x[0]).sum())(x).is_cuda


def test_a_default_dtype_that_changes_while_the_gpu_is_on_decides_the_next_result() -> None:
    whole = torch.arange(4, device="cuda")
    try:
        assert (whole / 2).dtype is torch.float32
        torch.set_default_dtype(torch.float64)
        assert (whole / 2).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
