"""Sentences of the explorer."""

from __future__ import annotations

import math

import pytest

from memexplore.run.knobs.applying.report import ApplyReport, Change
from memexplore.run.knobs.knobs import KNOBS, Knobs
from memexplore.run.programs.cost import Cost
from memexplore.run.programs.execution import Execution
from memexplore.run.programs.outcome import Outcome
from memexplore.run.run import Run
from memexplore.run.sentences import change, first_sentence, knob_text, percent_text, sentence
from memexplore.tape import Meta, Source, Tape

GIB = 1024**3
T4 = Meta(Source.PREDICTED, "Tesla T4", gpu="T4", capacity=14 * GIB)
A100 = Meta(Source.PREDICTED, "NVIDIA A100 40GB", gpu="A100 40GB", capacity=39 * GIB)


def result(
    size: float,
    knobs: Knobs | None = None,
    *,
    flops: int = 100,
    samples: int = 8,
    changes: tuple[Change, ...] = (),
    meta: Meta = T4,
    seconds: float = math.nan,
) -> Run:
    """Return a run that needs `size` GiB."""
    tape = Tape.from_columns({"address": [0], "size": [int(size * GIB)]}, meta=meta)
    execution = Execution(knobs or Knobs(), tape, ApplyReport(changes), Cost(), seconds)
    capacity, needed = meta.capacity or 1 << 50, int(size * GIB)
    outcome = Outcome(execution.knobs, "T4", capacity, needed <= capacity, needed, needed, needed, flops, 1.0, samples)
    return Run(execution, outcome)


CHECKPOINTS = Knobs(checkpoint="every 1")
RECOMPUTED = (Change("checkpoint", "Checkpointing 16 of 16 blocks"),)


def test_sentence_has_peak_and_recomputed_flops() -> None:
    # 4.3 / 9.1 = 0.473, and 131 / 100 FLOPs
    text = sentence(result(9.1), result(4.3, CHECKPOINTS, flops=131, changes=RECOMPUTED))
    assert text == "Checkpointing 16 of 16 blocks: peak 9.10 → 4.30 GiB (−53 %), recomputes 31 % more FLOPs"


def test_whether_a_setting_fits_is_left_to_the_verdict() -> None:
    for after in (result(14.5, Knobs(precision="bf16")), result(15, Knobs(gpu="A100 40GB"), meta=A100)):
        assert "fit" not in sentence(result(15), after)


def test_flops_are_compared_per_sample() -> None:
    # twice the samples, twice the FLOPs: equal per sample
    assert "FLOPs" not in sentence(result(4), result(8, Knobs(batch=16), flops=200, samples=16))
    assert sentence(result(4), result(8, flops=200)).endswith("2.0 times the FLOPs")


def test_fewer_flops_are_not_called_recomputed() -> None:
    # from 131 back to 100: 1 - 100 / 131 = 0.237
    assert sentence(result(4, CHECKPOINTS, flops=131, changes=RECOMPUTED), result(9)).endswith("24 % fewer FLOPs")
    assert sentence(result(4), result(4, Knobs(batch=5), flops=110)).endswith(", 10 % more FLOPs")


def test_equal_peaks_are_written_as_before() -> None:
    assert "peak 4.00 GiB as before" in sentence(result(4), result(4, Knobs(optimizer="SGD")))


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
    assert change(result(1, before, changes=applied_before), result(1, after, changes=applied_after)) == text


def test_every_knob_has_a_phrase() -> None:
    texts = [knob_text(name, knob.values.default) for name, knob in KNOBS.items()]
    assert all(text.endswith(" as written") for text in texts)
    assert len(set(texts)) == len(texts)


def test_first_sentence_is_the_setting() -> None:
    assert first_sentence(result(4)) == "As written"
    assert first_sentence(result(4, Knobs(batch=4))) == "Batch 4"


@pytest.mark.parametrize(("ratio", "words"), [(0.47, "−53 %"), (1.0, "+0 %"), (1.004, "+0.4 %"), (3, "+200 %")])
def test_percent_has_its_sign(ratio: float, words: str) -> None:
    assert percent_text(ratio) == words


# -- measured


CPU = Meta(Source.MEASURED, "cpu")
H200 = Meta(Source.MEASURED, "NVIDIA H200", gpu="H200", capacity=139 * GIB)


def test_measured_run_has_device_and_seconds() -> None:
    text = first_sentence(result(2, meta=CPU, seconds=2.5))
    assert text == "As written · measured on this machine's CPU, 2.5 s a step"
    text = sentence(result(4, meta=H200), result(2, Knobs(batch=4), meta=H200, seconds=0.0204))
    assert text == ("Batch of 4: peak 4.00 → 2.00 GiB (−50 %) · measured on this machine's NVIDIA H200, 20.4 ms a step")


def test_prediction_compared_with_a_measurement_is_marked() -> None:
    text = sentence(result(4, meta=CPU), result(4, Knobs(gpu="T4")))
    assert text == "GPU T4: peak 4.00 GiB as before · predicted"


def test_needed_bytes_of_a_real_out_of_memory_are_predicted() -> None:
    text = first_sentence(result(150, meta=H200))
    assert text == ("As written · measured on this machine's NVIDIA H200 up to there, what it would need is predicted")
