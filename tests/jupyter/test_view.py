"""Messages between the view and a browser, without a browser."""

from __future__ import annotations

import json
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import RichOutput, capture_output
from traitlets import TraitError

from memexplore.analysis import curves
from memexplore.analysis.addresses import fragmentation_text
from memexplore.analysis.picture import with_whole
from memexplore.analysis.verdict import failed_request
from memexplore.analysis.verdict_content import verdict_content
from memexplore.figures.timeline import timeline
from memexplore.jupyter.cursor_details import cursor_text, live_tensors
from memexplore.jupyter.view import view
from memexplore.tape import Category, Tape
from tests.jupyter.stand_in import Browser
from tests.sample_tapes import CPU, Program, big_tape, oom_tape, small_tape, training_tape, unwound_tape

PEAK_ROW = 4  # of small_tape: 400 + 100 + 200 + 50


@pytest.fixture
def browser(monkeypatch: pytest.MonkeyPatch) -> Browser:
    return Browser(view(small_tape()), monkeypatch)


def rows(figure: dict[str, Any]) -> list[int]:
    """The rows of the `allocated` trace, as plotly.js would read them."""
    (trace,) = [trace for trace in figure["data"] if trace["name"] == "allocated"]
    return [int(number) for number in trace["x"]]


def test_cursor_begins_at_the_peak() -> None:
    assert view(small_tape()).cursor == PEAK_ROW
    assert view(Tape.from_columns({}, meta=CPU)).cursor == -1


@pytest.mark.parametrize("row", [-2, -1, 15])
def test_cursor_stays_on_the_tape(row: int) -> None:
    shown = view(small_tape())
    with pytest.raises(TraitError, match="not on this tape of 15 rows"):
        shown.cursor = row
    assert shown.cursor == PEAK_ROW


def test_selection_is_a_layer_of_the_tape() -> None:
    shown = view(small_tape())
    shown.selection = "fc"
    with pytest.raises(TraitError, match="no layer 'conv'"):
        shown.selection = "conv"
    assert shown.selection == "fc"


def test_tape_without_addresses_raises() -> None:
    with pytest.raises(ValueError, match="not placed"):
        view(Tape.from_columns({"size": [1]}, meta=CPU))


def test_request_for_everything(browser: Browser) -> None:
    (answer,) = browser.request(type="everything")
    assert answer["verdict"]["headline"] == verdict_content(browser.view.tape).headline
    assert [trace["name"] for trace in answer["data"]] == [trace.name for trace in timeline(browser.view.tape).data]
    # 400 + 200 of fc and 50 of Net itself; 100 of the input
    assert [(row["label"], row["size"]) for row in answer["layers"]["rows"]] == [
        ("Net", "650 B"),
        ("not in a layer", "100 B"),
    ]
    assert answer["row"] == PEAK_ROW
    # alive at the peak, largest first: weight 400, activation 200, input 100, temporary 50
    assert [tensor["size"] for tensor in answer["tensors"]] == ["400 B", "200 B", "100 B", "50 B"]


def test_zoomed_window_has_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    browser = Browser(view(big_tape(rows=20_000)), monkeypatch)
    (whole,) = browser.request(type="timeline", window=None, number=1)
    (part,) = browser.request(type="timeline", window=[5000.4, 5100.2], number=2)
    assert len(rows(whole["timeline"])) <= 2000
    assert rows(part["timeline"]) == list(range(5000, 5102))
    assert part["number"] == 2


def test_click_moves_the_cursor_and_sends_its_tensors(browser: Browser) -> None:
    (answer,) = browser.request(type="cursor", row=2.2)
    assert browser.view.cursor == 2
    assert answer["type"] == "cursor"
    # after row 2: weight 400 and input 100
    assert [tensor["size"] for tensor in answer["tensors"]] == ["400 B", "100 B"]
    browser.request(type="cursor", row=99)
    assert browser.view.cursor == 14


def test_cursor_set_in_python_is_sent(browser: Browser) -> None:
    browser.view.cursor = 0
    assert [(answer["type"], answer["row"]) for answer in browser.messages] == [("cursor", 0)]


def test_selected_layer_is_highlighted(browser: Browser) -> None:
    assert [answer["type"] for answer in browser.request(type="select", layer="fc")] == ["selection"]
    assert browser.view.selection == "fc"
    (answer,) = browser.request(type="timeline", window=None, number=1)
    highlighted = [trace["name"] for trace in answer["timeline"]["data"] if trace.get("stackgroup") == "layer"]
    assert highlighted == ["parameter", "optimizer state", "gradient", "activation"]
    behind = [trace["fillcolor"] for trace in answer["timeline"]["data"] if trace.get("stackgroup") == "allocated"]
    assert behind
    assert all(colour.startswith("rgba(") and colour.endswith(",0.2)") for colour in behind)


