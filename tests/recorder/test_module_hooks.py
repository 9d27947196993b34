"""Names of modules: each module has one number, also where a later one has the address of a dead one."""

from __future__ import annotations

from torch import nn

from memexplore.recorder.module_hooks import Names


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
