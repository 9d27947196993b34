"""In-place knob on a model: activation functions that overwrite their input wherever it is not needed again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from memexplore.run.knobs.applying.report import ApplyReport, Change
from memexplore.run.knobs.applying.undo import UndoLog, undone_after
from memexplore.run.knobs.inplace_sites.activations import Form
from memexplore.run.knobs.inplace_sites.fake_run import fake_run
from memexplore.run.knobs.inplace_sites.legal import legal_sites, observe_forwards
from memexplore.run.knobs.inplace_sites.sites import Sites
from memexplore.run.knobs.inplace_sites.switch import Switch, run_forwards_with, switch_activations


def in_place(
    model: torch.nn.Module, form: Form, sites: Sites | None = None
) -> contextlib.AbstractContextManager[ApplyReport]:
    """Run activations in place in the block, or out of place; see `set_in_place`.

    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> sites = legal_sites(lambda: net(torch.ones(1, 2)).sum().backward(), net)
    >>> with in_place(net, Form.IN_PLACE, sites) as report:
    ...     print(report.texts, net[1].inplace)
    ('In-place at 1 of 1 activations',) True
    >>> net[1].inplace
    False
    """
    return undone_after(lambda log: set_in_place(log, model, form, sites))


def set_in_place(
    log: UndoLog,
    model: torch.nn.Module,
    form: Form,
    sites: Sites | None = None,
    failed: Callable[[Exception], object] | None = None,
) -> ApplyReport:
    """Make activations overwrite their input wherever they may, or nowhere.

    `inplace` flags of modules are set; calls of functions are changed while the forward of the module that makes them
    runs. `sites` are those of `legal_sites`. Without them, the first call of the model, and the first in the other of
    `train()` and `eval()`, makes a fake run with tensors of the same shapes: the model's forward, then the backward
    pass of the sum of its outputs. The fake run takes it that every output is read. It does not see a branch that
    depends on a value, nor a reader of a tensor that the model stores and drops before its forward ends. It draws no
    random numbers and changes no tensor of the user; `ApplyReport.completed()` says afterwards what it found.

    An activation written in place whose input is read afterwards stays in place, and is reported as skipped.

    Raises ValueError from the model's call if the model cannot run without values; with `failed`, the model then runs
    as written, and `failed` gets the error.
    """
    if sites is not None:
        switch_activations(log, model, sites.forms(form))
        return _report(sites, form)
    sites_by_mode = _switch_at_first_call(log, model, form, failed)

    def observed() -> ApplyReport:
        # The sites of training count before the sites of evaluation.
        return _report(sites_by_mode.get(True) or sites_by_mode[False], form) if sites_by_mode else ApplyReport()

    words = "In-place activations" if form is Form.IN_PLACE else "No in-place activations"
    return ApplyReport((Change("inplace", f"{words}, chosen at the first call"),), pending=(observed,))


def _report(sites: Sites, form: Form) -> ApplyReport:
    forms = sites.forms(form)
    number = sum(chosen is Form.IN_PLACE for chosen in forms.values())
    changed = {site.call.function.lower() for site in sites.sites if forms[site.call] is not site.written}
    notes = []
    if any("drop" in name for name in changed):
        notes.append("In-place dropout draws other random numbers on a GPU than the kernel that runs out of place.")
    if changed & {"elu", "selu", "celu"}:
        notes.append("In-place ELU, SELU and CELU compute their gradient from their output: its last bits differ.")
    skipped = sites.without_form(form)
    change = Change("inplace", f"In-place at {number} of {len(forms)} activations")
    return ApplyReport((change,), skipped, tuple(notes))


def _switch_at_first_call(
    log: UndoLog, model: torch.nn.Module, form: Form, failed: Callable[[Exception], object] | None
) -> dict[bool, Sites]:
    """Switch activations at the model's first call in each training mode; return the sites found so far, by mode."""
    sites_by_mode: dict[bool, Sites] = {}
    running: list[bool] = []
    switch, forms_log = Switch(), UndoLog()
    set_for: list[bool] = []

    def runner(module: torch.nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        training = model.training
        if module is model and not running and set_for != [training]:
            forms_log.restore()
            if training not in sites_by_mode:
                running.append(True)
                try:
                    sites_by_mode[training] = _sites_of_fake_run(model, args, kwargs)
                except Exception as error:
                    if failed is None:
                        raise
                    sites_by_mode[training] = Sites(())
                    failed(error)
                finally:
                    running.pop()
            switch.set_forms(forms_log, model, sites_by_mode[training].forms(form))
            set_for[:] = [training]
        return switch.forward(module, inner, args, kwargs)

    log.add(forms_log.restore)
    observe_forwards(log, model)
    run_forwards_with(log, model.modules(), runner)
    return sites_by_mode


def _sites_of_fake_run(model: torch.nn.Module, args: Any, kwargs: Any) -> Sites:
    with fake_run(model, args, kwargs) as call:
        try:
            return legal_sites(call, model)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise ValueError(
                f"this model cannot be run without values ({type(error).__name__}: {str(error).splitlines()[0]}); "
                "give in_place the sites that legal_sites(call, model) finds in a real step"
            ) from error
