"""Expected tapes: what extrapolation from two batches gives, and where there is nothing to extrapolate from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from memexplore.allocator.actions import SEGMENT_ACTIONS
from memexplore.analysis.curves import peak
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import machine_of
from memexplore.run.programs.out_of_memory import fits
from memexplore.run.programs.step import Step
from memexplore.run.run import Run, expected, run
from memexplore.tape import COLUMNS, Action, Category, Phase, Tape
from tests.programs.test_trace_reuse import step_of
from tests.workspaces import estimate_workspaces_of_relu, possible_workspaces

pytest.importorskip("transformers")
GPU = "A100-80GB"


def linear_step() -> Step:
    # Sums of 1024 numbers a sample take no scratch memory, whatever their number.
    return Step(
        nn.Linear(1024, 1024),
        torch.zeros(64, 1024),
        compute_loss=lambda model, batch: model(batch).sum(1)[0],
        optimizer=torch.optim.SGD,
    )


def after_runs(*settings: Knobs, step: Step | None = None) -> Step:
    step = step or linear_step()
    for knobs in settings:
        run(step, knobs, machine_of(GPU))
    return step


def expected_tape(step: Step, knobs: Knobs, gpu: str = GPU) -> Tape:
    picture = expected(step, knobs, machine_of(gpu))
    assert picture is not None
    assert picture.is_expected
    return picture.tape


def test_a_size_grows_by_the_bytes_of_a_sample():
    step = after_runs(Knobs(batch=256), Knobs(batch=512))
    tape = expected_tape(step, Knobs(batch=2048))
    (row, *_) = np.flatnonzero((tape.action == Action.ALLOC) & (tape.category == Category.INPUT))
    # 2048 samples of 1024 numbers of 4 bytes
    assert int(tape.size[row]) == 2048 * 1024 * 4
    assert tape.tensor_texts[tape.tensor[row]] == "float32[2048, 1024]"


def test_the_batch_as_written_is_one_of_the_two():
    step = after_runs(Knobs(), Knobs(batch=128))
    assert expected_tape(step, Knobs(batch=32)).equals(run(step, Knobs(batch=32), machine_of(GPU)).tape)


def of_family(name: str, knobs: Knobs) -> tuple[Tape, Tape]:
    """Return the expected tape of four times the batch as written, and that of its run."""
    step = step_of(name)
    twice, thrice, wanted = (knobs.replace(batch=count * step.batch_size) for count in (2, 3, 4))
    after_runs(twice, thrice, step=step)
    return expected_tape(step, wanted), run(step, wanted, machine_of(GPU)).tape


@pytest.mark.parametrize("knobs", [Knobs(), Knobs(precision="bf16"), Knobs(checkpoint="every 1")], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama", "lstm", "mixtral", "t5"])
def test_the_tape_is_that_of_the_run(name: str, knobs: Knobs):
    tape, result = of_family(name, knobs)
    assert tape.equals(result)
    assert tape.meta == result.meta


@pytest.mark.parametrize("knobs", [Knobs(), Knobs(precision="bf16"), Knobs(checkpoint="every 1")], ids=str)
@pytest.mark.parametrize("name", ["resnet", "unet"])
def test_of_convolutions_only_the_workspaces_are_not_those_of_the_run(name: str, knobs: Knobs):
    # cuDNN takes other algorithms for other batches; which other sizes a workspace may have is not extrapolated.
    tape, result = of_family(name, knobs)
    assert tape.workspaces == ()
    assert _without_workspace_sizes(tape).equals(_without_workspace_sizes(result.without_workspaces()))


def _without_workspace_sizes(tape: Tape) -> Tape:
    """Return the requests with workspaces of one byte, and without addresses."""
    tape = tape[~np.isin(tape.action, SEGMENT_ACTIONS)]
    size = np.where(tape.category == Category.WORKSPACE, 1, tape.size)
    return tape.replace(size=size, address=np.full_like(tape.address, -1))


@pytest.mark.parametrize("name", ["mixer", "graph"])
def test_where_requests_change_with_the_batch_the_peak_is_close(name: str):
    # A reduction of the mixer takes scratch memory from three batches on; edges of a graph do not grow with its nodes.
    tape, result = of_family(name, Knobs())
    assert not tape.equals(result)
    # 33.1 for 33.4 MB, 28.6 for 28.6
    assert peak(tape)[0] == pytest.approx(peak(result)[0], rel=0.02)


def test_a_setting_that_does_not_fit_has_the_picture_of_its_run():
    step = after_runs(Knobs(batch=256), Knobs(batch=512))
    # inputs and outputs of 2**23 samples take 32 GiB each, and so does the gradient of the outputs
    wanted = Knobs(batch=1 << 23)
    tape = expected_tape(step, wanted)
    result = run(step, wanted, machine_of(GPU)).tape
    # up to the failed request, without what Python frees after it
    assert (not fits(tape), tape.size.tolist()) == (True, result.size[: len(tape)].tolist())
    assert tape.whole is not None
    assert result.whole is not None
    # to the byte, not to the row: on the way requests take another path
    assert peak(tape.whole)[0] == peak(result.whole)[0]


def test_an_expected_tape_has_no_possible_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    estimate_workspaces_of_relu(monkeypatch)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    step = after_runs(Knobs(), Knobs(batch=16), step=Step(model, torch.zeros(8, 64), loss=torch.mean))
    tape, result = expected_tape(step, Knobs(batch=32)), run(step, Knobs(batch=32), machine_of(GPU)).tape
    assert len(possible_workspaces(result)) == 2
    assert tape.workspaces == ()
    assert tape.equals(result.without_workspaces())


def test_one_batch_says_nothing_about_another():
    assert expected(after_runs(Knobs()), Knobs(batch=128), machine_of(GPU)) is None


def test_batches_with_another_setting_say_nothing():
    step = after_runs(Knobs(), Knobs(batch=128), Knobs(precision="bf16"))
    assert expected(step, Knobs(batch=256, precision="bf16"), machine_of(GPU)) is None


def test_a_setting_that_was_run_needs_none():
    step = after_runs(Knobs(), Knobs(batch=128))
    assert expected(step, Knobs(batch=128), machine_of(GPU)) is None
    assert expected(step, Knobs(batch=64), machine_of(GPU)) is None


def test_a_batch_that_takes_another_path_says_nothing():
    class Threshold(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.relu() if len(x) > 100 else x
            return x * 2

    step = Step(nn.Sequential(nn.Linear(8, 8), Threshold()), torch.zeros(64, 8), loss=torch.mean, optimizer="sgd")
    assert expected(after_runs(Knobs(), Knobs(batch=128), step=step), Knobs(batch=256), machine_of(GPU)) is None


def test_no_size_is_negative():
    class Shrinking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.new_zeros(1 << 20 >> len(x)).sum() + x

    step = Step(nn.Sequential(nn.Linear(8, 8), Shrinking()), torch.zeros(2, 8), loss=torch.mean, optimizer="sgd")
    # the zeros of 2, 3 and 4 samples are 2**18, 2**17 and 0 by extrapolation, of 5 samples less
    assert expected(after_runs(Knobs(), Knobs(batch=3), step=step), Knobs(batch=5), machine_of(GPU)) is None


def test_a_real_device_has_none():
    assert expected(after_runs(Knobs(), Knobs(batch=128)), Knobs(batch=256), machine_of("cpu")) is None


def test_a_second_step_with_other_requests_has_none():
    # DistributedDataParallel makes its buckets anew after the first backward.
    step = after_runs(Knobs(gpus=2), Knobs(gpus=2, batch=128))
    assert expected(step, Knobs(gpus=2, batch=256), machine_of(GPU)) is None


def test_scratch_that_a_sum_takes_from_some_batch_on_is_as_in_the_nearest_run():
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    step = Step(model, torch.zeros(64, 3, 32, 32), loss=torch.mean, optimizer=torch.optim.SGD)
    counts = []
    for batch in (64, 128):
        tape = run(step, Knobs(batch=batch), machine_of("T4")).tape
        counts.append(int((tape.action == Action.ALLOC).sum()))
    # The gradient of the bias is a sum over 64 or 128 images of 1024 pixels: the larger one is made in parts.
    assert counts[0] < counts[1]
    assert peak(expected_tape(step, Knobs(batch=256), "T4")) == peak(run(step, Knobs(batch=256), machine_of("T4")).tape)


# --- a setting that does not fit


def wide(batch: int = 64) -> Step:
    layers = (nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)) for _ in range(3))
    return Step(nn.Sequential(*layers), torch.zeros(batch, 256), loss=torch.mean)


@pytest.mark.parametrize("gpu", ["30MiB", "60MiB", "100MiB", "8GiB"])
@pytest.mark.parametrize("knobs", [Knobs(batch=96), Knobs(batch=4096), Knobs(batch=2048, accumulation=4)])
def test_it_has_the_tape_of_its_run_up_to_the_failed_request(knobs: Knobs, gpu: str):
    step = wide()
    # From one batch a setting that fits is not expected.
    run(step, knobs.replace(batch=64), machine_of("8GiB"))
    picture, result = expected(step, knobs, machine_of(gpu)), run(wide(), knobs, machine_of(gpu))
    # There is also none where a workspace does not fit: only a run says how the library goes on.
    assert picture is None or not result.fits
    if picture is not None:
        assert_same_until_failure(picture, result)


def test_a_setting_whose_activations_do_not_fit_has_one():
    step = wide()
    run(step, machine=machine_of("8GiB", release="2.13"))
    # 3 * 2 MiB of weights, 4 MiB of input, then a workspace of 8.125 MiB and activations of 16 MiB each.
    assert expected(step, Knobs(batch=4096), machine_of("60MiB", release="2.13")) is not None


def assert_same_until_failure(picture: Run, result: Run) -> None:
    tape, end = picture.tape, len(picture.tape)
    assert (not picture.fits, tape.action[-1]) == (True, Action.OOM)
    # Its cost is not known yet.
    numbers = picture.outcome._replace(
        flops=result.outcome.flops,
        seconds=result.outcome.seconds,
        sent=result.outcome.sent,
        compute_seconds=result.outcome.compute_seconds,
        link_seconds=result.outcome.link_seconds,
    )
    assert numbers == result.outcome
    # Which blocks are state of the optimizer shows when the update has ended.
    settled = tape.phase != Phase.OPTIMIZER
    assert np.array_equal(tape.category[settled], result.tape.category[:end][settled])
    for name in set(COLUMNS) - {"time", "category", "op", "module", "stack", "tensor", "workspace"}:
        assert np.array_equal(getattr(tape, name), getattr(result.tape, name)[:end]), name
    for name, texts in (("op", "ops"), ("module", "modules"), ("stack", "stacks"), ("tensor", "tensor_texts")):
        assert texts_of(tape, name, texts) == texts_of(result.tape[:end], name, texts), name
    assert tape.whole is not None
    assert result.tape.whole is not None
    assert tape.whole.equals(result.tape.whole.without_workspaces())


def texts_of(tape: Tape, numbers: str, texts: str) -> list[str | None]:
    return [getattr(tape, texts)[number] if number >= 0 else None for number in getattr(tape, numbers).tolist()]


def test_where_a_workspace_is_refused_only_a_run_says_what_follows():
    def images() -> Step:
        layers = (nn.Conv2d(160, 160, 3, padding=1) for _ in range(3))
        return Step(nn.Sequential(*layers), torch.zeros(2, 160, 48, 48), loss=torch.mean)

    step = images()
    run(step, machine=machine_of("8GiB"))
    # A convolution goes on without its workspace, so that some of these sizes are enough.
    machines = [machine_of(f"{mebibytes}MiB") for mebibytes in range(40, 120, 8)]
    assert {run(images(), Knobs(batch=8), machine).fits for machine in machines} == {False, True}
    assert [expected(step, Knobs(batch=8), machine) for machine in machines] == [None] * len(machines)


def test_a_setting_of_a_step_that_was_never_run_has_none():
    assert expected(wide(), Knobs(batch=4096), machine_of("30MiB")) is None
