"""`Advice`: the settings that fit a GPU, cheapest first, and all that were tried; prints as sentences and a table."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from memexplore.analysis.budget import budget, owner_of
from memexplore.analysis.tradeoffs import Point, frontier
from memexplore.figures.values import paragraphs
from memexplore.hardware import catalogue
from memexplore.hardware.rented import RentedSet
from memexplore.run.knobs.knob import Group
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.knobs.precision import Precision
from memexplore.run.programs.outcome import Outcome, point, slow_down
from memexplore.run.search.candidates import LargestBatch
from memexplore.run.search.results_table import Line, html_table, sent_cells, sent_columns, text_table
from memexplore.run.search.setting_text import on_base, on_other_gpus, setting_text
from memexplore.run.search.trainings import training_text
from memexplore.text.units import signed_percent, size_text

if TYPE_CHECKING:
    import pandas

_TIME_TOLERANCE, _MEMORY_TOLERANCE = 1.01, 1.02
"""An option is listed only if it saves at least 1 % of the time or 2 % of the memory of another."""
_LITTLE = 0.05
"""Small changes may be enough where at most this share of the memory of the GPU is missing."""


class Subject(enum.StrEnum):
    """What an advice is for."""

    STEP = enum.auto()
    LOOP = enum.auto()
    """A cell or a script with a loop of its own, whose samples are those of a run."""


class Rented(NamedTuple):
    """A set of GPUs on which a setting fits."""

    knobs: Knobs
    set: RentedSet
    source: str
    """Where the prices are from."""


class Option(NamedTuple):
    """One setting that fits and was run; sizes in bytes."""

    outcome: Outcome
    slow_down: float
    """Expected time of a sample over the time as written on the given GPU; NaN if unknown."""
    extra_flops: float
    """Share of FLOPs of a sample beyond those as written; NaN if unknown."""
    altered: frozenset[str]
    """The knobs that change what is trained: a smaller batch or input, fewer or coarser weights."""
    largest: LargestBatch | None
    """The largest batch that fits with this setting; None during the search."""
    code: str
    """The setting as lines of plain PyTorch."""

    @property
    def knobs(self) -> Knobs:
        """The setting."""
        return self.outcome.knobs

    @property
    def alters(self) -> bool:
        """Whether the setting changes what is trained."""
        return bool(self.altered)

    @property
    def training(self) -> str:
        """How the setting trains differently, in sentences; empty where it trains the same."""
        return training_text(self.knobs, self.altered)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of applying the knobs, one sentence each."""
        return self.outcome.applied.notes

    @property
    def largest_text(self) -> str:
        """The largest batch as text: empty if unknown, ``≥ 64`` if the next larger one was not run."""
        if self.largest is None or self.largest.error or not self.largest.samples:
            return ""
        return f"{'' if self.largest.proven else '≥ '}{self.largest.samples}"

    def __str__(self) -> str:
        parts = [f"needs {size_text(self.outcome.needed)}, {size_text(self.outcome.margin)} to spare"]
        if not math.isnan(self.slow_down):
            parts.append("as fast" if abs(self.slow_down - 1) < 0.005 else f"{self.slow_down:.2f} times the time")
        if not math.isnan(self.extra_flops) and abs(self.extra_flops) >= 0.005:
            parts.append(f"{signed_percent(self.extra_flops)} FLOPs")
        if self.largest_text:
            own = self.knobs.batch is not None or bool(self.knobs.variables)
            parts.append("the largest that fits" if own else f"largest batch {self.largest_text}")
        return f"{setting_text(self.knobs)}: {', '.join(parts)}"


