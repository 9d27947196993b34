"""ResNet-50, batch 128 at 224 pixels in bf16 and channels_last: the throughput benchmark that people paste."""

import torch
import torchvision

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
torch.backends.cudnn.benchmark = True
model = torchvision.models.resnet50().to(device).to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x = torch.randn(128, 3, 224, 224, device=device).to(memory_format=torch.channels_last)
y = torch.randint(0, 1000, (128,), device=device)
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
for step in range(4):
    start.record()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    end.record()
    torch.cuda.synchronize()
    milliseconds = start.elapsed_time(end)
    assert milliseconds > 0
    print(f"step {step} loss {loss.item():.3f} {128 / milliseconds * 1000:.0f} images per second")
