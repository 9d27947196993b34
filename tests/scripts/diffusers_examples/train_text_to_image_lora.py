"""Text-to-image LoRA as train_text_to_image_lora.py: frozen VAE and text encoder, LoRA on the U-Net's attention, SNR weighting."""

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from diffusers.training_utils import cast_training_params, compute_snr
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from transformers import CLIPTextConfig, CLIPTextModel

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
weight_dtype = torch.float16 if device.type == "cuda" else torch.float32
vae = AutoencoderKL(
    block_out_channels=(16, 32),
    down_block_types=("DownEncoderBlock2D",) * 2,
    up_block_types=("UpDecoderBlock2D",) * 2,
    latent_channels=4,
    norm_num_groups=8,
)
text_encoder = CLIPTextModel(
    CLIPTextConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
)
unet = UNet2DConditionModel(
    sample_size=16,
    in_channels=4,
    out_channels=4,
    layers_per_block=1,
    block_out_channels=(16, 32),
    norm_num_groups=8,
    cross_attention_dim=32,
    attention_head_dim=8,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
)
for module in (vae, text_encoder, unet):
    module.requires_grad_(False)
    module.to(device, dtype=weight_dtype)
unet.add_adapter(
    LoraConfig(r=4, lora_alpha=4, init_lora_weights="gaussian", target_modules=["to_k", "to_q", "to_v", "to_out.0"])
)
if weight_dtype == torch.float16:
    cast_training_params(unet, dtype=torch.float32)
unet.enable_gradient_checkpointing()
lora_layers = [p for p in unet.parameters() if p.requires_grad]
print(len(lora_layers), "LoRA tensors of", sum(p.numel() for p in lora_layers), "elements")
optimizer = torch.optim.AdamW(lora_layers, lr=1e-4)
scaler = torch.amp.GradScaler(device.type, enabled=weight_dtype == torch.float16)
noise_scheduler = DDPMScheduler(num_train_timesteps=100)
generator = torch.Generator().manual_seed(0)
for step in range(3):
    pixel_values = torch.rand(2, 3, 32, 32, generator=generator).to(device, dtype=weight_dtype) * 2 - 1
    input_ids = torch.randint(3, 100, (2, 16), generator=generator).to(device)
    latents = vae.encode(pixel_values).latent_dist.sample() * vae.config.scaling_factor
    noise = torch.randn_like(latents)
    timesteps = torch.randint(0, 100, (2,), generator=generator).to(device)
    noisy_latents = noise_scheduler.add_noise(latents, noise, timesteps)
    with torch.autocast(device.type, dtype=weight_dtype, enabled=device.type == "cuda"):
        encoder_hidden_states = text_encoder(input_ids, return_dict=False)[0]
        model_pred = unet(noisy_latents, timesteps, encoder_hidden_states, return_dict=False)[0]
    snr = compute_snr(noise_scheduler, timesteps)
    weights = torch.stack([snr, 5.0 * torch.ones_like(timesteps)], dim=1).min(dim=1)[0] / snr
    loss = F.mse_loss(model_pred.float(), noise.float(), reduction="none")
    loss = (loss.mean(dim=list(range(1, len(loss.shape)))) * weights).mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(lora_layers, 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(f"step {step} latents {tuple(latents.shape)} loss {loss.item():.4f}")
state = get_peft_model_state_dict(unet)
torch.save(state, "lora.pt")
print(len(state), "tensors saved")
