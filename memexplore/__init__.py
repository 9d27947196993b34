"""See where GPU memory goes while a PyTorch model trains, with or without a GPU.

The public names are loaded at first use: importing memexplore imports neither torch nor plotly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from memexplore.allocator import Settings, replay
    from memexplore.analysis.curves import peak
    from memexplore.analysis.difference import diff
    from memexplore.capture import record, simulate, virtual
    from memexplore.figures.scaling import scaling
    from memexplore.figures.template import plotly_template
    from memexplore.figures.timeline import timeline
    from memexplore.gpu_catalogue import gpus
    from memexplore.knobs.apply import apply
    from memexplore.knobs.knobs import Knobs
    from memexplore.notebook.explore import explore
    from memexplore.notebook.magics import load_ipython_extension, unload_ipython_extension
    from memexplore.notebook.view import view
    from memexplore.notebook.watching import watch
    from memexplore.postmortem.value import post_mortem
    from memexplore.runs.loading import load
    from memexplore.search.advise import advise
    from memexplore.search.sweep import sweep
    from memexplore.snapshot import save_snapshot
    from memexplore.steps.fitting import fits
    from memexplore.steps.step import Step
    from memexplore.tape import Tape
    from memexplore.units import size_text
    from memexplore.virtual_gpu.value_setting import Values

_HOMES = {
    "Knobs": "knobs.knobs",
    "Settings": "allocator",
    "Step": "steps.step",
    "Tape": "tape",
    "Values": "virtual_gpu.value_setting",
    "advise": "search.advise",
    "apply": "knobs.apply",
    "diff": "analysis.difference",
    "explore": "notebook.explore",
    "fits": "steps.fitting",
    "gpus": "gpu_catalogue",
    "load": "runs.loading",
    "load_ipython_extension": "notebook.magics",
    "peak": "analysis.curves",
    "plotly_template": "figures.template",
    "post_mortem": "postmortem.value",
    "record": "capture",
    "replay": "allocator",
    "save_snapshot": "snapshot",
    "scaling": "figures.scaling",
    "simulate": "capture",
    "size_text": "units",
    "sweep": "search.sweep",
    "timeline": "figures.timeline",
    "unload_ipython_extension": "notebook.magics",
    "view": "notebook.view",
    "virtual": "capture",
    "watch": "notebook.watching",
}

__all__ = [
    "Knobs",
    "Settings",
    "Step",
    "Tape",
    "Values",
    "advise",
    "apply",
    "diff",
    "explore",
    "fits",
    "gpus",
    "load",
    "load_ipython_extension",
    "peak",
    "plotly_template",
    "post_mortem",
    "record",
    "replay",
    "save_snapshot",
    "scaling",
    "simulate",
    "size_text",
    "sweep",
    "timeline",
    "unload_ipython_extension",
    "view",
    "virtual",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memexplore' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"memexplore.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
