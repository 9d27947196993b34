"""The index of the virtual GPU: that of its rank on the machine."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import memexplore as mx


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def rank(environment: pytest.MonkeyPatch, number: int, world: int) -> None:
    environment.setenv("RANK", str(number))
    environment.setenv("LOCAL_RANK", str(number % 8))
    environment.setenv("WORLD_SIZE", str(world))


def test_a_rank_has_the_gpu_of_its_number(environment):
    rank(environment, 3, 8)
    with mx.virtual("T4"):
        assert (torch.cuda.device_count(), torch.cuda.current_device()) == (8, 3)
        x = torch.ones(2, device="cuda")
        assert (x.device, x.get_device()) == (torch.device("cuda", 3), 3)
        assert x.to("cuda:3").device == x.device == x.untyped_storage().device
        with pytest.raises(RuntimeError, match="the code uses cuda:0, and the virtual GPU of this process is cuda:3"):
            x.to("cuda:0")
        assert torch.cuda.get_device_name(0) == torch.cuda.get_device_name(3)
    with mx.virtual("T4"):
        torch.cuda.set_device("cuda:5")
        assert torch.ones(2, device="cuda").device == torch.device("cuda", 5)


def test_a_machine_has_at_most_eight_gpus_where_nothing_says_more(environment):
    rank(environment, 1000, 1024)
    with mx.virtual("T4"):
        assert torch.cuda.device_count() == 8
        environment.setenv("LOCAL_WORLD_SIZE", "4")
        assert torch.cuda.device_count() == 4


def test_a_rank_without_a_local_number_uses_the_gpu_that_its_code_names():
    with mx.virtual("T4"):
        dist.init_process_group("nccl", rank=3, world_size=8)
        assert torch.ones(2).to("cuda:3").device == torch.device("cuda", 3)
        assert torch.cuda.current_device() == 3
        with pytest.raises(RuntimeError, match="one process has one virtual GPU"):
            torch.ones(2).to("cuda:4")


def test_a_single_gpu_is_the_first_one():
    with mx.virtual("T4"):
        assert (torch.cuda.device_count(), torch.cuda.current_device()) == (1, 0)
        for use in (torch.ones(2).to, torch.cuda.set_device, torch.cuda.get_device_name):
            with pytest.raises(RuntimeError, match="invalid device ordinal: the code uses cuda:1, and a virtual GPU"):
                use("cuda:1")
