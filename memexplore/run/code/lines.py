"""Write the lines of plain PyTorch that do the same as knobs, to copy into a training script."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from memexplore.hardware import catalogue
from memexplore.run.code.model import model_lines
from memexplore.run.code.several_gpus import start_lines, wrap_lines
from memexplore.run.knobs.applying.apply import of_model
from memexplore.run.knobs.applying.layer_names import check_names
from memexplore.run.knobs.gpus import several
from memexplore.run.knobs.inplace import InPlace
from memexplore.run.knobs.inplace_sites.sites import Sites
from memexplore.run.knobs.knobs import Knobs, conflicts, layers_of
from memexplore.run.knobs.memory_format import MemoryFormat
from memexplore.run.knobs.mode import Mode
from memexplore.run.knobs.optimizer import KINDS, Optimizer
from memexplore.run.knobs.precision import CASTS, Precision
from memexplore.run.knobs.strategy import Strategy, strategy_of
from memexplore.run.knobs.update import UPDATE_SETTINGS, Update
from memexplore.run.knobs.zero_grad import ZeroGrad
from memexplore.run.programs import batches, optimizers
from memexplore.run.programs.step import Step
from memexplore.run.programs.step_record import record_of

UPDATE_ARGUMENTS = {
    Update.FOREACH: ("foreach", True),
    Update.FUSED: ("fused", True),
    Update.PER_TENSOR: ("foreach", False),
}
"""The argument of an optimizer for a value of the update knob."""
_IN_BACKWARD = """\
optimizers = {{weight: {made} for weight in model.parameters() if weight.requires_grad}}

def update(weight):
    optimizers[weight].step()
    optimizers[weight].zero_grad()

for weight in optimizers:
    weight.register_post_accumulate_grad_hook(update)
"""
_SCRIPT_NAMES = ("model", "dataset", "batches", "loss_function", "compute_loss", "optimizer")
_LOOP_FIELDS = {"accumulation", "optimizer", "update", "zero_grad", "memory_format"}
"""Fields of `Knobs` that change the loop, in addition to precision and inference."""


def lines(step: Step | None, knobs: Knobs, sites: Sites | None = None, model: torch.nn.Module | None = None) -> str:
    """Return the lines of Python that change a training script as the knobs do; empty if the knobs change nothing.

    The lines use names of the script, which the first line lists: `model`, `batches` (the iterable of the loop),
    `dataset`, `loss_function` (`compute_loss` where the step has one) and `optimizer`. Without a step a batch is
    ``(inputs, targets)``, and `model` has the layers that the lines name. `sites` say which activations may be in place
    (`inplace.legal_sites`); the default is what a run of the step has found. For a change inside of the model's own
    code the lines have a comment with file and line.

    >>> print(lines(None, Knobs(precision="bf16", accumulation=4)))
    # model, batches, loss_function and optimizer are yours.
    import torch
    for inputs, targets in batches:
        for inputs, targets in zip(inputs.chunk(4), targets.chunk(4)):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = loss_function(model(inputs), targets) / 4
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    Raises ValueError for knobs that contradict each other, or name layers that the step's model does not have.
    """
    wrong = conflicts(knobs)
    if wrong:
        raise ValueError("; ".join(wrong))
    model = model or _model(step)
    if model is not None:
        check_names(model, layers_of(knobs))
    sites = sites or recorded_sites(step, knobs)
    wrapped = [*model_lines(model, knobs, sites), *wrap_lines(model, knobs)]
    pieces = [*start_lines(knobs), *_before(knobs), *wrapped, *_optimizer(step, knobs), *_loop(step, knobs)]
    if not pieces:
        return ""
    from_imports = [piece for piece in pieces if piece.startswith("from ")]
    body = "\n".join(piece for piece in pieces if not piece.startswith("from "))
    used = [name for name in _SCRIPT_NAMES if re.search(rf"\b{name}\b", _code(body)) and f"{name} = " not in body]
    return "\n".join([*_names_comment(used), *imports(body), *from_imports, body])


def _model(step: Step | None) -> torch.nn.Module | None:
    """Return the step's model; None without a step or before its model is built."""
    if step is None:
        return None
    return step.model if isinstance(step.model, torch.nn.Module) else record_of(step).virtual_model


