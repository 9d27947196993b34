"""The verdict in words: headline, detail and places of runs that end in different ways."""

from __future__ import annotations

import pytest

from memexplore.analysis.curves import peak
from memexplore.analysis.places import Place
from memexplore.analysis.verdict_content import Level, about, verdict_content
from memexplore.hardware import catalogue
from memexplore.tape import Action, Category, Ending, Frame, Meta, Os, Phase, Source, Tape
from memexplore.text.units import size_text
from tests.sample_tapes import GIB, MIB, T4, Program, leaking_tape, oom_tape, small_tape

ENDED = T4._replace(ending=Ending.COMPLETED, notes=(), capacity=14 * GIB)
ALLOC, OOM = (Action.ALLOC, MIB), (Action.OOM, 16 * GIB)


def tape_of(*rows: tuple[Action, int], meta: Meta = ENDED) -> Tape:
    """Return a tape of (action, size) rows; every block has an address of its own."""
    actions, sizes = zip(*rows, strict=True) if rows else ((), ())
    addresses = [-1 if action == Action.OOM else number * GIB for number, action in enumerate(actions)]
    return Tape.from_columns(
        {"action": actions, "address": addresses, "size": sizes, "step": [1] * len(rows)}, meta=meta
    )


def of_categories(sizes: dict[Category, int], meta: Meta = ENDED) -> Tape:
    """Return a tape that holds some bytes of each category, on a GPU of this size."""
    program = Program()
    meta = meta._replace(capacity=sum(sizes.values()))
    for kind, size in sizes.items():
        program.alloc(size, kind)
    return program.tape(meta)


# -- runs that fit


def test_run_that_fits_has_need_capacity_and_rest() -> None:
    program = Program()
    program.alloc(6 * GIB, Category.ACTIVATION, "convolution", "layer1", 3)
    program.alloc(2 * GIB, Category.PARAMETER, "empty", "layer1", 3)
    program.rows.insert(0, (Action.SEGMENT_ALLOC, 0, 9 * GIB, Category.UNKNOWN, Phase.OTHER, 0, -1, -1, -1))
    found = verdict_content(program.tape(T4._replace(capacity=12 * GIB)))
    # 9 GiB were reserved, and 6 + 2 = 8 suffice: 4 of 12 are left. 6 / 8 = 75 % of the allocated bytes are activations.
    assert (found.level, found.headline) == (Level.FITS, "Fits: needs 8.00 GiB · T4 has 12.0 GiB · 4.00 GiB to spare")
    assert found.detail == (
        "Peak 8.00 GiB allocated in layer1 · 75 % activations, 25 % parameters: try checkpointing or mixed precision · "
        "9.00 GiB reserved where there is room · predicted, torch 2.13"
    )
    assert (found.used, found.needed, found.capacity, found.device) == (9 * GIB, 8 * GIB, 12 * GIB, "T4")


@pytest.mark.parametrize(
    ("capacity", "level", "rest"),
    [
        # 5 % of 100 MiB are 5 MiB
        (100 * MIB, Level.TIGHT, "4.00 MiB to spare"),
        (102 * MIB, Level.FITS, "6.00 MiB to spare"),
        (96 * MIB, Level.TIGHT, "nothing to spare"),
    ],
)
def test_run_with_less_than_a_twentieth_left_fits_tightly(capacity: int, level: Level, rest: str) -> None:
    found = verdict_content(tape_of((Action.ALLOC, 96 * MIB), meta=ENDED._replace(capacity=capacity)))
    assert found.level is level
    assert found.headline.endswith(rest)
    assert found.headline.startswith("Fits tightly: needs 96.0 MiB" if level is Level.TIGHT else "Fits: needs 96.0 MiB")


def test_tape_of_a_cpu_has_its_peak_and_nothing_to_fit() -> None:
    # 400 of 750 bytes are parameters, 200 activations
    found = verdict_content(small_tape())
    assert (found.level, found.capacity) == (Level.NONE, None)
    assert found.text.splitlines() == [
        "Peak 750 B allocated in step 1, forward of Net",
        "On the CPU · 53 % parameters, 27 % activations: try weights in 16 bits · measured, torch 2.13",
    ]


def test_gpu_that_is_given_by_its_size_is_called_the_gpu() -> None:
    meta = ENDED._replace(gpu="24.0 GiB", device="GPU with 24.0 GiB", capacity=24 * GIB)
    assert verdict_content(tape_of(ALLOC, meta=meta)).headline.startswith("Fits: needs 2.00 MiB · the GPU has 24.0 GiB")


