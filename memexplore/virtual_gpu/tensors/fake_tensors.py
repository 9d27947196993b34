"""Make torch's own fake tensors: what torch's fake kernels get for virtual tensors.

They exist only for the time of a fake kernel. `fake_mode` is the mode that has them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch

from memexplore.torch_internals.dispatch import FakeTensor, FakeTensorMode, make_subclass
from memexplore.virtual_gpu.tensors.tensor import BACKEND, HOST, META, is_on_host, meta_alias


class _Mode(FakeTensorMode):
    """A fake mode that looks for no GPU."""

    @property
    def avoid_device_init(self) -> bool:
        return True


@functools.cache
def fake_mode() -> FakeTensorMode:
    """Return the fake mode of the process, made at first use."""
    fake = _Mode(allow_non_fake_inputs=True)
    fake.cache_enabled = False
    fake.allow_meta = True
    # In torch 2.11 and 2.12 the thread that enters a fake mode first owns an object that all later ones use.
    with fake:
        pass
    return fake


def plain_fake_mode() -> FakeTensorMode:
    """Return a new fake mode for code that needs torch's own fake tensors, which looks for no GPU."""
    mode = _Mode()
    # The cache is that of all modes of the process, and keeps the index of the GPU of the first rank for `cuda`.
    mode.cache_enabled = False
    return mode


class _StandIn(FakeTensor):
    """Stands in for a tensor on the virtual GPU."""

    @property  # type: ignore[misc]
    def device(self) -> torch.device:  # type: ignore[override, misc]
        return META

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        # Some fake kernels make what a CUDA kernel makes, such as that of log_sigmoid_forward.
        return True


class _HostStandIn(FakeTensor):
    """Stands in for a tensor on the CPU without values."""

    @property  # type: ignore[misc]
    def device(self) -> torch.device:  # type: ignore[override, misc]
        return META if self.fake_mode.in_kernel_invocation else HOST


@functools.cache
def _class_of(host: bool) -> type[FakeTensor]:
    """Return the class of stand-ins, which has the attributes that FakeTensor's constructor sets one by one."""
    kind = _HostStandIn if host else _StandIn
    model = FakeTensor(fake_mode(), torch.empty(0, device=META), HOST if host else META)
    for name, value in vars(model).items():
        setattr(kind, name, value)
    return kind


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor in the storage of a virtual tensor."""
    return _fake(meta_alias(tensor), is_on_host(tensor))


def stand_in_of_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor with the layout of a real tensor on the CPU, and no memory."""
    return _fake(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META), host=True)


def _fake(elem: torch.Tensor, host: bool) -> torch.Tensor:
    keys = HOST if host else BACKEND
    return make_subclass(_class_of(host), elem, False, dispatch_device=host, device_for_backend_keys=keys)  # type: ignore[no-any-return]


@contextlib.contextmanager
def standing_in_for_themselves(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Make virtual tensors fake ones for a block, for a kernel that changes their metadata, such as `resize_`."""
    kinds = [(tensor, type(tensor)) for tensor in tensors]
    try:
        for tensor, _ in kinds:
            tensor.__class__ = _class_of(is_on_host(tensor))
        yield
    finally:
        for tensor, kind in kinds:
            tensor.__class__ = kind
