"""Knobs on real models: same losses and gradients where the mathematics says so, and nothing left behind."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import memexplore as mx
from memexplore.knobs.apply import apply
from memexplore.knobs.forward import run_forward_inside
from memexplore.knobs.inplace.legal import legal_sites
from memexplore.knobs.knobs import InPlace, Knobs, MemoryFormat, Offload
from memexplore.knobs.undo import UndoLog, undone_after
from tests.small_nets import Deep, everything, flat, gradients, images, step_of

SAME = [
    Knobs(),
    Knobs(inplace="on"),
    Knobs(inplace="off"),
    Knobs(checkpoint="none"),
    Knobs(checkpoint="every 1"),
    Knobs(checkpoint="every 2"),
    Knobs(checkpoint="sqrt"),
    Knobs(checkpoint="keep matmuls"),
    Knobs(checkpoint="norms"),
    Knobs(precision="off"),
    Knobs(offload="saved tensors on the CPU"),
    Knobs(checkpoint="sqrt", offload="saved tensors on the CPU", inplace="on"),
    Knobs(checkpoint="norms", offload="saved tensors on the CPU"),
    Knobs(checkpoint="keep matmuls", inplace="on"),
    Knobs(memory_format="channels last"),
]
"""What changes where tensors lie and when they are computed, and no result."""
OTHER = [
    Knobs(precision="bf16"),
    Knobs(precision="fp16"),
    Knobs(precision="all bf16"),
    Knobs(mode="inference"),
    Knobs(frozen="0"),
    Knobs(lora="", lora_rank=2),
]
"""What changes results; an adapter beside every linear layer."""


@pytest.mark.parametrize("knobs", SAME, ids=str)
@pytest.mark.parametrize("make", [Deep, flat, images])
def test_loss_and_gradients_are_the_same(make: Any, knobs: Knobs) -> None:
    step = step_of(make)
    loss, before = gradients(step, step.model)
    statistics = copy.deepcopy(dict(step.model.named_buffers()))
    again = step_of(make)
    with apply(knobs, again.model):
        changed, after = gradients(again, again.model)
    # Channels last sums in another order; double precision has 53 bits.
    torch.testing.assert_close(changed, loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(dict(again.model.named_buffers()), statistics, rtol=1e-12, atol=1e-14)


together = st.fixed_dictionaries(
    {
        "inplace": st.sampled_from(InPlace),
        "checkpoint": st.sampled_from(["as written", "every 2", "sqrt", "keep matmuls", "norms"]),
        "offload": st.sampled_from(Offload),
        "memory_format": st.sampled_from(MemoryFormat),
    }
)


@settings(max_examples=30, deadline=None)
@given(together, st.sampled_from([Deep, flat, images]), st.sampled_from(["as written", "bf16", "all bf16"]))
def test_knobs_that_change_no_result_change_none_together(fields: Any, make: Any, precision: str) -> None:
    dtype = torch.float64 if precision == "as written" else torch.float32
    plain, step = step_of(make, dtype=dtype), step_of(make, dtype=dtype)
    with apply(Knobs(precision=precision), plain.model):
        loss, before = gradients(plain, plain.model)
    with apply(Knobs(**fields, precision=precision), step.model):
        changed, after = gradients(step, step.model)
    # Channels last sums in another order, which bf16 rounds to its 8 bits.
    bits = 1e-12 if precision == "as written" else 2**-6
    torch.testing.assert_close(changed, loss, rtol=bits, atol=bits)
    torch.testing.assert_close(after, before, rtol=bits, atol=bits)


@pytest.mark.parametrize("ends", ["well", "in an error"])
@pytest.mark.parametrize("knobs", SAME + OTHER, ids=str)
@pytest.mark.parametrize("make", [flat, images])
def test_everything_is_as_before_afterwards(make: Any, knobs: Knobs, ends: str) -> None:
    model = step_of(make, dtype=torch.float32).model
    model[1].eval()
    model[-1].bias.requires_grad_(False)
    model[-1].weight.grad = torch.ones(3, model[-1].in_features)
    before = everything(model)
    inputs = torch.zeros(1, 8) if make is flat else torch.zeros(2, 3, 4, 4)
    buffers = copy.deepcopy(dict(model.named_buffers()))
    with contextlib.suppress(KeyError), apply(knobs, model):
        model(inputs)
        for name, buffer in model.named_buffers():
            # Batch norm's running statistics are what a forward changes, knobs or not.
            buffer.copy_(buffers[name.replace("base.", "")])
        if ends == "in an error":
            raise KeyError
    assert everything(model) == before


def test_an_error_while_knobs_are_put_on_leaves_nothing() -> None:
    model = flat()
    before = everything(model)
    with pytest.raises(ValueError, match=r"2\.x"), apply(Knobs(frozen="0", checkpoint="layers 2.x"), model):
        pass
    assert everything(model) == before


def test_a_forward_of_ones_own_comes_back() -> None:
    model = flat()
    inner = model.forward
    mine = model.forward = lambda x: inner(x)
    with apply(Knobs(precision="bf16", mode="inference"), model):
        assert model.forward is not mine
    assert model.forward is mine


def test_the_signature_of_forward_stays() -> None:
    # The Trainer of transformers reads it to choose the columns of a data set.
    model = Deep()
    with apply(Knobs(precision="bf16"), model):
        assert list(inspect.signature(model.forward).parameters) == ["x"]


@pytest.mark.parametrize("knobs", SAME + OTHER, ids=str)
def test_no_tensor_is_kept_alive(knobs: Knobs) -> None:
    model = step_of(flat, dtype=torch.float32).model
    inputs = torch.randn(2, 8)
    refs = [weakref.ref(inputs), weakref.ref(model), weakref.ref(model[0].weight)]
    with apply(knobs, model):
        output = model(inputs)
        refs.append(weakref.ref(output))
    del inputs, output, model
    gc.collect()
    assert [ref() for ref in refs] == [None] * 4


# Precision.


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_autocast_is_around_the_forward(precision: str, dtype: torch.dtype) -> None:
    step = step_of(flat, dtype=torch.float32)
    loss, before = gradients(step, step.model)
    with apply(Knobs(precision=precision), step.model) as applied:
        assert step.model(step.batch[0]).dtype is dtype
        assert not torch.is_autocast_enabled("cpu")
        lower, after = gradients(step, step.model)
    assert applied.texts == (f"{precision} autocast",)
    # bf16 has 8 bits, so each of the four layers is off by 2**-8 at most; gradients pass them twice.
    torch.testing.assert_close(lower.float(), loss, rtol=4 * 2**-8, atol=4 * 2**-8)
    torch.testing.assert_close(after, before, rtol=8 * 2**-8, atol=8 * 2**-8)


def test_fp16_tells_that_the_loop_needs_a_scaler() -> None:
    with apply(Knobs(precision="fp16"), flat()) as applied:
        assert [note for note in applied.note_texts if 'GradScaler("cpu")' in note]


def test_off_switches_every_autocast_off() -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        @torch.autocast("cpu", dtype=torch.bfloat16)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.amp.autocast("cpu"):
                return self.inner(x)

    model, x = Casting(), torch.ones(1, 2)
    # A new context each time: one `torch.autocast` entered twice restores what its second entry found.
    autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    with autocast(), apply(Knobs(precision="off"), model), autocast():
        assert model(x).dtype is torch.float32
        # A part called by other code is outside the model's forward.
        assert model.inner(x).dtype is torch.bfloat16
    with autocast():
        assert model(x).dtype is torch.bfloat16


def test_all_bf16_has_weights_buffers_and_inputs_in_bf16() -> None:
    model = images()
    with apply(Knobs(precision="all bf16"), model):
        floating = [tensor.dtype for tensor in model.state_dict().values() if tensor.is_floating_point()]
        assert set(floating) == {torch.bfloat16}
        assert model[1].num_batches_tracked.dtype is torch.int64
        assert model(torch.zeros(2, 3, 4, 4)).dtype is torch.bfloat16
        assert model(input=torch.zeros(2, 3, 4, 4)).dtype is torch.bfloat16


def test_all_bf16_trains_the_weights_that_are_there_afterwards() -> None:
    model = nn.Linear(4, 2)
    lower = copy.deepcopy(model).bfloat16()
    x = torch.randn(8, 4)

    def train(net: nn.Module, inputs: torch.Tensor) -> None:
        optimizer = torch.optim.SGD([net.weight], lr=0.1)
        for _ in range(3):
            net(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    bias = model.bias.clone()
    with apply(Knobs(precision="all bf16"), model):
        train(model, x)
    train(lower, x.bfloat16())
    assert model.weight.dtype is torch.float32
    moved = lower.weight != model.weight.bfloat16()
    assert not moved.any()
    # The bias did not train: it has its 24 bits back, not the 8 of bf16.
    assert torch.equal(model.bias, bias)
    assert not torch.equal(bias, bias.bfloat16().float())


def test_an_optimizer_made_before_all_bf16_trains_the_same_tensors() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.clone()
    with apply(Knobs(precision="all bf16"), model):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    # The gradient of a sum over one sample of ones is 1 everywhere; bf16 rounds to 8 bits.
    torch.testing.assert_close(model.weight, before - 1, rtol=2**-8, atol=2**-8)
    assert model.weight.grad.dtype is torch.float32


# Memory format, offload, inference.


def test_channels_last_changes_weights_and_inputs() -> None:
    model, seen = images(), []
    model[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].stride()))
    with apply(Knobs(memory_format="channels last"), model) as applied:
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        model(torch.zeros(2, 3, 4, 5))
    # (H * W * C, 1, W * C, C) for shape (2, 3, 4, 5).
    assert seen == [(60, 1, 15, 3)]
    assert applied.texts == ("channels last",)


def test_channels_last_has_nothing_to_do_without_images() -> None:
    with apply(Knobs(memory_format="channels last"), flat()) as applied:
        assert applied.notes


def test_offload_moves_nothing_on_a_cpu() -> None:
    model = flat()
    with apply(Knobs(offload="saved tensors on the CPU"), model) as applied:
        assert "forward" not in model.__dict__
    assert applied.note_texts == ("The model is on the CPU: no tensor had to be moved there.",)


def test_offload_has_saved_tensors_wait_on_the_cpu() -> None:
    with mx.virtual("T4", release="2.13"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4))).cuda()
        x = torch.ones(1024, 1024, device="cuda")
        before = torch.cuda.memory_allocated()
        with apply(Knobs(offload="saved tensors on the CPU"), model):
            output = model(x)
        # Of four results of 4 MiB the last one is on the GPU, as nobody saves it; and cuBLAS has its workspace.
        assert torch.cuda.memory_allocated() - before == 4 * 1024**2 + 8_519_680
        output.sum().backward()


UNIT, WEIGHT, STATISTIC, SCALE = 8192 * 64 * 4, 64 * 64 * 4, 8192 * 4, 512
"""Bytes of a result of the network below for its batch, of a Linear's weight, of a mean for each row, and of a
LayerNorm's 64 weights in a block."""
WORKSPACE = 8_519_680
"""Bytes of a cuBLAS workspace on a T4."""


