"""The rank of this process and the size of its group, as `init_process_group` and its URL or the environment give them.

In: the arguments of the rendezvous. Out: `Rank`.
"""

from __future__ import annotations

import os
from typing import NamedTuple
from urllib.parse import parse_qs, urlparse


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
