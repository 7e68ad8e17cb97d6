"""Captions of images from a Lance data set to the result: the flow under a real Prefect, killed in
the middle; real Ray, a real (tiny) vision model, what tables hold in place of images; a second run
on the engine that is up, and one that gives typed answers; and the night after, which takes the
captions over."""

from __future__ import annotations

import io
import os
import shutil
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from helpers import environ
from helpers.engines import FakeEngine, NoEngine
from helpers.needs import needs_vllm
from helpers.prefect_server import Prefect
from helpers.processes import until
from helpers.ray_head import Head
from helpers.vision import make_vision_model
from PIL import Image

from prefect_raybatch import BatchJob, RunReport
from prefect_raybatch.api import finalize_run, infer_run, plan_run
from prefect_raybatch.api.retry import Retry, plan_retry
from prefect_raybatch.job.answer_schema import schema_engine_fields
from prefect_raybatch.result.verify import verify
from prefect_raybatch.result.verify_chain import verify_chain
from prefect_raybatch.runs.finalize_run import load_report
from prefect_raybatch.storage import open_store

pytestmark = [needs_vllm, pytest.mark.e2e, pytest.mark.timeout(1200)]
ROOT = Path(__file__).parents[1]
FLOWS = ROOT / "flows"
ROWS, PER_SHARD, KEY = 24, 6, "captions-of-a-killed-flow"
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


# The flow's first start: an engine that is there at once, answers the first shard and no other.
FIRST = """
import sys, time
from functools import partial

import image_captions
from helpers.engines import FineEngine
from prefect_raybatch.api import submission
from prefect_raybatch.stages.columns import (
    SHARD,
)

class First(FineEngine):
    def __call__(self, table):
        if table[SHARD][0].as_py():
            time.sleep(600)
        return super().__call__(table)

submission.infer_run = partial(submission.infer_run, engine=First)
image_captions.image_captions(*sys.argv[1:])
"""

# Its second start, and two other runs that find the engine up.
SECOND = """
import sys

import image_captions
from prefect_raybatch import BatchJob, batch_inference, warm_engines

data, out, model, key = sys.argv[1:]
with warm_engines():
    image_captions.image_captions(data, out, model, key)
    image_captions.image_captions(data, out, model, "warm")
    batch_inference(BatchJob.from_yaml("typed.yaml"), "typed")
"""

TYPED = """
from typing import Literal
from pydantic import BaseModel, Field


class Photo(BaseModel):
    place: Literal["Zoo", "Port", "Farm"]
    sure: int = Field(ge=0, le=9)
    known: bool
"""


def album(ids: Iterable[int], images: Sequence[bytes | None]) -> pa.Table:
    return pa.table({"id": list(ids), "image": [{"bytes": i, "path": None} for i in images]})


def prepare(folder: Path) -> list[str]:
    """The flow with a job of its own for a tiny model and few rows; its arguments."""
    images = [BAD[n][0] if n in BAD else photo(n) for n in range(ROWS)]
    images[5] = images[4]  # prepared once
    lance.write_dataset(album(range(ROWS), images), str(folder / "photos"), max_rows_per_file=10)
    shutil.copy(FLOWS / "image_captions.py", folder)
    (folder / "first.py").write_text(FIRST)
    (folder / "second.py").write_text(SECOND)
    job = yaml.safe_load((FLOWS / "image_captions.yaml").read_text())
    job["source"]["rows_per_shard"] = PER_SHARD
    job["prompt"]["images"]["max_pixels"] = MAX_PIXELS
    job["engine"]["max_model_len"] = 512
    job["sampling"] = {"temperature": 0, "max_tokens": 8}  # the same again
    job["engine"]["deduplicate"] = False  # the first shard is the first rows
    job["limits"] = {"max_failed_fraction": 0.5}
    job["output"]["keep_answers"] = 30  # for the next night
    job["cluster"] = {"prepare": {"concurrency": 1}}  # each such process imports vLLM
    # As engines of typed answers have it, so that one engine serves all runs.
    job["engine"] = schema_engine_fields(job["engine"], "{}")
    (folder / "image_captions.yaml").write_text(yaml.safe_dump(job))
    model = make_vision_model(folder / "model")
    places = [str(folder / "photos"), str(folder / "out"), model]
    job["source"]["uri"], uri, job["engine"]["model"] = places
    job["output"] = {"uri": uri, "schema_model": "typed:Photo", "columns": ["id"]}
    job["sampling"] = {"temperature": 0, "max_tokens": 150}  # a seed would need another engine
    (folder / "typed.py").write_text(TYPED)
    (folder / "typed.yaml").write_text(yaml.safe_dump(job))
    return [*places, KEY]


@dataclass
class Told:
    """What was seen of a flow that was killed and started again."""

    uri: str
    kept: int  # commits of the flow that was killed
    report: RunReport
    states: list[str]  # of the flow runs of the run, in the order of their start

    def table(self, kind: str) -> pa.Table:
        files = sorted(Path(self.uri, kind).glob("*.parquet"))
        return pa.concat_tables([pq.ParquetFile(file).read() for file in files])

    def captions(self) -> dict[int, str]:
        data = self.table("data")
        return dict(zip(data["_row"].to_pylist(), data["caption"].to_pylist(), strict=True))


