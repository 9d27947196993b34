"""The controls of several GPUs in an explorer: their number, and what they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memexplore.knobs.choices import FsdpOffload, FsdpPrecision, Strategy
from memexplore.knobs.knobs import Knobs
from memexplore.knobs.layouts import FSDP, ON_ONE_GPU
from memexplore.knobs.report_text import STRATEGY_NAMES
from memexplore.notebook.knob import Knob, Option, numbers

_GROUP = "Several GPUs"
_COUNTS = (1, 2, 4, 8, 16, 32, 64)


def several_gpus_knobs() -> list[Knob]:
    """Return the controls; the batch is then that of each GPU."""
    strategies = {Strategy.AS_WRITTEN: "as written", **STRATEGY_NAMES}
    strategies[Strategy.FSDP2_NO_RESHARD] = "FSDP2, no resharding"  # as wide as the control
    precisions = {one: one.value for one in FsdpPrecision}
    offloads = {one: one.value for one in FsdpOffload}
    return [
        Knob(
            "gpus",
            "gpus",
            "GPUs",
            _GROUP,
            "slider",
            _with_gpus,
            lambda knobs: knobs.gpus or 1,
            lambda knobs: numbers(_COUNTS),
            unit="GPUs, each with this batch",
            unit_of_one="GPU",
        ),
        _choice("strategy", "Strategy", strategies),
        Knob(
            "tensor_parallel",
            "tensor_parallel",
            "GPUs that share a layer",
            _GROUP,
            "slider",
            lambda knobs, value: knobs.replace(tensor_parallel=None if value == 1 else value),
            lambda knobs: knobs.tensor_parallel or 1,
            lambda knobs: numbers(size for size in _COUNTS if (knobs.gpus or 1) % size == 0),
            unit="GPUs",
            unit_of_one="GPU, which has whole layers",
        ),
        _choice("fsdp_precision", "Precision of FSDP2", precisions),
        _choice("fsdp_offload", "Offload of FSDP2", offloads),
    ]


def _choice(field: str, label: str, texts: Mapping[Any, str]) -> Knob:
    options = [Option(text, value) for value, text in texts.items()]
    return Knob(
        field,
        field,
        label,
        _GROUP,
        "choice",
        lambda knobs, value: knobs.replace(**{field: value}),
        lambda knobs: getattr(knobs, field),
        lambda knobs: options,
    )


def _with_gpus(knobs: Knobs, value: int) -> Knobs:
    """Return knobs with a number of GPUs; what one GPU cannot have is as written."""
    if value == 1:
        return knobs.replace(**ON_ONE_GPU)
    tensor = knobs.tensor_parallel
    return knobs.replace(gpus=value, tensor_parallel=tensor if tensor and value % tensor == 0 else None)


def why_not_several(knobs: Knobs) -> dict[str, str]:
    """Return why controls cannot be set in a setting, by name.

    >>> sorted(why_not_several(Knobs()))
    ['fsdp_offload', 'fsdp_precision', 'strategy', 'tensor_parallel']
    """
    if (knobs.gpus or 1) == 1:
        others = [name for name in ON_ONE_GPU if name != "gpus"]
        return dict.fromkeys(others, "Choose more than one GPU first")
    if knobs.strategy not in FSDP:
        return dict.fromkeys(("fsdp_precision", "fsdp_offload"), "It is a policy of FSDP2: choose that strategy first")
    return {}
