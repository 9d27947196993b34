import json
import re
from html.parser import HTMLParser

import pytest

from memexplore.analysis.verdict_content import verdict_content
from memexplore.page import report
from memexplore.tape import Category
from tests.sample_tapes import Program, leaking_tape, oom_tape, small_tape, training_tape

HOSTILE = '</script><img src=x onerror="alert(1)">'


class Reader(HTMLParser):
    """Parser that collects the elements of a page in order and the text of its first heading."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.heading, self._inside = "", False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = tag == "h1"

    def handle_endtag(self, tag):
        self._inside = False

    def handle_data(self, data):
        self.heading += data if self._inside else ""


@pytest.fixture(scope="module")
def page() -> str:
    return report.html(training_tape())


def data_of(page: str, name: str) -> dict:
    match = re.search(rf'<script type="application/json" data-target="{name}">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    return json.loads(match[1])


def test_heading_is_the_verdict(page):
    reader = Reader(page)
    assert reader.heading == verdict_content(training_tape()).headline
    order = [tag for tag, _ in reader.elements]
    assert order.index("h1") < order.index("div")


def test_page_loads_nothing(page):
    urls = [
        value
        for tag, attributes in Reader(page).elements
        for name, value in attributes.items()
        if name in ("src", "href") and value and not value.startswith("data:")
    ]
    assert urls == []
    assert "default-src 'none'" in page


def test_page_contains_plotly_once(page):
    assert page.count("plotly.js v") == 1


def test_page_has_timeline_and_layers(page):
    names = [trace["name"] for trace in data_of(page, "timeline")["data"]]
    assert names[-3:] == ["allocated", "reserved", "peak"]
    assert '<div class="memexplore-tree">' in page


def test_page_has_versions_notes_and_source(page):
    assert "<th>torch</th><td>2.13.0+cpu</td>" in page
    assert "<th>source</th><td>predicted</td>" in page
    assert "<li>The workspace of cuDNN is assumed to be 0 bytes.</li>" in page


def test_hostile_names_are_escaped():
    program = Program()
    program.alloc(100, Category.ACTIVATION, HOSTILE, HOSTILE, 3)
    tape = program.tape()
    tape = tape.replace(meta=tape.meta._replace(device=HOSTILE, notes=(HOSTILE,), versions={HOSTILE: HOSTILE}))
    hostile, harmless = Reader(report.html(tape)), Reader(report.html(small_tape()))
    assert [tag for tag, attributes in hostile.elements if attributes.get("onerror")] == []
    count = sum(tag == "script" for tag, _ in hostile.elements)
    assert count == sum(tag == "script" for tag, _ in harmless.elements)


def test_heading_of_an_oom_is_the_verdict():
    assert Reader(report.html(oom_tape())).heading == "Needs more than 5.00 GiB · T4 has 4.00 GiB · 1.00 GiB over"


def test_page_has_blocks_and_lines(page):
    assert data_of(page, "blocks")["data"][0]["name"] == "free"
    assert "internal fragmentation" in page
    assert "<h2>Lines at the peak</h2>" in page
    assert "Growth from step to step" not in page


def test_page_of_a_leak_has_a_growth_table():
    page = report.html(leaking_tape(4))
    assert "200 B at the end of step 2 grew to 400 B at the end of step 4" in page
    assert "<code>train.py:9</code>" in page


def test_page_of_an_oom_says_once_where_it_stops():
    page = report.html(oom_tape())
    assert page.count("stops in step 1, forward of layer2.conv (convolution, 2.00 GiB)") == 1
    assert '<summary>at <span title="train.py:7">train.py, line 7</span></summary>' in page


def test_empty_tape_has_a_page():
    assert report.html(small_tape()[:0]).endswith("</html>")
