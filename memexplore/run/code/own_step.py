"""Edit forward and backward pass of a person's own training step: micro-batches, casts, autocast, gradient scaler."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch

from memexplore.run.code.own_code import Change, assigns, fixed_names, is_stored, is_zero_grad, names
from memexplore.run.code.own_loop import Unclear, statement_place
from memexplore.run.knobs.memory_format import MemoryFormat
from memexplore.run.knobs.precision import CASTS, Precision
from memexplore.run.knobs.zero_grad import ZeroGrad


def change_step(change: Change) -> None:
    """Change forward and backward pass. Raises ValueError where that is not safe."""
    knobs, loop = change.knobs, change.loop
    count = knobs.accumulation or 1
    casts = list(_casts(change))
    is_cast = knobs.precision in (*CASTS, Precision.OFF)
    if is_cast and loop.autocast is not None:
        change.edits.replace(loop.autocast.context_expr, _autocast(change))
    wraps = is_cast and loop.autocast is None
    first, last = loop.body[loop.first], loop.body[loop.backward]
    if count > 1:
        change.edits.put_under(first, last, _micro_batches(change, count))
    if casts:
        change.edits.insert_before(first, casts)
    share = f" / {count}" if count > 1 else ""
    if change.is_inline and (wraps or change.scales or share):
        _split_inline(change, share, wraps=wraps)
    else:
        if share:
            _divide(change, count)
        if wraps:
            change.edits.put_under(first, _last_of_forward(change), f"with {_autocast(change)}:")
        if change.scales:
            change.edits.replace(loop.loss, f"scaler.scale({change.text(loop.loss)})")
    if change.scales:
        _scale(change)
    if knobs.zero_grad is not ZeroGrad.AS_WRITTEN:
        _empty_gradients(change)
    if is_cast:
        change.added.append(_autocast(change))
    if knobs.input_size is not None:
        text = f"# Where the data is loaded: images or sequences of size {knobs.input_size}."
        change.edits.insert_before(loop.loop.statement, [text])


def _autocast(change: Change) -> str:
    if change.knobs.precision is Precision.OFF:
        return 'torch.autocast("cuda", enabled=False)'
    return f'torch.autocast("cuda", dtype={CASTS[change.knobs.precision]})'


def _split_inline(change: Change, share: str, *, wraps: bool) -> None:
    """Give a name to the loss of ``criterion(model(x), y).backward()``."""
    loop = change.loop
    if "loss" in names(loop.tree):
        raise Unclear("its loss has no name, and the name loss means something else")
    last = loop.body[loop.backward]
    indentation = "    " if wraps else ""
    lines = [f"with {_autocast(change)}:"] if wraps else []
    if len(loop.body[loop.first : loop.backward]):
        raise Unclear("its loss has no name")
    lines.append(f"{indentation}loss = {change.text(loop.loss)}{share}")
    lines.append("scaler.scale(loss).backward()" if change.scales else "loss.backward()")
    change.edits.replace(last, "\n".join(lines))


def _last_of_forward(change: Change) -> ast.stmt:
    """Return the last statement that computes the loss."""
    name = _loss_name(change)
    stores = [
        statement
        for statement in change.forward
        if any(is_stored(node) and node.id == name for node in ast.walk(statement))
    ]
    if not stores:
        raise Unclear("its loss is computed elsewhere")
    return stores[-1]


def _divide(change: Change, count: int) -> None:
    """Divide the loss by the number of micro-batches."""
    made = [node for statement in change.forward for node in ast.walk(statement) if assigns(node, _loss_name(change))]
    if len(made) != 1 or not isinstance(made[0], ast.Assign):
        raise Unclear("its loss is assigned more than once")
    value = made[0].value
    text = change.text(value)
    simple = isinstance(value, ast.Call | ast.Name | ast.Attribute | ast.Subscript)
    change.edits.replace(value, f"{text if simple else f'({text})'} / {count}")


def _loss_name(change: Change) -> str:
    assert isinstance(change.loop.loss, ast.Name)
    return change.loop.loss.id


def _micro_batches(change: Change, count: int) -> str:
    """Return the head of a loop over micro-batches of the tensors that the forward pass takes."""
    loop = change.loop
    step = loop.body[loop.first : loop.backward + 1]
    if loop.update is None or any(node is loop.update for statement in step for node in ast.walk(statement)):
        raise Unclear("its optimizer's step is not after its backward()")
    if statement_place(loop.tree, loop.update).body is not loop.body:
        raise Unclear("its optimizer does not step after every backward()")
    if any(is_zero_grad(node) for statement in step for node in ast.walk(statement)):
        raise Unclear("it empties its gradients between forward and backward")
    tensors = list(_tensors(change))
    later = {name for statement in loop.body[loop.backward + 1 :] for name in names(statement)}
    if used := later & set(tensors):
        raise Unclear(f"it uses {min(used)} again after its backward()")
    together = ", ".join(tensors)
    chunks = [f"{name}.chunk({count})" for name in tensors]
    source = f"zip({', '.join(chunks)})" if len(tensors) > 1 else chunks[0]
    return f"for {together} in {source}:"


def _tensors(change: Change) -> Iterator[str]:
    """Yield the names of the tensors of a batch: arguments of the model and of the loss, made before the step."""
    loop = change.loop
    step = loop.body[loop.first : loop.backward + 1]
    made = {node.id for statement in step for node in ast.walk(statement) if is_stored(node)}
    functions = {id(call.func) for statement in step for call in ast.walk(statement) if isinstance(call, ast.Call)}
    owners = {id(node.value) for statement in step for node in ast.walk(statement) if isinstance(node, ast.Attribute)}
    others = fixed_names(loop)
    batch_names: dict[str, None] = {}
    for call in (node for statement in step for node in ast.walk(statement) if isinstance(node, ast.Call)):
        for part in (*call.args, *(word.value for word in call.keywords)):
            if isinstance(part, ast.Name) and part.id not in made and part.id not in others:
                batch_names[part.id] = None
            elif isinstance(part, ast.Starred | ast.Subscript):
                raise Unclear("its batch is not a tensor with a name")
    used = {
        node.id
        for statement in step
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and id(node) not in functions | owners
    } - made - others  # fmt: skip
    if not batch_names or used - set(batch_names):
        raise Unclear("it is not clear which of its names get a new batch in each step")
    for name in batch_names:
        value = change.own.names.get(name)
        if value is not None and not (isinstance(value, torch.Tensor) and value.dim()):
            raise Unclear(f"{name} is no tensor with samples")
    yield from batch_names


def _casts(change: Change) -> Iterator[str]:
    knobs = change.knobs
    if knobs.memory_format is MemoryFormat.AS_WRITTEN and knobs.precision is not Precision.ALL_BF16:
        return
    inputs: list[ast.expr] = [argument for call in change.loop.calls for argument in call.args]
    for argument in inputs:
        if not isinstance(argument, ast.Name):
            raise Unclear("the input of its model has no name")
        name = argument.id
        tensor = change.own.names.get(name)
        if not isinstance(tensor, torch.Tensor):
            raise Unclear(f"the data type of {name} is not known")
        if knobs.precision is Precision.ALL_BF16 and tensor.is_floating_point():
            yield f"{name} = {name}.bfloat16()"
        if knobs.memory_format is MemoryFormat.CHANNELS_LAST and tensor.dim() == 4:
            yield f"{name} = {name}.to(memory_format=torch.channels_last)"


def _scale(change: Change) -> None:
    """Add a gradient scaler."""
    loop = change.loop
    if loop.update is None:
        raise Unclear("its optimizer's step is not clear")
    if "scaler" in names(loop.tree):
        raise Unclear("the name scaler means something else")
    update = statement_place(loop.tree, loop.update)
    if not isinstance(update.statement, ast.Expr):
        raise Unclear("its optimizer's step is part of another expression")
    change.edits.replace(update.statement, f"scaler.step({loop.optimizer})\nscaler.update()")
    clips = [
        node for node in ast.walk(loop.tree) if isinstance(node, ast.Call) and "clip_grad" in ast.unparse(node.func)
    ]
    for call in clips:
        change.edits.insert_before(
            statement_place(loop.tree, call).statement,
            [f"scaler.unscale_({loop.optimizer})  # clipping needs the gradients themselves"],
        )
    outside = loop.loop.statement
    if loop.function is not None and not isinstance(outside, ast.For | ast.While):
        # A function for one step: its scaler lives longer.
        outside = statement_place(loop.tree, loop.function).statement
    change.insert_before(outside, ['scaler = torch.amp.GradScaler("cuda")'])


def _empty_gradients(change: Change) -> None:
    calls = [node for node in ast.walk(change.loop.tree) if is_zero_grad(node)]
    if not calls:
        raise Unclear("it does not call zero_grad()")
    to_zero = change.knobs.zero_grad is ZeroGrad.TO_ZERO
    for call in calls:
        assert isinstance(call, ast.Call)
        change.edits.replace(call, f"{change.text(call.func)}({'set_to_none=False' if to_zero else ''})")
