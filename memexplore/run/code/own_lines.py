"""Change a person's own training code as knobs do, with their names and indentation, and only where it must change.

The changed source runs as it is. What cannot be changed safely raises `Unclear`.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Mapping

import torch

from memexplore.hardware import catalogue
from memexplore.run.code.edits import Edits
from memexplore.run.code.lines import UPDATE_ARGUMENTS, imports, literal
from memexplore.run.code.model import model_lines
from memexplore.run.code.own_code import Change, OwnCode, assigns, is_stored, names
from memexplore.run.code.own_loop import Role, Unclear, find_loop, roles_of, statement_place
from memexplore.run.code.own_step import change_step
from memexplore.run.knobs.gpus import several
from memexplore.run.knobs.inplace_sites.sites import Sites
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.knobs.mode import Mode
from memexplore.run.knobs.optimizer import KINDS, Optimizer
from memexplore.run.knobs.update import Update
from memexplore.run.programs import optimizers

_DEFINITIONS = (ast.FunctionDef, ast.ClassDef)
_WITHOUT_LOOP = {"variables", "settings", "gpu"}
"""Fields of `Knobs` whose lines need no training loop."""


def changed_source(own: OwnCode, knobs: Knobs, sites: Sites | None = None) -> str:
    """Return the source with the lines that do the same as the knobs.

    >>> own = OwnCode('''opt = torch.optim.SGD(net.parameters(), lr=0.1)
    ... for x, y in loader:
    ...     opt.zero_grad()
    ...     loss = criterion(net(x), y)
    ...     loss.backward()
    ...     opt.step()''')
    >>> print(changed_source(own, Knobs(precision="bf16", update="fused")))
    import torch
    opt = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = criterion(net(x), y)
        loss.backward()
        opt.step()

    Raises Unclear for a source in which it is not clear what to change, and for knobs that need more than lines.
    """
    try:
        text = _changed(own, knobs, sites)
        # What is returned has to run.
        ast.parse(text)
    except SyntaxError as error:
        raise Unclear(f"it is no plain Python: {error.msg}") from None
    except ValueError as error:
        raise Unclear(str(error)) from None
    if text == own.source:
        raise Unclear("it has no line to change")
    return text


def _changed(own: OwnCode, knobs: Knobs, sites: Sites | None) -> str:
    tree, edits = ast.parse(own.source), Edits(own.source)
    added: list[str] = []
    if not tree.body:
        raise Unclear("it is empty")
    if several(knobs):
        raise Unclear("a script of several GPUs is started by torchrun, from a file of its own")
    if not set(knobs.changed()) <= _WITHOUT_LOOP:
        loop = find_loop(own.source, roles_of(own.names))
        tree = loop.tree
        _change_loop(Change(own, knobs, loop, edits, added), sites)
    _assign_variables(tree, edits, knobs)
    _begin(tree, edits, own, knobs, added)
    return edits.applied()


def _change_loop(change: Change, sites: Sites | None) -> None:
    knobs, loop = change.knobs, change.loop
    if knobs.mode is not Mode.AS_WRITTEN:
        raise Unclear("without training the whole loop changes")
    if knobs.update is Update.IN_BACKWARD:
        raise Unclear("an update in the backward pass replaces the optimizer's step")
    for statement in loop.body[loop.first : loop.backward + 1]:
        if not change.edits.starts_its_line(statement):
            raise Unclear("several statements are on one line")
    _change_model(change, sites)
    _change_optimizer(change)
    if knobs.batch is not None:
        _change_batch(change, knobs.batch)
    change_step(change)


def _assign_variables(tree: ast.Module, edits: Edits, knobs: Knobs) -> None:
    for name, value in knobs.variables:
        made = [node for node in ast.walk(tree) if assigns(node, name)]
        if not made:
            raise Unclear(f"it assigns no variable {name}")
        for node in made:
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            if node.value is not None:
                edits.replace(node.value, repr(value))


def _begin(tree: ast.Module, edits: Edits, own: OwnCode, knobs: Knobs, added: list[str]) -> None:
    """Insert what comes before everything else: imports, and settings of the allocator."""
    settings = knobs.settings
    first = [f"# On a {catalogue.find(knobs.gpu).name}."] if knobs.gpu is not None else []
    if settings is not None:
        first += [f'os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "{settings}"  # before the first use of the GPU']
    body = "\n".join([*first, *added])
    missing = [line for line in imports(body) if line.split()[-1] not in _imported(tree) | own.names.keys()]
    lines = [*missing, *(line for line in added if line.startswith("from ")), *first]
    statements = [statement for statement in tree.body if not _is_head(statement)]
    if lines and statements:
        edits.insert_first(statements[0], list(dict.fromkeys(lines)))


def _change_model(change: Change, sites: Sites | None) -> None:
    model, name = _model(change)
    pieces = list(model_lines(model, change.knobs, sites))
    if not pieces:
        return
    if any(_SETS_FORWARD in piece for piece in pieces) and _may_run_again(change, model, name):
        pieces.insert(0, _WITHOUT_FORWARD)
    pieces = [_renamed(piece, {"model": name}) for piece in pieces]
    taken = _defined(ast.parse("\n".join(pieces))) & names(change.loop.tree) - _imported(change.loop.tree)
    if taken:
        raise Unclear(f"the lines for the model would change its name {min(taken)}")
    change.insert_before(_before_optimizer(change, name), pieces)


_SETS_FORWARD = ".forward = "
_WITHOUT_FORWARD = """\
for module in model.modules():
    vars(module).pop("forward", None)  # of an earlier run of these lines"""


def _may_run_again(change: Change, model: torch.nn.Module | None, name: str) -> bool:
    """Return whether a cell may be run twice with one model: it does not make it. Only classes have its `forward`."""
    is_made = any(assigns(node, name) for node in ast.walk(change.loop.tree))
    return not is_made and model is not None and not any("forward" in vars(module) for module in model.modules())


