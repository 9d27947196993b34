"""Knobs as values: text, equality, pickles, and what contradicts itself."""

from __future__ import annotations

import inspect
import pickle
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memexplore.run.knobs.checkpoints.setting import Checkpoint, CheckpointKind
from memexplore.run.knobs.knobs import KNOBS, Knobs, conflicts
from memexplore.run.knobs.values import OneOf

CHOICES = {name: knob.values.choices for name, knob in KNOBS.items() if isinstance(knob.values, OneOf)}
names = st.lists(st.from_regex(r"[a-z_]{1,8}(\.[a-z0-9_]{1,5}){0,2}", fullmatch=True), min_size=1, max_size=3).map(
    tuple
)
numbers = st.integers(1, 10**6)
checkpoints = st.one_of(
    st.sampled_from([kind for kind in CheckpointKind if kind not in (CheckpointKind.EVERY, CheckpointKind.LAYERS)]).map(
        Checkpoint
    ),
    numbers.map(lambda every: Checkpoint(CheckpointKind.EVERY, every)),
    names.map(lambda layers: Checkpoint(CheckpointKind.LAYERS, layers=layers)),
)
knobs_ = st.builds(
    Knobs,
    **{name: st.sampled_from(list(choices)) for name, choices in CHOICES.items()},
    checkpoint=checkpoints,
    **{name: st.none() | numbers for name in ("batch", "accumulation", "input_size")},
    **{name: st.just(()) | names for name in ("frozen", "lora")},
    lora_rank=numbers,
    settings=st.sampled_from([None, "expandable_segments:True", "max_split_size_mb:64"]),
    gpu=st.sampled_from([None, "T4", "A100", "24GiB"]),
    variables=st.dictionaries(st.sampled_from("abc"), st.integers() | st.text(max_size=3), max_size=2),
)


@given(checkpoints)
def test_a_checkpoint_is_its_text(checkpoint: Checkpoint) -> None:
    assert Checkpoint.parse(str(checkpoint)) == checkpoint


@given(knobs_)
def test_a_setting_survives_a_pickle_and_a_copy(knobs: Knobs) -> None:
    for other in (pickle.loads(pickle.dumps(knobs)), knobs.replace()):
        assert other == knobs
        assert hash(other) == hash(knobs)


@given(knobs_)
def test_knobs_equal_those_made_of_their_changed_fields(knobs: Knobs) -> None:
    again = Knobs(**knobs.changed())
    assert again.replace(lora_rank=knobs.lora_rank) == knobs
    assert str(again) == str(knobs)


@given(knobs_, knobs_)
def test_settings_that_differ_have_different_texts(one: Knobs, other: Knobs) -> None:
    # The rank of adapters says nothing where there are none.
    one, other = (knobs if knobs.lora else knobs.replace(lora_rank=8) for knobs in (one, other))
    assert (str(one) == str(other)) == (one == other)


@given(st.data())
def test_a_choice_equals_its_text(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(CHOICES)))
    choice = data.draw(st.sampled_from(list(CHOICES[name])))
    assert Knobs(**{name: choice.value}) == Knobs(**{name: choice})


@given(knobs_)
def test_the_printed_value_is_the_call_that_makes_it(knobs: Knobs) -> None:
    assert eval(repr(knobs), {"Knobs": Knobs}) == knobs


def test_only_changed_fields_are_printed() -> None:
    assert repr(Knobs()) == "Knobs()"
    knobs = Knobs(precision="bf16", checkpoint="layers a b", lora=["fc"], batch=4)
    assert repr(knobs) == "Knobs(checkpoint='layers a b', precision='bf16', batch=4, lora=('fc',))"


def test_default_knobs_change_no_field() -> None:
    assert Knobs().changed() == {}
    assert str(Knobs()) == "as written"


def test_layers_may_be_a_text_or_a_sequence() -> None:
    assert Knobs(frozen="encoder") == Knobs(frozen=["encoder"]) == Knobs(frozen=("encoder",))


def test_variables_may_be_a_dict_in_any_order() -> None:
    assert Knobs(variables={"b": 1, "a": 2}).variables == (("a", 2), ("b", 1))


