"""Memory requests of a function on a virtual GPU, and the card for which kernels are chosen."""

from unittest import mock

from memexplore.recorder.recording import record
from memexplore.run.machine import virtual
from memexplore.tape import Action
from memexplore.virtual_gpu.kernels import cuda_build


def use(build):
    """Return a context manager in which kernels are chosen for a torch release and a card."""
    return mock.patch.object(cuda_build, "_current", build)


def requests(function, gpu="A100", release="2.13"):
    """Return op and bytes of each request (frees negative) of the function that `function` makes on a virtual GPU."""
    with virtual(gpu, release=release):
        run = function()
        with record() as recording:
            result = run()
        del result
    tape = recording.tape
    sizes = []
    for row in range(len(tape)):
        if tape.action[row] == Action.ALLOC:
            sizes.append((tape.ops[tape.op[row]].removeprefix("aten::"), int(tape.size[row])))
        elif tape.action[row] == Action.FREE_REQUESTED:
            sizes.append(-int(tape.size[row]))
    return sizes


def allocations(function, **options):
    return [entry for entry in requests(function, **options) if not isinstance(entry, int)]