def _model(change: Change) -> tuple[torch.nn.Module | None, str]:
    """Return the model, None if its value is not known, and its name where the optimizer is made."""
    name = change.loop.model
    made = change.loop.optimizer_made
    if made is not None:
        assert isinstance(made.statement, ast.Assign)
        names_read = {node.id for node in ast.walk(made.statement.value) if isinstance(node, ast.Name)}
        roles = roles_of(change.own.names)
        models = [name_read for name_read in names_read if roles.get(name_read) is Role.MODEL]
        name = models[0] if len(models) == 1 else _parameters_of(made.statement.value) or name
    value = change.own.names.get(name)
    return (value if isinstance(value, torch.nn.Module) else None), name


def _before_optimizer(change: Change, model: str) -> ast.stmt:
    """Return the statement before which a model can be changed: it exists, and has no optimizer yet."""
    made = change.loop.optimizer_made
    if made is not None:
        return made.statement
    if change.knobs.frozen or change.knobs.lora:
        raise Unclear("it does not make its optimizer, which has to come after the change of the model")
    if change.loop.function is None:
        return change.loop.loop.statement
    if model not in change.own.names:
        raise Unclear("it does not show where its model is made")
    return statement_place(change.loop.tree, change.loop.function).statement


def _change_optimizer(change: Change) -> None:
    knobs = change.knobs
    if knobs.optimizer is Optimizer.AS_WRITTEN and knobs.update is Update.AS_WRITTEN:
        return
    made = change.loop.optimizer_made
    if made is None:
        raise Unclear("it does not make its optimizer")
    assert isinstance(made.statement, ast.Assign)
    call = made.statement.value
    assert isinstance(call, ast.Call)
    if not call.args:
        raise Unclear("the parameters of its optimizer are not its first argument")
    kind, arguments_by_name = ast.unparse(call.func), {word.arg: change.text(word.value) for word in call.keywords}
    if None in arguments_by_name or len(call.args) > 1:
        raise Unclear("the arguments of its optimizer have no names")
    if knobs.optimizer is not Optimizer.AS_WRITTEN:
        made_of, settings = KINDS[knobs.optimizer]
        optimizers.update_settings(made_of, knobs.update)
        kind = f"torch.optim.{made_of.__name__}"
        arguments_by_name = {name: literal(value) for name, value in settings.items()}
    if knobs.update is not Update.AS_WRITTEN:
        arguments_by_name = {name: text for name, text in arguments_by_name.items() if name not in ("foreach", "fused")}
        name, value = UPDATE_ARGUMENTS[knobs.update]
        arguments_by_name[name] = repr(value)
    arguments = ", ".join([change.text(call.args[0]), *(f"{name}={text}" for name, text in arguments_by_name.items())])
    change.added.append(kind)
    change.edits.replace(call, f"{kind}({arguments})")


def _change_batch(change: Change, samples: int) -> None:
    """Change the batch size of the data loader, or the number that names it."""
    loaders = [
        node
        for node in ast.walk(change.loop.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "DataLoader"
    ]
    sizes = [word.value for call in loaders for word in call.keywords if word.arg == "batch_size"]
    sizes += [call.args[1] for call in loaders if len(call.args) > 1]
    if len(loaders) != 1 or len(sizes) != 1:
        raise Unclear("its batch size is not that of one DataLoader")
    size = sizes[0]
    if isinstance(size, ast.Name):
        made = [node for node in ast.walk(change.loop.tree) if assigns(node, size.id)]
        if len(made) != 1 or not isinstance(made[0], ast.Assign) or not isinstance(made[0].value, ast.Constant):
            raise Unclear(f"it does not assign {size.id} as one number")
        size = made[0].value
    change.edits.replace(size, str(samples))


def _defined(tree: ast.Module) -> set[str]:
    """Return the names that code defines at its top level: variables, functions, classes and imports."""
    defined = {
        node.id
        for statement in tree.body
        if not isinstance(statement, _DEFINITIONS)
        for node in ast.walk(statement)
        if is_stored(node)
    }
    defined |= {statement.name for statement in tree.body if isinstance(statement, _DEFINITIONS)}
    return defined | _imported(tree)


def _imported(tree: ast.Module) -> set[str]:
    return {alias.asname or alias.name for node in ast.walk(tree) for alias in _aliases(node)}


def _aliases(node: ast.AST) -> list[ast.alias]:
    return node.names if isinstance(node, ast.Import | ast.ImportFrom) else []


def _is_head(node: ast.stmt) -> bool:
    """Return whether a statement has to stay first in a file."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return is_text or (isinstance(node, ast.ImportFrom) and node.module == "__future__")


def _parameters_of(call: ast.expr) -> str:
    for node in ast.walk(call):
        if isinstance(node, ast.Attribute) and node.attr in ("parameters", "named_parameters"):
            return ast.unparse(node.value)
    return ""


def _renamed(text: str, renamed: Mapping[str, str]) -> str:
    """Return Python code with other names for variables, not for attributes."""
    result, line_at, before = [], (1, 0), ""
    lines = text.split("\n")

    def between(start: tuple[int, int], end: tuple[int, int]) -> str:
        if start[0] == end[0]:
            return lines[start[0] - 1][start[1] : end[1]]
        return "\n".join([lines[start[0] - 1][start[1] :], *lines[start[0] : end[0] - 1], lines[end[0] - 1][: end[1]]])

    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string in renamed and before != ".":
            result += [between(line_at, token.start), renamed[token.string]]
            line_at = token.end
        before = token.string
    return "".join([*result, between(line_at, (len(lines), len(lines[-1])))])
