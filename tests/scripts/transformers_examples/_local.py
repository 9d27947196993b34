"""Local data and a word-level tokenizer for the scripts beside this file, in place of the hub."""

import json
import random

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

WORDS = "the a cat dog bird man woman child house tree car book runs sees eats reads finds likes big small red blue old new and or not very".split()
SPECIAL = ["<pad>", "<unk>", "<s>", "</s>", "<mask>", "<|user|>", "<|assistant|>"]


def tokenizer(pairs=True, side="right"):
    """A tokenizer of WORDS, with BERT-like special tokens if `pairs`."""
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(SPECIAL + WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    if pairs:
        backend.post_processor = TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 2), ("</s>", 3)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        mask_token="<mask>",
        model_max_length=128,
        padding_side=side,
    )


def sentence(rng, low=4, high=20):
    return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))


def write_json(path, rows):
    with open(path, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def rng(seed=0):
    return random.Random(seed)
