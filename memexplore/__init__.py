"""See where GPU memory goes while a PyTorch model trains, with or without a GPU.

The public names are loaded at first use: importing memexplore imports neither torch nor plotly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memexplore.text import package

if TYPE_CHECKING:
    from memexplore.allocator import Settings, replay
    from memexplore.analysis.curves import peak
    from memexplore.analysis.difference import diff
    from memexplore.figures.scaling import scaling
    from memexplore.figures.template import plotly_template
    from memexplore.figures.timeline import timeline
    from memexplore.hardware.catalogue import gpus
    from memexplore.jupyter.explore import explore
    from memexplore.jupyter.magics import load_ipython_extension, unload_ipython_extension
    from memexplore.jupyter.view import view
    from memexplore.jupyter.watching import watch
    from memexplore.out_of_memory.value import post_mortem
    from memexplore.ranks.loading import load
    from memexplore.recorder.recording import record
    from memexplore.run.comparing import compare
    from memexplore.run.knobs.applying.apply import apply
    from memexplore.run.knobs.knobs import Knobs
    from memexplore.run.machine import virtual
    from memexplore.run.programs.fitting import fits
    from memexplore.run.programs.step import Step
    from memexplore.run.search.advise import advise
    from memexplore.run.search.sweep import sweep
    from memexplore.run.simulate import simulate
    from memexplore.snapshot import save_snapshot
    from memexplore.tape import Tape
    from memexplore.text.units import size_text
    from memexplore.virtual_gpu.values.setting import Values

_HOMES = {
    "Knobs": "run.knobs.knobs",
    "Settings": "allocator",
    "Step": "run.programs.step",
    "Tape": "tape",
    "Values": "virtual_gpu.values.setting",
    "advise": "run.search.advise",
    "apply": "run.knobs.applying.apply",
    "compare": "run.comparing",
    "diff": "analysis.difference",
    "explore": "jupyter.explore",
    "fits": "run.programs.fitting",
    "gpus": "hardware.catalogue",
    "load": "ranks.loading",
    "load_ipython_extension": "jupyter.magics",
    "peak": "analysis.curves",
    "plotly_template": "figures.template",
    "post_mortem": "out_of_memory.value",
    "record": "recorder.recording",
    "replay": "allocator",
    "save_snapshot": "snapshot",
    "scaling": "figures.scaling",
    "simulate": "run.simulate",
    "size_text": "text.units",
    "sweep": "run.search.sweep",
    "timeline": "figures.timeline",
    "unload_ipython_extension": "jupyter.magics",
    "view": "jupyter.view",
    "virtual": "run.machine",
    "watch": "jupyter.watching",
}

__version__ = package.VERSION

__all__ = [
    "Knobs",
    "Settings",
    "Step",
    "Tape",
    "Values",
    "advise",
    "apply",
    "compare",
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
