"""MONAI: a 3D U-Net with DiceCE loss, sliding-window inference, post-processing and DiceMetric."""

import torch
from monai.data import decollate_batch
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet
from monai.transforms import AsDiscrete, Compose
from monai.utils import set_determinism

set_determinism(seed=0)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
model = UNet(
    spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2), num_res_units=1, norm="batch"
).to(device)
loss_function = DiceCELoss(to_onehot_y=True, softmax=True)
optimizer = torch.optim.Adam(model.parameters(), 1e-4)
dice_metric = DiceMetric(include_background=False, reduction="mean")
post_pred, post_label = Compose([AsDiscrete(argmax=True, to_onehot=2)]), Compose([AsDiscrete(to_onehot=2)])
g = torch.Generator().manual_seed(0)
volumes, labels = torch.rand(4, 1, 24, 24, 24, generator=g), (torch.rand(4, 1, 24, 24, 24, generator=g) > 0.8).float()
for epoch in range(2):
    model.train()
    for i in range(0, 4, 2):
        inputs, target = volumes[i : i + 2, :, :16, :16, :16].to(device), labels[i : i + 2, :, :16, :16, :16].to(device)
        optimizer.zero_grad()
        loss = loss_function(model(inputs), target)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for i in range(2):
            val_inputs, val_labels = volumes[i : i + 1].to(device), labels[i : i + 1].to(device)
            val_outputs = sliding_window_inference(val_inputs, (16, 16, 16), 2, model)
            val_outputs = [post_pred(v) for v in decollate_batch(val_outputs)]
            val_labels = [post_label(v) for v in decollate_batch(val_labels)]
            dice_metric(y_pred=val_outputs, y=val_labels)
        metric = dice_metric.aggregate().item()
        dice_metric.reset()
    print(
        f"epoch {epoch} loss {loss.item():.4f} dice {metric:.4f} foreground {int(val_labels[0][1].sum())} output {tuple(val_outputs[0].shape)}"
    )
