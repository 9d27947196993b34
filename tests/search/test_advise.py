"""Advice on small steps: which settings it lists, in which order, and how it prints."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

import pytest
import torch
from torch import nn

from memexplore.hardware import catalogue
from memexplore.run import machine
from memexplore.run.code import lines
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import machine_of
from memexplore.run.programs.out_of_memory import fits
from memexplore.run.programs.step import Step
from memexplore.run.run import run
from memexplore.run.search.advice import Advice, Option
from memexplore.run.search.advise import advise
from memexplore.run.search.results_table import bar
from memexplore.run.search.setting_text import setting_text
from memexplore.text.units import size_text
from tests.search.advise_steps import block, need, nowhere, roomy, step, tight

GIB = 1024**3


def test_advice_for_another_batch_is_that_of_a_step_written_with_it():
    gpu = f"{need() * 3 // 4}B"
    found = advise(step(batch=64), gpu, base=Knobs(batch=4096), budget=20, progress=None)
    expected = advise(step(batch=4096), gpu, budget=20, progress=None)
    assert [(one.knobs, one.outcome.needed, one.slow_down, one.largest) for one in found.options] == [
        (one.knobs, one.outcome.needed, one.slow_down, one.largest) for one in expected.options
    ]
    first = expected.sentences[0]
    assert first.startswith("As written it needs ")
    assert found.sentences[0] == first.replace("As written", "With batch 4096")
    # The code of an option sets the batch too: that of the loader is written for 64.
    assert "batch_size=4096" in found.options[0].code
    assert found.text_of(found.options[0]) == str(expected.options[0].knobs.replace(batch=4096))


def test_base_has_no_other_knobs():
    with pytest.raises(ValueError, match="base= may have batch and input_size only, not checkpoint"):
        advise(step(), "T4", base=Knobs(batch=8, checkpoint="sqrt"), progress=None)


def row_of(option: Option, advice: Advice) -> str:
    """Return the printed row of an option."""
    number = advice.options.index(option) + 1
    (row,) = (line for line in str(advice).splitlines() if line.startswith(f"{number}. {setting_text(option.knobs)}  "))
    return row


# -- a step that does not fit


def test_the_missing_bytes_are_those_that_the_gpu_lacks():
    assert not tight().fits
    # The GPU has three quarters of the need, so a quarter is missing.
    assert -tight().as_written.margin == need() - need() * 3 // 4
    assert str(tight()).startswith(f"As written it needs {size_text(need())} · the GPU has ")


def test_every_option_fits_in_a_run_of_its_own():
    for option in tight().options:
        result = run(step(), option.knobs, machine_of(option.knobs.gpu or tight().gpu))
        assert result.fits


def test_the_largest_batch_of_every_option_fits_and_the_next_does_not():
    assert tight().options
    for option in tight().options:
        assert option.largest.proven
        unit = option.knobs.accumulation or 1
        at = [option.knobs.replace(batch=option.largest.samples + more) for more in (0, unit)]
        assert [fits(run(step(), setting, machine_of(tight().gpu)).tape) for setting in at] == [True, False]


def test_the_largest_batch_as_written_is_printed_where_the_step_does_not_fit():
    largest = tight().largest[Knobs()]
    assert 0 < largest.samples < 4096
    assert f"A batch of {largest.samples} would fit." in str(tight())


def test_the_largest_batch_does_not_count_against_the_budget():
    advice = advise(step(), f"{need() * 3 // 4}B", budget=1, progress=None)
    # The budget covers the step as written only: a smaller batch, the cheapest GPU to rent and a larger GPU fit.
    assert [tuple(option.knobs.changed()) for option in advice.options] == [("batch",), ("gpu",), ("gpu",)]
    assert all(option.largest.proven for option in advice.options)


def test_a_smaller_batch_is_an_option_that_changes_the_training():
    advice = advise(step(), f"{need() * 2 // 5}B", budget=1, progress=None)
    smaller = [option for option in advice.options if option.knobs.batch]
    assert smaller
    for option in smaller:
        assert option.knobs.batch < 4096
        assert option.alters
        # The batch of the option is the largest.
        assert option.largest.samples == option.knobs.batch
        assert str(option).endswith("the largest that fits")
        assert row_of(option, advice).split()[-2:] == [str(option.knobs.batch), "changed"]


def test_a_larger_gpu_is_the_last_option_and_the_smallest_that_fits():
    last = tight().options[-1]
    larger = [gpu for gpu in catalogue.offered() if gpu.capacity > need() * 3 // 4]
    assert last.knobs == Knobs(gpu=larger[0].key)
    assert last.outcome.fits


def test_the_time_on_a_larger_gpu_is_unknown_where_the_gpu_is_given_by_its_size():
    assert math.isnan(tight().options[-1].slow_down)
    assert "times the time" not in str(tight().options[-1])


def test_options_that_train_the_same_come_first_and_the_fastest_of_them_first():
    here = [option for option in tight().options if option.knobs.gpu is None]
    order = [(option.alters, option.slow_down) for option in here]
    assert order == sorted(order)


def test_no_option_is_worse_than_another_in_everything():
    def beats(one, other):
        return one is not other and (
            one.slow_down <= other.slow_down
            and one.outcome.needed <= other.outcome.needed
            and len(one.knobs.changed()) <= len(other.knobs.changed())
            and one.altered <= other.altered
            and ("precision" in one.knobs.changed()) <= ("precision" in other.knobs.changed())
            and one.outcome.samples >= other.outcome.samples
        )

    here = [option for option in tight().options if option.knobs.gpu is None]
    assert not any(beats(one, other) for one in here for other in here)


def test_every_option_has_its_lines_of_code():
    assert all(option.code == lines.lines(step(), option.knobs) for option in tight().options)


def test_the_frontier_rises_in_time_and_falls_in_memory():
    best = tight().frontier
    assert len(best) > 1
    assert all(
        one.seconds / one.samples <= other.seconds / other.samples and one.needed > other.needed
        for one, other in itertools.pairwise(best)
    )


def test_equal_searches_give_equal_advice():
    again = advise(step(), f"{need() * 3 // 4}B", progress=None)
    assert str(again) == str(tight())


def test_the_budget_limits_the_settings_tried():
    advice = advise(step(), f"{need() * 3 // 4}B", budget=7, progress=None)
    settings = {outcome.knobs for outcome in advice.tried if outcome.knobs.batch is None} | set(advice.errors)
    assert len(settings) == 7


def test_progress_is_complete_only_at_the_end():
    seen = []
    advise(step(), f"{need() * 3 // 4}B", budget=7, progress=seen.append)
    assert all(one.done < one.total for one in seen[:-1])
    assert seen[-1].done == seen[-1].total
    # Every run is reported once.
    assert [one.done for one in seen] == [*range(1, len(seen) + 1)]


# -- other trainings


def test_a_smaller_input_and_frozen_blocks_change_the_training():
    blocks = nn.Sequential(*(block(64) for _ in range(4)))
    long = Step(blocks, torch.zeros(64, 256, 64), loss=torch.mean)
    advice = advise(long, f"{run(long, machine=machine_of('80GiB')).outcome.needed * 3 // 4}B", progress=None)
    # 3/4 and 1/2 of 256; the first half and the first three quarters of 4 blocks
    expected = {Knobs(input_size=192), Knobs(input_size=128), Knobs(frozen=("0", "1")), Knobs(frozen=("0", "1", "2"))}
    assert expected <= {outcome.knobs for outcome in advice.tried}
    others = [option for option in advice.options if {"input_size", "frozen"} & set(option.knobs.changed())]
    assert others
    assert all(option.alters and row_of(option, advice).endswith("  changed") for option in others)


def test_no_option_changes_the_training_twice_where_the_same_training_fits():
    assert not tight().options[0].alters
    assert all(len(option.altered) <= 1 for option in tight().options)


def test_inference_is_not_tried_for_a_training_step():
    assert all("mode" not in outcome.knobs.changed() for outcome in tight().tried)


# -- a step that fits


def test_a_step_that_fits_is_the_first_option():
    assert roomy().fits
    assert roomy().options[0].knobs == Knobs()
    assert " to spare." in str(roomy()).splitlines()[0]


def test_advice_for_this_machine_keeps_the_limit_of_the_process(monkeypatch: pytest.MonkeyPatch):
    limit = 64 << 20
    here = dataclasses.replace(catalogue.find("T4"), limit=limit)
    monkeypatch.setattr(machine, "real_device", lambda name, release=None: torch.device("cuda", 0))
    monkeypatch.setattr(machine.cuda, "catalogue_gpu", lambda device: here)
    of = Step(nn.Linear(1024, 1024), torch.zeros(64, 1024), loss=torch.mean)
    advice = advise(of, "cuda", budget=1, progress=None)
    assert {one.capacity for one in advice.tried} == {limit}
    assert "this process may use 64.0" in advice.sentences[0]
    assert "The limit is that of torch.cuda.set_per_process_memory_fraction." in advice.sentences[0]


def test_no_larger_gpu_is_an_option_where_the_step_fits():
    assert all(option.knobs.gpu is None for option in roomy().options)


def test_another_precision_does_not_replace_settings_that_keep_every_bit():
    def exact(knobs):
        return not {"precision", "batch", "gpu", "optimizer", "lora"} & set(knobs.changed())

    listed = [one.outcome.seconds for one in tight().options if exact(one.knobs)]
    fitting = [one.seconds for one in tight().tried if one.fits and exact(one.knobs)]
    # Another knob is listed only if it saves 1 % of the time.
    assert min(listed) <= min(fitting) * 1.01


# -- a step that fits nowhere


def test_the_nearest_setting_and_its_missing_bytes_are_printed_where_none_fits():
    advice = nowhere()
    assert all(option.knobs.gpu is not None for option in advice.options)
    assert advice.nearest.needed == min(outcome.needed for outcome in advice.tried)
    assert "settings tried fits with the batch of 2." in str(advice)
    assert f"{size_text(-advice.nearest.margin)} too much." in str(advice)


def test_the_bytes_that_no_batch_can_save_are_printed_where_no_batch_fits():
    # 2**17 * 2**17 * 4 bytes = 64 GiB: the weight, its gradient and AdamW's two states
    assert "Not even a batch of 1 would: weights, gradients and optimizer state alone take 256 GiB." in str(nowhere())


def test_the_bytes_missing_on_the_largest_gpu_are_printed_where_no_gpu_is_large_enough():
    # MI350X and MI355X have equal memory: either is the largest.
    largest = catalogue.find(nowhere().too_small.gpu)
    assert largest.capacity == catalogue.gpus()["capacity"].max()
    # AdamW makes a temporary of the weight's size; batch and workspaces are small beside 5 * 64 GiB.
    missing = 320 * GIB - largest.capacity
    assert missing <= -nowhere().too_small.margin < missing * 1.01
    sentence = f"the largest, the {largest.name}, lacks {size_text(-nowhere().too_small.margin)}."
    assert sentence in str(nowhere())


def test_many_layers_are_printed_as_the_first_and_the_last():
    knobs = Knobs(lora=["first", "second", "third", "fourth"])
    assert setting_text(knobs) == "lora first … fourth (4 layers)"


# -- printing


def test_every_option_is_a_row_with_sizes_in_binary_units_a_bar_and_its_largest_batch():
    for option in tight().options:
        row = row_of(option, tight())
        outcome = option.outcome
        word = "tight" if outcome.margin < 0.05 * outcome.capacity else "fits "
        size = size_text(outcome.needed)
        assert re.search(rf"  {word} +{re.escape(size)}  ", row)
        assert f"{size}  {bar(outcome.needed / outcome.capacity)}" in row
        assert f"  {option.largest.samples} " in row


def test_advice_is_one_line():
    assert repr(roomy()).startswith(f"<Advice for {roomy().gpu.name}: fits as written · ")
    assert "first as written" in repr(roomy())
    assert "does not fit as written" in repr(tight())
    assert "\n" not in repr(tight())


def test_a_notebook_shows_advice_as_sentences_over_an_html_table():
    page = tight()._repr_html_()
    assert tight().sentences[0] in page
    # A row of titles, and a bar in the row of each option.
    assert page.count("<tr>") == 1 + len(tight().options)
    assert page.count('role="img"') == len(tight().options)


def test_the_frame_has_a_row_per_option_in_bytes():
    table = tight().to_pandas()
    assert list(table.index) == [str(option.knobs) for option in tight().options]
    assert (table["margin"] >= 0).all()
    assert table["peak_reserved"].tolist() == [option.outcome.peak_reserved for option in tight().options]


def test_batch_norm_makes_micro_batches_another_training():
    normed = nn.Sequential(nn.Linear(256, 4096), nn.BatchNorm1d(4096), nn.GELU(), nn.Linear(4096, 1))
    many = Step(normed, torch.zeros(4096, 256), loss=torch.mean)
    whole = run(many, machine=machine_of("80GiB")).outcome.needed
    advice = advise(many, f"{whole * 3 // 4}B", budget=40, progress=None)
    cut = [option for option in advice.options if option.knobs.accumulation]
    assert cut
    assert all(option.alters for option in cut)


def test_a_broken_step_raises_its_own_error():
    def loss(output):
        raise RuntimeError("no loss today")

    with pytest.raises(RuntimeError, match="no loss today"):
        advise(Step(nn.Linear(4, 4), torch.zeros(2, 4), loss=loss), progress=None)


def test_a_budget_of_0_is_refused():
    with pytest.raises(ValueError, match="budget=0"):
        advise(step(), budget=0)


def test_the_cpu_is_refused():
    with pytest.raises(ValueError, match="advice is what fits a GPU: give gpu= the name of one"):
        advise(step(), "cpu", progress=None)


def test_a_search_does_not_change_the_model():
    of = step(64)
    before = {name: (id(weight), weight.clone()) for name, weight in of.model.named_parameters()}
    advise(of, "T4", budget=8, progress=None)
    for name, weight in of.model.named_parameters():
        assert id(weight) == before[name][0]
        assert torch.equal(weight, before[name][1])
        assert weight.grad is None


class Stateful(nn.Module):
    """A model that appends a tensor of the program, which has the size of its batch."""

    def __init__(self, batch):
        super().__init__()
        self.linear, self.state = nn.Linear(256, 256), torch.zeros(batch, 256)

    def forward(self, x):
        return torch.cat([self.linear(x), self.state.to(x.device)], 1).sigmoid()


@pytest.mark.parametrize("gpu", ["32MiB", "4GiB"])
def test_the_largest_batch_is_not_known_where_no_other_batch_can_be_run(gpu):
    # A batch of 16384 keeps two results of 16 MiB.
    stateful = Step(Stateful(16384), torch.zeros(16384, 256), loss=torch.mean)
    advice = advise(stateful, gpu, budget=12, progress=None)
    largest = advice.largest[Knobs()]
    assert largest.error.startswith("RuntimeError: ")
    assert not any(option.largest_text for option in advice.options if option.knobs == Knobs())
    assert "Not even a batch of 1" not in "\n".join(advice.sentences)
    assert any(f"No other batch can be run: {largest.error}." in each for each in advice.sentences) is (gpu == "32MiB")
