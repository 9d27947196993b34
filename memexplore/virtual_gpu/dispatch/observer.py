"""Observer: what a runner reports of its requests, frees and streams, to a recorder."""

from __future__ import annotations

from typing import Any, Protocol

from memexplore.tape import Category


class Observer(Protocol):
    """Receiver of memory events: a recorder. `func` and `args` are the op that runs, `index` the output."""

    def alloc(
        self, address: int, size: int, func: Any, args: Any, index: int, category: Category, tensor: str, stream: int
    ) -> None:
        """A block was allocated for a tensor of a shape and dtype (`tensor_text`), empty for another purpose."""

    def free(self, address: int, size: int) -> None:
        """A block was freed."""

    def reallocated(self, address: int, size: int, origin: Any, tensor: str) -> None:
        """A storage of an earlier virtual GPU was allocated on this one."""

    def op(self, func: Any, args: Any) -> None:
        """An op of the forward or backward pass is about to run."""

    def out_of_memory(self, size: int, func: Any, args: Any, tensor: str, stream: int) -> None:
        """A request did not fit."""

    def used_on(self, address: int, stream: int) -> None:
        """A stream uses a block, as `Tensor.record_stream` says."""

    def position(self) -> int:
        """Return how much has been observed, for `ordered` and `finished`."""

    def ordered(self, stream: int, other: int, until: int | None) -> None:
        """A stream waits for another one's work up to a position, None for all so far."""

    def finished(self, stream: int | None, until: int | None) -> None:
        """The program waits for a stream's work up to a position; None: for all streams, for all so far."""

    def may_be_free(self, address: int) -> None:
        """A block is free from now on if the GPU does not lag: only a collective that has begun holds it."""

    def tag_at(self, address: int) -> Any:
        """Return what the observer knows about the contents of a block, or None."""

    def tag_block(self, address: int, tag: Any) -> None:
        """A block has the contents that another had, whose `tag_at` was `tag`."""
