"""What a comparison on somebody's GPU says, as a small object for an issue: without names, paths, code and values."""

from __future__ import annotations

import itertools
from typing import Any

from memexplore.analysis.comparison import Comparison, Differing

FORMAT = 1
_NAMESPACES = ("aten::", "prims::", "c10d::", "_c10d_functional::", "torchvision::")
"""Those of ops that everybody has; the name of any other op is the user's or a library's."""
_VERSIONS = ("torch", "memexplore", "cuda", "cudnn", "driver", "module loading")
_MOST_SIZES = 20


def shared(comparison: Comparison) -> dict[str, Any]:
    """Return the card, versions, peaks and differing requests of a comparison, for JSON; sizes in bytes.

    Of a request that differs it has the op, its library, the shapes, and the sizes, each pair of sizes once.

    >>> from memexplore.analysis.comparison import compare_tapes
    >>> from memexplore.tape import Meta, Source, Tape
    >>> tape = Tape.from_columns({"address": [1], "size": [512]}, meta=Meta(Source.MEASURED, "Tesla T4", gpu="T4"))
    >>> result = shared(compare_tapes(tape, tape[:]))
    >>> result["gpu"], result["peaks"]["allocated"], result["requests"]
    ('Tesla T4', {'measured': 512, 'predicted': 512}, {'measured': 1, 'predicted': 1, 'equal': 1})
    """
    meta, (measured, predicted) = comparison.measured.meta, comparison.requests
    result: dict[str, Any] = {
        "memexplore measurement": FORMAT,
        "gpu": meta.device,
        "total": meta.total,
        "os": meta.os.value,
        "versions": {name: meta.versions[name] for name in _VERSIONS if name in meta.versions},
        "settings": meta.settings,
        "peaks": {name: each._asdict() for name, each in comparison.peaks.items()},
        "requests": {"measured": measured, "predicted": predicted, "equal": comparison.equal},
        "differing": [_differing(group) for group in comparison.differing],
    }
    if comparison.outside is not None:
        low, high = comparison.outside_range
        result["outside"] = {**comparison.outside._asdict(), "low": low, "high": high}
    return result


def _differing(group: Differing) -> dict[str, Any]:
    sizes = itertools.islice(dict.fromkeys(group.sizes), _MOST_SIZES)
    return {
        "change": group.change.value,
        "op": group.op if group.op.startswith(_NAMESPACES) else "",
        "library": group.library,
        "category": group.category,
        "phase": group.phase,
        "count": len(group.sizes),
        "shapes": list(group.tensors[:_MOST_SIZES]),
        "sizes": [list(pair) for pair in sizes],
    }
