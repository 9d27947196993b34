# gpu: 11GiB
# cause: integrated gradients evaluate all 50 steps as one batch of 50 images, with their graph
# cure: internal_batch_size=5
# report: https://github.com/meta-pytorch/captum/issues/245 (cause by a maintainer, cure confirmed)
import torch
from captum.attr import IntegratedGradients
from torch import nn


class DenseLayer(nn.Module):
    def __init__(self, channels, growth=32):
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth), nn.ReLU(), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )  # fmt: skip

    def forward(self, x):
        return torch.cat((x, self.layers(x)), 1)


class DenseNet201(nn.Module):
    def __init__(self, classes=1000):
        super().__init__()
        layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        channels = 64
        for block, depth in enumerate((6, 12, 48, 32)):
            if block:
                layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels // 2, 1), nn.AvgPool2d(2)]
                channels //= 2
            for _ in range(depth):
                layers.append(DenseLayer(channels))
                channels += 32
        self.features = nn.Sequential(*layers, nn.BatchNorm2d(channels), nn.ReLU())
        self.classifier = nn.Linear(channels, classes)

    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


model = DenseNet201().cuda().eval()
explainer = IntegratedGradients(model)
image = torch.rand(1, 3, 256, 256, device="cuda")
attributions = explainer.attribute(image, target=281, n_steps=50)
print(attributions.shape, f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
