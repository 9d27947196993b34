"""Report on this machine: torch and its private names, a GPU or a virtual one, notebook packages, a browser."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys

from memexplore.text.package import VERSION, install_command
from memexplore.text.units import size_text

_PACKAGES = ("jupyterlab", "ipykernel", "ipywidgets", "anywidget", "plotly", "pandas")
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "firefox", "microsoft-edge")


def report() -> bool:
    """Print what this machine has and what is missing. Return whether training code can be simulated on it."""
    print(f"memexplore {VERSION}, Python {sys.version.split()[0]}")
    works = _torch()
    versions = {name: _version(name) for name in _PACKAGES}
    print("Packages: " + ", ".join(f"{name} {version}" for name, version in versions.items() if version))
    missing = [name for name, version in versions.items() if not version]
    if missing:
        print(f"Missing: {', '.join(missing)}. For notebooks: {install_command('lab')}")
    _browser(can_start_lab="jupyterlab" not in missing)
    return works


def _browser(can_start_lab: bool) -> None:
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    elsewhere = "; `memexplore lab --no-browser` prints an address to open elsewhere" if can_start_lab else ""
    print(f"Browser: {browser or f'none found{elsewhere}'}")


def _version(name: str) -> str | None:
    """Return the version of a package, None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> bool:
    """Report on torch and the GPUs. Return whether a virtual GPU works."""
    try:
        import torch
    except ImportError as error:
        print(f"torch: cannot be imported ({error}): pip install torch")
        return False
    print(f"torch {torch.__version__}, built for {'CUDA ' + torch.version.cuda if torch.version.cuda else 'the CPU'}")
    _internals()
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            use = "" if number else "; `memexplore run` measures on it, unless --gpu names a virtual GPU"
            print(f"GPU {number}: {properties.name}, {size_text(properties.total_memory)}{use}")
    else:
        print("GPU: none; training code runs on a virtual GPU, a T4 unless --gpu names another")
    return _virtual_gpu()


def _internals() -> None:
    """Report whether this release of torch is tested, and the private names that it lacks."""
    from memexplore.torch_internals import check

    oldest, newest = (f"{major}.{minor}" for major, minor in check.TESTED)
    print(f"Tested releases of torch: {oldest} to {newest}{'' if check.tested() else '; this one is newer'}")
    missing = check.missing()
    for row in missing:
        print(f"torch lacks {row.name} ({row.why}). Without it: {row.if_missing}")
    if not missing:
        print(f"Private names of torch: all {len(check.internals())} work")


def _virtual_gpu() -> bool:
    """Report whether code runs on a virtual GPU."""
    try:
        import torch

        from memexplore.run.simulate import simulate

        tape = simulate(lambda: torch.ones(1, device="cuda"), gpu="T4")
    except Exception as error:
        print(f"Virtual GPU: does not work here: {error}")
        return False
    print(f"Virtual GPU: works ({len(tape)} events for one tensor)")
    return True
