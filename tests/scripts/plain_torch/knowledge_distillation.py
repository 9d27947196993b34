"""Knowledge distillation: a frozen teacher's soft targets, a small student, early stopping on the validation loss."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(42)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def net(width):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * width, 64),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(64, 10),
    )


class EarlyStopping:
    def __init__(self, patience=3, delta=0.0):
        self.patience, self.delta, self.best, self.counter, self.stop = patience, delta, None, 0, False

    def __call__(self, loss, model):
        if self.best is None or loss < self.best - self.delta:
            self.best, self.counter = loss, 0
            torch.save(model.state_dict(), "checkpoint.pt")
        else:
            self.counter += 1
            self.stop = self.counter >= self.patience


dataset = TensorDataset(torch.rand(160, 3, 32, 32), torch.randint(0, 10, (160,)))
train_set, val_set = random_split(dataset, [128, 32], generator=torch.Generator().manual_seed(0))
train_loader, val_loader = DataLoader(train_set, 32, shuffle=True), DataLoader(val_set, 32)
teacher, student = net(32).to(device), net(8).to(device)
print("teacher", sum(p.numel() for p in teacher.parameters()), "student", sum(p.numel() for p in student.parameters()))


def evaluate(model):
    model.eval()
    correct, total, loss = 0, 0, 0.0
    with torch.no_grad():
        for inputs, labels in val_loader:
            inputs, labels = inputs.to(device), labels.to(device)
            outputs = model(inputs)
            loss += F.cross_entropy(outputs, labels).item()
            correct += (outputs.argmax(1) == labels).sum().item()
            total += labels.size(0)
    return loss, 100.0 * correct / total


optimizer = torch.optim.Adam(teacher.parameters(), lr=1e-3)
for inputs, labels in train_loader:
    optimizer.zero_grad()
    F.cross_entropy(teacher(inputs.to(device)), labels.to(device)).backward()
    optimizer.step()
print("teacher: loss {:.4f} accuracy {:.2f}%".format(*evaluate(teacher)))

teacher.eval()
optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
stopping = EarlyStopping(patience=10)
T, soft_weight = 2.0, 0.25
for epoch in range(3):
    student.train()
    for inputs, labels in train_loader:
        inputs, labels = inputs.to(device), labels.to(device)
        optimizer.zero_grad()
        with torch.no_grad():
            teacher_logits = teacher(inputs)
        logits = student(inputs)
        soft = F.kl_div(F.log_softmax(logits / T, 1), F.softmax(teacher_logits / T, 1), reduction="batchmean") * T * T
        loss = soft_weight * soft + (1 - soft_weight) * F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
    val_loss, accuracy = evaluate(student)
    print(f"epoch {epoch} loss {loss.item():.4f} val {val_loss:.4f} accuracy {accuracy:.2f}%")
    stopping(val_loss, student)
    if stopping.stop:
        print("early stopping")
        break
student.load_state_dict(torch.load("checkpoint.pt", map_location=device))
