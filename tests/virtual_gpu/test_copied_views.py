"""Copied, saved and pickled views, parameters that are views, tied weights and modules: all as on a CPU."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memexplore as mx

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all": lambda x: x,
    "row": lambda x: x[1],
    "transposed": lambda x: x.t(),
    "every second row": lambda x: x[::2],
    "columns": lambda x: x[:, 3:7],
    "expanded row": lambda x: x[:1].expand(4, -1),
    "no rows": lambda x: x[:0],
    "complex": lambda x: torch.view_as_complex(x.unflatten(1, (-1, 2))),
    "conjugated": lambda x: torch.view_as_complex(x.unflatten(1, (-1, 2))).conj(),
    "negated": lambda x: torch.view_as_complex(x.unflatten(1, (-1, 2))).conj().imag,
    "bytes": lambda x: x.view(torch.uint8),
    "float8": lambda x: x.view(torch.float8_e4m3fn),
}
ROLES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tensor": lambda x: x,
    "parameter": nn.Parameter,
    "parameter without gradient": lambda x: nn.Parameter(x, requires_grad=False),
    "leaf with gradient": lambda x: _with_gradient(x.detach().requires_grad_()),
    "parameter with gradient": lambda x: _with_gradient(nn.Parameter(x)),
}


def _with_gradient(leaf: torch.Tensor) -> torch.Tensor:
    (leaf * leaf).sum().abs().backward()
    return leaf


def _in_role(role: str, view: torch.Tensor) -> torch.Tensor:
    has_gradients = (view.is_floating_point() or view.is_complex()) and view.dtype is not torch.float8_e4m3fn
    return ROLES[role](view) if has_gradients else view


def _saved(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file, **options)
    file.seek(0)
    return torch.load(file, weights_only=False)


ACTIONS: dict[str, Callable[[Any], Any]] = {
    "torch.save": _saved,
    "torch.save in the old format": lambda value: _saved(value, _use_new_zipfile_serialization=False),
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "copy.copy": lambda value: [copy.copy(entry) for entry in value],
    "copy.deepcopy": copy.deepcopy,
}


def _tied_model(device: str | None) -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16)).to(device)
    model[1].weight = model[0].weight
    return model


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    for entry in value:
        if isinstance(entry, nn.Module):
            yield from itertools.chain(entry.parameters(), entry.buffers())
        elif isinstance(entry, dict):
            yield from entry.values()
        else:
            yield entry


class _Layouts:
    """Describes tensors, with a number for each storage in the order in which the storages come."""

    def __init__(self) -> None:
        self.storages: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def of(self, tensor: torch.Tensor | None) -> Any:
        if tensor is None:
            return None
        storage = tensor.untyped_storage()
        number, _ = self.storages.setdefault(storage._cdata, (len(self.storages), storage))
        return (
            type(tensor),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
            (tensor.is_conj(), tensor.is_neg(), tensor.requires_grad),
            (number, storage.nbytes()),
            self.of(tensor.grad if tensor.is_leaf else None),
        )


def _outcome(make: Callable[[], list[Any]], action: str) -> Any:
    """Return the layouts of what is copied and of the copies, or the error."""
    value = make()
    layouts = _Layouts()
    before = [layouts.of(tensor) for tensor in _tensors(value)]
    try:
        copies = ACTIONS[action](value)
    except RuntimeError as error:
        return before, str(error)
    same = [[one is other for other in copies] for one in copies]
    return before, [layouts.of(tensor) for tensor in _tensors(copies)], same


entries = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from(sorted(VIEWS)), st.sampled_from(sorted(ROLES))), min_size=1, max_size=4
)


@settings(max_examples=300, deadline=None)
@given(entries, st.booleans(), st.booleans(), st.sampled_from(sorted(ACTIONS)))
def test_views_are_copied_as_on_a_cpu(
    entries: list[tuple[int, str, str]], known: bool, repeated: bool, action: str
) -> None:
    if action not in ("torch.save", "copy.deepcopy"):
        # torch itself fails for dtypes without a class of storages: `UntypedStorage` has no attribute `dtype`.
        entries = [entry for entry in entries if entry[1] != "float8"] or [(0, "row", "tensor")]

    def make(device: str) -> list[Any]:
        bases = [(torch.ones if known else torch.empty)(8, 16, device=device) for _ in range(2)]
        value = [_in_role(role, VIEWS[view](bases[base])) for base, view, role in entries]
        return [*value, value[0]] if repeated else value

    expected = _outcome(lambda: make("cpu"), action)
    with mx.virtual("T4"):
        assert _outcome(lambda: make("cuda"), action) == expected


@settings(max_examples=40, deadline=None)
@given(st.booleans(), st.booleans(), st.sampled_from(sorted(ACTIONS)), st.sampled_from(["cuda", None]))
def test_modules_are_copied_as_on_a_cpu(trained: bool, states: bool, action: str, device: str | None) -> None:
    def make(device: str | None) -> list[Any]:
        model = _tied_model(device)
        if trained:
            model(torch.ones(4, 16, device=device)).sum().backward()
        return [model, model.state_dict()] if states else [model]

    if action == "copy.copy":
        # A copied module is one object with the old one's parameters.
        action = "copy.deepcopy"
    expected = _outcome(lambda: make(None), action)
    with mx.virtual("T4"):
        assert _outcome(lambda: make(device), action) == expected


def test_a_loaded_row_has_its_whole_storage_on_the_gpu() -> None:
    with mx.virtual("T4"):
        big = torch.zeros(1024, 1024, device="cuda")
        before = torch.cuda.memory_allocated()
        row = _saved(big[3])
        assert torch.cuda.memory_allocated() - before == row.untyped_storage().nbytes() == 1024 * 1024 * 4


def test_a_pickled_row_has_its_whole_storage_and_values() -> None:
    with mx.virtual("T4"):
        _, second = pickle.loads(pickle.dumps(list(torch.arange(200, device="cuda").view(2, 100))))
        assert (second.tolist(), second.storage_offset()) == (list(range(100, 200)), 100)
        assert torch.cuda.memory_allocated() == 2 * 2048  # pickle shares nothing: 200 * 8, in blocks of 512


def test_a_copied_parameter_that_is_a_row_has_its_own_bytes_only() -> None:
    # Parameter.__deepcopy__ of torch/nn/parameter.py clones the data.
    with mx.virtual("T4"):
        big = torch.zeros(1024, 1024, device="cuda")
        copied = copy.deepcopy(nn.Parameter(big[0]))
        assert copied.untyped_storage().nbytes() == 1024 * 4
        assert torch.cuda.max_memory_allocated() == 1024 * 1024 * 4 + 1024 * 4


def test_views_with_values_are_real_views_where_no_virtual_gpu_is_on() -> None:
    file = io.BytesIO()
    with mx.virtual("T4"):
        numbers = torch.arange(6, device="cuda")
        torch.save([numbers[:3], numbers[3:]], file)
    file.seek(0)
    first, second = torch.load(file, weights_only=False)
    second[0] = 9
    assert torch.equal(first.as_strided((6,), (1,)), torch.tensor([0, 1, 2, 9, 4, 5]))


def test_a_cloned_storage_takes_memory() -> None:
    with mx.virtual("T4"):
        storage = torch.zeros(1000, device="cuda")[:10].untyped_storage().clone()
        assert (storage.nbytes(), str(storage.device)) == (4000, "cuda:0")
        assert torch.cuda.memory_allocated() == 4096  # 4000, in blocks of 512
