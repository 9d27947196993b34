"""Larger GPUs for a step that does not fit the one asked for."""

from __future__ import annotations

from memexplore import gpu_catalogue
from memexplore.capture import release_or_installed
from memexplore.knobs.knobs import Knobs
from memexplore.search import candidates as search
from memexplore.search.run_log import Runs
from memexplore.steps.outcome import Outcome


def larger(runs: Runs, release: str | None) -> tuple[list[Knobs], Outcome | None]:
    """The smallest GPU of the catalogue, beyond the one asked for, on which the step fits as written.

    Where it fits none of them, what trains the same and needs least is tried there too, unless it fits the GPU asked
    for; the second value is the step as written on the largest GPU then.
    """
    if runs.written.fits:
        return [], None
    gpus = [gpu_catalogue.find(name).under(release_or_installed(release)) for name in gpu_catalogue.gpus().index]
    gpus = [gpu for gpu in gpus if gpu.capacity > runs.device.capacity]
    found = _smallest(runs, Knobs(), gpus)
    if found is not None or not gpus:
        return ([] if found is None else [found]), None
    too_small = runs.found.get(Knobs(gpu=gpus[-1].key))
    same = [knobs for knobs in runs.places() if not search.altered(knobs, runs.model)]
    sparing = min(same, key=lambda knobs: runs.found[knobs].peak_reserved)
    found = None if runs.found[sparing].fits else _smallest(runs, sparing, gpus)
    return ([] if found is None else [found]), too_small


def _smallest(runs: Runs, knobs: Knobs, gpus: list[gpu_catalogue.Gpu]) -> Knobs | None:
    """The setting on the first of some GPUs, smallest first, on which it fits; it is run on the largest at any rate."""
    # Weights, gradients and optimizer state are the same everywhere, and the rest where the same kernels run.
    room = [gpu for gpu in gpus if gpu.capacity > runs.found[knobs].constant]
    first = {gpu.compute_capability: gpu for gpu in reversed(room)}
    runs.run(knobs.replace(gpu=gpu.key) for gpu in [*first.values(), gpus[-1]])
    needs = {
        kind: one.peak_allocated for kind, gpu in first.items() if (one := runs.found.get(knobs.replace(gpu=gpu.key)))
    }
    for gpu in room:
        if gpu.capacity < needs.get(gpu.compute_capability, 0):
            continue
        asked = knobs.replace(gpu=gpu.key)
        runs.run([asked])
        one = runs.found.get(asked)
        if one is not None and one.fits:
            return asked
    return None
