import functools
import itertools

import pytest
import torch
from torch import nn

from memexplore import devices
from memexplore.whatif import Knobs, Step, code, run
from memexplore.whatif.searching.advise import Advice, advise
from memexplore.whatif.searching.measured import fits, measure

GIB = 1024**3


def block(width):
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def step(batch=4096) -> Step:
    """Six blocks of width 256: 13 MiB of weights, and activations that grow with the batch."""
    return Step(nn.Sequential(*(block(256) for _ in range(6))), torch.zeros(batch, 256), loss=torch.mean)


@functools.cache
def need() -> int:
    return measure(step(), gpu="80GiB")[1].peak_reserved


@functools.cache
def tight() -> Advice:
    """On a GPU with three quarters of what the step needs."""
    return advise(step(), f"{need() * 3 // 4}B", budget=100, progress=None)


@functools.cache
def roomy() -> Advice:
    return advise(step(), "T4", budget=30, progress=None)


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


def test_the_largest_batch_fits_and_the_next_does_not():
    found = tight().largest
    assert Knobs() in found
    for knobs, largest in list(found.items())[:3]:
        unit = knobs.accumulation or 1
        at = [knobs.replace(batch=largest.samples + more) for more in (0, unit)]
        assert [fits(run(step(), setting, gpu=tight().gpu).tape) for setting in at] == [True, False]
    assert f"A batch of {found[Knobs()].samples} would fit." in repr(tight())


def test_options_tell_their_largest_batch():
    told = [option for option in tight().options if option.largest is not None]
    assert told
    assert all(option.largest == tight().largest[option.knobs] for option in told)


def test_a_smaller_batch_is_an_option_that_alters():
    # So little that no single knob is enough.
    advice = advise(step(), f"{need() * 2 // 5}B", budget=100, progress=None)
    smaller = [option for option in advice.options if option.knobs.batch]
    assert smaller
    assert all(option.knobs.batch < 4096 and option.alters for option in smaller)


def test_a_larger_gpu_is_the_last_option_and_the_smallest_that_fits():
    last = tight().options[-1]
    larger = [name for name in devices.gpus().index if devices.find(name).capacity > need() * 3 // 4]
    assert last.knobs == Knobs(gpu=larger[0])
    assert last.measured.fits


def test_what_trains_the_same_is_told_first_and_the_quickest_of_it_first():
    here = [option for option in tight().options if option.knobs.gpu is None]
    order = [(option.alters, option.slow_down) for option in here]
    assert order == sorted(order)


def test_no_option_is_beaten_by_another_in_everything():
    here = [option for option in tight().options if option.knobs.gpu is None]
    worth = [
        (
            one.slow_down, one.measured.peak_reserved, len(one.knobs.changed()), one.alters,
            "precision" in one.knobs.changed(), -one.measured.samples,
        )
        for one in here
    ]  # fmt: skip
    for mine in worth:
        assert not any(its != mine and all(a <= b for a, b in zip(its, mine, strict=True)) for its in worth)


def test_every_option_has_its_lines_of_code():
    assert all(option.code == code.lines(step(), option.knobs) for option in tight().options)


def test_the_frontier_is_rising_in_time_and_falling_in_memory():
    best = tight().frontier
    assert len(best) > 1
    assert all(
        one.seconds / one.samples <= other.seconds / other.samples and one.peak_reserved > other.peak_reserved
        for one, other in itertools.pairwise(best)
    )


def test_the_same_question_has_the_same_answer():
    again = advise(step(), f"{need() * 3 // 4}B", budget=100, progress=None)
    assert repr(again) == repr(tight())


def test_the_budget_bounds_the_runs():
    seen = []
    advise(step(), f"{need() * 3 // 4}B", budget=7, progress=seen.append)
    assert seen[-1].done == 7


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

    told = [one.measured.seconds for one in tight().options if exact(one.knobs)]
    fitting = [one.seconds for one in tight().tried if one.fits and exact(one.knobs)]
    # One knob more has to make it 1 % quicker to be told.
    assert min(told) <= min(fitting) * 1.01


# -- a step that fits nowhere


def test_where_nothing_fits_it_says_what_is_nearest():
    # One weight of 256 MiB on a GPU of 200: no knob makes it smaller, but bf16, whose gradient has no room then.
    large = Step(lambda: nn.Linear(8192, 8192, bias=False), torch.zeros(2, 8192), loss=torch.mean)
    advice = advise(large, "200MiB", budget=40, progress=None)
    here = [option for option in advice.options if option.knobs.gpu is None]
    assert not here
    assert "Nothing that was tried fits" in repr(advice)
    assert advice.nearest.peak_reserved == min(measured.peak_reserved for measured in advice.tried)


# -- the rest


def test_the_table_has_a_row_an_option():
    table = tight().to_pandas()
    assert list(table.index) == [str(option.knobs) for option in tight().options]
    assert (table["margin"] >= 0).all()
    assert table["peak_reserved"].tolist() == [option.measured.peak_reserved for option in tight().options]


def test_batch_norm_makes_micro_batches_another_training():
    normed = nn.Sequential(nn.Linear(256, 4096), nn.BatchNorm1d(4096), nn.GELU(), nn.Linear(4096, 1))
    many = Step(normed, torch.zeros(4096, 256), loss=torch.mean)
    whole = measure(many, gpu="80GiB")[1].peak_reserved
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


def test_the_model_is_as_it_was():
    asked = step(64)
    before = {name: (id(weight), weight.clone()) for name, weight in asked.model.named_parameters()}
    advise(asked, "T4", budget=8, progress=None)
    for name, weight in asked.model.named_parameters():
        assert id(weight) == before[name][0]
        assert torch.equal(weight, before[name][1])
        assert weight.grad is None
