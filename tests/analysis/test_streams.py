"""Streams in tables and texts: shown where blocks of several streams are on a tape."""

from __future__ import annotations

from memexplore.analysis.streams import has_streams
from memexplore.analysis.tables import tensor_groups, tensors
from memexplore.cli.report_text import report_text
from memexplore.figures.tables import tensors_table
from memexplore.figures.text import tensors_text
from memexplore.figures.timeline import hover_texts
from memexplore.jupyter.cursor_details import live_tensors
from memexplore.tape import Meta, Source, Tape


def tape(*streams: int) -> Tape:
    columns = {"address": [512 * row for row in range(len(streams))], "size": [100] * len(streams), "stream": streams}
    return Tape.from_columns(columns, meta=Meta(Source.PREDICTED, "H100"))


def test_one_stream_is_not_shown() -> None:
    for one in (tape(0, 0), tape(7, 7)):
        assert not has_streams(one)
        assert "stream" not in tensors(one)
        assert live_tensors(one, 1)[0]["stream"] == ""
        assert not any("stream" in text for text in (report_text(one), tensors_table(one), tensors_text(one)))


def test_several_streams_are_shown_everywhere() -> None:
    several = tape(0, 33)
    assert tensors(several)["stream"].tolist() == [0, 33]
    # equal tensors of two streams are two groups
    assert tensor_groups(several)["stream"].tolist() == [0, 33]
    assert [row["stream"] for row in live_tensors(several, 1)] == ["default stream", "stream 33"]
    assert "stream 33" in hover_texts(several, [1])[0]
    for text in (report_text(several), tensors_table(several), tensors_text(several)):
        assert "default stream" in text
        assert "stream 33" in text
