"""List sets of GPUs that can be rented, with prices: instance types of one provider, or those that a user names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from memexplore.hardware import catalogue, cloud

SOURCE = "Amazon EC2, on demand, Linux, us-east-1, January 2026"
"""Of the prices of `_INSTANCES`; read from instances.vantage.sh as kept in github.com/tsaol/aws-gpu@77cd9fe."""

_INSTANCES: tuple[tuple[str, int, float], ...] = (
    ("g4dn.xlarge", 1, 0.526),
    ("g4dn.12xlarge", 4, 3.912),
    ("g4dn.metal", 8, 7.824),
    ("g6.xlarge", 1, 0.8048),
    ("g6.12xlarge", 4, 4.6016),
    ("g6.48xlarge", 8, 13.3504),
    ("g5.xlarge", 1, 1.006),
    ("g5.12xlarge", 4, 5.672),
    ("g5.48xlarge", 8, 16.288),
    ("g6e.xlarge", 1, 1.861),
    ("g6e.12xlarge", 4, 10.49264),
    ("g6e.48xlarge", 8, 30.13118),
    ("p3.2xlarge", 1, 3.06),
    ("p3.8xlarge", 4, 12.24),
    ("p3.16xlarge", 8, 24.48),
    ("p3dn.24xlarge", 8, 31.212),
    ("g7e.2xlarge", 1, 3.36312),
    ("g7e.12xlarge", 2, 8.28608),
    ("g7e.24xlarge", 4, 16.57216),
    ("g7e.48xlarge", 8, 33.14432),
    ("p4d.24xlarge", 8, 21.957642),
    ("p4de.24xlarge", 8, 27.44705),
    ("p5.4xlarge", 1, 6.88),
    ("p5.48xlarge", 8, 55.04),
    ("p5en.48xlarge", 8, 63.296),
    ("p6-b200.48xlarge", 8, 113.9328),
)
"""Instance type, number of GPUs, US dollars an hour; of several types with the same GPUs the cheapest."""

_COUNT = re.compile(r"(?P<before>\d+)\s*[x×]\s*(?P<after>\D.*)")


class RentedSet(NamedTuple):
    """GPUs of one kind that are rented together."""

    name: str
    gpu: str
    """Key of the catalogue entry."""
    gpus: int
    dollars: float
    """An hour, for all of them."""

    def __str__(self) -> str:
        gpus = f"{self.gpus} × {self.gpu}"
        return f"{gpus if self.name == gpus else f'{self.name} with {gpus}'} for ${self.dollars:.2f} an hour"


def rented_sets(prices: Mapping[str, float] | None = None) -> list[RentedSet]:
    """Return sets of GPUs, cheapest first; by default the instance types of `SOURCE`.

    `prices` maps instance types of that list, or numbers and names of GPUs, to dollars an hour.

    >>> print(rented_sets()[0])
    g4dn.xlarge with 1 × T4 for $0.53 an hour
    >>> [str(rented) for rented in rented_sets({"8xH100": 20, "p4d.24xlarge": 12.5})]
    ['p4d.24xlarge with 8 × A100 40GB for $12.50 an hour', '8 × H100 SXM for $20.00 an hour']

    Raises ValueError for a name that is neither, and for a price that is no positive number.
    """
    if prices is None:
        sets = [_of_instance(name, price) for name, _, price in _INSTANCES]
    else:
        sets = [_named(name, price) for name, price in prices.items()]
    return sorted(sets, key=lambda rented: (rented.dollars, rented.gpus))


def _named(name: str, price: float) -> RentedSet:
    if not (isinstance(price, int | float) and math.isfinite(price) and price > 0):
        raise ValueError(f"the price of {name} is {price!r}: give dollars an hour, such as 3.5")
    if any(name == known for known, _, _ in _INSTANCES):
        return _of_instance(name, price)
    match = _COUNT.fullmatch(name.strip())
    gpus, gpu = (int(match["before"]), match["after"]) if match else (1, name)
    key = catalogue.find(gpu).key
    return RentedSet(f"{gpus} × {key}", key, gpus, float(price))


def _of_instance(name: str, price: float) -> RentedSet:
    key = cloud.key_of(name)
    assert key is not None
    return RentedSet(name, key, next(gpus for known, gpus, _ in _INSTANCES if known == name), price)
