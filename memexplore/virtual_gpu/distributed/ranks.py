"""Name the rank of this process, as arguments, a URL or the environment say, and set what `torchrun` would set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple
from urllib.parse import parse_qs, urlparse

from memexplore.virtual_gpu.patches.install import Undo
from memexplore.virtual_gpu.tensors.local_device import GPUS_OF_A_NODE


class Rank(NamedTuple):
    """One rank of a group."""

    number: int
    world: int


def of_group(number: int, world: int | None) -> Rank | None:
    """Return a rank of a group, None where no group is named.

    Raises ValueError for a rank without a group, a group without ranks, and a rank that the group does not have.
    """
    if world is None:
        if number:
            raise ValueError(f"rank={number} needs the number of processes: write world=8 as well")
        return None
    if world < 1:
        raise ValueError(f"world={world} is no number of processes: write 1 or more")
    if not 0 <= number < world:
        raise ValueError(f"rank {number} is not one of the {world} ranks of the group: write 0 to {world - 1}")
    return Rank(number, world)


def of_rendezvous(url: str, rank: int = -1, world: int = -1) -> Rank:
    """Return the rank that arguments (-1: not given), a URL such as ``tcp://host:port?rank=0`` or the environment name.

    Without any of them it is rank 0 of 1.

    >>> of_rendezvous("tcp://10.0.0.1:29500?rank=3&world_size=8")
    Rank(number=3, world=8)

    Raises ValueError for a rank that the group does not have.
    """
    query = parse_qs(urlparse(url).query)
    number = rank if rank >= 0 else _number("rank", query, "RANK", 0)
    size = world if world > 0 else _number("world_size", query, "WORLD_SIZE", 1)
    if not 0 <= number < size:
        raise ValueError(
            f"rank {number} is not one of the {size} ranks of the group: set RANK to a number from 0 to {size - 1}, "
            "or WORLD_SIZE to the number of processes"
        )
    return Rank(number, size)


def _number(name: str, query: dict[str, list[str]], variable: str, default: int) -> int:
    text = query[name][0] if name in query else os.environ.get(variable, "")
    if not text:
        return default
    if not text.strip().isdecimal():
        raise ValueError(f"{variable} is {text!r}: set it to a whole number")
    return int(text)


# --- the environment variables of `torchrun` --------------------------------------------------------------------------

_ADDRESS, _PORT = "127.0.0.1", "29500"
"""Of the first node; nobody listens there."""


def variables(rank: Rank) -> dict[str, str]:
    """Return the environment variables that `torchrun` gives to a rank.

    A node has eight GPUs, or as many as the group has ranks. Source, for a first start on nodes of equal size:
    torch/distributed/elastic/agent/server/local_elastic_agent.py; but there is no agent.

    >>> environment = variables(Rank(11, 16))
    >>> [environment[name] for name in ("LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")]
    ['3', '1', '8', '2']
    """
    of_node = min(rank.world, GPUS_OF_A_NODE)
    node, local = divmod(rank.number, of_node)
    last = node == (rank.world - 1) // of_node
    numbers = {
        "RANK": rank.number,
        "LOCAL_RANK": local,
        "GROUP_RANK": node,
        "ROLE_RANK": rank.number,
        "WORLD_SIZE": rank.world,
        "LOCAL_WORLD_SIZE": (rank.world - 1) % of_node + 1 if last else of_node,
        "GROUP_WORLD_SIZE": -(-rank.world // of_node),
        "ROLE_WORLD_SIZE": rank.world,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    texts = {
        "ROLE_NAME": "default",
        "MASTER_ADDR": _ADDRESS,
        "MASTER_PORT": _PORT,
        "TORCHELASTIC_RUN_ID": "none",
        # Processes that the program starts would wait for the store of an agent, which does not run.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    return {**{name: str(number) for name, number in numbers.items()}, **texts}


class SetVariables(NamedTuple):
    """Environment variables that are set while the patches are installed."""

    variables: Mapping[str, str]

    def undo(self) -> Undo:
        """Return a function that restores the present values, or their absence."""
        return partial(_restore, {name: os.environ.get(name) for name in self.variables})

    def install(self) -> None:
        """Set the variables."""
        os.environ.update(self.variables)


def _restore(before: Mapping[str, str | None]) -> None:
    for name, text in before.items():
        if text is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = text
