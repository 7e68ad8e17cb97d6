"""Images of rows to a hosted model: real stages and HTTP, and a server that keeps what it gets."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset as ds
import pytest
from helpers.clouds import CLOUDS, cloud_server
from helpers.hosted import finished_run, hosted_job
from helpers.needs import needs_vllm
from helpers.openai_server import OpenAIServer, openai_server
from helpers.vision import make_vision_model
from helpers.vllm_server import MODEL, vllm_server
from helpers.web_server import served
from PIL import Image
from s3server import S3Server

from prefect_raybatch.api import dry_run, finalize_run, infer_run, preview_rows
from prefect_raybatch.api.retry import Retry, plan_retry
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.stages.endpoint.body import IMAGE_TOKENS, prompt_estimate
from prefect_raybatch.stages.images import rows as image_rows
from prefect_raybatch.stages.images.decode import ORIENTATION
from prefect_raybatch.stages.images.http import ImageUnavailable
from prefect_raybatch.stages.images.places import ImagePlaces
from prefect_raybatch.storage import open_store


def picture(kind: str = "PNG", size: tuple[int, int] = (60, 40), colour: int = 200) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, (colour, 0, 0)).save(out, kind)
    return out.getvalue()


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with openai_server() as made:
        yield made


pytestmark = pytest.mark.usefixtures("without_ray")


def job_of(server: OpenAIServer, folder: Path, cells: list[Any], **groups: Any) -> BatchJob:
    names = [f"item {n}" for n in range(len(cells))]
    images = {"columns": ["image"], **groups.pop("images", {})}
    prompt = {"template": "What is {Name}?", "images": images}
    return hosted_job(server.url, folder, {"Name": names, "image": cells}, prompt=prompt, **groups)


def run_of(job: BatchJob) -> Path:
    return finished_run(job)[1]


def sent(server: OpenAIServer) -> dict[str, list[Image.Image]]:
    """The images that the server got, by the text of their request."""
    found = {}
    for body in server.bodies:
        content = body["messages"][-1]["content"]
        if isinstance(content, str):  # a row without images
            continue
        *images, text = content
        urls = [part["image_url"]["url"] for part in images]
        data = [base64.b64decode(url.partition(";base64,")[2]) for url in urls]
        found[text["text"]] = [Image.open(io.BytesIO(one)) for one in data]
    return found


def failed_rows(folder: Path) -> list[dict[str, Any]]:
    return ds.dataset(folder / "_quarantine").to_table().to_pylist()


def test_images_of_a_column_are_sent_as_data_urls_before_the_text(
    server: OpenAIServer, tmp_path: Path
) -> None:
    images = [picture(), picture("JPEG"), picture("WEBP")]
    output = {"extras": ["image_digests"], "columns": ["Name"]}
    folder = run_of(job_of(server, tmp_path, images, output=output))
    shown = [sent(server)[f"What is item {n}?"][0] for n in range(3)]
    assert [image.format for image in shown] == ["PNG", "JPEG", "PNG"]
    for image in shown:
        assert image.size == (60, 40) and abs(np.asarray(image)[0, 0, 0] - 200) < 4
    rows = ds.dataset(folder / "data").to_table().to_pylist()
    digests = [row["image_digests"][0]["sha256"] for row in rows]
    assert digests == [hashlib.sha256(data).hexdigest() for data in images]


def test_an_image_is_turned_resized_and_sent_without_what_its_file_tells(
    server: OpenAIServer, tmp_path: Path
) -> None:
    out, exif = io.BytesIO(), Image.Exif()
    exif[ORIENTATION], exif[0x010E] = 6, "where I live"
    Image.new("RGB", (60, 40)).save(out, "JPEG", exif=exif)
    run_of(job_of(server, tmp_path, [out.getvalue()], images={"resize": 30}))
    ((image,),) = sent(server).values()
    assert image.size == (20, 30) and not dict(image.getexif())


def test_images_at_http_addresses_are_fetched_by_the_rules_of_local_jobs(
    server: OpenAIServer, tmp_path: Path
) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = picture()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    with served(Handler) as address:
        urls = [f"{address}/a.png", "http://169.254.169.254/latest"]
        folder = run_of(job_of(server, tmp_path, urls, images={"allow_private": True}))
        (row,) = failed_rows(folder)
        assert row["input"]["Name"] == "item 1" and row["error"] == "BadImage"
        assert [image.size for image in sent(server)["What is item 0?"]] == [(60, 40)]
        (tmp_path / "public").mkdir()
        assert len(failed_rows(run_of(job_of(server, tmp_path / "public", urls)))) == 2


def test_images_in_a_bucket_are_read_with_the_keys_of_the_input(
    server: OpenAIServer, tmp_path: Path, s3: S3Server
) -> None:
    s3.create_bucket("album")
    open_store("s3://album/some", s3.options).put("a.png", picture())
    uris = ["s3://album/some/a.png", "s3://album/some/none.png"]
    folder = run_of(job_of(server, tmp_path, uris, source={"options": s3.options}))
    assert [image.size for image in sent(server)["What is item 0?"]] == [(60, 40)]
    (row,) = failed_rows(folder)
    assert row["error"] == "BadImage" and "none.png" in row["message"]


def check_warned(server: OpenAIServer, folder: Path, place: str, options: dict[str, Any]) -> None:
    """Check what `raybatch plan` says of an image in a store, and of one that is not there."""
    open_store(place, options).put("a.png", picture())

    def warnings(*cells: Any, **groups: Any) -> list[str]:
        job = job_of(server, folder, list(cells), source={"options": options}, **groups)
        return [one for one in dry_run(job).sizing.warnings if "image" in one]

    assert warnings(None, f"{place}/a.png", f"{place}/none.png") == []  # one is tried
    assert warnings([], [f"{place}/a.png"], images={"per_row": 2}) == []
    (warning,) = warnings(None, f"{place}/none.png", f"{place}/a.png")
    assert "prompt.images.columns: column 'image' of row 1 of " in warning
    assert "none.png does not exist. Such rows fail. Correct the paths, or the cred" in warning
    (warning,) = warnings({"bytes": None, "path": f"{place}/none.png"})
    assert "column 'image' of row 0" in warning
    assert warnings({"bytes": picture(), "path": f"{place}/none.png"}) == []
    assert warnings("https://127.0.0.1:9/a.png") == []  # the internet is not tried


def test_plan_warns_of_an_image_on_s3_that_cannot_be_read(
    server: OpenAIServer, tmp_path: Path, s3: S3Server
) -> None:
    s3.create_bucket("album-of-plans")
    check_warned(server, tmp_path, "s3://album-of-plans/some", s3.options)


@pytest.mark.parametrize("scheme", CLOUDS)
def test_plan_warns_of_an_image_on_a_cloud_that_cannot_be_read(
    scheme: str, server: OpenAIServer, tmp_path: Path
) -> None:
    (tmp_path / "server").mkdir()
    with cloud_server(scheme, tmp_path / "server") as cloud:
        check_warned(server, tmp_path, f"{scheme}://bucket/some", cloud.options)


def test_plan_warns_of_an_image_that_a_csv_file_names(server: OpenAIServer, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("Name,image\na,\nb,gs://bucket/none.png\n")
    with cloud_server("gs", tmp_path) as cloud:
        source = {"uri": str(tmp_path / "in.csv"), "options": cloud.options}
        plan = dry_run(job_of(server, tmp_path, ["x"], source=source))
    assert any("row 1 of " in one and "does not exist" in one for one in plan.sizing.warnings)


def test_paths_lists_and_nulls_are_read_as_in_local_jobs(
    server: OpenAIServer, tmp_path: Path
) -> None:
    (tmp_path / "media").mkdir()
    for name in ("a.png", "b.png"):
        (tmp_path / "media" / name).write_bytes(picture())
    images = [["a.png", "b.png"], ["../in.parquet"], []]
    source = {"media_root": str(tmp_path / "media")}
    job = job_of(server, tmp_path, images, source=source, images={"per_row": 2})
    (row,) = failed_rows(run_of(job))
    assert row["error"] == "BadImage" and row["input"]["Name"] == "item 1"
    assert len(sent(server)["What is item 0?"]) == 2
    bare = [body["messages"][-1]["content"] for body in server.bodies]
    assert "What is item 2?" in bare


def test_a_run_and_a_retry_end_although_the_images_stay_away(
    server: OpenAIServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pass loses the block. The next one is isolated, and fails its rows."""

    def fetch(self: ImagePlaces, value: Any) -> bytes:
        if value == "away":
            raise ImageUnavailable("HTTP 503")
        return picture()

    monkeypatch.setattr(ImagePlaces, "fetch", fetch)
    job = job_of(server, tmp_path, ["away", "away", "here"])
    folder = run_of(job)
    assert [row["error"] for row in failed_rows(folder)] == ["ImageUnavailable"] * 2
    assert sorted(sent(server)) == ["What is item 2?"]
    retry = plan_retry(str(folder), job=job)
    assert isinstance(retry, Retry)
    report = finalize_run(retry.job, retry.run, infer_run(retry.job, retry.run))
    assert report.failed == 2


