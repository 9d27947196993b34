"""SFT with LoRA, packing and gradient checkpointing; the adapter is saved and merged."""

import os

from _local import rng, sentence, tokenizer
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

set_seed(0)
random = rng(1)
tok = tokenizer(pairs=False)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(tok),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
    )
)
train = Dataset.from_list([{"text": sentence(random, 5, 12)} for _ in range(40)])
args = SFTConfig(
    "lora",
    max_steps=3,
    per_device_train_batch_size=2,
    max_length=48,
    packing=True,
    packing_strategy="wrapped",
    report_to="none",
    logging_steps=1,
    disable_tqdm=True,
    bf16=False,
    gradient_checkpointing=True,
    save_strategy="no",
)
trainer = SFTTrainer(
    model=model,
    args=args,
    train_dataset=train,
    processing_class=tok,
    peft_config=LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    ),
)
trainer.model.print_trainable_parameters()
print("packed into", len(trainer.train_dataset), "sequences")
trainer.train()
trainer.save_model("adapter")
print(sorted(name for name in os.listdir("adapter") if name.startswith("adapter")))
merged = trainer.model.merge_and_unload()
print(type(merged).__name__, sum(p.numel() for p in merged.parameters()))
