"""Distributed data parallel training under torchrun, as pytorch/examples/distributed/ddp-tutorial-series/multigpu_torchrun.py."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def ddp_setup():
    rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        dist.init_process_group(backend="nccl")
        return torch.device(f"cuda:{rank}")
    dist.init_process_group(backend="gloo")
    return torch.device("cpu")


class Trainer:
    def __init__(self, model, train_data, optimizer, device, save_every, snapshot_path):
        self.rank, self.device = dist.get_rank(), device
        self.train_data, self.optimizer, self.save_every = train_data, optimizer, save_every
        self.epochs_run, self.snapshot_path = 0, snapshot_path
        if os.path.exists(snapshot_path):
            self._load_snapshot(snapshot_path)
        self.model = DDP(model.to(device), device_ids=[device.index] if device.type == "cuda" else None)

    def _load_snapshot(self, path):
        snapshot = torch.load(path, map_location=self.device)
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        total = 0.0
        for source, targets in self.train_data:
            source, targets = source.to(self.device), targets.to(self.device)
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(source), targets)
            loss.backward()
            self.optimizer.step()
            total += loss.item()
        mean = torch.tensor([total / len(self.train_data)], device=self.device)
        dist.all_reduce(mean)
        print(
            f"[GPU{self.rank}] Epoch {epoch} | Steps: {len(self.train_data)} | loss {mean.item() / dist.get_world_size():.4f}"
        )

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            self._run_epoch(epoch)
            if self.rank == 0 and epoch % self.save_every == 0:
                torch.save({"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch}, self.snapshot_path)
            dist.barrier()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--total_epochs", type=int, default=2)
    parser.add_argument("--save_every", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=32)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = ddp_setup()
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 1024),
        torch.nn.ReLU(),
        torch.nn.Linear(1024, 1024),
        torch.nn.ReLU(),
        torch.nn.Linear(1024, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    data = TensorDataset(torch.rand(1024, 512), torch.randint(0, 10, (1024,)))
    loader = DataLoader(data, args.batch_size, pin_memory=True, shuffle=False, sampler=DistributedSampler(data))
    print("world size", dist.get_world_size(), "rank", dist.get_rank(), "backend", dist.get_backend())
    Trainer(model, loader, optimizer, device, args.save_every, "snapshot.pt").train(args.total_epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
