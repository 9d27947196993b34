"""`--world` and `--rank` of `%%memprofile`."""

from __future__ import annotations

import os

import pytest
from IPython.core.error import UsageError

from tests.jupyter.magics_shell import Shell

_RANK = "torch.distributed.init_process_group('nccl')\nfound = torch.distributed.get_rank(), os.environ['LOCAL_RANK']"


def test_a_cell_runs_as_one_rank(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    shell.run("import os").raise_error()
    shell.run(f"%%memprofile --gpu H100 --world 16 --rank 9\n{_RANK}").raise_error()
    assert shell["found"] == (9, "1")  # the second GPU of the second node
    assert "RANK" not in os.environ


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--rank 1", "--rank needs the number of processes"),
        ("--gpu H100 --world 8 --rank 8", "rank 8 is not one of the 8 ranks"),
        ("--gpu H100 --world 0", "world=0 is no number of processes"),
        ("--gpu H100 --world 8 --explore", "remove --world"),
        ("--gpu H100 --world 8 --dry-run", "remove --world"),
        ("--gpu cpu --world 8", "--world has no effect on a real device"),
    ],
)
def test_a_wrong_world_raises_one_sentence(shell: Shell, options: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        shell.run(f"%%memprofile {options}\ntorch.ones(1)").raise_error()
