"""`--values` of `%%memprofile` and `%memgpu`."""

from __future__ import annotations

import pytest
from IPython.core.error import UsageError

from memexplore.jupyter.options import gpu_line, parse
from memexplore.virtual_gpu.values.setting import Values
from tests.jupyter.magics_shell import Shell

_SUM = "import torch\nfound = torch.ones(200, 200, device='cuda').sum().item()"


@pytest.mark.parametrize(("setting", "expected"), [("none", "virtual"), ("known", "virtual"), ("real", "40000.0")])
def test_memprofile_computes_the_values_of_its_setting(shell: Shell, setting: str, expected: str) -> None:
    # 200 * 200 floats are 160,000 bytes, more than a known tensor may have.
    shell.run(f"%%memprofile --gpu T4 --values {setting}\n{_SUM}").raise_error()
    assert str(shell["found"]) == expected


def test_memgpu_computes_the_values_of_its_setting(shell: Shell) -> None:
    shell.run("%memgpu T4 --values real").raise_error()
    shell.run(_SUM).raise_error()
    shell.run("%memgpu off").raise_error()
    assert shell["found"] == 40_000


def test_the_setting_of_a_gpu_that_is_on_cannot_change(shell: Shell) -> None:
    shell.run("%memgpu T4 --values real").raise_error()
    shell.run("%memgpu T4").raise_error()
    shell.run("%memgpu T4 --values real").raise_error()
    with pytest.raises(UsageError, match="is on with --values real: run %memgpu off first"):
        shell.run("%memgpu T4 --values none").raise_error()


def test_another_setting_is_refused_in_one_sentence() -> None:
    with pytest.raises(UsageError, match="'all' is not a setting; write 'none', 'known' or 'real'"):
        parse("--values all")
    with pytest.raises(UsageError, match="--values 'all' is not a setting"):
        gpu_line("T4 --values all")


def test_an_explorer_runs_with_known_values() -> None:
    with pytest.raises(UsageError, match="remove --values"):
        parse("--explore --values real")
    assert parse("--values none")[0].values is Values.NONE
