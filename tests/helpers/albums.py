"""Nights over images, without vLLM: what takes the place of its renderer tells an image's grey."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from PIL import Image

from prefect_raybatch import demo
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.stages.images import rows

from .nights import Nights, ToldApart


def photo(grey: int, side: int = 40) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full((side, side, 3), grey, np.uint8)).save(out, "PNG")
    return out.getvalue()


class Album(Nights):
    """Rows with a text and the name of a file, or with an image's bytes."""

    def put(self, **files: bytes) -> None:
        (self.folder / "media").mkdir(exist_ok=True)
        for name, data in files.items():
            (self.folder / "media" / name).write_bytes(data)

    def job(self, **groups: Any) -> BatchJob:
        given = {"uri": str(self.folder / "in.parquet"), "rows_per_shard": 4}
        source = {**given, **groups.pop("source", {})}
        prompt = groups.pop("prompt", {"template": "Say {text}", "images": {"columns": ["image"]}})
        return super().job(
            source={**source, "media_root": str(self.folder / "media")},
            prompt=prompt,
            engine={"model": str(self.folder / "model"), "max_model_len": 512},
            output={
                "uri": str(self.folder / "out"),
                "columns": groups.pop("output_columns", ["image"]),
                "extras": ["image_digests"],
            },
            **groups,
        )

    def answers(self, key: str) -> list[tuple[str, str]]:
        """(file, answer) of each row of a result."""
        return [(row["image"], row["response"]) for row in self.result(key)]

    def told(self) -> list[str]:
        """What the engine was asked since the last look."""
        found = sorted(self.asked)
        self.asked.clear()
        return found


@contextmanager
def opened(folder: Path) -> Iterator[Album]:
    """With the bundled model's tokenizer, under the name of a model that takes images."""
    shutil.copytree(demo.demo_model_path(), folder / "model")
    config = folder / "model" / "config.json"
    value = json.loads(config.read_text())
    value |= {"architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3"}
    config.write_text(json.dumps(value))
    with mock.patch.object(rows, "renderer", ToldApart):
        yield Album(folder)
