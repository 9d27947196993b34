"""Speech recognition on generated audio: log-mel by STFT, convolutions and a GRU, CTC loss with lengths, greedy decoding."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Utterances(Dataset):
    def __init__(self, n=24):
        generator = torch.Generator().manual_seed(3)
        self.items = []
        for _ in range(n):
            samples = int(torch.randint(4000, 8000, (1,), generator=generator))
            labels = torch.randint(1, 28, (int(torch.randint(3, 9, (1,), generator=generator)),), generator=generator)
            self.items.append((torch.randn(samples, generator=generator), labels))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(batch):
    waves = nn.utils.rnn.pad_sequence([w for w, _ in batch], batch_first=True)
    labels = nn.utils.rnn.pad_sequence([y for _, y in batch], batch_first=True)
    return waves, torch.tensor([len(w) for w, _ in batch]), labels, torch.tensor([len(y) for _, y in batch])


class MelSpectrogram(nn.Module):
    def __init__(self, n_fft=256, hop=128, mels=32):
        super().__init__()
        self.n_fft, self.hop = n_fft, hop
        self.register_buffer("window", torch.hann_window(n_fft))
        self.register_buffer("filters", torch.rand(mels, n_fft // 2 + 1).softmax(-1))

    def forward(self, x):
        spectrum = torch.stft(x, self.n_fft, self.hop, window=self.window, return_complex=True).abs().pow(2)
        return torch.log(self.filters @ spectrum + 1e-6)


class DeepSpeech(nn.Module):
    def __init__(self, mels=32, hidden=64, classes=28):
        super().__init__()
        self.features = MelSpectrogram(mels=mels)
        self.conv = nn.Sequential(nn.Conv2d(1, 8, 3, (2, 1), 1), nn.BatchNorm2d(8), nn.Hardtanh(0, 20, inplace=True))
        self.rnn = nn.GRU(8 * mels // 2, hidden, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)
        self.fc = nn.Linear(2 * hidden, classes)

    def forward(self, x):
        x = self.conv(self.features(x).unsqueeze(1))
        x = x.flatten(1, 2).transpose(1, 2)
        return F.log_softmax(self.fc(self.rnn(x)[0]), dim=-1)


model = DeepSpeech().to(device)
criterion = nn.CTCLoss(blank=0, zero_infinity=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
loader = DataLoader(Utterances(), batch_size=8, collate_fn=collate, shuffle=False)
for epoch in range(2):
    model.train()
    for waves, wave_lengths, labels, label_lengths in loader:
        waves, labels = waves.to(device), labels.to(device)
        log_probs = model(waves).transpose(0, 1)
        frames = torch.div(wave_lengths, 128, rounding_mode="floor") + 1
        loss = criterion(log_probs, labels, frames, label_lengths)
        if math.isnan(loss.item()):
            raise RuntimeError("diverged")
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10)
        optimizer.step()
        print(
            f"epoch {epoch} frames {log_probs.shape[0]} longest label {int(label_lengths.max())} loss {loss.item():.4f}"
        )
model.eval()
with torch.no_grad():
    best = model(waves[:1]).argmax(-1)[0]
    collapsed = [int(i) for i in torch.unique_consecutive(best) if i != 0]
print("frames decoded", best.numel(), "at most", len(collapsed) <= best.numel())
