"""Files that a program writes on a virtual GPU: the user's stay as they are, and the program reads its own."""

from __future__ import annotations

import builtins
import io
import os
import pathlib
import pickle
import pkgutil
import shutil
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

import memexplore as mx
from memexplore.virtual_gpu.files import session

pytestmark = pytest.mark.filterwarnings("ignore:memexplore.*temporary folder")


def _opened(path: str, mode: str) -> None:
    with open(path, mode):
        pass


def _model() -> torch.nn.Module:
    """A module without values."""
    return torch.nn.utils.skip_init(torch.nn.Linear, 3, 3, device="cuda")


def test_a_saved_checkpoint_replaces_the_real_one_for_the_program_only(folder):
    with mx.virtual("T4"):
        torch.save({"w": _model().weight, "epoch": 8}, "best.pt")
        loaded = torch.load("best.pt")
        assert (loaded["epoch"], loaded["w"].shape, loaded["w"].device.type) == (8, (3, 3), "cuda")
    assert torch.load("best.pt")["epoch"] == 7


def test_a_new_checkpoint_exists_for_the_program_only(folder):
    with mx.virtual("T4"):
        torch.save(_model().state_dict(), "new.pt")
        assert os.path.exists("new.pt")
        assert "new.pt" in os.listdir()
        assert pathlib.Path("new.pt") in list(pathlib.Path().glob("*.pt"))
        assert [entry.name for entry in os.scandir() if entry.is_file() and entry.name == "new.pt"] == ["new.pt"]
        assert os.path.getsize("new.pt") > 0
        assert torch.load("new.pt", weights_only=True)["weight"].shape == (3, 3)
        assert torch.load("new.pt", mmap=True)["weight"].shape == (3, 3)
    assert not os.path.exists("new.pt")


def test_a_file_of_values_that_are_assumed_is_not_kept(folder):
    with session.every_file(), mx.virtual("T4"):
        torch.save(torch.empty(8, 4, device="cuda").mul_(2).argmax(-1), "chosen.pt")
        assert repr(torch.load("chosen.pt")[0].item()) == "virtual"
    assert not pathlib.Path("chosen.pt").exists()
    assert session.report()[0].startswith("Files: chosen.pt was not kept, because the tensors have no values")


def test_real_tensors_are_saved_in_place(folder):
    with mx.virtual("T4"):
        torch.save({"w": torch.ones(2)}, "real.pt")
        np.save("real.npy", np.arange(3))
        pathlib.Path("notes.txt").write_text("mine")
    assert torch.load("real.pt")["w"].tolist() == [1.0, 1.0]
    assert np.load("real.npy").tolist() == [0, 1, 2]
    assert pathlib.Path("notes.txt").read_text() == "mine"
    assert session.report() == ()


@pytest.mark.parametrize("name", ["os.replace", "os.rename", "shutil.move", "shutil.copy", "shutil.copyfile"])
def test_a_file_that_is_moved_or_copied_over_a_checkpoint_keeps_the_real_one(folder, name):
    with mx.virtual("T4"):
        torch.save({"epoch": 8, "w": _model().weight}, "last.tmp")
        pkgutil.resolve_name(name)("last.tmp", "best.pt")
        assert torch.load("best.pt")["epoch"] == 8
        assert os.path.exists("last.tmp") == ("copy" in name)


def _write_bytes() -> None:
    buffer = io.BytesIO()
    torch.save(_model().state_dict(), buffer)
    with open("best.pt", "wb") as file:
        file.write(buffer.getvalue())


def _pickle() -> None:
    with open("best.pt", "wb") as file:
        pickle.dump(_model(), file)


def _write_array() -> None:
    np.zeros(2).tofile("array.npy")
    np.save("array.npy", np.zeros(2))
    with open("array.npy", "r+b") as file:
        file.write(b"other")
    np.memmap("array.npy", dtype=np.uint8, mode="r+")[:] = 0
    os.truncate("array.npy", 1)


def _map_array() -> None:
    mapped = np.memmap("array.npy", dtype=np.uint8)
    mapped[:] = 0
    mapped.flush()


def _delete() -> None:
    os.remove("best.pt")
    pathlib.Path("array.npy").unlink()
    assert not os.path.exists("best.pt")
    with pytest.raises(FileNotFoundError):
        _opened("best.pt", "rb")


def _rotate() -> None:
    """Delete the oldest checkpoint and write a new one of its name, as trainers do."""
    shutil.rmtree("old")
    assert not os.path.isdir("old")
    os.makedirs("old")
    assert os.listdir("old") == []
    torch.save(_model().state_dict(), "old/model.pt")
    assert os.listdir("old") == ["model.pt"]


def _old_api() -> None:
    torch.save(_model().state_dict(), "best.pt", _use_new_zipfile_serialization=False)
    assert torch.load("best.pt")["weight"].is_cuda


