"""Legal sites: the activations of a step that may overwrite their input, found by running the step."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memexplore.run.knobs.applying.model_state import preserve_model_state, preserve_random_states, preserve_values
from memexplore.run.knobs.applying.undo import UndoLog, undone_after
from memexplore.run.knobs.inplace_sites.activations import ActivationMode, CallSite, Form, has_flag, is_script
from memexplore.run.knobs.inplace_sites.check import Check
from memexplore.run.knobs.inplace_sites.sites import Site, Sites
from memexplore.run.knobs.inplace_sites.switch import run_forwards_with, switch_activations
from memexplore.run.knobs.inplace_sites.trace import Trace
from memexplore.torch_internals.dispatch import FakeTensor, pytree
from memexplore.virtual_gpu.device import active
from memexplore.virtual_gpu.tensors.methods import keys_of
from memexplore.virtual_gpu.tensors.tensor import is_virtual


class _Finder(ActivationMode):
    """Runs each call of an activation through a trace or a check, or as written."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.names = {module: name for name, module in model.named_modules()}
        self.flags = {module: module.inplace for module in self.names if has_flag(module)}
        self.written: dict[CallSite, Form] = {}
        self.as_written: frozenset[CallSite] = frozenset()
        """Call sites that run as written, without a trace or a check."""
        self.exposed: Callable[[torch.Tensor, str], None] = lambda tensor, method: None
        """Handles a call of a method that exposes a tensor's memory."""
        self.run: Callable[[CallSite, torch.Tensor, Callable[[Form], Any]], Any] = _out_of_place
        """Runs the call of an activation."""

    def forward_runs(self) -> bool:
        """Return whether a forward of the model, or of one of its modules, runs in this thread."""
        return bool(self.stack.calls)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _EXPOSING and isinstance(args[0], torch.Tensor):
            self.exposed(args[0], func.__name__)
        return super().__torch_function__(func, types, args, kwargs)

    def activation(self, call: CallSite, written: Form, tensor: torch.Tensor, run: Callable[[Form], Any]) -> Any:
        """Return the result of a call."""
        self.written.setdefault(call, written)
        return run(written) if call in self.as_written else self.run(call, tensor, run)

    def forward(self, module: torch.nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the forward of a module."""
        flag, tensor = self.flags.get(module), next(iter((*args, *kwargs.values())), None)
        if flag is None or not isinstance(tensor, torch.Tensor):
            with self.intercepting(), self.inside(self.names.get(module, type(module).__name__)):
                return inner(*args, **kwargs)

        def run(form: Form) -> Any:
            module.inplace = form is Form.IN_PLACE  # type: ignore[assignment]
            try:
                with self.intercepting(), self.inside(None):
                    return inner(*args, **kwargs)
            finally:
                module.inplace = flag

        call = CallSite(self.names[module], type(module).__name__)
        return self.activation(call, Form.IN_PLACE if flag else Form.OUT_OF_PLACE, tensor, run)


def _out_of_place(call: CallSite, tensor: torch.Tensor, run: Callable[[Form], Any]) -> Any:
    return run(Form.OUT_OF_PLACE)


_EXPOSING = {
    key
    for name in ("numpy", "tolist", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage")
    for key in keys_of(name)
}
"""Methods that expose or read a tensor's memory without an op."""
_finders: list[_Finder] = []
"""The finders that are active, the current one last."""
_observed: set[int] = set()
"""Ids of the modules whose forwards pass through the current finder."""


def _through_finder(module: torch.nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if not _finders:
        return inner(*args, **kwargs)
    return _finders[-1].forward(module, inner, args, kwargs)


def observed(model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Make `legal_sites` observe the forwards of a model as they are now, for the block.

    Enter it before a context that wraps forwards in checkpoints, so that a recomputation is recognised as the forward
    that it repeats. `legal_sites` itself observes the modules that are not yet observed.
    """
    return undone_after(lambda log: observe_forwards(log, model))


def observe_forwards(log: UndoLog, model: torch.nn.Module) -> None:
    """Do what `observed` does until the log is restored."""
    modules = [module for module in model.modules() if id(module) not in _observed and not is_script(module)]
    ids = {id(module) for module in modules}
    log.add(_observed.difference_update, ids)
    run_forwards_with(log, modules, _through_finder)
    _observed.update(ids)


def legal_sites(call: Callable[[], Any], model: torch.nn.Module) -> Sites:
    """Find the activations of a model that may overwrite their input, by running a step about four times.

    `call` runs the forward pass, the loss and the backward pass once, on any device; tensors that it returns count as
    read later. An activation may overwrite its input if all of this holds for a step whose activations run out of
    place: no later op reads or writes the old value through any alias, in forward, backward or the recomputation of a
    checkpoint; nothing holds the old value after the step; the model's own forward made the tensor. The changed step
    must then run without an error. An activation that would save no memory is skipped: its backward pass would need a
    copy of its input, or a larger mask. Branches that the step did not take are not seen. A module or a line that is
    called several times is legal if all its calls are.

    Afterwards attributes of modules, gradients, values of buffers and random states are as before.

    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4), torch.nn.Sigmoid())
    >>> sites = legal_sites(lambda: net(torch.ones(2, 4)).sum().backward(), net)
    >>> sites.modules, [str(call) for call in sites.calls]
    (('1',), ['3'])

    Raises what `call` raises.
    """
    finder = _Finder(model)
    with _finding(finder, model):
        reasons, kept_bytes = _traced(call, model, finder)
        written = {site: form for site, form in finder.written.items() if site in reasons}
        new = {site for site, reason in reasons.items() if not reason and written[site] is Form.OUT_OF_PLACE}
        while new and (refused := _checked(call, model, finder, frozenset(new), kept_bytes)):
            reasons |= refused
            new -= set(refused)
    sites = Sites(tuple(Site(site, form, reasons[site]) for site, form in written.items()))
    return _accepted(call, model, sites)


@contextlib.contextmanager
def _finding(finder: _Finder, model: torch.nn.Module) -> Iterator[None]:
    with observed(model):
        _finders.append(finder)
        try:
            yield
        finally:
            _finders.pop()


def _traced(
    call: Callable[[], Any], model: torch.nn.Module, finder: _Finder
) -> tuple[dict[CallSite, str], dict[CallSite, list[int]]]:
    """Return why each activation cannot be in place (empty if it can), and the bytes kept for its backward passes."""
    in_place: frozenset[CallSite] = frozenset()
    must_stay: dict[CallSite, str] = {}
    while True:
        trace = Trace(finder.forward_runs)
        finder.run, finder.exposed, finder.as_written = trace.run, trace.exposed, in_place
        with _preserved(model):
            with finder, trace:
                result = call()
            trace.returned(pytree.tree_leaves(result))
            del result
            if trace.with_live_input():
                gc.collect()
            for alive in trace.with_live_input():
                alive.reason = "its input is still alive when the step has ended"
        reasons: dict[CallSite, str] = dict.fromkeys(finder.written, "")
        seen = {traced.site for traced in trace.calls}
        for traced in trace.calls:
            reasons[traced.site] = reasons[traced.site] or traced.reason
        for site in seen:
            if (site.file, site.line) in trace.outside:
                reasons[site] = "a checkpoint runs it again where its module's forward does not run"
        # A result written in place and read afterwards must stay in place; the step with it is another one to trace.
        wrong = {site: reasons[site] for site in seen if reasons[site] and finder.written[site] is Form.IN_PLACE}
        must_stay |= wrong
        if not wrong:
            sites = [site for site in finder.written if site in seen or site in must_stay]
            return {site: must_stay.get(site, reasons[site]) for site in sites}, trace.kept_bytes()
        in_place |= set(wrong)


def _checked(
    call: Callable[[], Any],
    model: torch.nn.Module,
    finder: _Finder,
    new: frozenset[CallSite],
    kept_bytes: dict[CallSite, list[int]],
) -> dict[CallSite, str]:
    """Run the step with new call sites in place; return the sites that must not be in place, and why."""
    check = Check(finder.forward_runs, new, kept_bytes)
    finder.run, finder.as_written = check.run, frozenset(finder.written) - new
    # Without hooks autograd would stop at the first overwritten tensor.
    hooks = torch.autograd.graph.saved_tensors_hooks(check.pack, check.unpack)
    with _preserved(model), finder, check, hooks:
        call()
    return check.refused


def _accepted(call: Callable[[], Any], model: torch.nn.Module, sites: Sites) -> Sites:
    """Run the changed step without observation; remove call sites that autograd refuses, found by bisection."""
    while error := _raised(call, model, sites):
        changed = [site.call for site in sites.sites if not site.reason and site.written is Form.OUT_OF_PLACE]
        low, high = 0, len(changed)  # the first `low` are accepted, the first `high` are not
        while high - low > 1:
            middle = (low + high) // 2
            if _raised(call, model, _without(sites, changed[middle:], "later")):
                high = middle
            else:
                low = middle
        sites = _without(sites, changed[low:high], f"autograd refuses: {error}")
    return sites


def _without(sites: Sites, calls: list[CallSite], reason: str) -> Sites:
    removed = set(calls)
    return Sites(
        tuple(dataclasses.replace(site, reason=reason) if site.call in removed else site for site in sites.sites)
    )


def _raised(call: Callable[[], Any], model: torch.nn.Module, sites: Sites) -> str:
    """Return the first line of autograd's error in the changed step, empty without one; other exceptions pass."""
    changed = any(site.written is Form.OUT_OF_PLACE and not site.reason for site in sites.sites)
    if not changed:
        return ""
    with _preserved(model), undone_after(lambda log: switch_activations(log, model, sites.forms(Form.IN_PLACE))):
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
def _preserved(model: torch.nn.Module) -> Iterator[None]:
    """Run the block without gradients; preserve the model's state, values of buffers and random states."""
    devices = range(torch.cuda.device_count()) if active() is None and torch.cuda.is_initialized() else ()
    buffers = [buffer for buffer in model.buffers() if not (isinstance(buffer, FakeTensor) or is_virtual(buffer))]
    with (
        preserve_model_state(model),
        preserve_random_states(),
        preserve_values(buffers),
        torch.random.fork_rng(devices),
    ):
        yield
