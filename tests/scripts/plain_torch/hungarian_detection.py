"""A DETR-like detector with SciPy's linear_sum_assignment on the cost matrix, as DETR's matcher does it."""

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import nn

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class TinyDETR(nn.Module):
    def __init__(self, classes=4, queries=8, dim=48):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, dim, 3, 4, 1), nn.ReLU())
        self.transformer = nn.Transformer(dim, 4, 1, 1, 96, batch_first=True)
        self.query, self.position = nn.Parameter(torch.rand(queries, dim)), nn.Parameter(torch.rand(64, dim))
        self.classes, self.boxes = nn.Linear(dim, classes + 1), nn.Linear(dim, 4)

    def forward(self, x):
        h = self.backbone(x).flatten(2).transpose(1, 2)
        h = self.transformer(h + self.position[: h.size(1)], self.query.expand(x.size(0), -1, -1))
        return {"pred_logits": self.classes(h), "pred_boxes": self.boxes(h).sigmoid()}


@torch.no_grad()
def match(outputs, targets):
    bs, queries = outputs["pred_logits"].shape[:2]
    out_prob, out_bbox = outputs["pred_logits"].flatten(0, 1).softmax(-1), outputs["pred_boxes"].flatten(0, 1)
    tgt_ids, tgt_bbox = torch.cat([v["labels"] for v in targets]), torch.cat([v["boxes"] for v in targets])
    C = (torch.cdist(out_bbox, tgt_bbox, p=1) - out_prob[:, tgt_ids]).view(bs, queries, -1).cpu()
    sizes = [len(v["boxes"]) for v in targets]
    indices = [linear_sum_assignment(c[i]) for i, c in enumerate(C.split(sizes, -1))]
    return [(torch.as_tensor(i, dtype=torch.int64), torch.as_tensor(j, dtype=torch.int64)) for i, j in indices]


model = TinyDETR().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
empty_weight = torch.ones(5)
empty_weight[-1] = 0.1
empty_weight = empty_weight.to(device)
for step in range(3):
    targets = [
        {"labels": torch.randint(0, 4, (n,)).to(device), "boxes": (torch.rand(n, 4) * 0.5 + 0.2).to(device)}
        for n in (2, 3)
    ]
    outputs = model(torch.rand(2, 3, 64, 64).to(device))
    indices = match(outputs, targets)
    batch_idx = torch.cat([torch.full_like(src, i) for i, (src, _) in enumerate(indices)])
    src_idx = torch.cat([src for src, _ in indices])
    target_classes = torch.full(outputs["pred_logits"].shape[:2], 4, dtype=torch.int64, device=device)
    target_classes[batch_idx, src_idx] = torch.cat([t["labels"][j] for t, (_, j) in zip(targets, indices)])
    loss_ce = F.cross_entropy(outputs["pred_logits"].transpose(1, 2), target_classes, empty_weight)
    boxes = torch.cat([t["boxes"][j] for t, (_, j) in zip(targets, indices)])
    loss = loss_ce + 5 * F.l1_loss(outputs["pred_boxes"][batch_idx, src_idx], boxes, reduction="none").sum() / len(
        boxes
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} matched {len(src_idx)} background {int((target_classes == 4).sum())} loss {loss.item():.4f}")
