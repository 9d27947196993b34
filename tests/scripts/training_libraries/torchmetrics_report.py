"""torchmetrics: a MetricCollection on the GPU, over batches with an uneven last one."""

import torch
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)
from torchmetrics.image import PeakSignalNoiseRatio, StructuralSimilarityIndexMeasure
from torchmetrics.regression import MeanSquaredError

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = torch.nn.Linear(16, 4).to(device)
metrics = MetricCollection(
    [MulticlassAccuracy(4), MulticlassF1Score(4), MulticlassAUROC(4), MulticlassConfusionMatrix(4)]
).to(device)
x, y = torch.rand(70, 16), torch.arange(70) % 4
for i in range(0, 70, 32):
    with torch.no_grad():
        metrics.update(model(x[i : i + 32].to(device)), y[i : i + 32].to(device))
result = metrics.compute()
print(
    {k: tuple(v.shape) for k, v in sorted(result.items())}, "rows", result["MulticlassConfusionMatrix"].sum(1).tolist()
)
ssim, psnr, mse = (
    StructuralSimilarityIndexMeasure(data_range=1.0).to(device),
    PeakSignalNoiseRatio(data_range=1.0).to(device),
    MeanSquaredError().to(device),
)
a, b = torch.rand(2, 3, 32, 32, device=device), torch.rand(2, 3, 32, 32, device=device)
print(
    f"ssim {ssim(a, b).item():.4f} psnr {psnr(a, b).item():.4f} mse {mse(a, b).item():.4f} on {mse.total.item():.0f} values"
)
