"""Photos for benchmarks: noise and shapes as JPEG, no two alike, in Parquet files with a column
`image` of {bytes, path}, as Hugging Face data sets have it."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

SIDES = ((640, 480), (1024, 768))  # in turns
FILE = 100  # rows a file
GROUP = 50  # rows a row group
SCHEMA = pa.schema(
    [("id", pa.int64()), ("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())]))]
)


def photo(number: int, sides: Sequence[tuple[int, int]] = SIDES) -> bytes:
    """The JPEG file of that number: patches of colour, grain, and a few shapes."""
    draw = np.random.default_rng(number)
    width, height = sides[number % len(sides)]
    coarse = draw.integers(0, 256, (height // 32 + 1, width // 32 + 1, 3), np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    grain = draw.integers(-12, 13, (height, width, 1), np.int16)
    image = Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(image)
    for _ in range(6):
        x, y = int(draw.integers(width)), int(draw.integers(height))
        w, h = (int(draw.integers(8, side // 2 + 9)) for side in (width, height))
        colour = tuple(int(v) for v in draw.integers(0, 256, 3))
        shape = pen.ellipse if draw.integers(2) else pen.rectangle
        shape((x, y, x + w, y + h), fill=colour)
    out = io.BytesIO()
    image.save(out, "JPEG", quality=87)
    return out.getvalue()


def write_photos(
    root: Path, count: int, sides: Sequence[tuple[int, int]] = SIDES, file_rows: int = FILE
) -> Path:
    """A folder with `count` photos, made once; the first ones of a longer row are the same."""
    whole, folder = root / "files", root / f"{count}"
    if folder.exists():
        return folder
    whole.mkdir(parents=True, exist_ok=True)
    starts = range(0, count, file_rows)
    sizes = [min(file_rows, count - start) for start in starts]
    # Not forked: whoever asks may have threads of torch.
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        files = list(pool.map(partial(_file, whole, sides), starts, sizes))
    half = folder.with_suffix(".half")
    half.mkdir(exist_ok=True)
    for file in files:
        if not (half / file.name).exists():
            os.link(file, half / file.name)
    half.rename(folder)
    return folder


def _file(folder: Path, sides: Sequence[tuple[int, int]], start: int, rows: int) -> Path:
    path = folder / f"part-{start:09}-{rows}.parquet"
    if path.exists():
        return path
    made = [{"bytes": photo(n, sides), "path": f"{n}.jpg"} for n in range(start, start + rows)]
    table = pa.table([range(start, start + rows), made], schema=SCHEMA)
    half = path.with_suffix(".half")
    pq.write_table(table, half, row_group_size=GROUP, compression="none")
    half.rename(path)
    return path
