"""The in-place knob: activation functions that overwrite their input, wherever nobody needs it again."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memexplore.knobs.inplace.activations import Form, Place, Switch, Watching, forwards, has_flag, is_script, switched
from memexplore.knobs.inplace.fake_run import rehearsing
from memexplore.knobs.inplace.sites import Site, Sites
from memexplore.knobs.inplace.trace import Check, Trace
from memexplore.knobs.knobs import InPlace
from memexplore.knobs.report import Applied
from memexplore.torch_internals.dispatch import pytree
from memexplore.torch_internals.modules import buffers_of
from memexplore.virtual_gpu.device import active
from memexplore.virtual_gpu.tensors.tensor import VirtualTensor

__all__ = ["Form", "Place", "Site", "Sites", "in_place", "legal_sites", "watched"]

_RANDOM = "In-place dropout draws other random numbers on a GPU than the kernel that is used otherwise."
_ROUNDED = "In-place ELU, SELU and CELU compute their gradient from their output: its last bits differ."


class _Finder(Watching):
    """Runs the calls of activations in the forms asked for, each under the eyes of a trace or a check."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.names = {module: name for name, module in model.named_modules()}
        self.flags = {module: module.inplace for module in self.names if has_flag(module)}
        self.written: dict[Place, Form] = {}
        self.in_place: frozenset[Place] = frozenset()
        self.as_written: frozenset[Place] = frozenset()
        self.handed_out: Callable[[torch.Tensor, str], None] = lambda tensor, how: None
        self.around: Callable[[Place, torch.Tensor, Callable[[Form], Any]], Any] = _plainly

    def forward_runs(self) -> bool:
        """Whether a forward of the model, or of a part of it, runs in this thread."""
        return bool(self.stack.calls)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WITHOUT_OPS and isinstance(args[0], torch.Tensor):
            self.handed_out(args[0], func.__name__)
        return super().__torch_function__(func, types, args, kwargs)

    def activation(self, place: Place, written: Form, tensor: torch.Tensor, run: Callable[[Form], Any]) -> Any:
        """What a call answers in the form asked for."""
        self.written.setdefault(place, written)
        return run(written) if place in self.as_written else self.around(place, tensor, run)

    def forward(self, module: torch.nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the forward of a module."""
        flag, tensor = self.flags.get(module), next(iter((*args, *kwargs.values())), None)
        if flag is None or not isinstance(tensor, torch.Tensor):
            with self.watching(), self.inside(self.names.get(module, type(module).__name__)):
                return inner(*args, **kwargs)

        def run(form: Form) -> Any:
            module.inplace = form is Form.IN_PLACE  # type: ignore[assignment]
            try:
                with self.watching(), self.inside(None):
                    return inner(*args, **kwargs)
            finally:
                module.inplace = flag

        place = Place(self.names[module], type(module).__name__)
        return self.activation(place, Form.IN_PLACE if flag else Form.OUT_OF_PLACE, tensor, run)


def _plainly(place: Place, tensor: torch.Tensor, run: Callable[[Form], Any]) -> Any:
    return run(Form.OUT_OF_PLACE)


_WITHOUT_OPS = {
    getattr(torch.Tensor, name)
    for name in ("numpy", "tolist", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage")
}
"""What hands out a tensor's memory, or reads it, and is no op."""
_finders: list[_Finder] = []
"""The one that looks at present, if any."""
_watched: set[int] = set()
"""The modules, by id, whose forwards tell the finder."""


def _seen(module: torch.nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if not _finders:
        return inner(*args, **kwargs)
    return _finders[-1].forward(module, inner, args, kwargs)


@contextlib.contextmanager
def watched(model: torch.nn.Module) -> Iterator[None]:
    """Have `legal_sites` know the forwards of a model as they are now, for the block.

    Enter it before a context that wraps forwards into checkpoints: then a recomputation is known for the forward that
    it repeats. `legal_sites` watches what nobody watches yet.
    """
    modules = [module for module in model.modules() if id(module) not in _watched and not is_script(module)]
    numbers = {id(module) for module in modules}
    with forwards(modules, _seen):
        _watched.update(numbers)
        try:
            yield
        finally:
            _watched.difference_update(numbers)


def legal_sites(call: Callable[[], Any], model: torch.nn.Module) -> Sites:
    """Find the activations of a model that may overwrite their input, by running a step some four times.

    `call` runs the forward pass, the loss and the backward pass once, on whatever device; what it returns counts as
    read later. An activation may overwrite its input where, on the trace of a step whose activations all run out of
    place, no op afterwards reads or writes the old value through any alias, forward, backward or in a checkpoint's
    recomputation, nothing holds the old value when the step has ended, the tensor was made by the model's own forward,
    and where the changed step then really ran. Left out is also what would save nothing: an activation whose backward
    pass then needs a copy of its input, or a larger mask. Only what that step did is seen: a branch that it did not
    take is not. A module or a line that is called several times is legal where all its calls are.

    Gradients, buffers, the state of random number generators and modes of modules are as before afterwards.

    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4), torch.nn.Sigmoid())
    >>> sites = legal_sites(lambda: net(torch.ones(2, 4)).sum().backward(), net)
    >>> sites.modules, [str(place) for place in sites.calls]
    (('1',), ['3'])

    Raises what `call` raises.
    """
    finder = _Finder(model)
    with _finding(finder, model):
        reasons, costs = _traced(call, model, finder)
        written = {place: form for place, form in finder.written.items() if place in reasons}
        new = {place for place, reason in reasons.items() if not reason and written[place] is Form.OUT_OF_PLACE}
        while new and (refused := _checked(call, model, finder, frozenset(new), costs)):
            reasons |= refused
            new -= set(refused)
    sites = Sites(tuple(Site(place, form, reasons[place]) for place, form in written.items()))
    return _agreed(call, model, sites)


@contextlib.contextmanager
def _finding(finder: _Finder, model: torch.nn.Module) -> Iterator[None]:
    with watched(model):
        _finders.append(finder)
        try:
            yield
        finally:
            _finders.pop()


def _traced(
    call: Callable[[], Any], model: torch.nn.Module, finder: _Finder
) -> tuple[dict[Place, str], dict[Place, list[int]]]:
    """Why each activation's input must stay, empty where it need not, and the bytes kept for its backward passes."""
    stay: frozenset[Place] = frozenset()
    kept: dict[Place, str] = {}
    while True:
        trace = Trace(finder.forward_runs)
        finder.around, finder.handed_out, finder.as_written = trace.around, trace.handed_out, stay
        with _as_before(model):
            with finder, trace:
                result = call()
            trace.returned(pytree.tree_leaves(result))
            del result
            if trace.held():
                gc.collect()
            for held in trace.held():
                held.reason = "something still holds its input when the step has ended"
        reasons: dict[Place, str] = dict.fromkeys(finder.written, "")
        seen = {seen.place for seen in trace.calls}
        for one in trace.calls:
            reasons[one.place] = reasons[one.place] or one.reason
        for place in seen:
            if (place.file, place.line) in trace.outside:
                reasons[place] = "a checkpoint runs it again where its module's forward does not run"
        # What is written in place and read afterwards must go on so, and then the step is another one.
        wrong = {place: reasons[place] for place in seen if reasons[place] and finder.written[place] is Form.IN_PLACE}
        kept |= wrong
        if not wrong:
            places = [place for place in finder.written if place in seen or place in kept]
            return {place: kept.get(place, reasons[place]) for place in places}, trace.costs()
        stay |= set(wrong)


def _checked(
    call: Callable[[], Any],
    model: torch.nn.Module,
    finder: _Finder,
    new: frozenset[Place],
    costs: dict[Place, list[int]],
) -> dict[Place, str]:
    """Run the step with new places in place as well, and find those that something speaks against."""
    check = Check(finder.forward_runs, new, costs)
    finder.around, finder.as_written = check.around, frozenset(finder.written) - new
    # Without hooks autograd would stop at the first refusal.
    hooks = torch.autograd.graph.saved_tensors_hooks(check.pack, check.unpack)
    with _as_before(model), finder, check, hooks:
        call()
    return check.refused


def _agreed(call: Callable[[], Any], model: torch.nn.Module, sites: Sites) -> Sites:
    """Run the changed step as it is; take out what autograd refuses, found by halving."""
    while error := _raised(call, model, sites):
        places = [site.place for site in sites.sites if not site.reason and site.written is Form.OUT_OF_PLACE]
        low, high = 0, len(places)  # the first `low` agree, the first `high` do not
        while high - low > 1:
            middle = (low + high) // 2
            if _raised(call, model, _without(sites, places[middle:], "later")):
                high = middle
            else:
                low = middle
        sites = _without(sites, places[low:high], f"autograd refuses: {error}")
    return sites


def _without(sites: Sites, places: list[Place], reason: str) -> Sites:
    gone = set(places)
    return Sites(
        tuple(dataclasses.replace(site, reason=reason) if site.place in gone else site for site in sites.sites)
    )


def _raised(call: Callable[[], Any], model: torch.nn.Module, sites: Sites) -> str:
    """What autograd says of the changed step, empty where nothing; every other exception comes through."""
    changed = any(site.written is Form.OUT_OF_PLACE and not site.reason for site in sites.sites)
    if not changed:
        return ""
    with _as_before(model), switched(model, sites.forms(InPlace.ON)):
        try:
            call()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if not any(word in str(error) for word in ("inplace", "in-place", "recomputed", "different number")):
                raise
            return str(error).splitlines()[0].rstrip(".")
    return ""


@contextlib.contextmanager
def _as_before(model: torch.nn.Module) -> Iterator[None]:
    """Run the block without gradients; gradients, buffers, modes and random numbers are as before afterwards."""
    gradients = [(weight, weight.grad) for weight in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, None if isinstance(buffer, VirtualTensor) or buffer is None else buffer.clone())
        for module in model.modules()
        for name, buffer in buffers_of(module).items()
    ]
    devices = range(torch.cuda.device_count()) if active() is None and torch.cuda.is_initialized() else ()
    states = random.getstate(), sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    try:
        for weight, _ in gradients:
            weight.grad = None
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(states[0])
        if states[1] is not None:
            sys.modules["numpy"].random.set_state(states[1])
        for weight, gradient in gradients:
            weight.grad = gradient
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for module, name, buffer, values in buffers:
                buffers_of(module)[name] = buffer
                if values is not None:
                    buffer.copy_(values)  # type: ignore[union-attr]


@contextlib.contextmanager
def in_place(model: torch.nn.Module, choice: InPlace, sites: Sites | None = None) -> Iterator[Applied]:
    """Have activations overwrite their input wherever they may (ON), or nowhere (OFF), for the block.

    `inplace` flags of modules are set; calls of functions are changed while the forward of the module runs that makes
    them. `sites` are those of `legal_sites`. Without them, the first call of the model in the block, and the first in
    the other of `train()` and `eval()`, is rehearsed on fake tensors of the same shapes: the model's forward, then the
    backward pass of the sum of its outputs. The rehearsal sees what the forward does and what is kept after it, and
    takes every output for one that is read; it cannot see a value that a branch turns on, nor, where the model puts a
    tensor away and drops it before its forward ends, who saw it meanwhile. It draws no random numbers, touches no
    tensor of yours, and `Applied.settled()` tells afterwards what it found.

    An activation written in place whose input is read afterwards stays so under OFF: its place and the reason are in
    `left_out`.

    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> sites = legal_sites(lambda: net(torch.ones(1, 2)).sum().backward(), net)
    >>> with in_place(net, InPlace.ON, sites) as applied:
    ...     print(applied.texts, net[1].inplace)
    ('In-place at 1 of 1 activations',) True
    >>> net[1].inplace
    False

    Raises ValueError from the model's call where it cannot be rehearsed without values.
    """
    if choice is InPlace.AS_WRITTEN:
        yield Applied()
    elif sites is not None:
        with switched(model, sites.forms(choice)):
            yield _applied(sites, choice)
    else:
        with _at_first_call(model, choice) as found:
            words = "In-place activations" if choice is InPlace.ON else "No in-place activations"
            unknown = Applied((f"{words}, as the first call shows",))
            yield unknown._replace(later=(lambda told: _settled(told, unknown, found, choice),))


def _settled(told: Applied, unknown: Applied, found: dict[bool, Sites], choice: InPlace) -> Applied:
    """What was told of a model that was not yet called, with what its call has shown; training counts first."""
    if not found:
        return told
    known = _applied(found.get(True) or found[False], choice)
    texts = tuple(known.texts[0] if text == unknown.texts[0] else text for text in told.texts)
    return told._replace(texts=texts, left_out=told.left_out + known.left_out, notes=told.notes + known.notes)


def _applied(sites: Sites, choice: InPlace) -> Applied:
    forms = sites.forms(choice)
    count = sum(form is Form.IN_PLACE for form in forms.values())
    changed = {site.place.function.lower() for site in sites.sites if forms[site.place] is not site.written}
    notes = []
    if any("drop" in name for name in changed):
        notes.append(_RANDOM)
    if changed & {"elu", "selu", "celu"}:
        notes.append(_ROUNDED)
    left_out = sites.kept(Form.IN_PLACE if choice is InPlace.ON else Form.OUT_OF_PLACE)
    return Applied((f"In-place at {count} of {len(forms)} activations",), left_out, tuple(notes))


@contextlib.contextmanager
def _at_first_call(model: torch.nn.Module, choice: InPlace) -> Iterator[dict[bool, Sites]]:
    """Switch activations when a model is called, as a rehearsal of the first call in its mode shows."""
    found: dict[bool, Sites] = {}
    busy: list[bool] = []
    switch = Switch()
    with contextlib.ExitStack() as flags:

        def around(module: torch.nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if module is model and not busy and (model.training not in found or switch.mode is not model.training):
                flags.close()
                busy.append(True)
                try:
                    if model.training not in found:
                        found[model.training] = _rehearsed(model, args, kwargs)
                finally:
                    busy.pop()
                flags.enter_context(switch.on(model, found[model.training].forms(choice)))
                switch.mode = model.training
            return switch.forward(module, inner, args, kwargs)

        with watched(model), forwards(list(model.modules()), around):
            yield found


def _rehearsed(model: torch.nn.Module, args: Any, kwargs: Any) -> Sites:
    with rehearsing(model, args, kwargs) as call:
        try:
            return legal_sites(call, model)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise ValueError(
                f"this model cannot be run without values ({type(error).__name__}: {str(error).splitlines()[0]}); "
                "give in_place the sites that legal_sites(call, model) finds in a real step"
            ) from error
