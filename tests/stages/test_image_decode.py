"""Bytes to images: what is taken, what it becomes, and what is refused with which words."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from prefect_raybatch.stages.images.decode import BadImage, Policy, decode_image

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)
PLAIN = Policy()


def photo(width: int = 64, height: int = 48, mode: str = "RGB") -> Image.Image:
    """A picture whose four corners differ, and that no codec stores in a few bytes."""
    pixels = np.random.default_rng(7).integers(0, 256, (height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2] = RED
    pixels[height // 2 :, width // 2 :] = BLUE
    return Image.fromarray(pixels).convert(mode)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def close(got: tuple[int, ...], wanted: tuple[int, ...], by: int = 12) -> bool:
    return all(abs(a - b) <= by for a, b in zip(got, wanted, strict=True))


def turned(orientation: int, kind: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(photo(), kind, exif=exif, quality=95)


def png_header(width: int, height: int) -> bytes:
    """A PNG that says it is so large, with next to no data."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 100)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JPEG", {"quality": 95}),
        ("JPEG", {"quality": 95, "progressive": True}),
        ("PNG", {}),
        ("WEBP", {"lossless": True}),
        ("GIF", {}),
        ("BMP", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_deflate"}),
    ],
)
def test_each_format_becomes_rgb_of_the_same_size(kind, options):
    made = decode_image(saved(photo(), kind, **options), PLAIN)
    assert (made.mode, made.size) == ("RGB", (64, 48))
    assert close(made.getpixel((5, 5)), RED) and close(made.getpixel((60, 44)), BLUE)


@pytest.mark.parametrize("mode", ["L", "1", "P", "CMYK", "YCbCr"])
def test_other_colours_become_rgb(mode):
    kind = "JPEG" if mode in ("CMYK", "YCbCr") else "PNG"
    made = decode_image(saved(photo().convert(mode), kind, **{"quality": 95}), PLAIN)
    assert made.mode == "RGB" and made.size == (64, 48)
    if mode not in ("L", "1"):
        assert close(made.getpixel((5, 5)), RED, 40)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_what_is_transparent_lies_on_white(mode):
    image = photo().convert(mode)
    image.putalpha(Image.new("L", image.size, 0))
    assert decode_image(saved(image, "PNG"), PLAIN).getpixel((5, 5)) == WHITE
    image.putalpha(Image.new("L", image.size, 128))
    half = decode_image(saved(Image.new("RGBA", (8, 8), (0, 0, 0, 128)), "PNG"), PLAIN)
    assert close(half.getpixel((3, 3)), (127, 127, 127), 2)


def test_a_transparent_palette_colour_is_white():
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 0, 255, 0, 0])
    assert decode_image(saved(image, "GIF", transparency=1), PLAIN).getpixel((3, 3)) == WHITE
    assert decode_image(saved(image, "PNG", transparency=1), PLAIN).getpixel((3, 3)) == WHITE
    assert decode_image(saved(image, "PNG"), PLAIN).getpixel((3, 3)) == RED


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_and_not_cut_off(kind):
    ramp = np.linspace(0, 65535, 64).astype(np.uint16)[None, :].repeat(8, 0)
    made = np.asarray(decode_image(saved(Image.fromarray(ramp), kind), PLAIN))[0, :, 0]
    assert made[0] == 0 and made[-1] == 255 and abs(int(made[32]) - 129) <= 2