def test_caught_errors_are_in_the_detail() -> None:
    found = verdict_content(tape_of(OOM, OOM, ALLOC))
    assert found.level is Level.FITS
    assert "The program went on after 2 out-of-memory errors: step 1, a request requested 16.0 GiB; " in found.detail


def pressed(capacity: int, meta: Meta = ENDED) -> Tape:
    """Return a tape that frees 12 MiB before it requests 20: the 12 are cached, and given back where 32 do not fit."""
    program = Program()
    program.free(program.alloc(12 * MIB, Category.ACTIVATION))
    program.alloc(20 * MIB, Category.ACTIVATION)
    return program.tape(meta._replace(capacity=capacity))


def test_run_that_needs_less_than_it_reserves_with_room_has_both() -> None:
    found = verdict_content(pressed(100 * MIB))
    assert (found.level, found.headline) == (Level.FITS, "Fits: needs 20.0 MiB · T4 has 100 MiB · 80.0 MiB to spare")
    assert " · 32.0 MiB reserved where there is room · predicted" in found.detail


def test_run_under_pressure_is_tight_and_says_how_often_the_cache_is_given_back() -> None:
    # 32 MiB do not fit 30, and 20 do.
    found = verdict_content(pressed(30 * MIB))
    assert (found.level, found.headline) == (
        Level.TIGHT,
        "Fits tightly: needs 20.0 MiB · T4 has 30.0 MiB · 10.0 MiB to spare",
    )
    assert (
        " · 32.0 MiB reserved where there is room; here the allocator gives its cache back 1 time, which takes time · "
        in found.detail
    )


def test_a_snapshot_needs_what_it_reserved() -> None:
    # It has a part of a run only.
    tape = pressed(100 * MIB, ENDED._replace(source=Source.IMPORTED))
    assert verdict_content(tape).headline.startswith(f"Fits: needs {size_text(peak(tape, 'reserved')[0])} · ")


def with_workspace(capacity: int, *, fits: bool) -> Tape:
    """Return a run that needs 100 MiB, 20 of them as a workspace whose size is an estimate."""
    program = Program()
    program.alloc(80 * MIB, Category.PARAMETER)
    # Not optional, as that of a convolution is.
    program.alloc(20 * MIB, Category.WORKSPACE, "cudnn_rnn")
    tape = program.tape(ENDED._replace(capacity=capacity))
    if fits:
        return tape
    program.rows[-1] = (Action.OOM, -1, *program.rows[-1][2:])
    return program.tape(ENDED._replace(capacity=capacity, ending=Ending.OUT_OF_MEMORY)).replace(whole=tape)


def test_within_the_error_of_an_estimate_a_run_may_not_fit() -> None:
    # 8 % of 100 MiB are 8 MiB: 4 are left of 104.
    found = verdict_content(with_workspace(104 * MIB, fits=True))
    assert (found.level, found.headline) == (
        Level.TIGHT,
        "May not fit: needs 92.0 MiB to 108 MiB, as workspaces of cuDNN are estimates · T4 has 104 MiB",
    )
    assert verdict_content(with_workspace(120 * MIB, fits=True)).headline.startswith("Fits: needs 100 MiB · ")


def test_within_the_error_of_an_estimate_a_run_that_does_not_fit_may_fit() -> None:
    assert (
        "it may fit, as workspaces of cuDNN are estimates: needs 92.0 MiB or more"
        in verdict_content(with_workspace(96 * MIB, fits=False)).detail
    )
    assert "may fit" not in verdict_content(with_workspace(90 * MIB, fits=False)).detail


def test_run_that_fits_with_expandable_segments_says_so() -> None:
    # One of five blocks of 4 MiB stays in a segment of 20: 24 more make 44, and 40 where segments grow by 20.
    program = Program()
    blocks = [program.alloc(4 * MIB, Category.ACTIVATION) for _ in range(5)]
    program.free(*blocks[1:])
    program.alloc(24 * MIB, Category.ACTIVATION)
    whole = program.tape(ENDED)
    program.rows[-1] = (Action.OOM, -1, *program.rows[-1][2:])
    failed = program.tape(ENDED._replace(capacity=42 * MIB, ending=Ending.OUT_OF_MEMORY)).replace(whole=whole)
    found = verdict_content(failed)
    assert found.headline == "Needs 44.0 MiB · T4 has 42.0 MiB · 2.00 MiB over"
    assert " · with expandable_segments:True it fits and needs 40.0 MiB · " in found.detail


