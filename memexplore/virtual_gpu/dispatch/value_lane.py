"""Compute on the CPU what an op of the virtual GPU does to known values (values/known_values.py): the value lane.

An op is computed if all values that it reads are known and its results are within the budget; a storage that it writes
otherwise becomes unknown. Views need nothing: they share the storage. An error of the values that would end the op on a
GPU ends it here as well; after any other error the values are unknown.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from memexplore.torch_internals.dispatch import pytree, schema_or_none
from memexplore.torch_internals.tensors import has_python_key, storage_key, untyped_storage
from memexplore.virtual_gpu.dispatch import assumed_values, cpu_ops
from memexplore.virtual_gpu.dispatch.autograd_engine import is_non_overlapping_and_dense
from memexplore.virtual_gpu.dispatch.fake_kernels import is_real, replace_tensors
from memexplore.virtual_gpu.tensors.tensor import HOST, DeviceState, is_virtual
from memexplore.virtual_gpu.values import choices, known_values, notes, real_tensors
from memexplore.virtual_gpu.values.setting import Values

_aten = torch.ops.aten

_COPY_TO = _aten._to_copy.default

INTEGER_BYTES = 4 << 20
"""Largest tensor of integers or booleans that is computed with `Values.KNOWN`."""
FLOAT_BYTES = 64 << 10
"""Largest tensor of floating-point numbers that is computed with `Values.KNOWN`."""
TOTAL_BYTES = 256 << 20
"""Bytes of all copies from which on nothing more is computed with `Values.KNOWN`."""

_VALUE_FREE = frozenset(
    "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty new_empty_strided "
    "rand_like randn_like randint_like".split()
)
"""Ops that read the metadata of their tensor arguments only."""
_OF_SEVERAL_RANKS = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"})
"""Namespaces of collectives; kernels/collective_values.py has the values of those of c10d."""
_UNINITIALIZED = frozenset(
    "empty empty_strided empty_like new_empty new_empty_strided empty_permuted resize_ set_ _resize_output_".split()
)
"""Ops whose results have no values, and ops that change storages."""
_EMPTY = frozenset("empty empty_strided empty_like new_empty new_empty_strided empty_permuted".split())
"""Those among them that make a tensor."""
_OVERWRITES = frozenset(
    "fill_ zero_ copy_ random_ uniform_ normal_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_ "
    "_foreach_zero_ _foreach_copy_ _foreach_fill_".split()
)
"""In-place ops that do not read the tensor that they write."""
_KEEPS_THE_REST = _OVERWRITES | frozenset(
    "scatter_ index_put_ _index_put_impl_ index_copy_ index_fill_ masked_fill_ masked_scatter_ put_".split()
)
"""In-place ops that do not read the elements that they write."""


_HIDDEN_WRITES: dict[Any, tuple[int | str, ...]] = {
    _aten.cudnn_batch_norm.default: (3, 4),
    _aten.native_batch_norm.default: (3, 4),
    _aten.batch_norm_update_stats.default: (1, 2),
    _aten.batch_norm_gather_stats.default: (3, 4),
    _aten.batch_norm_gather_stats_with_counts.default: (3, 4),
}
"""Arguments that an op writes to though its schema does not say so: the running statistics."""

_ASSERTIONS = frozenset({_aten._assert_async.default, _aten._assert_async.msg, _aten._functional_assert_async.msg})
"""Ops that raise an error for values by design."""
_CHECKS_OF_VALUES = re.compile(
    "|".join(
        (
            r"index \S+ is out of bounds for dimension",  # gather, scatter: cuda/ScatterGatherKernel.cu
            "probability tensor contains either|invalid multinomial distribution",  # cuda/MultinomialKernel.cu
            "all elements of (input|target) should be between 0 and 1",  # binary_cross_entropy: cuda/Loss.cu
            "Expected p_in >= 0 && p_in <= 1",  # bernoulli: cuda/DistributionBernoulli.cu
            "Number of elements of source < number of ones in mask",  # masked_scatter: cuda/IndexKernel.cu
            "repeats can not be negative",  # repeat_interleave: cuda/Repeat.cu
            "only supports 1-d non-negative integral inputs",  # bincount: cuda/SummaryOps.cu
        )
    )
)
"""Messages of CPU kernels about values that end the program on a GPU too, most of them by a device-side assert; beside
each the file below aten/src/ATen/native."""


class LaneTraits(NamedTuple):
    """Facts about an op that the value lane needs, from its schema."""

    ignored: bool
    """Whether the op changes no values: it makes views or uninitialized tensors."""
    makes_empty: bool
    """Whether the result is uninitialized."""
    communicates: bool
    """Whether the results depend on the values of other ranks, and computing it would call them."""
    value_free: bool
    writes: tuple[int | str, ...]
    """Positions, or names, of the arguments that the op writes to."""
    overwrites: bool
    keeps_the_rest: bool
    """Whether the op writes without reading what was there: its other elements stay as they are."""
    chooses: bool
    """Whether the op chooses indices by scores (values/choices.py)."""


@functools.cache
def lane_traits(func: Any) -> LaneTraits:
    """Return the facts about an op."""
    schema = schema_or_none(func)
    if schema is None:
        return LaneTraits(False, False, False, False, (), False, False, False)
    name = schema.name.split("::")[-1]
    writes = _HIDDEN_WRITES.get(func) or tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    view = not writes and any(value.alias_info is not None for value in schema.returns)
    changes_metadata = torch.Tag.inplace_view in func.tags
    communicates = schema.name.split("::")[0] in _OF_SEVERAL_RANKS
    value_free, overwrites = name in _VALUE_FREE, name in _OVERWRITES
    return LaneTraits(
        view or changes_metadata or name in _UNINITIALIZED,
        name in _EMPTY,
        communicates,
        value_free,
        writes,
        overwrites,
        name in _KEEPS_THE_REST or any(argument.is_out for argument in schema.arguments),
        func in choices.OPS,
    )


def _all_known(tensors: list[torch.Tensor], new: dict[int, torch.UntypedStorage]) -> bool:
    copies = known_values.copies
    for tensor in tensors:
        if has_python_key(tensor):
            key = storage_key(untyped_storage(tensor))
            if key not in copies and key not in new and tensor.numel():
                return False
        elif not is_real(tensor):
            return False
    return True


def _count_of_targets(traits: LaneTraits, args: Any) -> int:
    """Return the number of tensors, the first ones among an op's arguments, that the op overwrites without reading."""
    if not traits.overwrites:
        return 0
    return len(args[0]) if isinstance(args[0], list | tuple) else 1


