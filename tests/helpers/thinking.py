"""A small tokenizer with marks for thinking and tool calls, and a chat template in their manner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect_raybatch import demo

MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
# As Qwen3's: thinking of earlier turns is left out, tools and documents stand in front, a prompt
# without thinking ends with thinking that is over.
TEMPLATE = """\
{%- if tools or documents %}
{{- '<|im_start|>system\\n' }}
{%- for tool in tools or [] %}{{- tool | tojson ~ '\\n' }}{% endfor %}
{%- for one in documents or [] %}{{- one.title | default('untitled') ~ ': ' ~ one.text ~ '\\n' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content.split('</think>')[-1] }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' ~ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
{{- '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""


def save_tokenizer(folder: Path, template: str | None = TEMPLATE, special: bool = False) -> str:
    """The bundled model's tokenizer with the marks, as `special` tokens or as plain ones."""
    from transformers import PreTrainedTokenizerFast

    made: Any = PreTrainedTokenizerFast.from_pretrained(demo.demo_model_path())
    made.add_tokens(MARKS, special_tokens=special)
    made.chat_template = template
    made.save_pretrained(folder)
    return str(folder)


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def save_model(folder: Path) -> str:
    """The bundled model with that tokenizer: it never writes a mark unless told to."""
    import json

    import torch
    from safetensors.torch import load_file, save_file

    base = Path(demo.demo_model_path())
    save_tokenizer(folder)
    weights = load_file(base / "model.safetensors")
    name = "model.embed_tokens.weight"
    weights[name] = torch.cat([weights[name], torch.zeros(64, weights[name].shape[1]).bfloat16()])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    config["vocab_size"] += 64
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    said = (base / "generation_config.json").read_text(encoding="utf-8")
    (folder / "generation_config.json").write_text(said, encoding="utf-8")
    return str(folder)
