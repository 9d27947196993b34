"""Sources for the browser: ES modules joined into one, as anywidget loads a widget from one string; and plotly.js.

Needs no node.
"""

from __future__ import annotations

import functools
import gzip
import re
from pathlib import Path

import plotly.offline

_IMPORT = re.compile(r'^import \{(?P<names>[^}]*)\} from "\./(?P<file>\w+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async function|function|class|const) (?P<name>\w+))", re.MULTILINE)
_OTHER = re.compile(r"^(?:import|export)\b.*", re.MULTILINE)


@functools.cache
def plotly_source() -> bytes:
    """Return plotly.js of the installed plotly, compressed to a third for browsers far from the kernel."""
    return gzip.compress(plotly.offline.get_plotlyjs().encode(), compresslevel=6)


def bundle(entry: Path) -> str:
    """Return the source of a module with everything that it imports; its default export is `entry`'s.

    Every other module becomes a function that is called once and returns its exports, so that modules share no names.
    Modules use only ``import { a, b } from "./file.js";`` and ``export`` before a function, class or const; `entry`
    also ``export default``.

    Raises ValueError for other forms of import and export, and for modules that import each other.
    """
    modules: dict[Path, str] = {}
    _add(entry, modules, importers=())
    return "\n".join(modules.values())


def _add(path: Path, modules: dict[Path, str], importers: tuple[Path, ...]) -> None:
    """Append a module after the modules that it imports."""
    if path in importers:
        raise ValueError(
            f"{path.name} imports itself through {importers[-1].name}: move what both need to a third module"
        )
    if path in modules:
        return
    source = path.read_text(encoding="utf-8")
    for match in _IMPORT.finditer(source):
        _add(path.with_name(match["file"]), modules, (*importers, path))
    source = _IMPORT.sub(lambda match: f"const {{{match['names']}}} = {_variable(match['file'])};\n", source)
    names = [match["name"] for match in _EXPORT.finditer(source)]
    source = _EXPORT.sub("", source)
    for match in _OTHER.finditer(source):
        if importers or not match[0].startswith("export default "):
            raise ValueError(f"{path.name}: {match[0]!r} cannot be bundled: import and export by name")
    if importers:
        source = f"const {_variable(path.name)} = (() => {{\n{source}\nreturn {{ {', '.join(names)} }};\n}})();\n"
    modules[path] = source


def _variable(file: str) -> str:
    return f"module_{file.removesuffix('.js')}"