class ValueLane:
    """The value lane of one virtual GPU; `setting` is KNOWN or REAL, `generator` draws the GPU's random numbers.

    With REAL the generator of the CPU draws them, as in training on the CPU.
    """

    def __init__(self, setting: Values, generator: torch.Generator) -> None:
        self.setting = setting
        self._generator = generator
        self._lost = False
        """Whether an op was met whose values cannot be computed, with REAL."""

    def inputs(
        self, traits: LaneTraits, args: Any, kwargs: Any, tensors: list[torch.Tensor]
    ) -> list[torch.Tensor] | None:
        """Return the values of an op's tensor arguments, None if one that the op reads is unknown.

        An unknown tensor that the op overwrites as a whole, or an uninitialized one that it writes a part of, has a new
        real tensor there, for `follow` to make known.
        """
        if DeviceState.calls.with_unknown:
            return None
        new: dict[int, torch.UntypedStorage] = {}
        if traits.keeps_the_rest and known_values.uninitialized:
            new = self._initial(traits, args, kwargs or {})
        # A first look, without making tensors: most ops of a training step have an unknown first argument.
        if traits.communicates:
            return None
        targets = _count_of_targets(traits, args)
        if not traits.value_free and not _all_known(tensors[targets:] if targets else tensors, new):
            return None
        inputs: list[torch.Tensor] = []
        for number, tensor in enumerate(tensors):
            known = self._value_of(tensor, traits, number < targets, new) if has_python_key(tensor) else tensor
            if known is None:
                return None
            inputs.append(known)
        return inputs

    def _value_of(
        self, tensor: torch.Tensor, traits: LaneTraits, is_target: bool, new: dict[int, torch.UntypedStorage]
    ) -> torch.Tensor | None:
        """Return the values of an argument, or a stand-in where the op does not read them; None if they are unknown."""
        known = known_values.of(tensor)
        if known is not None:
            return known
        storage = untyped_storage(tensor)
        key = storage_key(storage)
        if key not in new:
            if traits.value_free:
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            if not (is_target and _fills_storage(tensor) and not tensor.is_cpu and self.fits(tensor)):
                return None
            new[key] = torch.UntypedStorage(storage.nbytes())
        return known_values.in_storage(tensor, new[key])

    def _initial(self, traits: LaneTraits, args: Any, kwargs: Any) -> dict[int, torch.UntypedStorage]:
        """Return zeros for the uninitialized storages of which an op writes parts: a program reads what it wrote."""
        zeros: dict[int, torch.UntypedStorage] = {}
        for value in _written(traits, args, kwargs):
            storage = untyped_storage(value)
            key = storage_key(storage)
            if key in known_values.uninitialized and not value.is_cpu and self.fits(value):
                zeros[key] = real_tensors.zeros(storage.nbytes(), dtype=torch.uint8).untyped_storage()
        return zeros

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return whether a new copy of a tensor's size is within the budget."""
        if self.setting is Values.REAL:
            return True
        limit = FLOAT_BYTES if tensor.dtype.is_floating_point or tensor.dtype.is_complex else INTEGER_BYTES
        size = untyped_storage(tensor).nbytes()
        return size <= limit and known_values.total() + size <= TOTAL_BYTES

    def compute(
        self, func: Any, traits: LaneTraits, args: Any, kwargs: Any, tensors: list[torch.Tensor], inputs: Any
    ) -> Any:
        """Return the result of an op on the values of its tensor arguments, computed on the CPU.

        NotImplemented if the CPU cannot compute it, as where it has no kernel for the op or dtype. Raises the op's
        error if its values end it on a GPU too. Where it is not computed, what it writes to becomes unknown.
        """
        try:
            return self._compute(func, args, kwargs, tensors, inputs)
        except BaseException as error:
            _forget_written(traits, args, kwargs)
            if isinstance(error, Exception) and (self._is_made_up(tensors) or not _ends_on_gpu(func, error)):
                return NotImplemented
            raise

    def _is_made_up(self, tensors: list[torch.Tensor]) -> bool:
        """Return whether values among those of an op's arguments are made up: they say nothing about a GPU."""
        assumption = assumed_values.among(tensors) if known_values.assumed else None
        return assumption is not None and assumption.is_made_up

    def _compute(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], inputs: Any) -> Any:
        args, kwargs = replace_tensors(args, kwargs, tensors, inputs)
        kwargs = {name: _on_cpu(name, value) for name, value in kwargs.items()}
        if lane_traits(func).value_free:
            kwargs["device"] = HOST
        function = cpu_ops.OPS.get(func, func)
        generator = kwargs.get("generator")
        if self.setting is Values.REAL or generator is not None or not _is_random(func):
            return function(*args, **kwargs)
        with _default_generator(self._generator):
            return function(*args, **kwargs)

    def finish(
        self,
        func: Any,
        traits: LaneTraits,
        args: Any,
        kwargs: Any,
        tensors: list[Any],
        inputs: list[Any] | None,
        result: Any,
    ) -> Any:
        """Do what follows for values from an op that has run, with known inputs or without; return its result."""
        if inputs is not None:
            return self.follow(func, traits, args, kwargs, tensors, inputs, result)
        if traits.chooses:
            self._choose(func, args, kwargs, result)
        if traits.writes or self.setting is Values.REAL:
            self.lose(func, traits, args, kwargs)
        return result

    def follow(
        self, func: Any, traits: LaneTraits, args: Any, kwargs: Any, tensors: list[Any], inputs: list[Any], result: Any
    ) -> Any:
        """Compute the values of an op that has run; return its result, with real CPU tensors for those on the CPU."""
        followed = self._follow(func, traits, args, kwargs, tensors, inputs, result)
        if known_values.assumed:
            assumed_values.pass_on(func, tensors, list(_written(traits, args, kwargs)), traits.overwrites, followed)
        return followed

    def _choose(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Give the indices that an op has chosen by unknown scores the values that are assumed."""
        choosing = choices.OPS[func]
        chosen = result[choosing.result] if isinstance(result, list | tuple) else result
        if is_virtual(chosen) and chosen.numel() and self.fits(chosen):
            dim = choosing.dimension(args, kwargs)
            known_values.put(chosen, choices.indices(choosing, args[0], dim, chosen.shape))
            known_values.assume(chosen, known_values.Assumption(choices.assumption(), is_made_up=True))

    def _follow(
        self, func: Any, traits: LaneTraits, args: Any, kwargs: Any, tensors: list[Any], inputs: list[Any], result: Any
    ) -> Any:
        if func is _COPY_TO and is_virtual(result) and not result.is_cpu and inputs[0].layout is torch.strided:
            self._follow_copy(traits, kwargs, inputs[0], result)
            return result
        results = [value for value in pytree.tree_leaves(result) if isinstance(value, torch.Tensor)]
        if not all(not is_virtual(value) or known_values.is_known(value) or self.fits(value) for value in results):
            self.lose(func, traits, args, kwargs)
            return result
        state = torch.default_generator.get_state() if func in cpu_ops.REPLAYED else None
        computed = self.compute(func, traits, args, kwargs, tensors, inputs)
        if computed is NotImplemented:
            self.lose(func, traits, args, kwargs)
            return result
        if traits.writes:
            for tensor, values_of in zip(tensors, inputs, strict=True):
                if is_virtual(tensor) and not known_values.is_known(tensor):
                    known_values.put_storage(tensor, untyped_storage(values_of))
        if not results:
            return result
        arguments = set(map(id, tensors))
        # An output argument may be a part of a storage whose other elements stay unknown.
        fresh = {
            id(value)
            for value in results
            if is_virtual(value)
            and not known_values.is_known(value)
            and (id(value) not in arguments or _fills_storage(value))
        }
        taken = {storage_key(untyped_storage(tensor)) for tensor in inputs}
        forward = None if state is None else cpu_ops.Forward(state, _without_tensors(args))
        return _joined(result, computed, _Joining(fresh, taken, forward, self._is_made_up(tensors)))

    def _follow_copy(self, traits: LaneTraits, kwargs: Any, source: torch.Tensor, result: torch.Tensor) -> None:
        """Compute the values of a tensor that moves to the GPU or gets another dtype, as the weights of a model do."""
        if known_values.is_known(result):
            # Of a storage that was at the same address: an interrupt may end the callback of a weak reference.
            known_values.forget(result)
        if not self.fits(result):
            return
        try:
            copy = _COPY_TO(source, **{name: _on_cpu(name, value) for name, value in kwargs.items()})
        except Exception:
            # The CPU cannot convert every dtype.
            self.lose(_COPY_TO, traits, (), kwargs)
        else:
            known_values.put(result, copy)

    def add_in_place(self, target: torch.Tensor, addend: torch.Tensor) -> None:
        """Compute an addition of the autograd engine into a gradient."""
        first, second = known_values.of(target), known_values.of(addend)
        if first is not None and second is not None:
            first.add_(second)
        else:
            known_values.forget(target)

    def lose(self, func: Any, traits: LaneTraits, args: Any, kwargs: Any) -> None:
        """Make the storages unknown that an op writes to, whose values are not computed."""
        _forget_written(traits, args, kwargs)
        if self.setting is Values.REAL and not self._lost:
            self._lost = True
            notes.assume(f"from {func} on, values are not computed: the CPU has no kernel for it")


def _ends_on_gpu(func: Any, error: Exception) -> bool:
    """Return whether an error of an op on the CPU is one of its values, with which it ends on a GPU too.

    An IndexError of a function of `cpu_ops.OPS`, or of an operator that is not torch's, is no check of an index.
    """
    if isinstance(error, torch.linalg.LinAlgError) or func in _ASSERTIONS:
        return True
    if isinstance(error, IndexError):
        return func.namespace == "aten" and func not in cpu_ops.OPS
    return isinstance(error, RuntimeError) and _CHECKS_OF_VALUES.search(str(error)) is not None


def _written(traits: LaneTraits, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Return the virtual tensors that an op writes to."""
    for position in traits.writes:
        if isinstance(position, str):
            value = kwargs.get(position)
        else:
            # Optional arguments at the end may be left out.
            value = args[position] if position < len(args) else None
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if is_virtual(tensor):
                yield tensor


def _forget_written(traits: LaneTraits, args: Any, kwargs: Any) -> None:
    """Make the storages unknown that an op writes to."""
    for tensor in _written(traits, args, kwargs):
        known_values.forget(tensor)


def _fills_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements are all bytes of its storage, each once."""
    if not is_non_overlapping_and_dense(tensor):
        return False
    return tensor.numel() * tensor.element_size() == untyped_storage(tensor).nbytes()


def _on_cpu(name: str, value: Any) -> Any:
    if name == "device":
        return HOST
    return False if name == "pin_memory" else value


def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _without_tensors(args: Any) -> tuple[Any, ...]:
    return tuple(None if isinstance(value, torch.Tensor | list | tuple) else value for value in args)


@contextlib.contextmanager
def _default_generator(generator: torch.Generator) -> Iterator[None]:
    """Draw the numbers of the block from a generator in place of the default one."""
    default = torch.default_generator
    present = default.get_state()
    default.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(default.get_state())
        default.set_state(present)


class _Joining(NamedTuple):
    fresh: set[int]
    """Ids of the results in storages that were unknown."""
    taken: set[int]
    """Keys of the real storages that belong to an argument or to another result."""
    forward: cpu_ops.Forward | None
    is_made_up: bool
    """Whether the values are assumed, and print as virtual on the CPU too."""


def _joined(result: Any, computed: Any, joining: _Joining) -> Any:
    """Put computed values into virtual results; return the results, with the computed ones of those on the CPU."""
    if isinstance(result, list | tuple):
        return type(result)([_joined(output, value, joining) for output, value in zip(result, computed, strict=True)])
    if not is_virtual(result) or id(result) not in joining.fresh:
        return result
    if computed is None:
        # Only the op's own backward reads it, and computes without it.
        computed = real_tensors.zeros(result.shape, dtype=result.dtype)
    if computed.layout is not torch.strided or computed.shape != result.shape:
        return result
    if computed.dtype is not result.dtype:
        computed = computed.to(result.dtype)
    if result.is_cpu and not joining.is_made_up:
        return computed
    storage = storage_key(untyped_storage(computed))
    known_values.put(result, computed.clone() if storage in joining.taken else computed)
    joining.taken.add(storage)
    copy = known_values.copy_of(result)
    if joining.forward is not None and copy is not None:
        setattr(copy, cpu_ops.FORWARD, joining.forward)
    return result
