# gpu: 3GiB
# cause: switch() loads the next model while the attribute still has the one before it
# cure: del self.model and gc.collect() before the next one is loaded
# report: https://github.com/Sanster/IOPaint/pull/165 (merged: switching ran out of memory with 4 GB)
import torch
from diffusers import UNet2DConditionModel

CONFIGS = {"sd1.5": {"cross_attention_dim": 768}, "sd2": {"cross_attention_dim": 1024}}


class StableDiffusion:
    def __init__(self, name):
        self.width = CONFIGS[name]["cross_attention_dim"]
        torch.set_default_dtype(torch.float16)
        with torch.device("cuda"):
            self.unet = UNet2DConditionModel(sample_size=64, attention_head_dim=8, **CONFIGS[name]).eval()
        torch.set_default_dtype(torch.float32)

    @torch.no_grad()
    def __call__(self, steps=2):
        latents = torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.float16)
        text = torch.randn(2, 77, self.width, device="cuda", dtype=torch.float16)
        for step in range(steps):
            latents = latents - 0.1 * self.unet(latents, step, text).sample
        return latents.cpu()


class ModelManager:
    def __init__(self, name):
        self.name, self.model = name, StableDiffusion(name)

    def __call__(self):
        return self.model()

    def switch(self, name):
        self.model = StableDiffusion(name)
        self.name = name


manager = ModelManager("sd1.5")
for name in ("sd2", "sd1.5"):
    image = manager()
    print(manager.name, f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    manager.switch(name)
image = manager()
