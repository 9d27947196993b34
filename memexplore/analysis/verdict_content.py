"""Put the verdict on a run into words: a headline, a detail, and the lines of code that it is about.

Every surface (widget, page, command line, reprs) shows the result of `verdict_content`; nothing else says whether a run
fits or what ended it.
"""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

from memexplore.allocator.smallest import Need
from memexplore.analysis.budget import budget, least_capacity, limit_setter, owner, short_name
from memexplore.analysis.curves import cached_by_tape, category_bytes, curve, peak
from memexplore.analysis.error_range import Range, need_range
from memexplore.analysis.growth import Leak, leak
from memexplore.analysis.levers import lever
from memexplore.analysis.location import location_text
from memexplore.analysis.need import need, need_with_expandable_segments, retries
from memexplore.analysis.places import Place, name_cells, place, places
from memexplore.analysis.rank import most_of_nccl, nccl_text, rank_text
from memexplore.analysis.verdict import Verdict, caught_requests, caught_text, failed_request, stop_text, verdict
from memexplore.tape import Category, Ending, Os, Source, Tape
from memexplore.text.units import size_text

TIGHT = 0.05
"""A run fits tightly if less than this share of the device is left."""
_ROOMY = 0.5
"""A run that uses less than this share of the device needs no advice."""
_PLURALS = {
    Category.PARAMETER: "parameters",
    Category.BUFFER: "buffers",
    Category.GRADIENT: "gradients",
    Category.ACTIVATION: "activations",
    Category.INPUT: "inputs",
    Category.TEMPORARY: "temporaries",
    Category.WORKSPACE: "workspaces",
    Category.UNKNOWN: "of unknown kind",
    Category.GATHERED_PARAMETER: "gathered parameters",
    Category.GRADIENT_BUCKET: "gradient buckets",
    Category.COMMUNICATION_BUFFER: "communication buffers",
}
_LINE_AT_END = re.compile(r"\((?P<line>[^()]+:\d+)\)$")


class Level(enum.StrEnum):
    """What a verdict means for the person who reads it."""

    FITS = "fits"
    TIGHT = "tight"
    """Fits with less than 5 % of the device or the error of the prediction left, or by giving back cached memory."""
    GROWING = "growing"
    """Fits so far, and memory grows from step to step."""
    OOM = "oom"
    ERROR = "error"
    """An error or an interrupt ended the program."""
    NONE = "none"
    """Nothing to judge: no capacity, or nothing ran on the GPU."""


class VerdictContent(NamedTuple):
    """The verdict on a run; sizes in bytes."""

    level: Level
    headline: str
    detail: str
    """The peak, its largest categories and what lowers them, and the origin of the numbers."""
    where: tuple[Place, ...]
    """Where the run stops or what grows: the innermost line of the user's code first, then the rest of its stack."""
    used: int
    """Peak reserved of the tape."""
    capacity: int | None
    needed: int
    """The smallest capacity with which the whole run goes through; of a run that stopped at least."""
    device: str
    """Short name, such as ``T4``."""
    grows: Place | None = None
    """The user's line whose memory grows from step to step."""

    @property
    def text(self) -> str:
        """Headline and detail, one line each."""
        return f"{self.headline}\n{self.detail}"


