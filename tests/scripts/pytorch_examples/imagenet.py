"""ImageNet training of ResNet-50 as pytorch/examples/imagenet, on random images, with its meters and checkpoints."""

import argparse
import os
import shutil
from enum import Enum

import torch
import torch.nn as nn
import torchvision.models as models
import torchvision.transforms as transforms
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from torchvision.datasets import FakeData

parser = argparse.ArgumentParser(description="PyTorch ImageNet Training")
parser.add_argument("-a", "--arch", default="resnet50")
parser.add_argument("-j", "--workers", default=2, type=int)
parser.add_argument("--epochs", default=1, type=int)
parser.add_argument("-b", "--batch-size", default=64, type=int)
parser.add_argument("--lr", default=0.1, type=float)
parser.add_argument("--momentum", default=0.9, type=float)
parser.add_argument("--wd", default=1e-4, type=float)
parser.add_argument("-p", "--print-freq", default=1, type=int)
parser.add_argument("--train-size", default=192, type=int)


class Summary(Enum):
    NONE = 0
    AVERAGE = 1


class AverageMeter:
    def __init__(self, name, fmt=":f", summary_type=Summary.AVERAGE):
        self.name, self.fmt, self.summary_type = name, fmt, summary_type
        self.reset()

    def reset(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self):
        return ("{name} {val" + self.fmt + "} ({avg" + self.fmt + "})").format(**self.__dict__)


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        maxk = max(topk)
        batch_size = target.size(0)
        _, pred = output.topk(maxk, 1, True, True)
        pred = pred.t()
        correct = pred.eq(target.view(1, -1).expand_as(pred))
        return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / batch_size) for k in topk]


def train(loader, model, criterion, optimizer, epoch, device, args):
    losses, top1, top5 = AverageMeter("Loss", ":.4e"), AverageMeter("Acc@1", ":6.2f"), AverageMeter("Acc@5", ":6.2f")
    model.train()
    for i, (images, target) in enumerate(loader):
        images = images.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        output = model(images)
        loss = criterion(output, target)
        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        losses.update(loss.item(), images.size(0))
        top1.update(acc1[0], images.size(0))
        top5.update(acc5[0], images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % args.print_freq == 0:
            print(f"Epoch: [{epoch}][{i + 1}/{len(loader)}]", losses, top1, top5, sep="\t")


def validate(loader, model, criterion, device):
    top1 = AverageMeter("Acc@1", ":6.2f")
    model.eval()
    with torch.no_grad():
        for images, target in loader:
            images, target = images.to(device, non_blocking=True), target.to(device, non_blocking=True)
            acc1, _ = accuracy(model(images), target, topk=(1, 5))
            top1.update(acc1[0].item(), images.size(0))
    print(f" * {top1} over {top1.count} images")
    return top1.avg


def main():
    args = parser.parse_args()
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    print(f"=> creating model '{args.arch}'")
    model = models.__dict__[args.arch]().to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.wd)
    scheduler = StepLR(optimizer, step_size=30, gamma=0.1)
    train_set = FakeData(args.train_size, (3, 224, 224), 1000, transforms.ToTensor())
    val_set = FakeData(args.batch_size, (3, 224, 224), 1000, transforms.ToTensor())
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, num_workers=args.workers, pin_memory=True)
    val_loader = DataLoader(val_set, args.batch_size, num_workers=args.workers, pin_memory=True)
    best = 0
    for epoch in range(args.epochs):
        train(train_loader, model, criterion, optimizer, epoch, device, args)
        acc1 = validate(val_loader, model, criterion, device)
        scheduler.step()
        is_best, best = acc1 > best, max(acc1, best)
        state = {
            "epoch": epoch + 1,
            "arch": args.arch,
            "state_dict": model.state_dict(),
            "best_acc1": best,
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        }
        torch.save(state, "checkpoint.pth.tar")
        if is_best:
            shutil.copyfile("checkpoint.pth.tar", "model_best.pth.tar")
    checkpoint = torch.load("checkpoint.pth.tar", map_location=device, weights_only=False)
    model.load_state_dict(checkpoint["state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    print("=> loaded checkpoint (epoch {})".format(checkpoint["epoch"]), os.path.exists("checkpoint.pth.tar"))


if __name__ == "__main__":
    main()