# -- categories and levers


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({Category.ACTIVATION: 19, Category.PARAMETER: 1}, "95 % activations, 5 % parameters: try checkpointing"),
        ({Category.OPTIMIZER_STATE: 2, Category.PARAMETER: 1}, "67 % optimizer state, 33 % parameters: try an optim"),
        ({Category.GRADIENT: 3, Category.INPUT: 1}, "75 % gradients, 25 % inputs: try an update in the backward pass"),
        ({Category.TEMPORARY: 1}, "100 % temporaries: try a smaller batch or micro-batches"),
        # nothing lowers these
        ({Category.WORKSPACE: 3, Category.ACTIVATION: 1}, "75 % workspaces, 25 % activations · predicted"),
        ({Category.UNKNOWN: 1}, "100 % of unknown kind · predicted"),
    ],
)
def test_two_largest_categories_and_what_lowers_the_first(sizes: dict[Category, int], text: str) -> None:
    assert text in verdict_content(of_categories({kind: size * 20 * MIB for kind, size in sizes.items()})).detail


def test_run_with_half_of_the_gpu_to_spare_has_no_lever() -> None:
    # 1 GiB of 4
    program = Program()
    program.alloc(GIB, Category.ACTIVATION)
    assert "100 % activations · predicted" in verdict_content(program.tape(ENDED)).detail


def test_category_of_less_than_half_a_per_cent_is_not_named() -> None:
    detail = verdict_content(of_categories({Category.PARAMETER: 300 * MIB, Category.INPUT: MIB})).detail
    assert "100 % parameters: try weights in 16 bits" in detail  # 1 / 301 = 0.3 %


# -- out of memory


