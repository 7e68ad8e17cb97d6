"""A hosted model in place of vLLM: `engine.endpoint` of a job file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import model_validator

from prefect_raybatch.job.checks import without_user
from prefect_raybatch.job.faults import FieldPlace
from prefect_raybatch.job.group import Group, field, field_check
from prefect_raybatch.job.secrets import MASK, hide_endpoint
from prefect_raybatch.job.variables import VARIABLE

# Fields of `engine` and of `sampling` that have a meaning for a hosted model.
HOSTED_ENGINE = (
    *("endpoint", "task", "order", "deduplicate", "replicas", "batch_size"),
    *("max_concurrent_batches", "num_cpus"),
)
HOSTED_SAMPLING = (
    *("temperature", "max_tokens", "choice", "top_p", "stop", "seed", "frequency_penalty"),
    *("presence_penalty", "logit_bias", "structured_outputs", "n", "logprobs"),
)
# Fields that need the model's tokenizer, its chat template or its raw answer.
TOKENIZER_PROMPT = (
    *("chat_template", "chat_template_kwargs", "prefill", "continue_final_message", "documents"),
    *("adapter_column", "tools", "second"),
)
TOKENIZER_OUTPUT = ("probabilities", "reasoning_parser", "tool_parser")

# Shards in flight per worker with the batch API: a batch may take a day, so most runs send all of
# their shards at once.
HOSTED_BATCH_SHARDS = 100
HOSTED_IMAGE_SHARDS = 10  # fewer with images: a shard may hold 256 MiB of them
HEADER_TEXT = re.compile(r"[\x21-\x7e]+")  # what an HTTP header takes
# Names of environment variables without ${}, which no key looks like.
BARE_VARIABLE = re.compile(r"\$?RAYBATCH_SECRET_\w+|\$?[A-Z][A-Z0-9_]*_(KEY|TOKEN|SECRET)|\$\w+")


class ModelEndpoint(Group):
    """An HTTP server with the OpenAI API that answers the rows, and its limits."""

    block: str | None = field(
        None,
        title="Block",
        text="Saved Prefect block with the URL, model, key and limits, as hosted-model/NAME.",
        min_length=1,
    )
    url: str | None = field(
        None,
        title="URL",
        text="Base URL of the server, with its version. Example: https://api.openai.com/v1.",
    )
    model: str | None = field(
        None, title="Model", text="Name of the model at the server.", min_length=1
    )
    key: str | None = field(
        None,
        title="API key",
        text="API key, as an environment variable of the flow: ${OPENAI_API_KEY}. Default: "
        "requests without a key.",
    )
    api: Literal["chat", "completions"] = field(
        "chat",
        title="API",
        text="completions sends the text of the prompt as it is to /completions, without a chat. "
        "With engine.task embed, texts go to /embeddings.",
    )
    requests_per_minute: int | None = field(
        None,
        title="Requests per minute",
        text="Maximum number of requests of the whole run in any minute. Default: no limit.",
        gt=0,
    )
    tokens_per_minute: int | None = field(
        None,
        title="Tokens per minute",
        text="Maximum number of prompt and answer tokens of the whole run in any minute. "
        "Default: no limit.",
        gt=0,
    )
    max_in_flight: int = field(
        64,
        title="Requests in flight",
        text="Maximum number of requests of the whole run that wait for an answer at a time.",
        gt=0,
        le=4096,
    )
    timeout: float = field(
        600.0,
        title="Request timeout",
        text="Maximum time for one answer, in seconds. A request that takes longer is sent again.",
        gt=0,
        allow_inf_nan=False,
    )
    price_in: float | None = field(
        None,
        title="Price of prompt tokens",
        text="Price of a million prompt tokens, in cluster.currency.",
        ge=0,
        allow_inf_nan=False,
    )
    price_out: float | None = field(
        None,
        title="Price of answer tokens",
        text="Price of a million answer tokens, in cluster.currency.",
        ge=0,
        allow_inf_nan=False,
    )
    batch: bool = field(
        False,
        title="Batch API",
        text="Send each shard as a batch to the server's batch API, which answers within 24 hours, "
        "instead of single requests.",
    )

    _key = field_check("key", by=lambda value: check_key(value))

    _url = field_check("url", by=lambda value: check_endpoint_url(value))

    @model_validator(mode="after")
    def _complete(self) -> ModelEndpoint:
        if self.block is None and self != ModelEndpoint.model_construct():
            for name, what in (("url", "the server's base URL"), ("model", "its model's name")):
                if getattr(self, name) is None:
                    raise ValueError(f"{name} is required: set {what}")
        return self

    @property
    def asked(self) -> ModelEndpoint | None:
        """Return the endpoint, or None if the group is empty: vLLM then answers the rows."""
        return self if self.url or self.block else None

    @classmethod
    def _may_hold_keys(cls, name: str) -> bool:
        return name in ("key", "url")

    def _shown(self, name: str, value: Any) -> Any:
        if name == "url":
            return hide_endpoint(value)
        return MASK if name == "key" and value and not VARIABLE.fullmatch(value) else value


def models_beside_endpoints(value: Mapping[str, Any]) -> dict[FieldPlace, str]:
    """Return {path of the field: error} for each `model` that a job file sets beside an `endpoint`.

    `value` holds the plain values of the file: in a validated job, a `model` that was written
    cannot be told from the default.
    """
    faults: dict[FieldPlace, str] = {}
    for place in (("engine",), ("output", "escalate", "to")):
        engine: Any = value
        for name in place:
            engine = engine.get(name) if isinstance(engine, Mapping) else None
        if isinstance(engine, Mapping) and engine.get("endpoint") and "model" in engine:
            group = ".".join(place)
            faults[(*place, "model")] = (
                f"does not apply to {group}.endpoint, whose model is {group}.endpoint.model; "
                "remove it, or remove endpoint"
            )
    return faults


def check_endpoint_url(url: str) -> str:
    """Return the URL without a slash at its end; raise ValueError if it is not a base URL."""
    without_user(url)
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("is not an http(s) URL; write for example https://api.openai.com/v1")
    if parts.query or parts.fragment:
        raise ValueError("has a query or a fragment; write only the base, and put keys into key")
    path = parts.path.rstrip("/")
    for ending in ("/chat/completions", "/completions", "/embeddings"):
        if path.endswith(ending):
            raise ValueError(f"ends in {ending}; write the base URL, without {ending}")
    return url.rstrip("/")


def check_key(key: str) -> str:
    """Return the API key; raise ValueError, without quoting it, if it cannot be sent in a header.

    A bare name of an environment variable is rejected, too: it must be written as ${NAME}.
    """
    if not HEADER_TEXT.fullmatch(key):
        raise ValueError(
            "is empty or contains spaces or control characters; write ${NAME} of an environment "
            "variable that holds the key"
        )
    if BARE_VARIABLE.fullmatch(key):
        raise ValueError("looks like the name of an environment variable; write ${NAME}")
    return key
