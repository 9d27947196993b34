"""Longformer with global attention on the first token, and a pipeline-like prediction over chunks."""

import torch
from transformers import LongformerConfig, LongformerForSequenceClassification

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
config = LongformerConfig(
    vocab_size=120,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=96,
    attention_window=[8, 8],
    max_position_embeddings=70,
    num_labels=3,
    pad_token_id=1,
)
model = LongformerForSequenceClassification(config).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step, length in enumerate((30, 48)):
    ids = torch.randint(2, 120, (2, length), device=device)
    attention_mask = torch.ones_like(ids)
    attention_mask[1, length // 2 :] = 0
    global_attention_mask = torch.zeros_like(ids)
    global_attention_mask[:, 0] = 1
    out = model(
        ids,
        attention_mask=attention_mask,
        global_attention_mask=global_attention_mask,
        labels=torch.tensor([0, 2], device=device),
    )
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(
        f"step {step} length {length} tokens {int(attention_mask.sum())} loss {out.loss.item():.4f} logits {tuple(out.logits.shape)}"
    )