def test_failing_request_is_reported_and_raised(browser: Browser) -> None:
    browser.messages.clear()
    with pytest.raises(TraitError):
        browser.view._answer(browser.view, {"type": "select", "layer": "nothing"}, [])
    assert "no layer 'nothing'" in browser.messages[0]["text"]


def test_saved_state_is_small() -> None:
    # names and numbers, and no figure: its 2 083 rows would be more
    state = {name: value for name, value in view(training_tape()).get_state().items() if name not in ("_esm", "_css")}
    assert len(json.dumps(state)) < 2_000


def test_cursor_text() -> None:
    assert cursor_text(small_tape(), 3) == "700 B allocated · step 1, forward of fc · event 3"
    assert cursor_text(small_tape(), PEAK_ROW) == "At the peak · 750 B allocated · step 1, forward of Net · event 4"
    assert cursor_text(Tape.from_columns({}, meta=CPU), -1) == "No memory was allocated."


def test_tensor_has_layer_and_line() -> None:
    tensor = live_tensors(small_tape(), 3)[1]
    assert (tensor["category"], tensor["layer"], tensor["op"], tensor["location"]) == (
        "activation",
        "fc",
        "addmm",
        "train.py, line 6",
    )


def test_equal_tensors_have_their_shape_and_dtype() -> None:
    program = Program()
    for layer in ("h.0", "h.1"):
        # 8 * 1024 * 4 = 32 KiB each, 64 KiB together
        program.alloc(32 << 10, Category.ACTIVATION, "mm", layer, 6, "float32[8, 1024]")
    program.alloc(512, Category.WORKSPACE, "mm", "h.1", 6)
    first, second = live_tensors(program.tape(), 2)
    assert (first["size"], first["each"], first["tensor"]) == ("64.0 KiB", "2 × 32.0 KiB", "float32[8, 1024]")
    assert second["tensor"] == ""


def test_tensor_made_in_a_cell_names_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    name = shell.compile.cache("a = 1\nb = 2\n", 7)
    tape = small_tape()
    stacks = tuple(tuple(frame._replace(filename=name, line=2) for frame in stack[1:]) for stack in tape.stacks)
    tensor = live_tensors(tape.replace(stacks=stacks), 3)[1]
    InteractiveShell.clear_instance()
    assert (tensor["location"], tensor["code"]) == ("Cell In[7], line 2", "b = 2")


def test_out_of_memory_view_has_an_image() -> None:
    shown = view(oom_tape())
    data, _ = shown._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in data
    assert data["text/plain"].startswith("Needs more than 5.00 GiB")
    assert 'src="data:image/svg+xml;base64,' in data["text/html"]


def test_display_has_the_widget_and_a_static_output() -> None:
    InteractiveShell.clear_instance()
    InteractiveShell.instance()
    with capture_output() as captured:
        view(small_tape())._ipython_display_()
    InteractiveShell.clear_instance()
    live, still = captured.outputs
    assert isinstance(live, RichOutput)
    assert set(live.data) == {"application/vnd.jupyter.widget-view+json", "text/plain"}
    assert set(still.data) == {"text/html", "text/plain"}
    assert "<img" in still.data["text/html"]


def test_request_for_blocks_at_the_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    tape = training_tape()
    shown = view(tape)
    browser = Browser(shown, monkeypatch)
    shown.cursor = 1000
    (reply,) = [answer for answer in browser.request(type="blocks", number=1) if answer["type"] == "blocks"]
    assert reply["number"] == 1
    assert reply["text"] == fragmentation_text(tape, 1000)
    assert reply["blocks"]["data"][0]["name"] == "free"


def test_click_on_a_block_selects_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = view(small_tape())
    browser = Browser(shown, monkeypatch)
    browser.request(type="block", row=3)  # an activation of `fc`
    assert shown.selection == "fc"
    browser.request(type="block", row=2)  # the input, which no layer made
    assert shown.selection == "(no layer)"


def test_out_of_memory_names_the_lines_that_held_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    (reply,) = Browser(view(oom_tape()), monkeypatch).request(type="everything")
    assert (reply["verdict"]["level"], reply["verdict"]["needed"]) == ("oom", 5 << 30)
    assert reply["verdict"]["where"][0] == {"text": "train.py, line 7", "code": "", "path": "train.py:7"}
    assert reply["growth"]["rows"] == []
    assert [line["size"] for line in reply["lines"]] == ["2.00 GiB", "1.00 GiB"]


