"""Vision models without weights at the dimensions of published ones: config, tokenizer, processor.

`tiny` cuts the dimensions down, for a dry run on a CPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu import make_tokenizer

CONTEXT = 32768
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAMILIES = ("qwen2.5-vl-3b", "idefics3-2b")
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def make_model(family: str, root: Path, tiny: bool) -> str:
    """The model's folder, made once."""
    folder = root / f"{family}{'-tiny' if tiny else ''}"
    if not (folder / "ready").exists():
        folder.mkdir(parents=True, exist_ok=True)
        {"qwen2.5-vl-3b": _qwen, "idefics3-2b": _idefics}[family](folder, tiny)
        (folder / "ready").touch()
    return str(folder)


def trouble(family: str) -> str:
    """Why vLLM here cannot run the family; empty if it can."""
    if family != "qwen2.5-vl-3b":
        return ""
    done = subprocess.run(
        [sys.executable, "-c", "import torchvision"], capture_output=True, text=True, check=False
    )
    if not done.returncode:
        return ""
    said = done.stderr.strip().splitlines()[-1]
    return (
        f"{family} needs a torchvision that fits the installed torch ({said}); install it, or "
        "take --family idefics3-2b"
    )


def _qwen(folder: Path, tiny: bool) -> None:
    """Qwen2.5-VL-3B-Instruct."""
    from transformers import Qwen2_5_VLConfig

    marks = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    template = TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    tokenizer = _tokenizer(folder, template, list(marks), tiny)
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(marks))
    text: dict[str, Any] = {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [16, 24, 24],
        },
    }
    vision: dict[str, Any] = {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
    }
    if tiny:
        text |= SMALL | {"vocab_size": len(tokenizer)}
        text["rope_parameters"]["mrope_section"] = [4, 6, 6]
        vision |= {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2}
        vision |= {"out_hidden_size": 64, "fullatt_block_indexes": [1]}
    config = Qwen2_5_VLConfig(
        text_config={**text, **_ends(tokenizer)},
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
        dtype="float32" if tiny else "bfloat16",
        **_ends(tokenizer),
    )
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    config.save_pretrained(folder)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def _idefics(folder: Path, tiny: bool) -> None:
    """SmolVLM-Instruct (2.2B), which is an Idefics3; needs no torchvision."""
    from transformers import Idefics3Config

    marks = ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
    marks += [f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)]
    tokenizer = _tokenizer(folder, TEMPLATE.replace("IMAGE", "<image>"), marks, tiny)
    text: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 49280,
        "max_position_embeddings": CONTEXT,
    }
    vision: dict[str, Any] = {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 384,
        "patch_size": 14,
    }
    side, patch, scale = 384, 14, 3
    if tiny:
        text |= SMALL | {"num_key_value_heads": 2, "vocab_size": len(tokenizer)}
        side, scale = 56, 2
        vision |= SMALL | {"image_size": side}
    config = Idefics3Config(
        text_config={**text, **_ends(tokenizer)},
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=scale,
        tie_word_embeddings=False,
        dtype="float32" if tiny else "bfloat16",
        **_ends(tokenizer),
    )
    config.architectures = ["Idefics3ForConditionalGeneration"]
    config.save_pretrained(folder)
    images = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": True,
        "size": {"longest_edge": 4 * side},
        "max_image_size": {"longest_edge": side},
        "rescale_factor": 1 / 255,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 1,
        **{f"do_{step}": True for step in ("convert_rgb", "resize", "rescale", "normalize", "pad")},
    }
    length = (side // patch // scale) ** 2
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": length}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    (folder / "processor_config.json").write_text(json.dumps(processor))


def _tokenizer(folder: Path, template: str, marks: list[str], tiny: bool) -> Any:
    made = make_tokenizer(template, [*SPECIAL, *marks], 1000 if tiny else 32000)
    made.save_pretrained(folder)
    return made


def _ends(tokenizer: Any) -> dict[str, int]:
    return {
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
