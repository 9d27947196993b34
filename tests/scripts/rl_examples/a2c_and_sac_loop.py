"""A2C with several workers' returns, and a soft actor-critic update on Pendulum with a squashed Gaussian policy."""

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Normal

torch.manual_seed(0)
np.random.seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
env = gym.make("Pendulum-v1")
env.action_space.seed(0)


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, o))


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(3, 2)
        self.register_buffer(
            "action_scale", torch.tensor((env.action_space.high - env.action_space.low) / 2.0, dtype=torch.float32)
        )

    def get_action(self, x):
        mean, log_std = self.net(x).chunk(2, dim=-1)
        log_std = -5 + 0.5 * (2 + 5) * (torch.tanh(log_std) + 1)
        normal = Normal(mean, log_std.exp())
        x_t = normal.rsample()
        y_t = torch.tanh(x_t)
        log_prob = (normal.log_prob(x_t) - torch.log(self.action_scale * (1 - y_t.pow(2)) + 1e-6)).sum(1, keepdim=True)
        return y_t * self.action_scale, log_prob


actor, qf1, qf2, qf1_target, qf2_target = Actor().to(device), *(mlp(4, 1).to(device) for _ in range(4))
qf1_target.load_state_dict(qf1.state_dict())
qf2_target.load_state_dict(qf2.state_dict())
q_optimizer = torch.optim.Adam([*qf1.parameters(), *qf2.parameters()], lr=1e-3)
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4)
log_alpha = torch.zeros(1, requires_grad=True, device=device)
a_optimizer = torch.optim.Adam([log_alpha], lr=1e-3)
buffer, updates = [], 0
obs, _ = env.reset(seed=0)
for global_step in range(60):
    if global_step < 30:
        action = env.action_space.sample()
    else:
        action = actor.get_action(torch.Tensor(obs).to(device).unsqueeze(0))[0].detach().cpu().numpy()[0]
    next_obs, reward, terminated, truncated, _ = env.step(action)
    buffer.append((obs, next_obs, action, reward, terminated))
    obs = next_obs
    if global_step >= 40:
        rows = [buffer[i] for i in np.random.randint(0, len(buffer), 32)]
        o, n, a, r, d = (torch.tensor(np.array(column), dtype=torch.float32).to(device) for column in zip(*rows))
        alpha = log_alpha.exp().item()
        with torch.no_grad():
            next_action, next_log_pi = actor.get_action(n)
            target = (
                torch.min(qf1_target(torch.cat([n, next_action], 1)), qf2_target(torch.cat([n, next_action], 1)))
                - alpha * next_log_pi
            )
            next_q = r + (1 - d) * 0.99 * target.view(-1)
        q_loss = sum(F.mse_loss(q(torch.cat([o, a], 1)).view(-1), next_q) for q in (qf1, qf2))
        q_optimizer.zero_grad()
        q_loss.backward()
        q_optimizer.step()
        pi, log_pi = actor.get_action(o)
        actor_loss = (alpha * log_pi - torch.min(qf1(torch.cat([o, pi], 1)), qf2(torch.cat([o, pi], 1)))).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()
        alpha_loss = (-log_alpha.exp() * (log_pi.detach() - 1)).mean()
        a_optimizer.zero_grad()
        alpha_loss.backward()
        a_optimizer.step()
        for q, t in ((qf1, qf1_target), (qf2, qf2_target)):
            for param, target_param in zip(q.parameters(), t.parameters()):
                target_param.data.copy_(0.005 * param.data + 0.995 * target_param.data)
        updates += 1
print("updates", updates, f"q loss {q_loss.item():.4f} actor loss {actor_loss.item():.4f}")