@cached_by_tape
def verdict_content(tape: Tape) -> VerdictContent:
    """Return the verdict on a run in words.

    A run out of memory needs what `tape.whole` needs. Without it the verdict gives the bytes held and requested when it
    stopped, as "more than".

    >>> from memexplore.tape import Meta, Phase, Source
    >>> meta = Meta(Source.PREDICTED, "Tesla T4", gpu="T4", capacity=8 << 20, versions={"torch": "2.13.0"})
    >>> tape = Tape.from_columns({"address": [0, 4096], "size": [3072, 1024], "step": [1, 1], "module": [0, 0],
    ...     "category": [Category.ACTIVATION, Category.INPUT], "phase": [Phase.FORWARD] * 2}, modules=["conv1"],
    ...     meta=meta)
    >>> print(verdict_content(tape).text)
    Fits: needs 2.00 MiB · T4 has 8.00 MiB · 6.00 MiB to spare
    Peak 4.00 KiB allocated in step 1, forward of conv1 · 75 % activations, 25 % inputs · predicted, torch 2.13

    Raises ValueError for a tape that is not placed.
    """
    match verdict(tape):
        case Verdict.OOM:
            return _out_of_memory(tape)
        case Verdict.NOT_ON_GPU:
            return _content(tape, Level.NONE, _not_on_gpu(tape), [tape.meta.advice or _ADVICE, _source(tape)])
        case Verdict.PARTLY_MEASURED:
            return _partly_measured(tape)
        case Verdict.ERROR | Verdict.INTERRUPTED:
            return _ended_early(tape)
        case _:
            return _growing(tape) or _fits(tape)


_ADVICE = 'Put the model and its batches on "cuda"'


def _content(
    tape: Tape,
    level: Level,
    headline: str,
    details: list[str],
    where: tuple[Place, ...] = (),
    needed: int | None = None,
    grows: Place | None = None,
) -> VerdictContent:
    used = peak(tape, "reserved")[0]
    return VerdictContent(
        level,
        headline,
        " · ".join(filter(None, [*details[:-1], nccl_text(tape), rank_text(tape), details[-1]])),
        where,
        used,
        tape.meta.capacity,
        used if needed is None else needed,
        _short_name(tape),
        grows,
    )


# -- runs that fit


def _fits(tape: Tape) -> VerdictContent:
    capacity = tape.meta.capacity
    if capacity is None:
        device = "the CPU" if tape.meta.device == "cpu" else tape.meta.device
        parts = [f"On {device}", _shares_and_lever(tape), _source(tape)]
        return _content(tape, Level.NONE, f"Peak {_held(tape)}{_at(tape)}", parts)
    required = _need(tape)
    has_room = required.without_pressure < capacity * _ROOMY
    caught = tuple(line for row in caught_requests(tape) for line in _places(tape, row)[:1])
    details = [
        f"Peak {_held(tape)}{_at(tape)}",
        _shares(tape) if has_room else _shares_and_lever(tape),
        _pressure(tape, required),
        caught_text(tape).removesuffix("."),
        _limit(tape),
        _source(tape),
    ]
    expected = _expected(tape, required.smallest)
    spare = capacity - required.smallest
    least = least_capacity(tape.meta) or capacity
    least_spare = min(spare - most_of_nccl(tape), least - expected.high)
    is_tight = least_spare < capacity * TIGHT or capacity < required.without_pressure
    rest = "" if spare > 0 else "nothing to spare"
    headline = (
        f"{'Fits tightly' if is_tight else 'Fits'}: {budget(required.smallest, capacity, owner(tape.meta), rest=rest)}"
    )
    if least < expected.high:
        headline = _may_not_fit(tape, required.smallest, expected, least)
        if expected.high > required.smallest:
            details.insert(-1, f"how such ranges compare with measurements: {_ACCURACY}")
    level = Level.TIGHT if is_tight else Level.FITS
    return _content(tape, level, headline, details, caught, needed=required.smallest)


_ESTIMATES = "workspaces of cuDNN are estimates"
_ACCURACY = "docs/accuracy.md#ranges"


def _expected(tape: Tape, needed: int) -> Range:
    """Return the range of what a run needs; only the need where a fifth of the device more or less decides nothing."""
    is_near = abs(needed - (tape.meta.capacity or 0)) < needed * _NEAR
    return need_range(tape if tape.whole is None else tape.whole, needed) if is_near else Range(needed, needed)


_NEAR = 0.2
"""Share of the need within which its range is found, as this takes many replays."""


def _may_not_fit(tape: Tape, needed: int, expected: Range, least: int) -> str:
    """Return the headline of a run that fits if all is as predicted, and not at the upper end of what is expected."""
    low, high = map(size_text, expected)
    needs = size_text(needed) if expected.high == needed else f"{low} to {high}, as {_ESTIMATES}"
    is_enough = expected.high <= (tape.meta.capacity or 0)
    rest = f", or {size_text(least)} if more lies outside PyTorch's allocator" if is_enough else ""
    return f"May not fit: needs {needs} · {_has(tape)}{rest}"


