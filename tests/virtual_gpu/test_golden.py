"""The virtual GPU compared with recordings of real GPUs: requests in order, curves row by row."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from memexplore import capture, gpu_catalogue
from memexplore.analysis import curves, summary
from memexplore.tape import Action, Meta, Source, Tape
from tests.gpu import golden
from tests.gpu.scenarios import SCENARIOS

ROOT = pathlib.Path(__file__).parent.parent.parent
REQUESTS = (Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED, Action.OOM)
FILES = sorted(golden.FOLDER.glob("golden_*.json.gz"))
RECORDED = [(path, name) for path in FILES for name in golden.read(path)["scenarios"]]
NONE = pytest.param(
    None, None, marks=pytest.mark.skip("tests/data holds no golden recording: python -m tests.gpu.record makes one")
)


def predicted(name: str, gpu: str, torch: str | None = None) -> Tape:
    return capture.simulate(SCENARIOS[name].function, gpu=gpu, release=torch, settings=SCENARIOS[name].allocator)


def measured(run: dict, name: str) -> Tape:
    """Return a recorded scenario as a Tape, up to its out-of-memory error if it has one."""
    events = run["scenarios"][name]["events"]
    action = np.array([Action[word.upper()] for word in golden.ACTIONS])[events["action"]]
    tape = Tape.from_columns(
        {"action": action, "size": events["size"], "address": events["address"], "stream": events["stream"],
         "op": events["frame"]},
        ops=events["frames"],
        meta=Meta(Source.MEASURED, run["gpu"]["name"], total=run["gpu"]["total_memory"]),
    )  # fmt: skip
    return up_to_oom(tape)


def up_to_oom(tape: Tape) -> Tape:
    rows = np.flatnonzero(tape.action == Action.OOM)
    return tape[: rows[0] + 1] if len(rows) else tape


def requests(tape: Tape) -> np.ndarray:
    return np.flatnonzero(np.isin(tape.action, REQUESTS))


def first_difference(predicted: Tape, recorded: Tape) -> str:
    """Return the first difference of two runs with the requests around it; empty if they are equal."""
    predicted_rows, recorded_rows = requests(predicted), requests(recorded)
    # Streams are pointers on a real GPU: only their order of first use can be compared.
    streams = [
        {stream: number for number, stream in enumerate(dict.fromkeys(tape.stream.tolist()))}
        for tape in (predicted, recorded)
    ]

    def described(tape: Tape, rows: np.ndarray, position: int, numbers: dict) -> tuple:
        if position >= len(rows):
            return ("end",)
        row = rows[position]
        return Action(tape.action[row]).name, int(tape.size[row]), numbers[int(tape.stream[row])]

    for position in range(max(len(predicted_rows), len(recorded_rows))):
        if described(predicted, predicted_rows, position, streams[0]) == described(
            recorded, recorded_rows, position, streams[1]
        ):
            continue
        lines = [f"request {position} of {len(recorded_rows)} differs (predicted | measured):"]
        for near in range(max(0, position - 4), position + 5):
            frames = [
                tape.ops[tape.op[rows[near]]] if near < len(rows) and tape.op[rows[near]] >= 0 else ""
                for tape, rows in ((predicted, predicted_rows), (recorded, recorded_rows))
            ]
            left = described(predicted, predicted_rows, near, streams[0])
            right = described(recorded, recorded_rows, near, streams[1])
            lines.append(f"{'>' if near == position else ' '} {near}: {left} | {right}  {frames[0]} | {frames[1]}")
        return "\n".join(lines)
    return ""


@pytest.mark.parametrize(("path", "name"), RECORDED or [NONE])
def test_requests_and_curves_equal_the_recording(path, name):
    run = golden.read(path)
    scenario = run["scenarios"][name]
    if scenario["outcome"] == "failed":
        pytest.skip(f"the recording failed: {scenario['message'][-200:]}")
    measured_tape = measured(run, name)
    predicted_tape = up_to_oom(predicted(name, run["gpu"]["name"], run["versions"]["torch"].split("+")[0]))
    assert first_difference(predicted_tape, measured_tape) == ""
    for curve in ("requested", "allocated", "reserved"):
        np.testing.assert_array_equal(
            curves.curve(predicted_tape, curve)[requests(predicted_tape)],
            curves.curve(measured_tape, curve)[requests(measured_tape)],
            err_msg=curve,
        )
    if scenario["outcome"] == "fits":
        assert curves.peak(predicted_tape, "allocated")[0] == scenario["peak_allocated"]
        assert curves.peak(predicted_tape, "reserved")[0] == scenario["peak_reserved"]


@pytest.mark.parametrize(("path", "name"), RECORDED or [NONE])
def test_the_catalogue_has_the_recorded_gpu(path, name):
    run = golden.read(path)
    gpu = gpu_catalogue.find(run["gpu"]["name"])
    assert gpu.compute_capability == (run["gpu"]["major"], run["gpu"]["minor"])
    assert gpu.multiprocessors == run["gpu"]["multi_processor_count"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_runs_on_the_virtual_gpu(name):
    tape = predicted(name, "T4")
    assert summary.summary(tape)["outcome"] == SCENARIOS[name].outcome
    assert np.count_nonzero(tape.action == Action.ALLOC) > 3


def test_golden_files_stay_small():
    assert sum(path.stat().st_size for path in FILES) <= golden.LIMIT


# --- the recording script, without a GPU ----------------------------------------------------------------------------


def test_script_without_a_gpu_raises():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.record"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "needs a real NVIDIA GPU" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_scenario_that_fails_is_a_result(monkeypatch):
    from tests.gpu import record

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(ROOT)
    result = record.record_in_process("mlp_sgd", record.time.monotonic() + 200)
    assert result["scenario"]["outcome"] == "failed"
    assert "exit status 2" in result["scenario"]["message"]


EVENTS = [
    {"action": "segment_alloc", "addr": 4096, "size": 2 * 1024**2, "stream": 0, "frames": []},
    {"action": "alloc", "addr": 4096, "size": 100, "stream": 0,
     "frames": [{"filename": "/x/torch/nn/linear.py", "line": 7, "name": "forward"},
                {"filename": "/repo/tests/gpu/models.py", "line": 21, "name": "forward"}]},
    {"action": "free_requested", "addr": 4096, "size": 100, "stream": 0},
    {"action": "free_completed", "addr": 4096, "size": 100, "stream": 0},
    {"action": "oom", "size": 512, "stream": 0, "device_free": 0},
]  # fmt: skip


def run_of(events) -> dict:
    scenario = {"outcome": "oom", "message": "", "events": golden.columns(events)}
    return {
        "gpu": {"name": "Tesla T4", "total_memory": 15},
        "versions": {"torch": "2.13.0"},
        "scenarios": {"x": scenario},
    }


def test_events_become_columns():
    columns = golden.columns(EVENTS)
    assert columns["action"] == [3, 0, 1, 2, 8]
    assert columns["address"] == [0, 0, 0, 0, -1]
    assert columns["frame"] == [-1, 0, -1, -1, -1]
    assert columns["frames"] == ["linear.py:7 forward < models.py:21 forward"]


def test_a_run_is_written_and_read_back_unchanged(tmp_path):
    golden.write(tmp_path / "a.json.gz", run_of(EVENTS))
    assert golden.read(tmp_path / "a.json.gz") == {"format": golden.FORMAT, **run_of(EVENTS)}
    golden.write(tmp_path / "b.json.gz", run_of(EVENTS))
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_an_unknown_format_raises_value_error(tmp_path):
    golden.write(tmp_path / "a.json.gz", run_of(EVENTS) | {"format": 99})
    with pytest.raises(ValueError, match="format 99"):
        golden.read(tmp_path / "a.json.gz")


def test_results_of_a_second_run_join_the_file(tmp_path):
    from tests.gpu import record

    result = {"gpu": {"name": "Tesla T4"}, "versions": {"torch": "2.13.0+cu130"}, "scenario": {"outcome": "fits"}}
    record.keep(tmp_path, "a", result)
    path = record.keep(tmp_path, "b", result)
    assert path.name == "golden_tesla_t4_torch_2.13.0.json.gz"
    assert set(golden.read(path)["scenarios"]) == {"a", "b"}


def test_a_recorded_run_as_a_tape_equals_itself():
    tape = measured(run_of(EVENTS), "x")
    # 100 bytes take a block of 512 in a segment of 2 MiB.
    assert curves.curve(tape, "allocated").tolist() == [0, 512, 0, 0, 0]
    assert curves.curve(tape, "reserved").tolist() == [2 * 1024**2] * 5
    assert first_difference(tape, tape) == ""


def test_a_different_size_is_reported():
    other = [event | {"size": 101} if event["size"] == 100 else event for event in EVENTS]
    difference = first_difference(measured(run_of(other), "x"), measured(run_of(EVENTS), "x"))
    assert "> 0: ('ALLOC', 101, 0) | ('ALLOC', 100, 0)" in difference
