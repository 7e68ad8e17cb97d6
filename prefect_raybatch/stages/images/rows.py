"""The images of a block's rows: fetched, decoded and put into the rows' messages."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypedDict, TypeGuard

import pyarrow as pa

from prefect_raybatch.model import pinned as models
from prefect_raybatch.spec.engine import EngineFields
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.spec.request import ImageSpec, PromptSpec
from prefect_raybatch.stages.block import Failure, Messages, Row, rows_of
from prefect_raybatch.stages.images.decode import (
    BadImage,
    Policy,
    check_image,
    data_url,
    decode_image,
)
from prefect_raybatch.stages.images.http import ImageUnavailable
from prefect_raybatch.stages.images.places import ImagePlaces
from prefect_raybatch.stages.vllm.multimodal import RENDERING, RowFeatures, renderer

TOO_MANY_AWAY = 0.2  # share of a block's rows that may lack images; more mean a server is down

ImagePart = dict[str, object]  # part of a message's content: its type and the image
MOST_SENT = 50_000_000  # characters; OpenAI's limit on a request is 50 MB
AT_ONCE = 16  # rows whose images are fetched side by side


class ImageDigest(TypedDict):
    """The SHA-256 (hex) of an image's file and its size in bytes, as `DIGESTS_TYPE` holds them."""

    sha256: str
    bytes: int


Digests = list[ImageDigest]  # of the images of a row


class TooManyAway(Exception):
    """The images of too many rows of a block could not be fetched, so the block must be retried."""


