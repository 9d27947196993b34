"""Names of modules: each module has one number, also where a later one has the address of a dead one."""

from __future__ import annotations

import torch
from torch import nn

import memexplore as mx
from memexplore.recorder.module_hooks import Names
from memexplore.tape import Category


def test_a_module_at_the_address_of_a_dead_one_has_its_own_name():
    names = Names()
    for kind in (nn.ReLU, nn.Tanh, nn.GELU) * 50:
        module = kind()
        assert names.table[names.number(module, -1)] == kind.__name__
        # The next one may have its address.
        del module


def test_entries_of_dead_modules_are_removed():
    names = Names()
    for _ in range(3000):
        names.number(nn.Identity(), -1)
    assert names.table == ["Identity"]
    kept = [nn.Identity() for _ in range(5)]
    assert {names.number(module, -1) for module in kept} == {0}
    assert len(names._numbers) < 3000


def test_modules_that_are_equal_have_names_of_their_own():
    class Equal(nn.Linear):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Equal)

        __hash__ = nn.Module.__hash__

    names = Names()
    model = nn.Sequential(Equal(1, 1), Equal(1, 1))
    names.root(model)
    assert [names.table[names.number(layer, -1)] for layer in model] == ["0", "1"]


class Probed(nn.Module):
    """A model that runs its layers once while it is constructed, as detectors do to find their strides."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.stride = self.forward(torch.zeros(1, 2)).shape[-1]
        self.head = nn.Linear(self.stride, 1)

    def forward(self, x):
        return self.head(self.body(x)) if hasattr(self, "head") else self.body(x)


def test_layers_called_by_the_constructor_of_their_model_have_their_names_in_it():
    with mx.virtual("T4"), mx.record() as recording:
        model = Probed().cuda()
        model(torch.zeros(1, 2, device="cuda")).sum().backward()
    called = ["Probed", "body", "body.0", "body.1", "head"]
    assert sorted(recording.tape.modules) == called
    assert {recording.tape.modules[number] for number in recording.tape.module if number >= 0} <= set(called)


def test_a_second_model_called_by_its_constructor_has_its_name_in_front():
    with mx.virtual("T4"), mx.record() as recording:
        nn.Sequential(nn.Linear(2, 2))(torch.zeros(1, 2))
        Probed()(torch.zeros(1, 2))
    layers = ["Probed", "Probed.body", "Probed.body.0", "Probed.body.1", "Probed.head"]
    assert [name for name in recording.tape.modules if name.startswith("Probed")] == layers


class Features(nn.Module):
    """A model that needs the size of its features, which it computes before or after they are its own."""

    def __init__(self, is_own):
        super().__init__()
        features = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        if is_own:
            self.features = features
        width = features(features(torch.zeros(1, 2))).shape[1]
        self.features, self.fc = features, nn.Linear(width, 1)

    def forward(self, x):
        return self.fc(self.features(x))


class Policy(nn.Module):
    """A model that builds others, which call their layers before it has them."""

    def __init__(self):
        super().__init__()
        self.body = Features(is_own=True)
        self.bodies = nn.ModuleList([Features(is_own=True), Features(is_own=False)])

    def forward(self, x):
        return self.body(x) + self.bodies[0](x) + self.bodies[1](x)


def test_layers_called_by_the_constructor_of_a_part_have_their_names_in_the_whole():
    with mx.virtual("T4"), mx.record() as recording:
        Policy().cuda()(torch.zeros(1, 2, device="cuda")).sum().backward()
    called = {
        f"{part}{layer}"
        for part in ("body", "bodies.0", "bodies.1")
        for layer in ("", ".features", ".features.0", ".features.1", ".fc")
    }
    assert set(recording.tape.modules) == called | {"Policy", "bodies"}


def test_a_part_called_by_its_constructor_has_its_name_if_it_stays_alone():
    with mx.virtual("T4"), mx.record() as recording:
        Features(is_own=False)(torch.zeros(1, 2))
    assert set(recording.tape.modules) == {"Features", "features", "features.0", "features.1", "fc"}


class Cyclic(nn.Module):
    """An activation that refers to itself through its part, and takes an argument in `parameters`."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()
        self.inner.owner = self

    def parameters(self, kind):
        return []

    def forward(self, x):
        return x.relu()


def test_shared_modules_of_any_kind_are_named():
    activation = Cyclic()
    names = Names()
    names.root(nn.Sequential(Block(activation), Block(activation)))
    called = [names.table[names.number(activation, names.intern(name))] for name in ("0", "1")]
    assert called == ["0.activation", "1.activation"]


def test_an_activation_that_models_share_has_the_name_of_the_one_that_calls_it():
    activation = nn.GELU()
    names = Names()
    first, second = nn.Sequential(Block(activation)), nn.Sequential(Block(activation))
    names.root(first)
    names.root(second)
    called = [names.table[names.number(activation, names.number(model[0], -1))] for model in (first, second)]
    assert called == ["0.activation", "Sequential#2.0.activation"]


def test_a_part_of_a_model_that_is_called_has_the_names_of_the_model():
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    names = Names()
    names.root(model)
    part = model[:2]
    names.root(part)
    assert names.table[names.number(part[1], names.number(part, -1))] == "1"


def test_a_wrapper_around_a_model_that_was_called_does_not_change_its_names():
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    names = Names()
    names.root(model)
    names.root(nn.Sequential(model))
    assert names.table[names.number(model[1], names.number(model, -1))] == "1"


def test_a_layer_that_is_called_before_its_model_has_modules_is_a_model_of_its_own():
    class Late(nn.Module):
        def __init__(self):
            start = nn.Linear(2, 2)(torch.zeros(1, 2))
            super().__init__()
            self.start = start

    with mx.virtual("T4"), mx.record() as recording:
        Late()
    assert recording.tape.modules == ("Linear",)


class Block(nn.Module):
    """A layer with an activation that all layers share."""

    def __init__(self, activation):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.activation = activation

    def forward(self, x):
        return self.activation(self.linear(x))


def shared():
    activation = nn.Sequential(nn.Sigmoid())
    return nn.Sequential(*(Block(activation) for _ in range(3))).cuda()


def test_an_activation_that_layers_share_has_its_name_in_the_layer_that_calls_it():
    with mx.virtual("T4"), mx.record() as recording:
        model = shared()
        model(torch.zeros(8, 64, device="cuda")).sum().backward()
    tape = recording.tape
    # Each sigmoid keeps 8 * 64 * 4 bytes, as each linear layer does for the sigmoid only while that runs.
    kept = {
        tape.modules[module]: size
        for module, size, category in zip(tape.module, tape.size, tape.category, strict=True)
        if category == Category.ACTIVATION and module >= 0 and "activation" in tape.modules[module]
    }
    assert kept == {f"{layer}.activation.0": 8 * 64 * 4 for layer in range(3)}


def test_one_activation_used_twice_by_one_layer_has_its_first_name():
    activation = nn.ReLU()
    names = Names()
    model = nn.Sequential(nn.Linear(1, 1), activation, nn.Linear(1, 1), activation)
    names.root(model)
    assert names.table[names.number(activation, names.number(model, -1))] == "1"
    assert names.table == ["Sequential", "0", "1", "2"]
