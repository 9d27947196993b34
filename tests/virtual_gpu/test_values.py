"""Unknown values in user code: what they count as, one set of assumptions, and loops that end in one clear error."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import memexplore as mx
from memexplore.run.machine import machine_of
from memexplore.virtual_gpu.values import value_reads
from memexplore.virtual_gpu.values.value_reads import NotSimulated


@pytest.fixture
def device() -> Iterator[str]:
    with mx.virtual("T4", values="none"):
        yield "cuda"


@pytest.fixture
def loss(device: str) -> torch.Tensor:
    return functional.cross_entropy(torch.randn(8, 10, device=device), torch.randint(10, (8,), device=device))


def _notes(function: Callable[[], object]) -> str:
    """Return the notes of the tape of a function."""
    return "\n".join(mx.simulate(function, values="none").meta.notes)


# Printing.


@pytest.mark.parametrize(
    "form",
    [
        lambda loss: str(loss.item()),
        lambda loss: repr(loss.item()),
        lambda loss: f"{loss:.3f}",
        lambda loss: f"{loss.item():.4f}",
        lambda loss: f"{loss.item() / 8:.1%}",
        lambda loss: "{:.2e}".format(loss),  # noqa: UP032
        lambda loss: f"{sum(loss.item() for _ in range(4)) / 4:.3f}",
        lambda loss: str(round(loss.item(), 3)),
        lambda loss: str(min(float("inf"), loss.item())),
        lambda loss: str(-loss.item() + 2),
        lambda loss: str([loss.item() ** 2]),
    ],
)
def test_a_printed_value_says_virtual(loss: torch.Tensor, form: Callable[[torch.Tensor], str]) -> None:
    assert form(loss).strip("[]") == "virtual"


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (lambda loss: "%.4f" % loss, "1.0000"),  # noqa: UP031
        (lambda loss: "%.4f" % loss.item(), "1.0000"),  # noqa: UP031
        (lambda loss: "%5d|" % loss.item(), "    1|"),  # noqa: UP031
        (lambda loss: str(float(loss)), "1.0"),
        (lambda loss: f"{float(loss.item()):.2f}", "1.00"),
        (lambda loss: str(int(loss)), "1"),
        (lambda loss: str(np.mean([loss.item(), loss.item()])), "1.0"),
    ],
)
def test_code_that_does_not_ask_the_class_of_a_number_prints_1(
    loss: torch.Tensor, form: Callable[[torch.Tensor], str], expected: str
) -> None:
    assert form(loss) == expected


def test_messages_of_logging_print_1_with_percent(loss: torch.Tensor, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        logging.info("loss %.3f or %s", loss.item(), loss.item())
    assert caplog.messages == ["loss 1.000 or virtual"]


def test_a_note_says_how_many_values_were_read_and_where_first() -> None:
    line = test_a_note_says_how_many_values_were_read_and_where_first.__code__.co_firstlineno

    def run() -> None:
        losses = torch.rand(3, device="cuda")
        print(losses, f"{losses[0]:.3f}")  # printed as virtual and not read
        print("%.3f" % losses[0].item(), float(losses[1]))  # noqa: UP031
        losses.tolist()

    # One by `item`, one by `float` and the three of the list.
    note = f"assumed: 5 unknown floating-point values were read as 1, first at {__file__}:{line + 6}"
    assert _notes(run) == note


def test_guards_against_nan_are_not_among_the_values_read_as_1() -> None:
    assert _notes(lambda: torch.isnan(torch.rand(3, device="cuda")).float().sum().item()) == ""


def test_a_printed_value_keeps_its_column(loss: torch.Tensor) -> None:
    assert f"|{loss.item():12.4f}|{loss.item():<10.2f}|" == "|     virtual|virtual   |"


def test_a_printed_tensor_has_shape_and_device_and_no_number(device: str) -> None:
    assert str(torch.ones(2, 3, device=device)) == "virtual(shape=(2, 3), dtype=torch.float32, device='cuda:0')"
    assert str(torch.ones((), device=device)) == "virtual(float32, device='cuda:0')"
    assert "Parameter containing" in str(nn.Linear(2, 2).to(device).weight)


def test_a_numpy_array_shows_no_number(device: str) -> None:
    array = torch.ones(2, device=device).cpu().numpy()
    assert str(array) == "virtual(shape=(2,), dtype=float32)"
    assert array.dtype == np.float32
    assert not np.isnan(array).any()


def test_numpy_takes_an_array_of_unknown_values_for_a_plain_one(device: str) -> None:
    array = torch.nn.Linear(512, 512).to(device)(torch.ones(2, 512, device=device)).detach().cpu().numpy()
    assert str(array) == "virtual(shape=(2, 512), dtype=float32)"
    # What has `filled` counts as a masked array: matplotlib's imshow masks what it shows.
    assert np.ma.masked_invalid(array).count() == 1024
    assert {name for name in dir(type(array)) if name[0] != "_"} == {name for name in dir(np.ndarray) if name[0] != "_"}


def test_numpy_of_a_gpu_tensor_raises_the_error_of_torch(device: str) -> None:
    with pytest.raises(TypeError, match=r"can't convert cuda:0 device type tensor to numpy"):
        torch.ones(2, device=device).numpy()


def test_values_copied_into_a_real_tensor_count_as_one_and_that_is_noted() -> None:
    def run() -> None:
        losses = torch.zeros(3)
        losses[1] = torch.rand((), device="cuda")
        assert losses.tolist() == [0.0, 1.0, 0.0]

    assert "copied from the virtual GPU into a tensor on the CPU counts as 1" in _notes(run)


def test_a_computed_accuracy_prints_as_virtual(device: str) -> None:
    scores, labels = torch.randn(8, 10, device=device), torch.randint(10, (8,), device=device)
    correct = total = 0
    for _ in range(3):
        correct += (scores.argmax(1) == labels).sum().item()
        total += labels.size(0)
    assert f"{correct}/{total} {correct / total:.2%} {100 * correct / total:.1f}" == "virtual/24 virtual virtual"


def test_a_virtual_value_works_as_a_number(device: str) -> None:
    count = torch.tensor(7, device=device).item()
    assert list(range(count)) == [0]
    assert torch.zeros(count, device=device).shape == (1,)
    assert math.isfinite(torch.rand((), device=device).item())


# Guards.


@pytest.mark.parametrize(
    "guard",
    [
        lambda x: x.isnan().any(),
        lambda x: torch.isnan(x).any().item(),
        lambda x: torch.isnan(x).sum() > 0,
        lambda x: not torch.isfinite(x).all(),
        lambda x: torch.isinf(x).any() or torch.isnan(x).any(),
        lambda x: (x != x).any(),
        lambda x: math.isnan(x.sum().item()),
        lambda x: not math.isfinite(x.sum()),
        lambda x: (torch.isnan(x) | torch.isinf(x)).any(),
        lambda x: (~torch.isfinite(x)).any(),
        lambda x: bool(np.isnan(x.cpu().numpy()).any()),
    ],
)
def test_guards_against_nan_pass(device: str, guard: Callable[[torch.Tensor], object]) -> None:
    assert not guard(torch.randn(4, 4, device=device))


def test_a_count_of_gradients_that_are_not_finite_stays_zero() -> None:
    """As DeepSpeed counts them: a step would be skipped otherwise, and no optimizer state be made."""
    with mx.virtual("T4"):
        count = torch.zeros([1], device="cuda")
        for _ in range(2):
            largest = torch.empty(4, 4, device="cuda").amax()
            count += torch.isfinite(largest).logical_not()
        assert not count.bool().byte()[0].item()
        count += largest
        assert count.bool().byte()[0].item()


def test_a_program_may_put_all_new_tensors_on_the_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSpeed's `zero.Init` does: it replaces the functions that make tensors."""

    def on_gpu(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **kwargs: function(
            *args, **{**kwargs, "device": kwargs.get("device") or device}
        ).bfloat16()

    for name in ("empty", "full", "ones", "tensor", "zeros"):
        monkeypatch.setattr(torch, name, on_gpu(getattr(torch, name)))
    layer = nn.Linear(4, 2)
    nn.init.constant_(layer.bias, 2.0)
    assert layer.weight.dtype is torch.bfloat16
    assert layer(torch.ones(3, 4)).shape == (3, 2)


def test_functions_that_a_program_replaced_do_not_change_what_an_op_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's shape rule of `ones` calls `torch.empty`; its result is kept for later calls of `ones`."""
    empty = torch.empty
    with mx.virtual("T4"):
        with monkeypatch.context() as replaced:
            replaced.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).bfloat16())
            assert torch.ones(77, 3, device="cuda").dtype is torch.float32
            assert torch.empty(1).dtype is torch.bfloat16
        assert torch.ones(77, 3, device="cuda").dtype is torch.float32


