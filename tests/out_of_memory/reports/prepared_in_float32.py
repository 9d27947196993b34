# gpu: 5GiB
# cause: prepare_model_for_kbit_training casts all float16 weights of a model that is not quantized to float32
# cure: without prepare_model_for_kbit_training: gradient_checkpointing_enable() and enable_input_require_grads()
# report: https://github.com/huggingface/peft/issues/1149 (the line by the reporter, the cure by a maintainer)
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=22,
    num_attention_heads=32,
    num_key_value_heads=4,
    use_cache=False,
)
torch.set_default_dtype(torch.float16)
with torch.device("cuda"):
    model = LlamaForCausalLM(config)
torch.set_default_dtype(torch.float32)
model = prepare_model_for_kbit_training(model)
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"]))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
model.train()
for step in range(3):
    ids = torch.randint(32000, (2, 512), device="cuda")
    with torch.autocast("cuda", torch.float16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