def _need(tape: Tape) -> Need:
    required = need(tape)
    assert required is not None, "it is known of every run that fits"
    return required


def _pressure(tape: Tape, required: Need) -> str:
    """Return what a run reserves with room for everything where it needs less, and what the difference costs."""
    if required.without_pressure <= required.smallest:
        return ""
    room = f"{size_text(required.without_pressure)} reserved where there is room"
    capacity = tape.meta.capacity
    if capacity is None or capacity >= required.without_pressure or failed_request(tape) >= 0:
        return room
    times = retries(tape)
    return f"{room}; here the allocator gives its cache back {times} time{'s' * (times != 1)}, which takes time"


def _growing(tape: Tape) -> VerdictContent | None:
    growing = leak(tape)
    if growing is None:
        return None
    grows = f"rows {growing.rate}"
    fits = tape.meta.capacity is not None
    headline = f"Fits now, but g{grows}" if fits else f"G{grows}"
    if growing.full_at is not None:
        headline += f": full at about {growing.unit} {about(growing.full_at):,}"
    where = _places(tape, growing.row)
    held = f"at {where[0].text} " if where else ""
    required = need(tape) if fits else None
    used = peak(tape, "reserved")[0] if required is None else required.smallest
    category = Category(int(tape.category[growing.row])).text.capitalize()
    kept = f"{category} memory allocated {held}is kept from {growing.unit} to {growing.unit}"
    so_far = f"needs {size_text(used)} so far, {_has(tape)}" if fits else ""
    details = [kept, so_far, _shares(tape), _limit(tape), _source(tape)]
    return _content(tape, Level.GROWING, headline, details, where, grows=where[0] if where else None)


def about(number: int) -> int:
    """Return a number with two digits.

    >>> about(896), about(12_345), about(7)
    (900, 12000, 7)
    """
    return round(number, min(2 - len(str(number)), 0))


# -- runs out of memory


def _out_of_memory(tape: Tape) -> VerdictContent:
    row = failed_request(tape)
    least = int(curve(tape)[row]) + int(tape.size[row])
    growing, required = leak(tape), need(tape)
    needed = least if required is None else required.smallest
    details = [
        "" if tape.whole is None else f"Peak {_held(tape.whole)}",
        # Of a run that failed itself the post-mortem knows more: what the memory is for, and who holds it.
        _shares_and_lever(tape.whole or tape)
        if growing is None and required is not None
        else _shares(tape.whole or tape),
        "" if growing is None else f"needs {'more than ' * (required is None)}{size_text(needed)}",
        "" if required is None else _pressure(tape, required),
        _with_expandable_segments(tape),
        _perhaps(tape, required),
        _spilled(tape, row, required, least) or f"stops {stop_text(tape)}",
        _gaps(tape, row) if required is None else "",
        "the program caught the error and allocated nothing afterwards" if tape.meta.ending is Ending.COMPLETED else "",
        caught_text(tape).removesuffix("."),
        _limit(tape),
        _sources(tape),
    ]
    where_grows = _places(tape, growing.row)[:1] if growing is not None else ()
    return _content(
        tape,
        Level.OOM,
        _over(tape, row, required, least) if growing is None else _grew(tape, growing),
        details,
        (*_places(tape, row), *where_grows),
        needed,
        where_grows[0] if where_grows else None,
    )


def _grew(tape: Tape, growing: Leak) -> str:
    """Return that growth has filled the device: a larger one would only be full later."""
    capacity = "" if tape.meta.capacity is None else f" · {_has(tape)}"
    return f"Out of memory: grows {growing.rate}{capacity}"


