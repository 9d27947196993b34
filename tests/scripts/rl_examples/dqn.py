"""DQN on CartPole as the PyTorch tutorial: replay memory, target network, epsilon-greedy, soft updates."""

import math
import random
from collections import deque, namedtuple

import gymnasium as gym
import torch
import torch.nn as nn
import torch.nn.functional as F

device = torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")
random.seed(0)
torch.manual_seed(0)
env = gym.make("CartPole-v1")
env.action_space.seed(0)
Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))
BATCH_SIZE, GAMMA, EPS_START, EPS_END, EPS_DECAY, TAU = 32, 0.99, 0.9, 0.05, 1000, 0.005


class DQN(nn.Module):
    def __init__(self, n_observations, n_actions):
        super().__init__()
        self.layer1, self.layer2, self.layer3 = (
            nn.Linear(n_observations, 128),
            nn.Linear(128, 128),
            nn.Linear(128, n_actions),
        )

    def forward(self, x):
        return self.layer3(F.relu(self.layer2(F.relu(self.layer1(x)))))


state, info = env.reset(seed=0)
policy_net, target_net = DQN(len(state), env.action_space.n).to(device), DQN(len(state), env.action_space.n).to(device)
target_net.load_state_dict(policy_net.state_dict())
optimizer = torch.optim.AdamW(policy_net.parameters(), lr=1e-4, amsgrad=True)
memory, steps_done = deque([], maxlen=10000), 0


def select_action(state):
    global steps_done
    threshold = EPS_END + (EPS_START - EPS_END) * math.exp(-1.0 * steps_done / EPS_DECAY)
    steps_done += 1
    if random.random() > threshold:
        with torch.no_grad():
            return policy_net(state).max(1).indices.view(1, 1)
    return torch.tensor([[env.action_space.sample()]], device=device, dtype=torch.long)


def optimize_model():
    if len(memory) < BATCH_SIZE:
        return None
    batch = Transition(*zip(*random.sample(memory, BATCH_SIZE)))
    non_final_mask = torch.tensor(tuple(s is not None for s in batch.next_state), device=device, dtype=torch.bool)
    non_final_next_states = torch.cat([s for s in batch.next_state if s is not None])
    state_action_values = policy_net(torch.cat(batch.state)).gather(1, torch.cat(batch.action))
    next_state_values = torch.zeros(BATCH_SIZE, device=device)
    with torch.no_grad():
        next_state_values[non_final_mask] = target_net(non_final_next_states).max(1).values
    expected = next_state_values * GAMMA + torch.cat(batch.reward)
    loss = nn.SmoothL1Loss()(state_action_values, expected.unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()
    return loss


updates = 0
for i_episode in range(6):
    state, info = env.reset(seed=i_episode)
    state = torch.tensor(state, dtype=torch.float32, device=device).unsqueeze(0)
    for _t in range(30):
        action = select_action(state)
        observation, reward, terminated, truncated, _ = env.step(action.item())
        reward = torch.tensor([reward], device=device)
        next_state = None if terminated else torch.tensor(observation, dtype=torch.float32, device=device).unsqueeze(0)
        memory.append(Transition(state, action, next_state, reward))
        state = next_state
        updates += optimize_model() is not None
        target, policy = target_net.state_dict(), policy_net.state_dict()
        for key in policy:
            target[key] = policy[key] * TAU + target[key] * (1 - TAU)
        target_net.load_state_dict(target)
        if terminated or truncated:
            break
print("trained after", f"{updates / max(1, updates):.1f}", "episodes 6")