NORMS, OFFLOAD = Knobs(checkpoint="norms"), Knobs(offload="saved tensors on the CPU")
BOTH = Knobs(checkpoint="norms", offload="saved tensors on the CPU")


@pytest.mark.parametrize(
    ("knobs", "release", "alive", "peak"),
    [
        # Three times the result of Linear, and the model's result. The peak of the backward pass is at the second
        # Linear from the end: two results of Linear, the model's result, a gradient, its own two gradients, and
        # LayerNorm's and GELU's results computed again, with mean and deviation.
        (NORMS, "2.13", 4 * UNIT, (4 + 1 + 2) * UNIT + WEIGHT + 2 * STATISTIC),
        # From torch 2.15 on each matrix product takes a workspace; until 2.14 a thread kept it from its first one.
        (NORMS, "2.15", 4 * UNIT, (4 + 1 + 2) * UNIT + WEIGHT + 2 * STATISTIC + WORKSPACE),
        # The model's result. LayerNorm's backward: its input, mean, deviation and weights come back, two gradients.
        (OFFLOAD, "2.13", UNIT, (1 + 1 + 2) * UNIT + 2 * STATISTIC + 4 * SCALE),
        # Linear's backward: a workspace, the model's result, a gradient, input and weight come back, two gradients.
        (OFFLOAD, "2.15", UNIT, WORKSPACE + (1 + 1 + 1 + 1) * UNIT + 2 * WEIGHT),
        # GELU's backward: LayerNorm's input comes back and LayerNorm runs again; two gradients.
        (BOTH, "2.13", UNIT, (1 + 2 + 2) * UNIT + 2 * STATISTIC),
        # Linear's backward, as without the norms computed again.
        (BOTH, "2.15", UNIT, WORKSPACE + (1 + 1 + 1 + 1) * UNIT + 2 * WEIGHT),
    ],
    ids=str,
)
def test_memory_of_norms_computed_again_and_of_offload(knobs: Knobs, release: str, alive: int, peak: int) -> None:
    with mx.virtual("T4", release=release):
        rows = ((nn.Linear(64, 64, bias=False), nn.LayerNorm(64), nn.GELU()) for _ in range(3))
        model = nn.Sequential(*(layer for row in rows for layer in row)).cuda()
        x, gradient = torch.ones(2, 8192, 64, device="cuda")
        model(x).backward(gradient)  # gradients and workspaces are there
        before = torch.cuda.memory_allocated()
        with apply(knobs, model):
            output = model(x)
            assert torch.cuda.memory_allocated() - before == alive
            torch.cuda.reset_peak_memory_stats()
            output.backward(gradient)
        assert torch.cuda.max_memory_allocated() - before == peak