def recorded_sites(step: Step | None, knobs: Knobs) -> Sites | None:
    """Return the in-place sites that an earlier run of the step with these knobs has found, else None."""
    if step is None or knobs.inplace is InPlace.AS_WRITTEN:
        return None
    wanted = of_model(knobs).replace(inplace=InPlace.AS_WRITTEN)
    sites = [sites_of_run for (plain, _), sites_of_run in record_of(step).sites.items() if of_model(plain) == wanted]
    return sites[-1] if sites else None


def _code(body: str) -> str:
    """Return the body without its comments and string literals."""
    return re.sub(r"#.*|\"[^\"]*\"|'[^']*'", "", body)


def _names_comment(names: list[str]) -> Iterator[str]:
    if names:
        *first, last = names
        yield f"# {', '.join(first)} and {last} are yours." if first else f"# {last} is yours."


def imports(body: str) -> Iterator[str]:
    """Yield the import statements of the modules that lines use."""
    for name in ("functools", "os", "sys", "torch", "weakref"):
        if re.search(rf"\b{name}\.", _code(body)):
            yield f"import {name}"


# --- before the loop ------------------------------------------------------------------------------------------------


def _before(knobs: Knobs) -> Iterator[str]:
    if knobs.gpu is not None:
        yield f"# On a {catalogue.find(knobs.gpu).name}."
    if knobs.settings is not None:
        yield f'os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "{knobs.settings}"  # before the first use of the GPU'
    for name, value in knobs.variables:
        yield f"{name} = {value!r}"
    if knobs.input_size is not None:
        yield f"# Where the data is loaded: images or sequences of size {knobs.input_size}."
    if knobs.batch is not None:
        yield f"batches = torch.utils.data.DataLoader(dataset, batch_size={knobs.batch})"


def _optimizer(step: Step | None, knobs: Knobs) -> Iterator[str]:
    changes = knobs.changed().keys() & {"optimizer", "update", "lora"}
    # Shards are other parameters, and DDP alone keeps the optimizer as it is.
    if knobs.mode is not Mode.INFERENCE and (changes or (several(knobs) and strategy_of(knobs) is not Strategy.DDP)):
        yield from optimizer_lines(step, knobs)


def optimizer_lines(step: Step | None, knobs: Knobs) -> Iterator[str]:
    """Return the lines that make the optimizer, also for knobs that do not change it."""
    kind, settings, groups = _optimizer_of(step, knobs)
    # Raises ValueError where the class does not have the update.
    optimizers.update_settings(kind, knobs.update)
    arguments = [
        *settings.items(),
        *(UPDATE_ARGUMENTS[update] for update in (knobs.update,) if update in UPDATE_ARGUMENTS),
    ]
    settings_text = "".join(f", {name}={literal(value)}" for name, value in arguments)
    home = f"torch.optim.{kind.__name__}"
    if getattr(torch.optim, kind.__name__, None) is not kind:
        home = kind.__name__
        yield f"from {kind.__module__} import {home}"
    if groups > 1:
        yield f"# Pass your {groups} groups of parameters instead of the parameters."
    if knobs.update is Update.IN_BACKWARD:
        yield _IN_BACKWARD.format(made=f"{home}([weight]{settings_text})")
    elif several(knobs) and strategy_of(knobs) is Strategy.ZERO_1:
        yield "from torch.distributed.optim import ZeroRedundancyOptimizer"
        yield f"optimizer = ZeroRedundancyOptimizer(model.parameters(), {home}{settings_text})"
    else:
        yield f"optimizer = {home}(model.parameters(){settings_text})"


def _optimizer_of(step: Step | None, knobs: Knobs) -> tuple[type[torch.optim.Optimizer], dict[str, Any], int]:
    """Return the optimizer's class, its settings that differ from the defaults, and the number of parameter groups."""
    if knobs.optimizer is not Optimizer.AS_WRITTEN:
        kind, settings = KINDS[knobs.optimizer]
        return kind, dict(settings), 1
    written = step.optimizer if step is not None else None
    made = optimizers.make(written, Knobs(), [torch.nn.Parameter(torch.zeros(1))])
    defaults = inspect.signature(type(made)).parameters
    update_names = {name for update in UPDATE_SETTINGS.values() for name in update}
    settings = {
        name: value
        for name, value in made.param_groups[0].items()
        if name in defaults and name not in {*update_names, "params"} and not _same(value, defaults[name].default)
    }
    return type(made), settings, len(written.param_groups) if isinstance(written, torch.optim.Optimizer) else 1


def _same(value: Any, other: Any) -> bool:
    return not isinstance(value, torch.Tensor) and value == other


