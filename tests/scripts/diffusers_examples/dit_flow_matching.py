"""Flow matching with a diffusion transformer (DiT) of diffusers and an Euler sampler."""

import torch
import torch.nn.functional as F
from diffusers import DiTTransformer2DModel, FlowMatchEulerDiscreteScheduler

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = DiTTransformer2DModel(
    num_attention_heads=4,
    attention_head_dim=12,
    in_channels=4,
    num_layers=2,
    sample_size=8,
    patch_size=2,
    num_embeds_ada_norm=100,
    norm_num_groups=8,
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(3):
    x1, x0 = torch.rand(4, 4, 8, 8, device=device), torch.randn(4, 4, 8, 8, device=device)
    labels = torch.randint(0, 100, (4,), device=device)
    t = torch.rand(4, device=device)
    xt = (1 - t.view(-1, 1, 1, 1)) * x0 + t.view(-1, 1, 1, 1) * x1
    velocity = model(xt, timestep=(t * 99).long(), class_labels=labels).sample[:, :4]
    loss = F.mse_loss(velocity, x1 - x0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
scheduler = FlowMatchEulerDiscreteScheduler()
scheduler.set_timesteps(4, device=device)
x = torch.randn(2, 4, 8, 8, device=device)
with torch.no_grad():
    for t in scheduler.timesteps:
        v = model(
            x, timestep=(t / 1000 * 99).long().expand(2), class_labels=torch.tensor([1, 2], device=device)
        ).sample[:, :4]
        x = scheduler.step(v, t, x).prev_sample
print("sampled", tuple(x.shape), "sigmas", len(scheduler.sigmas))
