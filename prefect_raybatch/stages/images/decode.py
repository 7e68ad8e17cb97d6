"""Decodes bytes to a plain RGB image, or raises `BadImage` with the reason.

The header is checked before any pixel is decoded. All pixels are decoded, because a truncated file
can have a complete header, and Pillow's own `verify` accepts it.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from prefect_raybatch.job.images import ASPECT, MOST_PIXELS

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # never EPS, which runs Ghostscript
_NAMES = "JPEG, PNG, WebP, GIF, BMP or TIFF"
_MAX_PIXELS = 50_000_000
_MAX_BYTES = 20_000_000
ORIENTATION = 0x0112  # EXIF tag
_WHITE = (255, 255, 255)
JPEG_QUALITY = 90  # for images that are sent to a hosted model
HEADER_CHARACTERS = 8192  # characters of base64 that hold the header of an image from `data_url`
DEEP = ("I;16", "I;16L", "I;16B", "I;16N")  # 16 bits a pixel, grey
_KNOWN = (  # first bytes of data that arrives in place of an image, and what it is
    (b"%!PS", "an EPS or PostScript file"),
    (b"\xc5\xd0\xd3\xc6", "an EPS file"),
    (b"%PDF", "a PDF file"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "gzip data"),
    (b"{", "JSON or other text"),
    (b"<svg", "an SVG file"),
    (b"<", "HTML or XML"),
)


class BadImage(ValueError):
    """An image that is not passed to a model; the message says what is wrong with it."""


@dataclass(frozen=True)
class Policy:
    """Limits and target size of an image.

    `resize` is None (keep the size), (width, height), or the maximum pixels of the longer side.
    """

    resize: tuple[int, int] | int | None = None
    max_pixels: int = _MAX_PIXELS
    max_bytes: int = _MAX_BYTES


def decode_image(data: bytes, policy: Policy) -> Image:
    """Return the image's first frame as RGB: upright, on white, resized, without metadata.

    Raises `BadImage` for damaged, too large or extremely narrow images.
    """
    check_size(len(data), policy)
    image = _loaded(data, policy)
    width, height = image.size
    if max(width, height) >= ASPECT * min(width, height):
        raise BadImage(
            f"the image is {width} x {height} pixels: one side is {ASPECT} times the other or "
            "more. Crop it"
        )
    return _sized(_rgb(_upright(image)), policy)


def data_url(data: bytes, policy: Policy) -> str:
    """Return the decoded image as a data URL: a JPEG stays one, other formats become PNG."""
    image = decode_image(data, policy)
    kind = "JPEG" if _opened(data, policy).format == "JPEG" else "PNG"
    out = io.BytesIO()
    image.save(out, kind, **({"quality": JPEG_QUALITY} if kind == "JPEG" else {}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(out.getvalue()).decode()}"


def size_in_url(url: object) -> tuple[int, int] | None:
    """Return width and height of the image in a data URL made by `data_url`; else None."""
    if not isinstance(url, str) or not url.startswith("data:image/"):
        return None
    _, _, text = url.partition(";base64,")
    try:
        return size_of(base64.b64decode(text[:HEADER_CHARACTERS]))
    except ValueError:
        return None


def check_image(data: bytes, policy: Policy) -> None:
    """Raise `BadImage` for faults that are found without decoding pixels: size and header."""
    check_size(len(data), policy)
    _opened(data, policy)


def size_of(data: object) -> tuple[int, int] | None:
    """Return an image's width and height from its header; None if `data` is not an image."""
    import PIL.Image

    if not isinstance(data, bytes):
        return None
    try:
        return PIL.Image.open(io.BytesIO(data), formats=FORMATS).size
    except Exception:  # any of many kinds; the prepare stage reports it
        return None


def check_size(size: int, policy: Policy) -> None:
    """Raise `BadImage` if an image file of `size` bytes is empty or too large."""
    if not size:
        raise BadImage("the image is empty: 0 bytes")
    if size > policy.max_bytes:
        raise BadImage(
            f"the image has {size} bytes, more than prompt.images.max_bytes {policy.max_bytes}. "
            "Shrink it, or raise the limit"
        )