@pytest.mark.parametrize("make", [Deep, flat, images])
def test_norms_computed_again_find_what_waited_elsewhere(make: Any) -> None:
    step = step_of(make)
    loss, before = gradients(step, step.model)
    again, packed = step_of(make), []

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor.detach().clone()

    def copy_saved_tensors(log: UndoLog) -> None:
        # On a CPU `save_on_cpu` moves nothing: hooks that copy stand for it.
        run_forward_inside(
            log, again.model, lambda: torch.autograd.graph.saved_tensors_hooks(moved, lambda tensor: tensor)
        )

    with undone_after(copy_saved_tensors), apply(Knobs(checkpoint="norms"), again.model):
        changed, after = gradients(again, again.model)
    assert packed
    assert torch.equal(changed, loss)
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_inference_neither_trains_nor_drops() -> None:
    model = Deep()
    x = torch.randn(4, 8)
    with apply(Knobs(mode="inference"), model):
        assert not any(module.training for module in model.modules())
        output = model(x)
    assert not output.requires_grad
    torch.testing.assert_close(output, model.eval()(x).detach())


# Frozen layers and adapters.


def test_frozen_layers_get_no_gradient_and_the_others_the_same() -> None:
    step = step_of(flat)
    loss, before = gradients(step, step.model)
    with apply(Knobs(frozen=("0", "4")), step.model) as applied:
        changed, after = gradients(step, step.model)
    assert torch.equal(changed, loss)
    assert set(after) == {"2.weight", "2.bias", "6.weight", "6.bias"}
    torch.testing.assert_close(after, {name: before[name] for name in after}, rtol=0, atol=0)
    assert applied.texts == ("4 weights frozen",)


