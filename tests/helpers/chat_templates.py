"""Ten chat templates in the manner of known models, each with a small tokenizer that knows the
template's control tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect_raybatch import demo


@dataclass(frozen=True)
class ChatFormat:
    """A chat template; `special` and `plain` are the tokens added for it, the latter not marked as
    special. `turns` are those of which each opens or closes a turn."""

    name: str
    template: str
    special: Sequence[str]
    plain: Sequence[str] = ()
    turns: Sequence[str] = ()

    def save(self, folder: Path) -> str:
        from tokenizers import AddedToken
        from transformers import PreTrainedTokenizerFast

        made: Any = PreTrainedTokenizerFast.from_pretrained(demo.demo_model_path())
        specials = [AddedToken(text, special=True, normalized=False) for text in self.special]
        made.add_tokens(specials, special_tokens=True)
        made.add_tokens([AddedToken(text, special=False, normalized=False) for text in self.plain])
        made.chat_template = self.template
        made.save_pretrained(folder)
        return str(folder)


def _each(body: str, end: str) -> str:
    return (
        "{%- for m in messages %}" + body + "{%- endfor %}"
        "{%- if add_generation_prompt %}" + end + "{%- endif %}"
    )


FORMATS = [
    ChatFormat(
        "ChatML",
        _each(
            "{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}",
            "{{- '<|im_start|>assistant\\n' }}",
        ),
        ["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
        turns=["<|im_start|>", "<|im_end|>"],
    ),
    ChatFormat(
        "Qwen3",
        _each(
            "{%- set content = m.content %}"
            "{%- if m.role == 'assistant' and '</think>' in content %}"
            "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
            "{{- '<|im_start|>' ~ m.role ~ '\\n' ~ content ~ '<|im_end|>\\n' }}",
            "{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and not "
            "enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}",
        ),
        ["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
        ["<think>", "</think>", "<tool_call>", "</tool_call>"],
        turns=["<|im_start|>", "<|im_end|>"],
    ),
    ChatFormat(
        "Llama 3",
        "{{- '<|begin_of_text|>' }}"
        + _each(
            "{{- '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\\n\\n' ~ m.content | trim "
            "~ '<|eot_id|>' }}",
            "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}",
        ),
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        turns=["<|start_header_id|>", "<|eot_id|>"],
    ),
    ChatFormat(
        "Llama 2",
        _each(
            "{%- if m.role == 'user' %}{{- '<s>[INST] ' ~ m.content | trim ~ ' [/INST]' }}"
            "{%- elif m.role == 'system' %}{{- '<<SYS>>' ~ m.content ~ '<</SYS>>' }}"
            "{%- else %}{{- ' ' ~ m.content | trim ~ ' </s>' }}{%- endif %}",
            "",
        ),
        ["<s>", "</s>"],
        turns=["<s>", "</s>"],
    ),
    ChatFormat(
        "Mistral",
        "{{- '<s>' }}"
        + _each(
            "{%- if m.role == 'user' %}{{- '[INST]' ~ m.content ~ '[/INST]' }}"
            "{%- else %}{{- m.content ~ '</s>' }}{%- endif %}",
            "",
        ),
        ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]"],
        turns=["[INST]", "[/INST]", "</s>"],
    ),
    ChatFormat(
        "Gemma",
        "{{- '<bos>' }}"
        + _each(
            "{{- '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\\n' "
            "~ m.content | trim ~ '<end_of_turn>\\n' }}",
            "{{- '<start_of_turn>model\\n' }}",
        ),
        ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
        ["<h1>", "</h1>", "<b>", "</b>", "  ", "\n\n"],
        turns=["<start_of_turn>", "<end_of_turn>"],
    ),
    ChatFormat(
        "Phi 3",
        _each(
            "{{- '<|' ~ m.role ~ '|>\\n' ~ m.content ~ '<|end|>\\n' }}",
            "{{- '<|assistant|>\\n' }}",
        ),
        ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
        turns=["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
    ),
    ChatFormat(
        "DeepSeek R1",
        "{{- '<｜begin▁of▁sentence｜>' }}"
        + _each(
            "{%- if m.role == 'user' %}{{- '<｜User｜>' ~ m.content }}"
            "{%- elif m.role == 'system' %}{{- m.content }}"
            "{%- else %}{{- '<｜Assistant｜>' ~ m.content.split('</think>')[-1] "
            "~ '<｜end▁of▁sentence｜>' }}{%- endif %}",
            "{{- '<｜Assistant｜><think>\\n' }}",
        ),
        ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"],
        ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"],
        turns=["<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"],
    ),
    ChatFormat(
        "Command R",
        "{{- '<BOS_TOKEN>' }}"
        + _each(
            "{{- '<|START_OF_TURN_TOKEN|><|' ~ m.role | upper ~ '_TOKEN|>' ~ m.content | trim "
            "~ '<|END_OF_TURN_TOKEN|>' }}",
            "{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}",
        ),
        [
            *("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
            *("<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|ASSISTANT_TOKEN|>"),
        ],
        turns=["<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>"],
    ),
    ChatFormat(
        "marks around the text",  # in which a row could complete what the template begins
        _each(
            "{{- '<|turn|>' ~ m.role ~ '<' ~ m.content | tojson ~ '|' ~ m.content ~ '>\\n' }}",
            "{{- '<|turn|>assistant' }}",
        ),
        ["<|turn|>", "<|end|>", '<"stop"|stop>'],
        turns=["<|turn|>", "<|end|>"],
    ),
]
