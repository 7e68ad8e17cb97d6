"""Fetches one image from an object store as a test before a run fetches all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from prefect_raybatch.errors import SourceError
from prefect_raybatch.plan.prompt_lengths import Block, blocks_of_heads, spread_blocks
from prefect_raybatch.schemes import store_scheme
from prefect_raybatch.spec.read import ReadSpec
from prefect_raybatch.spec.request import PromptSpec

if TYPE_CHECKING:
    from prefect_raybatch.source import Inventory

PATH_ROWS = 8  # rows that are searched for a path


def unreadable_image(prompt: PromptSpec, read: ReadSpec, inventory: Inventory, copied: bool) -> str:
    """Fetch the first object-store image that a few rows name; return a warning if that fails.

    Returns "" if the image can be read, if the rows name none, or if the input cannot be read.
    `copied` says that a run would first copy the input. There is no copy yet, so the rows are then
    read from the beginning of the original files.
    """
    from prefect_raybatch.stages.images.decode import BadImage
    from prefect_raybatch.stages.images.http import ImageUnavailable
    from prefect_raybatch.stages.images.rows import row_images

    images = row_images(prompt, {}, read.options)
    if images is None or not images.images.columns or not inventory.files:
        return ""
    for where, path in _paths(prompt, read, inventory, copied):
        try:
            images.places.fetch(path)
        except (BadImage, ImageUnavailable) as error:
            given = "source.options" if read.options else "the environment"
            fails = " Such rows fail." if isinstance(error, BadImage) else ""
            return (
                f"prompt.images.columns: {where}: {error}.{fails} Correct the paths, or the "
                f"credentials in {given}"
            )
        return ""
    return ""


def _blocks(
    prompt: PromptSpec, read: ReadSpec, inventory: Inventory, copied: bool
) -> Iterator[Block]:
    if copied:
        return blocks_of_heads(read, PATH_ROWS)
    columns = dict.fromkeys(prompt.image_columns, "prompt.images.columns")
    prompt = replace(prompt, function=None, columns=columns)
    return spread_blocks(prompt, read, inventory, None, PATH_ROWS)


def _paths(
    prompt: PromptSpec, read: ReadSpec, inventory: Inventory, copied: bool
) -> Iterator[tuple[str, str]]:
    """Yield (description of the row, path) of images in object stores that a few rows name.

    Ends early if the input cannot be read.
    """
    try:
        for file, first, table in _blocks(prompt, read, inventory, copied):
            for name in prompt.image_columns:
                for number, value in enumerate(table[name].to_pylist(), first):
                    for one in value if isinstance(value, list) else [value]:
                        path = one.get("path") if isinstance(one, Mapping) else one
                        held = isinstance(one, Mapping) and one.get("bytes") is not None
                        if isinstance(path, str) and store_scheme(path) and not held:
                            yield f"column {name!r} of row {number} of {file}", path
    except SourceError:
        return  # the run says why the input cannot be read