def test_an_adapter_changes_nothing_at_first_and_trains_alone() -> None:
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
    # Of the model itself nothing in the blocks has changed.
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters() if ".h." in name)


def test_an_adapter_knows_inputs_and_outputs_of_a_transposed_layer() -> None:
    model = gpt2()
    with apply(Knobs(lora="transformer.h.0.mlp.c_fc", lora_rank=3), model):
        adapter = model.get_submodule("transformer.h.0.mlp.c_fc")
        # From 32 to 4 x 32 features.
        assert (adapter.in_features, adapter.out_features) == (32, 128)
        assert (tuple(adapter.down.shape), tuple(adapter.up.shape)) == ((3, 32), (128, 3))
        assert adapter.weight is adapter.base.weight
        assert adapter.bias is adapter.base.bias


def test_adapters_are_put_on_all_linear_layers_below() -> None:
    model = Deep()
    with apply(Knobs(lora=("blocks.0", "blocks.1.up"), lora_rank=4), model):
        trains = [name for name, weight in model.named_parameters() if weight.requires_grad and "blocks" in name]
        assert [name for name in trains if name.endswith(("down", "up"))] == [
            f"blocks.{name}" for name in ("0.up.down", "0.up.up", "0.down.down", "0.down.up", "1.up.down", "1.up.up")
        ]
        assert not model.blocks[0].up.base.weight.requires_grad
        assert model.blocks[1].down.weight.requires_grad


