"""Knobs as a diff: the lines of a training script as written, against those with the same effect as the knobs.

In: a `Step` (or None) and `Knobs`. Out: lines with ``+``, ``-`` or a space before each.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from memexplore.codegen.lines import lines, loop_lines, optimizer_lines
from memexplore.knobs.knobs import Knobs
from memexplore.steps.step import Step


def diff(step: Step | None, knobs: Knobs) -> str:
    """Return the lines of `codegen.lines.lines` as a diff; empty if the knobs change nothing.

    Lines that replace nothing of the loop, the optimizer or the batch are all new. Names are those of `lines`.

    >>> print(diff(None, Knobs(accumulation=4)))
      # model, batches, loss_function and optimizer are yours.
      for inputs, targets in batches:
    -     loss = loss_function(model(inputs), targets)
    -     loss.backward()
    +     for inputs, targets in zip(inputs.chunk(4), targets.chunk(4)):
    +         loss = loss_function(model(inputs), targets) / 4
    +         loss.backward()
          optimizer.step()
          optimizer.zero_grad()

    Raises the exceptions of `lines`.
    """
    changed = lines(step, knobs).strip("\n").split("\n")
    if changed == [""]:
        return ""
    comments = [line for line in changed[:1] if line.startswith("#") and line.endswith("yours.")]
    written = [*comments, *_written(step, changed)]
    # The order of ndiff would put added lines before the removed ones that they replace.
    parts = []
    for tag, start, end, low, high in difflib.SequenceMatcher(None, written, changed, autojunk=False).get_opcodes():
        if tag == "equal":
            parts += [f"  {line}" for line in written[start:end]]
        else:
            parts += [f"- {line}" for line in written[start:end]] + [f"+ {line}" for line in changed[low:high]]
    return "\n".join(part.rstrip() for part in parts)


def _written(step: Step | None, changed: list[str]) -> Iterator[str]:
    """Return the lines as written of those statements that the changed lines replace."""
    if step is not None and any(line.startswith("batches = ") for line in changed):
        yield f"batches = torch.utils.data.DataLoader(dataset, batch_size={step.batch_size})"
    if any(line.startswith("optimizer = ") for line in changed) and (step is None or step.optimizer is not None):
        yield from _split(optimizer_lines(step, Knobs()))
    if any(" in batches" in line or "enumerate(batches" in line for line in changed):
        yield from _split(loop_lines(step, Knobs()))


def _split(pieces: Iterator[str]) -> Iterator[str]:
    for piece in pieces:
        if not piece.startswith("from "):
            yield from piece.strip("\n").split("\n")
