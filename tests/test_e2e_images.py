"""Captions of images from Parquet to the result: real Ray, a real (tiny) vision model, and what
tables hold in place of images."""

from __future__ import annotations

import importlib
import io
import struct
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.engines import FakeEngine
from helpers.vision import make_vision_model
from PIL import Image

from prefect_raybatch import BatchJob, RunReport
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.result.verify import verify
from prefect_raybatch.result.verify_chain import verify_chain
from prefect_raybatch.runs.finalize_run import finalize_run
from prefect_raybatch.runs.infer_run import infer_run
from prefect_raybatch.runs.plan_run import plan_run
from prefect_raybatch.runs.retry import Retry, plan_retry
from prefect_raybatch.storage import open_store

pytest.importorskip("vllm")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
ROWS, PER_SHARD = 24, 6
MAX_PIXELS = 100_000


def photo(number: int, width: int = 120, height: int = 90) -> bytes:
    """No two alike; every third of them a PNG with transparency."""
    draw = np.random.default_rng(number)
    channels = 4 if number % 3 == 0 else 3
    pixels = draw.integers(0, 256, (height, width, channels), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG" if channels == 4 else "JPEG")
    return out.getvalue()


def bomb(side: int = 40_000) -> bytes:
    """A small PNG file that says it has `side` times `side` pixels."""
    made = b"\x89PNG\r\n\x1a\n"
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(9999))), (b"IEND", b"")):
        made += (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )
    return made


BAD = {
    3: (photo(1)[:900], "cannot be decoded"),
    8: (None, "column image is null"),
    11: (b"<!DOCTYPE html><p>404", "this is HTML or XML"),
    17: (bomb(), "pixels"),
    20: (photo(7, 400, 300), f"prompt.images.max_pixels {MAX_PIXELS}"),  # good for a retry
}


def captions(folder: Path) -> BatchJob:
    """The job of the flow, for a tiny model and few rows."""
    images = [BAD[n][0] if n in BAD else photo(n) for n in range(ROWS)]
    images[5] = images[4]  # asked about once
    table = pa.table({"id": range(ROWS), "image": [{"bytes": i, "path": None} for i in images]})
    (folder / "photos").mkdir()
    pq.write_table(table, folder / "photos" / "a.parquet", row_group_size=5)
    model = make_vision_model(folder / "model")
    flow = importlib.import_module("image_captions")
    job = flow.captions_job(str(folder / "photos"), str(folder / "out"), model).to_dict()
    job["source"]["rows_per_shard"] = PER_SHARD
    job["prompt"]["images"]["max_pixels"] = MAX_PIXELS
    job["engine"]["max_model_len"] = 512
    job["sampling"]["max_tokens"] = 8
    job["limits"] = {"max_failed_fraction": 0.5}
    job["cluster"] = {"prepare": {"concurrency": 1}}  # each such process imports vLLM
    return BatchJob.from_dict(job)


@dataclass
class Told:
    """What was seen of a run that was stopped and resumed."""

    uri: str
    kept: int  # commits of the attempt that was stopped
    report: RunReport

    def table(self, kind: str) -> pa.Table:
        files = sorted(Path(self.uri, kind).glob("*.parquet"))
        return pa.concat_tables([pq.ParquetFile(file).read() for file in files])


@pytest.fixture(scope="module")
def told(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Told:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "flows"))
        job = captions(tmp_path_factory.mktemp("captions"))

    class Stopped(Exception):
        pass

    def stop(progress: Any) -> None:
        if progress.done:
            raise Stopped

    run = plan_run(job, "k")
    with suppress(Stopped):
        infer_run(job, run, stop, engine=FakeEngine)  # its answers are kept
    ledger = Ledger(open_store(run.uri))
    plan = ledger.load_plan()
    assert plan is not None
    kept = int(ledger.listing(plan).done.sum())
    return Told(run.uri, kept, finalize_run(job, run, infer_run(job, run)))


def test_a_run_that_was_stopped_is_resumed_and_whole(told: Told) -> None:
    assert 1 <= told.kept < ROWS // PER_SHARD
    assert (told.report.good, told.report.failed) == (ROWS - len(BAD), len(BAD))
    assert verify(open_store(told.uri)).ok


def test_the_result_is_the_captions_alone(told: Told) -> None:
    data = told.table("data")
    assert set(data.column_names) == {"_row", "caption"}
    assert data["_row"].to_pylist() == [n for n in range(ROWS) if n not in BAD]
    captions = data["caption"].to_pylist()
    fakes = sum(caption.startswith("answer ") for caption in captions)
    assert None not in captions and 0 < fakes <= told.kept * PER_SHARD


def test_bad_images_are_kept_with_the_reason(told: Told) -> None:
    kept = told.table("_quarantine").sort_by("_row").to_pylist()
    assert [row["_row"] for row in kept] == sorted(BAD)
    for row in kept:
        image, words = BAD[row["_row"]]
        assert (row["stage"], row["error"]) == ("prepare", "BadImage")
        assert words in row["message"] and row["input"]["image"]["bytes"] == image


def test_a_retry_needs_nothing_but_the_quarantine(told: Told) -> None:
    wider = {"prompt.images.max_pixels": 1_000_000}
    child = plan_retry(told.uri, overrides=wider)
    assert isinstance(child, Retry)
    progress = infer_run(child.job, child.run, engine=FakeEngine)
    report = finalize_run(child.job, child.run, progress)
    assert (report.good, report.failed) == (1, len(BAD) - 1)
    data = pq.read_table(f"{child.run.uri}/data").to_pylist()
    assert data == [{"caption": "answer 20", "_row": 20}]
    root, _, key = told.uri.rpartition("/")
    assert verify_chain(open_store(root), key).ok
