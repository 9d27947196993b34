"""Fast neural style as pytorch/examples/fast_neural_style: transformer net, VGG features (untrained), Gram matrices."""

from collections import namedtuple

import torch
import torch.nn.functional as F
from torch.optim import Adam
from torchvision import models

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(42)


class Vgg16(torch.nn.Module):
    def __init__(self):
        super().__init__()
        features = models.vgg16(weights=None).features
        self.slices = torch.nn.ModuleList([features[:4], features[4:9], features[9:16], features[16:23]])
        for param in self.parameters():
            param.requires_grad = False

    def forward(self, X):
        found = []
        for part in self.slices:
            X = part(X)
            found.append(X)
        return namedtuple("VggOutputs", ["relu1_2", "relu2_2", "relu3_3", "relu4_3"])(*found)


class ConvLayer(torch.nn.Module):
    def __init__(self, i, o, kernel, stride, upsample=None):
        super().__init__()
        self.upsample = upsample
        self.reflection_pad = torch.nn.ReflectionPad2d(kernel // 2)
        self.conv2d = torch.nn.Conv2d(i, o, kernel, stride)

    def forward(self, x):
        if self.upsample:
            x = F.interpolate(x, mode="nearest", scale_factor=self.upsample)
        return self.conv2d(self.reflection_pad(x))


class ResidualBlock(torch.nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1, self.in1 = ConvLayer(channels, channels, 3, 1), torch.nn.InstanceNorm2d(channels, affine=True)
        self.conv2, self.in2 = ConvLayer(channels, channels, 3, 1), torch.nn.InstanceNorm2d(channels, affine=True)

    def forward(self, x):
        return self.in2(self.conv2(F.relu(self.in1(self.conv1(x))))) + x


class TransformerNet(torch.nn.Module):
    def __init__(self, w=8):
        super().__init__()
        norm = lambda c: torch.nn.InstanceNorm2d(c, affine=True)
        self.net = torch.nn.Sequential(
            ConvLayer(3, w, 9, 1),
            norm(w),
            torch.nn.ReLU(),
            ConvLayer(w, 2 * w, 3, 2),
            norm(2 * w),
            torch.nn.ReLU(),
            ConvLayer(2 * w, 4 * w, 3, 2),
            norm(4 * w),
            torch.nn.ReLU(),
            *[ResidualBlock(4 * w) for _ in range(2)],
            ConvLayer(4 * w, 2 * w, 3, 1, upsample=2),
            norm(2 * w),
            torch.nn.ReLU(),
            ConvLayer(2 * w, w, 3, 1, upsample=2),
            norm(w),
            torch.nn.ReLU(),
            ConvLayer(w, 3, 9, 1),
        )

    def forward(self, X):
        return self.net(X)


def gram_matrix(y):
    (b, ch, h, w) = y.size()
    features = y.view(b, ch, w * h)
    return features.bmm(features.transpose(1, 2)) / (ch * h * w)


def normalize_batch(batch):
    mean = batch.new_tensor([0.485, 0.456, 0.406]).view(-1, 1, 1)
    std = batch.new_tensor([0.229, 0.224, 0.225]).view(-1, 1, 1)
    return (batch.div_(255.0) - mean) / std


train_loader = torch.utils.data.DataLoader(torch.rand(6, 3, 32, 32) * 255, batch_size=2)
transformer = TransformerNet().to(device)
optimizer = Adam(transformer.parameters(), 1e-3)
mse_loss = torch.nn.MSELoss()
vgg = Vgg16().to(device)
style = (torch.rand(3, 32, 32) * 255).repeat(2, 1, 1, 1).to(device)
gram_style = [gram_matrix(y) for y in vgg(normalize_batch(style))]
count, agg_content_loss, agg_style_loss = 0, 0.0, 0.0
for batch_id, x in enumerate(train_loader):
    n_batch = len(x)
    count += n_batch
    optimizer.zero_grad()
    x = x.to(device)
    y = transformer(x)
    y, x = normalize_batch(y), normalize_batch(x)
    features_y, features_x = vgg(y), vgg(x)
    content_loss = 1e5 * mse_loss(features_y.relu2_2, features_x.relu2_2)
    style_loss = 0.0
    for ft_y, gm_s in zip(features_y, gram_style):
        style_loss += mse_loss(gram_matrix(ft_y), gm_s[:n_batch, :, :])
    style_loss *= 1e10
    total_loss = content_loss + style_loss
    total_loss.backward()
    optimizer.step()
    agg_content_loss += content_loss.item()
    agg_style_loss += style_loss.item()
    print(f"Epoch 1:\t[{count}/6]\tcontent: {agg_content_loss / count:.6f}\tstyle: {agg_style_loss / count:.6f}")
transformer.eval().cpu()
torch.save(transformer.state_dict(), "style.model")
