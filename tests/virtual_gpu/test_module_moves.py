"""Modules on the virtual GPU: moved, built there, shared, frozen and copied."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import memexplore as mx
from tests.virtual_gpu.networks import NETWORK, allocated, backward, batch, network


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with mx.virtual("T4"):
        yield


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.cuda(),
        lambda model: model.cuda(0),
        lambda model: model.to("cuda"),
        lambda model: model.to("cuda:0"),
        lambda model: model.to(0),
        lambda model: model.to(device=torch.device("cuda")),
        lambda model: model.to(torch.ones(1, device="cuda")),
    ],
)
def test_a_model_is_moved(move: Callable[[nn.Module], nn.Module]) -> None:
    model = move(network())
    assert all(parameter.is_cuda for parameter in model.parameters())
    assert allocated() == NETWORK


def test_a_model_moved_back_to_the_cpu_frees_its_memory() -> None:
    model = network().cuda().cpu()
    assert not any(parameter.is_cuda for parameter in model.parameters())
    assert allocated() == 0


def test_a_model_in_half_precision_has_half_the_bytes() -> None:
    network().cuda().half()
    assert allocated() == 0  # and none is left of what died
    model = network().half().cuda()
    assert allocated() == 16_384 + 512 + 2_560 + 512  # 128 * 2 = 256 and 10 * 2 = 20 bytes are 512 each
    assert model[0].weight.dtype is torch.float16


def test_parameters_keep_their_identity_their_hooks_and_their_attributes() -> None:
    model, seen = network(), []
    weight = model[0].weight
    weight.no_decay = True
    weight.register_hook(lambda gradient: seen.append("hook"))
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    model.cuda()
    assert model[0].weight is weight
    assert weight.no_decay
    backward(model)
    assert seen == ["hook", "accumulated"]


def test_an_optimizer_made_before_the_move_trains_the_moved_parameters() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.cuda()
    backward(model)
    optimizer.step()
    assert optimizer.state[model[0].weight]["momentum_buffer"].is_cuda


def test_a_model_can_be_moved_while_a_loss_is_alive() -> None:
    model = network().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batch()
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    model.cpu()
    model.cuda()
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    backward(model)
    optimizer.step()
    del loss


def test_gradients_move_with_their_parameters() -> None:
    model = network().cuda()
    backward(model)
    model.cpu()
    assert not model[0].weight.grad.is_cuda
    assert model.cuda()[0].weight.grad.is_cuda


def test_a_model_built_on_the_device_is_allocated_there() -> None:
    with torch.device("cuda"):
        model = network()
    assert model[0].weight.is_cuda
    assert allocated() == NETWORK


def test_to_empty_allocates_a_model_built_on_meta() -> None:
    with torch.device("meta"):
        model = network()
    assert model[0].weight.is_meta
    assert allocated() == 0
    model.to_empty(device="cuda")
    for layer in (model[0], model[2]):
        layer.reset_parameters()
    assert model[0].weight.is_cuda
    assert not model[0].weight.is_meta
    assert allocated() == NETWORK


def test_moving_a_meta_model_raises_the_error_of_torch() -> None:
    with torch.device("meta"):
        model = network()
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        model.to("cuda")


def test_large_layers_take_no_memory_while_they_are_built() -> None:
    model = nn.Linear(100_000, 100_000, bias=False)  # 40 GB
    assert model.weight.shape == (100_000, 100_000)
    assert model.weight.device.type == "cpu"


def test_convolution_keeps_channels_last() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).cuda().to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 16, 16).to("cuda", memory_format=torch.channels_last)
    assert model(x).is_contiguous(memory_format=torch.channels_last)
    model(x).mean().backward()
    assert model[0].weight.grad.is_contiguous(memory_format=torch.channels_last)


def test_data_may_be_assigned_across_devices() -> None:
    parameter = nn.Parameter(torch.ones(4, 4))
    parameter.data = parameter.data.cuda()
    assert parameter.is_cuda
    (parameter * 2).sum().backward()
    assert parameter.grad is not None
    parameter.data = parameter.data.cpu()
    assert not parameter.is_cuda
    parameter.data = torch.zeros(4, 4)
    assert parameter.tolist() == [[0.0] * 4] * 4


# --- sharing, freezing, adapting ------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(100, 64), nn.Linear(64, 100, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


def test_tied_weights_are_one_block() -> None:
    model = Tied().cuda()
    assert model.head.weight is model.embedding.weight
    assert allocated() == 100 * 64 * 4
    model(torch.randint(100, (4,), device="cuda")).sum().backward()
    assert model.head.weight.grad is model.embedding.weight.grad


def test_frozen_weights_get_no_gradient() -> None:
    model = network().cuda()
    model[0].requires_grad_(False)
    backward(model)
    assert model[0].weight.grad is None
    assert model[2].weight.grad is not None


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features, device=base.weight.device) * 0.01)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, device=base.weight.device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def test_only_the_adapters_are_trained() -> None:
    model = network().cuda()
    model[0] = Adapter(model[0], 4)
    model[2].requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    backward(model)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if value.is_cuda]
    assert sum(state.nbytes for state in states) == 2 * (4 * 64 + 128 * 4) * 4
    with torch.no_grad():
        model[0].base.weight += model[0].up @ model[0].down


@pytest.mark.parametrize(
    "wrap",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
        torch.nn.utils.spectral_norm,
    ],
)
@pytest.mark.parametrize("first", ["moved", "wrapped"])
def test_parametrized_layers_train(wrap: Callable[[nn.Module], nn.Module], first: str) -> None:
    layer = nn.Linear(64, 64)
    layer = wrap(layer.cuda()) if first == "moved" else wrap(layer).cuda()
    layer(torch.randn(2, 64, device="cuda")).sum().backward()
    assert all(parameter.is_cuda and parameter.grad is not None for parameter in layer.parameters())


# --- copies ---------------------------------------------------------------------------------------------------------


def test_a_deep_copy_has_its_own_memory() -> None:
    model = network().cuda()
    average = copy.deepcopy(model)
    assert allocated() == 2 * NETWORK
    with torch.no_grad():
        for kept, new in zip(average.parameters(), model.parameters(), strict=True):
            kept.mul_(0.99).add_(new, alpha=0.01)
            kept.lerp_(new, 0.1)
            kept.data.copy_(new.data)
    assert allocated() == 2 * NETWORK
    del average, kept, new
    gc.collect()
    assert allocated() == NETWORK


def test_an_averaged_model_is_updated() -> None:
    model = network().cuda()
    average = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(2):
        average.update_parameters(model)
    assert all(parameter.is_cuda for parameter in average.parameters())


def test_batch_norm_statistics_are_updated() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).cuda()
    torch.optim.swa_utils.update_bn([torch.randn(8, 64)], model, device="cuda")
    assert model[1].running_mean.is_cuda


_SCRIPTED = pytest.mark.parametrize("make", [torch.jit.script, lambda model: torch.jit.trace(model, torch.ones(3, 4))])


@_SCRIPTED
def test_a_module_of_torchscript_is_moved(make: Callable[[nn.Module], torch.jit.ScriptModule]) -> None:
    model = make(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert model.to("cuda")(torch.ones(3, 4, device="cuda")).is_cuda
    model(torch.ones(3, 4, device="cuda")).sum().backward()
    optimizer.step()
    assert all(state["momentum_buffer"].is_cuda for state in optimizer.state.values())
    assert not model.cpu()(torch.ones(3, 4)).is_cuda