def _over(tape: Tape, row: int, required: Need | None, least: int) -> str:
    """Return how much more a run needs than there is."""
    capacity = tape.meta.capacity
    more, size = ("more than ", least) if required is None else ("", required.smallest)
    if capacity is None:
        return f"Out of memory: needs {more}{size_text(size)}"
    if size > capacity:
        return f"N{budget(size, capacity, owner(tape.meta), more=more)[1:]}"
    # There was enough memory, in gaps between blocks, or too little for a new segment.
    free = capacity - int(curve(tape, "active")[row])
    share = f"{size_text(free)} of {size_text(capacity)}"
    where = "the limit of this process" if tape.meta.capacity_without_limit is not None else _short_name(tape)
    return f"Does not fit {where}: {share} free, but no piece for {size_text(int(tape.size[row]))}"


def _with_expandable_segments(tape: Tape) -> str:
    """Return that a run out of memory fits with expandable segments; empty if it does not, or if that is unknown."""
    capacity = tape.meta.capacity
    if capacity is None or tape.whole is None or peak(tape.whole)[0] > capacity:
        return ""
    required = need_with_expandable_segments(tape.whole)
    if required is None or required.smallest > capacity:
        return ""
    return f"with expandable_segments:True it fits and needs {size_text(required.smallest)}"


def _perhaps(tape: Tape, required: Need | None) -> str:
    """Return the lower end of an estimate with which the run would fit; empty if it would not."""
    if required is None or tape.whole is None:
        return ""
    low = _expected(tape, required.smallest).low
    return f"it may fit, as {_ESTIMATES}: needs {size_text(low)} or more" if low <= (tape.meta.capacity or 0) else ""


def _spilled(tape: Tape, row: int, required: Need | None, least: int) -> str:
    """Return what Windows would put into system memory, and from where on; empty where the run would end instead.

    Since R536 the driver does so with requests beyond the GPU, unless "CUDA - Sysmem Fallback Policy" in its control
    panel says otherwise (NVIDIA knowledge base, answer 5490). A limit on the process is torch's own and ends it.
    """
    meta = tape.meta
    can_spill = meta.os is Os.WINDOWS and meta.source is Source.PREDICTED and meta.capacity_without_limit is None
    if not can_spill or meta.capacity is None:
        return ""
    # The driver refuses nothing there, so the allocator gives nothing back.
    over = (least if required is None else required.without_pressure) - meta.capacity
    if over <= 0:
        # There is enough memory, in gaps between blocks: a new segment is what finds no place.
        over = int(tape.size[row])
    more = "more than " if required is None else ""
    return (
        f"on Windows {more}{size_text(over)} would be in system memory, which is slow, without an OutOfMemoryError "
        f"(the driver's sysmem fallback), first {stop_text(tape)}"
    )


def _gaps(tape: Tape, row: int) -> str:
    """Return the free memory by its place, where it would have been enough."""
    capacity, reserved = tape.meta.capacity, int(curve(tape, "reserved")[row])
    gaps = reserved - int(curve(tape, "active")[row])
    left = max(capacity - reserved, 0) if capacity is not None else 0
    if gaps + left < int(tape.size[row]):
        return ""
    parts = [f"{size_text(gaps)} in gaps inside segments" if gaps else "", f"{size_text(left)} outside" if left else ""]
    return f"free were {' and '.join(filter(None, parts))}"


# -- runs that an error ended, and runs beside the GPU


def _ended_early(tape: Tape) -> VerdictContent:
    first = "Interrupted" if verdict(tape) is Verdict.INTERRUPTED else "Ended by an error"
    headline = f"{first}: {name_cells(tape.meta.error)}".removesuffix(": ")
    line = _LINE_AT_END.search(tape.meta.error)
    notes = tape.meta.notes if verdict(tape) is Verdict.ERROR else ()
    assumed = [note.removeprefix("assumed: ") for note in notes if note.startswith("assumed: ")]
    parts = [
        f"Peak so far {_held(tape)}{_at(tape)}" if peak(tape)[0] else "Nothing was allocated on the GPU so far",
        _has(tape) if tape.meta.capacity is not None else "",
        _shares(tape),
        caught_text(tape).removesuffix("."),
        f"assumed before the error: {name_cells('; '.join(assumed))}" if assumed else "",
        _limit(tape),
        _source(tape),
    ]
    return _content(tape, Level.ERROR, headline, parts, (place(line["line"]),) if line else ())


