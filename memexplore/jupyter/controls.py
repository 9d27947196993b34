"""What the page of a view shows above the timeline besides the verdict, as the view sees it."""

from __future__ import annotations

from typing import Any, Protocol


class Controls(Protocol):
    """What the page of a view shows above the timeline: the knobs of an explorer, or the bar of a watched run."""

    name: str
    """Name of the state in messages: "explorer" or "live"."""

    def message(self) -> dict[str, Any]:
        """Return the whole state of the controls (`ExplorerState` or `LiveState` in `frontend/types.d.ts`)."""

    def receive(self, request: dict[str, Any]) -> bool:
        """Take a request of the page; return False if it is for the view. Called in any thread."""
