"""PyTorch-Ignite: supervised trainer and evaluator with metrics, a checkpoint handler and early stopping."""

import torch
import torch.nn as nn
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver, EarlyStopping
from ignite.metrics import Accuracy, ConfusionMatrix, Loss
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Flatten(), nn.Linear(196, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8)
criterion = nn.CrossEntropyLoss()
data = TensorDataset(torch.rand(64, 14, 14), torch.arange(64) % 4)
train_loader, val_loader = DataLoader(data, 16, shuffle=True), DataLoader(data, 32)
trainer = create_supervised_trainer(model, optimizer, criterion, device=device)
evaluator = create_supervised_evaluator(
    model, metrics={"accuracy": Accuracy(), "nll": Loss(criterion), "cm": ConfusionMatrix(4)}, device=device
)
evaluator.add_event_handler(
    Events.COMPLETED,
    EarlyStopping(patience=3, score_function=lambda engine: -engine.state.metrics["nll"], trainer=trainer),
)
trainer.add_event_handler(
    Events.EPOCH_COMPLETED,
    Checkpoint({"model": model, "optimizer": optimizer}, DiskSaver("models", create_dir=True), n_saved=2),
)


@trainer.on(Events.ITERATION_COMPLETED(every=2))
def log_training_loss(engine):
    print(f"Epoch[{engine.state.epoch}] Iteration[{engine.state.iteration}] Loss: {engine.state.output:.4f}")


@trainer.on(Events.EPOCH_COMPLETED)
def log_validation(engine):
    evaluator.run(val_loader)
    metrics = evaluator.state.metrics
    print(
        f"Epoch {engine.state.epoch} accuracy {metrics['accuracy']:.4f} nll {metrics['nll']:.4f} samples by class {metrics['cm'].sum(1).tolist()}"
    )


trainer.run(train_loader, max_epochs=2)