@pytest.fixture(scope="module")
def told(
    ray_head: Head,
    prefect_process: Prefect,
    tmp_path_factory: pytest.TempPathFactory,
) -> Told:
    folder = tmp_path_factory.mktemp("captions")
    arguments, uri = prepare(folder), folder / "out" / KEY
    env = {
        **prefect_process.env,
        "RAY_ADDRESS": ray_head.address,
        "RAY_AUTH_MODE": "disabled",  # as the head
        "PYTHONPATH": f"{ROOT}{os.pathsep}{environ.python_path()}",
    }

    def start(script: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, script, *arguments]
        with (folder / "log.txt").open("ab") as log:
            return subprocess.Popen(
                command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True
            )

    def commits() -> int:
        return len(list((uri / "_raybatch/asks/_raybatch/commits").glob("*.json")))

    flow = start("first.py")
    until(lambda: commits() or flow.poll() is not None, 300, "the first commit")
    os.killpg(flow.pid, signal.SIGKILL)
    assert flow.wait() == -signal.SIGKILL, (folder / "log.txt").read_text()
    kept = commits()
    assert start("second.py").wait(600) == 0, (folder / "log.txt").read_text()
    report = load_report(open_store(str(uri)))
    runs = prefect_process.ask(
        "flow_runs/filter",
        {"flow_runs": {"name": {"any_": [KEY]}}, "sort": "START_TIME_ASC"},
    )
    return Told(str(uri), kept, report, [run["state_type"] for run in runs])


def test_a_flow_that_was_killed_is_started_again_and_whole(told: Told) -> None:
    assert told.kept == 1
    assert len(told.states) == 2 and told.states[-1] == "COMPLETED"
    assert (told.report.good, told.report.failed) == (ROWS - len(BAD), len(BAD))
    assert verify(open_store(told.uri)).ok


def test_the_result_is_the_captions_alone(told: Told) -> None:
    data = told.table("data")
    assert set(data.column_names) == {"_row", "caption"}
    assert data["_row"].to_pylist() == [n for n in range(ROWS) if n not in BAD]
    captions = data["caption"].to_pylist()
    fakes = sum(caption.startswith("answer ") for caption in captions)
    assert None not in captions
    assert fakes == PER_SHARD - sum(n < PER_SHARD for n in BAD)  # the rest were asked


def test_an_engine_that_is_up_answers_the_same_about_the_same_images(told: Told) -> None:
    warm = told.uri.replace(KEY, "warm")
    report = load_report(open_store(warm))
    phases = {name for start in report.starts for name in start.seconds}  # none if Ray was busy
    assert not {"imports", "weights"} & phases, "an engine was started"
    data = pq.read_table(f"{warm}/data")
    captions = dict(zip(data["_row"].to_pylist(), data["caption"].to_pylist(), strict=True))
    asked = {n: text for n, text in told.captions().items() if n >= PER_SHARD}
    assert {n: text for n, text in captions.items() if n in asked} == asked
    assert len(captions) == len(told.captions()) and len(set(captions.values())) > 1


def test_typed_answers_are_columns_of_their_types(told: Told) -> None:
    uri = told.uri.replace(KEY, "typed")
    table = pq.read_table(f"{uri}/data")
    assert table.schema.field("sure").type == pa.int64()
    assert len(table) > (ROWS - len(BAD)) / 2
    for row in table.to_pylist():
        assert row["place"] in {"Zoo", "Port", "Farm"}
        assert 0 <= row["sure"] <= 9 and row["known"] in {True, False}
    assert verify(open_store(uri)).ok


def test_bad_images_are_kept_with_the_reason(told: Told) -> None:
    kept = told.table("_quarantine").sort_by("_row").to_pylist()
    assert [row["_row"] for row in kept] == sorted(BAD)
    for row in kept:
        image, words = BAD[row["_row"]]
        assert (row["stage"], row["error"]) == ("prepare", "BadImage")
        assert words in row["message"] and row["input"]["image"]["bytes"] == image


def test_a_retry_needs_nothing_but_the_quarantine(without_ray: None, told: Told) -> None:
    wider = {"prompt.images.max_pixels": 1_000_000}
    child = plan_retry(told.uri, overrides=wider)
    assert isinstance(child, Retry)
    progress = infer_run(child.job, child.run, engine=FakeEngine)
    report = finalize_run(child.job, child.run, progress)
    assert (report.good, report.failed) == (1, len(BAD) - 1)
    data = pq.read_table(f"{child.run.uri}/data").to_pylist()
    assert data == [{"caption": "answer 1", "_row": 20}]  # the second that is asked, after row 3
    root, _, key = told.uri.rpartition("/")
    assert verify_chain(open_store(root), key).ok


def test_the_night_after_takes_captions_over_by_the_bytes_of_the_images(
    without_ray: None, told: Told
) -> None:
    """Rows are gone, and one came back under another number: no engine is needed."""
    root, _, _ = told.uri.rpartition("/out/")
    photos = lance.dataset(f"{root}/photos")
    photos.delete("id < 8")
    photos.insert(album([ROWS], [photo(0)]))
    value = yaml.safe_load(Path(root, "image_captions.yaml").read_text())
    value["source"]["uri"], value["output"]["uri"] = f"{root}/photos", f"{root}/out"
    value["engine"]["model"], value["reuse"] = f"{root}/model", told.uri
    job = BatchJob.from_dict(value)
    run = plan_run(job, "next")
    report = finalize_run(job, run, infer_run(job, run, engine=NoEngine))
    left, before = [n for n in range(8, ROWS) if n not in BAD], told.captions()
    assert (report.reuse["reused"], report.reuse["asked"]) == (len(left) + 1, 0)
    data = pq.read_table(f"{run.uri}/data")["caption"].to_pylist()
    assert data == [before[n] for n in [*left, 0]]
    assert verify(open_store(run.uri)).ok
