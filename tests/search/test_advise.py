import functools
import itertools
import math

import pytest
import torch
from torch import nn

from memexplore import gpu_catalogue
from memexplore.codegen import lines
from memexplore.knobs.knobs import Knobs
from memexplore.search.advice import setting_text
from memexplore.search.advise import Advice, advise
from memexplore.steps.out_of_memory import fits
from memexplore.steps.outcome import run_outcome
from memexplore.steps.step import Step
from memexplore.steps.trial import run
from memexplore.units import size_text

GIB = 1024**3


def block(width):
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def step(batch=4096) -> Step:
    """Six blocks of width 256: 13 MiB of weights, and activations that grow with the batch."""
    return Step(nn.Sequential(*(block(256) for _ in range(6))), torch.zeros(batch, 256), loss=torch.mean)


@functools.cache
def need() -> int:
    return run_outcome(step(), gpu="80GiB")[1].peak_reserved


@functools.cache
def tight() -> Advice:
    """On a GPU with three quarters of what the step needs."""
    return advise(step(), f"{need() * 3 // 4}B", progress=None)


@functools.cache
def roomy() -> Advice:
    return advise(step(), "T4", budget=30, progress=None)


@functools.cache
def nowhere() -> Advice:
    """One weight of 64 GiB, with its gradient and two states 256 GiB: more than the largest GPU has."""
    wide = Step(lambda: nn.Linear(1 << 17, 1 << 17, bias=False), torch.zeros(2, 1 << 17), loss=torch.mean)
    return advise(wide, "T4", budget=30, progress=None)


# -- a step that does not fit


def test_it_says_by_how_much_the_step_does_not_fit():
    assert not tight().fits
    # three quarters are there, a quarter is missing
    assert -tight().as_written.margin == need() - need() * 3 // 4
    assert repr(tight()).startswith("It does not fit as written")


def test_every_option_fits_when_it_is_run_again():
    for option in tight().options:
        trial = run(step(), option.knobs, gpu=option.knobs.gpu or tight().gpu)
        assert fits(trial.tape)


def test_the_largest_batch_of_every_option_fits_and_the_next_does_not():
    assert tight().options
    for option in tight().options:
        assert option.largest.proven
        unit = option.knobs.accumulation or 1
        at = [option.knobs.replace(batch=option.largest.samples + more) for more in (0, unit)]
        assert [fits(run(step(), setting, gpu=tight().gpu).tape) for setting in at] == [True, False]


def test_the_largest_batch_as_written_is_told_where_the_step_does_not_fit():
    found = tight().largest[Knobs()]
    assert 0 < found.samples < 4096
    assert f"A batch of {found.samples} would fit." in repr(tight())


def test_the_largest_batch_is_found_whatever_the_budget():
    advice = advise(step(), f"{need() * 3 // 4}B", budget=1, progress=None)
    # As written alone was run: what fits is a smaller batch, and a larger GPU.
    assert [tuple(option.knobs.changed()) for option in advice.options] == [("batch",), ("gpu",)]
    assert all(option.largest.proven for option in advice.options)


def test_a_smaller_batch_is_an_option_that_alters():
    advice = advise(step(), f"{need() * 2 // 5}B", budget=1, progress=None)
    smaller = [option for option in advice.options if option.knobs.batch]
    assert smaller
    for option in smaller:
        assert option.knobs.batch < 4096
        assert option.alters
        # It is the largest itself.
        assert option.largest.samples == option.knobs.batch
        assert "the largest that fits (another training)" in repr(advice)


