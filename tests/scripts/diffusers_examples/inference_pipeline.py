"""Stable-Diffusion-like inference from tiny local parts: classifier-free guidance by hand, DDIM and Euler schedulers, VAE decoding."""

import torch
from diffusers import AutoencoderKL, DDIMScheduler, EulerDiscreteScheduler, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.float32
vae = AutoencoderKL(
    block_out_channels=(16, 32),
    down_block_types=("DownEncoderBlock2D",) * 2,
    up_block_types=("UpDecoderBlock2D",) * 2,
    latent_channels=4,
    norm_num_groups=8,
).to(device, dtype)
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
).to(device, dtype)
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
).to(device, dtype)
prompt, negative = torch.randint(3, 100, (1, 16)), torch.zeros(1, 16, dtype=torch.long)
for scheduler in (DDIMScheduler(num_train_timesteps=100), EulerDiscreteScheduler(num_train_timesteps=100)):
    scheduler.set_timesteps(6, device=device)
    with torch.no_grad():
        embeddings = text_encoder(torch.cat([negative, prompt]).to(device))[0]
        latents = (
            torch.randn((1, 4, 16, 16), generator=torch.Generator().manual_seed(1)).to(device, dtype)
            * scheduler.init_noise_sigma
        )
        steps = 0
        for t in scheduler.timesteps:
            latent_model_input = scheduler.scale_model_input(torch.cat([latents] * 2), t)
            noise_pred = unet(latent_model_input, t, encoder_hidden_states=embeddings).sample
            uncond, text = noise_pred.chunk(2)
            latents = scheduler.step(uncond + 7.5 * (text - uncond), t, latents).prev_sample
            steps += 1
        image = vae.decode(latents / vae.config.scaling_factor).sample
        image = (image / 2 + 0.5).clamp(0, 1).cpu().permute(0, 2, 3, 1).float().numpy()
    print(type(scheduler).__name__, steps, "steps", image.shape, (image[0] * 255).round().astype("uint8").dtype)
