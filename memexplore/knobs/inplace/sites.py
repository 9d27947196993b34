"""The activations of a step as a value: where each is, how it is written, and why it cannot be otherwise."""

from __future__ import annotations

import dataclasses

from memexplore.knobs.inplace.activations import Form, Place
from memexplore.knobs.knobs import InPlace
from memexplore.knobs.report import LeftOut


@dataclasses.dataclass(frozen=True)
class Site:
    """An activation, the form it is written in, and why it cannot have the other one (empty where it can)."""

    place: Place
    written: Form
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Sites:
    """All activations of a step in the order of its forward pass; the value can be pickled."""

    sites: tuple[Site, ...] = ()

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules whose `inplace` flag may have either value."""
        return tuple(site.place.module for site in self.sites if not site.reason and not site.place.file)

    @property
    def calls(self) -> tuple[Place, ...]:
        """Calls of functions that may run in either form."""
        return tuple(site.place for site in self.sites if not site.reason and site.place.file)

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Activations that cannot overwrite their input, and why."""
        return self.kept(Form.IN_PLACE)

    def kept(self, form: Form) -> tuple[LeftOut, ...]:
        """Activations that are not written in a form and cannot have it, and why."""
        return tuple(
            LeftOut(str(site.place), site.reason) for site in self.sites if site.reason and site.written is not form
        )

    def forms(self, choice: InPlace) -> dict[Place, Form]:
        """The form of every activation under a choice."""
        return {site.place: _form(site, choice) for site in self.sites}


def _form(site: Site, choice: InPlace) -> Form:
    if site.reason or choice is InPlace.AS_WRITTEN:
        return site.written
    return Form.IN_PLACE if choice is InPlace.ON else Form.OUT_OF_PLACE
