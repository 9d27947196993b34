# gpu: 4GiB
# cause: scalar_loss and vector_loss are kept for the epoch with their graphs, which hold predictions and targets
# cure: scalar_loss.detach(), vector_loss.detach()
# report: https://github.com/pdearena/pdearena/pull/4 (merged: 2 MB a step, gone after the change)
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Fields(Dataset):
    def __len__(self):
        return 16 * 120

    def __getitem__(self, index):
        return torch.rand(12, 256, 256), torch.rand(3, 256, 256)


class PDEModel(pl.LightningModule):
    def __init__(self, width=32):
        super().__init__()
        self.model = nn.Sequential(
            nn.Conv2d(12, width, 3, padding=1), nn.GELU(), nn.Conv2d(width, width, 3, padding=1), nn.GELU(),
            nn.Conv2d(width, 3, 3, padding=1),
        )  # fmt: skip
        self.outputs = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        prediction = self.model(x)
        loss = F.mse_loss(prediction, y)
        scalar_loss = F.mse_loss(prediction[:, :1], y[:, :1])
        vector_loss = F.mse_loss(prediction[:, 1:], y[:, 1:])
        self.outputs.append({"scalar_loss": scalar_loss, "vector_loss": vector_loss})
        return loss

    def on_train_epoch_end(self):
        self.log("scalar_loss", torch.stack([output["scalar_loss"] for output in self.outputs]).mean())
        self.log("vector_loss", torch.stack([output["vector_loss"] for output in self.outputs]).mean())
        self.outputs.clear()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


trainer = pl.Trainer(
    accelerator="gpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
)
trainer.fit(PDEModel(), DataLoader(Fields(), batch_size=16))
print(f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
