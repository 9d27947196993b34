"""Scripts of other people: each runs unmodified on a virtual GPU and prints what it prints on the CPU."""

from __future__ import annotations

import pytest

from tests.scripts import outputs
from tests.scripts.runs import Run, on_virtual_gpu
from tests.scripts.script_list import RANKS, Script, scripts

FAST = (
    "plain_torch/crf_tagger.py",
    "plain_torch/ctc_speech.py",
    "plain_torch/knowledge_distillation.py",
    "plain_torch/maml_functional.py",
    "plain_torch/moe_switch.py",
    "plain_torch/nanogpt.py",
    "plain_torch/prefetcher_threads.py",
    "plain_torch/seq2seq_attention.py",
    "plain_torch/simclr.py",
    "plain_torch/tacotron_tts.py",
    "plain_torch/wgan_gp.py",
    "pytorch_examples/dcgan.py",
    "pytorch_examples/ddp_toy.py",
    "pytorch_examples/language_translation.py",
    "pytorch_examples/mnist.py",
    "pytorch_examples/vae.py",
    "pytorch_examples/word_language_model.py",
)
"""Scripts that need only the extra [test], a few seconds each; `python -m tests.scripts` runs all."""


@pytest.mark.parametrize("script", scripts(FAST), ids=lambda script: script.name)
def test_a_script_runs_on_a_virtual_gpu_and_prints_what_it_prints_on_the_cpu(script: Script):
    if script.missing:
        pytest.skip(f"needs {', '.join(script.missing)}")
    # One rank of several does not run alone on the CPU.
    expected = [] if script.name in RANKS else outputs.kept(script)
    assert expected is not None, f"{script.name} has changed: run python -m tests.scripts {script.name}"
    run = on_virtual_gpu(script)
    assert (run.outcome, run.error) == ("fits", "")
    assert run.summary["peak_allocated"] > 0
    assert outputs.missing(expected, outputs.lines(run.output)) == []


def test_a_run_that_prints_another_count_is_found():
    assert outputs.missing(["8 graphs, loss #"], outputs.lines("2 graphs, loss 0.5")) == ["8 graphs, loss #"]


def test_the_last_line_of_a_run_that_fails_is_its_error():
    assert Run("error", "Traceback\nValueError: no such thing\n\n", 1.0, {}).error == "ValueError: no such thing"


def test_every_script_says_what_it_does():
    assert [script.name for script in scripts() if not script.path.read_text().startswith('"""')] == []
