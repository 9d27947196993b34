"""Sources of training loops as people write them, with the numbers in which a setting differs from another."""

from __future__ import annotations

_HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
"""
ADAMW = "torch.optim.AdamW(model.parameters(), lr=0.002)"


def _loop(*, begin: str, count: int, step: str) -> str:
    """Return the end of a loop over `number` and `loss`; with several micro-batches the step comes in the last one."""
    loss = "loss" if count == 1 else f"(loss / {count})"
    body = f"    {begin.format(loss=loss)}\n"
    if count == 1:
        return body + "".join(f"    {line}\n" for line in step.split("; "))
    return body + f"    if (number + 1) % {count} == 0:\n" + "".join(f"        {line}\n" for line in step.split("; "))


def mlp(batch: int = 32, count: int = 1, optimizer: str = ADAMW, zero_grad: str = "") -> str:
    """A perceptron; its batches come from a DataLoader of 64 samples."""
    return f"""{_HEAD}
model = nn.Sequential(nn.Linear(50, 100), nn.ReLU(), nn.Linear(100, 10)).cuda()
optimizer = {optimizer}
data = TensorDataset(torch.randn(64, 50), torch.randint(10, (64,)))
for number, (x, y) in enumerate(DataLoader(data, batch_size={batch // count}, shuffle=True)):
    loss = F.cross_entropy(model(x.cuda()), y.cuda())
{_loop(begin="{loss}.backward()", count=count, step=f"optimizer.step(); optimizer.zero_grad({zero_grad})")}"""


def cnn(batch: int = 16, count: int = 1, optimizer: str = "torch.optim.SGD(model.parameters(), lr=0.1)") -> str:
    """A network of images, whose class, loss and optimizer have names of their own; gradients are emptied first."""
    zero = "optimizer.zero_grad()" if count == 1 else f"number % {count} or optimizer.zero_grad()"
    return f"""{_HEAD}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(16 * 5 * 5, 10)
    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.conv1(x))), 2)
        return self.head(torch.flatten(F.max_pool2d(F.relu(self.conv2(x)), 2), 1))
