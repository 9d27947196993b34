"""Training loops on the virtual GPU: mixed precision, checkpoints, optimizers, views, out of memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from memexplore.virtual_gpu.dispatch import fake_kernels, planning
from tests.small import allocated, batch, network, on_a_t4

GIB = 1024**3


@pytest.fixture(autouse=True)
def gpu() -> Iterator[Any]:
    yield from on_a_t4()


def loss_of(model: nn.Module) -> torch.Tensor:
    x, y = batch()
    return functional.cross_entropy(model(x), y)


# Mixed precision.


def test_autocast_runs_in_half_precision() -> None:
    model, (x, y) = network().cuda(), batch()
    with torch.autocast("cuda"):
        out = model(x)
        assert torch.is_autocast_enabled()
        loss = functional.cross_entropy(out, y)
    assert (out.dtype, loss.dtype) == (torch.float16, torch.float32)
    with torch.amp.autocast("cuda", dtype=torch.bfloat16):
        assert model(x).dtype is torch.bfloat16
    with torch.autocast("cuda", enabled=False):
        assert model(x).dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert network()(torch.randn(2, 64)).dtype is torch.bfloat16


@pytest.mark.parametrize("make", [lambda: torch.amp.GradScaler("cuda"), lambda: torch.amp.GradScaler()])
def test_a_scaler_steps(make: Callable[[], torch.amp.GradScaler]) -> None:
    model, scaler = network().cuda(), make()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with torch.autocast("cuda"):
            loss = loss_of(model)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert len(optimizer.state) == 4


@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.*:FutureWarning")
def test_the_old_names_of_mixed_precision_work() -> None:
    model, scaler = network().cuda(), torch.cuda.amp.GradScaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.cuda.amp.autocast():
        loss = loss_of(model)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def test_a_custom_function_follows_autocast() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda")
        def forward(context: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            context.save_for_backward(x, w)
            return x @ w

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, w = context.saved_tensors
            return gradient @ w.T, x.T @ gradient

    x, w = torch.randn(4, 8, device="cuda"), torch.randn(8, 8, device="cuda", requires_grad=True)
    with torch.autocast("cuda"):
        out = Product.apply(x, w)
    out.sum().backward()
    assert out.dtype is torch.float16
    assert w.grad.dtype is torch.float32


# Backward.


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("preserve", [True, False])
@pytest.mark.parametrize("half", [True, False])
def test_checkpoints_recompute(reentrant: bool, preserve: bool, half: bool) -> None:
    layer = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.ReLU()).cuda()
    x = torch.randn(8, 64, device="cuda", requires_grad=True)
    with torch.autocast("cuda", enabled=half):
        out = checkpoint(layer, x, use_reentrant=reentrant, preserve_rng_state=preserve)
    out.float().sum().backward()
    assert x.grad is not None
    assert layer[0].weight.grad is not None


def test_a_checkpoint_keeps_only_its_input() -> None:
    layers = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]).cuda()
    x = torch.randn(1024, 256, device="cuda", requires_grad=True)  # 1 MiB
    out = layers(x)
    plain = allocated()
    del out
    out = checkpoint(layers, x, use_reentrant=False)
    # Of the four results of 1 MiB only the last is allocated.
    assert plain - allocated() == 3 * 1024**2
    out.sum().backward()
    checkpoint_sequential(layers, 2, x, use_reentrant=False).sum().backward()


def test_micro_batches_accumulate_without_growing_memory() -> None:
    model = network().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    sizes = []
    for step in range(6):
        (loss_of(model) / 3).backward()
        sizes.append(allocated())
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step < 3)
    assert sizes[1] == sizes[2]
    assert sizes[3] == sizes[4] == sizes[5]


def test_gradients_stay_allocated_if_zeroed_and_are_freed_if_set_to_none() -> None:
    model = network().cuda()
    loss_of(model).backward()
    optimizer, held = torch.optim.SGD(model.parameters(), lr=0.1), allocated()
    optimizer.zero_grad(set_to_none=False)
    assert allocated() == held
    optimizer.zero_grad()
    assert held - allocated() == 32_768 + 512 + 5_120 + 512  # 4-byte numbers: 128 * 64, 128, 10 * 128 and 10


def test_a_retained_graph_runs_twice_and_a_freed_graph_does_not() -> None:
    loss = loss_of(network().cuda())
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_gradient_penalty_runs_backward_twice() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 1)).cuda()
    x = torch.randn(2, 3, 8, 8, device="cuda", requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    ((gradient.flatten(1).norm(2, dim=1) - 1) ** 2).mean().backward()
    assert model[0].weight.grad is not None


def test_a_deleted_loss_frees_its_graph() -> None:
    model = network().cuda()
    model(batch()[0])
    before = allocated()
    loss = loss_of(model)
    assert allocated() > before
    del loss
    assert allocated() == before


def test_clipping_returns_a_norm_on_the_device() -> None:
    model = network().cuda()
    loss_of(model).backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True).is_cuda
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=float("inf"), foreach=False)
    nn.utils.clip_grad_value_(model.parameters(), 1.0)


def test_no_graph_is_saved_without_gradients() -> None:
    model, (x, _) = network().cuda().eval(), batch()
    with torch.no_grad():
        model(x)
        before = allocated()
        out = model(x)
    assert not out.requires_grad
    assert allocated() - before == 512  # 8 * 10 * 4 = 320 bytes
    with torch.inference_mode():
        assert not model(x).requires_grad


# Optimizers.

STATES: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], int]] = {
    "SGD": (lambda p: torch.optim.SGD(p, 0.1), 0),
    "momentum": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True), 1),
    "Adam": (lambda p: torch.optim.Adam(p), 2),
    "AMSGrad": (lambda p: torch.optim.Adam(p, amsgrad=True), 3),
    "AdamW per tensor": (lambda p: torch.optim.AdamW(p, foreach=False), 2),
    "Adagrad": (lambda p: torch.optim.Adagrad(p), 1),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True), 3),
    "Adadelta": (lambda p: torch.optim.Adadelta(p), 2),
    "Adamax": (lambda p: torch.optim.Adamax(p), 2),
    "NAdam": (lambda p: torch.optim.NAdam(p), 2),
    "RAdam": (lambda p: torch.optim.RAdam(p), 2),
    "Rprop": (lambda p: torch.optim.Rprop(p), 2),
}


def _large(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of optimizer state on the GPU without step counters."""
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return sum(value.nbytes for value in states if value.is_cuda and value.dim())


