"""TorchRL and tensordict: a PPO loss module, GAE and a replay buffer on generated transitions."""

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
module = TensorDictModule(
    nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2)), in_keys=["observation"], out_keys=["logits"]
)
actor = ProbabilisticActor(
    module, in_keys=["logits"], out_keys=["action"], distribution_class=OneHotCategorical, return_log_prob=True
).to(device)
critic = ValueOperator(nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1)), in_keys=["observation"]).to(device)
loss_module = ClipPPOLoss(actor, critic)
gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
data = TensorDict(
    {
        "observation": torch.rand(8, 10, 4),
        ("next", "observation"): torch.rand(8, 10, 4),
        ("next", "reward"): torch.rand(8, 10, 1),
        ("next", "done"): torch.zeros(8, 10, 1, dtype=torch.bool),
        ("next", "terminated"): torch.zeros(8, 10, 1, dtype=torch.bool),
    },
    [8, 10],
).to(device)
with torch.no_grad():
    data = actor(data)
buffer = ReplayBuffer(storage=LazyTensorStorage(80, device=device), batch_size=20)
optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
for epoch in range(2):
    with torch.no_grad():
        gae(data)
    buffer.extend(data.reshape(-1))
    for _ in range(2):
        losses = loss_module(buffer.sample())
        loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
        loss.backward()
        nn.utils.clip_grad_norm_(loss_module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch} stored {len(buffer)} loss {loss.item():.4f}")