def test_anomaly_detection_raises_no_error(device: str) -> None:
    model = nn.Linear(4, 2).to(device)
    with torch.autograd.set_detect_anomaly(True):
        model(torch.randn(3, 4, device=device)).sum().backward()
    assert model.weight.grad is not None


def test_truth_of_several_values_is_ambiguous_as_in_torch(device: str) -> None:
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(torch.ones(2, device=device))


# Loops.


def _while_tensor(x: torch.Tensor) -> None:
    while x < 5:
        x = x + 0


def _while_item(x: torch.Tensor) -> None:
    while (x > 0).item():
        x = x * 0.5


def _break_on_value(x: torch.Tensor) -> None:
    while True:
        x = x * 0.5
        if x.item() < 1e-3:
            break


def _return_on_value(x: torch.Tensor) -> None:
    while True:
        if x < 0:
            return


def _while_number(x: torch.Tensor) -> None:
    error = 1.0
    while error > 1e-3:
        error = x.item()


def _while_not_all(x: torch.Tensor) -> None:
    while not torch.all(x < 0):
        x = x - 1


def _while_converted(x: torch.Tensor) -> None:
    while float(x) > 0.1:
        x = x * 0.5


LOOPS = [
    _while_tensor,
    _while_item,
    _break_on_value,
    _return_on_value,
    _while_number,
    _while_not_all,
    _while_converted,
]


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> int:
    """Rounds that a loop on a value may have: fewer than in earnest, because the test waits for them."""
    monkeypatch.setattr(value_reads, "LIMIT", 200)
    return 200


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_on_a_value_raises_a_clear_error(device: str, limit: int, loop: Callable[[torch.Tensor], None]) -> None:
    with pytest.raises(NotSimulated, match=r"test_values\.py:\d+: this line has read 200 values .* fixed number of"):
        loop(torch.rand((), device=device))


