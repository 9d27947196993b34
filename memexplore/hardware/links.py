"""Tell the bytes per second from a GPU to the others of its node and to other nodes.

Rates are those of the data sheets, for one direction of one GPU. A collective reaches less: use times of links for
comparisons.
"""

from __future__ import annotations

from typing import NamedTuple


class Link(NamedTuple):
    """One kind of link."""

    name: str
    bytes_per_second: float
    """That one GPU can send; it can receive as much at the same time."""
    source: str


class Links(NamedTuple):
    """Links of a GPU."""

    node: Link
    """To the other GPUs of a node."""
    network: Link
    """To GPUs of other nodes: the share of one GPU."""


def _nvlink(gigabytes: float, source: str, name: str = "NVLink") -> Link:
    return Link(name, gigabytes * 1e9, source)


_HGX = "NVIDIA {} datasheet: {} GB/s of NVLink in both directions together"
_PCIE_OF = "PCI Express {} base specification, 16 lanes"
_PCIE3 = Link("PCIe 3.0", 15.75e9, _PCIE_OF.format("3.0") + " of 8 GT/s")
_PCIE4 = Link("PCIe 4.0", 31.5e9, _PCIE_OF.format("4.0") + " of 16 GT/s")
_PCIE5 = Link("PCIe 5.0", 63e9, _PCIE_OF.format("5.0") + " of 32 GT/s")
_XGMI = "AMD Instinct {} datasheet: 7 Infinity Fabric links of {} GB/s in both directions together"

_NODE: dict[str, Link] = {
    "V100 16GB": _nvlink(150, _HGX.format("V100", 300)),
    "V100 32GB": _nvlink(150, _HGX.format("V100", 300)),
    "A100 40GB": _nvlink(300, _HGX.format("A100", 600)),
    "A100 80GB": _nvlink(300, _HGX.format("A100", 600)),
    "A800 SXM": _nvlink(200, _HGX.format("A800", 400)),
    "H100 SXM": _nvlink(450, _HGX.format("H100", 900)),
    "H800 SXM": _nvlink(200, _HGX.format("H800", 400)),
    "H20": _nvlink(450, _HGX.format("H20", 900)),
    "H200": _nvlink(450, _HGX.format("H200", 900)),
    "B200": _nvlink(900, _HGX.format("Blackwell, HGX B200", 1800)),
    "GB200": _nvlink(900, _HGX.format("GB200 NVL72", 1800)),
    "B300": _nvlink(900, _HGX.format("HGX B300", 1800)),
    "MI300X": _nvlink(448, _XGMI.format("MI300X", 128), "Infinity Fabric"),
    "MI325X": _nvlink(448, _XGMI.format("MI325X", 128), "Infinity Fabric"),
    "MI350X": _nvlink(537.6, _XGMI.format("MI350X", 153.6), "Infinity Fabric"),
    "MI355X": _nvlink(537.6, _XGMI.format("MI355X", 153.6), "Infinity Fabric"),
    "H100 PCIe": _PCIE5,
    "H800 PCIe": _PCIE5,
    "H100 NVL": _PCIE5,
    "P100": _PCIE3,
    "T4": _PCIE3,
}
"""Links inside a node of the GPUs that do not have those of their generation (`_of_generation`).

GPUs with an NVLink bridge for pairs only (H100 NVL, H100 PCIe, RTX 3090, A40) count with PCIe, by which a ring over
more than two of them is bound.
"""

_NDR = Link("InfiniBand, 400 Gbit/s for each GPU", 50e9, "NVIDIA DGX H100 datasheet: 8 ConnectX-7 of 400 Gbit/s")
_XDR = Link("InfiniBand, 800 Gbit/s for each GPU", 100e9, "NVIDIA DGX B300 datasheet: 8 ConnectX-8 of 800 Gbit/s")
_HDR = Link("InfiniBand, 200 Gbit/s for each GPU", 25e9, "NVIDIA DGX A100 datasheet: 8 ConnectX-6 of 200 Gbit/s")
_ETHERNET = Link(
    "Ethernet, 100 Gbit/s for eight GPUs",
    100e9 / 8 / 8,
    "Amazon EC2 g5.48xlarge, g6.48xlarge and p3dn.24xlarge: 100 Gbit/s; the rate of other machines is assumed to be it",
)
_NETWORK = {
    "A100 40GB": _HDR,
    "A100 80GB": _HDR,
    "A800 SXM": _HDR,
    "B300": _XDR,
    **dict.fromkeys(("H100 SXM", "H800 SXM", "H20", "H200", "B200", "GB200"), _NDR),
    **dict.fromkeys(("MI300X", "MI325X", "MI350X", "MI355X"), _NDR),
}


def links_of(key: str, compute_capability: tuple[int, int]) -> Links:
    """Return the links of a GPU of the catalogue, by its key.

    >>> links_of("H100 SXM", (9, 0)).node.bytes_per_second, links_of("RTX 4090", (8, 9)).node.name
    (450000000000.0, 'PCIe 4.0')
    """
    return Links(_NODE.get(key) or _of_generation(compute_capability), _NETWORK.get(key, _ETHERNET))


def _of_generation(compute_capability: tuple[int, int]) -> Link:
    """Return the host interface of a generation of GPUs: PCIe 3.0 to Turing, 4.0 in Ampere and Ada, then 5.0."""
    if compute_capability < (8, 0):
        return _PCIE3
    return _PCIE4 if compute_capability < (9, 0) else _PCIE5