def test_out_of_memory_has_the_bytes_of_the_whole_run() -> None:
    # The whole run needs 3 + 2.5 GiB: 1.5 more than 4.
    whole = of_categories({Category.ACTIVATION: 3 * GIB, Category.PARAMETER: 5 * GIB // 2})
    found = verdict_content(oom_tape().replace(whole=whole))
    assert (found.level, found.headline) == (Level.OOM, "Needs 5.50 GiB · T4 has 4.00 GiB · 1.50 GiB over")
    assert found.detail == (
        "Peak 5.50 GiB allocated · 55 % activations, 45 % parameters: try checkpointing or mixed precision · "
        "stops in step 1, forward of layer2.conv (convolution, 2.00 GiB) · predicted, torch 2.13"
    )
    assert (found.used, found.needed) == (3 * GIB, 5 * GIB + GIB // 2)


def test_out_of_memory_without_a_whole_run_needs_more_than_it_held_and_requested() -> None:
    # 3 GiB were held when 2 more were requested
    found = verdict_content(oom_tape())
    assert found.headline == "Needs more than 5.00 GiB · T4 has 4.00 GiB · 1.00 GiB over"
    assert found.needed == 5 * GIB


def test_a_run_that_failed_itself_leaves_what_to_change_to_its_post_mortem() -> None:
    # 2 of 3 GiB are activations
    assert verdict_content(oom_tape()).detail.startswith("67 % activations, 33 % parameters · stops in step 1")


def test_categories_are_those_of_the_whole_run() -> None:
    whole = of_categories({Category.OPTIMIZER_STATE: 6 * GIB, Category.PARAMETER: 2 * GIB})
    found = verdict_content(oom_tape().replace(whole=whole))
    assert found.headline == "Needs 8.00 GiB · T4 has 4.00 GiB · 4.00 GiB over"
    # 6 + 2 = 8 GiB
    assert found.detail.startswith("Peak 8.00 GiB allocated · 75 % optimizer state, 25 % parameters: try an optimizer")


def test_measured_stop_says_that_the_need_is_predicted() -> None:
    tape = oom_tape()
    measured = tape.replace(meta=tape.meta._replace(source=Source.MEASURED), whole=tape)
    assert verdict_content(measured).detail.endswith("the need is predicted, the stop measured, torch 2.13")
    assert verdict_content(tape.replace(whole=tape)).detail.endswith(" · predicted, torch 2.13")


def test_out_of_memory_is_at_the_users_own_line_first() -> None:
    assert verdict_content(oom_tape()).where == (
        Place("train.py, line 7", "", "train.py:7"),
        Place(
            "torch/nn/modules/conv.py, line 548",
            verdict_content(oom_tape()).where[1].code,
            "/env/site-packages/torch/nn/modules/conv.py:548",
        ),
    )


def test_request_that_finds_no_gap_says_what_is_free() -> None:
    program = Program()
    held = [program.alloc(GIB, Category.ACTIVATION, "mm", "fc", 6) for _ in range(4)]
    program.free(held[0], held[2])
    program.oom(2 * GIB, "mm", "fc", 7)
    program.rows.insert(0, (Action.SEGMENT_ALLOC, 0, 4 * GIB + 4096, Category.UNKNOWN, Phase.OTHER, 0, -1, -1, -1))
    found = verdict_content(program.tape(ENDED._replace(capacity=4 * GIB + 4096, ending=Ending.OUT_OF_MEMORY)))
    # 2 of 4 GiB are held; the other 2 are two gaps of 1 GiB and the rounding
    assert found.headline == "Does not fit T4: 2.00 GiB of 4.00 GiB free, but no piece for 2.00 GiB"
    assert " · free were 2.00 GiB in gaps inside segments · " in found.detail


def test_windows_puts_what_is_over_into_system_memory() -> None:
    tape = oom_tape()
    windows = tape.replace(meta=tape.meta._replace(os=Os.WINDOWS))
    # The whole run needs 3 + 2.5 GiB of 4.
    whole = of_categories({Category.ACTIVATION: 3 * GIB, Category.PARAMETER: 5 * GIB // 2})
    found = verdict_content(windows.replace(whole=whole))
    assert (found.level, found.headline) == (Level.OOM, "Needs 5.50 GiB · T4 has 4.00 GiB · 1.50 GiB over")
    assert (
        " · on Windows 1.50 GiB would be in system memory, which is slow, without an OutOfMemoryError (the driver's "
        "sysmem fallback), first in step 1, forward of layer2.conv (convolution, 2.00 GiB) · "
    ) in found.detail
    assert "stops" not in found.detail
    # 3 GiB were held when 2 more were requested.
    assert " · on Windows more than 1.00 GiB would be in system memory" in verdict_content(windows).detail


@pytest.mark.parametrize("changes", [{"source": Source.MEASURED}, {"capacity_without_limit": 8 * GIB}])
def test_an_error_that_was_measured_or_is_of_a_limit_ends_a_run_on_windows_too(changes: dict[str, object]) -> None:
    tape = oom_tape()
    meta = tape.meta._replace(os=Os.WINDOWS, **changes)
    assert " · stops in step 1, forward of layer2.conv" in verdict_content(tape.replace(meta=meta)).detail


def test_program_that_gives_up_after_the_error_says_so() -> None:
    found = verdict_content(tape_of(ALLOC, OOM))
    assert found.level is Level.OOM
    assert "the program caught the error and allocated nothing afterwards" in found.detail


# -- growth


def test_leak_is_the_headline_and_has_its_line() -> None:
    # 400 MiB and 1000 bytes are used after step 4; 13936 MiB of 14 GiB are left, for 140 steps: 144, with two digits
    found = verdict_content(leaking_tape(4, leaked=100 * MIB, meta=ENDED))
    assert (found.level, found.headline) == (
        Level.GROWING,
        "Fits now, but grows 100 MiB a step: full at about step 140",
    )
    assert found.where[0].text == "train.py, line 9"
    assert found.grows == found.where[0]
    assert found.detail.startswith("Activation memory allocated at train.py, line 9 is kept from step to step")


def test_leak_on_a_cpu_is_never_full() -> None:
    assert verdict_content(leaking_tape(4)).headline == "Grows 100 B a step"


def test_leak_that_ends_out_of_memory_replaces_the_lever() -> None:
    program = Program()
    for step in range(1, 7):
        program.mark(step, Phase.FORWARD)
        program.alloc(GIB, Category.ACTIVATION, "sum", "", 9)
    program.oom(GIB, "mm", "fc", 6)
    found = verdict_content(program.tape(ENDED._replace(capacity=6 * GIB, ending=Ending.OUT_OF_MEMORY)))
    assert (found.level, found.headline) == (Level.OOM, "Out of memory: grows 1.00 GiB a step · T4 has 6.00 GiB")
    # 6 GiB were held when 1 more was requested.
    assert (
        "100 % activations · needs more than 7.00 GiB · stops in step 6, forward of fc (mm, 1.00 GiB)" in found.detail
    )
    assert [place.text for place in found.where][::2] == ["train.py, line 6", "train.py, line 9"]
    assert found.grows == found.where[-1]


def test_run_without_growth_names_no_growing_line() -> None:
    assert verdict_content(small_tape()).grows is None


@pytest.mark.parametrize(("number", "rounded"), [(7, 7), (96, 96), (134, 130), (896, 900), (12_345, 12_000)])
def test_step_in_the_future_has_two_digits(number: int, rounded: int) -> None:
    assert about(number) == rounded


# -- programs that ended early, or beside the GPU


@pytest.mark.parametrize("ending", [Ending.ERROR, Ending.INTERRUPTED])
def test_run_that_ended_early_never_fits(ending: Ending) -> None:
    found = verdict_content(tape_of(ALLOC, meta=ENDED._replace(ending=ending, error="ValueError: no (train.py:3)")))
    assert found.level is Level.ERROR
    assert "fits" not in found.text.lower()
    assert found.headline.endswith(": ValueError: no (train.py:3)")
    assert found.detail.startswith("Peak so far 1.00 MiB allocated in step 1 · T4 has 14.0 GiB")
    assert found.where == (Place("train.py, line 3", "", "train.py:3"),)


def test_error_in_a_cell_has_its_name() -> None:
    meta = ENDED._replace(ending=Ending.ERROR, error="ValueError: no (<ipython-input-3-0a1b2c>:7)")
    found = verdict_content(tape_of(ALLOC, meta=meta))
    assert found.headline == "Ended by an error: ValueError: no (Cell In[3], line 7)"
    assert found.where[0].text == "Cell In[3], line 7"


def test_assumptions_explain_an_error() -> None:
    meta = ENDED._replace(
        ending=Ending.ERROR, error="E", notes=("assumed: a value counted as 1 (x.py:2)", "an estimate")
    )
    found = verdict_content(tape_of(ALLOC, meta=meta))
    assert "assumed before the error: a value counted as 1 (x.py:2) · predicted" in found.detail


def test_program_without_tensors_on_the_gpu_is_advised() -> None:
    found = verdict_content(tape_of())
    assert found.level is Level.NONE
    assert found.headline == "Nothing ran on the Tesla T4: the code put no tensor on it"
    assert found.detail.startswith('Put the model and its batches on "cuda" · predicted')


def test_training_on_the_cpu_is_named_and_advised() -> None:
    meta = ENDED._replace(trained_on_cpu=("Net", "Critic"), advice="Write it")
    found = verdict_content(tape_of(ALLOC, meta=meta))
    assert found.headline == (
        "Nothing trained on the Tesla T4: Net and 1 more trained on the CPU; peak of the rest 1.00 MiB allocated"
    )
    assert found.detail.startswith("Write it · predicted")


def test_empty_tape_has_a_verdict() -> None:
    assert verdict_content(tape_of(meta=Meta(Source.IMPORTED, "cuda:0"))).text.splitlines() == [
        "Peak 0 B allocated",
        "On cuda:0 · imported",
    ]


def test_frame_without_source_has_only_its_name() -> None:
    tape = Tape.from_columns(
        {"action": [Action.OOM], "address": [-1], "size": [20 * GIB], "stack": [0]},
        stacks=[(Frame("train.py", 7, "step"),)],
        meta=ENDED._replace(ending=Ending.OUT_OF_MEMORY),
    )
    assert verdict_content(tape).where == (Place("train.py, line 7", "", "train.py:7"),)


def test_what_may_lie_outside_the_allocator_counts() -> None:
    # Under torch 2.11 an A100 of 40 GB has 504 MiB outside the allocator, and 519 in some programs (outside_allocator).
    gpu = catalogue.find("A100 40GB")
    versions = {"torch": "2.11"}
    under = gpu.under(versions)
    assert under.outside < under.outside_range[1]
    meta = Meta(Source.PREDICTED, gpu.name, gpu.key, under.capacity, gpu.total, versions=versions)
    whole_pages = under.capacity // (2 * MIB) * 2 * MIB

    def headline(size: int) -> str:
        program = Program()
        program.alloc(size, Category.PARAMETER)
        return verdict_content(program.tape(meta._replace(ending=Ending.COMPLETED))).headline

    assert headline(whole_pages).startswith("May not fit: needs ")
    assert headline(whole_pages).endswith("if more lies outside PyTorch's allocator")
    room = under.outside_range[1] - under.outside + 2 * MIB
    assert headline(whole_pages - room).startswith("Fits tightly: ")
    # A limit on the process leaves it less, and no more.
    limited_to = whole_pages - 2 * MIB
    meta = meta._replace(capacity=limited_to, limit=limited_to, capacity_without_limit=under.capacity)
    assert headline(limited_to).startswith("May not fit: needs ")
