"""The front end without a browser: its types, its own tests under node, its bundle, and its files in the wheel."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from memexplore.jupyter.bundle import bundle
from memexplore.jupyter.packing import COMPRESS_FROM, pack
from memexplore.jupyter.view import FRONTEND, View
from tests.needs import need

REPOSITORY = Path(__file__).parents[2]
TSC = REPOSITORY / "node_modules" / ".bin" / "tsc"


def program_of(program: str | Path | None, name: str, remedy: str) -> str:
    """Return a program; skip the test without it, except in continuous integration."""
    need(program is not None and Path(program).exists(), f"{name} is not installed: {remedy}")
    return str(program)


@pytest.fixture(scope="module")
def node() -> str:
    return program_of(shutil.which("node"), "node", "install nodejs 18 or newer")


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def test_own_tests_pass(node: str) -> None:
    files = sorted((Path(__file__).parent / "frontend").glob("*.test.js"))
    assert files
    run(node, "--test", *map(str, files))


@pytest.mark.usefixtures("node")
def test_types_are_right() -> None:
    run(program_of(TSC, "tsc", "run npm ci"), "--project", "tsconfig.json")


# -- the bundle


def test_bundle_has_every_module_once() -> None:
    source = bundle(FRONTEND / "index.js")
    modules = {path.stem for path in FRONTEND.glob("*.js")} - {"index", "run_below"}  # each is a widget's entry
    assert sorted(re.findall(r"^const module_(\w+) = ", source, re.MULTILINE)) == sorted(modules)
    assert View._esm == source


def test_bundle_is_a_module_with_a_default_export(node: str, tmp_path: Path) -> None:
    (tmp_path / "widget.mjs").write_text(bundle(FRONTEND / "index.js"), encoding="utf-8")
    code = f"import widget from {json.dumps(str(tmp_path / 'widget.mjs'))}; console.log(typeof widget.render)"
    assert run(node, "--input-type=module", "--eval", code) == "function\n"


def test_bundled_modules_share_no_names(node: str, tmp_path: Path) -> None:
    # Both modules have a `hidden`, and the second is imported twice: it runs once.
    (tmp_path / "one.js").write_text(
        'import { two } from "./two.js";\nconst hidden = "1";\nexport function one() { return hidden + two(); }\n'
    )
    (tmp_path / "two.js").write_text(
        'globalThis.runs = (globalThis.runs ?? 0) + 1;\nconst hidden = "2";\nexport const two = () => hidden;\n'
    )
    (tmp_path / "index.js").write_text(
        'import { one } from "./one.js";\nimport { two } from "./two.js";\n'
        "export default [one(), two(), globalThis.runs];\n"
    )
    (tmp_path / "bundled.mjs").write_text(bundle(tmp_path / "index.js"))
    code = f"import it from {json.dumps(str(tmp_path / 'bundled.mjs'))}; console.log(JSON.stringify(it))"
    assert json.loads(run(node, "--input-type=module", "--eval", code)) == ["12", "2", 1]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('import * as two from "./two.js";\n', "cannot be bundled"),
        ("export let one = 1;\n", "cannot be bundled"),
        ("export default 1;\n", "cannot be bundled"),
        ('import { index } from "./index.js";\n', "imports itself through"),
    ],
)
def test_what_cannot_be_bundled_is_an_error(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "index.js").write_text('import { one } from "./one.js";\nexport default one;\n')
    (tmp_path / "one.js").write_text(source)
    with pytest.raises(ValueError, match=message):
        bundle(tmp_path / "index.js")


# -- between Python and the browser


@pytest.mark.parametrize("length", [3, COMPRESS_FROM])
def test_browser_unpacks_what_python_packs(node: str, tmp_path: Path, length: int) -> None:
    content = {
        "x": np.array([1.5, 2.5]),
        "nested": [{"y": np.array([3.5])}],
        "rows": np.array([7]),
        "text": "µ" * length,
    }
    names = ["text", "numbers"]
    for name, buffer in zip(names, pack(content), strict=True):
        (tmp_path / name).write_bytes(buffer)
    code = f"""
        import {{ readFileSync }} from "node:fs";
        import {{ unpack }} from {json.dumps(str(FRONTEND / "unpacking.js"))};
        const read = name => {{ const bytes = readFileSync({json.dumps(str(tmp_path) + "/")} + name);
            return new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength) }};
        const {"{ x, nested, rows, text }"} = await unpack(read("text"), read("numbers"));
        console.log(JSON.stringify([[...x], [...nested[0].y], rows, text.length]))"""
    assert json.loads(run(node, "--input-type=module", "--eval", code)) == [[1.5, 2.5], [3.5], [7], length]


def test_scripts_of_an_environment_inside_the_checkout_are_no_modules() -> None:
    # JupyterLab runs its yarn.js, which requires packages. Node looks for this field in the folders above.
    assert "type" not in json.loads((REPOSITORY / "package.json").read_text())


# -- the wheel


def test_wheel_has_the_front_end_and_needs_no_node(tmp_path: Path) -> None:
    if importlib.util.find_spec("hatchling") is None:
        program_of(None, "hatchling", "pip install hatchling")
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path))
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
        names = archive.namelist()
    folder = "memexplore/jupyter/frontend/"
    packed = {name.removeprefix(folder) for name in names if name.startswith(folder)}
    files = {path.relative_to(FRONTEND).as_posix() for path in FRONTEND.rglob("*") if path.is_file()}
    assert packed == files - {"package.json"}
    assert not [name for name in names if "node_modules" in name or name.endswith("package.json")]
    installed = tmp_path / "installed"
    code = "import memexplore.jupyter.view as view; print(view.__file__, len(view.View._esm), len(view.View._css))"
    environment = {**os.environ, "PYTHONPATH": str(installed), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    file, script, style = done.stdout.split()
    assert Path(file).is_relative_to(installed)
    assert (int(script), int(style)) == (len(View._esm), len(View._css))
