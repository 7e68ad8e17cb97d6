"""Models of a few thousand random weights, written as Hugging Face has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WORDS = "the quick brown fox jumps over a lazy dog and sees how great law firms are in town"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # far from each other, so that a wrong answer shows
}


def write_tokenizer(folder: Path) -> Any:
    """Words, with [CLS] and [SEP] about a text or a pair, and types of tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS.split()])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        model_max_length=SMALL["max_position_embeddings"],
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def bert(folder: Path) -> Any:
    """One that embeds, and what transformers has of it."""
    from transformers import BertConfig, BertModel

    return _saved(folder, BertModel, BertConfig(**SMALL))


def bert_classifier(folder: Path, labels: list[str]) -> Any:
    """One that gives a text, or a pair, one of the labels; with one label it scores."""
    from transformers import BertConfig, BertForSequenceClassification

    names = dict(enumerate(labels))
    config = BertConfig(**SMALL, id2label=names, label2id={n: i for i, n in names.items()})
    return _saved(folder, BertForSequenceClassification, config)


def _saved(folder: Path, kind: Any, config: Any) -> Any:
    import torch

    write_tokenizer(folder)
    torch.manual_seed(0)
    model = kind(config).float().eval()
    model.save_pretrained(folder)
    return model


def lora(folder: Path, base: str, config: dict[str, Any], seed: int = 1, rank: int = 4) -> Path:
    """A random LoRA adapter of every q_proj and down_proj of a Llama, as peft writes it."""
    import json

    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    made = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    width = heads * (config.get("head_dim") or hidden // heads)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        shapes = {"self_attn.q_proj": (hidden, width), "mlp.down_proj": (inner, hidden)}
        for module, (into, out) in shapes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            for side, shape in (("lora_A", (rank, into)), ("lora_B", (out, rank))):
                tensors[f"{name}.{side}.weight"] = torch.randn(shape, generator=made) * 0.2
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "down_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(said), encoding="utf-8")
    return folder
