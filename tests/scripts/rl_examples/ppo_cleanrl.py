"""PPO in one file as CleanRL's ppo.py: vectorised environments, GAE, clipped loss, shuffled minibatches, KL early stop."""

import random
import time

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from torch.distributions.categorical import Categorical

num_envs, num_steps, total, epochs, num_minibatches = 4, 16, 128, 2, 4
random.seed(1)
np.random.seed(1)
torch.manual_seed(1)
torch.backends.cudnn.deterministic = True
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
envs = gym.vector.SyncVectorEnv(
    [lambda: gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1")) for _ in range(num_envs)]
)


def layer_init(layer, std=np.sqrt(2), bias_const=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        n = int(np.array(envs.single_observation_space.shape).prod())
        self.critic = nn.Sequential(
            layer_init(nn.Linear(n, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 1), std=1.0),
        )
        self.actor = nn.Sequential(
            layer_init(nn.Linear(n, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 2), std=0.01),
        )

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


agent = Agent().to(device)
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
obs = torch.zeros((num_steps, num_envs, 4)).to(device)
actions = torch.zeros((num_steps, num_envs)).to(device)
logprobs, rewards, dones, values = (torch.zeros((num_steps, num_envs)).to(device) for _ in range(4))
batch_size = num_envs * num_steps
start_time = time.time()
next_obs = torch.Tensor(envs.reset(seed=1)[0]).to(device)
next_done = torch.zeros(num_envs).to(device)
global_step = 0
for iteration in range(1, total // batch_size + 1):
    optimizer.param_groups[0]["lr"] = (1.0 - (iteration - 1.0) / 2) * 2.5e-4
    for step in range(num_steps):
        global_step += num_envs
        obs[step], dones[step] = next_obs, next_done
        with torch.no_grad():
            action, logprob, _, value = agent.get_action_and_value(next_obs)
            values[step] = value.flatten()
        actions[step], logprobs[step] = action, logprob
        next_obs, reward, terminations, truncations, _ = envs.step(action.cpu().numpy())
        rewards[step] = torch.tensor(reward).to(device).view(-1)
        next_obs, next_done = (
            torch.Tensor(next_obs).to(device),
            torch.Tensor(np.logical_or(terminations, truncations)).to(device),
        )
    with torch.no_grad():
        next_value = agent.get_value(next_obs).reshape(1, -1)
        advantages = torch.zeros_like(rewards).to(device)
        lastgaelam = 0
        for t in reversed(range(num_steps)):
            nextnonterminal = 1.0 - (next_done if t == num_steps - 1 else dones[t + 1])
            nextvalues = next_value if t == num_steps - 1 else values[t + 1]
            delta = rewards[t] + 0.99 * nextvalues * nextnonterminal - values[t]
            advantages[t] = lastgaelam = delta + 0.99 * 0.95 * nextnonterminal * lastgaelam
        returns = advantages + values
    b_obs, b_logprobs, b_actions = obs.reshape((-1, 4)), logprobs.reshape(-1), actions.reshape(-1)
    b_advantages, b_returns, b_values = advantages.reshape(-1), returns.reshape(-1), values.reshape(-1)
    b_inds, clipfracs = np.arange(batch_size), []
    for epoch in range(epochs):
        np.random.shuffle(b_inds)
        for start in range(0, batch_size, batch_size // num_minibatches):
            mb = b_inds[start : start + batch_size // num_minibatches]
            _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb], b_actions.long()[mb])
            logratio = newlogprob - b_logprobs[mb]
            ratio = logratio.exp()
            with torch.no_grad():
                approx_kl = ((ratio - 1) - logratio).mean()
                clipfracs += [((ratio - 1.0).abs() > 0.2).float().mean().item()]
            mb_advantages = b_advantages[mb]
            mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
            pg_loss = torch.max(-mb_advantages * ratio, -mb_advantages * torch.clamp(ratio, 0.8, 1.2)).mean()
            newvalue = newvalue.view(-1)
            v_clipped = b_values[mb] + torch.clamp(newvalue - b_values[mb], -0.2, 0.2)
            v_loss = 0.5 * torch.max((newvalue - b_returns[mb]) ** 2, (v_clipped - b_returns[mb]) ** 2).mean()
            loss = pg_loss - 0.01 * entropy.mean() + v_loss * 0.5
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    y_pred, y_true = b_values.cpu().numpy(), b_returns.cpu().numpy()
    var_y = np.var(y_true)
    explained_var = np.nan if var_y == 0 else 1 - np.var(y_true - y_pred) / var_y
    print(
        f"iteration {iteration} step {global_step} updates {len(clipfracs)} value {v_loss.item():.4f} kl {approx_kl.item():.6f} explained {float(explained_var):.4f}"
    )
envs.close()
