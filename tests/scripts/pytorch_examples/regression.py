"""Polynomial regression as pytorch/examples/regression, until the loss is small or 300 batches are done."""

from itertools import count

import torch
import torch.nn.functional as F

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POLY_DEGREE = 4
W_target = (torch.randn(POLY_DEGREE, 1) * 5).to(device)
b_target = (torch.randn(1) * 5).to(device)


def make_features(x):
    x = x.unsqueeze(1)
    return torch.cat([x**i for i in range(1, POLY_DEGREE + 1)], 1)


def f(x):
    return x.mm(W_target) + b_target.item()


def poly_desc(W, b):
    result = "y = "
    for i, w in enumerate(W):
        result += f"{w:+.2f} x^{i + 1} "
    return result + f"{b[0]:+.2f}"


def get_batch(batch_size=32):
    x = make_features(torch.randn(batch_size).to(device))
    return x, f(x)


fc = torch.nn.Linear(W_target.size(0), 1).to(device)
for batch_idx in count(1):
    batch_x, batch_y = get_batch()
    fc.zero_grad()
    output = F.smooth_l1_loss(fc(batch_x), batch_y)
    loss = output.item()
    output.backward()
    for param in fc.parameters():
        param.data.add_(-0.1 * param.grad)
    if loss < 1e-3 or batch_idx == 300:
        break
print("Loss: {:.6f} in {:.1f} batches".format(loss, batch_idx))
print("==> Learned function:\t" + poly_desc(fc.weight.view(-1), fc.bias))
print("==> Actual function:\t" + poly_desc(W_target.view(-1), b_target))
