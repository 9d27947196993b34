"""The activations of a step as a value: the call site of each, its written form, and why it cannot have the other."""

from __future__ import annotations

import dataclasses

from memexplore.knobs.choices import InPlace
from memexplore.knobs.facts import Skipped
from memexplore.knobs.inplace.activations import CallSite, Form


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

    def forms(self, choice: InPlace) -> dict[CallSite, Form]:
        """Return the form of every activation under a choice."""
        return {site.call: _form(site, choice) for site in self.sites}


def _form(site: Site, choice: InPlace) -> Form:
    if site.reason or choice is InPlace.AS_WRITTEN:
        return site.written
    return Form.IN_PLACE if choice is InPlace.ON else Form.OUT_OF_PLACE
