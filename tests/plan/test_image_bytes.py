"""What images come to once they are prepared, by a model's files and a few rows of the input."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.small import make_job
from helpers.specs import images_of
from PIL import Image

from prefect_raybatch.api import dry_run
from prefect_raybatch.compile.job import compile_job
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.images import Images
from prefect_raybatch.plan.image_bytes import made_pixels, processor_of, row_bytes
from prefect_raybatch.source import inventory
from prefect_raybatch.spec.run import RunSpec

QWEN = {"patch_size": 14, "merge_size": 2, "min_pixels": 3136, "max_pixels": 1_000_000}
SMOLVLM = {"size": {"longest_edge": 1536}, "max_image_size": {"longest_edge": 384}}


@pytest.mark.parametrize(
    ("processor", "pixels", "made"),
    [
        (QWEN, 225 * 225, 2 * 225 * 225),
        (QWEN, 100, 2 * 3136),
        (QWEN, 5e6, 2e6),
        (SMOLVLM, 225 * 225, 17 * 384**2),
        ({**SMOLVLM, "do_image_splitting": False}, 225 * 225, 384**2),
        ({"size": {"height": 224, "width": 224}}, 5e6, 224**2),
        ({"crop_size": 336, "size": {"shortest_edge": 336}}, 5e6, 336**2),
        (
            {"crop_size": 336, "image_grid_pinpoints": [[336, 672], [672, 672]]},
            5e6,
            5 * 336**2,
        ),
        ({"size": {"height": 448, "width": 448}, "crop_to_patches": True}, 5e6, 13 * 448**2),
        ({}, 1000, 2000),
    ],
)
def test_each_family_makes_another_size_of_an_image(processor, pixels, made):
    assert made_pixels(pixels, processor) == made


@pytest.mark.parametrize(
    ("resize", "size", "pixels"),
    [
        (None, (1024, 768), 1024 * 768),
        ([225, 225], (1024, 768), 225 * 225),
        (512, (1024, 768), 512 * 384),
        (512, (300, 200), 300 * 200),
    ],
)
def test_an_image_is_as_large_as_the_job_says(resize, size, pixels):
    assert images_of(Images(columns=["a"], resize=resize)).pixels(size) == pixels


def photo(width: int, height: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), (255, 0, 0)).save(out, "JPEG")
    return out.getvalue()


@pytest.fixture
def model(tmp_path: Path) -> dict[str, Any]:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "dtype": "bfloat16",
        "max_position_embeddings": 4096,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(QWEN))
    return {"source": str(folder), "revision": None}


def job(tmp_path: Path, model: dict[str, Any], images: list[Any], **given: Any) -> Any:
    pq.write_table(pa.table({"image": images}), tmp_path / "in.parquet")
    return make_job(
        source={"uri": str(tmp_path / "in.parquet")},
        prompt={"template": "x", "images": {"columns": "image", **given}},
        engine={"model": model["source"], "max_model_len": 4096},
        output={"uri": str(tmp_path / "out")},
    )


def bytes_of(spec: RunSpec, model: dict[str, Any]) -> float:
    found = inventory(spec.read)
    return row_bytes(spec.prompt.images, spec.engine.model, spec.read, model, found)


def test_what_stands_in_the_rows_is_looked_at(tmp_path, model):
    images = [photo(1000, 500) if n % 2 else photo(200, 100) for n in range(100)]
    images[0] = b"<html>"
    made = bytes_of(compile_job(job(tmp_path, model, images)), model)
    assert 2.5e6 < made < 4e6  # 12 bytes a pixel of 260,000 in the mean
    asked = compile_job(job(tmp_path, model, images, resize=[225, 225]))
    assert bytes_of(asked, model) == 12 * 225 * 225
    asked = compile_job(job(tmp_path, model, ["https://there/a.png"] * 100))
    assert bytes_of(asked, model) == 12 * 512 * 512
    many = [[photo(100, 100)] * 3] * 20
    asked = compile_job(job(tmp_path, model, many, per_row=9))
    assert bytes_of(asked, model) == 3 * 12 * 10_000


def test_a_wide_type_takes_twice_as_much(tmp_path, model):
    asked = compile_job(job(tmp_path, model, [photo(100, 100)] * 9))
    assert bytes_of(asked, model) == 12 * 10_000
    given = job(tmp_path, model, [photo(100, 100)] * 9).to_dict()
    given["engine"]["dtype"] = "float32"
    asked = compile_job(BatchJob.from_dict(given))
    assert bytes_of(asked, model) == 24 * 10_000


def test_a_processor_may_stand_in_another_file(tmp_path, model):
    folder = Path(model["source"])
    (folder / "preprocessor_config.json").unlink()
    assert processor_of(model) == {}
    inner = {"image_processor": QWEN, "processor_class": "X"}
    (folder / "processor_config.json").write_text(json.dumps(inner))
    assert processor_of(model) == QWEN


def test_the_plan_cuts_shards_by_what_is_prepared(tmp_path, model):
    folder = Path(model["source"])
    (folder / "model.safetensors").write_bytes(b"")
    given = job(tmp_path, model, [photo(100, 100)] * 5000, resize=[225, 225]).to_dict()
    given["engine"]["load_format"] = "dummy"
    (folder / "tokenizer.json").write_text("{}")
    told = dry_run(BatchJob.from_dict(given))
    assert told.sizing.rows_per_shard == 441 and "256 MiB" in told.sizing.rows_why
