"""Stores of one rank: no other process is waited for, and no file is written."""

from __future__ import annotations

import datetime
import threading

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


def test_a_key_that_only_another_rank_sets_is_awaited_as_set_and_has_no_value():
    with mx.virtual("H100", world=4, rank=1):
        store = dist.TCPStore("127.0.0.1", 29511, 4, False)
        store.wait(["ready"], datetime.timedelta(seconds=600))
        with pytest.raises(dist.DistStoreError, match="the store has no key 'ready', and no other rank runs"):
            store.get("ready")


def test_a_key_that_another_thread_sets_is_waited_for():
    with mx.virtual("H100", world=4, rank=1):
        store = dist.TCPStore("127.0.0.1", 29511, 4, False)
        setter = threading.Timer(0.1, store.set, ["key", "value"])
        setter.start()
        assert store.get("key") == b"value"
        setter.join()


def test_a_key_with_a_prefix_that_only_another_rank_sets_has_no_value():
    with mx.virtual("H100", world=4, rank=1):
        store = dist.PrefixStore("epoch", dist.PrefixStore("run", dist.TCPStore("127.0.0.1", 29511, 4, False)))
        store.wait(["ready"], datetime.timedelta(seconds=600))
        with pytest.raises(dist.DistStoreError, match="the store has no key 'ready', and no other rank runs"):
            store.get("ready")
        store.set("ready", "1")
        assert store.get("ready") == b"1"


def test_the_store_of_the_default_group_waits_for_no_other_rank():
    with mx.virtual("H100", world=4, rank=1):
        dist.init_process_group("nccl", rank=1, world_size=4)
        with pytest.raises(dist.DistStoreError, match="the store has no key 'address'"):
            dist.distributed_c10d._get_default_store().get("address")


def test_a_prefix_has_its_own_methods_after_a_virtual_gpu():
    with mx.virtual("H100", world=4):
        assert {"get", "wait"} <= vars(dist.PrefixStore).keys()
    assert not {"get", "wait"} & vars(dist.PrefixStore).keys()
    store = dist.PrefixStore("run", dist.HashStore())
    store.set("key", "value")
    store.wait(["key"], datetime.timedelta(seconds=1))
    assert store.get("key") == b"value"
