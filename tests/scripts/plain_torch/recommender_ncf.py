"""Neural collaborative filtering on generated ratings: negative sampling, hit ratio at 10 in NumPy."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

np.random.seed(0)
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
USERS, ITEMS = 30, 60
ratings = np.unique(np.stack([np.random.randint(0, USERS, 300), np.random.randint(0, ITEMS, 300)], 1), axis=0)
seen = {tuple(r) for r in ratings.tolist()}


class NCFData(Dataset):
    def __init__(self):
        negatives = [
            (u, j) for u, _ in ratings.tolist() for j in np.random.randint(0, ITEMS, 2).tolist() if (u, j) not in seen
        ]
        self.rows = [(u, i, 1.0) for u, i in ratings.tolist()] + [(u, i, 0.0) for u, i in negatives]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class NCF(nn.Module):
    def __init__(self, k=16):
        super().__init__()
        self.gmf_user, self.gmf_item, self.mlp_user, self.mlp_item = (
            nn.Embedding(n, k) for n in (USERS, ITEMS, USERS, ITEMS)
        )
        self.mlp = nn.Sequential(nn.Linear(2 * k, k), nn.ReLU(), nn.Linear(k, k // 2), nn.ReLU())
        self.predict = nn.Linear(k + k // 2, 1)

    def forward(self, user, item):
        gmf = self.gmf_user(user) * self.gmf_item(item)
        mlp = self.mlp(torch.cat((self.mlp_user(user), self.mlp_item(item)), -1))
        return self.predict(torch.cat((gmf, mlp), -1)).view(-1)


model = NCF().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
data = NCFData()
for epoch in range(2):
    model.train()
    for user, item, label in DataLoader(data, batch_size=128, shuffle=True, num_workers=1):
        user, item, label = user.to(device), item.to(device), label.float().to(device)
        loss = nn.functional.binary_cross_entropy_with_logits(model(user, item), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    hits = []
    for u in range(5):
        items = torch.arange(20, device=device)
        with torch.no_grad():
            _, indices = torch.topk(model(torch.full_like(items, u), items), 10)
        recommends = torch.take(items, indices).cpu().numpy().tolist()
        hits.append(float(3 in recommends))
    print(f"epoch {epoch} rows {len(data)} recommended {len(recommends)} loss {loss.item():.4f} HR {np.mean(hits):.3f}")