def test_a_loop_without_source_raises_the_same_error(device: str, limit: int) -> None:
    with pytest.raises(NotSimulated, match="<string>:1: this line has read 200 values"):
        exec("while x > 0: pass", {"x": torch.rand((), device=device)})


def test_a_loop_on_a_value_is_named_in_a_warning_long_before_the_error(device: str) -> None:
    x = torch.rand((), device=device)

    def test_often() -> None:
        for _ in range(2_000):
            assert x > 0

    with pytest.warns(RuntimeWarning, match="read 1,000 values that a virtual GPU does not know") as warned:
        test_often()
    assert [warning.filename for warning in warned] == [__file__]


def test_tests_of_a_value_that_was_read_once_have_no_limit(device: str, limit: int) -> None:
    tokens = torch.randn(1_000, 7, device=device).argmax(1).tolist()
    assert sum(token == 5 for token in tokens) == 0


def test_a_loop_with_fewer_rounds_than_the_limit_runs(device: str) -> None:
    x, rounds = torch.rand((), device=device), 0
    while x > 0:
        rounds += 1
        if x < 0 or rounds > 450:
            break
    assert rounds == 451


# Shapes that depend on values.


def test_masks_keep_every_element(device: str) -> None:
    x, labels = torch.randn(8, 4, device=device), torch.randint(10, (8,), device=device)
    assert x[x > 0].shape == (32,)
    assert x[labels > 3].shape == (8, 4)
    assert torch.nonzero(labels).shape == (8, 1)
    assert torch.where(labels > 3)[0].shape == (8,)
    assert x.masked_select(x > 0).shape == (32,)


