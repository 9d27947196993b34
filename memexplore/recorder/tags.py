"""Tag the blocks whose category is certain: parameters, buffers, gradients, optimizer state and inputs.

They are found by their storages; the category of all other blocks is derived afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from memexplore.recorder.communication import LASTING
from memexplore.recorder.events import LISTS
from memexplore.recorder.module_hooks import Names
from memexplore.tape import Category
from memexplore.torch_internals.dispatch import tensor_with_memory
from memexplore.torch_internals.modules import buffers_of, parameters_of
from memexplore.torch_internals.tensors import gradient_of, storage_key, untyped_storage

_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_LISTED = 3
"""Names of layers in a sentence, or one more where they are all."""


class Tags:
    """Certain categories and modules of the rows of a recording; arguments are as in `Recorder`, and its tables."""

    def __init__(
        self,
        live: dict[int, Any],
        open_rows: dict[int, int],
        names: Names,
        adopt: Callable[[torch.Tensor], Any] | None,
    ) -> None:
        self._live, self._open_rows, self._names, self._adopt = live, open_rows, names, adopt
        self.categories: dict[int, int] = {}
        """Row -> category of parameters, gradients, optimizer state and inputs, which need not be derived."""
        self.owners: dict[int, int] = {}
        """Row -> number of the module whose parameter, gradient or state the block holds."""
        self._sharing: dict[int, dict[int, None]] = {}
        """Number of a module -> numbers of the modules that have one of its weights too, in the order of definition."""
        self.uninitialized = False
        """Whether a parameter without memory was met, so that its model is tagged again after its call."""
        self._tagged_states = WeakIdKeyDictionary()
        """Id of an optimizer's `state`, which `load_state_dict` replaces, and its number of values when last tagged."""

    def tag_at(self, address: int) -> tuple[int | None, int | None]:
        """Return the certain category and the module of the block at an address."""
        row = self._open_rows.get(address, -1)
        return self.categories.get(row), self.owners.get(row)

    def tag_block(self, address: int, tag: tuple[int | None, int | None]) -> None:
        """Give the block at an address what `tag_at` returned for another block."""
        for table, value in zip((self.categories, self.owners), tag, strict=True):
            if value is not None:
                table[self._open_rows[address]] = value

    def tag_model(self, root: torch.nn.Module) -> None:
        """Tag the storages of a model's parameters, buffers and gradients with category and module.

        A tensor of several modules, such as a tied weight, belongs to the first of them in the order of definition.
        """
        self._names.root(root)
        tagged: dict[int, int] = {}  # id of a tensor, which the model keeps alive -> its module
        for module in root.modules():
            parameters = parameters_of(module)
            buffers = buffers_of(module)
            if parameters or buffers:
                number = self._names.number(module, -1)
                for parameter in parameters.values():
                    if parameter is None:
                        continue
                    owner = tagged.get(id(parameter))
                    if owner is None:
                        tagged[id(parameter)] = number
                        self.tag_weight(parameter, number)
                    elif owner != number and self.row_of(parameter) >= 0:
                        self._sharing.setdefault(owner, {})[number] = None
                for buffer in buffers.values():
                    if buffer is not None and id(buffer) not in tagged:
                        tagged[id(buffer)] = number
                        self.tag(buffer, Category.BUFFER, number)

    def renumber(self, new_row: Callable[[int], int]) -> None:
        """Change the numbers of all rows."""
        for table in (self.categories, self.owners):
            renumbered = {new_row(row): value for row, value in table.items()}
            table.clear()
            table.update(renumbered)

    def sharing_notes(self) -> tuple[str, ...]:
        """Return a sentence on each module that has a weight of other modules: which of them counts its bytes."""
        names = self._names.table
        return tuple(
            f"{names[owner]} and {_listed([names[other] for other in others])} share a weight, "
            f"which counts as memory of {names[owner]}"
            for owner, others in self._sharing.items()
        )

    def tag_input(self, value: Any) -> None:
        """Tag the storage of an argument of the model, if it is a tensor without gradient."""
        if isinstance(value, torch.Tensor) and not value.requires_grad:
            ref = self.ref_of(value)
            if ref is not None:
                self.categories.setdefault(self._open_rows.get(ref.address, -1), Category.INPUT)

    def row_of(self, tensor: torch.Tensor) -> int:
        """Return the row of the block of a tensor, -1 where it has no memory on the device."""
        ref = self.ref_of(tensor)
        return -1 if ref is None or not ref.size else self._open_rows.get(ref.address, -1)

    def ref_of(self, tensor: torch.Tensor) -> Any:
        """Return the `Ref` of a tensor's storage, None where it has no memory on the device."""
        try:
            kind = type(tensor)
            if kind is not _Parameter and kind is not _Tensor:
                tensor = tensor_with_memory(tensor)
            ref = self._live.get(storage_key(untyped_storage(tensor)))
        except NotImplementedError:
            # The tensors of `torch.func` are wrappers without memory of their own; sparse ones have several storages.
            return None
        except ValueError:
            # The parameters of lazy modules get memory in the first forward pass.
            self.uninitialized = True
            return None
        return self._adopt(tensor) if ref is None and self._adopt is not None else ref

    def tag_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Tag the storages of an optimizer's state, if it has more or other ones than when it was last tagged."""
        # Optimizers of other people keep numbers beside the dictionaries of the parameters.
        count = sum(len(state) for state in optimizer.state.values() if isinstance(state, dict))
        present = (id(optimizer.state), count)
        if self._tagged_states.get(optimizer) == present:
            return
        # The lists of LBFGS get other tensors in each step.
        self._tagged_states[optimizer] = None if _has_lists(optimizer) else present
        for key, value in _state_tensors(optimizer):
            self._tag_state_of(key, value)

    def tag_recorded_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Tag what the recording has of an optimizer's state; an optimizer of another program has nothing there."""
        for key, value in _state_tensors(optimizer):
            if storage_key(untyped_storage(value)) in self._live:
                self._tag_state_of(key, value)

    def _tag_state_of(self, key: Any, value: torch.Tensor) -> None:
        owner = self.owner_of(key) if isinstance(key, torch.Tensor) else None
        self.tag(value, Category.OPTIMIZER_STATE, owner)

    def tag(self, tensor: torch.Tensor, category: Category, owner: int | None) -> int:
        """Tag the storage of a tensor with a category, and with the number of a module if it has one.

        Return the row of its block, -1 without one.
        """
        ref = self.ref_of(tensor)
        if ref is None:
            return -1
        if not ref.size:
            ref.tag = (category, owner)
            return -1
        row = self._open_rows.get(ref.address, -1)
        known = self.categories.get(row)
        if known is None or known not in LASTING:
            self.categories[row] = category
        if owner is not None and owner >= 0:
            self.owners[row] = owner
        return row

    def tag_weight(self, parameter: torch.Tensor, owner: int | None = None) -> None:
        """Tag the storages of a parameter and of its gradient; without `owner` the module is as known."""
        row = self.tag(parameter, Category.PARAMETER, owner)
        grad = gradient_of(parameter)
        if grad is not None:
            known = self.owners.get(row) if row >= 0 else None
            self.tag(grad, Category.GRADIENT, known if owner is None else owner)

    def owner_of(self, tensor: torch.Tensor, otherwise: int = -1) -> int:
        """Return the number of the module that owns the block of a tensor."""
        # By the block that is alive now: the C++ address of a freed storage soon belongs to another storage.
        ref = self._live.get(storage_key(untyped_storage(tensor)))
        return otherwise if ref is None else self.owners.get(self._open_rows.get(ref.address, -1), otherwise)

    def owner_of_argument(self, args: Any, index: int, otherwise: int) -> int:
        """Return the number of the module whose parameter, gradient or state an op of an optimizer reads first."""
        first = args[0] if args else None
        if isinstance(first, LISTS) and first:
            first = first[index if index < len(first) else 0]
        if not isinstance(first, torch.Tensor):
            return otherwise
        ref = self._live.get(storage_key(untyped_storage(first)))
        return otherwise if ref is None else self.owners.get(self._open_rows.get(ref.address, -1), otherwise)


def _states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, Any]]:
    """Yield each value of an optimizer's state, after its key there, which usually is a parameter."""
    for key, state in optimizer.state.items():
        # Optimizers of other people keep numbers beside the dictionaries of the parameters.
        if isinstance(state, dict):
            yield from ((key, value) for value in state.values())


def _has_lists(optimizer: torch.optim.Optimizer) -> bool:
    return any(isinstance(value, LISTS) for _, value in _states(optimizer))


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield each tensor of an optimizer's state, those in lists too, after its key there."""
    for key, state in _states(optimizer):
        for value in state if isinstance(state, LISTS) else (state,):
            if isinstance(value, torch.Tensor):
                yield key, value


def _listed(names: list[str]) -> str:
    """Return names as text, of many the first ones.

    >>> _listed(["lm_head"]), _listed(["a", "b", "c", "d", "e"])
    ('lm_head', 'a, b, c and 2 more layers')
    """
    if len(names) <= _LISTED + 1:
        return ", ".join(names)
    return f"{', '.join(names[:_LISTED])} and {len(names) - _LISTED} more layers"
