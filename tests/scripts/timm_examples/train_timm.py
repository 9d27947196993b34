"""timm's train.py in short: create_model, create_optimizer_v2, scheduler, mixup, ModelEmaV3, AMP scaler, CheckpointSaver."""

import argparse
import logging
import os
from collections import OrderedDict

import timm
import torch
import torch.nn as nn
from timm.data import Mixup, create_transform
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, CheckpointSaver, ModelEmaV3, NativeScaler, accuracy, random_seed
from torchvision.datasets import FakeData

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="resnet18")
parser.add_argument("-b", "--batch-size", type=int, default=8)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--img-size", type=int, default=48)
parser.add_argument("--opt", default="lamb")
parser.add_argument("--mixup", type=float, default=0.2)
parser.add_argument("--smoothing", type=float, default=0.1)
args = parser.parse_args()
logging.basicConfig(level=logging.INFO)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
random_seed(42, 0)
model = timm.create_model(args.model, num_classes=10, drop_path_rate=0.1).to(device)
print(f"Model {args.model} created, param count: {sum(m.numel() for m in model.parameters())}")
optimizer = create_optimizer_v2(model, opt=args.opt, lr=1e-3, weight_decay=0.02)
amp = device.type == "cuda"
loss_scaler = NativeScaler() if amp else None
model_ema = ModelEmaV3(model, decay=0.99)
mixup_fn = Mixup(mixup_alpha=args.mixup, label_smoothing=args.smoothing, num_classes=10)
train_set = FakeData(32, (3, 64, 64), 10, create_transform(args.img_size, is_training=True))
eval_set = FakeData(16, (3, 64, 64), 10, create_transform(args.img_size))
loader_train = torch.utils.data.DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)
loader_eval = torch.utils.data.DataLoader(eval_set, args.batch_size)
scheduler, num_epochs = create_scheduler_v2(
    optimizer, sched="cosine", num_epochs=args.epochs, warmup_epochs=1, updates_per_epoch=len(loader_train)
)
train_loss_fn, validate_loss_fn = SoftTargetCrossEntropy().to(device), nn.CrossEntropyLoss().to(device)
os.makedirs("output", exist_ok=True)
saver = CheckpointSaver(
    model=model,
    optimizer=optimizer,
    args=args,
    model_ema=model_ema,
    amp_scaler=loss_scaler,
    checkpoint_dir="output",
    recovery_dir="output",
    max_history=1,
)


def train_one_epoch(epoch):
    losses_m = AverageMeter()
    model.train()
    for batch_idx, (input, target) in enumerate(loader_train):
        input, target = input.to(device), target.to(device)
        input, target = mixup_fn(input, target)
        with torch.autocast(device.type, dtype=torch.float16, enabled=amp):
            loss = train_loss_fn(model(input), target)
        optimizer.zero_grad()
        if loss_scaler is not None:
            loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        model_ema.update(model)
        losses_m.update(loss.item(), input.size(0))
        print(f"Train: {epoch} [{batch_idx}/{len(loader_train)}] Loss: {losses_m.val:#.4g} ({losses_m.avg:#.3g})")
    return OrderedDict([("loss", losses_m.avg)])


@torch.inference_mode()
def validate(model):
    losses_m, top1_m, top5_m = AverageMeter(), AverageMeter(), AverageMeter()
    model.eval()
    for input, target in loader_eval:
        input, target = input.to(device), target.to(device)
        with torch.autocast(device.type, dtype=torch.float16, enabled=amp):
            output = model(input)
            loss = validate_loss_fn(output, target)
        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        losses_m.update(loss.item(), input.size(0))
        top1_m.update(acc1.item(), output.size(0))
        top5_m.update(acc5.item(), output.size(0))
    return OrderedDict([("loss", losses_m.avg), ("top1", top1_m.avg), ("top5", top5_m.avg), ("count", top1_m.count)])


for epoch in range(num_epochs if num_epochs < 3 else 2):
    train_one_epoch(epoch)
    metrics = validate(model_ema.module)
    print(f"eval of {metrics['count']}: loss {metrics['loss']:.4f} top1 {metrics['top1']:.2f}")
    best_metric, best_epoch = saver.save_checkpoint(epoch, metric=metrics["top1"])
    scheduler.step(epoch + 1, metrics["top1"])
print(sorted(os.listdir("output"))[-1:])
