"""A BiLSTM-CRF tagger: forward algorithm over masks, Viterbi decoding of different lengths, packed sequences."""

import random

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

random.seed(0)
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TAGS, VOCAB = 5, 40


class CRF(nn.Module):
    def __init__(self, tags):
        super().__init__()
        self.start, self.end, self.transitions = (
            nn.Parameter(torch.randn(tags)),
            nn.Parameter(torch.randn(tags)),
            nn.Parameter(torch.randn(tags, tags)),
        )

    def log_likelihood(self, emissions, tags, mask):
        n, length = tags.shape
        score = self.start[tags[:, 0]] + emissions[torch.arange(n), 0, tags[:, 0]]
        alpha = self.start + emissions[:, 0]
        for t in range(1, length):
            step = self.transitions[tags[:, t - 1], tags[:, t]] + emissions[torch.arange(n), t, tags[:, t]]
            score = score + step * mask[:, t]
            following = torch.logsumexp(alpha.unsqueeze(2) + self.transitions + emissions[:, t].unsqueeze(1), dim=1)
            alpha = torch.where(mask[:, t].unsqueeze(1), following, alpha)
        last = tags.gather(1, (mask.long().sum(1) - 1).unsqueeze(1)).squeeze(1)
        return score + self.end[last] - torch.logsumexp(alpha + self.end, dim=1)

    def decode(self, emissions, mask):
        score, history = self.start + emissions[:, 0], []
        for t in range(1, emissions.size(1)):
            best, index = (score.unsqueeze(2) + self.transitions + emissions[:, t].unsqueeze(1)).max(dim=1)
            score = torch.where(mask[:, t].unsqueeze(1), best, score)
            history.append(index)
        found = []
        for i, length in enumerate(mask.long().sum(1).tolist()):
            tag = int((score[i] + self.end).argmax())
            path = [tag]
            for index in reversed(history[: length - 1]):
                tag = int(index[i][tag])
                path.append(tag)
            found.append(path[::-1])
        return found


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(VOCAB, 16), nn.LSTM(16, 16, bidirectional=True, batch_first=True)
        self.out, self.crf = nn.Linear(32, TAGS), CRF(TAGS)

    def emissions(self, words, lengths):
        packed = pack_padded_sequence(self.embed(words), lengths, batch_first=True, enforce_sorted=False)
        return self.out(pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0])


model = Tagger().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(3):
    lengths = torch.tensor([random.randint(3, 9) for _ in range(6)])
    words = pad_sequence([torch.randint(1, VOCAB, (n,)) for n in lengths.tolist()], batch_first=True).to(device)
    tags = torch.randint(0, TAGS, words.shape).to(device)
    mask = words != 0
    loss = -model.crf.log_likelihood(model.emissions(words, lengths), tags, mask).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        paths = model.crf.decode(model.emissions(words, lengths), mask)
    print(f"step {step} words {int(mask.sum())} lengths {[len(p) for p in paths]} loss {loss.item():.4f}")
