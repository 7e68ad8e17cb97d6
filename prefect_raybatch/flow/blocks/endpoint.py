"""The block with the address, key and limits of a hosted model."""

from __future__ import annotations

from typing import Any

from prefect.blocks.abstract import CredentialsBlock
from pydantic import ConfigDict, HttpUrl, SecretStr, ValidationError, model_validator

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.flow.blocks.form import FormBlock
from prefect_raybatch.flow.blocks.store import load_block
from prefect_raybatch.job.endpoint import ModelEndpoint
from prefect_raybatch.job.group import field


def _text_of(name: str) -> str:
    """Return the description of a field of `engine.endpoint`."""
    return ModelEndpoint.model_fields[name].description or ""


class HostedModel(FormBlock, CredentialsBlock):
    """A server with the OpenAI API that answers rows, its key and its limits.

    Name the block in a job as `engine: {endpoint: {block: hosted-model/NAME}}`. Fields that the job
    itself sets have precedence, except for the URL.

    Attributes:
        url: Base URL of the server, with its version.
        model: Name of the model at the server.
        key: API key, stored as a secret.
        requests_per_minute: Limit of the whole run.
        tokens_per_minute: Limit of the whole run, prompts and answers together.
        max_in_flight: Requests that may wait for an answer at a time.
        timeout: Time for one answer, in seconds.
        price_in: Price of a million prompt tokens.
        price_out: Price of a million answer tokens.

    Example:
        List the models of the server of a saved block:
        ```python
        from prefect_raybatch.flow.blocks import HostedModel

        hosted = HostedModel.load("BLOCK_NAME")
        print(hosted.get_client().get("models").json())
        ```
    """

    _block_type_name = "Hosted Model"
    _block_type_slug = "hosted-model"
    _logo_url = HttpUrl("https://github.com/openai.png?size=200")
    _documentation_url = HttpUrl("https://platform.openai.com/docs/api-reference")

    model_config = ConfigDict(hide_input_in_errors=True)  # input may hold keys

    url: str = field(title="URL", text=_text_of("url"))
    model: str = field(title="Model", text=_text_of("model"))
    key: SecretStr | None = field(
        None, title="API key", text="API key, stored as a secret. Default: requests without a key."
    )
    requests_per_minute: int | None = field(
        None, title="Requests per minute", text=_text_of("requests_per_minute")
    )
    tokens_per_minute: int | None = field(
        None, title="Tokens per minute", text=_text_of("tokens_per_minute")
    )
    max_in_flight: int = field(64, title="Requests in flight", text=_text_of("max_in_flight"))
    timeout: float = field(600.0, title="Request timeout", text=_text_of("timeout"))
    price_in: float | None = field(None, title="Price of prompt tokens", text=_text_of("price_in"))
    price_out: float | None = field(
        None, title="Price of answer tokens", text=_text_of("price_out")
    )

    @model_validator(mode="after")
    def _as_of_a_job(self) -> HostedModel:
        try:
            ModelEndpoint.model_validate(self.endpoint_fields())
        except ValidationError as error:
            faults = [(".".join(map(str, one["loc"])), one["msg"]) for one in error.errors()]
            raise ValueError("; ".join(f"{name}: {fault}" for name, fault in faults)) from None
        return self

    def endpoint_fields(self) -> dict[str, Any]:
        """Return this block as fields of `engine.endpoint`, with the key in clear text."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        fields["key"] = None if self.key is None else self.key.get_secret_value()
        known = ModelEndpoint.model_fields
        return {k: v for k, v in fields.items() if k in known and v is not None}

    def get_client(self) -> Any:
        """Return an `httpx.Client` for the server, with its key."""
        import httpx

        fields = self.endpoint_fields()
        headers = {"Authorization": f"Bearer {fields['key']}"} if "key" in fields else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=self.timeout)


def endpoint_of(name: str, where: str = "engine.endpoint.block") -> dict[str, Any]:
    """Return the fields of the saved block hosted-model/NAME; `where` is the field that names it.

    Raises `ConfigError` if the block cannot be loaded.
    """
    block = load_block(where, name)
    if not isinstance(block, HostedModel):
        raise ConfigError(
            f"{where}: {name!r} is no HostedModel block; name one as hosted-model/NAME"
        )
    return block.endpoint_fields()