_WRITTEN = Knobs()
_COLUMNS = ("largest batch", "training")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Advice:
    """The settings of a step that fit a GPU, and every setting that was tried."""

    gpu: catalogue.Gpu
    as_written: Outcome
    options: tuple[Option, ...]
    """Settings that fit, cheapest first, another GPU last. None is worse than another in time, memory and training."""
    tried: tuple[Outcome, ...]
    """Every setting that was run on the given GPU, in the order of the runs."""
    errors: dict[Knobs, BaseException]
    """Errors of settings that the step does not support, such as LoRA on a model without linear layers."""
    largest: dict[Knobs, LargestBatch]
    """The largest batch of the options and of some settings that do not fit with the batch of the step."""
    same_training: frozenset[Knobs] = frozenset()
    """The tried settings that train the same as the step as written."""
    too_small: Outcome | None = None
    """The step as written on the largest GPU of the catalogue, if it does not fit there."""
    rented: Rented | None = None
    """The cheapest set of GPUs to rent on which the step fits, if it does not fit as written."""
    base: Knobs = _WRITTEN
    """The batch and the input size of the step where they are not those written; the settings do not name them."""
    subject: Subject = Subject.STEP
    cancelled: bool = False
    """Whether the search was interrupted: the options are those found so far, some without their largest batch."""

    @property
    def fits(self) -> bool:
        """Whether the step fits as written."""
        return self.as_written.fits

    @property
    def nearest(self) -> Outcome:
        """The tried setting with the batch of the step that needs the least memory."""
        # The samples of a loop are those of a run, which may end earlier.
        is_loop = self.subject is Subject.LOOP
        full_batch = (one for one in self.tried if is_loop or one.samples == self.as_written.samples)
        return min(full_batch, key=lambda outcome: outcome.needed)

    @property
    def points(self) -> tuple[Point, ...]:
        """The tried settings as points of the trade-off chart."""
        return tuple(point(outcome, self.as_written) for outcome in self.tried)

    @property
    def frontier(self) -> tuple[Outcome, ...]:
        """Settings that train the same, whether or not they fit, on the frontier of time and memory, fastest first."""
        same = [outcome for outcome in self.tried if outcome.knobs in self.same_training]
        pairs = [(slow_down(outcome, self.as_written), outcome.needed) for outcome in same]
        return tuple(same[number] for number in frontier(pairs))

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row per option, cheapest first, indexed by its knobs as text; sizes in bytes.

        Columns `gpu`, `peak_allocated`, `peak_reserved`, `needed`, `margin`, `extra_flops`, `slow_down`, `alters`,
        `largest_batch`, `notes` and `code`.
        """
        import pandas

        sizes = ["peak_allocated", "peak_reserved", "needed", "margin"]
        columns = ["gpu", *sizes, "extra_flops", "slow_down", "alters", "largest_batch", "notes", "code"]
        rows = [
            {
                "setting": str(option.knobs),
                "gpu": option.outcome.gpu,
                "peak_allocated": option.outcome.peak_allocated,
                "peak_reserved": option.outcome.peak_reserved,
                "needed": option.outcome.needed,
                "margin": option.outcome.margin,
                "extra_flops": option.extra_flops,
                "slow_down": option.slow_down,
                "alters": option.alters,
                "largest_batch": None if option.largest is None or option.largest.error else option.largest.samples,
                "notes": " ".join(option.notes),
                "code": option.code,
            }
            for option in self.options
        ]
        table = pandas.DataFrame(rows, columns=["setting", *columns]).set_index("setting")
        return table.astype({"largest_batch": "Int64"})

    def __repr__(self) -> str:
        """Return the answer in one line."""
        count = len(self.options)
        found = f"{count} setting{'' if count == 1 else 's'} to choose from" if count else "nothing fits"
        first = f", first {self.text_of(self.options[0])}" if count else ""
        fits, written = "fits" if self.fits else "does not fit", self._as_written.lower()
        return f"<Advice for {self.gpu.name}: {fits} {written} · {found}{first}>"

    def __str__(self) -> str:
        table = [text_table(self._lines(), self._columns)] if self.options else []
        return "\n".join([*self.sentences, *table, *self._trainings()])

    def _repr_html_(self) -> str:
        return html_table(self.sentences, self._lines(), self._columns) + paragraphs(list(self._trainings()))

    def _trainings(self) -> Iterator[str]:
        for number, option in enumerate(self.options, start=1):
            if option.training:
                yield f"Setting {number} trains differently: {option.training}"

    @property
    def _sent_columns(self) -> tuple[str, ...]:
        return sent_columns(option.outcome for option in self.options)

    @property
    def _columns(self) -> tuple[str, ...]:
        return _COLUMNS + self._sent_columns

    def _lines(self) -> list[Line]:
        return [
            Line(
                f"{number}. {self.text_of(option)}",
                option.outcome,
                option.slow_down,
                option.extra_flops,
                (
                    option.largest_text,
                    "changed" if option.alters else "the same",
                    *sent_cells(option.outcome, self._sent_columns),
                ),
            )
            for number, option in enumerate(self.options, start=1)
        ]

    @property
    def _as_written(self) -> str:
        return "As written" if self.base == Knobs() else f"With {self.base}"

    def text_of(self, option: Option) -> str:
        """Return the setting of an option as text, with the batch and the input size of `base`."""
        return setting_text(on_base(option.knobs, self.base))

    @property
    def sentences(self) -> tuple[str, ...]:
        """The answer in sentences, for above the options."""
        return (
            self._answer(),
            *self._little(),
            *self._nearest(),
            *self._largest_gpu(),
            *self._rented(),
            *self._ended(),
            *self._title(),
        )

    def _answer(self) -> str:
        written, needed = self.as_written, self.as_written.needed
        line = f"{self._as_written} it {budget(needed, self.gpu.capacity, owner_of(self.gpu))}."
        if self.gpu.limit is not None:
            line += " The limit is that of torch.cuda.set_per_process_memory_fraction."
        if written.fits:
            return line
        largest = self.largest.get(Knobs())
        if largest is None:
            return line
        if largest.error:
            return f"{line} No other batch can be run: {largest.error}."
        if largest.samples:
            return f"{line} A batch of {largest.samples} would fit."
        too_large = written.constant > written.capacity
        why = f": weights, gradients and optimizer state alone take {size_text(written.constant)}" if too_large else ""
        return f"{line} Not even a batch of 1 would{why}."

    def _little(self) -> Iterator[str]:
        if not misses_little(self.as_written):
            return
        missing = self.as_written.peak_allocated - self.as_written.capacity
        if missing > 0:
            share = missing / self.as_written.capacity
            what = f"Its peak allocated is only {size_text(missing)} ({share * 100:.1f} %) more than the GPU has"
        else:
            what = f"Its peak allocated is {size_text(-missing)} less than the GPU has, which is in pieces too small"
        yield f"{what}: small changes were run first."

    def _ended(self) -> Iterator[str]:
        if self.cancelled:
            yield "The search was stopped: there may be better settings."

    def _nearest(self) -> Iterator[str]:
        """The settings nearest to fitting, where none fits with the batch of the step."""
        written = self.as_written
        if any(not on_other_gpus(option.knobs) and not _is_smaller(option.knobs) for option in self.options):
            return
        least = self.nearest
        same = min((one for one in self.tried if one.knobs in self.same_training), key=lambda one: one.needed)
        batch = f" with the batch of {written.samples}" if self.subject is Subject.STEP else ""
        yield f"None of the {len(self.tried)} settings tried fits{batch}. The nearest is {_missing(same)}."
        if least.knobs not in self.same_training:
            yield f"The nearest that changes the training is {_missing(least)}."
        none = [knobs for knobs, largest in self.largest.items() if not largest.samples and not largest.error]
        never = [knobs for knobs in none if knobs != Knobs()]
        if never:
            yield f"Not even a batch of 1 fits with {'; '.join(map(setting_text, never))}."

    def _largest_gpu(self) -> Iterator[str]:
        """The memory missing on the largest GPU of the catalogue."""
        if self.too_small is not None:
            name, missing = catalogue.find(self.too_small.gpu).name, max(-self.too_small.margin, 0)
            fits = f"{self._as_written} it fits no GPU of the catalogue"
            yield f"{fits}: the largest, the {name}, lacks {size_text(missing)}."

    def _rented(self) -> Iterator[str]:
        if self.rented is not None:
            setting = self.rented.knobs.replace(gpu=None).without(Group.SEVERAL_GPUS)
            rest = "" if setting == Knobs() else f" with {setting_text(setting)}"
            yield f"The cheapest set to rent on which it fits{rest}: {self.rented.set} ({self.rented.source})."

    def _title(self) -> Iterator[str]:
        same_gpu = [option for option in self.options if not on_other_gpus(option.knobs)]
        if any(not _is_smaller(option.knobs) for option in same_gpu):
            count = len(self.tried)
            yield f"{'1 setting was' if count == 1 else f'{count} settings were'} run. These fit, cheapest first:"
        elif same_gpu:
            yield "With another batch or GPU, or several GPUs, these fit, cheapest first:"
        elif self.options:
            yield "On another GPU, or several, it fits:"


def _is_smaller(knobs: Knobs) -> bool:
    return knobs.batch is not None or bool(knobs.variables)


def misses_little(outcome: Outcome) -> bool:
    """Return whether few of the bytes of a GPU are missing, so that small changes may be enough.

    At most 5 % are missing for all that is allocated at the peak; the segments may need more.
    """
    return not outcome.fits and outcome.peak_allocated - outcome.capacity <= _LITTLE * outcome.capacity


def _missing(outcome: Outcome) -> str:
    return (
        f"{setting_text(outcome.knobs)}, which needs {size_text(outcome.needed)}: {size_text(-outcome.margin)} too much"
    )


def rank(option: Option) -> tuple[Any, ...]:
    """Return the key that sorts options by cost, cheapest first."""
    count = len(option.knobs.changed())
    return (count > 0, option.alters, option.slow_down, count, option.outcome.needed, str(option.knobs))


def undominated(options: list[Option]) -> list[Option]:
    """Drop ranked options that an earlier one equals or beats in everything, or that fewer knobs make as fast.

    An option that changes the training is beaten only by options that change no more of it.
    """
    kept: list[Option] = []
    for option in options:
        knobs = option.knobs.changed().items()
        simpler = (other for other in options if 0 < len(other.knobs.changed()) < len(knobs))
        needless = any(
            other.knobs.changed().items() <= knobs and other.slow_down <= option.slow_down * _TIME_TOLERANCE
            for other in simpler
        )
        if not needless and not any(_beats(other, option) for other in kept):
            kept.append(option)
    return kept


def _beats(one: Option, other: Option) -> bool:
    """Whether an option is at least as good as another in everything, within the tolerances of time and memory."""
    return (
        one.slow_down <= other.slow_down * _TIME_TOLERANCE
        and one.outcome.needed <= other.outcome.needed * _MEMORY_TOLERANCE
        and len(one.knobs.changed()) <= len(other.knobs.changed())
        and one.altered <= other.altered
        and _changes_rounding(one) <= _changes_rounding(other)
        and one.outcome.samples >= other.outcome.samples
    )


def _changes_rounding(option: Option) -> bool:
    # Another precision trains the same but rounds differently, so it cannot replace a setting that keeps every bit.
    return option.knobs.precision is not Precision.AS_WRITTEN
