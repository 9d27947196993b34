"""Write the lines that train a model on several GPUs: the process group, and torch's own wrappers.

`lines` puts them before and after the lines of the model.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from memexplore.run.knobs.checkpoints.blocks import blocks
from memexplore.run.knobs.fsdp_offload import FsdpOffload
from memexplore.run.knobs.fsdp_precision import FsdpPrecision
from memexplore.run.knobs.gpus import DIMENSIONS, layout_of, several
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.knobs.strategy import FSDP, Strategy, strategy_of
from memexplore.run.knobs.tensor_parallel import STYLES, plan_of
from memexplore.virtual_gpu.tensors.local_device import GPUS_OF_A_NODE

_POLICY = "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.{})"


def start_lines(knobs: Knobs) -> Iterator[str]:
    """Yield the lines that begin a script of several GPUs.

    >>> print(*start_lines(Knobs(gpus=16)), sep="\\n")
    # Start it on each of 2 nodes: torchrun --nnodes 2 --nproc-per-node 8 train.py
    # Give each process batches of its own, such as by torch.utils.data.distributed.DistributedSampler.
    torch.distributed.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    """
    gpus = knobs.gpus or 1
    if gpus == 1:
        return
    nodes = -(-gpus // GPUS_OF_A_NODE)
    if nodes > 1:
        command = f"torchrun --nnodes {nodes} --nproc-per-node {gpus // nodes} train.py"
        yield f"# Start it on each of {nodes} nodes: {command}"
    else:
        yield f"# Start it by: torchrun --nproc-per-node {gpus} train.py"
    if layout_of(knobs).data_parallel > 1:
        yield "# Give each process batches of its own, such as by torch.utils.data.distributed.DistributedSampler."
    yield 'torch.distributed.init_process_group("nccl")'
    yield 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'


def wrap_lines(model: nn.Module | None, knobs: Knobs) -> Iterator[str]:
    """Yield the lines that wrap the model; parameters of a sharded model are new, so the optimizer comes after them.

    >>> print(*wrap_lines(None, Knobs(gpus=2)), sep="\\n")
    from torch.nn.parallel import DistributedDataParallel
    model = DistributedDataParallel(model.cuda(), device_ids=[torch.cuda.current_device()])
    """
    if not several(knobs):
        return
    strategy, layout = strategy_of(knobs), layout_of(knobs)
    if strategy in (Strategy.DDP, Strategy.ZERO_1):
        yield "from torch.nn.parallel import DistributedDataParallel"
        yield "model = DistributedDataParallel(model.cuda(), device_ids=[torch.cuda.current_device()])"
        if (knobs.accumulation or 1) > 1:
            yield "# Run all micro-batches of a step but the last inside of `with model.no_sync():`."
        return
    sizes = {name: size for name, size in zip(DIMENSIONS, layout, strict=True) if size > 1}
    yield "from torch.distributed.device_mesh import init_device_mesh"
    yield f'mesh = init_device_mesh("cuda", {tuple(sizes.values())}, mesh_dim_names={tuple(sizes)})'
    if (knobs.tensor_parallel or 1) > 1:
        yield from _shared_layers(model)
    if strategy not in FSDP:
        yield "model.cuda()  # what no other GPU shares"
        return
    yield from _sharded(model, knobs, tuple(name for name in sizes if name != "tensor"), len(sizes))


def _shared_layers(model: nn.Module | None) -> Iterator[str]:
    plan = {} if model is None else plan_of(model)
    yield "from torch.distributed.tensor import Replicate"
    yield "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module"
    entries = [f"    {pattern!r}: {_style(style)}," for pattern, style in plan.items() if style in STYLES]
    yield "\n".join(
        ["plan = {", *(entries or ["    # the styles of your layers, such as model.tp_plan has them"]), "}"]
    )
    yield 'parallelize_module(model, mesh["tensor"], plan)'


def _style(name: str) -> str:
    kind, replicated = STYLES[name]
    return f"{kind}({f'{replicated}=Replicate()' if replicated else ''})"


def _sharded(model: nn.Module | None, knobs: Knobs, dimensions: tuple[str, ...], of: int) -> Iterator[str]:
    part = "mesh" if len(dimensions) == of else f"mesh[{', '.join(map(repr, dimensions))}]"
    options, names = [f"mesh={part}"], ["fully_shard"]
    if knobs.fsdp_precision is not FsdpPrecision.AS_WRITTEN:
        names.append("MixedPrecisionPolicy")
        reduced = "float32" if knobs.fsdp_precision is FsdpPrecision.REDUCED_IN_FP32 else "bfloat16"
        options.append(f"mp_policy={_POLICY.format(reduced)}")
    if knobs.fsdp_offload is FsdpOffload.SHARDS:
        names.append("CPUOffloadPolicy")
        options.append("offload_policy=CPUOffloadPolicy()")
    if knobs.strategy is Strategy.FSDP2_NO_RESHARD:
        options.append("reshard_after_forward=False")
    arguments = ", ".join(options)
    yield f"from torch.distributed.fsdp import {', '.join(sorted(names))}"
    yield "# The model is on the CPU: fully_shard moves one block after the other to the GPU."
    block_names = [] if model is None else [block.names for block in blocks(model)]
    if not block_names:
        yield "# First the same for each of the repeated blocks of the model."
    elif all(len(names_of_block) == 1 for names_of_block in block_names):
        listed = "".join(f"    {name!r},\n" for (name,) in block_names)
        yield f"for name in [\n{listed}]:\n    fully_shard(model.get_submodule(name), {arguments})"
    else:
        listed = "".join(f"    {list(names_of_block)!r},\n" for names_of_block in block_names)
        yield f"for names in [\n{listed}]:\n    fully_shard([model.get_submodule(name) for name in names], {arguments})"
    yield f"fully_shard(model, {arguments})"
