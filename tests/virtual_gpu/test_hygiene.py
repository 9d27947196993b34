"""A run on a virtual GPU leaves no hook, mode, patch or thread, and the user's objects unchanged."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import memexplore as mx
from tests.virtual_gpu.torch_state import functions, global_state


def _step() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(2):
        x, y = torch.randn(8, 64, device="cuda"), torch.randint(10, (8,), device="cuda")
        with torch.autocast("cuda"):
            loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def _error() -> None:
    _step()
    raise ValueError("from the cell")


def _interrupt() -> None:
    _step()
    raise KeyboardInterrupt


def _interrupt_in_forward() -> None:
    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    with torch.autocast("cuda"):
        nn.Sequential(nn.Linear(4, 4), Slow()).cuda()(torch.ones(2, 4, device="cuda"))


def _error_in_backward() -> None:
    x = torch.ones(4, device="cuda", requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: 1 / 0)
    y.sum().backward()


def _out_of_memory() -> None:
    kept = [torch.empty(1 << 30, device="cuda") for _ in range(10)]
    del kept


def _default_device_left_on() -> None:
    torch.set_default_device("cuda")
    torch.ones(3)


def _compiled() -> None:
    torch.compile(nn.Linear(4, 4).cuda())(torch.ones(2, 4, device="cuda"))


SCENARIOS: dict[str, tuple[Callable[[], None], type[BaseException] | None]] = {
    "a step": (_step, None),
    "an exception": (_error, ValueError),
    "an interrupt": (_interrupt, KeyboardInterrupt),
    "an interrupt inside a layer and autocast": (_interrupt_in_forward, KeyboardInterrupt),
    "an exception in backward": (_error_in_backward, ZeroDivisionError),
    "out of memory": (_out_of_memory, torch.OutOfMemoryError),
    "a default device": (_default_device_left_on, None),
    "torch.compile": (_compiled, None),
}


def _run(function: Callable[[], None], error: type[BaseException] | None) -> mx.Tape:
    recording = None
    try:
        with mx.virtual("T4"), mx.record() as recording:
            function()
    except BaseException as raised:
        assert error is not None, raised
        assert isinstance(raised, error), raised
    else:
        assert error is None
    assert recording is not None
    return recording.tape


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize("name", SCENARIOS)
def test_global_state_of_torch_is_restored(name: str) -> None:
    function, error = SCENARIOS[name]
    _run(function, error)  # imports what torch imports lazily
    every_function, before = functions(), global_state()
    _run(function, error)
    after = functions()
    assert {key for key, value in every_function.items() if after.get(key) != value} == set()
    assert global_state() == before


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize("name", SCENARIOS)
def test_second_run_gives_the_same_tape(name: str) -> None:
    function, error = SCENARIOS[name]
    assert _run(function, error).equals(_run(function, error))


@pytest.fixture
def model() -> nn.Module:
    """A real model that has been trained a little: with gradients, buffers that moved, and an odd attribute."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 10))
    made[0].weight.tagged = "mine"
    made(torch.randn(4, 3, 8, 8)).sum().backward()
    made[3].bias.requires_grad_(False)
    return made


def _everything(model: nn.Module) -> list[tuple[Any, ...]]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [
        (name, id(tensor), type(tensor), tensor.device, tensor.requires_grad, tensor.is_leaf, tensor.data_ptr())
        + (tensor.detach().numpy().tobytes(), tensor.grad is None, dict(tensor.__dict__))
        for name, tensor in tensors
    ]


def _gradients(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else (id(p.grad), p.grad.numpy().tobytes()) for p in model.parameters()]


def _moved(model: nn.Module) -> None:
    model.to("cuda")


