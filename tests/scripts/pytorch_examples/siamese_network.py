"""Siamese network as pytorch/examples/siamese_network, with pairs drawn from generated classes."""

import random

import torch
import torch.nn as nn
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 7, 2, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(8, 32, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.fc = nn.Sequential(nn.Linear(64, 256), nn.ReLU(inplace=True), nn.Linear(256, 1))
        self.sigmoid = nn.Sigmoid()
        self.fc.apply(self.init_weights)

    def init_weights(self, m):
        if isinstance(m, nn.Linear):
            torch.nn.init.xavier_uniform_(m.weight)
            m.bias.data.fill_(0.01)

    def forward(self, input1, input2):
        output = torch.cat((self.features(input1), self.features(input2)), 1)
        return self.sigmoid(self.fc(output))


class Matcher(Dataset):
    def __init__(self, n):
        generator = torch.Generator().manual_seed(n)
        self.labels = torch.randint(0, 10, (n,), generator=generator)
        self.images = torch.rand(n, 1, 28, 28, generator=generator) + self.labels.view(-1, 1, 1, 1) / 10
        self.groups = {i: torch.where(self.labels == i)[0] for i in range(10)}

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        same = index % 2
        label = self.labels[index].item()
        other = label if same else random.choice([i for i in range(10) if i != label])
        match = random.choice(self.groups[other].tolist() or [index])
        return self.images[index], self.images[match], torch.tensor(same, dtype=torch.float)


def main():
    torch.manual_seed(1)
    random.seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader = DataLoader(Matcher(128), batch_size=32, shuffle=True)
    test_loader = DataLoader(Matcher(64), batch_size=32)
    model = SiameseNetwork().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    criterion = nn.BCELoss()
    for epoch in range(1, 3):
        model.train()
        for batch_idx, (one, two, targets) in enumerate(train_loader):
            one, two, targets = one.to(device), two.to(device), targets.to(device)
            optimizer.zero_grad()
            outputs = model(one, two).squeeze()
            loss = criterion(outputs, targets)
            loss.backward()
            optimizer.step()
            print(f"Train Epoch: {epoch} [{batch_idx * len(one)}/{len(train_loader.dataset)}]\tLoss: {loss.item():.6f}")
        model.eval()
        correct, pairs = 0, 0
        with torch.no_grad():
            for one, two, targets in test_loader:
                one, two, targets = one.to(device), two.to(device), targets.to(device)
                outputs = model(one, two).squeeze()
                pred = torch.where(outputs > 0.5, 1, 0)
                correct += pred.eq(targets.view_as(pred)).sum().item()
                pairs += int(targets.sum())
        print(f"Test set: {pairs} equal pairs, accuracy {100.0 * correct / len(test_loader.dataset):.2f}%")
        scheduler.step()
    torch.save(model.state_dict(), "siamese_network.pt")


if __name__ == "__main__":
    main()
