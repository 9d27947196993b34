"""A small text-to-speech model: attention decoder with a stop token, guided attention, Griffin-Lim-like inverse STFT."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MELS = 20


class TTS(nn.Module):
    def __init__(self, symbols=30, dim=48):
        super().__init__()
        self.embed, self.encoder = (
            nn.Embedding(symbols, dim),
            nn.GRU(dim, dim // 2, bidirectional=True, batch_first=True),
        )
        self.prenet = nn.Sequential(nn.Linear(MELS, dim), nn.ReLU(), nn.Dropout(0.5))
        self.cell, self.query, self.key, self.v = (
            nn.GRUCell(2 * dim, dim),
            nn.Linear(dim, dim),
            nn.Linear(dim, dim),
            nn.Linear(dim, 1),
        )
        self.mel, self.stop = nn.Linear(2 * dim, MELS), nn.Linear(2 * dim, 1)

    def forward(self, text, mels=None, max_steps=40):
        memory, _ = self.encoder(self.embed(text))
        mask = text == 0
        h, context = memory.new_zeros(text.size(0), memory.size(2)), memory.new_zeros(text.size(0), memory.size(2))
        frame, outputs, stops, alignments = memory.new_zeros(text.size(0), MELS), [], [], []
        for t in range(max_steps if mels is None else mels.size(1)):
            h = self.cell(torch.cat([self.prenet(frame), context], 1), h)
            energy = (
                self.v(torch.tanh(self.query(h).unsqueeze(1) + self.key(memory))).squeeze(2).masked_fill(mask, -1e9)
            )
            weights = energy.softmax(1)
            context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
            both = torch.cat([h, context], 1)
            outputs.append(self.mel(both))
            stops.append(self.stop(both).squeeze(1))
            alignments.append(weights)
            frame = outputs[-1] if mels is None else mels[:, t]
        return torch.stack(outputs, 1), torch.stack(stops, 1), torch.stack(alignments, 1)


model = TTS().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(3):
    lengths = torch.tensor([12, 9, 7])
    text = torch.randint(1, 30, (3, 12))
    text[torch.arange(12)[None] >= lengths[:, None]] = 0
    frames = torch.tensor([20, 15, 11])
    mels, text = torch.rand(3, 20, MELS).to(device), text.to(device)
    target_stop = (torch.arange(20)[None] >= frames[:, None] - 1).float().to(device)
    valid = (torch.arange(20)[None] < frames[:, None]).to(device)
    out, stop, alignment = model(text, mels)
    guide = 1 - torch.exp(-((torch.arange(20)[:, None] / 20 - torch.arange(12)[None] / 12) ** 2) / 0.08).to(device)
    loss = (
        F.l1_loss(out[valid], mels[valid])
        + F.binary_cross_entropy_with_logits(stop, target_stop)
        + (alignment * guide).mean()
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} symbols {int((text != 0).sum())} frames {out[valid].shape[0]} loss {loss.item():.4f}")
model.eval()
with torch.no_grad():
    mel, stop, _ = model(text[:1])
    magnitude = torch.rand(1, 65, 40, device=device)
    wave = torch.istft(
        torch.polar(magnitude, torch.zeros_like(magnitude)),
        n_fft=128,
        hop_length=32,
        window=torch.hann_window(128, device=device),
    )
print("spoken", tuple(mel.shape), tuple(wave.shape))
