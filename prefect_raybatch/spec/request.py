"""How rows become requests, and how the model generates their answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from prefect_raybatch.job.sampling import WHOLE_CONTEXT

# Fields of vLLM's SamplingParams or PoolingParams by name; vLLM defines the type of each.
SamplingFields = Mapping[str, Any]
OTHER_MODALITIES = ("video", "audio")  # media that models may accept, but that no request here has


@dataclass(frozen=True, kw_only=True)
class ImageSpec:
    """The images that accompany the text of a row.

    `resize` is the maximum length of the longer side in pixels, or (width, height); None keeps the
    size. `most` is the number of images that a row may have. `max_pixels` and `max_bytes` apply to
    one image. `media_root` is the folder of local images, None if rows may name no local file.
    `store_folders` are the folders in object stores from which images may come, None for all.
    `digests`: the result has a column with the digests of the images.
    """

    columns: tuple[str, ...]
    resize: int | tuple[int, int] | None
    most: int
    max_pixels: int
    max_bytes: int
    fetch_seconds: float
    allow_private: bool
    media_root: str | None
    digests: bool
    store_folders: tuple[str, ...] | None = None

    def pixels(self, size: tuple[int, int]) -> int:
        """Return the number of pixels of an image of `size` (width, height), once resized."""
        if isinstance(self.resize, tuple):
            size = self.resize
        elif self.resize is not None and max(size) > self.resize:
            width, height = (max(1, side * self.resize // max(size)) for side in size)
            size = (width, height)
        return size[0] * size[1]

    def limits(self) -> dict[str, int]:
        """Return vLLM's limit_mm_per_prompt: `most` images, and no other media."""
        return {"image": self.most, **dict.fromkeys(OTHER_MODALITIES, 0)}


@dataclass(frozen=True, kw_only=True)
class PromptSpec:
    """The parts of a prompt; exactly one of `template`, `function` and `messages` is set.

    `template` is the template of the prompt, `second` the template of the second text if the task
    scores pairs. `function` names the user's prompt function. `messages` and `documents` are
    columns with the chat messages and with documents for the chat template. `prefill` begins each
    answer. `chat_template` is the text of a template, None for the model's own. `columns` are the
    input columns that the job names, each with the field that names it; a function may read any
    column. `images` is None for text alone.
    """

    template: str | None
    second: str | None
    system: str | None
    function: str | None
    messages: str | None
    documents: str | None
    adapter_column: str | None
    prefill: str | None
    continue_final_message: bool
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any]
    tools: tuple[Mapping[str, Any], ...] | None
    on_null: Literal["fail", "empty"]
    on_too_long: Literal["quarantine", "truncate_left", "truncate_right"]
    special_tokens_in_rows: Literal["split", "refuse", "allow"]
    columns: Mapping[str, str]
    images: ImageSpec | None

    @property
    def alike(self) -> bool:
        """True if all rows make the same prompt: a template without a column, and no images."""
        return self.template is not None and not self.columns and self.images is None

    @property
    def paired(self) -> bool:
        """True if a row may have two texts, which the task `score` compares."""
        return self.second is not None or self.function is not None

    @property
    def image_columns(self) -> tuple[str, ...]:
        return () if self.images is None else self.images.columns


@dataclass(frozen=True, kw_only=True)
class SamplingSpec:
    """How the model generates the answers to a row.

    `fields` go to vLLM with each request; `pooling` are the PoolingParams of a pooling task, except
    `task`, which depends on the model. `max_tokens` is the most tokens of an answer, 1 if the task
    pools. `answers` is the number of answers to a row (n). `logprobs` is the number of most
    probable tokens written for each token, None to write none. `choices` are the labels of which an
    answer must be one, and `labels` the labels whose probabilities are written. `form` is
    sampling.structured_outputs as the job sets it, None if it is not set; the form that an answer
    schema requires is only in `fields`. `fixed_form` names the job field that requires one form for
    all rows; None if each row may set a form of its own.
    """

    fields: SamplingFields
    pooling: SamplingFields
    temperature: float
    max_tokens: int
    answers: int
    logprobs: int | None
    choices: tuple[str, ...]
    labels: tuple[str, ...]
    form: Mapping[str, Any] | None
    fixed_form: str | None
    skip_special_tokens: bool

    @property
    def fills_context(self) -> bool:
        """Return whether answers may fill the context (`sampling.max_tokens: null`).

        `max_tokens` then holds an assumed number, used only to estimate sizes.
        """
        return self.fields.get("max_tokens") == WHOLE_CONTEXT

    @property
    def several(self) -> bool:
        """Return whether a row gets more than one answer, and so a list of them."""
        return self.answers > 1

    @property
    def answers_may_differ(self) -> bool:
        """Return whether two equal requests may get different answers."""
        return self.temperature > 0 and self.fields.get("seed") is None

    def greedy(self) -> SamplingSpec:
        """Return a copy for comparing models: one answer per row, at temperature 0."""
        fields = {name: value for name, value in self.fields.items() if name != "n"}
        return replace(self, fields={**fields, "temperature": 0.0}, temperature=0.0, answers=1)
