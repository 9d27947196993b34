"""Lightning Fabric: a loop of one's own with setup, backward, autocast and save."""

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="auto", devices=1, precision="bf16-mixed" if torch.cuda.is_available() else "32-true")
fabric.launch()
fabric.seed_everything(1)
with fabric.init_module():
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.GELU(), torch.nn.Linear(64, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(
    DataLoader(TensorDataset(torch.rand(64, 20), torch.randint(0, 3, (64,))), batch_size=16)
)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
    fabric.print(f"epoch {epoch} loss {loss.item():.4f} on {x.device.type}")
fabric.save("state.ckpt", {"model": model, "optimizer": optimizer, "epoch": epoch})
print(sorted(fabric.load("state.ckpt")))