@dataclass(frozen=True)
class RowImages:
    """Fetches, checks and resizes the images of rows.

    `arguments` are the engine arguments that affect preprocessing. `empty`: a null counts as no
    image instead of a failure. `digests`: also return digests of the fetched images. Without
    `decode`, images are fetched only for their digests, and only their headers are checked.
    `as_urls`: a hosted model gets the images as data URLs.

    A row whose image is temporarily unavailable fails. But if this share of a block's rows is more
    than `too_many`, the whole block is lost instead, and retried.
    """

    images: ImageSpec
    places: ImagePlaces
    empty: bool = False
    arguments: EngineFields = field(default_factory=dict)
    digests: bool = False
    decode: bool = True
    as_urls: bool = False
    too_many: float = TOO_MANY_AWAY

    @property
    def policy(self) -> Policy:
        return Policy(self.images.resize, self.images.max_pixels, self.images.max_bytes)

    def rendered(
        self, shown: Sequence[Messages | Failure], model: models.PinnedModel
    ) -> tuple[list[list[int] | Failure], list[RowFeatures | None]]:
        """Return (each row's prompt tokens or failure, each row's image features or None).

        `shown` comes from `fetched`. The tokens have placeholders for the images; the features are
        as in `MM_TYPE`.
        """
        made = renderer(models.local_path(model), model.get("revision"), self.arguments)
        return made.rows(shown)

    def fetched(
        self, table: pa.Table, conversations: Sequence[Messages | Failure]
    ) -> tuple[list[Messages | Failure], list[Digests]]:
        """Return the rows' messages with decoded images, and the digests of each row's images.

        `conversations` are the rows' messages without the images from columns. Those images are put
        in front of the last user message's text. A row whose images cannot be used gets a
        `Failure`. The digests are empty unless `self.digests`. Raises `TooManyAway` if images are
        temporarily unavailable for more than the share `self.too_many` of the rows, and for more
        than one row.
        """
        rows = rows_of(table, list(self.images.columns))
        digests: list[Digests] = [[] for _ in rows]
        away: list[Failure] = []
        most = max(1, self.too_many * len(rows))

        def one(
            row: Row | Failure, messages: Messages | Failure, seen: Digests
        ) -> Messages | Failure:
            if len(away) > most:
                raise TooManyAway(away[0].message)
            if isinstance(row, Failure) or isinstance(messages, Failure):
                return row if isinstance(row, Failure) else messages
            try:
                return self._put(row, messages, seen)
            except ImageUnavailable as error:
                away.append(Failure.of("prepare", error))
                return away[-1]
            except Exception as error:
                return Failure.of("prepare", error)

        with ThreadPoolExecutor(AT_ONCE, "raybatch-images") as pool:
            made = list(pool.map(one, rows, conversations, digests))
        if len(away) > most:
            raise TooManyAway(away[0].message)
        return made, digests

    def _put(self, row: Row, messages: Messages, seen: Digests) -> Messages:
        given = [found for name in self.images.columns for found in self._of(name, row[name])]
        count = len(given) + sum(map(is_image, _parts(messages)))
        if count > self.images.most:
            raise BadImage(
                f"the row has {count} images, more than prompt.images.per_row {self.images.most}. "
                "Remove some, or raise the limit"
            )
        columns = [self._decoded(where, value, seen) for where, value in given]
        shown = [{**m, "content": self._content(m["content"], seen)} for m in messages]
        if columns:
            _before_text(shown, columns)
        if self.as_urls:
            _check_sent(shown)
        return shown

    def _of(self, name: str, value: object) -> list[tuple[str, object]]:
        """Return (name for error messages, image) of each image in a value of column `name`.

        Skips nulls if `self.empty`; otherwise raises `BadImage` for a null.
        """
        if isinstance(value, list):
            many = [(f"column {name}[{i}]", item) for i, item in enumerate(value)]
        else:
            many = [(f"column {name}", value)]
        if self.empty:
            return [(where, item) for where, item in many if not _is_null(item)]
        for where, item in many:
            if _is_null(item):
                raise BadImage(f"{where} is null; clean the input or set prompt.on_null: empty")
        return many

    def _content(self, content: object, seen: Digests) -> object:
        if not isinstance(content, list):
            return content
        return [
            self._decoded("an image in the messages", image_reference(part), seen)
            if is_image(part)
            else part
            for part in content
        ]

    def _decoded(self, where: str, value: object, seen: Digests) -> ImagePart:
        try:
            data = self.places.fetch(value)
            if self.digests:
                seen.append({"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)})
            if not self.decode:
                check_image(data, self.policy)
                return {"type": "image"}
            if self.as_urls:
                return {"type": "image_url", "image_url": {"url": data_url(data, self.policy)}}
            image = decode_image(data, self.policy)
        except (BadImage, ImageUnavailable) as error:
            raise type(error)(f"{where}: {error}") from None
        return {"type": "image_pil", "image_pil": image}


def row_images(
    prompt: PromptSpec,
    arguments: EngineFields,
    options: StoreOptions | None = None,
    digests_alone: bool = False,
    hosted: bool = False,
    too_many: float = TOO_MANY_AWAY,
) -> RowImages | None:
    """Return the fetcher of the rows' images; None if the prompt has no images.

    `arguments` are the engine arguments, `options` the options of the input's store. With
    `digests_alone`, images are fetched only for their digests, and not decoded. `hosted`: the
    images go to a hosted model. `too_many` is as in `RowImages`.
    """
    images = prompt.images
    if images is None:
        return None
    places = ImagePlaces(
        images.media_root,
        options or {},
        images.max_bytes,
        images.fetch_seconds,
        images.allow_private,
        images.store_folders,
    )
    kept = {name: arguments[name] for name in RENDERING if name in arguments}
    wanted, empty = digests_alone or images.digests, prompt.on_null == "empty"
    return RowImages(images, places, empty, kept, wanted, not digests_alone, hosted, too_many)


def is_image(part: object) -> TypeGuard[ImagePart]:
    """Return whether a part of a message's content has the type image or image_url."""
    return isinstance(part, dict) and part.get("type") in ("image", "image_url")


def image_reference(part: ImagePart) -> object:
    """Return the image in a part of a message: bytes, {bytes, path}, a path or a URL.

    Raises `BadImage` if the part has no image.
    """
    kind = part["type"]
    if kind not in part:
        raise BadImage(f"a message part of type {kind} has no field {kind}")
    value = part[kind]
    return value.get("url") if kind == "image_url" and isinstance(value, dict) else value


def _parts(messages: Messages) -> list[object]:
    return [p for m in messages if isinstance(m["content"], list) for p in m["content"]]


def _check_sent(messages: Messages) -> None:
    """Raise `BadImage` if the images of a row are too large for a request to a hosted model."""
    size = sum(len(str(image_reference(part))) for part in _parts(messages) if is_image(part))
    if size > MOST_SENT:
        raise BadImage(
            f"the row's images have {size:,} characters as data URLs, and a request to a hosted "
            f"model takes at most {MOST_SENT:,}. Set prompt.images.resize, or remove some"
        )


def _is_null(value: object) -> bool:
    if isinstance(value, dict):
        return value.get("bytes") is None and value.get("path") is None
    return value is None


def _before_text(messages: Messages, images: list[ImagePart]) -> None:
    """Put images in front of the last user message's content, in place.

    Raises `BadImage` if there is no user message.
    """
    users = [i for i, m in enumerate(messages) if m["role"] == "user"]
    if not users:
        raise BadImage("the conversation has no user message to put the image into")
    content = messages[users[-1]]["content"]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    messages[users[-1]]["content"] = [*images, *parts]