def literal(value: Any) -> str:
    """Return a value as code."""
    return f"torch.tensor({value.item()!r})" if isinstance(value, torch.Tensor) else repr(value)


# --- the loop -------------------------------------------------------------------------------------------------------


class _Form(NamedTuple):
    """The expressions with which the loop of a script uses a batch."""

    batch: str
    """The target of ``for ... in batches``."""
    micro: tuple[str, ...]
    """Lines that begin a loop over micro-batches; the lines after the first are part of its body."""
    tensors: dict[str, Any]
    """Expression and value of each part of the batch."""
    output: str
    """The call of the model; empty if the loss calls it."""
    loss: str
    """The call of the loss; `{output}` is replaced by the call of the model."""


def _form(step: Step | None, count: int) -> _Form:
    batch: Any = (torch.zeros(1, 1), torch.zeros(1, dtype=torch.long)) if step is None else step.batch
    if (fields := batches.fields_of(batch)) is not None:
        unpacking, micro, tensors = _named(batch, fields, count)
        called, targets = _shared_by_name(step, fields, dict(zip(fields, tensors, strict=True)))
        batch_text = "batch"
    else:
        values = list(batch) if isinstance(batch, tuple | list) else [batch]
        unpacking, micro, tensors = _listed(values, count)
        called, targets = _shared(step, list(tensors))
        batch_text = f"({unpacking})" if isinstance(batch, tuple | list) else unpacking
    output = f"model({called})"
    if step is not None and step.compute_loss is not None:
        return _Form(unpacking, micro, tensors, "", f"compute_loss(model, {batch_text})")
    if step is not None and step.loss is None:
        # Models of transformers have a configuration, and return an object that has the loss.
        own = isinstance(batch, dict) or hasattr(_model(step), "config")
        return _Form(unpacking, micro, tensors, output, "{output}.loss" if own else "{output}")
    return _Form(unpacking, micro, tensors, output, f"loss_function({', '.join(['{output}', *targets])})")


def _named(batch: Any, fields: dict[str, Any], count: int) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    entry = "{}[{!r}]" if isinstance(batch, dict) else "{}.{}"
    tensors = {entry.format("batch", name): value for name, value in fields.items()}
    if count == 1:
        return "batch", (), tensors
    parts = {name: f"{_chunks(entry.format('whole', name), value, count)}[number]" for name, value in fields.items()}
    if isinstance(batch, dict):
        made = f"{{{', '.join(f'{name!r}: {part}' for name, part in parts.items())}}}"
    else:
        changed = ", ".join(f"{name}={part}" for name, part in parts.items())
        made = f"whole._replace({changed})" if isinstance(batch, tuple) else f"dataclasses.replace(whole, {changed})"
    return "whole", (f"for number in range({count}):", f"    batch = {made}"), tensors


def _shared_by_name(step: Step | None, fields: dict[str, Any], parts: dict[str, str]) -> tuple[str, list[str]]:
    """Return the arguments of the model and of the loss as text; `parts` has the expression of each field."""
    if step is None or step.compute_loss is not None:
        return "**batch", ["batch"]
    call = batches.call_of(_model(step), step.loss, step.batch)
    expression = {id(value): parts[name] for name, value in fields.items()}
    targets = [expression.get(id(target), "batch") for target in call.targets]
    if call.args:
        return ", ".join(expression.get(id(value), "batch") for value in call.args), targets
    if call.kwargs.keys() == fields.keys() and isinstance(step.batch, dict):
        return "**batch", targets
    return ", ".join(f"{name}={parts[name]}" for name in call.kwargs), targets


def _listed(values: list[Any], count: int) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    names = ["inputs", "targets"] if len(values) == 2 else ["inputs", *(f"target_{n}" for n in range(1, len(values)))]
    together = ", ".join(names)
    chunks = [_chunks(name, value, count) for name, value in zip(names, values, strict=True)]
    source = f"zip({', '.join(chunks)})" if len(chunks) > 1 else chunks[0]
    return together, (f"for {together} in {source}:",), dict(zip(names, values, strict=True))


def _shared(step: Step | None, names: list[str]) -> tuple[str, list[str]]:
    """Return the arguments of the model as text, and the names of the parts that go to the loss."""
    if step is None or not isinstance(step.batch, tuple | list) or step.compute_loss is not None:
        return names[0], names[1:]
    call = batches.call_of(_model(step), step.loss, step.batch)
    if call.kwargs:
        return f"**{names[0]}", names[1:]
    if isinstance(step.batch[0], tuple) and call.args != (step.batch[0],):
        return f"*{names[0]}", names[1:]
    count = len(call.args)
    return ", ".join(names[:count]), names[count:]