def test_a_larger_gpu_is_the_last_option_and_the_smallest_that_fits():
    last = tight().options[-1]
    larger = [name for name in gpu_catalogue.gpus().index if gpu_catalogue.find(name).capacity > need() * 3 // 4]
    assert last.knobs == Knobs(gpu=larger[0])
    assert last.outcome.fits


def test_nobody_says_how_much_quicker_a_gpu_is_than_one_of_which_only_the_size_is_known():
    assert math.isnan(tight().options[-1].slow_down)
    assert "times the time" not in str(tight().options[-1])


def test_what_trains_the_same_is_told_first_and_the_quickest_of_it_first():
    here = [option for option in tight().options if option.knobs.gpu is None]
    order = [(option.alters, option.slow_down) for option in here]
    assert order == sorted(order)


def test_no_option_is_beaten_by_another_in_everything():
    def beats(one, other):
        return one is not other and (
            one.slow_down <= other.slow_down
            and one.outcome.peak_reserved <= other.outcome.peak_reserved
            and len(one.knobs.changed()) <= len(other.knobs.changed())
            and one.altered <= other.altered
            and ("precision" in one.knobs.changed()) <= ("precision" in other.knobs.changed())
            and one.outcome.samples >= other.outcome.samples
        )

    here = [option for option in tight().options if option.knobs.gpu is None]
    assert not any(beats(one, other) for one in here for other in here)


def test_every_option_has_its_lines_of_code():
    assert all(option.code == lines.lines(step(), option.knobs) for option in tight().options)


def test_the_frontier_is_rising_in_time_and_falling_in_memory():
    best = tight().frontier
    assert len(best) > 1
    assert all(
        one.seconds / one.samples <= other.seconds / other.samples and one.peak_reserved > other.peak_reserved
        for one, other in itertools.pairwise(best)
    )


def test_the_same_question_has_the_same_answer():
    again = advise(step(), f"{need() * 3 // 4}B", progress=None)
    assert repr(again) == repr(tight())


def test_the_budget_bounds_the_settings():
    advice = advise(step(), f"{need() * 3 // 4}B", budget=7, progress=None)
    settings = {outcome.knobs for outcome in advice.tried if outcome.knobs.batch is None} | set(advice.errors)
    assert len(settings) == 7


def test_the_progress_is_at_its_end_at_the_end_only():
    seen = []
    advise(step(), f"{need() * 3 // 4}B", budget=7, progress=seen.append)
    assert all(one.done < one.total for one in seen[:-1])
    assert seen[-1].done == seen[-1].total
    # Every run is told, and the end once more.
    assert [one.done for one in seen] == [*range(1, len(seen)), len(seen) - 1]


# -- other trainings


def test_a_smaller_input_and_frozen_blocks_are_tried_and_alter_the_training():
    blocks = nn.Sequential(*(block(64) for _ in range(4)))
    long = Step(blocks, torch.zeros(64, 256, 64), loss=torch.mean)
    advice = advise(long, f"{run_outcome(long, gpu='80GiB')[1].peak_reserved * 3 // 4}B", progress=None)
    # 3/4 and 1/2 of 256; the first half and the first three quarters of 4 blocks
    asked = {Knobs(input_size=192), Knobs(input_size=128), Knobs(frozen=("0", "1")), Knobs(frozen=("0", "1", "2"))}
    assert asked <= {outcome.knobs for outcome in advice.tried}
    others = [option for option in advice.options if {"input_size", "frozen"} & set(option.knobs.changed())]
    assert others
    assert all(option.alters and f"{option} (another training)" in repr(advice) for option in others)


def test_where_the_same_training_fits_no_two_changes_of_it_are_told_together():
    assert not tight().options[0].alters
    assert all(len(option.altered) <= 1 for option in tight().options)


def test_inference_is_no_advice_for_training():
    assert all("mode" not in outcome.knobs.changed() for outcome in tight().tried)


# -- a step that fits


def test_a_step_that_fits_is_told_first():
    assert roomy().fits
    assert roomy().options[0].knobs == Knobs()
    assert repr(roomy()).startswith("It fits as written")


def test_no_gpu_is_bought_where_the_step_fits():
    assert all(option.knobs.gpu is None for option in roomy().options)


def test_a_precision_does_not_hide_the_settings_that_keep_every_bit():
    def exact(knobs):
        return not {"precision", "batch", "gpu", "optimizer", "lora"} & set(knobs.changed())

    told = [one.outcome.seconds for one in tight().options if exact(one.knobs)]
    fitting = [one.seconds for one in tight().tried if one.fits and exact(one.knobs)]
    # One knob more has to make it 1 % quicker to be told.
    assert min(told) <= min(fitting) * 1.01


# -- a step that fits nowhere


def test_where_nothing_fits_it_says_what_is_nearest_and_by_how_much_it_misses():
    advice = nowhere()
    assert all(option.knobs.gpu is not None for option in advice.options)
    assert advice.nearest.peak_reserved == min(outcome.peak_reserved for outcome in advice.tried)
    assert "Nothing that was tried fits with the batch of 2" in repr(advice)
    assert f"{size_text(-advice.nearest.margin)} too much." in repr(advice)


def test_where_no_batch_fits_it_says_what_is_there_without_one():
    # 2**17 * 2**17 * 4 bytes = 64 GiB: the weight, its gradient and AdamW's two states
    assert "Not even a batch of 1 would: weights, gradients and optimizer state alone take 256 GiB." in repr(nowhere())


def test_where_no_gpu_is_large_enough_it_says_so():
    largest = max((gpu_catalogue.find(name) for name in gpu_catalogue.gpus().index), key=lambda gpu: gpu.capacity)
    assert nowhere().too_small.gpu == largest.key
    # AdamW makes a temporary of the weight's size; batch and workspaces are small beside 5 * 64 GiB.
    missing = 320 * GIB - largest.capacity
    assert missing <= -nowhere().too_small.margin < missing * 1.01
    told = f"the largest, the {largest.name}, misses {size_text(-nowhere().too_small.margin)}."
    assert told in repr(nowhere())


def test_names_of_many_layers_are_told_by_the_first_and_the_last():
    knobs = Knobs(lora=["first", "second", "third", "fourth"])
    assert setting_text(knobs) == "lora first … fourth (4 layers)"


# -- the rest


def test_the_table_has_a_row_an_option():
    table = tight().to_pandas()
    assert list(table.index) == [str(option.knobs) for option in tight().options]
    assert (table["margin"] >= 0).all()
    assert table["peak_reserved"].tolist() == [option.outcome.peak_reserved for option in tight().options]


def test_batch_norm_makes_micro_batches_another_training():
    normed = nn.Sequential(nn.Linear(256, 4096), nn.BatchNorm1d(4096), nn.GELU(), nn.Linear(4096, 1))
    many = Step(normed, torch.zeros(4096, 256), loss=torch.mean)
    whole = run_outcome(many, gpu="80GiB")[1].peak_reserved
    advice = advise(many, f"{whole * 3 // 4}B", budget=40, progress=None)
    cut = [option for option in advice.options if option.knobs.accumulation]
    assert cut
    assert all(option.alters for option in cut)


def test_a_step_that_is_broken_raises_its_own_error():
    def loss(output):
        raise RuntimeError("no loss today")

    with pytest.raises(RuntimeError, match="no loss today"):
        advise(Step(nn.Linear(4, 4), torch.zeros(2, 4), loss=loss), progress=None)


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(ValueError, match="budget=0"):
        advise(step(), budget=0)


def test_a_cpu_is_no_gpu_to_fit():
    with pytest.raises(ValueError, match="advice is what fits a GPU: give gpu= the name of one"):
        advise(step(), "cpu", progress=None)


def test_the_model_is_as_it_was():
    asked = step(64)
    before = {name: (id(weight), weight.clone()) for name, weight in asked.model.named_parameters()}
    advise(asked, "T4", budget=8, progress=None)
    for name, weight in asked.model.named_parameters():
        assert id(weight) == before[name][0]
        assert torch.equal(weight, before[name][1])
        assert weight.grad is None
