"""LoRA on eight layers of Llama-7B's size in bfloat16, one sequence of 1024 tokens: does it fit a T4?"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
config = LlamaConfig(num_hidden_layers=8, vocab_size=32000, use_cache=False)
model = LlamaForCausalLM(config).to(torch.bfloat16)
model = get_peft_model(
    model, LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
).to(device)
model.gradient_checkpointing_enable()
model.enable_input_require_grads()
model.print_trainable_parameters()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
for step in range(2):
    ids = torch.randint(0, 32000, (1, 1024), device=device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.3f}")
