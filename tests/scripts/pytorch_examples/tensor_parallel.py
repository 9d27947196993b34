"""A feed-forward network in tensor parallel, as pytorch/examples/distributed/tensor_parallelism."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj = nn.Linear(512, 2048)
        self.relu = nn.ReLU()
        self.out_proj = nn.Linear(2048, 512)

    def forward(self, x):
        return self.out_proj(self.relu(self.in_proj(x)))


world_size = int(os.environ["WORLD_SIZE"])
device_type = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
device_mesh = init_device_mesh(device_type=device_type, mesh_shape=(world_size,))
torch.manual_seed(0)
tp_model = ToyModel().to(device_type)
tp_model = parallelize_module(tp_model, device_mesh, {"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()})
print(
    "rank",
    device_mesh.get_rank(),
    "weight",
    tuple(tp_model.in_proj.weight.shape),
    "local",
    tuple(tp_model.in_proj.weight.to_local().shape),
)
optimizer = torch.optim.AdamW(tp_model.parameters(), lr=0.25, foreach=True)
for i in range(3):
    inp = torch.rand(20, 512, device=device_type)
    output = tp_model(inp)
    output.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("iteration", i, tuple(output.shape))
dist.destroy_process_group()
