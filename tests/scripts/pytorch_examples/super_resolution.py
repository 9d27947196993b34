"""Sub-pixel super resolution as pytorch/examples/super_resolution, on random patches."""

import argparse
from math import log10

import torch
import torch.nn as nn
import torch.nn.init as init
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--upscale_factor", type=int, default=3)
parser.add_argument("--batchSize", type=int, default=8)
parser.add_argument("--nEpochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.01)
opt = parser.parse_args()
torch.manual_seed(123)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Net(nn.Module):
    def __init__(self, upscale_factor):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(1, 64, (5, 5), (1, 1), (2, 2))
        self.conv2 = nn.Conv2d(64, 64, (3, 3), (1, 1), (1, 1))
        self.conv3 = nn.Conv2d(64, 32, (3, 3), (1, 1), (1, 1))
        self.conv4 = nn.Conv2d(32, upscale_factor**2, (3, 3), (1, 1), (1, 1))
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
        for layer in (self.conv1, self.conv2, self.conv3):
            init.orthogonal_(layer.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv4.weight)

    def forward(self, x):
        x = self.relu(self.conv1(x))
        x = self.relu(self.conv2(x))
        x = self.relu(self.conv3(x))
        return self.pixel_shuffle(self.conv4(x))


high = torch.rand(48, 1, 48, 48)
low = nn.functional.interpolate(high, scale_factor=1 / opt.upscale_factor, mode="bicubic")
train_loader = DataLoader(TensorDataset(low[:32], high[:32]), batch_size=opt.batchSize, shuffle=True, num_workers=2)
test_loader = DataLoader(TensorDataset(low[32:], high[32:]), batch_size=opt.batchSize)
model = Net(opt.upscale_factor).to(device)
criterion = nn.MSELoss()
optimizer = optim.Adam(model.parameters(), lr=opt.lr)
for epoch in range(1, opt.nEpochs + 1):
    epoch_loss = 0
    for iteration, batch in enumerate(train_loader, 1):
        input, target = batch[0].to(device), batch[1].to(device)
        optimizer.zero_grad()
        loss = criterion(model(input), target)
        epoch_loss += loss.item()
        loss.backward()
        optimizer.step()
        print(f"===> Epoch[{epoch}]({iteration}/{len(train_loader)}): Loss: {loss.item():.4f}")
    print(f"===> Epoch {epoch} Complete: Avg. Loss: {epoch_loss / len(train_loader):.4f}")
    avg_psnr = 0
    with torch.no_grad():
        for batch in test_loader:
            input, target = batch[0].to(device), batch[1].to(device)
            mse = criterion(model(input), target)
            avg_psnr += 10 * log10(1 / mse.item())
    print(f"===> Avg. PSNR: {avg_psnr / len(test_loader):.4f} dB")
    torch.save(model, f"model_epoch_{epoch}.pth")
out = torch.load("model_epoch_1.pth", weights_only=False)(low[:1].to(device)).cpu()
print("output", tuple(out.shape))
