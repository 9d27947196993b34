"""GPT-2 of the usual size, batch 4 of 512 tokens, bf16 autocast, fused AdamW: the memory question that people ask."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = GPT2LMHeadModel(GPT2Config()).to(device)
model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
scheduler = get_cosine_schedule_with_warmup(optimizer, 2, 10)
print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
model.train()
for step in range(3):
    ids = torch.randint(0, model.config.vocab_size, (4, 512), device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"step {step} loss {loss.item():.3f}")
