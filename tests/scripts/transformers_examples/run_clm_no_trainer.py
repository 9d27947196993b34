"""Causal language modelling with Accelerate's loop, as run_clm_no_trainer.py: accumulation, gather_for_metrics, saved state."""

import math
import os

import torch
from _local import rng, sentence, tokenizer, write_json
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, default_data_collator, get_scheduler

random = rng()
write_json("train.json", [{"text": sentence(random)} for _ in range(50)])
write_json("valid.json", [{"text": sentence(random)} for _ in range(21)])
accelerator = Accelerator(gradient_accumulation_steps=2)
set_seed(0)
raw = load_dataset("json", data_files={"train": "train.json", "validation": "valid.json"})
tok = tokenizer(pairs=False)
config = LlamaConfig(
    vocab_size=len(tok),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = AutoModelForCausalLM.from_config(config)


def encode(examples):
    out = tok(examples["text"], padding="max_length", truncation=True, max_length=24)
    out["labels"] = [
        [t if m else -100 for t, m in zip(ids, mask)] for ids, mask in zip(out["input_ids"], out["attention_mask"])
    ]
    out.pop("token_type_ids", None)
    return out


lm = raw.map(encode, batched=True, remove_columns=["text"])
train_dataloader = DataLoader(lm["train"], shuffle=True, collate_fn=default_data_collator, batch_size=4)
eval_dataloader = DataLoader(lm["validation"], collate_fn=default_data_collator, batch_size=8)
no_decay = ["bias", "layernorm.weight"]
groups = [
    {"params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)], "weight_decay": 0.1},
    {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=5e-4)
lr_scheduler = get_scheduler("linear", optimizer=optimizer, num_warmup_steps=0, num_training_steps=14)
model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
)
completed_steps = 0
for epoch in range(2):
    model.train()
    total_loss = 0
    for step, batch in enumerate(train_dataloader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            total_loss += loss.detach().float()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            completed_steps += 1
    model.eval()
    losses = []
    for batch in eval_dataloader:
        with torch.no_grad():
            outputs = model(**batch)
        losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(8)))
    losses = torch.cat(losses)
    eval_loss = torch.mean(losses)
    try:
        perplexity = math.exp(eval_loss)
    except OverflowError:
        perplexity = float("inf")
    accelerator.print(f"epoch {epoch}: {len(losses)} losses, perplexity: {perplexity:.3f} eval_loss: {eval_loss:.4f}")
    accelerator.save_state(f"epoch_{epoch}")
accelerator.wait_for_everyone()
accelerator.load_state("epoch_0")
accelerator.unwrap_model(model).save_pretrained("final", save_function=accelerator.save)
print("optimizer steps", completed_steps, sorted(os.listdir("final")))
