"""Modules on the virtual GPU: moved, copied, saved, hooked and trained as on a real one."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import memexplore as mx


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with mx.virtual("T4"):
        yield


def allocated() -> int:
    return torch.cuda.memory_allocated()


def network() -> nn.Sequential:
    # 128 * 64 * 4 = 32_768, 128 * 4 = 512, 10 * 128 * 4 = 5_120 and 10 * 4 = 40 bytes, the last one rounded to 512
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


NETWORK = 32_768 + 512 + 5_120 + 512


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 64, device="cuda"), torch.randint(10, (8,), device="cuda")


def backward(model: nn.Module) -> None:
    x, y = batch()
    functional.cross_entropy(model(x), y).backward()


# Moving.


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


def test_a_model_moves_there_and_back() -> None:
    model = network().cuda().cpu()
    assert not any(parameter.is_cuda for parameter in model.parameters())
    assert allocated() == 0


def test_a_model_in_half_precision_takes_half() -> None:
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


def test_an_optimizer_made_before_the_move_trains_what_was_moved() -> None:
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


def test_a_model_built_on_the_device_is_there_at_once() -> None:
    with torch.device("cuda"):
        model = network()
    assert model[0].weight.is_cuda
    assert allocated() == NETWORK


def test_a_model_built_on_meta_takes_memory_when_it_gets_some() -> None:
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


def test_a_meta_model_cannot_be_moved_as_on_a_real_gpu() -> None:
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


# Sharing, freezing, adapting.


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


# Copies.


def test_a_deep_copy_has_memory_of_its_own() -> None:
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


# Hooks.


def test_hooks_of_every_kind_run() -> None:
    model, seen = network().cuda(), []
    handles = [
        model[0].register_forward_pre_hook(lambda module, args: seen.append("before")),
        model[0].register_forward_hook(lambda module, args, out: seen.append("after")),
        model[1].register_full_backward_pre_hook(lambda module, gradients: seen.append("back before")),
        model[1].register_full_backward_hook(lambda module, inner, outer: seen.append("back after")),
        model[0].weight.register_hook(lambda gradient: seen.append("tensor")),
    ]
    backward(model)
    assert seen == ["before", "after", "back before", "back after", "tensor"]
    for handle in handles:
        handle.remove()


def test_a_hook_may_change_a_gradient() -> None:
    model = network().cuda()
    model[0].weight.register_hook(lambda gradient: gradient.half().float())
    backward(model)
    assert model[0].weight.grad.dtype is torch.float32


def test_saved_tensors_can_be_kept_on_the_cpu() -> None:
    x = torch.randn(1000, 1000, device="cuda", requires_grad=True)
    plain = torch.exp(x)
    held = allocated()
    del plain
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        loss = torch.exp(x).sum()
    # exp saves its result of 4_000_000 bytes; on the CPU only the sum of 512 bytes stays
    assert held - allocated() == 4_000_256 - 512
    loss.backward()
    assert x.grad is not None


def test_saved_tensors_can_be_packed() -> None:
    x, packed = torch.randn(8, 8, device="cuda", requires_grad=True), []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tuple(tensor.shape))
        return tensor.half()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.float()):
        loss = (x * x).sum()
    loss.backward()
    assert packed == [(8, 8), (8, 8)]


# Files.


def _file(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_a_checkpoint_is_saved_and_loaded() -> None:
    model = network().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    backward(model)
    optimizer.step()
    file = _file({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3})
    loaded = torch.load(file)
    assert loaded["epoch"] == 3
    assert loaded["model"]["0.weight"].is_cuda
    other = network().cuda()
    resumed = torch.optim.AdamW(other.parameters())
    other.load_state_dict(loaded["model"])
    resumed.load_state_dict(loaded["optimizer"])
    backward(other)
    resumed.step()
    assert resumed.state[other[0].weight]["exp_avg"].is_cuda


@pytest.mark.parametrize(
    "target", ["cuda", "cuda:0", torch.device("cuda"), {"cpu": "cuda:0"}, lambda kept, saved: kept.cuda()]
)
def test_a_real_file_is_loaded_onto_the_device(target: Any) -> None:
    loaded = torch.load(_file({"w": torch.ones(1000), "n": [torch.ones(2)]}), map_location=target)
    assert loaded["w"].is_cuda
    assert loaded["n"][0].is_cuda
    assert allocated() == 4_096 + 512  # 1000 * 4 rounded up to 512 * 8


@pytest.mark.parametrize("target", [None, "cpu", torch.device("cpu"), lambda kept, saved: kept])
def test_a_real_file_stays_real_on_the_cpu(target: Any) -> None:
    loaded = torch.load(_file({"w": torch.arange(3.0)}), map_location=target)
    assert loaded["w"].tolist() == [0.0, 1.0, 2.0]


def test_a_file_saved_on_a_real_gpu_comes_back_to_the_gpu() -> None:
    with mock.patch("torch.serialization.location_tag", lambda storage: "cuda:0"):
        file = _file({"w": torch.ones(3)})
    assert torch.load(file)["w"].is_cuda
    file.seek(0)
    assert torch.load(file, map_location="cpu")["w"].tolist() == [1.0, 1.0, 1.0]


def test_tensors_that_share_memory_in_a_file_share_it_on_the_device() -> None:
    whole = torch.ones(1000)
    loaded = torch.load(_file({"a": whole, "b": whole[:10]}), map_location="cuda")
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    assert allocated() == 4_096


def test_a_whole_model_is_saved_and_pickled() -> None:
    model = network().cuda()
    assert torch.load(_file(model), weights_only=False)[0].weight.is_cuda
    assert pickle.loads(pickle.dumps(model))[0].weight.is_cuda


def test_state_dicts_are_loaded_across_devices() -> None:
    moved, real = network().cuda(), network()
    moved.load_state_dict(real.state_dict())
    assert moved[0].weight.is_cuda
    kept = real[0].weight.clone()
    real.load_state_dict({name: value.cpu() for name, value in moved.state_dict().items()}, assign=True)
    assert not real[0].weight.is_cuda
    assert kept.shape == real[0].weight.shape


# Layers that choose their own way on CUDA.


def test_attention_layers_train_and_evaluate() -> None:
    x = torch.randn(2, 10, 64, device="cuda")
    attention = nn.MultiheadAttention(64, 4, batch_first=True).cuda()
    attention(x, x, x)[0].sum().backward()
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2).cuda()
    padding = torch.zeros(2, 10, dtype=torch.bool, device="cuda")
    encoder(x, src_key_padding_mask=padding).sum().backward()
    encoder.eval()
    with torch.inference_mode():
        assert encoder(x).shape == (2, 10, 64)
        assert encoder(x, src_key_padding_mask=padding).shape == (2, 10, 64)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_train(kind: Any) -> None:
    model = kind(16, 32, 2, batch_first=True, bidirectional=True, dropout=0.1).cuda()
    out, _ = model(torch.randn(4, 7, 16, device="cuda"))
    assert out.shape == (4, 7, 64)
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_embedding_bags_train() -> None:
    bag = nn.EmbeddingBag(100, 16, mode="mean").cuda()
    bag(torch.randint(100, (4, 5), device="cuda")).sum().backward()
    assert bag.weight.grad.shape == (100, 16)


def test_a_compiled_model_runs_eagerly_with_a_note_on_the_tape() -> None:
    from memexplore.virtual_gpu.tensors import values

    model = network().cuda()
    compiled = torch.compile(model, mode="max-autotune")
    backward(compiled)
    assert model[0].weight.grad is not None
    assert list(compiled.state_dict())[0] == "_orig_mod.0.weight"
    model.compile()
    backward(model)
    assert any("torch.compile runs the eager code" in note for note in values.assumptions)


def test_a_compiled_function_runs_eagerly() -> None:
    @torch.compile(fullgraph=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    assert function(torch.ones(3, device="cuda")).is_cuda


def test_data_parallel_on_one_device_is_the_model() -> None:
    model = nn.DataParallel(network()).cuda()
    model(torch.randn(8, 64)).sum().backward()
    assert model.module[0].weight.grad is not None


def test_functional_calls_and_transforms_work() -> None:
    model, (x, _) = network().cuda(), batch()
    weights = {name: value.detach() for name, value in model.named_parameters()}
    gradients = torch.func.grad(lambda given: torch.func.functional_call(model, given, (x,)).sum())(weights)
    assert gradients["0.weight"].shape == (128, 64)
