"""The table of torch's private names: complete in the installed release, and usable where a name is missing."""

from __future__ import annotations

import collections
import warnings

import pytest
import torch

import memexplore as mx
from memexplore.cli import doctor
from memexplore.torch_internals import check, table


@pytest.mark.parametrize("row", check.internals(), ids=lambda row: row.name)
def test_the_installed_torch_has_every_private_name(row):
    assert row.probe(), f"torch {torch.__version__}: {row.if_missing}"


def test_each_name_stands_in_the_table_once():
    assert [
        name for name, count in collections.Counter(row.name for row in check.internals()).items() if count > 1
    ] == []


def test_each_row_says_why_and_what_fails():
    assert [row.name for row in check.internals() if not (row.why and row.if_missing)] == []


@pytest.fixture
def rows(monkeypatch):
    monkeypatch.setattr(table, "TABLE", [])
    return table.TABLE


def test_a_missing_function_raises_one_sentence_when_it_is_called(rows):
    function = table.look_up("torch._C._gone", "a reason", "no such feature")
    assert rows[0].probe() is False
    with pytest.raises(RuntimeError, match=r"has no torch\._C\._gone: no such feature\. Install a release"):
        function(1)


def test_a_missing_class_can_still_be_subclassed(rows):
    base = table.look_up("torch._gone.Base", "a reason", "no such feature")
    derived = type("Derived", (base,), {})
    assert not isinstance(torch.ones(1), derived)
    with pytest.raises(RuntimeError, match=r"torch\._gone\.Base"):
        derived()


def test_a_name_of_another_release_is_found(rows):
    assert table.look_up("torch._gone", "a reason", "nothing", other_names=("torch.relu",)) is torch.relu
    assert rows[0].probe()


def test_a_name_that_behaves_differently_fails_its_probe(rows):
    table.look_up("torch.relu", "a reason", "nothing", probe=lambda function: function is None)
    assert not rows[0].probe()


def test_a_probe_that_raises_counts_as_missing(monkeypatch):
    row = table.Internal("torch._gone", "a reason", "nothing", lambda: 1 / 0 > 0)
    monkeypatch.setattr(check, "TABLE", [row])
    assert check.missing() == [row]


@pytest.fixture
def unwarned(monkeypatch):
    monkeypatch.setattr(check, "_first_warning", check.threading.Lock())


def test_a_newer_torch_than_tested_is_warned_about_once(monkeypatch, unwarned):
    monkeypatch.setattr(torch, "__version__", f"2.{check.TESTED[1][1] + 1}.0")
    with pytest.warns(UserWarning, match="newer than 2.15"):
        check.warn_if_untested()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check.warn_if_untested()


@pytest.mark.parametrize("use", [lambda: mx.virtual("T4", release="2.13"), mx.record], ids=["virtual", "record"])
def test_the_first_virtual_gpu_or_recording_warns_about_a_newer_torch(monkeypatch, unwarned, use):
    monkeypatch.setattr(torch, "__version__", f"2.{check.TESTED[1][1] + 1}.0")
    with pytest.warns(UserWarning, match="the newest release that memexplore was tested with"), use():
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with use():
            pass


def test_the_warning_names_what_a_newer_torch_lacks(monkeypatch, unwarned):
    monkeypatch.setattr(torch, "__version__", "3.0.0")
    monkeypatch.setattr(check, "TABLE", [table.Internal("torch._gone", "a reason", "nothing", lambda: False)])
    with pytest.warns(UserWarning, match=r"and lacks torch\._gone\."):
        check.warn_if_untested()


def test_doctor_names_the_private_names_that_are_missing(monkeypatch, capsys):
    rows = [
        table.Internal("torch._here", "a reason", "nothing", lambda: True),
        table.Internal("torch._gone", "a reason", "no such feature", lambda: False),
    ]
    monkeypatch.setattr(check, "TABLE", rows)
    doctor.report()
    said = capsys.readouterr().out
    assert "torch lacks torch._gone (a reason). Without it: no such feature" in said
    assert "_here" not in said


def test_doctor_says_that_all_private_names_work(capsys):
    assert doctor.report()
    assert f"Private names of torch: all {len(check.internals())} work" in capsys.readouterr().out


def test_doctor_says_so_while_virtual_tensors_are_alive(capsys):
    with mx.virtual("T4"):
        kept = torch.ones(4, device="cuda")
    doctor.report()
    assert f"all {len(check.internals())} work" in capsys.readouterr().out
    assert kept.is_cuda


def test_a_tested_torch_is_not_warned_about(monkeypatch, unwarned):
    monkeypatch.setattr(torch, "__version__", "2.15.1+cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check.warn_if_untested()
