"""Scripts of other people: each runs unmodified on a virtual GPU and prints what it prints on the CPU."""

from __future__ import annotations

from operator import attrgetter

import pytest

from tests.needs import need
from tests.scripts import outputs
from tests.scripts.runs import Run, on_virtual_gpu
from tests.scripts.script_list import RANKS, Script, scripts

SPECIAL = {
    "plain_torch/crf_tagger.py": "sequences packed by length, and loops over lengths",
    "plain_torch/ctc_speech.py": "complex numbers, and a loss that reads lengths on the CPU",
    "plain_torch/flex_and_nested.py": "nested tensors, and attention with a mask that is a function",
    "plain_torch/hungarian_detection.py": "values that go to SciPy and come back as indices",
    "plain_torch/knowledge_distillation.py": "a frozen model, and training that a loss ends early",
    "plain_torch/maml_functional.py": "transforms of functions: torch.func's grad, vmap and functional_call",
    "plain_torch/moe_switch.py": "shapes that depend on values",
    "plain_torch/nanogpt.py": "torch.compile, autocast and accumulation, then sampling",
    "plain_torch/prefetcher_threads.py": "threads and a side stream",
    "plain_torch/seq2seq_attention.py": "a loop that ends with the token that the model chose",
    "plain_torch/wgan_gp.py": "two optimizers in turn, and gradients of gradients",
    "plain_torch/word2vec_sparse.py": "sparse gradients and their optimizer",
    "pytorch_examples/ddp_toy.py": "one rank of DistributedDataParallel under torchrun",
    "pytorch_examples/fsdp2_transformer.py": "one rank of a sharded model",
    "pytorch_examples/mnist.py": "arguments of the command line, data loaders, evaluation and a saved model",
    "pytorch_examples/tensor_parallel.py": "one rank of tensor parallelism",
    "pytorch_examples/time_sequence_prediction.py": "L-BFGS, which calls the step itself, in double precision",
    "transformers_examples/generate_text.py": "generation with a cache that grows",
    "transformers_examples/run_multiple_choice.py": "the training loop of a library",
    "trl_peft_examples/accelerate_find_batch_size.py": "an OutOfMemoryError that the program catches",
}
"""Script -> the way in which it is special. All of them need only the extra [test]."""


@pytest.mark.parametrize("script", [script for script in scripts() if script.name in SPECIAL], ids=attrgetter("name"))
def test_a_script_runs_on_a_virtual_gpu_and_prints_what_it_prints_on_the_cpu(script: Script):
    need(not script.missing, f"not installed: {', '.join(script.missing)}")
    # One rank of several does not run alone on the CPU.
    expected = [] if script.name in RANKS else outputs.kept(script)
    assert expected is not None, f"{script.name} has changed: run python -m tests.scripts {script.name}"
    run = on_virtual_gpu(script)
    assert (run.outcome, run.error) == ("fits", "")
    assert run.summary["peak_allocated"] > 0
    assert outputs.missing(expected, outputs.lines(run.output)) == []


def test_each_special_script_is_there():
    assert len(SPECIAL) == 20
    assert SPECIAL.keys() <= {script.name for script in scripts()}


def test_a_run_that_prints_another_count_is_found():
    assert outputs.missing(["8 graphs, loss #"], outputs.lines("2 graphs, loss 0.5")) == ["8 graphs, loss #"]


def test_the_last_line_of_a_run_that_fails_is_its_error():
    assert Run("error", "Traceback\nValueError: no such thing\n\n", 1.0, {}).error == "ValueError: no such thing"


def test_every_script_says_what_it_does():
    assert [script.name for script in scripts() if not script.path.read_text().startswith('"""')] == []
