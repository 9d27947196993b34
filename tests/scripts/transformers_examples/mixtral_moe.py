"""Mixtral: routing to experts with the auxiliary loss, and Switch Transformers, both tiny."""

import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
mixtral = MixtralForCausalLM(
    MixtralConfig(
        vocab_size=100,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
    )
).to(device)
optimizer = torch.optim.AdamW(mixtral.parameters(), lr=1e-3)
for step in range(2):
    ids = torch.randint(0, 100, (2, 24), device=device)
    out = mixtral(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(
        f"mixtral step {step} loss {out.loss.item():.4f} aux {out.aux_loss.item():.4f} routers {len(out.router_logits)} {tuple(out.router_logits[0].shape)}"
    )
switch = SwitchTransformersForConditionalGeneration(
    SwitchTransformersConfig(
        vocab_size=100,
        d_model=48,
        d_kv=12,
        d_ff=96,
        num_layers=2,
        num_sparse_encoder_layers=1,
        num_decoder_layers=2,
        num_sparse_decoder_layers=1,
        num_heads=4,
        num_experts=4,
        expert_capacity=16,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
).to(device)
optimizer = torch.optim.Adafactor(switch.parameters(), lr=1e-3)
for step in range(2):
    ids = torch.randint(1, 100, (2, 12), device=device)
    loss = switch(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"switch step {step} loss {loss.item():.4f}")
