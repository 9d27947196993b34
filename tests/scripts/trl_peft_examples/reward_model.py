"""A reward model with TRL's RewardTrainer on preference pairs."""

from _local import rng, sentence, tokenizer
from datasets import Dataset
from transformers import LlamaConfig, LlamaForSequenceClassification, set_seed
from trl import RewardConfig, RewardTrainer

set_seed(0)
random = rng(3)
tok = tokenizer(pairs=False)
model = LlamaForSequenceClassification(
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
        num_labels=1,
    )
)
train = Dataset.from_list([{"chosen": sentence(random, 3, 10), "rejected": sentence(random, 3, 10)} for _ in range(12)])
args = RewardConfig(
    "reward",
    max_steps=3,
    per_device_train_batch_size=4,
    report_to="none",
    logging_steps=1,
    disable_tqdm=True,
    bf16=False,
    gradient_checkpointing=False,
    save_strategy="no",
    max_length=32,
)
trainer = RewardTrainer(model=model, args=args, train_dataset=train, processing_class=tok)
result = trainer.train()
print("steps", result.global_step, f"loss {result.training_loss:.4f}")
