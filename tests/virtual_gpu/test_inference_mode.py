"""`torch.inference_mode` on the virtual GPU: which tensors are inference tensors, and what torch refuses for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memexplore as mx
from memexplore.virtual_gpu.values.setting import Values


def made_in_inference_mode(device: str) -> dict[str, torch.Tensor]:
    """Return tensors that inference mode makes of a tensor that was made outside it, `x`."""
    x = torch.ones(2, 4, device=device)
    linear = nn.Linear(4, 4).to(device)
    with torch.inference_mode():
        y = linear(x)
        # Where `y` is a tensor on a GPU: on the CPU `to` returns `y` itself.
        tensors = {"x": x, "y": y, "view of x": x.view(-1), "alias of x": x.detach(), "part of y": y[0]}
        tensors |= {"empty": torch.empty(3, device=device), "copy": torch.ones(3).to(device), "to": y.to("cpu")}
        tensors |= {"largest": torch.topk(y, 2).values, "places": torch.topk(y, 2).indices, "sum": y.add_(1).sum()}
        tensors |= {"attention": F.scaled_dot_product_attention(y, y, y), "split": y.split(1)[1]}
        tensors |= {"recurrent": nn.LSTM(4, 4).to(device)(y[:, None])[0], "conjugate": torch.complex(y, y).conj()}
        with torch.inference_mode(False):
            tensors["ordinary"] = torch.ones(3, device=device)
    tensors |= {"later": y + 1, "later view": y.t(), "later product": F.linear(y, y.clone().new_ones(4, 4))}
    return tensors


@pytest.mark.parametrize("values", Values)
def test_the_same_tensors_are_inference_tensors_as_on_the_cpu(values: Values) -> None:
    expected = {name: tensor.is_inference() for name, tensor in made_in_inference_mode("cpu").items()}
    with mx.virtual("T4", values=values):
        found = {name: tensor.is_inference() for name, tensor in made_in_inference_mode("cuda").items()}
    assert found == expected
    assert [expected[name] for name in ("x", "view of x", "y", "later")] == [False, False, True, False]


REFUSED: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "write": lambda made: made["y"].add_(1),
    "write to a view": lambda made: made["part of y"].zero_(),
    "write to an element": lambda made: made["y"].__setitem__(0, 1),
    "write by a composite op": lambda made: F.dropout(made["y"], inplace=True),
    "gradient": lambda made: made["y"].requires_grad_(),
    "saved for the backward pass": lambda made: made["x"].requires_grad_() * made["part of y"],
    "version": lambda made: made["y"]._version,
}


@pytest.mark.parametrize("name", REFUSED)
def test_torch_refuses_what_it_refuses_on_the_cpu(name: str) -> None:
    with pytest.raises(RuntimeError) as expected:
        REFUSED[name](made_in_inference_mode("cpu"))
    with mx.virtual("T4"), pytest.raises(RuntimeError) as found:
        REFUSED[name](made_in_inference_mode("cuda"))
    assert str(found.value) == str(expected.value)


def test_a_clone_of_an_inference_tensor_trains() -> None:
    with mx.virtual("T4"):
        made = made_in_inference_mode("cuda")
        weight = made["x"].requires_grad_()
        (weight * made["y"].clone()).sum().backward()
        assert weight.grad is not None
        assert weight.grad.shape == (2, 4)


def test_inference_mode_makes_the_requests_of_no_grad() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True), nn.Flatten(), nn.Linear(144, 8)).eval()
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()

    def requests(mode: Callable[[], contextlib.AbstractContextManager[None]]) -> np.ndarray:
        def run() -> None:
            network, block, data = model.cuda(), layer.cuda(), torch.ones(2, 3, 8, 8, device="cuda")
            with mode(), torch.autocast("cuda", torch.float16):
                block(F.dropout(network(data))[:, None].float())

        tape = mx.simulate(run, gpu="T4")
        return np.stack([tape.action, tape.size])

    assert np.array_equal(requests(torch.inference_mode), requests(torch.no_grad))


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_a_cpu_tensor_is_moved_whatever_the_form_of_the_call(
    mode: Callable[[], contextlib.AbstractContextManager[None]],
) -> None:
    with mx.virtual("T4"):
        cpu, gpu = torch.zeros(1024, 256), torch.zeros(1, device="cuda")
        with mode():
            before = torch.cuda.memory_allocated()
            moved = [
                cpu.to("cuda", torch.float32),
                cpu.to(dtype=torch.float32, device="cuda"),
                cpu.to(gpu),
                cpu.to("cuda", torch.float32, non_blocking=True),
                nn.Linear(256, 1024, bias=False).to("cuda", torch.float32).weight,
            ]
            assert [str(tensor.device) for tensor in moved] == ["cuda:0"] * 5
            # 1024 x 256 numbers of 4 bytes each.
            assert torch.cuda.memory_allocated() - before == 5 * 1024 * 256 * 4


def written_later(device: str) -> dict[str, tuple[bool, bool, int]]:
    """Return what can be written to after inference mode: whether it is an inference tensor, and whether it can."""
    model, moved = nn.BatchNorm1d(1024).to(device), nn.Linear(1024, 2)
    x = torch.ones(1024, device=device)
    with torch.inference_mode():
        # As a validation in half precision does.
        model.half()(torch.ones(2, 1024, device=device, dtype=torch.half))
        model.float()
        moved.to(device, torch.float64)
        x.data = x.half()
        y = torch.ones(1024, device=device)
        tensors = {"detached inside": y.detach(), "detached from outside": torch.ones(2, device=device).detach()}
    tensors |= {"detached": y.detach(), "data": y.data, "twice": y.detach().detach(), "view": y.detach().view(-1)}
    tensors |= {"part": y[:2], "replaced": x, "replaced detached": x.detach(), "weight": moved.weight}
    tensors |= {"buffer": model.running_mean} | model.state_dict(prefix="state.") | dict(model.named_parameters())
    found = {}
    with torch.no_grad():
        for name, tensor in tensors.items():
            try:
                tensor *= 2
                written = True
            except RuntimeError:
                written = False
            found[name] = tensor.is_inference(), written, tensor.untyped_storage().nbytes()
    return found


def test_what_can_be_written_to_after_inference_mode_is_as_on_the_cpu() -> None:
    expected = written_later("cpu")
    with mx.virtual("T4"):
        before = torch.cuda.memory_allocated()
        found = written_later("cuda")
        assert torch.cuda.memory_allocated() == before
    assert found == expected
    assert found["state.running_mean"][:2] == (True, True)


def test_a_parameter_with_data_of_inference_mode_trains_as_on_the_cpu() -> None:
    def run(device: str) -> tuple[bool, bool, bool]:
        weight = nn.Parameter(torch.ones(4, device=device))
        with torch.inference_mode():
            weight.data = weight + 1
        (weight * 2).sum().backward()
        torch.optim.SGD([weight], lr=0.1).step()
        return weight.is_inference(), weight.requires_grad, weight.grad is not None

    with mx.virtual("T4"):
        found = run("cuda")
    assert found == run("cpu")
