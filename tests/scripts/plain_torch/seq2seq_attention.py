"""Seq2seq with Bahdanau attention, teacher forcing by chance, and greedy decoding until the end token, as in the PyTorch tutorial."""

import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import optim
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SOS_token, EOS_token, MAX_LENGTH, VOCAB, hidden_size, batch_size = 0, 1, 10, 60, 48, 16
random.seed(1)
torch.manual_seed(1)


class EncoderRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.gru = nn.Embedding(VOCAB, hidden_size), nn.GRU(hidden_size, hidden_size, batch_first=True)
        self.dropout = nn.Dropout(0.1)

    def forward(self, input):
        return self.gru(self.dropout(self.embedding(input)))


class BahdanauAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.Wa, self.Ua, self.Va = (
            nn.Linear(hidden_size, hidden_size),
            nn.Linear(hidden_size, hidden_size),
            nn.Linear(hidden_size, 1),
        )

    def forward(self, query, keys):
        scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(keys))).squeeze(2).unsqueeze(1)
        weights = F.softmax(scores, dim=-1)
        return torch.bmm(weights, keys), weights


class AttnDecoderRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.attention = nn.Embedding(VOCAB, hidden_size), BahdanauAttention()
        self.gru, self.out = nn.GRU(2 * hidden_size, hidden_size, batch_first=True), nn.Linear(hidden_size, VOCAB)

    def forward(self, encoder_outputs, encoder_hidden, target_tensor=None):
        decoder_input = torch.empty(encoder_outputs.size(0), 1, dtype=torch.long, device=device).fill_(SOS_token)
        decoder_hidden, outputs = encoder_hidden, []
        for i in range(MAX_LENGTH):
            embedded = self.embedding(decoder_input)
            context, _ = self.attention(decoder_hidden.permute(1, 0, 2), encoder_outputs)
            output, decoder_hidden = self.gru(torch.cat((embedded, context), dim=2), decoder_hidden)
            output = self.out(output)
            outputs.append(output)
            if target_tensor is not None:
                decoder_input = target_tensor[:, i].unsqueeze(1)
            else:
                decoder_input = output.topk(1)[1].squeeze(-1).detach()
        return F.log_softmax(torch.cat(outputs, dim=1), dim=-1), decoder_hidden


def pairs(n):
    ids = torch.zeros(n, 2, MAX_LENGTH, dtype=torch.long)
    for row in ids.view(-1, MAX_LENGTH):
        length = random.randint(3, MAX_LENGTH - 1)
        row[:length] = torch.tensor([random.randrange(2, VOCAB) for _ in range(length)])
        row[length] = EOS_token
    return ids


data = pairs(64)
dataset = TensorDataset(data[:, 0].to(device), data[:, 1].to(device))
dataloader = DataLoader(dataset, sampler=RandomSampler(dataset), batch_size=batch_size)
encoder, decoder = EncoderRNN().to(device), AttnDecoderRNN().to(device)
encoder_optimizer, decoder_optimizer = optim.Adam(encoder.parameters(), 0.001), optim.Adam(decoder.parameters(), 0.001)
criterion = nn.NLLLoss()
for epoch in range(1, 3):
    total_loss = 0
    for input_tensor, target_tensor in dataloader:
        encoder_optimizer.zero_grad()
        decoder_optimizer.zero_grad()
        encoder_outputs, encoder_hidden = encoder(input_tensor)
        teacher = target_tensor if random.random() < 0.5 else None
        decoder_outputs, _ = decoder(encoder_outputs, encoder_hidden, teacher)
        loss = criterion(decoder_outputs.view(-1, VOCAB), target_tensor.view(-1))
        loss.backward()
        encoder_optimizer.step()
        decoder_optimizer.step()
        total_loss += loss.item()
    print(f"({epoch} {epoch / 2 * 100:.0f}%) {total_loss / len(dataloader):.4f}")
encoder.eval()
decoder.eval()
with torch.no_grad():
    sentence = data[0, 0].view(1, -1).to(device)
    length = int((sentence == EOS_token).nonzero()[0, 1])
    outputs, _ = decoder(*encoder(sentence))
    decoded = outputs.topk(1)[1].squeeze()
print("source of", length, "words, decoded", tuple(decoded.shape))
