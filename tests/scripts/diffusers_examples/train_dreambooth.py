"""DreamBooth with prior preservation as train_dreambooth.py: text encoder trains too, instance and class images are chunked."""

import itertools

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
vae = AutoencoderKL(
    block_out_channels=(16, 32),
    down_block_types=("DownEncoderBlock2D",) * 2,
    up_block_types=("UpDecoderBlock2D",) * 2,
    latent_channels=4,
    norm_num_groups=8,
)
vae.requires_grad_(False)
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
optimizer = torch.optim.AdamW(itertools.chain(unet.parameters(), text_encoder.parameters()), lr=5e-6)
noise_scheduler = DDPMScheduler(num_train_timesteps=100)


def collate_fn(examples):
    ids = [e["instance_ids"] for e in examples] + [e["class_ids"] for e in examples]
    pixels = [e["instance"] for e in examples] + [e["class"] for e in examples]
    return {"input_ids": torch.stack(ids), "pixel_values": torch.stack(pixels)}


examples = [
    {
        "instance": torch.rand(3, 32, 32),
        "class": torch.rand(3, 32, 32),
        "instance_ids": torch.randint(3, 100, (16,)),
        "class_ids": torch.randint(3, 100, (16,)),
    }
    for _ in range(8)
]
loader = torch.utils.data.DataLoader(examples, batch_size=1, shuffle=True, collate_fn=collate_fn)
unet, text_encoder, optimizer, loader = accelerator.prepare(unet, text_encoder, optimizer, loader)
vae.to(accelerator.device)
updates = 0
for batch in loader:
    with accelerator.accumulate(unet):
        latents = vae.encode(batch["pixel_values"]).latent_dist.sample() * vae.config.scaling_factor
        noise = torch.randn_like(latents)
        timesteps = torch.randint(
            0, noise_scheduler.config.num_train_timesteps, (latents.shape[0],), device=latents.device
        ).long()
        model_pred = unet(
            noise_scheduler.add_noise(latents, noise, timesteps), timesteps, text_encoder(batch["input_ids"])[0]
        ).sample
        model_pred, model_pred_prior = torch.chunk(model_pred, 2, dim=0)
        target, target_prior = torch.chunk(noise, 2, dim=0)
        loss = F.mse_loss(model_pred.float(), target.float()) + F.mse_loss(
            model_pred_prior.float(), target_prior.float()
        )
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(itertools.chain(unet.parameters(), text_encoder.parameters()), 1.0)
            updates += 1
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    print(f"update {updates} loss {loss.detach().item():.4f} chunk {tuple(model_pred.shape)}")
accelerator.save_state("checkpoint")
