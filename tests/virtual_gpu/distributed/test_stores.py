"""Stores of one rank: no other process is waited for, and no file is written."""

from __future__ import annotations

import datetime

import pytest
import torch.distributed as dist

import memexplore as mx


@pytest.mark.parametrize("rank", [0, 3])
def test_a_tcp_store_waits_for_no_other_rank(rank):
    with mx.virtual("H100", world=4, rank=rank):
        store = dist.TCPStore("127.0.0.1", 29511, 4, rank == 0, datetime.timedelta(seconds=5))
        dist.init_process_group("nccl", store=store, rank=rank, world_size=4)
        store.set("key", "value")
        assert (store.get("key"), store.add("count", 2)) == (b"value", 2)
        assert (store.host, store.port, store.timeout.seconds) == ("127.0.0.1", 29511, 5)
        assert (dist.get_rank(), dist.get_world_size()) == (rank, 4)


def test_a_file_store_writes_no_file(tmp_path):
    path = tmp_path / "store"
    with mx.virtual("H100", world=4):
        store = dist.FileStore(str(path), 4)
        dist.init_process_group("nccl", store=store, rank=0, world_size=4)
        assert (dist.get_world_size(), store.path) == (4, str(path))
    assert not path.exists()
