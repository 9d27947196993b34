"""U-Net segmentation with BCE + Dice, mixed precision, RMSprop, plateau schedule, dice score in validation."""

import logging

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import optim
from torch.utils.data import DataLoader, TensorDataset, random_split

logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)


class DoubleConv(nn.Sequential):
    def __init__(self, i, o):
        super().__init__(
            nn.Conv2d(i, o, 3, padding=1, bias=False),
            nn.BatchNorm2d(o),
            nn.ReLU(inplace=True),
            nn.Conv2d(o, o, 3, padding=1, bias=False),
            nn.BatchNorm2d(o),
            nn.ReLU(inplace=True),
        )


class Up(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.up, self.conv = nn.ConvTranspose2d(i, i // 2, 2, 2), DoubleConv(i, o)

    def forward(self, x1, x2):
        x1 = self.up(x1)
        dy, dx = x2.size(2) - x1.size(2), x2.size(3) - x1.size(3)
        x1 = F.pad(x1, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.conv(torch.cat([x2, x1], dim=1))


class UNet(nn.Module):
    def __init__(self, n_channels=3, n_classes=1, c=8):
        super().__init__()
        self.inc = DoubleConv(n_channels, c)
        self.down = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), DoubleConv(c * 2**i, c * 2 ** (i + 1))) for i in range(3)
        )
        self.up = nn.ModuleList(Up(c * 2 ** (i + 1), c * 2**i) for i in reversed(range(3)))
        self.outc = nn.Conv2d(c, n_classes, 1)

    def forward(self, x):
        skips = [self.inc(x)]
        for down in self.down:
            skips.append(down(skips[-1]))
        x = skips.pop()
        for up in self.up:
            x = up(x, skips.pop())
        return self.outc(x)


def dice_coeff(input, target, epsilon=1e-6):
    inter = 2 * (input * target).sum(dim=(-1, -2))
    sets_sum = input.sum(dim=(-1, -2)) + target.sum(dim=(-1, -2))
    sets_sum = torch.where(sets_sum == 0, inter, sets_sum)
    return ((inter + epsilon) / (sets_sum + epsilon)).mean()


dataset = TensorDataset(torch.rand(20, 3, 50, 70), (torch.rand(20, 50, 70) > 0.7).long())
train_set, val_set = random_split(dataset, [16, 4])
train_loader, val_loader = (
    DataLoader(train_set, 4, shuffle=True, num_workers=1, pin_memory=True),
    DataLoader(val_set, 4, drop_last=True),
)
amp = device.type == "cuda"
model = UNet().to(device=device, memory_format=torch.channels_last)
optimizer = optim.RMSprop(model.parameters(), lr=1e-5, weight_decay=1e-8, momentum=0.999, foreach=True)
scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=5)
grad_scaler = torch.amp.GradScaler(device.type, enabled=amp)
criterion = nn.BCEWithLogitsLoss()
for epoch in range(1, 3):
    model.train()
    epoch_loss = 0
    for images, true_masks in train_loader:
        images = images.to(device=device, dtype=torch.float32, memory_format=torch.channels_last)
        true_masks = true_masks.to(device=device, dtype=torch.long)
        with torch.autocast(device.type, enabled=amp):
            masks_pred = model(images).squeeze(1)
            loss = criterion(masks_pred, true_masks.float())
            loss += 1 - dice_coeff(torch.sigmoid(masks_pred), true_masks.float())
        optimizer.zero_grad(set_to_none=True)
        grad_scaler.scale(loss).backward()
        grad_scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        grad_scaler.step(optimizer)
        grad_scaler.update()
        epoch_loss += loss.item()
    model.eval()
    dice_score, foreground = 0, 0
    with torch.inference_mode():
        for image, mask_true in val_loader:
            image, mask_true = image.to(device), mask_true.to(device)
            assert mask_true.min() >= 0 and mask_true.max() <= 1, "True mask indices should be in [0, 1]"
            foreground += int(mask_true.sum())
            mask_pred = (torch.sigmoid(model(image).squeeze(1)) > 0.5).float()
            dice_score += dice_coeff(mask_pred, mask_true.float())
    score = dice_score / max(len(val_loader), 1)
    scheduler.step(score)
    print(f"epoch {epoch} loss {epoch_loss / len(train_loader):.4f} foreground {foreground} dice {score.item():.4f}")
    state_dict = model.state_dict()
    state_dict["mask_values"] = [0, 1]
    torch.save(state_dict, f"checkpoint_epoch{epoch}.pth")
    logging.info(f"Checkpoint {epoch} saved!")
