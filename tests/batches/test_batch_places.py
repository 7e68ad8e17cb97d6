"""`raybatch batch` on S3 and over http, answered by a server of the tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import called
from helpers.gcs_server import GcsServer, serving
from helpers.openai_server import openai_server
from helpers.web_server import served
from s3server import S3Server

from prefect_raybatch.flow.blocks import ObjectStore
from prefect_raybatch.storage import open_store

ROWS = 12


def lines() -> bytes:
    made = []
    for number in range(ROWS):
        body = {"model": "large", "messages": [{"role": "user", "content": f"row {number}"}]}
        url = "/v1/chat/completions"
        made.append({"custom_id": str(number), "method": "POST", "url": url, "body": body})
    return "\n".join(map(json.dumps, made)).encode()


def contents(text: str) -> list[str]:
    found = [json.loads(line) for line in text.splitlines()]
    assert [line["custom_id"] for line in found] == [str(number) for number in range(ROWS)]
    return [line["response"]["body"]["choices"][0]["message"]["content"] for line in found]


@pytest.fixture(params=["s3", "gs"])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket whose keys are in the environment."""
    with ExitStack() as stack:
        if request.param == "s3":
            server: S3Server | GcsServer = request.getfixturevalue("s3")
        else:
            server = stack.enter_context(serving(GcsServer("token", "batch-places")))
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        yield f"{request.param}://batch-places/files"


def test_a_batch_file_in_a_bucket_is_answered_there(
    bucket: str, without_ray: None, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(bucket)
    store.put("requests.jsonl", lines())
    with openai_server() as server:
        for _ in range(2):  # the second call finds the run complete
            files = "-i", f"{bucket}/requests.jsonl", "-o", f"{bucket}/answers.jsonl"
            change = "--set", f"engine.endpoint.url={server.url}"
            code, _, err = called(capsys, "batch", *files, "--model", "large", *change)
            assert code == 0, err
            answers = store.read("answers.jsonl").decode()
            assert contents(answers) == [f"about row {number}" for number in range(ROWS)]
        assert len(server.bodies) == ROWS
    paths = [info.path for info in store.list("answers.jsonl.run")]
    (written,) = [path for path in paths if path.endswith("/output.jsonl")]
    assert store.read(written).decode() == answers


@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_input_and_output_are_reached_each_by_its_own_options(
    kind: str, s3: S3Server, without_ray: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(GcsServer("token", "batch-places")) as cloud, openai_server() as server:
        places = {"s3": "s3://batch-places/own", "gs": "gs://batch-places/own"}
        options: dict[str, dict[str, Any]] = {"s3": s3.options, "gs": cloud.options}
        (other,) = places.keys() - {kind}
        source, output = f"{places[other]}/in.jsonl", f"{places[kind]}/out.jsonl"
        open_store(places[other], options[other]).put("in.jsonl", lines())
        changes = (
            f"engine.endpoint.url={server.url}",
            f"source.options={json.dumps(options[other])}",
            f"output.options={json.dumps(options[kind])}",
        )
        more = [word for change in changes for word in ("--set", change)]
        code, _, err = called(
            capsys, "batch", "-i", source, "-o", output, "--model", "large", *more
        )
        assert code == 0, err
        answers = open_store(places[kind], options[kind]).read("out.jsonl").decode()
        assert contents(answers) == [f"about row {number}" for number in range(ROWS)]


def test_the_keys_of_blocks_reach_the_input_and_the_output(
    prefect_api: None, s3: S3Server, without_ray: None, capsys: pytest.CaptureFixture[str]
) -> None:
    ObjectStore(
        access_key_id=s3.key,
        secret_access_key=s3.secret,
        endpoint_url=s3.endpoint,
        region=s3.options["region"],
    ).save("batch-places", overwrite=True)
    place = "s3://batch-places/block"
    store = open_store(place, s3.options)
    store.put("in.jsonl", lines())
    with openai_server() as server:
        changes = (
            f"engine.endpoint.url={server.url}",
            "source.credentials_block=object-store/batch-places",
            "output.credentials_block=object-store/batch-places",
        )
        more = [word for change in changes for word in ("--set", change)]
        files = "-i", f"{place}/in.jsonl", "-o", f"{place}/out.jsonl"
        code, _, err = called(capsys, "batch", *files, "--model", "large", *more)
        assert code == 0, err
    answers = store.read("out.jsonl").decode()
    assert contents(answers) == [f"about row {number}" for number in range(ROWS)]


def test_a_batch_file_behind_http_is_answered(
    without_ray: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(lines())))
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()
            self.wfile.write(lines())

        def log_message(self, *_: Any) -> None:
            pass

    output = tmp_path / "answers.jsonl"
    with openai_server() as server, served(Handler) as address:
        changes = f"engine.endpoint.url={server.url}", "source.web.allow_private=true"
        more = [word for change in changes for word in ("--set", change)]
        files = "-i", f"{address}/requests.jsonl", "-o", output
        code, _, err = called(capsys, "batch", *files, "--model", "large", *more)
        assert code == 0, err
    assert contents(output.read_text("utf-8")) == [f"about row {number}" for number in range(ROWS)]