def test_labels_depend_on_the_width(browser: Browser) -> None:
    labels = {
        width: [
            note["text"]
            for note in browser.request(type="timeline", window=None, number=1, width=width)[0]["timeline"]["layout"][
                "annotations"
            ]
        ]
        for width in (300, 1400)
    }
    # at 1400 pixels a row of small_tape has 93 of them, at 300 it has 14: two rows hold no `optimizer`
    assert "optimizer" in labels[1400]
    assert "optimizer" not in labels[300]


def test_run_that_did_not_fit_is_drawn_as_if_there_were_room(monkeypatch: pytest.MonkeyPatch) -> None:
    died, whole = unwound_tape(), training_tape(steps=1)
    browser = Browser(view(with_whole(died, whole)), monkeypatch)
    (answer,) = browser.request(type="everything")
    assert answer["pictures"] == {"labels": ["As if there were room", "What happened"], "drawn": 0}
    assert browser.view.cursor == failed_request(browser.view.drawn)
    # the row of the request that fails is added
    assert len(browser.view.drawn) == len(whole) + 1
    answer, details = browser.request(type="picture", picture="as it happened")
    assert (answer["type"], answer["pictures"]["drawn"], details["type"]) == ("tape", 1, "details")
    assert browser.view.drawn.equals(died)
    assert browser.view.cursor == failed_request(died)
    assert cursor_text(died, browser.view.cursor).startswith("At the failed request · ")


def test_cursor_after_the_stop_is_at_the_peak_of_what_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    died, whole = unwound_tape(), training_tape(steps=1)
    browser = Browser(view(with_whole(died, whole)), monkeypatch)
    browser.view.cursor = 1  # before the stop: the same row of both
    browser.request(type="picture", picture="as it happened")
    assert browser.view.cursor == 1
    last = len(died) - 1
    browser.view.cursor = last
    assert "unwinding" in cursor_text(died, last)
    browser.request(type="picture", picture="with room")
    assert browser.view.cursor == curves.peak(browser.view.drawn)[1]
    browser.view.cursor = len(browser.view.drawn) - 1  # a row that the run did not reach
    browser.request(type="picture", picture="as it happened")
    assert browser.view.cursor == curves.peak(died)[1]


def test_axis_is_chosen_by_a_request(browser: Browser) -> None:
    (answer,) = browser.request(type="timeline", window=None, number=1, axis="layer", equal="apart")
    assert answer["timeline"]["axis"]["chosen"] == "layer"
    assert answer["timeline"]["layout"]["xaxis"]["title"]["text"] == "layer"


def test_each_layers_maximum_is_a_request(browser: Browser) -> None:
    (answer,) = browser.request(type="highest layers", number=1)
    # fc: weight 400, gradient 240 and optimizer state 80 at the end, more than weight and activation of 200
    assert answer["layers"]["rows"][0]["children"][0]["size"] == "720 B"


# -- lost messages


def test_every_request_about_the_cursor_or_the_selection_has_one_reply(browser: Browser) -> None:
    requests = [
        {"type": "cursor", "row": 2},
        {"type": "cursor", "row": 2},  # where it is already
        {"type": "select", "layer": "fc"},
        {"type": "block", "row": 3},  # an activation of `fc`
    ]
    replies = []
    for number, request in enumerate(requests, 1):
        (reply,) = browser.request(**request, view="page", number=number)
        replies.append((reply["type"], reply.get("sender"), reply.get("view"), reply["number"]))
    # What changes goes to all views; what was already so only to the view that requested it.
    assert replies == [
        ("cursor", "page", None, 1),
        ("cursor", None, "page", 2),
        ("selection", "page", None, 3),
        ("selection", None, "page", 4),
    ]


def test_repeated_request_about_an_earlier_tape_gets_the_tape_that_was_lost(browser: Browser) -> None:
    browser.view.tape = oom_tape()  # number 1
    earlier = {"type": "cursor", "row": 2, "view": "page", "number": 7, "tape": 0}
    assert browser.request(**earlier) == []
    answers = browser.request(**earlier, again=True)
    assert [(one["type"], one["tape"], one["view"]) for one in answers] == [
        ("tape", 1, "page"),
        ("details", 1, "page"),
    ]


def test_details_are_sent_again_only_when_they_were_lost(browser: Browser) -> None:
    drawn: list[str] = []
    browser.view.show(oom_tape(), on_drawn=lambda: drawn.append("drawn"))
    report = {"type": "drawn", "view": "page", "number": 1, "tape": 1}
    assert browser.request(**report) == []
    assert browser.request(**report, again=True) == []  # the details are still being made
    browser.view.send_details()
    (answer,) = browser.request(**report, again=True)
    assert (answer["type"], answer["tape"], answer["view"]) == ("details", 1, "page")
    assert drawn == ["drawn"]
