"""Post-mortems of programs with objects whose classes raise."""

from __future__ import annotations

import pytest

from memexplore.out_of_memory import evidence
from memexplore.out_of_memory.value import PostMortem
from tests.out_of_memory.cells import post_mortem

PROXIES = """
class Proxy:
    @property
    def __class__(self):
        raise RuntimeError("working outside of a request")

    def __getattr__(self, name):
        raise RuntimeError("working outside of a request")

class Settings:
    def __init__(self):
        self.proxy, self.kept = Proxy(), []

request, settings = Proxy(), Settings()

def train(local=Proxy()):
    while True:
        settings.kept.append(torch.empty(1 << 24, dtype=torch.uint8, device="cuda"))
        settings.proxy
        request

train()
"""


def test_objects_that_raise_hide_no_holder() -> None:
    found = post_mortem(PROXIES, "256MiB")
    assert (found.search_error, found.complete) == ("", True)
    # 256 MiB hold 16 tensors of 16 MiB.
    (holder,) = [each for each in found.holders if each.name == "settings.kept"]
    assert (holder.size, holder.tensors) == (256 << 20, 16)


def broken(monkeypatch: pytest.MonkeyPatch, name: str) -> PostMortem:
    """Return the post-mortem of a program while a part of the search raises."""

    def raises(*arguments: object) -> None:
        raise ValueError("an object\nof the user")

    monkeypatch.setattr(evidence, name, raises)
    return post_mortem(PROXIES, "256MiB")


def test_an_error_in_one_part_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    found = broken(monkeypatch, "untrained")
    assert (found.search_error, found.complete) == ("ValueError: an object", False)
    assert "settings.kept" in [each.name for each in found.holders]
    sentence = "he search for holders could not read all objects: ValueError: an object"
    assert sentence in found.text
    assert sentence in found._repr_html_()
    assert found.as_dict()["search_error"] == "ValueError: an object"


def test_an_error_of_the_whole_search_is_not_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    found = broken(monkeypatch, "_needed")
    assert (found.search_error, found.holders) == ("ValueError: an object", ())
    assert "after its time" not in found.text


UNTOLD = """
class Untold(Exception):
    def __str__(self):
        raise Untold()

class Odd:
    @property
    def __dict__(self):
        raise Untold()

odd = Odd()
kept = [torch.empty(1 << 24, dtype=torch.uint8, device="cuda") for _ in range(17)]
"""


def test_an_error_without_a_text_is_named_by_its_class() -> None:
    found = post_mortem(UNTOLD, "256MiB")
    assert found.search_error == "Untold"
    assert found.request is not None
    assert found.request.size == 1 << 24