def test_conversations_bring_images_where_they_stand(server: OpenAIServer, tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(picture())
    url = f"data:image/png;base64,{base64.b64encode(picture()).decode()}"
    text = {"type": "text", "text": "What is it?"}
    turns = [
        [{"role": "user", "content": [{"type": "image", "image": "one.png"}, text]}],
        [{"role": "user", "content": [text, {"type": "image_url", "image_url": {"url": url}}]}],
        [{"role": "user", "content": [text, "And that?"]}],
        [{"role": "user", "content": [text, {"type": "image", "image": "two.png"}]}],
        [{"role": "user", "content": [text, {"type": "video", "video": "a.mp4"}]}],
    ]
    columns = {"chat": [json.dumps(turn) for turn in turns]}
    folder = run_of(
        hosted_job(
            *(server.url, tmp_path, columns),
            prompt={"messages": "chat", "images": {"per_row": 1}},
            source={"media_root": str(tmp_path)},
        )
    )
    contents = [body["messages"][-1]["content"] for body in server.bodies]
    kinds = [c if isinstance(c, str) else [part["type"] for part in c] for c in contents]
    wanted = [["image_url", "text"], ["text", "image_url"], "What is it?\nAnd that?"]
    assert sorted(kinds, key=str) == sorted(wanted, key=str)
    one, other = (row["message"] for row in failed_rows(folder))
    assert "an image in the messages: two.png cannot be read" in one
    assert "chat[0].content[1] has type 'video'" in other


@pytest.mark.parametrize("broken", [b"no image", picture()[:60], b""])
def test_a_row_with_a_broken_or_too_large_image_is_quarantined(
    server: OpenAIServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: bytes
) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (80, 80, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).save(out, "PNG")
    monkeypatch.setattr(image_rows, "MOST_SENT", 5000)
    folder = run_of(job_of(server, tmp_path, [picture(), broken, out.getvalue()]))
    wrong, large = failed_rows(folder)
    assert {wrong["error"], large["error"]} == {"BadImage"}
    assert "5,000" in large["message"] and "prompt.images.resize" in large["message"]
    assert len(server.bodies) == 1


def test_a_plan_and_a_preview_count_images_and_do_not_print_them(
    server: OpenAIServer, tmp_path: Path
) -> None:
    job = job_of(server, tmp_path, [picture(), picture()])
    plan = dry_run(job)
    assert plan.problems == () and plan.hosted is not None
    assert all(prompt > IMAGE_TOKENS for prompt, _ in plan.hosted.tokens)
    shown = preview_rows(job, 1)
    assert shown.prompts[0].text == "user: [image] What is item 0?"
    assert shown.prompts[0].tokens > IMAGE_TOKENS


def test_a_row_with_more_tokens_of_images_than_the_limit_is_quarantined(
    server: OpenAIServer, tmp_path: Path
) -> None:
    endpoint = {"tokens_per_minute": 2000}
    images = [picture(), picture(size=(2000, 1000))]
    (row,) = failed_rows(run_of(job_of(server, tmp_path, images, endpoint=endpoint)))
    assert row["error"] == "PromptTooLong" and len(server.bodies) == 1


def test_the_estimate_grows_with_the_image() -> None:
    def estimate(url: str) -> int:
        part = {"type": "image_url", "image_url": {"url": url}}
        return prompt_estimate([{"role": "user", "content": [part]}])

    head = "data:image/png;base64,"
    small, large = (head + base64.b64encode(picture(size=s)).decode() for s in ((9, 9), (999, 999)))
    assert estimate(small) < 200 < 1500 < estimate(large) < 3000
    assert estimate(f"{head}!") == estimate("https://a/b.png") > estimate(small)


def test_raw_completions_take_no_images(server: OpenAIServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"completions.*prompt\.images"):
        job_of(server, tmp_path, [picture()], endpoint={"api": "completions"})


@needs_vllm
@pytest.mark.whole
def test_a_real_server_with_a_vision_model_sees_the_images(tmp_path: Path) -> None:
    model = make_vision_model(tmp_path / "model")
    with vllm_server(tmp_path, model, max_model_len="512") as url:
        answering = OpenAIServer(url=url)
        cells = [[picture()], [picture(), picture(colour=9)], []]
        output = {"extras": ["prompt_tokens"]}
        endpoint = {"model": MODEL}
        groups = {"images": {"per_row": 2}, "sampling": {"max_tokens": 4}}
        job = job_of(answering, tmp_path, cells, output=output, endpoint=endpoint, **groups)
        rows = ds.dataset(run_of(job) / "data").to_table().to_pylist()
    one, two, none = (row["prompt_tokens"] for row in rows)
    assert one - none > 10 and abs((two - one) - (one - none)) < 10
