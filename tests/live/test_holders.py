"""Who holds tensors: variables, attributes and containers on the way are named; the search ends in time."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from memexplore.live import holders as module
from memexplore.live.holders import holders

KEPT: dict[str, torch.Tensor] = {}


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line)


class Trainer:
    def __init__(self) -> None:
        self.history: list[torch.Tensor] = []

    def keep(self, tensor: torch.Tensor) -> None:
        self.history.append(tensor)


def found(tensor: torch.Tensor) -> list[str]:
    storages = [tensor.untyped_storage()]
    del tensor
    return holders([storages], seconds=60)


@pytest.mark.usefixtures("unfrozen_objects")
def test_a_global_variable_is_named_with_the_line_that_stores_in_it():
    KEPT["last"] = torch.ones(1000)
    storages = [KEPT["last"].untyped_storage()]
    assert holders([storages], 60) == [f'{__file__}:{line_of("= torch.ones(1000)")}: KEPT["last"] = torch.ones(1000)']


def test_a_list_of_an_object_is_named_by_its_attribute():
    trainer = Trainer()
    trainer.keep(torch.ones(1001))
    storages = [trainer.history[0].untyped_storage()]
    assert holders([storages], 60) == [f"{__file__}:{line_of('self.history.append')}: self.history.append(tensor)"]


def test_a_holder_that_is_older_than_the_search_is_named():
    """The search calls a function with the tensor, whose tuple of arguments is younger: it is no holder."""
    trainer = Trainer()
    trainer.keep(torch.ones(1003))
    gc.collect()
    storages = [trainer.history[0].untyped_storage()]
    assert holders([storages], 60) == [f"{__file__}:{line_of('self.history.append')}: self.history.append(tensor)"]


def test_a_local_variable_without_a_line_that_stores_is_named():
    alone = torch.ones(1002)
    storages = [alone.untyped_storage()]
    assert holders([storages], 60) == [f"alone in {__file__}"]


def test_a_storage_without_a_tensor_has_no_holder_in_python():
    assert holders([[torch.UntypedStorage(8)]], 60) == []


def test_a_search_without_time_says_so():
    trainer = Trainer()
    trainer.keep(torch.ones(8))
    storages = [trainer.history[0].untyped_storage()]
    began = time.thread_time()
    assert holders([storages], seconds=0.0) == ["something that was not found: not searched further after 0 s"]
    assert time.thread_time() - began < 5


class Walks:
    """Counts walks over all objects, each of which takes some seconds more on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.count, self.seconds, self.now = 0, seconds, 0.0
        self.real = gc.get_referrers
        monkeypatch.setattr(module.time, "thread_time", lambda: self.now)
        monkeypatch.setattr(module.gc, "get_referrers", self.walk)

    def walk(self, *values: Any) -> list[Any]:
        self.count += 1
        self.now += self.seconds
        # Without the arguments of this function.
        return [
            each
            for each in self.real(*values)
            if not (type(each) is tuple and list(map(id, each)) == list(map(id, values)))
        ]


def test_no_walk_is_begun_that_would_end_too_late(monkeypatch):
    trainer = Trainer()
    trainer.keep(torch.ones(1005))
    box = {"trainer": [trainer]}
    storages = [trainer.history[0].untyped_storage()]
    del trainer
    # One walk finds the tensor. tensor < history < trainer < list < box: four more find the local variable. The first
    # of them is expected to take half as long again as the walk before it.
    walks = Walks(monkeypatch, 2.0)
    assert holders([storages], 10.0) == [f"{__file__}:{line_of('self.history.append')}: self.history.append(tensor)"]
    assert (walks.count, walks.now) == (5, 10.0)
    # With 9 s the fourth walk ends after 8 s, and a fifth one would end after 10 s.
    walks = Walks(monkeypatch, 2.0)
    assert holders([storages], 9.0) == ["something that was not found: not searched further after 9 s"]
    assert (walks.count, walks.now) == (4, 8.0)
    # With 4 s the first walk ends after 2 s, and a second one might take 3 s.
    walks = Walks(monkeypatch, 2.0)
    assert holders([storages], 4.0) == ["something that was not found: not searched further after 4 s"]
    assert (walks.count, walks.now) == (1, 2.0)
    assert box


def test_one_walk_follows_the_tensors_of_all_groups(monkeypatch):
    trainers = [Trainer() for _ in range(2)]
    for trainer in trainers:
        for _ in range(3):
            trainer.keep(torch.ones(1006))
    groups = [[tensor.untyped_storage() for tensor in trainer.history] for trainer in trainers]
    del trainer
    walks = Walks(monkeypatch, 1.0)
    assert holders(groups, 60.0) == [f"{__file__}:{line_of('self.history.append')}: self.history.append(tensor)"]
    assert walks.count == 4  # 6 tensors < 2 histories < 2 trainers < the list `trainers`


def test_a_tensor_of_a_subclass_is_found():
    class Named(torch.Tensor):
        pass

    own = torch.ones(1007).as_subclass(Named)
    assert holders([[own.untyped_storage()]], 60) == [f"own in {__file__}"]


def test_the_first_group_with_a_tensor_counts():
    first, second = torch.ones(1003), torch.ones(1004)
    groups = [[torch.UntypedStorage(8)], [first.untyped_storage()], [second.untyped_storage()]]
    assert holders(groups, 60) == [f"first in {__file__}"]
