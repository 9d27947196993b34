"""torchao: low-bit optimizers and weight-only int8 quantisation for inference."""

import torch
from torch import nn
from torchao.optim import AdamW8bit, AdamWFp8
from torchao.quantization import Int8WeightOnlyConfig, quantize_

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
for optimizer_class in (AdamW8bit,):
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 16)).to(device)
    optimizer = optimizer_class(model.parameters(), lr=1e-3)
    for step in range(2):
        loss = model(torch.rand(8, 256, device=device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(optimizer_class.__name__, f"step {step} loss {loss.item():.4f}")
model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 16)).to(device).eval()
quantize_(model, Int8WeightOnlyConfig())
with torch.no_grad():
    print(
        "quantised",
        type(model[0].weight).__name__,
        tuple(model(torch.rand(4, 256, device=device)).shape),
        AdamWFp8.__name__,
    )
