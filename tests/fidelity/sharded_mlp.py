"""A perceptron of 8 192 units on 4 GPUs, with DDP, FSDP1 and FSDP2.

Ordinary code, written anew from a note that publishes the peaks (docs/many_gpus.md).
"""

import enum

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, SAMPLES, STEPS = 8192, 6, 256, 5


class Strategy(enum.Enum):
    DDP = "DDP"
    FSDP1 = "FSDP1"
    FSDP2 = "FSDP2"


def parallel(model: nn.Module, strategy: Strategy) -> nn.Module:
    if strategy is Strategy.DDP:
        return DistributedDataParallel(model.cuda(), device_ids=[0])
    if strategy is Strategy.FSDP1:
        return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=0)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            fully_shard(module)
    return fully_shard(model)


def train(strategy: Strategy) -> int:
    """Train and return the peak allocated in bytes."""
    dist.init_process_group("nccl")
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())][:-1]
    model = parallel(nn.Sequential(*layers), strategy)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    target = torch.randn(SAMPLES, WIDTH).cuda()
    source = torch.randn(SAMPLES, WIDTH).cuda()
    for _ in range(STEPS):
        optimizer.zero_grad()
        result = model(source)
        loss = mse_loss(result, target)
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()
    return torch.cuda.max_memory_allocated()
