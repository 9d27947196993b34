"""Advice as a value: settings that fit, cheapest first, and what was tried to find them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from memexplore import gpu_catalogue
from memexplore.analysis.tradeoffs import Point, frontier
from memexplore.knobs.knobs import Knobs, Precision
from memexplore.search.candidates import Largest
from memexplore.steps.outcome import Outcome, point, slow_down
from memexplore.units import size_text

if TYPE_CHECKING:
    import pandas

_QUICKER, _LEANER = 1.01, 1.02
"""A setting is told for its time or its memory where it saves 1 % of the one or 2 % of the other at least."""


class Option(NamedTuple):
    """One setting that fits, as it was run; sizes in bytes."""

    outcome: Outcome
    slow_down: float
    """Expected time of a sample over that as written on the GPU asked for."""
    extra_flops: float
    """Share of FLOPs of a sample beyond those as written."""
    altered: frozenset[str]
    """The knobs by which another training comes of it: a smaller batch or input, fewer or coarser weights."""
    largest: Largest | None
    """The largest batch that fits with it; None while the search goes on."""
    code: str
    """Its lines of plain PyTorch."""

    @property
    def knobs(self) -> Knobs:
        """The setting."""
        return self.outcome.knobs

    @property
    def alters(self) -> bool:
        """Whether another training comes of it."""
        return bool(self.altered)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person has to know, one sentence each."""
        return self.outcome.applied.notes

    def __str__(self) -> str:
        words = [f"{size_text(self.outcome.peak_reserved)} reserved, {size_text(self.outcome.margin)} to spare"]
        if not math.isnan(self.slow_down):
            words.append("as fast" if abs(self.slow_down - 1) < 0.005 else f"{self.slow_down:.2f} times the time")
        if not math.isnan(self.extra_flops) and abs(self.extra_flops) >= 0.005:
            words.append(f"{self.extra_flops * 100:+.0f} % FLOPs")
        if self.largest is not None and self.largest.samples:
            least = "" if self.largest.proven else "at least "
            own = self.knobs.batch is not None
            words.append("the largest that fits" if own else f"largest batch {least}{self.largest.samples}")
        return f"{setting_text(self.knobs)}: {', '.join(words)}"


def setting_text(knobs: Knobs) -> str:
    """A setting in words, without the names of all its layers where they are many.

    >>> setting_text(Knobs(frozen=["embed", "layers.0", "layers.1", "layers.2"], batch=4))
    'batch 4, frozen embed … layers.2 (4 layers)'
    >>> setting_text(Knobs(gpu="H200", checkpoint="sqrt"))
    'a larger GPU, H200, with checkpoint sqrt'
    """
    if knobs.gpu is not None:
        rest = knobs.replace(gpu=None)
        return f"a larger GPU, {knobs.gpu}" + (f", with {setting_text(rest)}" if rest != Knobs() else "")
    short: dict[str, tuple[str, ...]] = {}
    for field in ("frozen", "lora"):
        names = getattr(knobs, field)
        if len(names) > _NAMES:
            short[field] = (f"{names[0]} … {names[-1]} ({len(names)} layers)",)
    return str(knobs.replace(**short))


