"""Lightning GAN with two optimizers in manual optimisation, as Lightning's GAN tutorial."""

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader


class GAN(L.LightningModule):
    def __init__(self, latent_dim=16):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(latent_dim, 64), nn.BatchNorm1d(64), nn.LeakyReLU(0.2), nn.Linear(64, 196), nn.Tanh()
        )
        self.discriminator = nn.Sequential(nn.Linear(196, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
        self.validation_z = torch.randn(8, latent_dim)

    def training_step(self, imgs):
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(imgs.shape[0], self.hparams.latent_dim).type_as(imgs)
        self.toggle_optimizer(optimizer_g)
        valid = torch.ones(imgs.size(0), 1).type_as(imgs)
        g_loss = F.binary_cross_entropy_with_logits(self.discriminator(self.generator(z)), valid)
        self.log("g_loss", g_loss)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)
        self.toggle_optimizer(optimizer_d)
        fake = torch.zeros(imgs.size(0), 1).type_as(imgs)
        d_loss = (
            F.binary_cross_entropy_with_logits(self.discriminator(imgs), valid)
            + F.binary_cross_entropy_with_logits(self.discriminator(self.generator(z).detach()), fake)
        ) / 2
        self.log("d_loss", d_loss)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def on_train_epoch_end(self):
        z = self.validation_z.type_as(self.generator[0].weight)
        print(
            f"epoch {self.current_epoch} samples {tuple(self.generator(z).shape)} g_loss {self.trainer.callback_metrics['g_loss'].item():.4f}"
        )

    def configure_optimizers(self):
        return [
            torch.optim.Adam(self.generator.parameters(), lr=2e-4),
            torch.optim.Adam(self.discriminator.parameters(), lr=2e-4),
        ], []


L.seed_everything(0)
trainer = L.Trainer(
    accelerator="auto", devices=1, max_epochs=2, enable_progress_bar=False, logger=False, enable_checkpointing=False
)
trainer.fit(GAN(), DataLoader(torch.rand(64, 196) * 2 - 1, batch_size=16))
print("global step", trainer.global_step)
