"""Post-mortems of programs with objects whose classes raise."""

from __future__ import annotations

import pytest

from memexplore.out_of_memory import evidence
from memexplore.out_of_memory.value import PostMortem, of_tape
from tests.out_of_memory.cells import post_mortem, run

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


UNREAD = ValueError("an object\nof the user")


def broken(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception = UNREAD) -> PostMortem:
    """Return the post-mortem of a program while a part of the search raises."""

    def raises(*arguments: object) -> None:
        raise error

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


class Untold(Exception):
    def __str__(self) -> str:
        raise Untold


def test_an_error_without_a_text_is_named_by_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    found = broken(monkeypatch, "_needed", Untold())
    assert found.search_error == "Untold"
    assert found.request is not None
    assert found.request.size == 1 << 24


PROGRAM = """
{unreadable}

class Trainer:
    def __init__(self):
        self.history = []

def train(trainer):
    model = nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        output = model(torch.randn(4096, 1024, device="cuda"))
        output.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        trainer.history.append(output.detach())

train(Trainer())
"""
UNREADABLE = {
    "a tensor whose functions raise": """
class Odd(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        ran.append(function)
        raise RuntimeError("no function")

    @property
    def grad(self):
        ran.append("grad")
        raise RuntimeError("no gradient")

odd = torch.zeros(8, device="cuda").as_subclass(Odd)
""",
    "a module whose constructor has raised": """
class Odd(nn.Module):
    def __init__(self, refuse):
        self.late, odd["module"] = 1, self
        if refuse:
            raise ValueError("refused")
        super().__init__()

odd = {}
try:
    Odd(True)
except ValueError:
    pass
module = odd["module"]
""",
    "a module that computes its parts": """
class Odd(nn.Module):
    @property
    def weight(self):
        ran.append("weight")
        raise RuntimeError("no weight")

    def __getattr__(self, name):
        ran.append(name)
        raise RuntimeError("no attribute")

    def parameters(self, recurse=True):
        ran.append("parameters")
        raise RuntimeError("no parameters")

    named_parameters = named_children = named_modules = parameters

odd = Odd()
""",
    "slots of a class that computes what is missing": """
class Odd:
    __slots__ = ("missing", "kept")

    def __getattr__(self, name):
        ran.append(name)
        raise RuntimeError("no attribute")

odd = Odd()
odd.kept = torch.zeros(8, device="cuda")
""",
    "an optimizer that is not initialized": """
class Odd(torch.optim.Optimizer):
    def __init__(self):
        pass

    def __getattr__(self, name):
        ran.append(name)
        raise RuntimeError("no attribute")

odd = Odd()
""",
    "an object that computes its attributes": """
class Odd:
    @property
    def __dict__(self):
        ran.append("__dict__")
        raise RuntimeError("no attributes")

odd = Odd()
""",
    "containers that compute their items": """
class OddList(list):
    def __iter__(self):
        ran.append("list")
        raise RuntimeError("no elements")

    __len__ = __getitem__ = __iter__

class OddDict(dict):
    def items(self):
        ran.append("dict")
        raise RuntimeError("no items")

    __iter__ = __len__ = keys = values = items

class OddKey(str):
    def __repr__(self):
        ran.append("key")
        raise RuntimeError("no text")

odd = OddList([OddDict(), {OddKey("a"): 1}])
""",
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_an_object_that_cannot_be_read_changes_no_answer_and_runs_no_code(name: str) -> None:
    ran: list[object] = []

    def answer(unreadable: str) -> PostMortem:
        tape, evidence = run(PROGRAM.format(unreadable=unreadable), "256MiB", {"ran": ran})
        found = of_tape(tape, evidence)
        assert found is not None
        return found

    found, usual = answer(UNREADABLE[name]), answer("")
    assert (found.search_error, found.complete, ran) == ("", True, [])
    # The first sentence has the line.
    assert found.sentences[1:] == usual.sentences[1:]
    assert (found.cause, found.suggestions) == (usual.cause, usual.suggestions)
    assert "trainer.history" in [group.holder for group in found.held]
