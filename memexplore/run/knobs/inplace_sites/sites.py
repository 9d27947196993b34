"""The activations of a step as a value: the call site of each, its written form, and why it cannot have the other."""

from __future__ import annotations

import dataclasses

from memexplore.run.knobs.applying.report import Skipped
from memexplore.run.knobs.inplace_sites.activations import CallSite, Form


@dataclasses.dataclass(frozen=True)
class Site:
    """An activation, its written form, and why it cannot have the other form (empty if it can)."""

    call: CallSite
    written: Form
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Sites:
    """All activations of a step in the order of its forward pass; the value can be pickled."""

    sites: tuple[Site, ...] = ()

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules whose `inplace` flag may have either value."""
        return tuple(site.call.module for site in self.sites if not site.reason and not site.call.file)

    @property
    def calls(self) -> tuple[CallSite, ...]:
        """Calls of functions that may run in either form."""
        return tuple(site.call for site in self.sites if not site.reason and site.call.file)

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Activations that cannot overwrite their input, and why."""
        return self.without_form(Form.IN_PLACE)

    def without_form(self, form: Form) -> tuple[Skipped, ...]:
        """Return the activations that are not written in a form and cannot have it, and why."""
        return tuple(
            Skipped(str(site.call), site.reason) for site in self.sites if site.reason and site.written is not form
        )

    def forms(self, form: Form) -> dict[CallSite, Form]:
        """Return the form of every activation where all that can have a form get it."""
        return {site.call: site.written if site.reason else form for site in self.sites}
