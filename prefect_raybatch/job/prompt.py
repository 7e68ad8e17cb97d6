"""How a row becomes a request to the model: `prompt` of a job file."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator, model_validator

from prefect_raybatch.job import chat
from prefect_raybatch.job.checks import check_function, run_checks, template_fields
from prefect_raybatch.job.group import Group, field, field_check
from prefect_raybatch.job.images import Images
from prefect_raybatch.job.own_code.loading import name_of_function

# Fields of the prompt that do not go with images: vLLM's image processing does not get them.
WITHOUT_IMAGES = (
    *("chat_template", "chat_template_kwargs", "prefill", "continue_final_message"),
    *("tools", "documents"),
)


class Prompt(Group):
    """How a row becomes a request: a template, a Python function or a column of conversations."""

    template: str | None = field(
        None,
        title="User message",
        text="Text of the user message; {Column} is replaced by the row's value. "
        "Write {{ and }} for literal braces.",
    )
    system: str | None = field(
        None,
        title="System message",
        text="Text that is sent before the user message, unchanged: columns are not filled in.",
    )
    function: str | None = field(
        None,
        title="Prompt function",
        text="Python function that builds the prompt in place of a template, as "
        "package.module:function or file.py:function. It takes the row (a dict) and returns the "
        "user message, a list of chat messages, or {'messages': [...], 'sampling': {...}}.",
    )
    on_null: Literal["fail", "empty"] = field(
        "fail",
        title="Null in a template column",
        text="What to do with a row in which a template column is null or NaN. fail: "
        "quarantine the row. empty: insert an empty text.",
    )
    on_too_long: Literal["quarantine", "truncate_left", "truncate_right"] = field(
        "quarantine",
        title="Prompt exceeds the context",
        text="What to do with a prompt that is too long. quarantine: the row fails "
        "(PromptTooLong). truncate_left, truncate_right: cut the start or the end of the last "
        "user message until max_tokens fit.",
    )
    messages: str | None = field(
        None,
        title="Conversation column",
        text="Column with a complete conversation per row, in place of a template: a "
        "list of {role, content, ...}, or such a list as JSON text. The last message must not be "
        "the assistant's.",
    )
    chat_template: str | None = field(
        None,
        title="Chat template",
        text="Jinja template that replaces the model's chat template: a local or "
        "s3:// file, or the template text. A file is read once, when the run is planned.",
    )
    chat_template_kwargs: dict[str, Any] = field(
        {},
        title="Chat template arguments",
        text="Extra variables for the chat template. Example: {enable_thinking: false}.",
    )
    prefill: str | None = field(
        None,
        title="Answer prefix",
        text="Text that every answer continues. The answer column contains only the continuation.",
        min_length=1,
    )
    continue_final_message: bool = field(
        False,
        title="Continue the last message",
        text="Let the model continue the last message of the conversation, which must "
        "be the assistant's. The answer column contains only the continuation.",
    )
    tools: list[dict[str, Any]] | None = field(
        None,
        title="Tools",
        text="Tool definitions for the chat template, each {type: function, function: "
        "{name, description, parameters}}.",
    )
    documents: str | None = field(
        None,
        title="Documents column",
        text="Column with documents for a chat template that supports them: a list of "
        "{title, text} or of texts, or such a list as JSON text.",
    )
    second: str | None = field(
        None,
        title="Second text",
        text="Text that is compared with the template, for engine.task: score. "
        "{Column} is replaced by the row's value.",
    )
    adapter_column: str | None = field(
        None,
        title="Adapter column",
        text="Column that names the LoRA adapter of each row, one of engine.adapters. "
        "A null uses the base model if on_null is empty; otherwise the row fails.",
    )

    special_tokens_in_rows: Literal["split", "refuse", "allow"] = field(
        "split",
        title="Control tokens in rows",
        text="What to do with text in a row that the tokenizer would read as a "
        "control token, such as the end of a turn. split: treat it as plain text. refuse: the "
        "row fails (ControlTokenInRow). allow: keep the control token, so that a row can open a "
        "new turn.",
    )

    images: Images = field(
        Images(), title="Images", text="Images that accompany the text. Default: none."
    )

    @field_validator("template", "second")
    @classmethod
    def _template(cls, value: str | None) -> str | None:
        if value is not None:
            template_fields(value)
        return value

    _callable = field_check("function", by=name_of_function, mode="before")

    _function = field_check("function", by=check_function)

    @field_validator("messages", "documents", "chat_template")
    @classmethod
    def _named(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("is empty; set it, or remove it")
        return value

    _template_arguments = field_check("chat_template_kwargs", by=chat.check_template_arguments)

    _tools = field_check("tools", by=chat.check_tools)

    @model_validator(mode="after")
    def _combined(self) -> Prompt:
        run_checks((_check_form, _check_without_images, _check_with_images), self)
        return self

    @property
    def columns(self) -> dict[str, str]:
        """The input columns that the prompt names, as {column: job field that names it}.

        Image columns are not included. Columns that `prompt.function` reads are not included
        either, because they are unknown.
        """
        named = dict.fromkeys(template_fields(self.template or ""), "prompt.template")
        for name in template_fields(self.second or ""):
            named.setdefault(name, "prompt.second")
        if self.messages is not None:
            named[self.messages] = "prompt.messages"
        if self.documents is not None:
            named[self.documents] = "prompt.documents"
        if self.adapter_column is not None:
            named.setdefault(self.adapter_column, "prompt.adapter_column")
        return named


def _check_form(prompt: Prompt) -> None:
    """Raise ValueError unless exactly one of template, function and messages is set.

    Raises it as well if continue_final_message is combined with a template or a prefill.
    """
    if [prompt.template, prompt.function, prompt.messages].count(None) != 2:
        raise ValueError("set exactly one of template, function and messages")
    if prompt.continue_final_message and prompt.template is not None:
        raise ValueError(
            "continue_final_message does not apply to a template, which creates no assistant "
            "message; set prefill instead"
        )
    if prompt.continue_final_message and prompt.prefill is not None:
        raise ValueError(
            "prefill and continue_final_message exclude each other; remove one of them"
        )


def _check_without_images(prompt: Prompt) -> None:
    """Raise ValueError if a prompt that uses no images has other settings in `images`."""
    if not prompt.images.used and prompt.images != Images():
        raise ValueError(
            "images.columns is empty; name the image columns, or set images.per_row if a "
            "function or conversations supply the images"
        )


def _check_with_images(prompt: Prompt) -> None:
    """Raise ValueError for settings that cannot be combined with images.

    Does nothing if the prompt uses no images.
    """
    if not prompt.images.used:
        return
    if prompt.template is not None and not prompt.images.columns:
        raise ValueError("images.columns is empty; name the image columns")
    if prompt.on_too_long != "quarantine":
        raise ValueError(
            f"on_too_long: {prompt.on_too_long} cannot be combined with images; set it to "
            "quarantine"
        )
    for name in WITHOUT_IMAGES:
        if getattr(prompt, name) != type(prompt).model_fields[name].default:
            raise ValueError(f"{name} cannot be combined with images; remove one of them")
