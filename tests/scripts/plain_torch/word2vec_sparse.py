"""Skip-gram word2vec with negative sampling: sparse embeddings, SparseAdam, EmbeddingBag for a classifier."""

import random
from collections import Counter

import torch
from torch import nn

random.seed(0)
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
corpus = [random.choice([f"w{i}" for i in range(50)]) for _ in range(600)]
counts = Counter(corpus)
vocabulary = {w: i for i, (w, _) in enumerate(counts.most_common())}
frequencies = torch.tensor([counts[w] for w in vocabulary], dtype=torch.float) ** 0.75
pairs = [(vocabulary[corpus[i]], vocabulary[corpus[i + d]]) for i in range(2, len(corpus) - 2) for d in (-2, -1, 1, 2)]
center, context = (
    nn.Embedding(len(vocabulary), 32, sparse=True).to(device),
    nn.Embedding(len(vocabulary), 32, sparse=True).to(device),
)
optimizer = torch.optim.SparseAdam([*center.parameters(), *context.parameters()], lr=1e-2)
print(len(vocabulary), "words", len(pairs), "pairs")
for step in range(4):
    batch = torch.tensor(random.sample(pairs, 64)).to(device)
    negatives = torch.multinomial(frequencies, 64 * 5, replacement=True).view(64, 5).to(device)
    v = center(batch[:, 0])
    positive = nn.functional.logsigmoid((v * context(batch[:, 1])).sum(1))
    negative = nn.functional.logsigmoid(-(context(negatives) @ v.unsqueeze(2)).squeeze(2)).sum(1)
    loss = -(positive + negative).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} different words {len(torch.unique(batch))} loss {loss.item():.4f}")
bag = nn.EmbeddingBag(len(vocabulary), 16, mode="mean").to(device)
texts = [torch.tensor([vocabulary[w] for w in corpus[i : i + 5 + i % 3]]) for i in range(0, 40, 8)]
offsets = torch.tensor([0, *[len(t) for t in texts[:-1]]]).cumsum(0)
print("bags", tuple(bag(torch.cat(texts).to(device), offsets.to(device)).shape))