def test_text_has_the_rank_only_with_adapters() -> None:
    assert str(Knobs(lora="head", lora_rank=4)) == "lora head, lora rank 4"
    assert Knobs(lora_rank=4).changed() == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"precision": "fp8"}, "precision='fp8' is not a setting; write one of as written, off, fp16"),
        ({"checkpoint": "every"}, "checkpoint='every' is not a setting; write one of as written"),
        ({"checkpoint": "every 0"}, "checkpoint='every 0' is not a setting"),
        ({"checkpoint": "layers"}, "checkpoint='layers' is not a setting"),
        ({"checkpoint": 2}, "checkpoint=2 is not a setting; write one"),
        ({"batch": 0}, "batch=0 is not a positive integer; write 1 or more"),
        ({"batch": 2.0}, "batch=2.0 is not a positive integer"),
        ({"accumulation": True}, "accumulation=True is not a positive integer"),
        ({"lora_rank": -1}, "lora_rank=-1 is not a positive integer"),
        ({"variables": {"sizes": [1, 2]}}, "variables: sizes = .* is not hashable"),
        ({"gpu": "T5"}, "T5"),
        ({"settings": "max_split_size:3"}, "max_split_size"),
    ],
)
def test_an_invalid_value_raises_with_the_valid_ones(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Knobs(**given)


@pytest.mark.parametrize("given", [{"every": 0}, {"kind": CheckpointKind.LAYERS}, {"layers": ("a",)}])
def test_an_inconsistent_checkpoint_raises(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Checkpoint(**given)


@pytest.mark.parametrize(
    ("knobs", "count"),
    [
        (Knobs(), 0),
        (Knobs(batch=8, accumulation=4), 0),
        (Knobs(batch=8, accumulation=3), 1),
        (Knobs(update="in backward", accumulation=2), 1),
        (Knobs(update="in backward", precision="fp16", zero_grad="set to zero"), 2),
        (Knobs(update="in backward", precision="bf16", optimizer="Adafactor"), 0),
        (Knobs(update="fused", optimizer="Adafactor"), 1),
        (Knobs(update="fused", optimizer="Adam"), 0),
        # Nothing of an optimizer matters where nothing trains.
        (Knobs(update="in backward", accumulation=2, mode="inference"), 0),
    ],
    ids=str,
)
def test_conflicts(knobs: Knobs, count: int) -> None:
    assert len(conflicts(knobs)) == count


@pytest.mark.parametrize("name", KNOBS)
@pytest.mark.parametrize("value", [4, -1, 2.5, [1], {"a": [1]}, object(), b"x", True, [["x"]]])
def test_value_of_a_wrong_type_is_a_value_error_that_names_the_field(name, value):
    try:
        made = Knobs(**{name: value})
    except ValueError as error:
        assert name in str(error)
    else:
        hash(made)


def test_rank_given_as_lora_is_sent_to_lora_rank():
    with pytest.raises(ValueError, match=r"lora=4 is not names of layers; write lora='encoder.0' .*lora_rank="):
        Knobs(lora=4)


def test_an_unknown_knob_is_a_type_error_with_a_similar_one():
    with pytest.raises(TypeError, match=r"no knob 'batchsize'; did you mean batch\?"):
        Knobs(batchsize=4)


def test_a_setting_cannot_be_changed():
    knobs = Knobs(batch=4)
    with pytest.raises(AttributeError, match=r"write knobs.replace\(batch=8\)"):
        knobs.batch = 8
    with pytest.raises(AttributeError):
        del knobs.batch
    assert knobs == Knobs(batch=4)


def test_the_signature_and_dir_list_every_knob():
    assert list(inspect.signature(Knobs).parameters) == list(KNOBS)
    assert set(KNOBS) <= set(dir(Knobs()))


def test_integers_of_numpy_are_integers():
    assert Knobs(batch=np.int64(4)) == Knobs(batch=4)


def test_layers_with_spaces_in_their_names_are_written_as_code() -> None:
    knobs = Knobs(checkpoint=Checkpoint(CheckpointKind.LAYERS, layers=("a b",)))
    assert eval(repr(knobs), {"Knobs": Knobs, "Checkpoint": Checkpoint, "CheckpointKind": CheckpointKind}) == knobs


def test_html_form_has_the_code_and_each_changed_knob_beside_what_is_written() -> None:
    page = Knobs(precision="bf16", batch=4, frozen="a<b")._repr_html_()
    assert "<code>Knobs(precision=&#x27;bf16&#x27;, batch=4, frozen=(&#x27;a&lt;b&#x27;,))</code>" in page
    rows = [re.sub(r"(<[^>]*>)+", "|", row).strip("|") for row in page.split("<tr>")[1:]]
    assert rows[0] == "knob|changed to|written"
    assert rows[1:3] == ["precision|bf16|as written", "batch|4|as written"]
    assert rows[3].startswith("frozen|a&lt;b|as written|")
    assert f"<summary>{len(KNOBS) - 3} as written</summary>inplace, checkpoint, accumulation, " in page


def test_html_form_of_a_step_as_written_has_no_table() -> None:
    page = Knobs()._repr_html_()
    assert "<code>Knobs()</code>" in page
    assert "<table" not in page
    assert f"{len(KNOBS)} as written" in page
