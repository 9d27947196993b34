"""Write knobs as a diff of a training script: of a person's own code if it is known, else of typical lines.

A line of the diff begins with ``+``, ``-`` or a space, and with ``@`` where it names the place of the next lines.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import NamedTuple

from memexplore.run.code.lines import lines, loop_lines, optimizer_lines, recorded_sites
from memexplore.run.code.own_code import OwnCode
from memexplore.run.code.own_lines import changed_source
from memexplore.run.code.own_loop import Unclear
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.programs.step import Step

_GENERAL = "# With general names, as {}."
_HUNK = re.compile(r"@@ -(?P<line>\d+)")


class Code(NamedTuple):
    """Lines to copy, and the same as a diff."""

    text: str
    diff: str


def code(step: Step | None, knobs: Knobs, own: OwnCode | None = None) -> Code:
    """Return the lines for knobs: the person's own code with changes if it is clear what to change, else general lines.

    The general lines begin with a comment that says why. Both texts are empty if the knobs change nothing.

    >>> own = OwnCode("size = 8\\nx = torch.ones(size)", title="Cell In[3]")
    >>> print(code(None, Knobs(variables={"size": 16}), own).diff)
    @ Cell In[3], line 1
    - size = 8
    + size = 16
      x = torch.ones(size)

    Raises the exceptions of `lines`.
    """
    text = lines(step, knobs).strip("\n")
    if not text:
        return Code("", "")
    reason = "no source with a training loop of this model is known"
    if own is not None:
        try:
            changed = changed_source(own, knobs, recorded_sites(step, knobs))
            return Code(changed.strip("\n"), source_diff(own, changed))
        except Unclear as error:
            reason = f"it is not clear what to change in the code: {error}"
    comment = _GENERAL.format(reason)
    return Code(f"{comment}\n{text}", f"  {comment}\n{diff(step, knobs)}")


def source_diff(own: OwnCode, changed: str) -> str:
    """Return a changed source against the one as written: the lines that differ with three others around them."""
    parts = []
    for line in difflib.unified_diff(own.source.split("\n"), changed.split("\n"), lineterm="", n=3):
        if hunk := _HUNK.match(line):
            parts.append(f"@ {own.title + ', ' if own.title else ''}line {hunk['line']}")
        elif line[:3] not in ("+++", "---") or parts:
            parts.append(f"{line[:1]} {line[1:]}".rstrip())
    return "\n".join(parts)


def diff(step: Step | None, knobs: Knobs) -> str:
    """Return the lines of `codegen.lines.lines` as a diff; empty if the knobs change nothing.

    Lines that replace nothing of the loop, the optimizer or the batch are all new. Names are as in `lines`.

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
