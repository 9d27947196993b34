"""Pages that connect while a cell runs: a real kernel offers them the view, and answers them before the cell ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

CELL = """
import time
from memexplore.jupyter import reopened_pages
from memexplore.jupyter.view import View
from memexplore.tape import Meta, Source, Tape

reopened_pages._TIMES, reopened_pages._CLOSED_AFTER, reopened_pages._AFTER_ANSWER = times
view = View(Tape.from_columns({}, meta=Meta(Source.MEASURED, "cpu")))
reopened_pages.offer.put(view, lambda: [({"text/plain": "picture"}, {"a": 1})])
print(view.model_id, view.layout.model_id, flush=True)
while True:
    time.sleep(0.02)
"""
# Seconds of the offers after a connection, until an offer is withdrawn, and of the offer after an answer.
OPEN = "(0.5, 4.0), 60.0, 6.0"
WITHDRAWN = "(1.0, 2.0), 1.0, 60.0"
SECONDS = 60


class Page:
    """A client that connects to a kernel, and the messages that reach it on the channel of outputs."""

    def __init__(self, manager: KernelManager) -> None:
        self.client: BlockingKernelClient = manager.client()
        self.client.start_channels()
        self.messages: list[dict[str, Any]] = []

    def next(self, kind: str, key: str = "", value: str = "") -> dict[str, Any]:
        """Return the content of the next message of a kind, with a value in its content if `key` names one."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            message = self.client.get_iopub_msg(timeout=SECONDS)
            self.messages.append(message)
            if message["msg_type"] == kind and (not key or message["content"][key] == value):
                return dict(message["content"])
        raise AssertionError(f"no message {kind}")

    def opened(self) -> list[str]:
        """Return the ids of the comms that were opened so far."""
        while self.client.iopub_channel.msg_ready():
            self.messages.append(self.client.get_iopub_msg(timeout=1))
        return [each["content"]["comm_id"] for each in self.messages if each["msg_type"] == "comm_open"]

    def send(self, comm: str, data: dict[str, Any]) -> None:
        """Send a message to a comm through the channel that a kernel reads while a cell runs."""
        message = self.client.session.msg("comm_msg", {"comm_id": comm, "data": data})
        self.client.control_channel.send(message)


@pytest.fixture
def kernel(forked_kernel: None) -> Iterator[KernelManager]:
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])})
    yield manager
    manager.shutdown_kernel(now=True)


Run = Callable[[str], tuple[Page, list[str]]]


@pytest.fixture
def run(kernel: KernelManager) -> Run:
    """A function that runs a cell without end; it returns the cell's page, and the ids of the view and its layout."""

    def start(times: str) -> tuple[Page, list[str]]:
        page = Page(kernel)
        page.client.wait_for_ready(timeout=SECONDS)
        page.client.execute(f"times = {times}{CELL}")
        return page, page.next("stream")["text"].split()

    return start


def test_a_page_that_connects_gets_the_state_and_the_outputs_while_the_cell_runs(
    kernel: KernelManager, run: Run
) -> None:
    _, (view, layout) = run(OPEN)
    page = Page(kernel)
    opened = page.next("comm_open")
    state = opened["data"]["state"]
    assert state["_model_name"] == "AnyModel"
    assert state["models"] == [layout, view]
    page.send(opened["comm_id"], {"method": "custom", "content": {"type": "states"}})
    answer = page.next("comm_msg", "comm_id", opened["comm_id"])["data"]["content"]
    assert answer["states"].keys() == {view, layout}
    assert answer["states"][view]["layout"] == f"IPY_MODEL_{layout}"
    assert answer["outputs"] == [
        {"output_type": "display_data", "data": {"text/plain": "picture"}, "metadata": {"a": 1}}
    ]
    # A request to the view itself.
    page.send(view, {"method": "custom", "content": {"type": "ping", "view": "v", "number": 7}})
    pong = page.next("comm_msg", "comm_id", view)["data"]["content"]
    assert pong == {"type": "pong", "view": "v", "number": 7}


def test_offers_follow_a_connection_only_and_are_withdrawn(kernel: KernelManager, run: Run) -> None:
    first, _ = run(WITHDRAWN)
    second = Page(kernel)
    # Two offers after the connection, each withdrawn after a second.
    withdrawn = [second.next("comm_close")["comm_id"] for _ in range(2)]
    assert withdrawn == second.opened()
    time.sleep(2)
    # The view and its layout, and the two offers.
    assert first.opened()[2:] == withdrawn


def test_a_page_with_an_answer_gets_no_offer_before_it_has_drawn_the_view(kernel: KernelManager, run: Run) -> None:
    run(OPEN)
    page = Page(kernel)
    opened = page.next("comm_open")
    page.send(opened["comm_id"], {"method": "custom", "content": {"type": "states"}})
    page.next("comm_msg", "comm_id", opened["comm_id"])
    answered = page.messages[-1]["header"]["date"]  # by the clock of the kernel
    last = page.next("comm_open")
    # 6 s after the answer; the second offer would come earlier, 4 s after the connection.
    assert (page.messages[-1]["header"]["date"] - answered).total_seconds() > 5.9
    time.sleep(1)
    assert page.opened() == [opened["comm_id"], last["comm_id"]]


def test_an_offer_that_is_open_answers_a_page_that_restores_all_widgets(kernel: KernelManager, run: Run) -> None:
    run(OPEN)
    page = Page(kernel)
    opened = page.next("comm_open")
    page.send(opened["comm_id"], {"method": "request_state"})
    answer = page.next("comm_msg", "comm_id", opened["comm_id"])["data"]
    assert answer["method"] == "update"
    assert answer["state"] == opened["data"]["state"]