model, criterion = Net().to("cuda"), nn.CrossEntropyLoss()
optimizer = {optimizer}
train = DataLoader(TensorDataset(torch.randn(32, 3, 28, 28), torch.randint(10, (32,))), {batch // count})
test = DataLoader(TensorDataset(torch.randn(100, 3, 28, 28), torch.randint(10, (100,))), batch_size=50)
for number, (images, labels) in enumerate(train):
    images, labels = images.to("cuda"), labels.to("cuda")
    {zero}
    loss = criterion(model(images), labels)
{_loop(begin="{loss}.backward()", count=count, step="optimizer.step()")}
with torch.no_grad():
    for images, labels in test:
        model(images.to("cuda")).argmax(1)
"""


def sliced(batch: int = 32, count: int = 1) -> str:
    """Tensors sliced by hand, with numbers in the code and without a DataLoader."""
    size = batch // count
    return f"""{_HEAD}
model = nn.Sequential(nn.Linear(50, 32), nn.ReLU(), nn.Linear(32, 10)).cuda()
optimizer = {ADAMW}
data, target = torch.randn(640, 50), torch.randint(10, (640,))
for number in range(8):
    x, y = data[64 * number : 64 * number + {size}].cuda(), target[64 * number : 64 * number + {size}].cuda()
    loss = F.cross_entropy(model(x), y)
{_loop(begin="{loss}.backward()", count=count, step="optimizer.step(); optimizer.zero_grad()")}"""


def drawn(batch: int = 32, count: int = 1) -> str:
    """Random tensors made on the GPU, where a weight has as many rows as the batch has samples as written."""
    size = batch // count
    return f"""{_HEAD}
model = nn.Sequential(nn.Linear(50, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)).cuda()
optimizer = {ADAMW}
for number in range(4):
    x, y = torch.randn({size}, 50, device="cuda"), torch.randint(0, 10, ({size},), device="cuda")
    loss = F.cross_entropy(model(x), y)
{_loop(begin="{loss}.backward()", count=count, step="optimizer.step(); optimizer.zero_grad()")}"""


def named(batch: int = 32, count: int = 1) -> str:
    """A variable holds the batch."""
    return (
        drawn(batch, count)
        .replace("model = ", f"batch_size = {batch // count}\nmodel = ", 1)
        .replace(f"randn({batch // count},", "randn(batch_size,")
        .replace(f"({batch // count},)", "(batch_size,)")
    )


def by_name(batch: int = 8, count: int = 1) -> str:
    """A model that takes a dict and returns its loss, with clipped gradients and a scheduler, as in transformers."""
    step = (
        "nn.utils.clip_grad_norm_(model.parameters(), 1.0); optimizer.step(); scheduler.step(); optimizer.zero_grad()"
    )
    shape = f"({batch // count}, 16)"
    return f"""{_HEAD}
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(100, 32), nn.Linear(32, 100)
    def forward(self, input_ids, attention_mask, labels):
        logits = self.head(self.embed(input_ids) * attention_mask[..., None])
        return {{"loss": F.cross_entropy(logits.view(-1, 100), labels.view(-1)), "logits": logits}}
model = Model().cuda()
optimizer = {ADAMW}
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=6)
for number in range(6):
    batch = {{"input_ids": torch.randint(0, 100, {shape}), "attention_mask": torch.ones({shape}),
             "labels": torch.randint(0, 100, {shape})}}
    batch = {{name: value.to("cuda") for name, value in batch.items()}}
    loss = model(**batch)["loss"]
{_loop(begin="{loss}.backward()", count=count, step=step)}"""


def adversaries(batch: int = 16, count: int = 1) -> str:
    """Two models and two optimizers; each model is emptied, not its optimizer."""
    share = "" if count == 1 else f" / {count}"
    first = "" if count == 1 else f"if number % {count} == 0: "
    last = "" if count == 1 else f"if (number + 1) % {count} == 0: "
    return f"""{_HEAD}
maker = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 20)).cuda()
judge = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1)).cuda()
of_judge = torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.999))
of_maker = torch.optim.Adam(maker.parameters(), lr=2e-4, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
data = DataLoader(TensorDataset(torch.randn(64, 20)), batch_size={batch // count}, drop_last=True)
for number, (real,) in enumerate(data):
    real = real.cuda()
    ones, zeros = torch.ones(len(real), 1, device="cuda"), torch.zeros(len(real), 1, device="cuda")
    {first}judge.zero_grad()
    (criterion(judge(real), ones){share}).backward()
    fake = maker(torch.randn(len(real), 8, device="cuda"))
    (criterion(judge(fake.detach()), zeros){share}).backward()
    {last}of_judge.step()
    {first}maker.zero_grad()
    (criterion(judge(fake), ones){share}).backward()
    {last}of_maker.step()
"""


def scaled(batch: int = 32, count: int = 1) -> str:
    """Autocast in fp16 and a gradient scaler, with gradients that are unscaled and clipped."""
    step = "scaler.unscale_(optimizer); nn.utils.clip_grad_norm_(model.parameters(), 1.0); scaler.step(optimizer); "
    step += "scaler.update(); optimizer.zero_grad()"
    return f"""{_HEAD}
model = nn.Sequential(nn.Linear(50, 100), nn.ReLU(), nn.Linear(100, 10)).cuda()
optimizer, scaler = {ADAMW}, torch.amp.GradScaler("cuda")
data = TensorDataset(torch.randn(64, 50), torch.randint(10, (64,)))
for number, (x, y) in enumerate(DataLoader(data, batch_size={batch // count})):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(x.cuda()), y.cuda())
{_loop(begin="scaler.scale({loss}).backward()", count=count, step=step)}"""


def accelerated(batch: int = 32, count: int = 1) -> str:
    """A loop of accelerate, which wraps model, optimizer, loader and scheduler, and moves the batches."""
    step = "optimizer.step(); scheduler.step(); optimizer.zero_grad()"
    return f"""{_HEAD}
from accelerate import Accelerator
accelerator = Accelerator()
model = nn.Sequential(nn.Linear(50, 100), nn.ReLU(), nn.Linear(100, 10))
optimizer = {ADAMW}
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
data = DataLoader(TensorDataset(torch.randn(64, 50), torch.randint(10, (64,))), batch_size={batch // count})
model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
for number, (x, y) in enumerate(data):
    loss = F.cross_entropy(model(x), y)
{_loop(begin="accelerator.backward({loss})", count=count, step=step)}"""


def lightning(batch: int = 32, count: int = 1, optimizer: str = "torch.optim.Adam(self.parameters(), lr=0.1)") -> str:
    """A module of Lightning, whose trainer runs forward and backward inside of the optimizer's step."""
    accumulates = "" if count == 1 else f", accumulate_grad_batches={count}"
    return f"""{_HEAD}
import logging, warnings
import pytorch_lightning
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
warnings.simplefilter("ignore")
class Model(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(50, 100), nn.ReLU(), nn.Linear(100, 10))
    def training_step(self, batch, _):
        return F.cross_entropy(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return {optimizer}
data = DataLoader(TensorDataset(torch.randn(64, 50), torch.randint(10, (64,))), batch_size={batch // count})
trainer = pytorch_lightning.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, accelerator="gpu",
    enable_progress_bar=False, enable_model_summary=False, devices=1{accumulates})
trainer.fit(Model(), data)
"""