@pytest.mark.parametrize("name", STATES)
def test_optimizers_keep_their_number_of_copies_of_the_parameters(name: str) -> None:
    make, copies = STATES[name]
    model = network().cuda()
    optimizer = make(model.parameters())
    for _ in range(2):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert _large(optimizer) == copies * 4 * (128 * 64 + 128 + 10 * 128 + 10)


def test_a_fused_optimizer_counts_its_steps_on_the_device() -> None:
    model = network().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loss_of(model).backward()
    optimizer.step()
    assert all(state["step"].is_cuda for state in optimizer.state.values())
    plain = torch.optim.AdamW(model.parameters())
    plain.step()
    assert not any(state["step"].is_cuda for state in plain.state.values())


def test_adafactor_keeps_rows_and_columns() -> None:
    model = nn.Linear(64, 128, bias=False).cuda()
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    assert _large(optimizer) == (128 + 64) * 4


def test_step_sizes_of_an_optimizer_make_no_new_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    # AdamW divides by 1 - beta ** step: other scalars in each step.
    made: list[Any] = []
    make_plan = planning.make_plan

    def counted(func: Any, *arguments: Any) -> Any:
        made.append(func)
        return make_plan(func, *arguments)

    monkeypatch.setattr(planning, "make_plan", counted)
    model = network().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        loss_of(model).backward()
        optimizer.step()
    made.clear()
    loss_of(model).backward()
    optimizer.step()
    assert made == []


