"""A tiny vision model with random weights, made without network: Idefics3, SigLIP before a Llama.

vLLM 0.29 imports it, and transformers reads its images with Pillow, without torchvision. Qwen2-VL,
Qwen2.5-VL and LLaVA need torchvision there: vLLM's modules of these import it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SIDE, PATCH, SCALE = 56, 14, 2
IMAGE_TOKENS = (SIDE // PATCH // SCALE) ** 2
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<image>",
    "<fake_token_around_image>",
    "<end_of_utterance>",
    "<global-img>",
    *(f"<row_{row}_col_{col}>" for row in (1, 2) for col in (1, 2)),
]
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
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(folder)
    end = tokenizer.eos_token_id
    torch.manual_seed(7)
    small = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = Idefics3Config(
        vision_config={**small, "image_size": SIDE, "patch_size": PATCH},
        text_config={
            **small,
            "model_type": "llama",
            "num_key_value_heads": 2,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": context,
            "bos_token_id": end,
            "eos_token_id": end,
            "pad_token_id": end,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=SCALE,
        pad_token_id=end,
        tie_word_embeddings=False,
        dtype="float32",
    )
    Idefics3ForConditionalGeneration(config).to(torch.float32).save_pretrained(folder)
    _processor(folder)
    return str(folder)


def _tokenizer(folder: Path) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        [Path(__file__).read_text(encoding="utf-8")],
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=[AddedToken(text, special=True) for text in SPECIAL],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    end = "<|endoftext|>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=end, pad_token=end)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def _processor(folder: Path) -> None:
    images = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"longest_edge": 2 * SIDE},
        "max_image_size": {"longest_edge": SIDE},
        "do_image_splitting": True,  # without, this transformers counts no patches
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_pad": True,
        "resample": 1,
    }
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": IMAGE_TOKENS}
    (folder / "preprocessor_config.json").write_text(json.dumps(images), encoding="utf-8")
    (folder / "processor_config.json").write_text(json.dumps(processor), encoding="utf-8")
