"""Supervised fine-tuning with TRL's SFTTrainer on prompt-completion pairs."""

from _local import rng, sentence, tokenizer
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

set_seed(0)
random = rng(0)
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
train = Dataset.from_list(
    [{"prompt": sentence(random, 3, 8) + " ", "completion": sentence(random, 3, 10)} for _ in range(16)]
)
args = SFTConfig(
    "sft",
    max_steps=3,
    per_device_train_batch_size=4,
    max_length=32,
    report_to="none",
    logging_steps=1,
    disable_tqdm=True,
    bf16=False,
    gradient_checkpointing=False,
    save_strategy="no",
)
trainer = SFTTrainer(
    model=model, args=args, train_dataset=train, eval_dataset=train.select(range(4)), processing_class=tok
)
result = trainer.train()
metrics = trainer.evaluate()
print("steps", result.global_step, f"loss {result.training_loss:.4f} eval {metrics['eval_loss']:.4f}")
trainer.save_model("sft/final")
