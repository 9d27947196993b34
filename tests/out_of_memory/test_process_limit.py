"""Post-mortems of a process that may not use all of the GPU, and of a GPU that other processes use."""

from __future__ import annotations

import pytest

from memexplore.analysis.verdict_content import verdict_content
from memexplore.out_of_memory.cause import Cause
from memexplore.out_of_memory.evidence_types import Evidence
from memexplore.out_of_memory.message import parse
from memexplore.out_of_memory.value import PostMortem, of_tape
from memexplore.out_of_memory.what_fits import gpu_of
from memexplore.tape import Action, Meta, Source, Tape
from memexplore.tape.process_limit import limited
from tests.out_of_memory.cells import post_mortem

MIB = 1 << 20

# 40 blocks of 10 MiB, then a request of `size` MiB.
FILLING = """
torch.cuda.set_per_process_memory_fraction({fraction})
kept = [torch.empty(10 << 20, dtype=torch.uint8, device="cuda") for _ in range(40)]
large = torch.empty({size} << 20, dtype=torch.uint8, device="cuda")
print(len(kept))
"""


def test_a_limit_that_the_cell_sets_is_the_capacity_and_is_named() -> None:
    found = post_mortem(FILLING.format(fraction=0.5, size=200), "1000MiB")
    meta = found.tape.meta
    assert (meta.capacity, meta.capacity_without_limit, meta.total) == (500 * MIB, 1000 * MIB, 1000 * MIB)
    assert (found.cause, found.missing, found.memory.free, found.memory.usable) == (
        Cause.TOO_MUCH,
        100 * MIB,
        600 * MIB,
        100 * MIB,
    )
    limit = "this process may use 500 MiB of 0.98 GiB: torch.cuda.set_per_process_memory_fraction"
    assert found.sentences[1].endswith(f"; {limit}.")
    assert found.sentences[2].endswith("at least 100 MiB are missing; without the limit the request fits (replayed).")
    assert found.suggestions[0].code == "torch.cuda.set_per_process_memory_fraction(1.0)"
    assert "the GPU had 500 MiB more" in found.suggestions[0].text
    verdict = verdict_content(found.tape)
    assert verdict.headline == "Needs more than 600 MiB · this process may use 500 MiB · 100 MiB over"
    assert "torch.cuda.set_per_process_memory_fraction sets this limit: the GPU has 0.98 GiB" in verdict.detail


def test_no_higher_limit_is_suggested_where_the_gpu_has_too_little() -> None:
    found = post_mortem(FILLING.format(fraction=0.5, size=700), "1000MiB")
    assert not found.fits_without_limit
    assert "limit" not in " ".join(each.text for each in found.suggestions)


UPDATING = """
torch.cuda.set_per_process_memory_fraction({fraction})
model = nn.Sequential(*(nn.Linear(1024, 2560, bias=False) for _ in range(4))).cuda()
optimizer = torch.optim.Adam(model.parameters())
for weight in model.parameters():
    weight.grad = torch.zeros_like(weight)
optimizer.step()
"""


@pytest.mark.parametrize(("gpu", "fits"), [("200MiB", True), ("120MiB", False)])
def test_a_higher_limit_is_suggested_where_the_rest_of_the_state_fits_too(gpu: str, fits: bool) -> None:
    # 40 MiB of weights, 40 of gradients, 20 of 80 of states
    found = post_mortem(UPDATING.format(fraction=100 / int(gpu.removesuffix("MiB"))), gpu)
    assert (found.fits_without_limit, found.suggestions[0].fits) == (fits, fits)


def test_a_limit_above_what_the_gpu_has_free_is_none() -> None:
    found = post_mortem(FILLING.format(fraction=1.0, size=700), "1000MiB")
    assert (found.tape.meta.capacity, found.tape.meta.capacity_without_limit) == (1000 * MIB, None)
    assert "may use" not in found.text


def test_what_the_allocator_settings_limit_is_named_by_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "per_process_memory_fraction:0.5")
    source = FILLING.replace("torch.cuda.set_per_process_memory_fraction({fraction})", "")
    found = post_mortem(source.format(size=200), "1000MiB")
    assert found.tape.meta.capacity == 500 * MIB
    assert "may use 500 MiB of 0.98 GiB: per_process_memory_fraction of PYTORCH_CUDA_ALLOC_CONF" in found.sentences[1]
    assert found.suggestions[0].code == ""
    # The search sets the settings again, so its GPU is the whole one.
    assert gpu_of(found.tape.meta) == f"{1000 * MIB}B"


def test_the_search_is_on_a_gpu_of_the_size_of_the_limit() -> None:
    meta = post_mortem(FILLING.format(fraction=0.5, size=200), "1000MiB").tape.meta
    assert gpu_of(meta) == f"{500 * MIB}B"


# --- other processes ------------------------------------------------------------------------------------------------


def _beside(processes: dict[int, int], limit: int | None) -> PostMortem:
    """A request of 400 MiB on a GPU of 1 000 MiB, of which other processes have some."""
    others = sum(processes.values())
    meta = limited(Meta(Source.MEASURED, "GPU", capacity=(1000 - others) * MIB, total=1000 * MIB), limit)
    tape = Tape.from_columns({"action": [Action.OOM], "address": [-1], "size": [400 * MIB]}, meta=meta)
    text = " ".join(f"Process {number} has {size}.00 MiB memory in use." for number, size in processes.items())
    found = of_tape(tape, Evidence(parse(f"Tried to allocate 400.00 MiB. {text}")))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("limit", "cause"),
    [
        (None, Cause.ANOTHER_PROCESS),
        (900 * MIB, Cause.ANOTHER_PROCESS),
        # More than the 300 that are free, and less than the request.
        (350 * MIB, Cause.TOO_MUCH),
        (200 * MIB, Cause.TOO_MUCH),
    ],
)
def test_another_process_is_the_cause_only_where_this_one_may_use_its_memory(limit: int | None, cause: Cause) -> None:
    assert _beside({7: 700}, limit).cause is cause


def test_of_many_processes_the_number_the_total_and_the_largest_are_named() -> None:
    found = _beside({number: 60 + number for number in range(1, 11)}, None)  # 10 x 60 + 55 MiB
    assert found.sentences[2] == (
        "The cause is another process: 10 processes, the largest of which are 10 (70.0 MiB), 9 (69.0 MiB), 8 (68.0 "
        "MiB), hold about 655 MiB of 0.98 GiB, and with that memory the request fits (replayed; what follows is not "
        "known)."
    )
    assert found.suggestions[0].text.startswith(
        "End some of the 10 other processes, the largest of which are 10 (70.0 MiB), 9 (69.0 MiB), 8 (68.0 MiB), on"
    )


def test_a_few_processes_are_all_named() -> None:
    found = _beside({7: 500, 9: 300}, None)
    assert "process 7, process 9 hold about" in found.sentences[2]
