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
    "create_graph_on_leaf_gradients": Answer(Cause.LEAK, ("by 16.0 MiB an iteration",), ("no backward",)),
    # The optimizer's state fills the GPU; with expandable segments the program runs to its end in 2.82 of 3 GiB.
    "first_adam_step": Answer(Cause.FRAGMENTATION, ("expandable segments",), ("AdamW",)),
    "folds_kept_by_cycles": Answer(Cause.HELD, ("only refer to each other", "FoldTrainer")),
    "hooks_append": Answer(Cause.LEAK, ("_forward_hooks",), ("no backward pass follows",)),
    "lengths_fragment": Answer(Cause.FRAGMENTATION, ("expandable segments",)),
    "logits_in_float32": Answer(Cause.TOO_MUCH, (), ("del model", "Delete `model`")),
    "metric_state_in_evaluation": Answer(Cause.LEAK, ("an iteration",)),
    "metric_state_in_training": Answer(Cause.LEAK, ("preds", "target")),
    "one_image_with_many_boxes": Answer(Cause.TOO_MUCH, ("the same call asked for at most",)),
    "parametrize_cache_stays_on": Answer(Cause.HELD, ("parametrize._cache",), ("SGD",)),
    "predictions_concatenated": Answer(Cause.LEAK, ("an iteration",), (".item()",)),
    "state_not_detached": Answer(Cause.LEAK, ("graph of this step reaches back",)),
}


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
