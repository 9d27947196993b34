"""Captum: integrated gradients, saliency, occlusion and layer Grad-CAM of a small network."""

import torch
import torch.nn as nn
from captum.attr import IntegratedGradients, LayerGradCam, Occlusion, Saliency

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = (
    nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    .to(device)
    .eval()
)
images = torch.rand(2, 3, 24, 24, device=device, requires_grad=True)
target = torch.tensor([1, 3], device=device)
attributions, delta = IntegratedGradients(model).attribute(
    images, target=target, n_steps=8, return_convergence_delta=True
)
print("integrated gradients", tuple(attributions.shape), tuple(delta.shape))
print("saliency", tuple(Saliency(model).attribute(images, target=target).shape))
print(
    "occlusion",
    tuple(Occlusion(model).attribute(images, target=target, sliding_window_shapes=(3, 8, 8), strides=(3, 8, 8)).shape),
)
cam = LayerGradCam(model, model[2]).attribute(images, target=target)
print("grad-cam", tuple(cam.shape), tuple(cam.detach().cpu().numpy().shape))
