"""Train a model on several GPUs, as one rank, by torch's own wrappers; the training loop uses `Parallel`.

The model is on the CPU, and a virtual GPU is on. The model gets parameters of its own for the block, without values;
its own are never touched. The rank is 0, which has the largest shards; only the optimizer state of ZeRO-1 may be larger
on another, which then is the rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from memexplore.run.knobs.applying.report import ApplyReport, Change, counted
from memexplore.run.knobs.applying.undo import UndoLog, undone_after
from memexplore.run.knobs.checkpoints.blocks import Block, blocks
from memexplore.run.knobs.fsdp_offload import FsdpOffload
from memexplore.run.knobs.fsdp_precision import FsdpPrecision
from memexplore.run.knobs.gpus import DIMENSIONS, Layout, layout_of, several
from memexplore.run.knobs.knob import Group
from memexplore.run.knobs.knobs import KNOBS, Knobs
from memexplore.run.knobs.strategy import FSDP, Strategy, strategy_of
from memexplore.run.programs import optimizers, tensor_parallel
from memexplore.run.programs.optimizers import Written
from memexplore.torch_internals.distributed import forget_module_states
from memexplore.torch_internals.modules import buffers_of, parameters_of
from memexplore.virtual_gpu.tensors.tensor import fake_cpu_tensor, is_virtual

_CUDA = torch.device("cuda")
_TENSOR = "tensor"


class Parallel(NamedTuple):
    """What a training loop on several GPUs uses instead of the model and its optimizer."""

    model: nn.Module
    """The model to call: the wrapper of DDP, else the model itself."""
    applied: ApplyReport
    weights: Mapping[int, nn.Parameter]
    """Id of each parameter of the user -> the parameter that trains instead."""
    optimizer: Callable[[torch.optim.Optimizer], torch.optim.Optimizer]
    """Shards an optimizer."""
    unsynchronised: Callable[[], contextlib.AbstractContextManager[Any]]
    """A block for each micro-batch but the last, after which gradients are not reduced."""


def wrapped(
    written: Written | str,
    knobs: Knobs,
    model: nn.Module,
    originals: list[Original],
    dtype: torch.dtype | None,
    apply: Callable[[], ApplyReport],
) -> Parallel:
    """Apply knobs to a model that has tensors of its own (`own_tensors`), and wrap it for several GPUs.

    `written` is `Step.optimizer`, `dtype` the type that the weights get, and `apply` applies the knobs of the model.

    Raises RuntimeError where the process has a process group already, ValueError for a model without the
    tensor-parallel plan that the knobs need.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "this process is a rank of a process group: call torch.distributed.destroy_process_group() before a "
            "setting with gpus= is run"
        )
    strategy = strategy_of(knobs)
    if dtype is not None:
        model.to(dtype)
    # Before adapters make one block differ from the others.
    layout, units = layout_of(knobs), blocks(model)
    if strategy not in FSDP and layout.tensor == 1:
        model.to("cuda")
    applied = apply()
    _replace(model, lambda tensor: not is_virtual(tensor))  # those of adapters
    rank = _largest_rank(written, knobs, model, originals) if strategy is Strategy.ZERO_1 else 0
    dist.init_process_group("nccl", rank=rank, world_size=knobs.gpus or 1)
    mesh: Any = _mesh(layout) if strategy in FSDP or layout.tensor > 1 else None
    if layout.tensor > 1:
        tensor_parallel.share_layers(model, mesh[_TENSOR])
    if strategy not in FSDP and layout.tensor > 1:
        tensor_parallel.move_others(model)
    count = len(units) if strategy in FSDP else 0
    if strategy in FSDP:
        _shard(model, units, knobs, mesh)
    called = model
    if strategy in (Strategy.DDP, Strategy.ZERO_1) and any(weight.requires_grad for weight in model.parameters()):
        called = replicated(model)
    return Parallel(
        called,
        applied + ApplyReport(tuple(_changes(knobs, strategy, count))),
        _replacements(originals),
        _zero if strategy is Strategy.ZERO_1 else _in_kinds if layout.tensor > 1 else _unchanged,
        getattr(called, "no_sync", contextlib.nullcontext),
    )


