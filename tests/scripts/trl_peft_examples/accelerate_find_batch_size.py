"""Accelerate's find_executable_batch_size: halves the batch until a wide network fits the card."""

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size

torch.manual_seed(0)
accelerator = Accelerator()


@find_executable_batch_size(starting_batch_size=65536 if torch.cuda.is_available() else 8)
def inner_training_loop(batch_size):
    accelerator.free_memory()
    model = torch.nn.Sequential(
        *[
            layer
            for _ in range(8)
            for layer in (
                torch.nn.Linear(8192 if torch.cuda.is_available() else 16, 8192 if torch.cuda.is_available() else 16),
                torch.nn.GELU(),
            )
        ]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(2):
        x = torch.randn(batch_size, model[0].in_features, device=accelerator.device)
        loss = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return batch_size


print("trained with a batch that fits:", inner_training_loop() > 0)
