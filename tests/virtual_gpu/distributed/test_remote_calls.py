"""torch.distributed.rpc, which needs other processes."""

from __future__ import annotations

import pytest
import torch.distributed.rpc as rpc

import memexplore as mx


@pytest.mark.skipif(not rpc.is_available(), reason="this build of torch has no remote calls")
def test_calls_on_other_processes_end_in_one_sentence():
    with mx.virtual("T4", world=4), pytest.raises(RuntimeError, match="functions on 3 other processes"):
        rpc.init_rpc("worker0", rank=0, world_size=4)
