"""What `torchrun` gives to the process of a rank: environment variables. In: a rank. Out: a patch that sets them.

Names and values are those of ``torch/distributed/elastic/agent/server/local_elastic_agent.py`` for a first start on
nodes of equal size, but there is no agent.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from memexplore.virtual_gpu.distributed.ranks import Rank
from memexplore.virtual_gpu.patches.install import Undo
from memexplore.virtual_gpu.tensors.local_device import GPUS_OF_A_NODE

_ADDRESS, _PORT = "127.0.0.1", "29500"
"""Of the first node; nobody listens there."""


def variables(rank: Rank) -> dict[str, str]:
    """Return the environment variables of a rank; a node has eight GPUs, or as many as the group has ranks.

    >>> found = variables(Rank(11, 16))
    >>> found["LOCAL_RANK"], found["GROUP_RANK"], found["LOCAL_WORLD_SIZE"], found["GROUP_WORLD_SIZE"]
    ('3', '1', '8', '2')
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