def _trained(model: nn.Module) -> None:
    model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        model(torch.randn(4, 3, 8, 8, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _moved_back(model: nn.Module) -> None:
    model.cuda().cpu().cuda()


def _halved(model: nn.Module) -> None:
    model.to("cuda", torch.float16)


def _wrapped(model: nn.Module) -> None:
    nn.Sequential(model, nn.Linear(10, 2)).cuda()


def _data_assigned(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.cuda()


def _failing(model: nn.Module) -> None:
    model.cuda()
    torch.empty(1 << 40, device="cuda")


@pytest.mark.parametrize("use", [_moved, _trained, _moved_back, _halved, _wrapped, _data_assigned, _failing])
def test_a_real_model_is_unchanged_afterwards(model: nn.Module, use: Callable[[nn.Module], None]) -> None:
    before, gradients = _everything(model), _gradients(model)
    mx.simulate(lambda: use(model))
    assert _everything(model) == before
    assert _gradients(model) == gradients


@pytest.mark.parametrize("make", [torch.jit.script, lambda net: torch.jit.trace(net, torch.ones(3, 4))])
def test_a_real_module_of_torchscript_is_unchanged_afterwards(make: Callable[[nn.Module], nn.Module]) -> None:
    net, x = make(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval())), torch.randn(3, 4)
    optimizer, identities = torch.optim.SGD(net.parameters(), lr=0.1), [id(tensor) for tensor in net.parameters()]
    parameters, expected = list(net.parameters()), net(x)
    mx.simulate(lambda: net.cuda()(x.cuda()).sum().backward())
    assert [id(tensor) for tensor in net.parameters()] == identities
    assert torch.equal(net(x), expected)
    net(x).sum().backward()
    optimizer.step()
    assert all(tensor.grad is not None for tensor in parameters)
    assert not torch.equal(net(x), expected)


def test_real_model_trains_after_a_simulation_as_without_one(model: nn.Module) -> None:
    model.zero_grad()  # a copy of a parameter comes without its gradient
    twin, x = copy.deepcopy(model), torch.randn(4, 3, 8, 8)
    optimizers = [torch.optim.Adam(net.parameters()) for net in (model, twin)]
    mx.simulate(lambda: _trained(model))
    for net, optimizer in zip((model, twin), optimizers, strict=True):
        net(x).square().sum().backward()
        optimizer.step()
    for parameter, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter, expected)


def test_an_optimizer_made_before_a_simulation_holds_the_real_parameters_afterwards(model: nn.Module) -> None:
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3, 8, 8)).sum().backward()
    optimizer.step()
    steps = [state["step"].item() for state in optimizer.state.values()]
    kept = [state["exp_avg"] for state in optimizer.state.values()]

    def run() -> None:
        model.cuda()
        for state in optimizer.state.values():
            state["exp_avg"], state["exp_avg_sq"] = state["exp_avg"].cuda(), state["exp_avg_sq"].cuda()
        model(torch.randn(4, 3, 8, 8, device="cuda")).sum().backward()
        optimizer.step()

    mx.simulate(run)
    held = optimizer.param_groups[0]["params"]
    assert all(one is other for one, other in zip(held, model.parameters(), strict=True))
    assert all(parameter.device.type == "cpu" for parameter in held)
    assert [state["step"].item() for state in optimizer.state.values()] == steps
    del kept


def test_optimizer_state_made_on_the_device_is_removed_with_it(model: nn.Module) -> None:
    optimizer = torch.optim.Adam(model.parameters())

    def run() -> None:
        model.cuda()(torch.randn(4, 3, 8, 8, device="cuda")).sum().backward()
        optimizer.step()

    mx.simulate(run)
    assert not optimizer.state


def test_training_mode_is_unchanged(model: nn.Module) -> None:
    model.eval()
    mx.simulate(lambda: model.cuda()(torch.randn(4, 3, 8, 8, device="cuda")).sum().backward())
    assert not any(module.training for module in model.modules())


@pytest.fixture
def dead() -> Iterator[Callable[[Any], None]]:
    """Record objects, and assert at the end that they have been freed."""
    recorded: list[weakref.ref[Any]] = []
    yield lambda value: recorded.append(weakref.ref(value))
    gc.collect()
    assert recorded
    assert [ref() for ref in recorded if ref() is not None] == []