def test_adapters_leave_out_what_attention_never_calls() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with apply(Knobs(lora="self_attn, linear1".split(", ")), model) as applied:
        model(torch.zeros(1, 3, 8))
    assert [where for where, _ in applied.skipped] == ["self_attn.out_proj"]


def test_adapters_tell_of_a_shared_weight() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(10, 8), "head": nn.Linear(8, 10, bias=False)})
    model["head"].weight = model["embedding"].weight
    with apply(Knobs(lora="head"), model) as applied:
        assert "head shares its weight with embedding.weight: that weight is frozen there too." in applied.note_texts


def test_a_layer_without_linear_layers_takes_no_adapter() -> None:
    with pytest.raises(ValueError, match="1 is no linear layer"), apply(Knobs(lora="1"), flat()):
        pass


@pytest.mark.parametrize("knob", ["frozen", "lora"])
def test_an_unknown_layer_is_told_with_those_close(knob: str) -> None:
    with pytest.raises(ValueError, match=r"Deep has no layer 'blocks\.0\.upp'; close: 'blocks\.0\.up'"):
        apply(Knobs(**{knob: "blocks.0.upp"}), Deep()).__enter__()


def test_an_unknown_layer_of_a_checkpoint_is_told_with_those_close() -> None:
    with pytest.raises(ValueError, match=r"has no layer 'block\.0'.*'blocks\.0'"):
        apply(Knobs(checkpoint="layers block.0"), Deep()).__enter__()


# In place, and what apply says.


def test_sites_that_were_found_are_used() -> None:
    model = flat()
    sites = legal_sites(lambda: model(torch.ones(1, 8)).sum().backward(), model)
    with apply(Knobs(inplace="on"), model, sites):
        assert [model[place].inplace for place in (1, 3, 5)] == [True] * 3
    assert [model[place].inplace for place in (1, 3, 5)] == [False] * 3


def test_knobs_of_the_loop_are_left_to_it() -> None:
    with apply(Knobs(optimizer="Adam", batch=4, gpu="T4"), flat()) as applied:
        assert applied.texts == ()
        assert [note.split(" belongs")[0] for note in applied.note_texts] == ["batch 4", "optimizer Adam", "gpu T4"]


@pytest.mark.parametrize(("make", "accumulation", "told"), [(images, 4, 1), (images, 1, 0), (flat, 4, 0)])
def test_batch_norm_and_micro_batches_are_told_of(make: Any, accumulation: int, told: int) -> None:
    with apply(Knobs(accumulation=accumulation), make()) as applied:
        assert sum("Batch norm" in note for note in applied.note_texts) == told


# Virtual models.


@pytest.mark.parametrize("knobs", SAME + OTHER, ids=str)
@pytest.mark.parametrize("make", [flat, images])
def test_knobs_work_on_a_virtual_model(make: Any, knobs: Knobs) -> None:
    with mx.virtual("T4"):
        model = make().cuda()
        x = torch.randn(2, 8, device="cuda") if make is flat else torch.randn(2, 3, 8, 8, device="cuda")
        types = [(weight.dtype, weight.stride(), weight.requires_grad) for weight in model.parameters()]
        with apply(knobs, model):
            output = model(x)
            if output.requires_grad:
                functional.cross_entropy(output.float(), torch.zeros(2, dtype=torch.long, device="cuda")).backward()
        assert [(weight.dtype, weight.stride(), weight.requires_grad) for weight in model.parameters()] == types
