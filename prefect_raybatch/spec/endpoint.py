"""The hosted model of a run, and the limits of its server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.endpoint import HEADER_TEXT
from prefect_raybatch.job.secrets import hide_endpoint
from prefect_raybatch.job.variables import fill_variables
from prefect_raybatch.spec.options import HiddenOptions

EndpointPath = Literal["chat/completions", "completions", "embeddings"]


@dataclass(frozen=True, kw_only=True)
class EndpointSpec:
    """A server with the OpenAI API that answers in place of engines.

    `path` is the API path, below `url`, to which requests are sent. `secret` is {"key": API key},
    or empty for a server without a key; a key may be a variable `${NAME}` that the driver fills in.
    The limits hold for the whole run; None for no limit. `max_in_flight` is the maximum number of
    requests at once, `timeout` is in seconds. Prices are per million tokens of prompts (`price_in`)
    and answers (`price_out`), None if unknown. `batch`: shards go to the server's batch API.
    """

    url: str
    path: EndpointPath
    model: str
    secret: HiddenOptions
    requests_per_minute: int | None
    tokens_per_minute: int | None
    max_in_flight: int
    timeout: float
    price_in: float | None
    price_out: float | None
    batch: bool

    @property
    def shown_url(self) -> str:
        """Return `url` for messages, with parts masked that look like tokens."""
        return str(hide_endpoint(self.url))

    @property
    def limited(self) -> bool:
        """Return whether requests or tokens per minute are limited."""
        return self.requests_per_minute is not None or self.tokens_per_minute is not None

    def api_key(self) -> str:
        """Return the API key, "" for none; a key written as ${NAME} is read from that variable.

        Space around the key is removed, such as the line end of a file with a secret. Raises
        `ConfigError` if the variable is not set, or if the key cannot be sent in a header.
        """
        written = self.secret.get("key", "")
        key = str(fill_variables(written, "engine.endpoint.key")).strip()
        if written and not HEADER_TEXT.fullmatch(key):
            raise ConfigError(
                f"engine.endpoint.key: the value of {written} is empty, or has spaces, control "
                "characters or letters outside ASCII. Correct the variable where the flow runs"
            )
        return key
