# gpu: 4GiB
# cause: the replay buffer keeps the trajectories of all iterations on the GPU, log-probabilities with their graphs
# cure: buffer.push of detached copies on the CPU
# report: https://github.com/recursionpharma/gflownet/pull/130 (merged: it occurs with the replay buffer only)
import random

import torch
from torch import nn


class ReplayBuffer:
    def __init__(self, capacity, warmup=32):
        self.capacity, self.warmup = capacity, warmup
        self.items, self.position = [], 0

    def push(self, *item):
        if len(self.items) < self.capacity:
            self.items.append(None)
        self.items[self.position] = item
        self.position = (self.position + 1) % self.capacity

    def sample(self, count):
        return [torch.stack(column).to("cuda") for column in zip(*random.sample(self.items, count), strict=True)]


class Policy(nn.Module):
    def __init__(self, features=1024, actions=64):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU())
        self.logits, self.log_z = nn.Linear(2048, actions), nn.Parameter(torch.zeros(()))

    def forward(self, states):
        return self.logits(self.layers(states)).log_softmax(-1).max(-1).values.sum(-1)


policy = Policy().cuda()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-4)
buffer = ReplayBuffer(capacity=10_000)
for iteration in range(250):
    states = torch.randn(64, 128, 1024, device="cuda")  # 64 trajectories of 128 states
    log_rewards = torch.rand(64, device="cuda")
    log_probs = policy(states)
    loss = (policy.log_z + log_probs - log_rewards).square().mean()
    if len(buffer.items) >= buffer.warmup:
        old_states, old_rewards, _ = buffer.sample(32)
        loss = loss + (policy.log_z + policy(old_states) - old_rewards).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for trajectory in zip(states, log_rewards, log_probs, strict=True):
        buffer.push(*trajectory)
    if iteration % 20 == 0:
        print(iteration, f"{torch.cuda.memory_allocated() / 2**30:.2f} GiB")
