"""The scripts in the folders beside this file: their libraries, arguments and environment variables."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent

_RANKS = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
ENVIRONMENT: dict[str, dict[str, str]] = {
    "pytorch_examples/ddp_toy.py": _RANKS | {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"},
    "pytorch_examples/mingpt_ddp.py": _RANKS | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
    "pytorch_examples/fsdp2_transformer.py": _RANKS | {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"},
    "pytorch_examples/tensor_parallel.py": _RANKS | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
}
"""Environment variables of a run, such as torchrun sets them: the run is rank 0."""

RANKS = frozenset(ENVIRONMENT)
"""Scripts that are one rank of several: plain Python on the CPU would wait for the other ranks."""

LARGE = frozenset(
    {
        "pytorch_examples/imagenet.py",
        "transformers_examples/gpt2_small_full_size.py",
        "trl_peft_examples/llama_lora_full_size.py",
        "timm_examples/convnext_base_amp.py",
        "torchvision_examples/resnet50_channels_last.py",
    }
)
"""Scripts of the usual size, which a CPU does not finish within minutes: run on the virtual GPU only."""

_DISTRIBUTIONS = {
    "PIL": "pillow",
    "segmentation_models_pytorch": "segmentation-models-pytorch",
    "sklearn": "scikit-learn",
    "ignite": "pytorch-ignite",
    "open_clip": "open_clip_torch",
    "pyro": "pyro-ppl",
    "yaml": "PyYAML",
}


class Script(NamedTuple):
    """A script. `name` is its path below tests/scripts, such as ``pytorch_examples/mnist.py``."""

    name: str
    path: Path
    libraries: tuple[str, ...]
    """Names of the packages that it imports anywhere, the standard library left out."""

    @property
    def missing(self) -> list[str]:
        """Libraries that are not installed."""
        return [library for library in self.libraries if importlib.util.find_spec(library) is None]


def scripts(parts: Sequence[str] = ()) -> list[Script]:
    """Return all scripts, or those whose name contains one of `parts`."""
    found = [_script(path) for path in sorted(ROOT.glob("*/*.py")) if not path.name.startswith("_")]
    return [script for script in found if not parts or any(part in script.name for part in parts)]


def version(library: str) -> str:
    """Return the installed version of an importable package, such as ``2.13.0``; its local part is left out."""
    try:
        return importlib.metadata.version(_DISTRIBUTIONS.get(library, library)).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        names = importlib.metadata.packages_distributions().get(library)
        return importlib.metadata.version(names[0]).partition("+")[0] if names else "?"


@cache
def _script(path: Path) -> Script:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.add(node.module.partition(".")[0])
    beside = {other.stem for other in path.parent.glob("_*.py")}
    return Script(str(path.relative_to(ROOT)), path, tuple(sorted(modules - sys.stdlib_module_names - beside)))
