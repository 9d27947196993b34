"""Memory that no variable of the program reaches: reference cycles, and global variables of libraries."""

from __future__ import annotations

import gc
import sys
import time
import types

import pytest

from memexplore.out_of_memory.cause import Cause
from memexplore.out_of_memory.held_types import WhyHeld
from memexplore.out_of_memory.owners import owners
from tests.out_of_memory.cells import post_mortem

MIB = 1 << 20

TRAINER = """
class Trainer:
    def __init__(self):
        self.model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)]).cuda()
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)

    def rate(self, step):
        return 1.0

    def fit(self):
        self.model(torch.zeros(8, 1024, device="cuda")).sum().backward()
        self.optimizer.step()
"""


@pytest.fixture
def without_collector():
    """A garbage collector that is off: when it runs by itself depends on everything that the process did before."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
def test_models_of_earlier_rounds_in_reference_cycles_are_named() -> None:
    found = post_mortem(f"{TRAINER}\nfor fold in range(9):\n    Trainer().fit()\n", "300MiB")
    assert found.cause is Cause.HELD, found.text
    first = found.held[0]
    # A fold has 4 x 4 MiB of weights, the same of gradients, and twice of Adam's state.
    folds = first.size // (4 * 16 * MIB)
    assert (first.what, first.size) == (WhyHeld.CYCLE, folds * 4 * 16 * MIB)
    assert folds >= 3
    assert "in objects that only refer to each other (Trainer)" in found.sentences[-1]
    assert found.suggestions[0].code == "import gc; gc.collect()"
    assert found.suggestions[0].fits


@pytest.mark.usefixtures("without_collector")
def test_following_the_suggestion_lets_the_program_run_to_its_end() -> None:
    source = f"{TRAINER}\nfor fold in range(9):\n    Trainer().fit()\n    import gc; gc.collect()\n"
    with pytest.raises(AssertionError):
        post_mortem(source, "300MiB")


def test_a_global_variable_of_a_library_is_named(monkeypatch) -> None:
    library = types.ModuleType("some_library")
    exec("_cache = {}\ndef keep(key, value):\n    _cache[key] = value\n", vars(library))
    monkeypatch.setitem(sys.modules, "some_library", library)
    found = post_mortem(
        """
import some_library
layer = nn.Linear(1024, 1024).cuda()
with torch.no_grad():
    some_library.keep("first", [torch.zeros(16, 1024, 1024, device="cuda") for _ in range(4)])
    del some_library
    torch.zeros(64, 1024, 1024, device="cuda")
""",
        "450MiB",
    )
    assert found.cause is Cause.HELD, found.text
    assert (found.held[0].what, found.held[0].holder, found.held[0].size) == (
        WhyHeld.LIBRARY,
        "some_library._cache",
        4 * 64 * MIB,
    )
    assert "`some_library._cache`" in found.suggestions[0].text


@pytest.mark.usefixtures("without_collector")
def test_a_cycle_and_a_global_variable_are_told_apart(monkeypatch) -> None:
    library = types.ModuleType("some_library")
    exec("_cache = {}\ndef keep(key, value):\n    _cache[key] = value\n", vars(library))
    monkeypatch.setitem(sys.modules, "some_library", library)
    found = post_mortem(
        f"""{TRAINER}
import some_library
some_library.keep("first", [torch.zeros(4, 1024, 1024, device="cuda") for _ in range(4)])
del some_library
Trainer().fit()
torch.zeros(64, 1024, 1024, device="cuda")
""",
        "300MiB",
    )
    # A trainer has 4 x 4 MiB of weights, the same of gradients, and twice of Adam's state.
    by_reason = {group.what: group for group in found.held}
    assert by_reason[WhyHeld.LIBRARY].size == by_reason[WhyHeld.CYCLE].size == 4 * 16 * MIB


def test_a_search_that_takes_too_long_names_nobody(without_collector) -> None:
    found = post_mortem(f"{TRAINER}\nfor fold in range(9):\n    Trainer().fit()\n", "300MiB")
    assert found.complete
    assert owners((), time.thread_time() - 1) == ([], False)


FALLBACK = """
def scores():
    made = torch.zeros(64, 1024, 1024, device="cuda")
    return made, torch.zeros(64, 1024, 1024, device="cuda")

