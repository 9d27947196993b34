"""Translation with MarianMT in an Accelerate loop, as run_translation_no_trainer.py: pad_across_processes and generate."""

import numpy as np
import torch
from _local import rng, sentence, tokenizer
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import DataCollatorForSeq2Seq, MarianConfig, MarianMTModel, get_scheduler, set_seed

set_seed(6)
random = rng(6)
accelerator = Accelerator()
tok = tokenizer()
config = MarianConfig(
    vocab_size=len(tok),
    d_model=64,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=128,
    decoder_ffn_dim=128,
    max_position_embeddings=64,
    pad_token_id=0,
    eos_token_id=3,
    decoder_start_token_id=0,
    forced_eos_token_id=None,
)
model = MarianMTModel(config)
rows = []
for _ in range(30):
    item = tok(sentence(random))
    rows.append(
        {
            "input_ids": item["input_ids"],
            "attention_mask": item["attention_mask"],
            "labels": tok(sentence(random))["input_ids"],
        }
    )
collator = DataCollatorForSeq2Seq(tok, model=model, label_pad_token_id=-100)
train_loader = DataLoader(rows[:20], shuffle=True, collate_fn=collator, batch_size=5)
eval_loader = DataLoader(rows[20:], collate_fn=collator, batch_size=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=8)
model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
    model, optimizer, train_loader, eval_loader, scheduler
)
for epoch in range(2):
    model.train()
    for batch in train_loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()
    sizes, words = [], 0
    for batch in eval_loader:
        with torch.no_grad():
            generated = accelerator.unwrap_model(model).generate(
                batch["input_ids"], attention_mask=batch["attention_mask"], max_length=16, num_beams=1
            )
            generated = accelerator.pad_across_processes(generated, dim=1, pad_index=tok.pad_token_id)
            labels = accelerator.pad_across_processes(batch["labels"], dim=1, pad_index=-100)
            generated = accelerator.gather(generated).cpu().numpy()
            labels = accelerator.gather(labels).cpu().numpy()
            labels = np.where(labels != -100, labels, tok.pad_token_id)
            decoded = tok.batch_decode(generated, skip_special_tokens=True)
            words += sum(len(text.split()) for text in tok.batch_decode(labels, skip_special_tokens=True))
            sizes.append(len(decoded))
    print(f"epoch {epoch} loss {loss.item():.4f} decoded {sizes} words in references {words}")