def test_unique_finds_every_value_different(device: str) -> None:
    x = torch.randint(10, (8, 4), device=device)
    values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
    assert (values.shape, inverse.shape, counts.shape) == ((32,), (8, 4), (32,))
    assert torch.unique(x, dim=0).shape == (8, 4)
    assert torch.unique_consecutive(x).shape == (32,)


def test_unique_finds_no_more_indices_than_there_are_candidates(device: str) -> None:
    chosen = torch.randn(16, 10, device=device).argmax(1)
    found, inverse, counts = torch.unique(chosen, return_inverse=True, return_counts=True)
    assert (found.shape, inverse.shape, counts.shape) == ((10,), (16,), (10,))
    assert torch.unique(chosen[:4]).shape == (4,)


@pytest.mark.parametrize(
    ("function", "note"),
    [
        (lambda x: x[x > 0], "boolean masks keep every element"),
        (lambda x: x.unique(), "unique finds every value different"),
        (lambda x: x.long().sum().item(), "the value of an integer tensor counted as 1"),
        (lambda x: bool((x > 0).any()), "an unknown boolean counted as True"),
        (lambda x: x[0] > 2 or 0, "an unknown boolean counted as False"),
        (lambda x: [int(entry) for entry in x > 0], "an unknown boolean counted as True"),
        (lambda x: x.long().tolist(), "the values of an integer tensor counted as 1"),
        (lambda x: x.long().bincount(), "bincount finds no value beyond minlength"),
    ],
)
def test_an_assumption_is_noted_on_the_tape_with_its_line(function: Callable[..., object], note: str) -> None:
    notes = _notes(lambda: function(torch.rand(4, device="cuda")))
    assert note in notes
    assert "test_values.py:" in notes


def test_a_run_without_assumptions_has_no_note() -> None:
    assert _notes(lambda: torch.ones(3, device="cuda").sum().backward) == ""


def test_an_op_without_an_assumption_raises_a_clear_error(device: str) -> None:
    with pytest.raises(NotSimulated, match=r"test_values\.py:\d+: .*sparse.* cannot be simulated"):
        torch.ones(3, 3, device=device).to_sparse_csr()


def test_packed_sequences_take_the_real_lengths(device: str) -> None:
    x = torch.randn(4, 7, 5, device=device)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([7, 5, 3, 2]), batch_first=True)
    assert packed.data.shape == (17, 5)  # 7 + 5 + 3 + 2
    padded, lengths = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)
    assert padded.shape == (4, 7, 5)
    assert lengths.tolist() == [7, 5, 3, 2]


@pytest.mark.parametrize("mask", [lambda chosen: chosen == 2, lambda chosen: functional.one_hot(chosen, 4)[..., 2] > 0])
def test_routing_is_balanced(device: str, mask: Callable[[torch.Tensor], torch.Tensor]) -> None:
    _, chosen = torch.randn(64, 4, device=device).softmax(-1).topk(2, -1)
    tokens, _ = torch.where(mask(chosen))
    assert tokens.shape == (32,)  # 64 tokens with 2 choices each among 4 experts: 64 * 2 / 4


def test_comparing_two_tensors_keeps_no_reference_to_them() -> None:
    with mx.virtual("T4"):
        one, other = torch.ones(1000, device="cuda"), torch.ones(1000, device="cuda")
        _ = one >= other
        del one, other, _
        assert torch.cuda.memory_allocated() == 0


