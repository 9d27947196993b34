"""Frozen layers and LoRA adapters: their gradients, and the same training as low-rank products written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from memexplore.run.knobs.applying.apply import apply
from memexplore.run.knobs.knobs import Knobs
from tests.small_nets import Deep, flat, gradients, step_of


def test_frozen_layers_have_no_gradient_and_other_gradients_are_unchanged() -> None:
    step = step_of(flat)
    loss, before = gradients(step, step.model)
    with apply(Knobs(frozen=("0", "4")), step.model) as applied:
        changed, after = gradients(step, step.model)
    assert torch.equal(changed, loss)
    assert set(after) == {"2.weight", "2.bias", "6.weight", "6.bias"}
    torch.testing.assert_close(after, {name: before[name] for name in after}, rtol=0, atol=0)
    assert applied.texts == ("4 weights frozen",)


def test_a_new_adapter_changes_no_result_and_only_adapters_of_its_layer_train() -> None:
    step = step_of(flat)
    model = step.model
    loss, before = gradients(step, model)
    model.zero_grad()
    with apply(Knobs(lora="6", lora_rank=2), model) as applied:
        assert torch.equal(gradients(step, model)[0], loss)
        after = gradients(step, model)[1]
        down = model[6].down.detach()
        assert after.pop("6.down").abs().max() == 0  # it comes through `up`, which is zero
        up = after.pop("6.up")
        assert model[6].weight is model[6].base.weight
    assert "6.base.weight" not in after
    # result = W x + up (down x), so the gradient of `up` is that of W times down transposed.
    torch.testing.assert_close(up, before["6.weight"] @ down.T, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(after, {name: before[name] for name in after}, rtol=1e-12, atol=1e-14)
    assert applied.texts == ("LoRA of rank 2 on 1 linear layer",)


def gpt2() -> nn.Module:
    """A GPT-2 in double precision, whose linear layers are `Conv1D` with weights of shape (inputs, outputs)."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).double()


def losses(model: Any, weights: list[torch.Tensor]) -> list[float]:
    """Losses of three steps of SGD on some weights."""
    optimizer, found = torch.optim.SGD(weights, lr=0.5), []
    tokens = torch.arange(32).view(2, 16)
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_adapters_of_gpt2_train_as_low_rank_products_written_out() -> None:
    names = [
        f"transformer.h.{block}.{layer}"
        for block in range(2)
        for layer in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    model = gpt2()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    with apply(Knobs(lora="transformer.h", lora_rank=2), model) as applied:
        assert applied.texts == ("LoRA of rank 2 on 8 linear layers",)
        adapters = {name: model.get_submodule(name) for name in names}
        starts = {name: adapter.down.detach().clone() for name, adapter in adapters.items()}
        trained = losses(model, [weight for adapter in adapters.values() for weight in (adapter.down, adapter.up)])
        ends = {name: (adapter.down.detach(), adapter.up.detach()) for name, adapter in adapters.items()}
    by_hand = gpt2().requires_grad_(False)
    pairs = {}
    for name in names:
        layer = by_hand.get_submodule(name)
        down = starts[name].requires_grad_()
        up = torch.zeros(layer.nf, 2, dtype=torch.float64, requires_grad=True)
        pairs[name] = down, up
        layer.register_forward_hook(lambda _, args, result, down=down, up=up: result + args[0] @ down.T @ up.T)
    assert losses(by_hand, [weight for pair in pairs.values() for weight in pair]) == pytest.approx(trained, rel=1e-12)
    torch.testing.assert_close(
        ends, {name: (down.detach(), up.detach()) for name, (down, up) in pairs.items()}, rtol=1e-10, atol=1e-14
    )
    # Weights in the blocks, except those of the adapters, are unchanged.
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters() if ".h." in name)


def test_adapter_of_a_transposed_layer_has_its_numbers_of_inputs_and_outputs() -> None:
    model = gpt2()
    with apply(Knobs(lora="transformer.h.0.mlp.c_fc", lora_rank=3), model):
        adapter = model.get_submodule("transformer.h.0.mlp.c_fc")
        # From 32 to 4 x 32 features.
        assert (adapter.in_features, adapter.out_features) == (32, 128)
        assert (tuple(adapter.down.shape), tuple(adapter.up.shape)) == ((3, 32), (128, 3))
        assert adapter.weight is adapter.base.weight
        assert adapter.bias is adapter.base.bias


def test_naming_a_module_adapts_all_linear_layers_inside_it() -> None:
    model = Deep()
    with apply(Knobs(lora=("blocks.0", "blocks.1.up"), lora_rank=4), model):
        trains = [name for name, weight in model.named_parameters() if weight.requires_grad and "blocks" in name]
        assert [name for name in trains if name.endswith(("down", "up"))] == [
            f"blocks.{name}" for name in ("0.up.down", "0.up.up", "0.down.down", "0.down.up", "1.up.down", "1.up.up")
        ]
        assert not model.blocks[0].up.base.weight.requires_grad
        assert model.blocks[1].down.weight.requires_grad


def test_the_output_projection_of_attention_is_skipped() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with apply(Knobs(lora="self_attn, linear1".split(", ")), model) as applied:
        model(torch.zeros(1, 3, 8))
    assert [where for where, _ in applied.skipped] == ["self_attn.out_proj"]


def test_a_note_names_a_weight_shared_with_an_adapted_layer() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(10, 8), "head": nn.Linear(8, 10, bias=False)})
    model["head"].weight = model["embedding"].weight
    with apply(Knobs(lora="head"), model) as applied:
        assert "head shares its weight with embedding.weight: that weight is frozen there too." in applied.notes


def test_an_adapter_on_a_layer_without_linear_layers_raises() -> None:
    with (
        pytest.raises(ValueError, match="1 contains no linear layer"),
        apply(Knobs(lora="1"), flat()),
    ):
        pass


@pytest.mark.parametrize("knob", ["frozen", "lora"])
def test_an_unknown_layer_raises_with_similar_names(knob: str) -> None:
    with pytest.raises(ValueError, match=r"Deep has no layer 'blocks\.0\.upp'; close: 'blocks\.0\.up'"):
        apply(Knobs(**{knob: "blocks.0.upp"}), Deep()).__enter__()


def test_an_unknown_layer_of_a_checkpoint_raises_with_similar_names() -> None:
    with pytest.raises(ValueError, match=r"has no layer 'block\.0'.*'blocks\.0'"):
        apply(Knobs(checkpoint="layers block.0"), Deep()).__enter__()
