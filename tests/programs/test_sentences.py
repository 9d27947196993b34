"""Sentences of the explorer."""

from __future__ import annotations

import pytest

from memexplore.run.knobs.applying.report import ApplyReport, Change
from memexplore.run.knobs.knobs import KNOBS, Knobs
from memexplore.run.programs.cost import Cost
from memexplore.run.programs.execution import Execution
from memexplore.run.programs.outcome import Outcome
from memexplore.run.programs.sentences import change, first_sentence, knob_text, percent_text, sentence
from memexplore.tape import Action, Meta, Phase, Source, Tape
from memexplore.virtual_gpu.dispatch.work import Rate, Work

GIB = 1024**3
T4 = Meta(Source.PREDICTED, "Tesla T4", gpu="T4", capacity=14 * GIB)
A100 = Meta(Source.PREDICTED, "NVIDIA A100 40GB", gpu="A100 40GB", capacity=39 * GIB)


def execution(
    size: float,
    knobs: Knobs | None = None,
    *,
    flops: int = 100,
    changes: tuple[Change, ...] = (),
    meta: Meta = T4,
    oom: float = 0,
) -> Execution:
    """Return a run with a peak of `size` GiB; with `oom` it then runs out of memory on a request of `oom` GiB."""
    rows = {
        "action": [Action.ALLOC, Action.OOM][: 2 if oom else 1],
        "address": [0, -1][: 2 if oom else 1],
        "size": [int(size * GIB), int(oom * GIB)][: 2 if oom else 1],
        "step": [1, 1][: 2 if oom else 1],
        "phase": [Phase.FORWARD] * (2 if oom else 1),
        "module": [0] * (2 if oom else 1),
    }
    tape = Tape.from_columns(rows, modules=["conv1"], meta=meta)
    return Execution(knobs or Knobs(), tape, ApplyReport(changes), Cost((Work(flops, 0, Rate.FP32),)))


def numbers(size: float, flops: int = 100, samples: int = 8, *, fits: bool = True) -> Outcome:
    return Outcome(Knobs(), "T4", T4.capacity or 0, fits, int(size * GIB), int(size * GIB), flops, 1.0, samples)


CHECKPOINTS = Knobs(checkpoint="every 1")
RECOMPUTED = (Change("checkpoint", "Checkpointing 16 of 16 blocks"),)


def test_sentence_has_peak_and_recomputed_flops() -> None:
    # 4.3 / 9.1 = 0.473, and 131 / 100 FLOPs
    text = sentence(execution(9.1), execution(4.3, CHECKPOINTS, flops=131, changes=RECOMPUTED))
    assert text == "Checkpointing 16 of 16 blocks: peak 9.10 → 4.30 GiB (−53 %), recomputes 31 % more FLOPs"


def test_setting_that_fits_is_compared_with_the_bytes_needed_before() -> None:
    before, after = execution(9, oom=6), execution(4.3, CHECKPOINTS, changes=RECOMPUTED)
    # 9 GiB were held when 6 more were requested: at least 15
    assert sentence(before, after) == "Checkpointing 16 of 16 blocks: peak over 15.0 → 4.30 GiB"
    # with memory without end it would have been 20; 4.4 / 20 = 0.22
    whole = (numbers(20, fits=False), numbers(4.4))
    assert sentence(before, after, whole=whole) == "Checkpointing 16 of 16 blocks: peak 20.0 → 4.40 GiB (−78 %)"


def test_setting_that_no_longer_fits_needs_over_what_it_held_and_requested() -> None:
    text = sentence(execution(4), execution(9, Knobs(batch=64), oom=6, changes=(Change("batch", "batch of 64"),)))
    assert text == "Batch of 64: peak 4.00 → over 15.0 GiB"  # 9 + 6


def test_whether_a_setting_fits_is_left_to_the_verdict() -> None:
    for after in (execution(9, Knobs(precision="bf16"), oom=5.5), execution(15, Knobs(gpu="A100 40GB"), meta=A100)):
        assert "fit" not in sentence(execution(9, oom=6), after)


def test_flops_are_compared_per_sample() -> None:
    before, after = execution(4), execution(8, Knobs(batch=16), flops=200)
    # twice the samples, twice the FLOPs: equal per sample
    assert "FLOPs" not in sentence(before, after, whole=(numbers(4), numbers(8, 200, 16)))
    assert sentence(before, after).endswith("2.0 times the FLOPs")


