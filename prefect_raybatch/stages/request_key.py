"""Request keys: content hashes that identify equal requests, within a run and between runs.

The key of a request is a hash of everything that depends on the row: messages before the chat
template, the row's own sampling fields, the content of its adapter. The context is everything that
is the same for all rows (model, template, the job's sampling, ...). Its hash is the secret of the
keyed hash function (BLAKE2b), so requests in different contexts have different keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from prefect_raybatch.model.pinned import PinnedModel
from prefect_raybatch.spec.request import SamplingFields
from prefect_raybatch.stages.block import Failure, Messages
from prefect_raybatch.stages.columns import KEY_BYTES
from prefect_raybatch.stages.images.rows import is_image
from prefect_raybatch.stages.messages import ChatRequest
from prefect_raybatch.stages.order import is_exact

NOT_DETERMINISTIC = Failure(
    "prepare",
    "PromptNotDeterministic",
    "the prompt differs from the planned one, so no stored answer belongs to it. Make "
    "prompt.function depend on the row alone (no time, random numbers or outside state), or run "
    "without reuse and without engine.order: run",
)


IMAGE_CHANGED = Failure(
    "prepare",
    "ImageChanged",
    "an image of the row has changed since the run was planned (or prompt.function returned "
    "something else), so no stored answer belongs to it. Retry the row, which uses the image as "
    "it is now",
)


def changed_request(request: ChatRequest) -> Failure:
    """Return the failure for a request whose key differs from the planned one."""
    return IMAGE_CHANGED if request.images else NOT_DETERMINISTIC


@dataclass(frozen=True)
class Keying:
    """Computes request keys (content hashes); `context` is the hash of what all rows share.

    `adapters`: the content hash of each adapter by its name; `column`: the input column with the
    name of each row's adapter, None: all rows use the adapter named "", if any. `sampling` are the
    job's sampling fields. Without `merge`, equal requests do not share an answer.
    """

    context: str
    adapters: Mapping[str, str] = field(default_factory=dict)
    column: str | None = None
    sampling: SamplingFields = field(default_factory=dict)
    merge: bool = True

    @classmethod
    def under(
        cls,
        context: str,
        pinned: Mapping[str, PinnedModel],
        column: str | None,
        sampling: SamplingFields | None = None,
        merge: bool = True,
    ) -> Keying:
        """Return a `Keying`; `pinned` has a plan's LoRA adapters by name.

        The other arguments are as in the class.
        """
        named = {name: str(adapter["identity"]) for name, adapter in pinned.items()}
        return cls(context, named, column, sampling or {}, merge)

    def keys(
        self, requests: Sequence[ChatRequest | Failure], table: pa.Table
    ) -> list[bytes | None]:
        """Return the key of each row's request; None for a failed row."""
        secret, names = bytes.fromhex(self.context), self.adapters_of(table)
        return [
            None if isinstance(request, Failure) else request_key(secret, request, adapter)
            for request, adapter in zip(requests, names, strict=True)
        ]

    def exact(self, request: ChatRequest) -> bool:
        """Return whether requests equal to `request` may share one answer."""
        return self.merge and is_exact({**self.sampling, **(request.sampling or {})})

    def checked(
        self,
        requests: Sequence[ChatRequest | Failure],
        table: pa.Table,
        planned: Sequence[bytes | None],
    ) -> list[ChatRequest | Failure]:
        """Return the requests; one whose key differs from the `planned` key becomes a failure.

        A planned key of None means that the row made no request when the run was planned.
        """
        return [
            request if key == wanted or isinstance(request, Failure) else changed_request(request)
            for request, key, wanted in zip(
                requests, self.keys(requests, table), planned, strict=True
            )
        ]

    def adapters_of(self, table: pa.Table) -> list[str | None]:
        """Return the content hash of each row's adapter; None for a row without an adapter.

        For an unknown adapter, the value contains its name instead of a hash.
        """
        if self.column is None:
            return [self.adapters.get("")] * table.num_rows
        # An unknown name fails its row in the engine; for keys it counts as one more adapter.
        return [
            None if name is None else self.adapters.get(str(name), f"unknown {name}")
            for name in table[self.column].to_pylist()
        ]


def request_key(secret: bytes, request: ChatRequest, adapter: str | None = None) -> bytes:
    """Return the key of one request: a hash of `KEY_BYTES` bytes.

    `secret` is the hash of the request's context (`context_of`), as bytes; `adapter` is the content
    hash of its adapter, None for the base model.
    """
    parts: dict[str, object] = {"messages": request.messages}
    if request.images is not None:  # images count by content, not by URL
        parts = {"messages": _without_places(request.messages), "images": request.images}
    if request.raw:
        parts["raw"] = True
    if request.sampling:
        parts["sampling"] = request.sampling
    if request.documents is not None:
        parts["documents"] = request.documents
    if adapter is not None:
        parts["adapter"] = adapter
    return hashlib.blake2b(canonical(parts), digest_size=KEY_BYTES, key=secret).digest()


def context_of(parts: Mapping[str, object]) -> str:
    """Return the hash of the context of request keys: 32 bytes in hex.

    `parts` are the values of job and model that influence the answers to all rows.
    """
    return hashlib.blake2b(canonical(parts), digest_size=32).hexdigest()


def canonical(value: object) -> bytes:
    """Return JSON whose bytes are equal for equal values: sorted by name, in ASCII, no spaces."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), default=_other, check_circular=False
    ).encode()


def _other(value: object) -> dict[str, str]:
    """Return {"__TYPE": text} for a value that JSON lacks; for bytes, {"__sha256": hex digest}."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"__sha256": hashlib.sha256(value).hexdigest()}
    return {f"__{type(value).__name__}": str(value)}


def _without_places(messages: Messages) -> Messages:
    """Return the messages with a placeholder for each image, without its URL or content."""
    return [
        {**message, "content": list(map(_without_place, message["content"]))}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]


def _without_place(part: object) -> object:
    if not is_image(part):
        return part
    return {**{k: v for k, v in part.items() if k != part["type"]}, "type": "image"}
