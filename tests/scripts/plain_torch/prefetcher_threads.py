"""A data prefetcher thread that copies batches to the GPU ahead of training, on a side stream, and a thread pool for evaluation."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class BackgroundLoader(threading.Thread):
    def __init__(self, batches):
        super().__init__(daemon=True)
        self.batches, self.queue = batches, queue.Queue(maxsize=2)
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None
        self.start()

    def run(self):
        for x, y in self.batches:
            if self.stream is None:
                self.queue.put((x.to(device), y.to(device)))
            else:
                with torch.cuda.stream(self.stream):
                    self.queue.put(
                        (x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True))
                    )
        self.queue.put(None)

    def __iter__(self):
        while (item := self.queue.get()) is not None:
            if self.stream is not None:
                torch.cuda.current_stream().wait_stream(self.stream)
                for tensor in item:
                    tensor.record_stream(torch.cuda.current_stream())
            yield item


model = nn.Sequential(nn.Linear(100, 256), nn.ReLU(), nn.Linear(256, 5)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [(torch.rand(32, 100), torch.randint(0, 5, (32,))) for _ in range(6)]
for i, (x, y) in enumerate(BackgroundLoader(batches)):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"batch {i} labels {y.sum().item()} loss {loss.item():.4f}")


@torch.no_grad()
def evaluate(part):
    x, y = part
    return model(x.to(device)).argmax(1).eq(y.to(device)).float().mean().item(), len(y)


with ThreadPoolExecutor(max_workers=2) as pool:
    results = list(pool.map(evaluate, batches))
print("evaluated", sum(n for _, n in results), f"accuracy {sum(a for a, _ in results) / len(results):.4f}")
