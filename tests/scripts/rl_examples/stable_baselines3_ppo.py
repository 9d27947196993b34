"""Stable-Baselines3: PPO and DQN on CartPole, saved and loaded."""

import torch
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
vec_env = make_vec_env("CartPole-v1", n_envs=2, seed=0)
model = PPO("MlpPolicy", vec_env, n_steps=32, batch_size=32, n_epochs=2, device=device, seed=0, verbose=0)
model.learn(total_timesteps=128)
print("ppo timesteps", model.num_timesteps, "updates", model._n_updates)
model.save("ppo_cartpole")
model = PPO.load("ppo_cartpole", device=device)
reward, _ = evaluate_policy(model, vec_env, n_eval_episodes=2)
print(f"mean reward {float(reward):.2f}")
dqn = DQN(
    "MlpPolicy",
    make_vec_env("CartPole-v1", seed=1),
    learning_starts=20,
    batch_size=16,
    train_freq=4,
    target_update_interval=20,
    device=device,
    seed=0,
)
dqn.learn(total_timesteps=80)
print("dqn timesteps", dqn.num_timesteps)
