"""A tiny vision model with random weights, made without network: LLaVA, CLIP's tower before a Llama.

LLaVA because vLLM imports it, and transformers reads its images with Pillow, without torchvision:
of Qwen2-VL and its successors vLLM's own module imports torchvision.
"""

from __future__ import annotations

import json
from pathlib import Path

SIDE, PATCH = 56, 14
IMAGE_TOKENS = (SIDE // PATCH) ** 2
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_vision_model(folder: Path, context: int = 512) -> str:
    """The model's folder: weights, tokenizer, chat template and processor."""
    import torch
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    tokenizer = _tokenizer(folder)
    torch.manual_seed(7)
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=64,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=IMAGE_TOKENS,
        dtype="float32",
    )
    LlavaForConditionalGeneration(config).to(torch.float32).save_pretrained(folder)
    _processor(folder)
    return str(folder)


def _tokenizer(folder: Path):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>"]
    bpe.train_from_iterator(
        [Path(__file__).read_text(encoding="utf-8")],
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=[AddedToken(text, special=True) for text in special],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def _processor(folder: Path) -> None:
    side = {"height": SIDE, "width": SIDE}
    images = {
        "image_processor_type": "CLIPImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": SIDE},
        "do_center_crop": True,
        "crop_size": side,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_convert_rgb": True,
        "resample": 3,
    }
    processor = {
        "processor_class": "LlavaProcessor",
        "image_token": "<image>",
        "patch_size": PATCH,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(images), encoding="utf-8")
    (folder / "processor_config.json").write_text(json.dumps(processor), encoding="utf-8")
