"""A short run of the fuzzer of files of tapes; `python -m tests.fuzz --kind tapes` runs it for long."""

from __future__ import annotations

from tests.fuzz.test_snapshots import findings


def test_damaged_and_changed_tapes_are_read_or_refused() -> None:
    assert findings("tapes", range(1500)) == []