def test_no_tensor_of_the_user_is_kept_alive(dead: Callable[[Any], None]) -> None:
    def run() -> None:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU()).cuda()
        x = torch.randn(8, 64, device="cuda")
        y = model(x)
        y.sum().backward()
        for value in (model, x, y, model[0].weight, model[0].weight.grad):
            dead(value)

    mx.simulate(run)


def test_a_real_model_is_not_kept_alive(dead: Callable[[Any], None]) -> None:
    model = nn.Linear(8, 8)
    dead(model)
    dead(model.weight)
    mx.simulate(model.cuda)
    del model


def test_a_deleted_real_model_frees_the_device_while_it_is_on() -> None:
    model = nn.Linear(1000, 1000, bias=False)
    with mx.virtual("T4"):
        model.cuda()
        # 1000 * 1000 * 4 bytes = 4_000_000, and 512 * 7813 = 4_000_256
        assert torch.cuda.memory_allocated() == 4_000_256
        del model
        gc.collect()
        assert torch.cuda.memory_allocated() == 0


@pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_op`")
def test_memory_of_the_process_does_not_grow_with_runs() -> None:
    mx.simulate(_step)
    gc.collect()
    before = sum(isinstance(value, torch.Tensor) for value in gc.get_objects())
    for _ in range(3):
        mx.simulate(_step)
    gc.collect()
    assert sum(isinstance(value, torch.Tensor) for value in gc.get_objects()) == before


def test_a_second_virtual_gpu_raises_and_the_first_stays_on() -> None:
    with mx.virtual("T4"):
        with pytest.raises(RuntimeError, match="already on"), mx.virtual("A100"):
            pass
        assert torch.ones(3, device="cuda").is_cuda


def test_a_virtual_tensor_used_without_its_gpu_raises_a_clear_error() -> None:
    with mx.virtual("T4"):
        x, model = torch.ones(3, device="cuda"), nn.Linear(3, 3).cuda()
    for use in (lambda: x + 1, lambda: model(torch.ones(3)), lambda: x.cpu(), lambda: torch.ones(3) * x):
        with pytest.raises(
            RuntimeError, match="made on a virtual GPU, which is off now, and has no values: turn it on"
        ):
            use()
    assert str(x) == "tensor([1., 1., 1.], device='cuda:0')"


def test_a_model_of_an_earlier_virtual_gpu_is_allocated_when_it_is_used() -> None:
    with mx.virtual("T4"):
        model = nn.Linear(64, 64, bias=False).cuda()
    with mx.virtual("A100"):
        assert torch.cuda.memory_allocated() == 0  # it is placed when it is used
        model(torch.randn(2, 64, device="cuda")).sum().backward()
        assert model.weight.grad is not None


def test_a_real_optimizer_holds_the_same_parameters_after_a_simulation(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = [id(parameter) for parameter in optimizer.param_groups[0]["params"]]
    mx.simulate(lambda: _trained(model))
    assert [id(parameter) for parameter in optimizer.param_groups[0]["params"]] == held


def test_a_file_saved_on_the_virtual_gpu_cannot_be_loaded_without_it(tmp_path: Any) -> None:
    path = tmp_path / "weights.pt"
    with mx.virtual("T4", values="none"), path.open("wb") as file:
        torch.save(nn.Linear(2, 2).cuda().state_dict(), file)
    with pytest.raises(pickle.UnpicklingError, match="saved_on_a_virtual_gpu_without_values"):
        torch.load(path)
    with pytest.raises(ValueError, match="saved on a virtual GPU and has no values"):
        torch.load(path, weights_only=False)


def test_compiled_module_gives_no_warning_about_the_hooks_of_the_recorder() -> None:
    def run() -> None:
        torch.compile(torch.nn.Linear(4, 4).cuda())(torch.randn(2, 4, device="cuda"))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        filters = list(warnings.filters)
        mx.simulate(run, gpu="T4")
        assert warnings.filters == filters
    assert not [warning for warning in caught if "global hooks" in str(warning.message)]


def test_the_compiler_is_reset_on_a_virtual_gpu_and_afterwards() -> None:
    with mx.virtual("T4"):
        torch.compiler.reset()
    torch.compiler.reset()
    assert not torch.cuda.is_available()