def test_schedulers_step() -> None:
    optimizer = torch.optim.AdamW(network().cuda().parameters(), lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    decay = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()
    decay.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    plateau.step(torch.rand((), device="cuda").item())


# Views and storages.


def test_in_place_ops_and_views_take_no_memory() -> None:
    x = torch.ones(1000, 1000, device="cuda")
    before = allocated()
    x.add_(1).mul_(2).relu_()
    x[0] = 0
    x.unsqueeze_(0).squeeze_(0).t_().t_()
    view = x.view(-1)[10:20]
    assert view.storage_offset() == 10
    assert view.data_ptr() == x.data_ptr() + 40
    assert allocated() == before


def test_an_impossible_view_raises_the_error_of_torch() -> None:
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        torch.ones(3, 4, device="cuda").t().view(-1)


def test_resize_allocates_the_new_block_and_frees_the_old() -> None:
    x = torch.empty(100, device="cuda")
    x.resize_(1000)
    assert allocated() == 4_096  # 4000 bytes rounded up
    x.untyped_storage().resize_(0)
    assert (x.untyped_storage().nbytes(), allocated()) == (0, 0)


def test_an_output_argument_is_filled() -> None:
    out = torch.empty(0, device="cuda")
    torch.mm(torch.ones(3, 4, device="cuda"), torch.ones(4, 5, device="cuda"), out=out)
    assert out.shape == (3, 5)


def test_an_output_argument_of_the_right_shape_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x, out = torch.ones(3, 7, device="cuda"), torch.empty(3, 7, device="cuda")
    torch.mul(x, 0.25, out=out)
    monkeypatch.setattr(fake_kernels, "run", None)  # a second plan would call it
    assert torch.mul(x, 0.25, out=out) is out


def test_an_output_argument_of_another_shape_is_resized_each_time() -> None:
    x = torch.ones(1000, device="cuda")
    outputs = [torch.empty(0, device="cuda") for _ in range(2)]
    for out in outputs:
        torch.mul(x, 0.25, out=out)
    assert [out.shape for out in outputs] == [(1000,), (1000,)]
    assert allocated() == 3 * 4_096  # 4000 bytes rounded up


# Out of memory.

MESSAGE = re.compile(
    r"CUDA out of memory\. Tried to allocate 8\.00 GiB\. GPU 0 has a total capacity of 14\.56 GiB of which "
    r"\d+\.\d\d GiB is free\..*memory in use\. .*8\.00 GiB is allocated by PyTorch",
    re.DOTALL,
)


def test_a_request_beyond_the_capacity_raises_pytorch_s_message() -> None:
    kept = torch.empty(8 * GIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError) as error:
        torch.empty(8 * GIB, dtype=torch.uint8, device="cuda")
    assert MESSAGE.match(str(error.value)), str(error.value)
    assert isinstance(error.value, torch.cuda.OutOfMemoryError)
    assert allocated() == kept.nbytes
    assert torch.cuda.memory_stats()["num_ooms"] == 1


def test_a_smaller_batch_runs_after_out_of_memory() -> None:
    model, size, tried = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)).cuda(), 1 << 20, []
    while size > 1:
        tried.append(size)
        try:
            model(torch.randn(size, 4096, device="cuda")).sum().backward()
            break
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            size //= 2
    # Two activations and a gradient of size * 4096 * 4 bytes in 14.5 GiB: 2**18 rows are 4 GiB each.
    assert tried[0] == 1 << 20
    assert tried[-1] < 1 << 20
    assert model[0].weight.grad is not None


def test_an_op_that_runs_out_of_memory_keeps_no_output() -> None:
    x = torch.empty(6 * GIB // 4, device="cuda")
    before = allocated()
    with pytest.raises(torch.OutOfMemoryError):
        torch.sort(x)  # the sorted values fit, their indices of 12 GiB do not
    assert allocated() == before


def test_a_memory_fraction_is_a_limit() -> None:
    torch.cuda.set_per_process_memory_fraction(0.1)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
