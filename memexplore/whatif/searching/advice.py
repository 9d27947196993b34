"""Advice as a value: settings that fit, cheapest first, and what was tried to find them."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from memexplore import devices
from memexplore.tradeoffs import Point, frontier
from memexplore.units import size_text
from memexplore.whatif.knobs import Knobs, Precision
from memexplore.whatif.searching.measured import Measured, point, slow_down
from memexplore.whatif.searching.moves import Largest

if TYPE_CHECKING:
    import pandas

_NOTEWORTHY = 1.01
"""A knob more that makes a step quicker by less than 1 % is not worth its lines where it fits without."""


class Option(NamedTuple):
    """One setting that fits, as it was run; sizes in bytes."""

    measured: Measured
    slow_down: float
    """Expected time of a sample over that as written on the GPU asked for."""
    extra_flops: float
    """Share of FLOPs of a sample beyond those as written."""
    alters: bool
    """Whether another training comes of it: a smaller batch, another optimizer, fewer or coarser weights."""
    largest: Largest | None
    """The largest batch that fits with it, None where none was looked for."""
    code: str
    """Its lines of plain PyTorch."""

    @property
    def knobs(self) -> Knobs:
        """The setting."""
        return self.measured.knobs

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person has to know, one sentence each."""
        return self.measured.applied.notes

    def __str__(self) -> str:
        words = [f"{size_text(self.measured.peak_reserved)} reserved, {size_text(self.measured.margin)} to spare"]
        if not math.isnan(self.slow_down):
            words.append(f"{self.slow_down:.2f} times the time")
        if not math.isnan(self.extra_flops) and abs(self.extra_flops) >= 0.005:
            words.append(f"{self.extra_flops * 100:+.0f} % FLOPs")
        if self.largest is not None and self.largest.samples:
            least = "" if self.largest.proven else "at least "
            words.append(f"{least}batch {self.largest.samples} would fit")
        return f"{self.knobs}: {', '.join(words)}"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Advice:
    """What was tried of a step on a GPU, and what fits."""

    gpu: devices.Gpu
    as_written: Measured
    options: tuple[Option, ...]
    """Settings that fit, cheapest first; another GPU is the last. None is beaten by another of them in everything."""
    tried: tuple[Measured, ...]
    """Every setting that was run at the GPU asked for, in the order in which it was."""
    errors: dict[Knobs, BaseException]
    """What settings raised that do not suit the step, such as LoRA on a model without linear layers."""
    largest: dict[Knobs, Largest]
    """The largest batch of settings, of those told and of some that do not fit at the batch of the step."""

    @property
    def fits(self) -> bool:
        """Whether the step fits as written."""
        return self.as_written.fits

    @property
    def nearest(self) -> Measured:
        """The setting that needs least memory of those tried; where none fits, the one that misses by least."""
        return min(self.tried, key=lambda measured: measured.peak_reserved)

    @property
    def points(self) -> tuple[Point, ...]:
        """All that was tried, as points of the trade-off chart."""
        return tuple(point(measured, self.as_written) for measured in self.tried)

    @property
    def frontier(self) -> tuple[Measured, ...]:
        """Settings that no other beats in both time and memory, whether or not they fit, quickest first."""
        pairs = [(slow_down(measured, self.as_written), measured.peak_reserved) for measured in self.tried]
        return tuple(self.tried[number] for number in frontier(pairs))

    def to_pandas(self) -> pandas.DataFrame:
        """One row an option, cheapest first, indexed by its knobs in words; sizes in bytes.

        Columns `gpu`, `peak_allocated`, `peak_reserved`, `margin`, `extra_flops`, `slow_down`, `alters`,
        `largest_batch` (missing where none was looked for), `notes` and `code`.
        """
        import pandas

        columns = (
            "gpu peak_allocated peak_reserved margin extra_flops slow_down alters largest_batch notes code".split()
        )
        rows = [
            {
                "setting": str(option.knobs),
                "gpu": option.measured.gpu,
                "peak_allocated": option.measured.peak_allocated,
                "peak_reserved": option.measured.peak_reserved,
                "margin": option.measured.margin,
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
        written = self.as_written
        needs = f"as written: {size_text(written.peak_reserved)} reserved"
        has = f"the {self.gpu.name} has ({size_text(self.gpu.capacity)} usable)"
        if written.fits:
            lines = [f"It fits {needs}, {size_text(written.margin)} less than {has}."]
        elif written.margin < 0:
            lines = [f"It does not fit {needs}, {size_text(-written.margin)} more than {has}."]
        else:
            lines = [f"It does not fit {needs} of what {has}, in pieces that are too small."]
        found = self.largest.get(Knobs())
        if not written.fits and found is not None and found.samples:
            lines[0] += f" A batch of {found.samples} would fit."
        here = [option for option in self.options if option.knobs.gpu is None]
        if not here:
            near = self.nearest
            lines.append(
                f"Nothing that was tried fits; nearest is {near.knobs}, which needs {size_text(near.peak_reserved)}: "
                f"{size_text(max(-near.margin, 0))} too much."
            )
        else:
            lines.append(f"{len(self.tried)} settings were run. Those that fit, cheapest first:")
        alter = " (another training)"
        lines += [
            f"{number}. {option}{alter if option.alters else ''}" for number, option in enumerate(self.options, start=1)
        ]
        return "\n".join(lines)


def rank(option: Option) -> tuple[Any, ...]:
    """The place of an option among others: the cheapest has the smallest."""
    count = len(option.knobs.changed())
    return (count > 0, option.alters, option.slow_down, count, option.measured.peak_reserved, str(option.knobs))


def unbeaten(options: list[Option]) -> list[Option]:
    """Ranked options without those that an earlier one equals or beats in all, or does as quickly with fewer knobs."""
    kept: list[Option] = []
    for option in options:
        mine, knobs = _worth(option), option.knobs.changed().items()
        beaten = any(all(its <= own for its, own in zip(_worth(other), mine, strict=True)) for other in kept)
        simpler = (other for other in options if 0 < len(other.knobs.changed()) < len(knobs))
        idle = any(
            other.knobs.changed().items() <= knobs and other.slow_down <= option.slow_down * _NOTEWORTHY
            for other in simpler
        )
        if not beaten and not idle:
            kept.append(option)
    return kept


def _worth(option: Option) -> tuple[float, ...]:
    measured, knobs = option.measured, option.knobs
    # Another precision trains the same and rounds otherwise: it does not stand for a setting that keeps every bit.
    rounds = knobs.precision is not Precision.AS_WRITTEN
    return (option.slow_down, measured.peak_reserved, len(knobs.changed()), option.alters, rounds, -measured.samples)
