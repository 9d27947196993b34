"""Ultralytics' YOLO: the model's own training loss on boxes, EMA, and inference with non-maximum suppression."""

import torch
from ultralytics.cfg import get_cfg
from ultralytics.nn.tasks import DetectionModel
from ultralytics.utils.nms import non_max_suppression
from ultralytics.utils.torch_utils import ModelEMA

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = DetectionModel("yolov8n.yaml", nc=5, verbose=False).to(device)
model.args = get_cfg()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.937, nesterov=True)
ema = ModelEMA(model)
model.train()
for step in range(2):
    batch = {
        "img": torch.rand(2, 3, 96, 96).to(device),
        "batch_idx": torch.tensor([0.0, 0.0, 1.0]).to(device),
        "cls": torch.tensor([[0.0], [2.0], [4.0]]).to(device),
        "bboxes": (torch.rand(3, 4) * 0.4 + 0.2).to(device),
    }
    loss, items = model(batch)
    loss.sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
    optimizer.step()
    optimizer.zero_grad()
    ema.update(model)
    print(f"step {step} loss {loss.sum().item():.4f} items {len(items)}")
model.eval()
with torch.no_grad():
    predictions = model(torch.rand(2, 3, 96, 96).to(device))[0]
    found = non_max_suppression(predictions, conf_thres=0.0001, max_det=10)
print("predictions", tuple(predictions.shape), "images", len(found), "columns", found[0].shape[1])