def _partly_measured(tape: Tape) -> VerdictContent:
    """Return the verdict on a program with child processes that were not measured."""
    own = (
        f"Peak of the program's own process {_held(tape)}{_at(tape)}"
        if peak(tape)[0]
        else "Its own process put nothing there"
    )
    parts = [own, _has(tape) if tape.meta.capacity is not None else "", _shares(tape), _source(tape)]
    return _content(tape, Level.NONE, f"Not all was measured: {tape.meta.unmeasured}", parts)


def _not_on_gpu(tape: Tape) -> str:
    """Return the headline for a program that came to its end without the GPU."""
    device, models = tape.meta.device, tape.meta.trained_on_cpu
    if models:
        trained = models[0] if len(models) == 1 else f"{models[0]} and {len(models) - 1} more"
        first = f"Nothing trained on the {device}: {trained} trained on the CPU"
    else:
        first = f"Nothing ran on the {device}: the code put no tensor on it"
    return f"{first}; peak of the rest {_held(tape)}" if peak(tape)[0] else first


# -- parts


def _places(tape: Tape, row: int) -> tuple[Place, ...]:
    return places(tape.stacks[tape.stack[row]]) if tape.stack[row] >= 0 else ()


def _held(tape: Tape) -> str:
    """Return the peak allocated, and on a device without capacity the peak reserved where it says more."""
    allocated, reserved = peak(tape)[0], peak(tape, "reserved")[0]
    held = f"{size_text(allocated)} allocated"
    if tape.meta.capacity is None and reserved != peak(tape, "active")[0]:
        held += f" ({size_text(reserved)} reserved)"
    return held


def _at(tape: Tape) -> str:
    location = location_text(tape, peak(tape)[1])
    return f" in {location}" if location else ""


def _shares(tape: Tape) -> str:
    """Return the two largest categories at the peak allocated with their shares."""
    return ", ".join(f"{share * 100:.0f} % {_PLURALS.get(kind, kind.text)}" for kind, share in _largest(tape))


def _shares_and_lever(tape: Tape) -> str:
    """Return the two largest categories with their shares, and what lowers the larger one."""
    levers = filter(None, (lever(tape, kind) for kind, _ in _largest(tape)[:1]))
    return ": try ".join([_shares(tape), *levers])


def _largest(tape: Tape) -> list[tuple[Category, float]]:
    """Return the two largest categories at the peak allocated with their shares, none below half a per cent."""
    allocated, row = peak(tape)
    shares = [(kind, size / max(allocated, 1)) for kind, size in zip(Category, category_bytes(tape, row), strict=True)]
    return sorted((share for share in shares if share[1] >= 0.005), key=lambda share: -share[1])[:2]


def _has(tape: Tape) -> str:
    capacity = tape.meta.capacity or 0
    return f"{owner(tape.meta)} {size_text(capacity)}"


def _limit(tape: Tape) -> str:
    """Return the limit on the memory of the process and what the GPU has beside; empty without a limit."""
    capacity = tape.meta.capacity_without_limit
    if capacity is None:
        return ""
    return f"{limit_setter(tape.meta)} sets this limit: {_short_name(tape)} has {size_text(capacity)}"


def _short_name(tape: Tape) -> str:
    return short_name(tape.meta.gpu or tape.meta.device)


def _sources(tape: Tape) -> str:
    """Return the origin of the numbers of a run that stopped; the whole run may have another one."""
    if tape.whole is None or tape.whole.meta.source is tape.meta.source:
        return _source(tape)
    return f"the need is {tape.whole.meta.source}, the stop {_source(tape)}"


def _source(tape: Tape) -> str:
    torch = tape.meta.versions.get("torch", "")
    release = ".".join(torch.split("+")[0].split(".")[:2])
    return f"{tape.meta.source}, torch {release}" if release else str(tape.meta.source)
