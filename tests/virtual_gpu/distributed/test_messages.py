"""Objects between ranks: a rank that is needed runs in a process of its own, until it has sent them."""

from __future__ import annotations

import pickle
import sys
import textwrap
from typing import Any

import pytest

import memexplore as mx
from memexplore.virtual_gpu.distributed import messages
from memexplore.virtual_gpu.files import session


def command(body: str) -> messages.CommandOf:
    """A command that runs lines of Python with the number of the rank as `rank`."""
    return lambda rank: [sys.executable, "-c", f"rank = {rank}\n{textwrap.dedent(body)}"]


def test_a_rank_that_has_not_sent_yet_is_run():
    # Rank 2 needs rank 1, and rank 1 needs rank 0.
    body = """
    import os
    from memexplore.virtual_gpu.distributed import messages
    os.environ["RANK"] = str(rank)
    with messages.between_ranks(lambda other: [*sys.orig_argv[:-1], sys.orig_argv[-1].replace("rank = 1", "rank = 0")]):
        before = messages.receive(0, 1)[0] if rank else 0
        messages.send([before + 1], rank, rank + 1)
    """
    with messages.between_ranks(command("import sys" + textwrap.dedent(body))):
        assert messages.receive(1, 2) == [2]


def test_a_helper_stops_at_a_step_until_a_further_object_is_needed():
    body = """
    from memexplore.virtual_gpu.distributed import messages
    with messages.between_ranks(lambda other: []):
        messages.send(["before"], rank, 2)
        messages.wait_until_needed(rank)
        messages.send([messages._State.folder.joinpath(f"from-{rank}-to-2-1.needed").exists()], rank, 2)
        messages.wait_until_needed(rank)
    """
    with messages.between_ranks(command(body)):
        assert [messages.receive(1, 2), messages.receive(1, 2)] == [["before"], [True]]
        helper = messages._helpers[1]
        assert helper.poll() is None
    assert helper.poll() is not None


def test_messages_to_a_rank_arrive_in_order():
    with messages.between_ranks(command("raise SystemExit")):
        messages.send(["first"], 0, 1)
        messages.send(["second"], 0, 1)
        messages._numbers.clear()
        assert [messages.receive(0, 1), messages.receive(0, 1)] == [["first"], ["second"]]


def test_a_rank_that_fails_is_named_with_its_last_lines():
    with (
        messages.between_ranks(command("raise SystemExit('no such file')")),
        pytest.raises(RuntimeError, match=r"receives an object from rank 1, which ended before .* no such file"),
    ):
        messages.receive(1, 2)


def test_outside_of_a_command_nothing_is_kept():
    messages.send(["object"], 0, 1)
    assert messages.receive(0, 1) is None


# -- files


FILES = """
    import pathlib, shutil
    from memexplore.virtual_gpu.distributed import messages
    def copy(path, target):
        return pathlib.Path(path).exists() and bool(shutil.copyfile(path, target))
    with messages.between_ranks(lambda other: [], copy):
        messages.wait_until_needed(rank)
"""


def test_a_rank_runs_until_it_has_written_the_file_that_another_needs(tmp_path):
    file = tmp_path / "file"
    body = f"""{FILES}
        pathlib.Path({str(file)!r}).write_text("first")
        messages.wait_until_needed(rank)
        raise SystemExit("not needed any more")
    """
    with messages.between_ranks(command(body)):
        copy = messages.fetch_file(str(file), sender=0, receiver=1)
        assert copy.read_text() == "first"
        assert messages._helpers[0].poll() is None


def test_a_file_that_is_written_last_is_given_at_the_end(tmp_path):
    file = tmp_path / "file"
    body = f"""{FILES}
        pathlib.Path({str(file)!r}).write_text("last")
        assert messages.give_files(rank)
    """
    with messages.between_ranks(command(body)):
        assert messages.fetch_file(str(file), sender=0, receiver=1).read_text() == "last"


def test_a_file_that_no_rank_writes_is_missing(tmp_path):
    with messages.between_ranks(command(FILES)):
        assert messages.fetch_file(str(tmp_path / "file"), sender=0, receiver=1) is None


def test_outside_of_a_command_no_file_is_fetched():
    assert messages.fetch_file("file", sender=0, receiver=1) is None


def test_a_message_that_is_sent_while_files_are_saved_is_written_to_the_disk():
    module: dict[str, Any] = {"__name__": "torch.distributed.checkpoint.example"}
    exec("def save(send, *arguments): send(*arguments)", module)
    with messages.between_ranks(lambda rank: [], on_disk=session.on_disk):
        with session.every_file(), mx.virtual("T4"):
            module["save"](messages.send, ["sent"], 0, 1)
        assert messages._State.folder is not None
        (message,) = messages._State.folder.glob("from-0-to-1-0.pickle")
        assert pickle.loads(message.read_bytes()) == ["sent"]
