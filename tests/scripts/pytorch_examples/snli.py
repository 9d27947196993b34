"""Sentence pair classification as pytorch/examples/snli: a bidirectional LSTM encoder, padded batches, early stopping by dev loss."""

import glob
import os
import random

import torch
import torch.nn as nn
import torch.optim as optim
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

torch.manual_seed(0)
random.seed(0)
device = torch.device("cuda:0") if torch.cuda.is_available() else torch.device("cpu")
n_embed, d_embed, d_proj, d_hidden, d_out = 200, 32, 32, 32, 3


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(d_proj, d_hidden, num_layers=1, bidirectional=True, batch_first=True)

    def forward(self, inputs, lengths):
        packed = pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
        _, (ht, _) = self.rnn(packed)
        return ht[-2:].transpose(0, 1).contiguous().view(inputs.size(0), -1)


class SNLIClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(n_embed, d_embed, padding_idx=0)
        self.projection = nn.Linear(d_embed, d_proj)
        self.encoder = Encoder()
        self.relu, self.dropout = nn.ReLU(), nn.Dropout(0.2)
        self.out = nn.Sequential(nn.Linear(4 * d_hidden, 64), self.relu, self.dropout, nn.Linear(64, d_out))

    def forward(self, premise, premise_len, hypothesis, hypothesis_len):
        prem = self.encoder(self.relu(self.projection(self.embed(premise).detach())), premise_len)
        hypo = self.encoder(self.relu(self.projection(self.embed(hypothesis).detach())), hypothesis_len)
        return self.out(torch.cat([prem, hypo], 1))


def example():
    return [
        torch.tensor([random.randrange(1, n_embed) for _ in range(random.randrange(3, 15))]) for _ in range(2)
    ], random.randrange(3)


def batches(examples, size):
    for i in range(0, len(examples), size):
        part = examples[i : i + size]
        sides = []
        for side in range(2):
            texts = [pair[side] for pair, _ in part]
            sides += [pad_sequence(texts, batch_first=True).to(device), torch.tensor([len(t) for t in texts])]
        yield sides, torch.tensor([label for _, label in part], device=device)


train, dev = [example() for _ in range(96)], [example() for _ in range(32)]
model = SNLIClassifier().to(device)
criterion = nn.CrossEntropyLoss()
opt = optim.Adam(model.parameters(), lr=0.001)
best_dev_acc = -1
for epoch in range(2):
    n_correct, n_total = 0, 0
    for batch_idx, (sides, label) in enumerate(batches(train, 16)):
        model.train()
        opt.zero_grad()
        answer = model(*sides)
        n_correct += (torch.max(answer, 1)[1].view(label.size()) == label).sum().item()
        n_total += label.size(0)
        loss = criterion(answer, label)
        loss.backward()
        opt.step()
        print(
            f"{epoch} {batch_idx} longest {sides[0].shape[1]} {sides[2].shape[1]} {loss.item():.6f} {100.0 * n_correct / n_total:.4f}"
        )
    model.eval()
    n_dev_correct, dev_loss = 0, 0.0
    with torch.no_grad():
        for sides, label in batches(dev, 16):
            answer = model(*sides)
            n_dev_correct += (torch.max(answer, 1)[1].view(label.size()) == label).sum().item()
            dev_loss = criterion(answer, label)
    dev_acc = 100.0 * n_dev_correct / len(dev)
    print(f"dev loss {dev_loss.item():.6f} accuracy {dev_acc:.4f}")
    if dev_acc > best_dev_acc:
        best_dev_acc = dev_acc
        path = f"best_snapshot_devacc_{dev_acc}_iter_{epoch}_model.pt"
        torch.save(model, path)
        for f in glob.glob("best_snapshot*"):
            if f != path:
                os.remove(f)
print("snapshots", len(glob.glob("best_snapshot*")))
