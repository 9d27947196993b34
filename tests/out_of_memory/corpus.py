"""Programs of public reports that run out of memory, and what has to be said about each.

`python -m tests.out_of_memory [NAME ...]` runs them and prints the table.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from memexplore.out_of_memory.cause import Cause
from tests.data.make import COLLECTION
from tests.test_cli import memexplore

PROGRAMS = COLLECTION / "out_of_memory"


class Answer(NamedTuple):
    """The cause, parts of what the sentences say, and what no suggestion may say."""

    cause: Cause
    says: tuple[str, ...] = ()
    never: tuple[str, ...] = ()


ANSWERS = {
    # z and its graph: two blocks of 8 MiB in each iteration.
    "create_graph_on_leaf_gradients": Answer(
        Cause.LEAK, ("by 16.0 MiB an iteration", ".grad` keeps"), ("no backward",)
    ),
    # The optimizer's state fills the GPU; with expandable segments the program runs to its end in 2.82 of 3 GiB.
    "first_adam_step": Answer(Cause.FRAGMENTATION, ("expandable segments",), ("AdamW",)),
    "folds_kept_by_cycles": Answer(Cause.HELD, ("only refer to each other", "FoldTrainer")),
    "hooks_append": Answer(Cause.LEAK, ("cam.recorder.activations",), ("no backward pass follows",)),
    "lengths_fragment": Answer(Cause.FRAGMENTATION, ("expandable segments",)),
    "logits_in_float32": Answer(Cause.TOO_MUCH, (), ("del model", "Delete `model`")),
    "metric_state_in_evaluation": Answer(Cause.LEAK, ("an iteration",)),
    "metric_state_in_training": Answer(Cause.LEAK, ("preds", "target")),
    "one_image_with_many_boxes": Answer(Cause.TOO_MUCH, ("the same call asked for at most",)),
    "parametrize_cache_stays_on": Answer(Cause.HELD, ("parametrize._cache",), ("SGD",)),
    "predictions_concatenated": Answer(Cause.LEAK, ("an iteration",), (".item()",)),
    "state_not_detached": Answer(Cause.LEAK, ("graph of this step reaches back",)),
}


_EXPANDABLE = 'import os; os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"\n'
APPLIED = {
    "create_graph_on_leaf_gradients": [("    results.append", "    z.grad = None\n    results.append")],
    "first_adam_step": [("import torch\n", f"{_EXPANDABLE}import torch\n")],
    "folds_kept_by_cycles": [("run_fold(fold))\n", "run_fold(fold))\n    import gc; gc.collect()\n")],
    "logits_in_float32": [("use_cache=True", "use_cache=True, logits_to_keep=1")],
    "hooks_append": [
        ("append(output)", "append(output.detach().cpu())"),
        ("append(grad_out[0])", "append(grad_out[0].detach().cpu())"),
    ],
    "lengths_fragment": [("import random\n", f"{_EXPANDABLE}import random\n")],
    "metric_state_in_evaluation": [("BinaryAveragePrecision()", "BinaryAveragePrecision(thresholds=100)")],
    "metric_state_in_training": [("BinaryAveragePrecision()", "BinaryAveragePrecision(thresholds=100)")],
    # "on the CPU"
    "one_image_with_many_boxes": [("iou_matrix(boxes, anchors)", "iou_matrix(boxes.cpu(), anchors.cpu()).cuda()")],
    "parametrize_cache_stays_on": [
        ("x = x + self.attn(x)", "torch.nn.utils.parametrize._cache.clear()\n        x = x + self.attn(x)"),
    ],
    "predictions_concatenated": [
        ("features = torch.cat((features, out))", "labels.append(out.cpu())"),
        ("print(features.shape)", "print(torch.cat(labels).shape)"),
    ],
    "state_not_detached": [
        ("logits, self.state = self.model(x, self.state)",
         "logits, self.state = self.model(x, tuple(state.detach() for state in self.state))"),
    ],
}  # fmt: skip
"""The first suggestion to each program, as changes of its text; without the programs to which it cannot be applied."""


def outcome_applied(name: str, folder: Path) -> str:
    """Run a program with its first suggestion applied, and return the outcome."""
    text = (PROGRAMS / f"{name}.py").read_text()
    for old, new in APPLIED[name]:
        assert old in text, old
        text = text.replace(old, new)
    (folder / f"{name}.py").write_text(text)
    ended = memexplore("run", folder / f"{name}.py", "--gpu", gpu_of(name), "--json", cwd=folder)
    return str(json.loads(ended.stdout)["outcome"])


def gpu_of(name: str) -> str:
    """Return the GPU that the first lines of a program name."""
    match = re.search(r"^# gpu: (\S+)", (PROGRAMS / f"{name}.py").read_text(), re.MULTILINE)
    assert match is not None
    return match[1]


def post_mortem(name: str, folder: Path) -> dict[str, Any]:
    """Run a program and return the post-mortem of its report."""
    ended = memexplore("run", PROGRAMS / f"{name}.py", "--gpu", gpu_of(name), "--json", cwd=folder)
    result: dict[str, Any] = json.loads(ended.stdout)["post_mortem"]
    return result


def wrong(name: str, found: dict[str, Any]) -> list[str]:
    """Return what is wrong in the answer to a program; empty if all is right."""
    expected, sentences = ANSWERS[name], " ".join(found["sentences"])
    changes = " ".join(f"{suggestion['text']} {suggestion['code']}" for suggestion in found["suggestions"])
    return [
        *([f"the cause is {found['cause']}, not {expected.cause}"] if found["cause"] != expected.cause else []),
        *(f"not said: {text}" for text in expected.says if text not in sentences),
        *(f"suggested: {text}" for text in expected.never if text in changes),
    ]