@pytest.mark.parametrize("write", [_write_bytes, _pickle, _write_array, _map_array, _delete, _rotate, _old_api])
def test_no_way_of_writing_changes_a_file_that_holds_values(folder, write):
    with mx.virtual("T4"):
        write()


def _native(*command: str) -> str:
    """Return what a program prints that knows nothing of the overlay."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


_TEMPORARY_FILE = """
import tempfile
import memexplore as mx
from memexplore.virtual_gpu.files import session
{before}
with session.every_file(), mx.virtual("T4"):
    {inside}
    with tempfile.NamedTemporaryFile() as file:
        print(file.write(b"written"))
"""


@pytest.mark.parametrize(("before", "inside"), [("tempfile.tempdir = None", "pass"), ("", "tempfile.tempdir = None")])
def test_a_run_may_be_the_first_to_find_the_folder_of_temporary_files(before, inside):
    """`tempfile` tries folders with os.open, under a lock that the overlay must not wait for."""
    code = _TEMPORARY_FILE.format(before=before, inside=inside)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200)
    assert done.stdout == "7\n"


def test_a_new_file_of_a_run_is_written_in_place(folder):
    with session.every_file(), mx.virtual("T4"):
        pathlib.Path("train.txt").write_text("one")
        with open("train.txt", "a") as file:
            file.write(" two")
        os.makedirs("data/raw")
        np.save("data/raw/x.npy", np.arange(3))
        torch.save({"w": torch.ones(2)}, "data/real.pt")
        assert _native("cat", "train.txt") == "one two"
        os.rename("data", "other")
        assert sorted(_native("ls", "other").split()) == ["raw", "real.pt"]
        os.remove("other/real.pt")
        shutil.copy("train.txt", "other/raw/copy.txt")
        assert sorted(_native("ls", "other/raw").split()) == ["copy.txt", "x.npy"]
    assert np.load("other/raw/x.npy").tolist() == [0, 1, 2]
    assert not os.path.exists("other/real.pt")
    assert session.report() == ()


@pytest.mark.parametrize("change", ["open w", "open a", "os.open", "truncate", "rename", "replace", "remove", "link"])
def test_a_run_changes_no_file_that_existed_before(folder, change):
    """`folder` compares the contents at the end."""
    with session.every_file(), mx.virtual("T4"):
        if change.startswith("open"):
            with open("old/state.json", change[-1]) as file:
                file.write("x")
        elif change == "os.open":
            os.close(os.open("old/state.json", os.O_WRONLY | os.O_TRUNC))
        elif change == "truncate":
            os.truncate("old/state.json", 0)
        elif change == "rename":
            os.rename("old/state.json", "state.json")
        elif change == "replace":
            pathlib.Path("new.json").write_text("new")
            os.replace("new.json", "old/state.json")
            assert pathlib.Path("old/state.json").read_text() == "new"
        elif change == "remove":
            os.remove("old/state.json")
            pathlib.Path("old/state.json").write_text("again")
        else:
            os.link("old/state.json", "linked.json")
            pathlib.Path("linked.json").write_text("new")


def test_a_run_deletes_its_own_folder_with_a_checkpoint(folder):
    with session.every_file(), mx.virtual("T4"):
        os.makedirs("runs/one")
        pathlib.Path("runs/one/log.txt").write_text("loss")
        torch.save(_model().state_dict(), "runs/one/model.pt")
        assert sorted(os.listdir("runs/one")) == ["log.txt", "model.pt"]
        assert _native("ls", "runs/one").split() == ["log.txt"]
        shutil.rmtree("runs")
        assert not os.path.exists("runs")
    assert not os.path.exists("runs")


def test_a_folder_made_for_a_checkpoint_does_not_stay_without_it(folder):
    with session.every_file(), mx.virtual("T4"):
        os.makedirs("checkpoints/1")
        torch.save(_model().state_dict(), "checkpoints/1/model.pt")
        os.makedirs("models")
        with open("models/model.pkl", "wb") as file:
            pickle.dump(_model(), file)
        os.makedirs("logs/empty")
        os.makedirs("runs")
        torch.save(_model().state_dict(), "runs/model.pt")
        pathlib.Path("runs/log.txt").write_text("loss")
        torch.save(_model().state_dict(), "old/model.pt")
    assert not os.path.exists("checkpoints")
    assert not os.path.exists("models")
    # Folders that the program left empty, or with other files, and the user's own are those of a real run.
    assert os.path.isdir("logs/empty")
    assert os.listdir("runs") == ["log.txt"]
    assert os.path.isdir("old")


def test_a_new_file_with_a_pickled_module_is_deleted_at_the_end_of_a_run(folder):
    with session.every_file(), mx.virtual("T4"):
        with open("model.pkl", "wb") as file:
            pickle.dump(_model(), file)
        with open("model.pkl", "rb") as file:
            assert pickle.load(file).weight.is_cuda
        pathlib.Path("notes.txt").write_text(session._overlay.mark.decode())
    assert not os.path.exists("model.pkl")
    assert os.path.exists("notes.txt")
    assert session.report() == (
        "Files: model.pkl was not kept, because the tensors have no values. Your own files are unchanged.",
    )


def test_changes_of_folders_that_existed_before_a_run_are_seen_by_the_program_only(folder):
    with session.every_file(), mx.virtual("T4"):
        with open("old/state.json", "a") as file:
            file.write("more")
        assert pathlib.Path("old/state.json").read_text() == "{}more"
        os.makedirs("runs/one")
        pathlib.Path("runs/one/log.txt").write_text("loss")
        os.rename("runs/one", "runs/two")
        assert [(where, sorted(names)) for where, _, names in os.walk("runs")] == [
            ("runs", []),
            ("runs/two", ["log.txt"]),
        ]
        os.symlink("two", "runs/latest")
        assert pathlib.Path("runs/latest/log.txt").read_text() == "loss"
        with pytest.raises(FileNotFoundError):
            _opened("missing/file.txt", "w")
        with pytest.raises(FileExistsError):
            _opened("best.pt", "x")
        with pytest.raises(IsADirectoryError):
            _opened("old", "w")
        with pytest.raises(OSError, match="not empty"):
            os.rmdir("old")
        os.rename("old", "older")
        assert sorted(os.listdir("older")) == ["model.pt", "state.json"]
        assert not os.path.exists("old")
    assert sorted(os.listdir()) == ["array.npy", "best.pt", "old", "runs"]
    assert sorted(os.listdir("old")) == ["model.pt", "state.json"]


def test_the_report_names_the_files_and_their_folder(folder):
    with session.every_file(), mx.virtual("T4"):
        torch.save(_model().state_dict(), "best.pt")
        pathlib.Path("old/state.json").write_text("loss")
        os.remove("array.npy")
    (text,) = session.report()
    place = text.partition("old/state.json was written to ")[2].partition(";")[0]
    assert "best.pt was not kept, because the tensors have no values" in text
    assert "array.npy was deleted by the program only" in text
    # The folder mirrors absolute paths.
    assert (pathlib.Path(place) / str(folder / "old/state.json").lstrip("/")).read_text() == "loss"
    shutil.rmtree(place)


def test_the_report_is_a_note_of_the_tape(folder):
    tape = mx.simulate(lambda: torch.save(_model().state_dict(), "best.pt"))
    assert any("best.pt was not kept" in note for note in tape.meta.notes)


def test_results_of_memexplore_are_written_in_place(folder):
    with mx.virtual("T4"):
        with mx.record() as recording:
            _model()
        mx.save_snapshot(recording.tape, "predicted.pickle")
        mx.save_snapshot(recording.tape, "predicted.pickle")
    assert mx.load("predicted.pickle")


def test_the_overlay_is_deleted_when_nothing_in_it_is_kept(folder):
    with mx.virtual("T4"):
        torch.save(_model().state_dict(), "best.pt")
        root = session._overlay.root
        assert os.path.isdir(root)
    assert not os.path.exists(root)


def test_the_first_such_file_gives_one_warning(folder):
    with warnings.catch_warnings(record=True) as caught, mx.virtual("T4"):
        warnings.simplefilter("always")
        torch.save(_model().state_dict(), "best.pt")
        torch.save(_model().state_dict(), "best.pt")
    assert [str(entry.message).partition(" is written")[0] for entry in caught] == [f"memexplore: {folder}/best.pt"]


def test_functions_of_files_are_restored():
    def functions() -> list[object]:
        return [builtins.open, io.open, shutil.rmtree, np.memmap.__new__, *vars(os).values()]

    before = functions()
    with mx.virtual("T4"):
        assert functions() != before
    assert all(one is other for one, other in zip(functions(), before, strict=True))


# --- after the virtual GPU is off -------------------------------------------------------------------------------------


def test_saving_afterwards_is_one_sentence_and_the_file_stays(folder):
    with mx.virtual("T4"):
        model = _model()
    for path in ("best.pt", "new.pt"):
        with pytest.raises(RuntimeError, match=f"{path} was not written: its tensors were made on a virtual GPU"):
            torch.save(model, path)
    assert not os.path.exists("new.pt")


def test_saving_real_tensors_afterwards_works(folder):
    with mx.virtual("T4"):
        model = _model()
    torch.save({"w": torch.ones(2)}, "other.pt")
    assert torch.load("other.pt")["w"].tolist() == [1.0, 1.0]
    del model


def test_pickling_afterwards_is_one_sentence():
    with mx.virtual("T4"):
        model = _model()
    with pytest.raises(RuntimeError, match="made on a virtual GPU, which is off now, and has no values to save"):
        pickle.dumps(model)


def test_a_mark_that_an_interrupt_left_does_not_switch_the_overlay_off(folder):
    session._overlay._thread.inside = True
    with mx.virtual("T4"):
        torch.save({"w": _model().weight, "epoch": 8}, "best.pt")
    assert torch.load("best.pt")["epoch"] == 7
