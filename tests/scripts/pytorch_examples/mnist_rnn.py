"""Digits by rows with an LSTM as pytorch/examples/mnist_rnn, on the digits that scikit-learn ships."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from sklearn.datasets import load_digits
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset, random_split


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(input_size=8, hidden_size=64, batch_first=True)
        self.batchnorm = nn.BatchNorm1d(64)
        self.dropout1 = nn.Dropout2d(0.25)
        self.fc1 = nn.Linear(64, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, input):
        input = input.reshape(-1, 8, 8)
        output, hidden = self.rnn(input)
        output = self.batchnorm(output[:, -1, :])
        output = F.relu(self.fc1(output))
        return F.log_softmax(self.fc2(output), dim=1)


def main():
    parser = argparse.ArgumentParser(description="PyTorch MNIST Example using RNN")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target))
    train_set, test_set = random_split(dataset, [1500, len(dataset) - 1500])
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, 1000, shuffle=True)
    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, args.epochs + 1):
        model.train()
        for batch_idx, (data, target) in enumerate(train_loader):
            data, target = data.to(device), target.to(device)
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            if batch_idx % 10 == 0:
                print(
                    f"Train Epoch: {epoch} [{batch_idx * len(data)}/{len(train_loader.dataset)}]\tLoss: {loss.item():.6f}"
                )
        model.eval()
        test_loss, correct = 0, 0
        with torch.no_grad():
            for data, target in test_loader:
                data, target = data.to(device), target.to(device)
                output = model(data)
                test_loss += F.nll_loss(output, target, reduction="sum").item()
                correct += output.argmax(dim=1, keepdim=True).eq(target.view(-1, 1)).sum().item()
        size = len(test_loader.dataset)
        print(f"Test set of {size}: Average loss: {test_loss / size:.4f}, Accuracy: {100.0 * correct / size:.1f}%")
        scheduler.step()


if __name__ == "__main__":
    main()
