"""Lightning: LightningModule, DataModule, ModelCheckpoint, EarlyStopping, torchmetrics, 16-bit precision, resume from the best checkpoint."""

import os

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy


class Data(L.LightningDataModule):
    def setup(self, stage):
        g = torch.Generator().manual_seed(0)
        images, labels = torch.rand(160, 1, 28, 28, generator=g), torch.randint(0, 10, (160,), generator=g)
        self.train, self.val = TensorDataset(images[:128], labels[:128]), TensorDataset(images[128:], labels[128:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=32, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=32)

    test_dataloader = predict_dataloader = val_dataloader


class Classifier(L.LightningModule):
    def __init__(self, hidden=64, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(784, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 10)
        )
        self.val_acc = Accuracy(task="multiclass", num_classes=10)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_acc(logits, y)
        self.log("val_loss", F.cross_entropy(logits, y))
        self.log("val_acc", self.val_acc, on_epoch=True)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).argmax(-1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2)}


if __name__ == "__main__":
    L.seed_everything(42, workers=True)
    model, data = Classifier(), Data()
    checkpoint = ModelCheckpoint(dirpath="checkpoints", monitor="val_loss", save_top_k=1, save_last=True)
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="auto",
        devices=1,
        precision="16-mixed" if torch.cuda.is_available() else "32-true",
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        callbacks=[checkpoint, EarlyStopping("val_loss", patience=5), LearningRateMonitor()],
        logger=CSVLogger("logs"),
        enable_progress_bar=False,
        log_every_n_steps=1,
    )
    trainer.fit(model, data)
    print(
        "steps",
        trainer.global_step,
        "epochs",
        trainer.current_epoch,
        "parameters",
        sum(p.numel() for p in model.parameters()),
    )
    best = Classifier.load_from_checkpoint(checkpoint.best_model_path or checkpoint.last_model_path)
    metrics = trainer.test(best, data, verbose=False)
    print(sorted(metrics[0]), f"{metrics[0]['val_loss']:.4f}")
    predictions = torch.cat(trainer.predict(best, data))
    print("predictions", tuple(predictions.shape), sorted(os.listdir("checkpoints"))[-1])
