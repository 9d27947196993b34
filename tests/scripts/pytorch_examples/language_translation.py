"""Transformer translation as pytorch/examples/language_translation, on generated sentence pairs; greedy decoding."""

import math
import random

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

UNK_IDX, PAD_IDX, BOS_IDX, EOS_IDX = 0, 1, 2, 3
SRC, TGT, EMB, HEADS, FFN, BATCH, LAYERS = 120, 140, 64, 4, 128, 16, 2
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
random.seed(0)


class PositionalEncoding(nn.Module):
    def __init__(self, emb_size, dropout, maxlen=500):
        super().__init__()
        den = torch.exp(-torch.arange(0, emb_size, 2) * math.log(10000) / emb_size)
        pos = torch.arange(0, maxlen).reshape(maxlen, 1)
        pos_embedding = torch.zeros((maxlen, emb_size))
        pos_embedding[:, 0::2] = torch.sin(pos * den)
        pos_embedding[:, 1::2] = torch.cos(pos * den)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("pos_embedding", pos_embedding.unsqueeze(-2))

    def forward(self, token_embedding):
        return self.dropout(token_embedding + self.pos_embedding[: token_embedding.size(0), :])


class TokenEmbedding(nn.Module):
    def __init__(self, vocab_size, emb_size):
        super().__init__()
        self.embedding, self.emb_size = nn.Embedding(vocab_size, emb_size), emb_size

    def forward(self, tokens):
        return self.embedding(tokens.long()) * math.sqrt(self.emb_size)


class Seq2SeqTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.Transformer(EMB, HEADS, LAYERS, LAYERS, FFN, 0.1)
        self.generator = nn.Linear(EMB, TGT)
        self.src_tok_emb, self.tgt_tok_emb = TokenEmbedding(SRC, EMB), TokenEmbedding(TGT, EMB)
        self.positional_encoding = PositionalEncoding(EMB, 0.1)

    def forward(self, src, trg, src_mask, tgt_mask, src_padding_mask, tgt_padding_mask, memory_key_padding_mask):
        src_emb = self.positional_encoding(self.src_tok_emb(src))
        tgt_emb = self.positional_encoding(self.tgt_tok_emb(trg))
        outs = self.transformer(
            src_emb, tgt_emb, src_mask, tgt_mask, None, src_padding_mask, tgt_padding_mask, memory_key_padding_mask
        )
        return self.generator(outs)

    def encode(self, src, src_mask):
        return self.transformer.encoder(self.positional_encoding(self.src_tok_emb(src)), src_mask)

    def decode(self, tgt, memory, tgt_mask):
        return self.transformer.decoder(self.positional_encoding(self.tgt_tok_emb(tgt)), memory, tgt_mask)


def generate_square_subsequent_mask(sz):
    mask = (torch.triu(torch.ones((sz, sz), device=DEVICE)) == 1).transpose(0, 1)
    return mask.float().masked_fill(mask == 0, float("-inf")).masked_fill(mask == 1, float(0.0))


def create_mask(src, tgt):
    tgt_mask = generate_square_subsequent_mask(tgt.shape[0])
    src_mask = torch.zeros((src.shape[0], src.shape[0]), device=DEVICE).type(torch.bool)
    return src_mask, tgt_mask, (src == PAD_IDX).transpose(0, 1), (tgt == PAD_IDX).transpose(0, 1)


def sentence(size):
    words = [random.randrange(4, size) for _ in range(random.randrange(4, 16))]
    return torch.tensor([BOS_IDX, *words, EOS_IDX])


def collate_fn(batch):
    return pad_sequence([s for s, _ in batch], padding_value=PAD_IDX), pad_sequence(
        [t for _, t in batch], padding_value=PAD_IDX
    )


pairs = [(sentence(SRC), sentence(TGT)) for _ in range(64)]
transformer = Seq2SeqTransformer()
for p in transformer.parameters():
    if p.dim() > 1:
        nn.init.xavier_uniform_(p)
transformer = transformer.to(DEVICE)
loss_fn = torch.nn.CrossEntropyLoss(ignore_index=PAD_IDX)
optimizer = torch.optim.Adam(transformer.parameters(), lr=0.0001, betas=(0.9, 0.98), eps=1e-9)
for epoch in range(1, 3):
    transformer.train()
    losses = 0
    loader = DataLoader(pairs, batch_size=BATCH, collate_fn=collate_fn)
    for src, tgt in loader:
        src, tgt = src.to(DEVICE), tgt.to(DEVICE)
        tgt_input = tgt[:-1, :]
        src_mask, tgt_mask, src_padding_mask, tgt_padding_mask = create_mask(src, tgt_input)
        print(
            "lengths", src.shape[0], tgt.shape[0], "padding", int(src_padding_mask.sum()), int(tgt_padding_mask.sum())
        )
        logits = transformer(src, tgt_input, src_mask, tgt_mask, src_padding_mask, tgt_padding_mask, src_padding_mask)
        optimizer.zero_grad()
        loss = loss_fn(logits.reshape(-1, logits.shape[-1]), tgt[1:, :].reshape(-1))
        loss.backward()
        optimizer.step()
        losses += loss.item()
    print(f"Epoch: {epoch}, Train loss: {losses / len(loader):.3f}")

transformer.eval()
src = sentence(SRC).view(-1, 1)
num_tokens = src.shape[0]
src_mask = torch.zeros(num_tokens, num_tokens).type(torch.bool)
with torch.no_grad():
    memory = transformer.encode(src.to(DEVICE), src_mask.to(DEVICE))
    ys = torch.ones(1, 1).fill_(BOS_IDX).type(torch.long).to(DEVICE)
    for _ in range(num_tokens + 5 - 1):
        out = transformer.decode(ys, memory, generate_square_subsequent_mask(ys.size(0)).type(torch.bool).to(DEVICE))
        _, next_word = torch.max(transformer.generator(out.transpose(0, 1)[:, -1]), dim=1)
        ys = torch.cat([ys, torch.ones(1, 1).type_as(ys.data).fill_(next_word.item())], dim=0)
print("decoded", tuple(ys.shape))
