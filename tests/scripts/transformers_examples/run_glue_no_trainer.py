"""Sequence classification in a plain loop with a local model, tqdm and scikit-learn metrics, as run_glue_no_trainer.py."""

import torch
from _local import rng, sentence, tokenizer
from torch.optim import AdamW
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup, set_seed

set_seed(3)
random = rng(3)
device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
tok = tokenizer()
texts = [sentence(random) for _ in range(48)]
labels = [int("cat" in t) for t in texts]


def collate(batch):
    out = tok([texts[i] for i in batch], padding=True, return_tensors="pt")
    out["labels"] = torch.tensor([labels[i] for i in batch])
    return out


train_loader = DataLoader(range(36), batch_size=6, shuffle=True, collate_fn=collate)
eval_loader = DataLoader(range(36, 48), batch_size=6, collate_fn=collate)
config = BertConfig(
    vocab_size=len(tok), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, num_labels=2
)
model = BertForSequenceClassification(config).to(device)
optimizer = AdamW(model.parameters(), lr=5e-5)
steps = 2 * len(train_loader)
scheduler = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
progress = tqdm(range(steps))
for epoch in range(2):
    model.train()
    for batch in train_loader:
        batch = {k: v.to(device) for k, v in batch.items()}
        outputs = model(**batch)
        outputs.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        progress.update(1)
        progress.set_postfix(loss=f"{outputs.loss.item():.3f}")
    model.eval()
    correct, total, positive, tokens = 0, 0, 0, 0
    for batch in eval_loader:
        batch = batch.to(device)
        with torch.no_grad():
            outputs = model(**batch)
        predictions = torch.argmax(outputs.logits, dim=-1)
        correct += (predictions == batch["labels"]).sum().item()
        positive += batch["labels"].sum().item()
        tokens += batch["attention_mask"].sum().item()
        total += len(predictions)
    print(
        f"epoch {epoch}: {total} sentences, {positive} positive, {tokens} tokens, accuracy {100.0 * correct / total:.2f}%"
    )
