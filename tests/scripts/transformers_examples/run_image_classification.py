"""Image classification with Trainer on an image folder, as run_image_classification.py; tiny ViT, torchvision transforms."""

import os

import numpy as np
import torch
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, Normalize, RandomHorizontalFlip, RandomResizedCrop, ToTensor
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

set_seed(7)
rng = np.random.default_rng(0)
for label in ("cat", "dog", "owl"):
    os.makedirs(f"images/{label}")
    for i in range(10):
        Image.fromarray(rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(f"images/{label}/{i}.png")
dataset = ImageFolder(
    "images", Compose([RandomResizedCrop(32), RandomHorizontalFlip(), ToTensor(), Normalize([0.5] * 3, [0.5] * 3)])
)
train_set, eval_set = torch.utils.data.random_split(dataset, [24, 6], generator=torch.Generator().manual_seed(0))


def collate_fn(examples):
    return {"pixel_values": torch.stack([e[0] for e in examples]), "labels": torch.tensor([e[1] for e in examples])}


labels = dataset.classes
config = ViTConfig(
    image_size=32,
    patch_size=8,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    num_labels=len(labels),
    id2label=dict(enumerate(labels)),
    label2id={name: i for i, name in enumerate(labels)},
)
model = ViTForImageClassification(config)


def compute_metrics(p):
    return {
        "accuracy": float((np.argmax(p.predictions, axis=1) == p.label_ids).mean()),
        "count": int(p.label_ids.shape[0]),
        "sum": int(p.label_ids.sum()),
    }


args = TrainingArguments(
    "vit",
    num_train_epochs=2,
    per_device_train_batch_size=8,
    per_device_eval_batch_size=4,
    remove_unused_columns=False,
    report_to="none",
    eval_strategy="epoch",
    save_strategy="epoch",
    save_total_limit=1,
    dataloader_num_workers=2,
    disable_tqdm=True,
    logging_steps=3,
    gradient_checkpointing=True,
)
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=train_set,
    eval_dataset=eval_set,
    compute_metrics=compute_metrics,
    data_collator=collate_fn,
)
trainer.train()
trainer.save_model()
metrics = trainer.evaluate()
print(f"accuracy {metrics['eval_accuracy']:.3f} of {metrics['eval_count']} images, sum of labels {metrics['eval_sum']}")
