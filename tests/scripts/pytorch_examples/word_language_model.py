"""Word-level language model as pytorch/examples/word_language_model: LSTM with truncated BPTT, or a Transformer."""

import argparse
import math
import random

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="LSTM")
parser.add_argument("--emsize", type=int, default=64)
parser.add_argument("--nhid", type=int, default=64)
parser.add_argument("--nlayers", type=int, default=2)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--bptt", type=int, default=35)
parser.add_argument("--clip", type=float, default=0.25)
parser.add_argument("--words", type=int, default=40)
args = parser.parse_args()
torch.manual_seed(1111)
random.seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Corpus:
    """Reads words from a file, as data.py does."""

    def __init__(self, path):
        self.word2idx, ids = {}, []
        with open(path) as file:
            for line in file:
                for word in [*line.split(), "<eos>"]:
                    ids.append(self.word2idx.setdefault(word, len(self.word2idx)))
        self.train = torch.tensor(ids, dtype=torch.int64)


with open("train.txt", "w") as out:
    vocabulary = [f"w{i}" for i in range(300)]
    for _ in range(150):
        out.write(" ".join(random.choices(vocabulary, k=20)) + "\n")
corpus = Corpus("train.txt")
ntokens = len(corpus.word2idx)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous().to(device)


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid, nlayers, dropout=0.2):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        self.nhid, self.nlayers, self.ntoken = nhid, nlayers, ntoken

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        decoded = self.decoder(self.drop(output)).view(-1, self.ntoken)
        return torch.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return weight.new_zeros(self.nlayers, bsz, self.nhid), weight.new_zeros(self.nlayers, bsz, self.nhid)


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


def get_batch(source, i):
    seq_len = min(args.bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


train_data, val_data = batchify(corpus.train[:2400], 20), batchify(corpus.train[2400:], 10)
model = RNNModel(ntokens, args.emsize, args.nhid, args.nlayers).to(device)
criterion = nn.NLLLoss()
print(f"{ntokens} words, {tuple(train_data.shape)} training, {tuple(val_data.shape)} validation")


def evaluate(source):
    model.eval()
    total, hidden = 0.0, model.init_hidden(10)
    with torch.no_grad():
        for i in range(0, source.size(0) - 1, args.bptt):
            data, targets = get_batch(source, i)
            output, hidden = model(data, hidden)
            hidden = repackage_hidden(hidden)
            total += len(data) * criterion(output, targets).item()
    return total / (len(source) - 1)


lr, best_val_loss = 20, None
for epoch in range(1, args.epochs + 1):
    model.train()
    hidden, total_loss = model.init_hidden(20), 0.0
    for batch, i in enumerate(range(0, train_data.size(0) - 1, args.bptt)):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        total_loss += loss.item()
        print(f"| epoch {epoch:3d} | batch {batch:5d} | length {len(data):3d} | loss {loss.item():5.2f}")
    val_loss = evaluate(val_data)
    print(f"| end of epoch {epoch:3d} | valid loss {val_loss:5.2f} | ppl {math.exp(val_loss):8.2f}")
    if not best_val_loss or val_loss < best_val_loss:
        with open("model.pt", "wb") as f:
            torch.save(model, f)
        best_val_loss = val_loss
    else:
        lr /= 4.0

# generate.py: sample one word after another
model.eval()
hidden = model.init_hidden(1)
input = torch.randint(ntokens, (1, 1), dtype=torch.long).to(device)
words = []
names = list(corpus.word2idx)
with torch.no_grad():
    for _ in range(args.words):
        output, hidden = model(input, hidden)
        word_weights = output.squeeze().div(1.0).exp().cpu()
        word_idx = torch.multinomial(word_weights, 1)[0]
        input.fill_(word_idx)
        words.append(names[word_idx])
print(f"generated {len(words)} words")
