"""`nvidia-smi` in processes that a program starts on a virtual GPU, and `pynvml`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memexplore as mx
from memexplore.virtual_gpu.values import notes

MIB = 1024**2
QUERY = ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits"]

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the command is a script of the shell")


def printed(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def used_and_total() -> list[int]:
    return list(map(int, printed(*QUERY).split(", ")))


def test_memory_in_use_is_that_of_the_moment() -> None:
    with mx.virtual("T4"):
        free, total = torch.cuda.mem_get_info()
        # A process that has computed nothing has no context on the GPU.
        assert used_and_total() == [0, total // MIB]
        kept = torch.ones(64, 1024, 1024, device="cuda")
        # 256 MiB in a segment of its own, and what lies outside the allocator
        assert used_and_total() == [round((256 * MIB + total - free) / MIB), total // MIB]
        del kept
        torch.cuda.empty_cache()
        assert used_and_total() == [round((total - free) / MIB), total // MIB]


def test_every_way_of_starting_a_process_finds_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    with mx.virtual("A100 80GB"):
        name = torch.cuda.get_device_name()
        assert name in printed("nvidia-smi")
        assert name in subprocess.check_output("nvidia-smi -L", shell=True, text=True)
        assert name in os.popen("nvidia-smi -L").read()
        assert os.system("nvidia-smi -L") == 0
        assert name in capfd.readouterr().out
        assert shutil.which("nvidia-smi") is not None


def test_a_monitor_in_a_thread_sees_memory_grow() -> None:
    readings: list[int] = []

    def watch() -> None:
        command = [*QUERY, "-lms", "20"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                readings.append(int(line.split(",")[0]))
                seen.set()
                if readings[-1] >= 1024:
                    process.terminate()

    with mx.virtual("T4"):
        seen = threading.Event()
        thread = threading.Thread(target=watch)
        thread.start()
        assert seen.wait(60)
        kept = torch.ones(256, 1024, 1024, device="cuda")
        thread.join(60)
    assert kept.nbytes == 1024 * MIB
    assert (readings[0], readings[-1] >= 1024) == (0, True)


def test_the_environment_is_as_before_afterwards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = dict(os.environ)
    with mx.virtual("T4"):
        assert os.environ["PATH"] != before["PATH"]
    assert dict(os.environ) == before
    with mx.virtual("T4"):
        # What the program changes stays.
        os.environ["PATH"] += f":{tmp_path}"
    assert os.environ["PATH"] == f"{before['PATH']}:{tmp_path}"
    monkeypatch.delenv("PATH")
    with mx.virtual("T4"):
        assert printed("nvidia-smi", "-L")
    assert "PATH" not in os.environ


def test_the_command_that_a_machine_has_runs_when_the_gpu_is_off(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho real $1\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    with mx.virtual("T4"):
        kept = os.environ["PATH"]
    result = subprocess.run(
        "nvidia-smi -L", shell=True, env={"PATH": f"{kept}:{tmp_path}"}, capture_output=True, text=True
    )
    assert result.stdout == "real -L\n"
    folders = ":".join(folder for folder in kept.split(":") if not os.path.exists(f"{folder}/nvidia-smi"))
    own = kept.split(":")[0]
    result = subprocess.run("nvidia-smi", shell=True, env={"PATH": f"{own}:{folders}"}, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (127, "nvidia-smi: command not found (no virtual GPU is on)\n")


def test_ranks_of_a_node_see_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with mx.virtual("T4"):
        assert len(printed("nvidia-smi", "-L").splitlines()) == torch.cuda.device_count() == 4


def _program(temporary: Path, statement: str) -> subprocess.CompletedProcess[str]:
    code = f"import os, signal, memexplore as mx\nwith mx.virtual('T4'): {statement}"
    environment = {**os.environ, "TMPDIR": str(temporary)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def _own(temporary: Path) -> list[Path]:
    """Return our folders: torch may have one for its compiler."""
    return list(temporary.glob("memexplore-*"))


def test_a_program_that_ends_leaves_no_folder(tmp_path: Path) -> None:
    done = _program(tmp_path, "print(os.environ['PATH'].split(':')[0])")
    assert Path(done.stdout.strip()).parent == tmp_path
    assert _own(tmp_path) == []


def test_the_folder_of_a_killed_program_is_removed_by_the_next(tmp_path: Path) -> None:
    _program(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert len(_own(tmp_path)) == 1
    _program(tmp_path, "pass")
    assert _own(tmp_path) == []


# --- pynvml -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def without_package() -> None:
    if importlib.util.find_spec("pynvml") is not None:
        pytest.skip("the package is installed")


def test_a_module_stands_in_for_the_package(without_package: None) -> None:
    with mx.virtual("T4"):
        import pynvml  # type: ignore[import-not-found]

        torch.ones(1, device="cuda")
        pynvml.nvmlInit()
        assert importlib.util.find_spec("pynvml") is not None
        assert pynvml.nvmlDeviceGetCount() == 1
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        assert (memory.free, memory.total) == torch.cuda.mem_get_info()
        assert memory.used == memory.total - memory.free == torch.cuda.device_memory_used()
        assert pynvml.nvmlDeviceGetName(handle) == torch.cuda.get_device_name()
        assert pynvml.nvmlDeviceGetUUID(handle) == f"GPU-{torch.cuda.get_device_properties().uuid}"
        assert printed("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").strip() == (
            pynvml.nvmlSystemGetDriverVersion()
        )
        assert pynvml.nvmlSystemGetCudaDriverVersion() == 13000
        (process,) = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        assert (process.pid, process.usedGpuMemory) == (os.getpid(), memory.used)
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            pynvml.nvmlDeviceGetHandleByIndex(1)
        with pytest.raises(pynvml.NVMLError, match="NotSupported"):
            pynvml.nvmlDeviceGetEncoderUtilization(handle)
        pynvml.nvmlShutdown()
    assert "pynvml" not in sys.modules


def test_sensors_give_unknown_numbers_with_a_note(without_package: None) -> None:
    with mx.virtual("T4"):
        import pynvml

        rates = pynvml.nvmlDeviceGetUtilizationRates(0)
        assert f"{rates.gpu} {torch.cuda.utilization()} {torch.cuda.temperature()}" == "virtual virtual virtual"
        assert pynvml.nvmlDeviceGetTemperature(0, pynvml.NVML_TEMPERATURE_GPU) > 0
        texts = notes.notes_of_run()
    for sensor in ("utilization", "temperature"):
        assert any(f"the {sensor} is not known of a virtual GPU: it counts as 1" in text for text in texts)


@pytest.fixture(params=["imported before", "imported later"])
def package(request: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A package whose library is absent, and which counts nothing itself."""
    (tmp_path / "pynvml.py").write_text(
        "class NVMLError(Exception): pass\n"
        "class NVMLError_NotSupported(NVMLError): pass\n"
        "class NVMLError_FunctionNotFound(NVMLError): pass\n"
        "def _nvmlGetFunctionPointer(name): raise NVMLError('Uninitialized')\n"
        "NVML_TEMPERATURE_GPU = 0\n"
        "def nvmlInit(): raise NVMLError('Library Not Found')\n"
        "def nvmlDeviceGetCount(): raise NVMLError('Uninitialized')\n"
        "def nvmlDeviceGetFanControlPolicy(handle): raise NVMLError('Uninitialized')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    yield request.param
    sys.modules.pop("pynvml", None)


def test_functions_of_an_installed_package_are_replaced(package: str) -> None:
    if package == "imported before":
        importlib.import_module("pynvml")
    with mx.virtual("T4"):
        pynvml: Any = importlib.import_module("pynvml")
        pynvml.nvmlInit()
        assert pynvml.nvmlDeviceGetCount() == 1
        with pytest.raises(pynvml.NVMLError_NotSupported):
            pynvml.nvmlDeviceGetFanControlPolicy(0)
        # As gpustat asks for the newest version of a function.
        assert pynvml._nvmlGetFunctionPointer("nvmlDeviceGetMemoryInfo_v2")(0).used == 0
        with pytest.raises(pynvml.NVMLError_FunctionNotFound):
            pynvml._nvmlGetFunctionPointer("nvmlDeviceGetMemoryInfo_v9")
    assert isinstance(pynvml, types.ModuleType)
    with pytest.raises(pynvml.NVMLError, match="Library Not Found"):
        pynvml.nvmlInit()
    assert not hasattr(pynvml, "nvmlDeviceGetName")


def test_a_forked_child_does_not_change_what_its_parent_shows() -> None:
    with mx.virtual("T4"):
        kept = torch.ones(1, device="cuda")
        before = used_and_total()
        child = os.fork()
        if not child:
            torch.ones(256, 1024, 1024, device="cuda")
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert used_and_total() == before
    assert kept.numel() == 1
