"""Hooks, and layers that choose their own kernels on CUDA, on the virtual GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memexplore as mx
from tests.virtual_gpu.networks import allocated, backward, batch, network


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with mx.virtual("T4"):
        yield


# --- hooks ----------------------------------------------------------------------------------------------------------


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


# --- layers with kernels of their own on CUDA -----------------------------------------------------------------------


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
    from memexplore.virtual_gpu.values import notes

    model = network().cuda()
    compiled = torch.compile(model, mode="max-autotune")
    backward(compiled)
    assert model[0].weight.grad is not None
    assert list(compiled.state_dict())[0] == "_orig_mod.0.weight"
    model.compile()
    backward(model)
    assert any("torch.compile runs the eager code" in note for note in notes.notes_of_run())


def test_a_compiled_function_runs_eagerly() -> None:
    @torch.compile(fullgraph=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    assert function(torch.ones(3, device="cuda")).is_cuda


def test_data_parallel_on_one_device_trains() -> None:
    model = nn.DataParallel(network()).cuda()
    model(torch.randn(8, 64)).sum().backward()
    assert model.module[0].weight.grad is not None


def test_functional_calls_and_transforms_give_gradients() -> None:
    model, (x, _) = network().cuda(), batch()
    weights = {name: value.detach() for name, value in model.named_parameters()}
    gradients = torch.func.grad(lambda given: torch.func.functional_call(model, given, (x,)).sum())(weights)
    assert gradients["0.weight"].shape == (128, 64)
