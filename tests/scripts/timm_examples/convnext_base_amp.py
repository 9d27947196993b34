"""ConvNeXt-Base at 224 pixels, batch 16, fp16 with GradScaler: does it fit?"""

import timm
import torch

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = timm.create_model("convnext_base", num_classes=1000).to(device, memory_format=torch.channels_last)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)
scaler = torch.amp.GradScaler(device.type)
criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
for step in range(3):
    images = torch.rand(16, 3, 224, 224, device=device).to(memory_format=torch.channels_last)
    target = torch.randint(0, 1000, (16,), device=device)
    with torch.autocast(device.type, dtype=torch.float16):
        loss = criterion(model(images), target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.3f}")
