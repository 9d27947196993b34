"""torchvision references/classification in short: MetricLogger, label smoothing, EMA by AveragedModel, warm-up, v2 transforms."""

import datetime
import time
from collections import defaultdict, deque

import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import default_collate
from torchvision.transforms import InterpolationMode, v2

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class SmoothedValue:
    def __init__(self, window_size=20):
        self.deque, self.total, self.count = deque(maxlen=window_size), 0.0, 0

    def update(self, value, n=1):
        self.deque.append(value)
        self.count += n
        self.total += value * n

    @property
    def global_avg(self):
        return self.total / self.count

    @property
    def median(self):
        return torch.tensor(list(self.deque)).median().item()


def accuracy(output, target, topk=(1,)):
    with torch.inference_mode():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target[None])
        return [correct[:k].flatten().sum(dtype=torch.float32) * (100.0 / target.size(0)) for k in topk]


mixes = v2.RandomChoice([v2.MixUp(num_classes=10), v2.CutMix(num_classes=10)])
train_transform = v2.Compose(
    [
        v2.PILToTensor(),
        v2.RandomResizedCrop(32, interpolation=InterpolationMode.BILINEAR, antialias=True),
        v2.RandomHorizontalFlip(),
        v2.ToDtype(torch.float, scale=True),
        v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        v2.RandomErasing(0.1),
    ]
)
train_set = torchvision.datasets.FakeData(64, (3, 40, 40), 10, train_transform)
loader = DataLoader(
    train_set, batch_size=16, shuffle=True, num_workers=2, collate_fn=lambda b: mixes(*default_collate(b))
)
eval_loader = DataLoader(
    torchvision.datasets.FakeData(
        24, (3, 32, 32), 10, v2.Compose([v2.PILToTensor(), v2.ToDtype(torch.float, scale=True)])
    ),
    batch_size=8,
)
model = torchvision.models.mobilenet_v3_small(num_classes=10).to(device)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
parameters = torchvision.ops._utils.split_normalization_params(model)
optimizer = torch.optim.RMSprop(
    [{"params": p, "weight_decay": w} for p, w in zip(parameters, (0.0, 1e-5)) if p],
    lr=0.01,
    momentum=0.9,
    eps=0.0316,
    alpha=0.9,
)
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=1)
scheduler = torch.optim.lr_scheduler.SequentialLR(
    optimizer, [warmup, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.97)], milestones=[1]
)
ema = torch.optim.swa_utils.AveragedModel(
    model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99), use_buffers=True
)
for epoch in range(2):
    meters = defaultdict(SmoothedValue)
    model.train()
    start = time.time()
    for i, (image, target) in enumerate(loader):
        image, target = image.to(device), target.to(device)
        output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ema.update_parameters(model)
        acc1, acc5 = accuracy(output, target.argmax(dim=1), topk=(1, 5))
        meters["loss"].update(loss.item())
        meters["acc1"].update(acc1.item(), n=image.shape[0])
    scheduler.step()
    ema.eval()
    with torch.inference_mode():
        for image, target in eval_loader:
            output = ema(image.to(device))
            meters["test"].update(accuracy(output, target.to(device))[0].item(), n=image.shape[0])
    assert datetime.timedelta(seconds=int(time.time() - start)) < datetime.timedelta(hours=1)
    print(
        f"epoch {epoch} batches {i + 1} loss {meters['loss'].median:.4f} acc1 {meters['acc1'].global_avg:.3f} over {meters['acc1'].count}, EMA {meters['test'].global_avg:.3f} over {meters['test'].count}"
    )
torch.save({"model": model.state_dict(), "ema": ema.state_dict(), "optimizer": optimizer.state_dict()}, "model_1.pth")
print(sorted(torch.load("model_1.pth", map_location="cpu")))