def test_the_first_frame_of_an_animation_is_taken():
    frames = [Image.new("RGB", (16, 16), colour) for colour in (RED, BLUE)]
    for kind in ("GIF", "WEBP", "PNG", "TIFF"):
        data = saved(frames[0], kind, save_all=True, append_images=frames[1:])
        assert close(decode_image(data, PLAIN).getpixel((8, 8)), RED), kind


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize(
    ("orientation", "corner", "size"),
    [(1, "top left", (64, 48)), (3, "bottom right", (64, 48)), (6, "top right", (48, 64)),
     (8, "bottom left", (48, 64)), (2, "top right", (64, 48)), (4, "bottom left", (64, 48))],
)  # fmt: skip
def test_an_image_is_turned_as_its_exif_data_says(kind, orientation, corner, size):
    made = decode_image(turned(orientation, kind), PLAIN)
    assert made.size == size
    left, top = "left" in corner, "top" in corner
    at = (4 if left else size[0] - 5, 4 if top else size[1] - 5)
    quarter = np.asarray(made)[
        slice(0, size[1] // 2 - 4) if top else slice(size[1] // 2 + 4, None),
        slice(0, size[0] // 2 - 4) if left else slice(size[0] // 2 + 4, None),
    ]
    # Red is in that corner, or (for a mirror image) blue in the opposite one.
    assert close(made.getpixel(at), RED, 60) and quarter[..., 0].mean() > 200


def test_exif_data_that_is_broken_or_absurd_says_nothing():
    exif = Image.Exif()
    exif[0x0112] = 99
    assert decode_image(saved(photo(), "JPEG", exif=exif), PLAIN).size == (64, 48)
    assert decode_image(saved(photo(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff"), PLAIN)


def test_metadata_is_dropped():
    exif = Image.Exif()
    exif[0x010E] = "a secret"
    made = decode_image(saved(photo(), "JPEG", exif=exif, comment=b"another", dpi=(1, 2)), PLAIN)
    assert made.info == {} and not made.getexif() and made.format is None


@pytest.mark.parametrize(
    ("resize", "size"),
    [
        (None, (64, 48)),
        ((225, 225), (225, 225)),
        ((10, 20), (10, 20)),
        (32, (32, 24)),
        (64, (64, 48)),
        (1000, (64, 48)),  # only ever made smaller
    ],
)
def test_an_image_is_sized(resize, size):
    assert decode_image(saved(photo(), "PNG"), Policy(resize=resize)).size == size


def test_a_size_is_reached_as_the_guides_do():
    wanted = photo().resize((225, 225), Image.Resampling.BICUBIC)
    made = decode_image(saved(photo(), "PNG"), Policy(resize=(225, 225)))
    assert made.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_truncated_image_is_refused(kind, share):
    data = saved(photo(200, 200), kind)
    with pytest.raises(BadImage, match=r"cannot be (decoded|read)|^this is"):
        decode_image(data[: int(len(data) * share)], PLAIN)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "0 bytes"),
        (b"<!DOCTYPE html><html>404</html>", "HTML or XML"),
        (b"\n\n<HTML>", "HTML or XML"),
        (b"\xef\xbb\xbf<?xml version='1.0'?>", "HTML or XML"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"%PDF-1.7", "PDF"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "EPS"),
        (b'{"error": "no such image"}', "JSON"),
        (b"PK\x03\x04rest", "ZIP"),
        (b"\0\0\0\x1cftypavif", "AVIF"),
        (b"\xff\xd8\xff", "this is|header"),
        (b"hello world", "68 65 6c 6c 6f"),
        (b"\0" * 1000, "00 00"),
    ],
)
def test_what_is_no_image_is_named(data, words):
    with pytest.raises(BadImage, match=words):
        decode_image(data, PLAIN)


def test_a_bomb_is_refused_by_its_header():
    with pytest.raises(BadImage, match=r"20000 x 15000 = 300000000|over 178956970 pixels"):
        decode_image(png_header(20000, 15000), PLAIN)  # 300 megapixels in 100 bytes
    with pytest.raises(BadImage, match=r"8000 x 7000 = 56000000 pixels.*max_pixels 50000000"):
        decode_image(png_header(8000, 7000), PLAIN)
    with pytest.raises(BadImage, match="64 x 48 = 3072"):
        decode_image(saved(photo(), "JPEG"), Policy(max_pixels=3000))


def test_too_many_bytes_are_refused():
    data = saved(photo(), "PNG")
    with pytest.raises(BadImage, match=rf"{len(data)} bytes.*max_bytes 100"):
        decode_image(data, Policy(max_bytes=100))
    assert decode_image(data, Policy(max_bytes=len(data)))


def test_a_hair_is_refused():
    assert decode_image(saved(Image.new("RGB", (199, 1)), "PNG"), PLAIN)
    for size in ((200, 1), (1, 4000)):
        with pytest.raises(BadImage, match="200 times"):
            decode_image(saved(Image.new("RGB", size), "PNG"), PLAIN)


def test_samples_of_an_unknown_range_are_refused():
    floats = Image.fromarray(np.ones((8, 8), np.float32))
    with pytest.raises(BadImage, match="32-bit"):
        decode_image(saved(floats, "TIFF"), PLAIN)


def test_the_formats_of_bytes_and_not_names_decide():
    with pytest.raises(BadImage, match="this is"):
        decode_image(saved(photo(), "PPM"), PLAIN)
    with pytest.raises(BadImage, match="this is"):
        decode_image(saved(photo(), "ICO"), PLAIN)