def in_parts():
    return torch.zeros(48, 1024, 1024, device="cuda")

failed = False
try:
    scores()
except torch.OutOfMemoryError:
    {inside}
if failed:
    in_parts()
"""


def test_frames_of_the_error_that_is_being_handled_are_named() -> None:
    found = post_mortem(FALLBACK.format(inside="in_parts()"), "400MiB")
    assert found.cause is Cause.HELD, found.text
    (group,) = found.held
    assert (group.what, group.holder, group.size) == (WhyHeld.HANDLED_ERROR, "torch.OutOfMemoryError", 256 * MIB)
    assert "after the `except` block" in found.suggestions[0].text
    with pytest.raises(AssertionError, match="the cell fits"):
        post_mortem(FALLBACK.format(inside="failed = True"), "400MiB")


@pytest.mark.parametrize(
    "raised",
    [
        'raise torch.OutOfMemoryError("Take a smaller batch.")',
        'raise torch.OutOfMemoryError("Take a smaller batch.") from None',
        'raise torch.OutOfMemoryError(f"{error} Take a smaller batch.")',
    ],
)
def test_an_error_that_the_program_makes_of_another_is_no_second_attempt(raised: str) -> None:
    source = FALLBACK.replace("OutOfMemoryError:", "OutOfMemoryError as error:").format(inside=raised)
    found = post_mortem(source, "400MiB")
    assert found.request is not None
    # The request of `scores`, which nothing but its first tensor keeps from succeeding.
    assert (found.request.size, found.held) == (256 * MIB, ())
    assert found.cause is Cause.TOO_MUCH, found.text
    assert not any("except" in each.text for each in found.suggestions)


REPORTED = """
history = []

def attempt(number):
    try:
        history.append(torch.zeros(16, 1024, 1024, device="cuda"))
        torch.ones(8 * number, 1024, 1024, device="cuda")
    except torch.OutOfMemoryError as error:
        raise RuntimeError("the attempt failed") from error

def attempts():
    for number in range(100):
        attempt(number)

try:
    attempts()
except RuntimeError as error:
    raise torch.OutOfMemoryError("Take a smaller batch.") from error
"""


def test_variables_of_the_callers_of_the_function_that_has_caught_an_error_are_holders() -> None:
    found = post_mortem(REPORTED, "400MiB")
    assert "history" in [holder.name for holder in found.holders], found.text


def test_frames_of_an_error_that_the_program_keeps_are_named() -> None:
    found = post_mortem(
        """
errors = []
def attempt(size):
    first = torch.zeros(size, 1024, 1024, device="cuda")
    return torch.cat([first] * 3)
for size in (64, 64, 32):
    try:
        attempt(size)
    except RuntimeError as error:
        errors.append(error)
torch.zeros(64, 1024, 1024, device="cuda")
""",
        "600MiB",
    )
    # 64 x 4 MiB of the first attempt and of the second; the third, of 32 x 4 MiB, has no room for its first tensor.
    group = found.held[0]
    assert (found.cause, group.what, group.holder, group.size) == (
        Cause.HELD,
        WhyHeld.KEPT_ERROR,
        "errors",
        2 * 256 * MIB,
    ), found.text
    assert "Keep the text of the error in `errors`" in found.suggestions[0].text


@pytest.mark.usefixtures("without_collector")
def test_a_function_whose_output_is_an_attribute_of_its_ctx_is_to_save_it_for_backward() -> None:
    found = post_mortem(
        """
class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.x, ctx.y = x, x * torch.sigmoid(x)
        return ctx.y
    @staticmethod
    def backward(ctx, gradient):
        sigmoid = torch.sigmoid(ctx.x)
        return gradient * (ctx.y + sigmoid * (1 - ctx.y))

layer = nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
for _ in range(40):
    optimizer.zero_grad()
    Swish.apply(layer(torch.randn(2048, 1024, device="cuda"))).sum().backward()
    optimizer.step()
""",
        "200MiB",
    )
    assert (found.cause, found.held[0].what) == (Cause.HELD, WhyHeld.CYCLE), found.text
    assert "save_for_backward" in found.suggestions[0].text
    assert found.suggestions[0].fits
