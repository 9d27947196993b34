"""Variational autoencoder as pytorch/examples/vae."""

import argparse

import torch
import torch.utils.data
from torch import nn, optim
from torch.nn import functional as F

parser = argparse.ArgumentParser(description="VAE MNIST Example")
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--log-interval", type=int, default=1)
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()
torch.manual_seed(args.seed)
device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
kwargs = {"num_workers": 1, "pin_memory": True} if device.type == "cuda" else {}
data = torch.rand(512, 1, 28, 28, generator=torch.Generator().manual_seed(0))
train_loader = torch.utils.data.DataLoader(data[:384], batch_size=args.batch_size, shuffle=True, **kwargs)
test_loader = torch.utils.data.DataLoader(data[384:], batch_size=args.batch_size, shuffle=False, **kwargs)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(784, 400)
        self.fc21 = nn.Linear(400, 20)
        self.fc22 = nn.Linear(400, 20)
        self.fc3 = nn.Linear(20, 400)
        self.fc4 = nn.Linear(400, 784)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 784))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


model = VAE().to(device)
optimizer = optim.Adam(model.parameters(), lr=1e-3)


def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 784), reduction="sum")
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + KLD


for epoch in range(1, args.epochs + 1):
    model.train()
    train_loss = 0
    for batch_idx, batch in enumerate(train_loader):
        batch = batch.to(device)
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(batch)
        loss = loss_function(recon_batch, batch, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(
                f"Train Epoch: {epoch} [{batch_idx * len(batch)}/{len(data[:384])}]\tLoss: {loss.item() / len(batch):.6f}"
            )
    print(f"====> Epoch: {epoch} Average loss: {train_loss / 384:.4f}")
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for batch in test_loader:
            batch = batch.to(device)
            recon_batch, mu, logvar = model(batch)
            test_loss += loss_function(recon_batch, batch, mu, logvar).item()
            comparison = torch.cat([batch[:8], recon_batch.view(-1, 1, 28, 28)[:8]])
        sample = torch.randn(64, 20).to(device)
        sample = model.decode(sample).cpu()
    print(
        f"====> Test set loss: {test_loss / 128:.4f}, comparison {tuple(comparison.shape)}, sample {tuple(sample.shape)}"
    )
