"""A tiny NeRF: positional encoding, ray marching, volume rendering of random rays."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(9458)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if torch.cuda.is_available():
    torch.set_default_device("cuda")


def positional_encoding(x, num_functions=6):
    frequencies = 2.0 ** torch.linspace(0.0, num_functions - 1, num_functions, dtype=x.dtype, device=x.device)
    encoding = [x]
    for freq in frequencies:
        encoding += [torch.sin(x * freq), torch.cos(x * freq)]
    return torch.cat(encoding, dim=-1)


def get_ray_bundle(height, width, focal, cam2world):
    ii, jj = torch.meshgrid(torch.arange(width).to(cam2world), torch.arange(height).to(cam2world), indexing="xy")
    directions = torch.stack([(ii - width * 0.5) / focal, -(jj - height * 0.5) / focal, -torch.ones_like(ii)], dim=-1)
    ray_directions = torch.sum(directions[..., None, :] * cam2world[:3, :3], dim=-1)
    return cam2world[:3, -1].expand(ray_directions.shape), ray_directions


def query_points(origins, directions, near, far, samples):
    depth = torch.linspace(near, far, samples).to(origins)
    noise = torch.rand([*origins.shape[:-1], samples]).to(origins) * (far - near) / samples
    depth = depth + noise
    return origins[..., None, :] + directions[..., None, :] * depth[..., :, None], depth


def render(field, depth):
    sigma = F.relu(field[..., 3])
    rgb = torch.sigmoid(field[..., :3])
    far = torch.tensor([1e10], dtype=depth.dtype, device=depth.device)
    dists = torch.cat((depth[..., 1:] - depth[..., :-1], far.expand(depth[..., :1].shape)), dim=-1)
    alpha = 1.0 - torch.exp(-sigma * dists)
    transmittance = torch.cumprod(1.0 - alpha + 1e-10, dim=-1).roll(1, -1)
    transmittance[..., 0] = 1.0
    weights = alpha * transmittance
    return (weights[..., None] * rgb).sum(dim=-2), (weights * depth).sum(dim=-1)


class NerfModel(nn.Module):
    def __init__(self, width=64, functions=6):
        super().__init__()
        inputs = 3 + 3 * 2 * functions
        self.layer1, self.layer2 = nn.Linear(inputs, width), nn.Linear(width + inputs, width)
        self.layer3 = nn.Linear(width, 4)

    def forward(self, x):
        h = F.relu(self.layer1(x))
        h = F.relu(self.layer2(torch.cat([h, x], dim=-1)))
        return self.layer3(h)


height = width = 24
images = torch.rand(3, height, width, 3).to(device)
poses = torch.eye(4).repeat(3, 1, 1).to(device)
poses[:, 2, 3] = 4.0
model = NerfModel().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
chunk = 2048
for it in range(4):
    index = it % 3
    origins, directions = get_ray_bundle(height, width, 30.0, poses[index])
    points, depth = query_points(origins, directions, 2.0, 6.0, 16)
    encoded = positional_encoding(points.reshape(-1, 3))
    chunks = [encoded[i : i + chunk] for i in range(0, encoded.shape[0], chunk)]
    predictions = torch.cat([model(c) for c in chunks], dim=0).reshape(*points.shape[:-1], 4)
    rgb, depth_map = render(predictions, depth)
    loss = F.mse_loss(rgb, images[index])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    psnr = -10.0 * torch.log10(loss.detach())
    print(
        f"iteration {it} chunks {len(chunks)} loss {loss.item():.4f} psnr {psnr.item():.2f} depth {tuple(depth_map.shape)}"
    )