def _chunks(name: str, value: Any, count: int) -> str:
    if isinstance(value, tuple):
        return f"zip(*(part.chunk({count}) for part in {name}))"
    if isinstance(value, dict):
        return f"(dict(zip({name}, parts)) for parts in zip(*(part.chunk({count}) for part in {name}.values())))"
    return f"{name}.chunk({count})" if isinstance(value, torch.Tensor) and value.dim() else f"([{name}] * {count})"


def _loop(step: Step | None, knobs: Knobs) -> Iterator[str]:
    if knobs.changed().keys() & (_LOOP_FIELDS | {"mode", "precision"}):
        yield from loop_lines(step, knobs)


def loop_lines(step: Step | None, knobs: Knobs) -> Iterator[str]:
    """Return the whole loop of training, also for knobs that do not change it, as pieces of one or more lines."""
    trains = knobs.mode is not Mode.INFERENCE
    count = knobs.accumulation or 1
    form = _form(step, count)
    scaled = knobs.precision is Precision.FP16 and trains
    backward = "scaler.scale(loss).backward()" if scaled else "loss.backward()"
    body = [*_casts(form, knobs), *_forward(step, form, knobs, count, [backward] if trains else [])]
    apart = count > 1 and step is not None and step.resize is not None
    if count > 1 and not apart:
        body = [*form.micro, *_indented(body)]
    if trains and knobs.update is not Update.IN_BACKWARD:
        update = ["scaler.step(optimizer)", "scaler.update()"] if scaled else ["optimizer.step()"]
        update.append(f"optimizer.zero_grad({'set_to_none=False' if knobs.zero_grad is ZeroGrad.TO_ZERO else ''})")
        body += [f"if number % {count} == 0:", *_indented(update)] if apart else update
    loop = [f"for {form.batch} in batches:", *_indented(body)]
    if apart:
        unpacking = f"({form.batch})" if "," in form.batch else form.batch
        loop[0] = f"for number, {unpacking} in enumerate(batches, 1):  # each as large as a micro-batch"
    if scaled:
        yield 'scaler = torch.amp.GradScaler("cuda")'
    if not trains:
        loop = ["with torch.no_grad():", *_indented(loop)]
    yield "\n".join(loop)


def _indented(block: list[str]) -> list[str]:
    return [textwrap.indent(line, "    ") for line in block]


def _casts(form: _Form, knobs: Knobs) -> Iterator[str]:
    for name, value in form.tensors.items():
        if not isinstance(value, torch.Tensor):
            continue
        if knobs.precision is Precision.ALL_BF16 and value.is_floating_point():
            yield f"{name} = {name}.bfloat16()"
        if knobs.memory_format is MemoryFormat.CHANNELS_LAST and value.dim() == 4:
            yield f"{name} = {name}.to(memory_format=torch.channels_last)"


def _forward(step: Step | None, form: _Form, knobs: Knobs, count: int, backward: list[str]) -> list[str]:
    """Return the lines from a batch to its loss, with the lines of the backward pass."""
    share = f" / {count}" if count > 1 and knobs.mode is not Mode.INFERENCE else ""
    loss = form.loss.format(output=form.output)
    if step is None or not inspect.isgeneratorfunction(step.compute_loss or step.loss):
        return [*_inside_autocast([f"loss = {loss}{share}"], knobs), *backward]
    if not share and knobs.precision not in (*CASTS, Precision.OFF):
        return [f"for loss in {loss}:", *_indented(backward or ["pass"])]
    body = [*_inside_autocast([f"loss = next(losses){share}"], knobs), *backward]
    tried = ["while True:", *_indented(body)]
    return [f"losses = {loss}", "try:", *_indented(tried), "except StopIteration:  # no loss left", "    pass"]


def _inside_autocast(block: list[str], knobs: Knobs) -> list[str]:
    if knobs.precision in CASTS:
        return [f'with torch.autocast("cuda", dtype={CASTS[knobs.precision]}):', *_indented(block)]
    if knobs.precision is Precision.OFF:
        return ['with torch.autocast("cuda", enabled=False):  # and none in the model\'s own code', *_indented(block)]
    return block