def looks_like(start: bytes) -> str | None:
    """Return the kind of unsupported file that begins with `start`, such as "a PDF file".

    None for a supported image and for unknown data.
    """
    start = start.lstrip(b"\xef\xbb\xbf \t\r\n")[:64]
    for magic, name in _KNOWN:
        if start[: len(magic)].lower() == magic.lower():
            return name
    if start[4:8] == b"ftyp":
        return "an AVIF, HEIC or video file"
    return None


def _opened(data: bytes, policy: Policy) -> Image:
    """Open an image without decoding its pixels, and return it.

    Raise `BadImage` if its header is invalid, or if it has too many pixels.
    """
    import PIL.Image

    try:
        image = PIL.Image.open(io.BytesIO(data), formats=FORMATS)
    except PIL.Image.DecompressionBombError:
        raise BadImage(f"the image has over {MOST_PIXELS} pixels. Shrink it") from None
    except PIL.UnidentifiedImageError:
        found = looks_like(data) or f"data that begins with {data[:8].hex(' ')}"
        raise BadImage(f"this is {found}, not {_NAMES}") from None
    except Exception as error:  # a header that contradicts itself: any of a dozen kinds
        raise BadImage(f"the image's header cannot be read: {_said(error)}") from None
    width, height = image.size
    if width * height > policy.max_pixels:
        raise BadImage(
            f"the image has {width} x {height} = {width * height} pixels, more than "
            f"prompt.images.max_pixels {policy.max_pixels}. Shrink it, or raise the limit"
        )
    return image


def _loaded(data: bytes, policy: Policy) -> Image:
    """Return the image with all its pixels decoded; raise `BadImage` if that fails."""
    image = _opened(data, policy)
    width, height = image.size
    try:
        image.load()
    except MemoryError:
        raise
    except Exception as error:
        raise BadImage(
            f"the image ({image.format}, {width} x {height}) cannot be decoded: {_said(error)}"
        ) from None
    return image


def _upright(image: Image) -> Image:
    """Return the image rotated or mirrored by its EXIF orientation; ignore unreadable EXIF data."""
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    try:
        orientation = image.getexif().get(ORIENTATION)
    except Exception:  # any of many kinds
        return image
    turn = turns.get(orientation) if isinstance(orientation, int) else None
    return image if turn is None else image.transpose(turn)


def _rgb(image: Image) -> Image:
    """Convert the image to 8-bit RGB; transparent parts become white.

    Raises `BadImage` if it has 32-bit samples or cannot be converted.
    """
    import PIL.Image

    if image.mode in DEEP or (image.mode == "I" and image.format == "PNG"):
        # Scaled: `convert` would cut off at 255 and leave a white picture.
        deep = np.asarray(image).astype(np.float32)
        image = PIL.Image.fromarray((deep / 257).round().clip(0, 255).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise BadImage(
            f"the image has 32-bit samples (mode {image.mode}) of unknown range. Store it with 8 "
            "or 16 bits"
        )
    try:
        if not image.has_transparency_data:
            return image.convert("RGB")
        clear = image.convert("RGBA")
    except Exception as error:
        raise BadImage(
            f"the image's colours ({image.mode}) cannot be converted: {_said(error)}"
        ) from None
    made = PIL.Image.new("RGB", clear.size, _WHITE)
    made.paste(clear, mask=clear.getchannel("A"))
    return made


def _sized(image: Image, policy: Policy) -> Image:
    import PIL.Image

    size = _target(image.size, policy.resize)
    # Always a new image, so that no metadata of the file is passed on.
    made = image if size == image.size else image.resize(size, PIL.Image.Resampling.BICUBIC)
    clean = PIL.Image.new("RGB", made.size)
    clean.paste(made)
    return clean


def _target(size: tuple[int, int], resize: tuple[int, int] | int | None) -> tuple[int, int]:
    if resize is None:
        return size
    if isinstance(resize, tuple):
        return resize
    longer = max(size)
    if longer <= resize:
        return size
    width, height = (max(1, round(side * resize / longer)) for side in size)
    return width, height


def _said(error: Exception) -> str:
    return f"{error}" or type(error).__name__
