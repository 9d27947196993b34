"""sentence-transformers: a tiny BERT with mean pooling, MultipleNegativesRankingLoss, encoding and similarity search."""

import os
import random

import torch
from sentence_transformers import SentenceTransformer, models, util
from sentence_transformers.losses import MultipleNegativesRankingLoss
from transformers import BertConfig, BertModel, BertTokenizerFast

random.seed(0)
torch.manual_seed(0)
words = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *"the a cat dog bird runs eats reads big small house tree car and".split(),
]
os.makedirs("bert")
with open("bert/vocab.txt", "w") as file:
    file.write("\n".join(words))
BertTokenizerFast(vocab_file="bert/vocab.txt").save_pretrained("bert")
BertModel(
    BertConfig(
        vocab_size=len(words),
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=64,
    )
).save_pretrained("bert")
transformer = models.Transformer("bert", max_seq_length=32)
model = SentenceTransformer(
    modules=[transformer, models.Pooling(transformer.get_word_embedding_dimension(), "mean")],
    device="cuda" if torch.cuda.is_available() else "cpu",
)
sentences = [" ".join(random.choices(words[5:], k=random.randint(3, 9))) for _ in range(24)]
loss_function = MultipleNegativesRankingLoss(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for i in range(0, 24, 8):
    features = [
        {k: v.to(model.device) for k, v in model.tokenize(part).items() if isinstance(v, torch.Tensor)}
        for part in (sentences[i : i + 8], sentences[i : i + 8][::-1])
    ]
    loss = loss_function(features, None)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"batch {i // 8} loss {loss.item():.4f}")
embeddings = model.encode(sentences, batch_size=8, convert_to_tensor=True, show_progress_bar=False)
scores = util.cos_sim(embeddings[:3], embeddings)
hits = util.semantic_search(embeddings[:3], embeddings, top_k=4)
print("embeddings", tuple(embeddings.shape), "scores", tuple(scores.shape), "hits", [len(h) for h in hits])
print("numpy", model.encode(sentences[:2], show_progress_bar=False).shape)
