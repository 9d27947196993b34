"""Hogwild training as pytorch/examples/mnist_hogwild: several processes share the model's memory."""

import argparse
import os

import torch
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

parser = argparse.ArgumentParser()
parser.add_argument("--num-processes", type=int, default=2)
parser.add_argument("--epochs", type=int, default=1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        return F.log_softmax(self.fc2(F.relu(self.fc1(x.view(-1, 320)))), dim=1)


def train(rank, args, model, device):
    torch.manual_seed(1 + rank)
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for epoch in range(1, args.epochs + 1):
        for _ in range(3):
            data, target = torch.rand(32, 1, 28, 28).to(device), torch.randint(0, 10, (32,)).to(device)
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
        print(f"{os.getpid() > 0} Train Epoch: {epoch} Loss: {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(1)
    mp.set_start_method("spawn", force=True)
    model = Net().to(device)
    model.share_memory()
    processes = []
    for rank in range(args.num_processes):
        p = mp.Process(target=train, args=(rank, args, model, device))
        p.start()
        processes.append(p)
    for p in processes:
        p.join()
    print("exit codes", [p.exitcode for p in processes])
    with torch.no_grad():
        print(
            "Test loss: {:.4f}".format(
                F.nll_loss(
                    model(torch.rand(8, 1, 28, 28, device=device)), torch.zeros(8, dtype=torch.long, device=device)
                ).item()
            )
        )