def test_fewer_flops_are_not_called_recomputed() -> None:
    # from 131 back to 100: 1 - 100 / 131 = 0.237
    assert sentence(execution(4, CHECKPOINTS, flops=131, changes=RECOMPUTED), execution(9)).endswith("24 % fewer FLOPs")
    assert sentence(execution(4), execution(4, Knobs(batch=5), flops=110)).endswith(", 10 % more FLOPs")


def test_equal_peaks_are_written_as_before() -> None:
    assert "peak 4.00 GiB as before" in sentence(execution(4), execution(4, Knobs(optimizer="SGD")))


EIGHT = Change("batch", "batch of 8")
PARTS = Change("accumulation", "accumulation over 2 micro-batches of 4")
BF16 = Change("precision", "bf16 autocast")
LORA = Change("lora", "LoRA of rank 4 on 2 linear layers")


@pytest.mark.parametrize(
    ("before", "after", "applied_before", "applied_after", "text"),
    [
        (Knobs(), Knobs(batch=8), (), (), "Batch of 8"),
        (Knobs(batch=8), Knobs(), (EIGHT,), (), "Batch as written"),
        (
            Knobs(),
            Knobs(batch=8, accumulation=2),
            (),
            (EIGHT, PARTS),
            "Batch of 8, accumulation over 2 micro-batches of 4",
        ),
        (Knobs(batch=8), Knobs(batch=8, precision="bf16"), (EIGHT,), (EIGHT, BF16), "Bf16 autocast"),
        (Knobs(), Knobs(settings="expandable_segments:True"), (), (), "Expandable_segments:True"),
        (Knobs(), Knobs(variables={"batch": 16}), (), (), "Batch = 16"),
        (Knobs(), Knobs(lora=["a", "b"]), (), (), "LoRA on 2 layers"),
        # The phrase of LoRA contains the rank, which is a field of its own.
        (Knobs(), Knobs(lora=["a", "b"], lora_rank=4), (), (LORA,), "LoRA of rank 4 on 2 linear layers"),
        (Knobs(batch=8), Knobs(batch=8), (EIGHT,), (EIGHT,), "The same setting"),
        # Another setting that was applied to as many blocks: the counts do not show the difference, the knob does.
        (
            Knobs(checkpoint="every 1"),
            Knobs(checkpoint="every 2"),
            RECOMPUTED,
            RECOMPUTED,
            "Checkpoint every 2",
        ),
    ],
)
def test_change_names_applied_changes_then_other_changed_knobs(
    before: Knobs,
    after: Knobs,
    applied_before: tuple[Change, ...],
    applied_after: tuple[Change, ...],
    text: str,
) -> None:
    assert change(execution(1, before, changes=applied_before), execution(1, after, changes=applied_after)) == text


def test_every_knob_has_a_phrase() -> None:
    texts = [knob_text(name, knob.values.default) for name, knob in KNOBS.items()]
    assert all(text.endswith(" as written") for text in texts)
    assert len(set(texts)) == len(texts)


def test_first_sentence_is_the_setting() -> None:
    assert first_sentence(execution(4)) == "As written"
    assert first_sentence(execution(4, Knobs(batch=4))) == "Batch 4"


@pytest.mark.parametrize(("ratio", "words"), [(0.47, "−53 %"), (1.0, "+0 %"), (1.004, "+0.4 %"), (3, "+200 %")])
def test_percent_has_its_sign(ratio: float, words: str) -> None:
    assert percent_text(ratio) == words


# -- measured


CPU = Meta(Source.MEASURED, "cpu")
H200 = Meta(Source.MEASURED, "NVIDIA H200", gpu="H200", capacity=139 * GIB)


def test_measured_run_has_device_and_seconds() -> None:
    text = first_sentence(execution(2, meta=CPU)._replace(seconds=2.5))
    assert text == "As written · measured on this machine's CPU, 2.5 s a step"
    text = sentence(execution(4, meta=H200), execution(2, Knobs(batch=4), meta=H200)._replace(seconds=0.0204))
    assert text == ("Batch of 4: peak 4.00 → 2.00 GiB (−50 %) · measured on this machine's NVIDIA H200, 20.4 ms a step")


def test_prediction_compared_with_a_measurement_is_marked() -> None:
    text = sentence(execution(4, meta=CPU), execution(4, Knobs(gpu="T4")))
    assert text == "GPU T4: peak 4.00 GiB as before · predicted"


def test_needed_bytes_of_a_real_out_of_memory_are_predicted() -> None:
    text = first_sentence(execution(100, oom=50, meta=H200))
    assert text == ("As written · measured on this machine's NVIDIA H200 up to there, what it would need is predicted")