def test_balanced_routing_is_noted() -> None:
    def run() -> None:
        (torch.randn(64, 4, device="cuda").argmax(-1) == 1).nonzero()

    assert "what unknown scores choose, such as experts, tokens or classes, is spread evenly" in _notes(run)


def test_distributions_accept_their_own_samples(device: str) -> None:
    distribution = torch.distributions.Categorical(logits=torch.randn(3, 4, device=device))
    assert distribution.log_prob(distribution.sample()).shape == (3,)


def test_generating_until_a_token_appears_raises_the_error_of_a_loop(device: str, limit: int) -> None:
    def generate(tokens: torch.Tensor) -> None:
        while True:
            tokens = torch.cat([tokens, tokens[:, -1:]], 1)
            if tokens[0, -1].item() == 99:
                break

    with pytest.raises(NotSimulated, match="this line has read 200 values"):
        generate(torch.zeros(1, 1, dtype=torch.long, device=device))


# Choices by unknown scores, and masks: one set of assumptions.


def test_unknown_token_is_the_middle_one_of_its_vocabulary() -> None:
    letters = {number: chr(97 + number) for number in range(26)}
    with mx.virtual("T4"):
        weights = torch.rand(100_000, 26, device="cuda")
        (token,) = weights[0].softmax(0).multinomial(1).tolist()
    assert (letters[token], token == 13, token in {0, 25}, str(token)) == ("n", True, False, "virtual")


def test_an_index_among_few_is_valid() -> None:
    with mx.virtual("T4"):
        unknown = torch.rand(100_000, 1, device="cuda").mean(0)
        place = torch.searchsorted(torch.rand(100_000, device="cuda"), unknown).item()
        assert ["only"][unknown.argmax().item()] == ["only"][place] == "only"


OPS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "topk": lambda scores, k: scores.topk(k, -1).indices,
    "topk of columns": lambda scores, k: scores.t().topk(k, 0).indices.t(),
    "sort": lambda scores, k: scores.sort(-1, descending=True).indices[:, :k],
    "argsort": lambda scores, k: torch.argsort(scores, dim=-1, stable=True)[:, :k],
    "multinomial": lambda scores, k: scores.softmax(-1).multinomial(k),
    "argmax": lambda scores, k: scores.argmax(-1, keepdim=True),
    "argmin": lambda scores, k: scores.t().argmin(0)[:, None],
    "max": lambda scores, k: scores.max(-1, keepdim=True).indices,
}


@pytest.mark.parametrize("op", OPS)
@settings(max_examples=20)
@given(data=st.data())
def test_choices_agree_in_all_ops_and_none_is_lost(op: str, data: st.DataObject) -> None:
    experts, tokens = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 12))
    skew = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    with machine_of("T4").replace(skew=skew).turned_on():
        scores = torch.empty(tokens * experts + 100_000, device="cuda")[: tokens * experts].view(tokens, experts).exp()
        chosen = OPS[op](scores, data.draw(st.integers(1, experts)))
        hot = functional.one_hot(chosen, experts)
        counts = chosen.flatten().bincount(minlength=experts).tolist()
        held = torch.zeros(tokens, experts, dtype=torch.bool, device="cuda").scatter_(1, chosen, value=True)
        unique, sizes = chosen.unique(return_counts=True)
        listed = [expert for row in chosen.tolist() for expert in row]
        rows = [listed.count(expert) for expert in range(experts)]
        assert (counts, sum(rows)) == (rows, chosen.numel())
        for expert, count in enumerate(rows):
            mask = chosen == expert
            assert (int(mask.sum()), len(mask.nonzero()), len(torch.where(mask)[0])) == (count, count, count)
            assert (chosen[mask].numel(), int(hot[..., expert].sum()), int(held[:, expert].sum())) == (count,) * 3
            assert (bool(mask.any()), bool(mask.all())) == (count > 0, count == mask.numel())
        assert dict(zip(unique.tolist(), sizes.tolist(), strict=True)) == {
            expert: count for expert, count in enumerate(rows) if count
        }
        assert chosen.flatten().topk(1).values.item() == max(listed)
    if not skew and "sort" not in op:
        assert max(rows) - min(rows) <= 1
    if skew == 1:
        assert set(rows) <= {0, tokens}


MASKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "true": lambda x: x > 0.5,
    "false": lambda x: x < 0.5,
    "not true": lambda x: ~(x > 0.5),
    "both": lambda x: (x > 0.5) & (x < 0.5),
    "nan": lambda x: x.isnan(),
    "infinite": lambda x: x == float("inf"),
    "finite": lambda x: x.isfinite(),
    "of a choice": lambda x: x.view(50, -1).argmax(1) == 3,
    "of integers": lambda x: x.long() == 7,
}
READINGS: dict[str, Callable[[torch.Tensor], int]] = {
    "sum": lambda mask: int(mask.sum()),
    "count": lambda mask: int(mask.count_nonzero()),
    "nonzero": lambda mask: len(mask.nonzero()),
    "where": lambda mask: len(torch.where(mask)[0]),
    "index": lambda mask: mask[mask].numel(),
    "select": lambda mask: mask.masked_select(mask).numel(),
}


@pytest.mark.parametrize("values", ["none", "known"])
@pytest.mark.parametrize("name", MASKS)
@settings(max_examples=10)
@given(names=st.permutations(list(READINGS)), tested=st.booleans())
def test_all_ops_find_the_same_number_of_true_elements(values: str, name: str, names: list[str], tested: bool) -> None:
    with mx.virtual("T4", values=values):
        mask = MASKS[name](torch.empty(100_000, device="cuda").exp())
        is_true = bool(mask.any()) if tested else None
        numbers = {READINGS[name](mask) for name in names}
        assert len(numbers) == 1
        assert is_true in (None, numbers != {0})
        assert (bool(mask.any()), bool(mask.all())) == (numbers != {0}, numbers == {mask.numel()})


def test_a_mask_that_is_guessed_to_be_false_selects_all_elements_if_it_was_not_tested_before(device: str) -> None:
    scores = torch.rand(8, device=device)
    assert scores[scores > 3].shape == (8,)
    mask = scores > 3
    assert (bool(mask.any()), scores[mask].shape) == (False, (0,))


def test_choices_on_the_cpu_are_those_on_the_gpu_and_print_as_virtual() -> None:
    with mx.virtual("T4"):
        chosen = torch.empty(100_000, 8, device="cuda").exp().topk(2).indices[:6]
        moved = chosen.cpu()
        counts = torch.bincount(moved.flatten(), minlength=8)
        # 6 rows with 2 each from the middle of 8 on: 4 5, 6 7, 0 1, 2 3, 4 5, 6 7
        assert counts.tolist() == [1, 1, 1, 1, 2, 2, 2, 2]
        assert (moved.numpy().max(), bool((moved == chosen.cpu()).all())) == (7, True)
        assert str(counts.tolist()[0]) == str(counts[0].item()) == "virtual"
        assert str(moved.numpy()) == "virtual(shape=(6, 2), dtype=int64)"
        accuracy = (moved[:, 0] == torch.zeros(6, dtype=torch.long)).float().mean()
        assert f"{accuracy:.2f}" == str(accuracy.item()) == "virtual"


def test_choices_that_are_no_valid_index_end_no_program() -> None:
    """The scores of a model may have more places than are used, such as a vocabulary that is padded."""
    with mx.virtual("T4"):
        chosen = torch.empty(100_000, 64, device="cuda").exp().argmax(1)[:4]
        names = torch.arange(10, device="cuda")
        assert names[chosen].shape == names.gather(0, chosen).shape == (4,)
        with pytest.raises(IndexError):
            names[torch.tensor([32], device="cuda")]
