"""Files with values that are kept: those of the user in unusual places, and those of a program on a virtual GPU."""

from __future__ import annotations

import bz2
import contextlib
import importlib.util
import io
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import tarfile
import tempfile
import types
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import memexplore as mx
from memexplore.virtual_gpu.files import session

pytestmark = [
    pytest.mark.filterwarnings("ignore:memexplore.*temporary folder"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]


def _model() -> torch.nn.Module:
    """A module without values."""
    return torch.nn.utils.skip_init(torch.nn.Linear, 3, 3, device="cuda")


@contextlib.contextmanager
def _script() -> Iterator[None]:
    with session.every_file(), mx.virtual("T4"):
        yield


@pytest.mark.parametrize("virtual", [lambda: mx.virtual("T4"), _script], ids=["notebook", "run"])
@pytest.mark.parametrize("name", ["best.pt", "new.pt"])
def test_known_values_are_kept_beside_the_users_files(folder, virtual, name):
    with virtual():
        torch.save({"n": torch.tensor([3, 4], device="cuda")}, name)
        assert torch.load(name)["n"].tolist() == [3, 4]
    (text,) = session.report()
    place = text.removeprefix(f"Files: {name} was written to ").removesuffix(". Your own files are unchanged.")
    kept = pathlib.Path(place) / str(folder / name).lstrip("/")
    assert torch.load(kept, weights_only=False)["n"].tolist() == [3, 4]
    shutil.rmtree(place)


def test_a_file_with_a_tensor_without_values_is_not_kept(folder):
    with mx.virtual("T4"):
        torch.save({"n": torch.tensor([3, 4], device="cuda"), "w": _model().weight}, "new.pt")
    assert session.report()[0].startswith("Files: new.pt was not kept, because the tensors have no values")


def test_an_object_that_cannot_be_pickled_empties_no_checkpoint(folder):
    with mx.virtual("T4"), pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        torch.save({"schedule": lambda: 0, "w": _model().weight}, "best.pt")


def test_real_tensors_are_loaded_from_a_file_that_was_deleted_before(folder):
    with mx.virtual("T4"):
        os.remove("best.pt")
        torch.save({"w": torch.ones(2)}, "best.pt")
        assert torch.load("best.pt")["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("save", [torch.save, torch.serialization.save])
def test_a_module_that_imported_torch_save_before_replaces_no_checkpoint(folder, monkeypatch, save):
    module = types.ModuleType("of_the_user")
    module.save = save
    monkeypatch.setitem(sys.modules, "of_the_user", module)
    with mx.virtual("T4"):
        module.save(_model(), "best.pt")
        assert isinstance(torch.load("best.pt", weights_only=False), torch.nn.Linear)
    assert module.save is save


def _open_bytes() -> None:
    with open(b"best.pt", "wb") as file:
        file.write(b"new")
    assert os.path.getsize(b"best.pt") == 3
    assert os.path.realpath(b"best.pt") == os.fsencode(os.path.realpath("best.pt"))
    os.remove(b"array.npy")
    assert not os.path.exists(b"array.npy")
    assert b"best.pt" in os.listdir(b".")


def _write_archives() -> None:
    tarfile.open("best.pt", "w").close()
    with bz2.open("array.npy", "wb") as file:
        file.write(b"new")


@pytest.mark.parametrize("write", [_open_bytes, _write_archives])
@pytest.mark.parametrize("virtual", [lambda: mx.virtual("T4"), _script], ids=["notebook", "run"])
def test_rarer_ways_of_writing_change_no_file(folder, virtual, write):
    with virtual():
        write()


def test_a_folder_with_checkpoints_that_takes_the_place_of_another_stays(folder):
    os.makedirs("newer")
    torch.save({"w": torch.arange(4.0)}, "newer/model.pt")
    before = pathlib.Path("newer/model.pt").read_bytes()
    with mx.virtual("T4"):
        shutil.rmtree("old")
        os.rename("newer", "old")
        assert os.listdir("old") == ["model.pt"]
        assert not os.path.exists("newer")
    assert pathlib.Path("newer/model.pt").read_bytes() == before


@pytest.mark.parametrize("virtual", [lambda: mx.virtual("T4"), _script], ids=["notebook", "run"])
def test_a_path_above_a_linked_folder_is_that_of_the_system(folder, virtual):
    os.makedirs("store/runs")
    os.symlink("store/runs", "runs")
    np.save("store/array.npy", np.arange(3))
    before = pathlib.Path("store/array.npy").read_bytes()
    with virtual():
        np.save("runs/../array.npy", np.zeros(2))
        assert np.load("store/array.npy").tolist() == [0.0, 0.0]
        assert np.load("array.npy").tolist() == [0, 1, 2, 3, 4]
    assert pathlib.Path("store/array.npy").read_bytes() == before


@pytest.mark.parametrize("save", [np.save, lambda path, array: torch.save(_model(), path)], ids=["numpy", "torch"])
def test_a_checkpoint_in_a_folder_that_takes_no_new_files_stays(folder, monkeypatch, save):
    access = os.access
    # As for another user than root: no files are made in the folder, and those in it may be written.
    monkeypatch.setattr(os, "access", lambda path, mode: access(path, mode) and not os.path.isdir(path))
    with mx.virtual("T4"):
        save("array.npy", np.zeros(2))


def test_a_real_array_among_the_temporary_files_stays(folder, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    np.save("torch_losses.npy", np.arange(3))
    with session.every_file(), mx.virtual("T4"):
        np.save("torch_losses.npy", np.zeros(2))
        np.save("tmp_new.npy", np.zeros(2))
        subprocess.run(["ls", "tmp_new.npy"], check=True)
    assert np.load("torch_losses.npy").tolist() == [0, 1, 2]


@pytest.mark.parametrize("make", [torch.jit.script, lambda model: torch.jit.trace(model, torch.ones(1, 3).cuda())])
def test_a_saved_script_module_replaces_no_checkpoint(folder, make):
    with mx.virtual("T4"):
        torch.jit.save(make(_model()), "best.pt")
        with pytest.raises(RuntimeError, match=r"best\.pt was saved by torch.jit with tensors of the virtual GPU"):
            torch.jit.load("best.pt")


def test_a_script_module_of_real_tensors_is_saved_as_the_policy_says(folder):
    torch.jit.script(torch.nn.Linear(3, 1)).save("old.pt")
    before = pathlib.Path("old.pt").read_bytes()
    with session.every_file(), mx.virtual("T4"):
        for name in ("old.pt", "new.pt"):
            torch.jit.script(torch.nn.Linear(2, 1)).save(name)
            assert torch.jit.load(name).weight.shape == (1, 2)
    assert pathlib.Path("old.pt").read_bytes() == before
    assert torch.jit.load("new.pt").weight.shape == (1, 2)


@pytest.mark.parametrize("place", ["cuda", "cuda:0", torch.device("cuda")])
def test_a_script_module_is_loaded_onto_the_virtual_gpu(folder, place):
    torch.jit.script(torch.nn.Linear(3, 1)).save("real.pt")
    with mx.virtual("T4"):
        for file in ("real.pt", io.BytesIO(pathlib.Path("real.pt").read_bytes())):
            module = torch.jit.load(file, map_location=place)
            assert module.weight.is_cuda
            assert module(torch.ones(2, 3, device="cuda")).shape == (2, 1)


def test_a_file_object_with_a_script_module_of_the_virtual_gpu_is_not_loaded(folder):
    with mx.virtual("T4"):
        file = io.BytesIO()
        torch.jit.save(torch.jit.script(torch.nn.Linear(3, 1).cuda()), file)
        file.seek(0)
        with pytest.raises(RuntimeError, match=r"was saved by torch\.jit with tensors of the virtual GPU"):
            torch.jit.load(file)


# --- unknown values in formats of the program's own ------------------------------------------------------------------

_MIB = 2**20


def _unknown(mebibytes: int) -> np.ndarray:
    return torch.randn(mebibytes, 2**18, device="cuda").cpu().numpy()


def _disk_space(path: str) -> int:
    return os.stat(path).st_blocks * 512


@pytest.mark.parametrize(
    ("write", "header"),
    [
        (lambda file, array: file.write(array.tobytes()), 0),
        (lambda file, array: file.write(array), 0),
        (lambda file, array: file.write(memoryview(array)), 0),
        (lambda file, array: file.write(array.astype(np.float16).astype(np.float32).tobytes()), 0),
        (lambda file, array: array.tofile(file), 0),
        (lambda file, array: np.save(file, array), 128),
    ],
    ids=["tobytes", "array", "memoryview", "astype", "tofile", "save"],
)
def test_unknown_values_in_a_file_take_no_disk_space(folder, write, header):
    with _script():
        with open("weights.bin", "wb") as file:
            file.write(b"magic")
            write(file, _unknown(32))
            file.write(b"end")
        assert os.path.getsize("weights.bin") == 5 + header + 32 * _MIB + 3
        # A block of the file system at most for each of the two texts and the header.
        assert _disk_space("weights.bin") < _MIB
        with open("weights.bin", "rb") as file:
            assert file.read(5) == b"magic"
            file.seek(-3, os.SEEK_END)
            assert file.read() == b"end"
    assert not os.path.exists("weights.bin")
    assert session.report() == (
        "Files: weights.bin was not kept, because the tensors have no values. Your own files are unchanged.",
    )


@pytest.mark.parametrize("mode", ["ab", "a+b", "w+b", "xb"])
def test_a_file_has_its_length_in_every_mode(folder, mode):
    with _script():
        for _ in range(1 if "x" in mode else 2):
            with open("weights.bin", mode) as file:
                file.write(_unknown(2).tobytes())
                file.write(b"end")
        parts = 2 if "a" in mode else 1
        assert os.path.getsize("weights.bin") == parts * (2 * _MIB + 3)
        assert pathlib.Path("weights.bin").read_bytes().count(b"end") == parts
        assert _disk_space("weights.bin") < _MIB


def test_arrays_of_ones_that_are_real_are_written_as_they_are(folder):
    with _script():
        np.ones((2, 2**18), np.float32).tofile("ones.bin")
        torch.ones(2, 2**18).numpy().tofile("tensor.bin")
    assert np.fromfile("ones.bin", np.float32).sum() == np.fromfile("tensor.bin", np.float32).sum() == 2 * 2**18
    assert session.report() == ()


def test_a_file_of_unknown_values_is_not_kept_under_another_name(folder):
    with _script():
        _unknown(1).tofile("part.bin")
        os.replace("part.bin", "whole.bin")
        _unknown(1).tofile("over.bin")
        pathlib.Path("real.bin").write_bytes(b"real")
        os.replace("real.bin", "over.bin")
        _unknown(1).tofile("again.bin")
        pathlib.Path("again.bin").write_bytes(b"real")
        # The user's array is replaced for the program only.
        _unknown(1).tofile("array.npy")
        assert os.path.getsize("array.npy") == _MIB
    assert not os.path.exists("whole.bin")
    assert pathlib.Path("over.bin").read_bytes() == pathlib.Path("again.bin").read_bytes() == b"real"
    assert session.report() == (
        "Files: array.npy, whole.bin were not kept, because the tensors have no values. Your own files are unchanged.",
    )


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("array.npz", lambda array: np.savez("array", array)),
        ("array.npz", lambda array: np.savez_compressed("array.npz", weight=array)),
        ("array.txt", lambda array: np.savetxt("array.txt", array[:, :2])),
        ("array.pkl", lambda array: _dump({"weights": [array]}, "array.pkl")),
        ("array.pt", lambda array: torch.save({"weight": array}, "array.pt")),
    ],
    ids=["savez", "savez_compressed", "savetxt", "pickle", "torch"],
)
@pytest.mark.parametrize("exists", [False, True])
def test_archives_and_pickles_with_unknown_values_are_not_kept(folder, name, write, exists):
    if exists:
        pathlib.Path(name).write_bytes(b"mine")
    with _script():
        write(_unknown(1))
        assert os.path.getsize(name) > 4
    assert (pathlib.Path(name).read_bytes() == b"mine") if exists else not os.path.exists(name)
    assert session.report() == (
        f"Files: {name} was not kept, because the tensors have no values. Your own files are unchanged.",
    )


def _dump(value: object, path: str) -> None:
    with open(path, "wb") as file:
        pickle.dump(value, file)


def test_archives_and_pickles_with_values_are_kept(folder):
    with _script():
        unknown = _unknown(1)
        np.savez("values.npz", np.arange(3.0))
        _dump([np.arange(3.0), float(unknown.size)], "values.pkl")
    assert np.load("values.npz")["arr_0"].tolist() == [0, 1, 2]
    assert pathlib.Path("values.pkl").exists()
    assert session.report() == ()


@pytest.mark.parametrize("imported_before", [False, True])
def test_hdf5_files_of_the_user_stay(folder, imported_before):
    if importlib.util.find_spec("h5py") is None:
        pytest.skip("no h5py")
    code = f"""
import os, torch, memexplore as mx
from memexplore.virtual_gpu.files import session
if {imported_before}:
    import h5py
for name in ("mine.h5", "mine_too.h5"):
    open(name, "wb").write(b"mine")
with session.every_file(), mx.virtual("T4"):
    import h5py
    unknown = torch.randn(4, 4, device="cuda").div_(torch.empty(4, 4, device="cuda")).cpu().numpy()
    with h5py.File("mine.h5", "w") as file:
        file["weight"] = unknown
    with h5py.File("mine.h5") as file:
        print(file["weight"].shape)
    with h5py.File("mine_too.h5", "w") as file:
        file["numbers"] = [1, 2]
    with h5py.File("mine_too.h5", "a") as file:
        print(file["numbers"][:].tolist())
    with h5py.File("new.h5", "a") as file:
        file.create_dataset("rows", (2, 4))[0] = unknown[0]
    with h5py.File("numbers.h5", "a") as file:
        file["numbers"] = [3, 4]
print(*session.report())
for name in ("mine.h5", "mine_too.h5"):
    print(open(name, "rb").read())
with h5py.File("numbers.h5") as file:
    print(os.path.exists("new.h5"), file["numbers"][:].tolist())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = result.stdout.splitlines()
    assert lines[:2] + lines[3:] == ["(4, 4)", "[1, 2]", "b'mine'", "b'mine'", "False [3, 4]"]
    assert lines[2].startswith(
        "Files: mine.h5, new.h5 were not kept, because the tensors have no values; mine_too.h5 was written to "
    )


def test_a_notebook_is_told_which_of_its_files_have_zeros(folder):
    with mx.virtual("T4"):
        _unknown(2).tofile("weights.bin")
    assert os.path.getsize("weights.bin") == 2 * _MIB
    assert session.report() == (
        "Files: weights.bin has zeros or ones in place of values that are not known. Your own files are unchanged.",
    )
