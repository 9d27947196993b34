"""What this machine has: torch, a GPU or a virtual one, the notebook packages, a browser."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys

import memexplore
from memexplore.units import size_text

INSTALL_LAB = 'pip install -e ".[lab]"'
"""What to type where JupyterLab is missing."""


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def report() -> bool:
    """Print what this machine has and what is missing; False where training code cannot be simulated here."""
    print(f"memexplore {memexplore.__version__}, Python {sys.version.split()[0]}")
    works = _torch()
    packages = ("jupyterlab", "ipykernel", "ipywidgets", "anywidget", "plotly", "pandas", "pyarrow")
    found = {name: _version(name) for name in packages}
    print("Packages: " + ", ".join(f"{name} {version}" for name, version in found.items() if version))
    if missing := [name for name, version in found.items() if not version]:
        print(f"Missing: {', '.join(missing)}. For notebooks: {INSTALL_LAB}")
    names = ("chromium", "chromium-browser", "google-chrome", "firefox", "microsoft-edge")
    browser = next(filter(None, map(shutil.which, names)), None)
    print(f"Browser: {browser or 'none found; `memexplore lab --no-browser` prints an address to open elsewhere'}")
    return works


def _torch() -> bool:
    try:
        import torch
    except ImportError as error:
        print(f"torch: cannot be imported ({error}): pip install torch")
        return False
    print(f"torch {torch.__version__}, built for {'CUDA ' + torch.version.cuda if torch.version.cuda else 'the CPU'}")
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            print(f"GPU {number}: {properties.name}, {size_text(properties.total_memory)}; `run` measures on GPU 0")
    else:
        print("GPU: none; training code runs on a virtual GPU, a T4 unless --gpu names another")
    from memexplore import capture

    try:
        tape = capture.simulate(lambda: torch.ones(1, device="cuda"), gpu="T4")
    except Exception as error:
        print(f"Virtual GPU: does not work here: {error}")
        return False
    print(f"Virtual GPU: works ({len(tape)} events for one tensor)")
    return True