_NAMES = 3
"""So many layers are told by name."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Advice:
    """What was tried of a step on a GPU, and what fits."""

    gpu: gpu_catalogue.Gpu
    as_written: Outcome
    options: tuple[Option, ...]
    """Settings that fit, cheapest first; another GPU is the last. None is beaten by another of them in everything."""
    tried: tuple[Outcome, ...]
    """Every setting that was run at the GPU asked for, in the order in which it was."""
    errors: dict[Knobs, BaseException]
    """What settings raised that do not suit the step, such as LoRA on a model without linear layers."""
    largest: dict[Knobs, Largest]
    """The largest batch of settings, of those told and of some that do not fit at the batch of the step."""
    same: frozenset[Knobs] = frozenset()
    """Of the settings that were tried those that train the same as the step as written."""
    too_small: Outcome | None = None
    """The step as written on the largest GPU of the catalogue where it does not fit there; what it misses is margin."""

    @property
    def fits(self) -> bool:
        """Whether the step fits as written."""
        return self.as_written.fits

    @property
    def nearest(self) -> Outcome:
        """Of the settings with the step's own batch the one that needs least; where none fits, that misses by least."""
        own = (outcome for outcome in self.tried if outcome.samples == self.as_written.samples)
        return min(own, key=lambda outcome: outcome.peak_reserved)

    @property
    def points(self) -> tuple[Point, ...]:
        """All that was tried, as points of the trade-off chart."""
        return tuple(point(outcome, self.as_written) for outcome in self.tried)

    @property
    def frontier(self) -> tuple[Outcome, ...]:
        """What trains the same, fits or not, and that no other such beats in both time and memory, quickest first."""
        same = [outcome for outcome in self.tried if outcome.knobs in self.same]
        pairs = [(slow_down(outcome, self.as_written), outcome.peak_reserved) for outcome in same]
        return tuple(same[number] for number in frontier(pairs))

    def to_pandas(self) -> pandas.DataFrame:
        """One row an option, cheapest first, indexed by its knobs in words; sizes in bytes.

        Columns `gpu`, `peak_allocated`, `peak_reserved`, `margin`, `extra_flops`, `slow_down`, `alters`,
        `largest_batch`, `notes` and `code`.
        """
        import pandas

        columns = (
            "gpu peak_allocated peak_reserved margin extra_flops slow_down alters largest_batch notes code".split()
        )
        rows = [
            {
                "setting": str(option.knobs),
                "gpu": option.outcome.gpu,
                "peak_allocated": option.outcome.peak_allocated,
                "peak_reserved": option.outcome.peak_reserved,
                "margin": option.outcome.margin,
                "extra_flops": option.extra_flops,
                "slow_down": option.slow_down,
                "alters": option.alters,
                "largest_batch": None if option.largest is None else option.largest.samples,
                "notes": " ".join(option.notes),
                "code": option.code,
            }
            for option in self.options
        ]
        table = pandas.DataFrame(rows, columns=["setting", *columns]).set_index("setting")
        return table.astype({"largest_batch": "Int64"})

    def __repr__(self) -> str:
        numbered = [
            f"{number}. {option}{' (another training)' if option.alters else ''}"
            for number, option in enumerate(self.options, start=1)
        ]
        return "\n".join([*self.sentences, *numbered])

    @property
    def sentences(self) -> tuple[str, ...]:
        """What is said before the options."""
        return (self._first_line(), *self._misses(), *self._last_words(), *self._title())

    def _first_line(self) -> str:
        written, name = self.as_written, self.gpu.name
        usable = "" if size_text(self.gpu.capacity) in name else f" ({size_text(self.gpu.capacity)} usable)"
        needs = f"as written: {size_text(written.peak_reserved)} reserved"
        if written.fits:
            return f"It fits {needs}, {size_text(written.margin)} less than the {name} has{usable}."
        if written.margin < 0:
            line = f"It does not fit {needs}, {size_text(-written.margin)} more than the {name} has{usable}."
        else:
            line = f"It does not fit {needs} of what the {name} has{usable}, in pieces that are too small."
        found = self.largest.get(Knobs())
        if found is not None and found.samples:
            return f"{line} A batch of {found.samples} would fit."
        alone = written.constant > written.capacity
        why = f": weights, gradients and optimizer state alone take {size_text(written.constant)}" if alone else ""
        return f"{line} Not even a batch of 1 would{why}." if found is not None else line

    def _misses(self) -> Iterator[str]:
        """By how much the nearest misses where nothing fits the batch of the step."""
        written = self.as_written
        if any(option.knobs.gpu is None and option.knobs.batch is None for option in self.options):
            return
        least = self.nearest
        same = min((one for one in self.tried if one.knobs in self.same), key=lambda one: one.peak_reserved)
        yield (
            f"Nothing that was tried fits with the batch of {written.samples}, in {len(self.tried)} settings. Nearest "
            f"is {_missing(same)}."
        )
        if least.knobs not in self.same:
            yield f"Nearest with another training is {_missing(least)}."
        none = [knobs for knobs, found in self.largest.items() if not found.samples and knobs != Knobs()]
        if none:
            yield f"Not even a batch of 1 fits with {'; '.join(map(setting_text, none))}."

    def _last_words(self) -> Iterator[str]:
        """What the largest GPU lacks."""
        if self.too_small is not None:
            name, missing = gpu_catalogue.find(self.too_small.gpu).name, max(-self.too_small.margin, 0)
            yield f"As written it fits no GPU of the catalogue: the largest, the {name}, misses {size_text(missing)}."

    def _title(self) -> Iterator[str]:
        here = [option for option in self.options if option.knobs.gpu is None]
        if any(option.knobs.batch is None for option in here):
            yield f"{len(self.tried)} settings were run. Those that fit, cheapest first:"
        elif here:
            yield "What fits with another batch or GPU, cheapest first:"
        elif self.options:
            yield "What fits on another GPU:"


def _missing(outcome: Outcome) -> str:
    missing = f"{size_text(-outcome.margin)} too much" if outcome.margin < 0 else "in pieces that are too large"
    return f"{setting_text(outcome.knobs)}, which needs {size_text(outcome.peak_reserved)}: {missing}"


def rank(option: Option) -> tuple[Any, ...]:
    """The place of an option among others: the cheapest has the smallest."""
    count = len(option.knobs.changed())
    return (count > 0, option.alters, option.slow_down, count, option.outcome.peak_reserved, str(option.knobs))


def unbeaten(options: list[Option]) -> list[Option]:
    """Ranked options without those that an earlier one equals or beats in all, or does as quickly with fewer knobs.

    What alters the training is beaten only by what alters no more of it.
    """
    kept: list[Option] = []
    for option in options:
        knobs = option.knobs.changed().items()
        simpler = (other for other in options if 0 < len(other.knobs.changed()) < len(knobs))
        idle = any(
            other.knobs.changed().items() <= knobs and other.slow_down <= option.slow_down * _QUICKER
            for other in simpler
        )
        if not idle and not any(_beats(other, option) for other in kept):
            kept.append(option)
    return kept


def _beats(one: Option, other: Option) -> bool:
    """Whether an option is as good as another in everything, or nearly so in time and memory."""
    return (
        one.slow_down <= other.slow_down * _QUICKER
        and one.outcome.peak_reserved <= other.outcome.peak_reserved * _LEANER
        and len(one.knobs.changed()) <= len(other.knobs.changed())
        and one.altered <= other.altered
        and _rounds(one) <= _rounds(other)
        and one.outcome.samples >= other.outcome.samples
    )


def _rounds(option: Option) -> bool:
    # Another precision trains the same and rounds otherwise: it does not stand for a setting that keeps every bit.
    return option.knobs.precision is not Precision.AS_WRITTEN
