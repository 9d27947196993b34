# gpu: 6GiB
# cause: Adam's foreach implementation, the default, makes an intermediate for all weights at once: one more copy
# cure: Adam(..., foreach=False)
# report: https://github.com/pytorch/pytorch/issues/97712 (cause by a maintainer, cure confirmed)
import torch
import torch.nn.functional as F
from torch import nn


class Classifier(nn.Module):
    def __init__(self, vocab=30522, d=1024, depth=24, classes=5):
        super().__init__()
        self.embedding = nn.Embedding(vocab, d)
        layer = nn.TransformerEncoderLayer(d, 16, 4096, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth)
        self.head = nn.Linear(d, classes)

    def forward(self, ids):
        return self.head(self.encoder(self.embedding(ids))[:, 0])


with torch.device("cuda"):
    model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
for step in range(4):
    ids, labels = torch.randint(30522, (2, 64), device="cuda"), torch.randint(5, (2,), device="cuda")
    loss = F.cross_entropy(model(ids), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
