"""Video classification with R(2+1)D and optical flow with RAFT: a training step each."""

import torch
import torchvision

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
video = torchvision.models.video.r2plus1d_18(weights=None, num_classes=4).to(device)
optimizer = torch.optim.SGD(video.parameters(), lr=0.01, momentum=0.9)
clips, labels = torch.rand(2, 3, 4, 32, 32, device=device), torch.tensor([1, 3], device=device)
loss = torch.nn.functional.cross_entropy(video(clips), labels)
loss.backward()
optimizer.step()
print(f"video loss {loss.item():.4f}")
raft = torchvision.models.optical_flow.raft_small(weights=None).to(device)
optimizer = torch.optim.AdamW(raft.parameters(), lr=1e-4)
one, two = torch.rand(1, 3, 128, 128, device=device) * 2 - 1, torch.rand(1, 3, 128, 128, device=device) * 2 - 1
flow_gt, valid = torch.rand(1, 2, 128, 128, device=device), torch.ones(1, 128, 128, dtype=torch.bool, device=device)
flows = raft(one, two, num_flow_updates=3)
abs_diff = (torch.stack(flows) - flow_gt).abs().mean(axis=2)
weights = torch.tensor([0.8 ** (len(flows) - 1 - i) for i in range(len(flows))]).to(device)
loss = (abs_diff * valid).mean(axis=(1, 2, 3)).mul(weights).sum()
loss.backward()
optimizer.step()
print(f"flow loss {loss.item():.4f} predictions {len(flows)} valid {int(valid.sum())}")
