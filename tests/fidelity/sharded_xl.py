"""A language model with 3.4 billion parameters on 2 and 4 GPUs: copies, a sharded optimizer, and sharded weights.

Ordinary code for `torchrun`, written anew from a report that published peaks (docs/many_gpus.md). The weights of
linear layers and of the embedding are sharded by rows; whole ones are gathered before a layer runs, forward and
backward, two layers ahead.
"""

import enum

import torch
import torch.distributed as dist
from torch import nn

from tests.fidelity.models import DecoderLm, Embedding, Linear, autocast
from tests.fidelity.sharded_lm import AdamW, cross_entropy


class Sharding(enum.Enum):
    """What each rank has a part of."""

    NOTHING = "AdamW on every rank"
    OPTIMIZER = "a sharded optimizer"
    WEIGHTS = "sharded weights, gradients and optimizer"


class Copies(nn.Module):
    """The same weights on every rank; gradients are averaged one by one after the backward pass."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.data, src=0)

    def forward(self, tokens):
        return self.module(tokens)

    def average(self):
        for p in self.module.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(dist.get_world_size())


class Shard:
    """The weight of one layer: a part of its rows, and all of them while the layer runs."""

    def __init__(self, layer, dtype):
        rows = layer.weight.shape[0] // dist.get_world_size()
        own = layer.weight.data.narrow(0, rows * dist.get_rank(), rows).contiguous().clone()
        self.layer, self.shape, self.rows = layer, layer.weight.shape, rows
        self.dtype = dtype or own.dtype
        self.gathered = self.work = self.own = None
        layer.weight = nn.Parameter(own)

    def gather(self, dtype, ahead):
        if self.gathered is not None and self.gathered.dtype == dtype:
            return
        if self.work is not None:
            self.work.wait()
        self.work = self.gathered = None
        part = self.layer.weight.data.to(dtype).contiguous()
        self.gathered = part.new_empty(self.shape)
        work = dist.all_gather_into_tensor(self.gathered, part, async_op=ahead)
        self.work = work if ahead else None

    def install(self, dtype):
        if self.own is not None:
            if self.layer.weight.dtype == dtype:
                return
            self.release()
        if self.work is not None:
            self.work.wait()
            self.work = None
        self.gather(dtype, ahead=False)
        self.own = self.layer.weight.data.detach().to(torch.float32).contiguous().clone()
        self.layer.weight.data = self.gathered

    def release(self):
        if self.own is not None:
            self.layer.weight.data = self.own
        self.own = self.gathered = self.work = None


class Sharded(nn.Module):
    """Each rank has a part of the rows of each weight, but all of the norms'."""

    def __init__(self, module, dtype):
        super().__init__()
        self.module, self.works = module, []
        self.shards = [Shard(each, dtype) for each in module.modules() if isinstance(each, Linear | Embedding)]
        for number, shard in enumerate(self.shards):
            layer = shard.layer
            layer.register_forward_pre_hook(lambda *_, shard=shard: shard.install(shard.dtype))
            layer.register_forward_hook(lambda *_, number=number: self._after(number))
            backward = torch.float32 if isinstance(layer, Embedding) else shard.dtype
            layer.register_full_backward_pre_hook(lambda *_, shard=shard, dtype=backward: shard.install(dtype))
            layer.weight.register_post_accumulate_grad_hook(lambda p, shard=shard: self._scatter(p, shard))
        sharded = {id(shard.layer.weight) for shard in self.shards}
        for p in module.parameters():
            if id(p) not in sharded:
                p.register_post_accumulate_grad_hook(
                    lambda p: self.works.append(dist.all_reduce(p.grad, async_op=True))
                )

    def forward(self, tokens):
        return self.module(tokens)

    def _after(self, number):
        self.shards[number].release()
        for ahead in self.shards[number + 2 : number + 3]:
            ahead.gather(ahead.dtype, ahead=True)

    def _scatter(self, p, shard):
        whole = p.grad.detach().to(torch.float32).contiguous().clone()
        p.grad = None
        shard.release()
        part = whole.new_empty((shard.rows, *whole.shape[1:]))
        self.works.append(dist.reduce_scatter_tensor(part, whole, async_op=True))
        p.grad = part

    def average(self):
        for work in self.works:
            work.wait()
        self.works.clear()
        for p in self.module.parameters():
            p.grad.div_(dist.get_world_size())


class InTurn(torch.optim.Optimizer):
    """The ranks own the parameters in turn; each updates its own and then sends them."""

    def __init__(self, params, **options):
        self._options = options
        super().__init__(params, {})

    def add_param_group(self, group):
        super().add_param_group(group)
        world = dist.get_world_size()
        self._owners = [(p, number % world) for number, p in enumerate(self.param_groups[-1]["params"])]
        self._own = AdamW([p for p, owner in self._owners if owner == dist.get_rank()], **self._options)

    def step(self):
        self._own.step()
        for p, owner in self._owners:
            dist.broadcast(p.data, src=owner)


def train(sharding, dtype=None, *, context=512, batch=4, steps=3, **shape):
    """Train; from the second step on, the steps are equal, and no update needs as much memory as a backward pass."""
    dist.init_process_group("nccl")
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    module = DecoderLm(context, **shape).to(device)
    model = Sharded(module, dtype) if sharding is Sharding.WEIGHTS else Copies(module)
    optimizer = (AdamW if sharding is Sharding.NOTHING else InTurn)(model.parameters(), lr=1e-3)
    tokens, targets = (torch.randint(0, 10_000, (batch // dist.get_world_size(), context), device=device) for _ in "xy")
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        with autocast(dtype):
            logits = model(tokens)
        loss = cross_entropy(logits, targets)
        loss.backward()
        model.average()
        optimizer.step()