def _in_kinds(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer with a group for each kind of parameter: an update by foreach refuses a list of both."""
    groups, settings = optimizers.settings_of(optimizer)
    split = [
        {**group, "params": chosen}
        for group in groups
        for is_shared in (True, False)
        if (chosen := [weight for weight in group["params"] if tensor_parallel.is_shared(weight) is is_shared])
    ]
    return type(optimizer)(split, **settings)


def _unchanged(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer


def _changes(knobs: Knobs, strategy: Strategy, blocks: int) -> Iterator[Change]:
    changed = {**knobs.changed(), **({} if strategy is Strategy.AS_WRITTEN else {"strategy": strategy})}
    for name, knob in KNOBS.items():
        if knob.group is Group.SEVERAL_GPUS and name in changed:
            sharded = f" of {counted(blocks, 'block')}" if name == "strategy" and blocks else ""
            yield Change(name, knob.phrase(changed[name]) + sharded)


# --- the model's own tensors, out of the way --------------------------------------------------------------------------


class Original(NamedTuple):
    """A parameter of the user, and the module that has it."""

    module: nn.Module
    name: str
    parameter: nn.Parameter


def own_tensors(knobs: Knobs, model: nn.Module) -> contextlib.AbstractContextManager[list[Original]]:
    """Give a model that runs on several GPUs parameters and buffers without values, on the CPU, for a block.

    Afterwards it has its own again, and its modules the classes that they had.
    """
    return undone_after(lambda log: _own_tensors(log, model) if several(knobs) else [])


def _own_tensors(log: UndoLog, model: nn.Module) -> list[Original]:
    modules = list(model.modules())
    log.add(forget_module_states, modules)
    for module in modules:
        # `fully_shard` makes a class for each class of modules.
        log.add(setattr, module, "__class__", type(module))
    originals = []
    for module in modules:
        for name, tensor in buffers_of(module).items():
            log.set_item(buffers_of(module), name, tensor)
        for name, tensor in parameters_of(module).items():
            log.set_item(parameters_of(module), name, tensor)
            if tensor is not None:
                originals.append(Original(module, name, tensor))
    _replace(model, lambda tensor: True)
    return originals


def _replace(model: nn.Module, replaced: Callable[[torch.Tensor], bool]) -> None:
    """Replace tensors of a model; a tensor that several modules share is replaced by one."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for table in (parameters_of(module), buffers_of(module)):
            for name, tensor in list(table.items()):
                if tensor is not None and replaced(tensor):
                    if id(tensor) not in made:
                        made[id(tensor)] = _without_values(tensor)
                    table[name] = made[id(tensor)]  # type: ignore[assignment]


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    other: torch.Tensor = fake_cpu_tensor(tensor.shape, tensor.dtype, tensor.stride())
    if isinstance(tensor, nn.Parameter):
        other = nn.Parameter(other, requires_grad=tensor.requires_grad)
    return other


def _replacements(originals: list[Original]) -> dict[int, nn.Parameter]:
    replacements = {}
    for module, name, parameter in originals:
        now = parameters_of(module).get(name)
        if now is not None:
            replacements[id(parameter)] = now
    return replacements


# --- DDP and ZeRO-1 ---------------------------------------------------------------------------------------------------


def replicated(model: nn.Module) -> nn.Module:
    """Return a model in DistributedDataParallel; attributes that DDP does not have are the model's.

    A loss function that calls the model itself may read them.
    """
    from torch.nn.parallel import DistributedDataParallel

    class Replicated(DistributedDataParallel):
        """A model in DDP, whose layers have their own names."""

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("module"), name)

        def named_modules(self, *args: Any, **kwargs: Any) -> Any:
            """Yield the modules with their names in the model, and DDP under the name of the model."""
            for name, module in self.module.named_modules(*args, **kwargs):
                yield name, module if name else self

    return Replicated(model, device_ids=[0])


def _zero(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    groups, settings = optimizers.settings_of(optimizer)
    sharded: torch.optim.Optimizer = ZeroRedundancyOptimizer(groups, type(optimizer), **settings)
    return sharded


def _largest_rank(written: Written | str, knobs: Knobs, model: nn.Module, originals: list[Original]) -> int:
    """Return the rank that ZeroRedundancyOptimizer gives most numbers.

    Source: `_partition_parameters` in torch/distributed/optim/zero_redundancy_optimizer.py.
    """
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if not weights:
        return 0
    optimizer = optimizers.make(written, knobs, weights, _replacements(originals))
    sizes = [0] * (knobs.gpus or 1)
    for group in optimizer.param_groups:
        for count in sorted((weight.numel() for weight in group["params"]), reverse=True):
            sizes[sizes.index(min(sizes))] += count
    return sizes.index(max(sizes))


# --- FSDP2 ------------------------------------------------------------------------------------------------------------


def _mesh(layout: Layout) -> Any:
    """Return the device mesh of a layout, without the dimensions of size 1."""
    from torch.distributed.device_mesh import init_device_mesh

    sizes = {name: size for name, size in zip(DIMENSIONS, layout, strict=True) if size > 1}
    return init_device_mesh("cuda", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _shard(model: nn.Module, units: tuple[Block, ...], knobs: Knobs, mesh: Any) -> None:
    """Wrap every repeated block and then the model by `fully_shard`; the shards are on the GPU, or on the CPU."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    dimensions = tuple(name for name in mesh.mesh_dim_names if name != _TENSOR)
    options: dict[str, Any] = {"mesh": mesh[dimensions] if len(dimensions) < mesh.ndim else mesh}
    if knobs.fsdp_precision is not FsdpPrecision.AS_WRITTEN:
        reduced = torch.float32 if knobs.fsdp_precision is FsdpPrecision.REDUCED_IN_FP32 else torch.bfloat16
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
    if knobs.fsdp_offload is FsdpOffload.SHARDS:
        options["offload_policy"] = CPUOffloadPolicy()
    if knobs.strategy is Strategy.FSDP2_NO_RESHARD:
        options["reshard_after_forward"] = False
    for block in units:
        modules = [model.get_submodule(name) for name in block.names]
        fully_shard(modules if len(modules) > 1 else modules[0], **options)
    fully_shard(model, **options)
