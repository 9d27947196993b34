"""LoRA, IA3 and prompt tuning with peft in a plain loop; adapters saved, loaded and switched."""

import torch
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
base_config = GPT2Config(vocab_size=120, n_positions=64, n_embd=64, n_layer=2, n_head=4)
for name, config in (
    ("lora", LoraConfig(r=8, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)),
    (
        "ia3",
        IA3Config(
            target_modules=["c_attn", "c_proj"],
            feedforward_modules=["c_proj"],
            task_type="CAUSAL_LM",
            fan_in_fan_out=True,
        ),
    ),
    ("prompt", PromptTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM")),
):
    model = get_peft_model(GPT2LMHeadModel(base_config), config).to(device)
    trainable, total = model.get_nb_trainable_parameters()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    for _ in range(2):
        ids = torch.randint(0, 120, (4, 24), device=device)
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(f"adapter_{name}")
    print(f"{name}: {trainable} of {total} train, loss {loss.item():.4f}")
model = PeftModel.from_pretrained(GPT2LMHeadModel(base_config), "adapter_lora", adapter_name="first").to(device)
model.load_adapter("adapter_lora", adapter_name="second")
model.set_adapter("second")
with torch.no_grad(), model.disable_adapter():
    print(tuple(model(input_ids=torch.randint(0, 120, (1, 5), device=device)).logits.shape), model.active_adapter)
