"""What is made of errors that other libraries have texts for alone."""

from __future__ import annotations

import errno
import os
import ssl
from pathlib import Path

import pytest

from prefect_raybatch.storage.library_errors import ca_file_problem, failure_in

LIST = "Generic S3 error: Error performing list request: Error performing GET http://127.0.0.1:9/b"


@pytest.mark.parametrize(
    ("said", "failure"),
    [
        # A store that does not answer, after a time that looks like a status.
        (f"{LIST} in 401.0629ms, after 3 retries - HTTP error: error sending request", "away"),
        (f"{LIST} in 404.1ms, after 3 retries - HTTP error: error sending request", "away"),
        # Paths and ports that do.
        ("connection refused: http://10.0.0.1:403/x", "away"),
        ("connection reset while reading s3://bucket/run-404/part-403.parquet", "away"),
        ("error 401k rows", None),
        ("part 500 of 503 is no Parquet file", None),
        # Statuses, as libraries write them.
        ("Client error with status 403 Forbidden: <Error>", "denied"),
        ("Server returned non-2xx status code: 401: x", "denied"),
        ("When reading information for key 'a': HTTP response code: 403, no body", "denied"),
        ("An error occurred (403) when calling the HeadObject operation", "denied"),
        ("RESTError 401: Received unexpected JSON Payload", "denied"),
        ("401 Client Error: for url: http://catalog/v1/config", "denied"),
        ("HTTP/1.1 403", "denied"),
        ("StatusCode(403)", "denied"),
        ("An error occurred (404) when calling the HeadObject operation", "gone"),
        ("404 Client Error: for url: http://catalog/v1/x", "gone"),
        ("HTTP 404", "gone"),
        ("503 Server Error: for url: http://catalog/v1/x", "away"),
        ("Server returned 502.", "away"),
        ("status: 500, body: x", "away"),
        ("status_code=403", "denied"),
        ("{'http_status': '404', 'x': 1}", "gone"),
        ("ErrorModel(code=401)", "denied"),
        ("<h1>401 Authorization Required</h1>", "denied"),
        ("<h1>502 Bad Gateway</h1>", "away"),
        ("500 Internal Server Error", "away"),
        ("503 Service Temporarily Unavailable", "away"),
        ("504 Gateway Time-out", "away"),
        ("the catalog responded with 503", "away"),
    ],
)
def test_a_number_is_a_status_where_it_is_said_as_one(said: str, failure: str | None) -> None:
    assert failure_in(ValueError(said)) == failure


def test_a_ca_file_is_not_blamed_for_want_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", refused)
    assert ca_file_problem(("verify", "ca.pem")) == ""


def test_a_ca_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.symlink("loop", tmp_path / "loop")
    for path in (tmp_path / "file" / "x", tmp_path / "loop", tmp_path / ("x" * 300)):
        problem = ca_file_problem(("verify", str(path)))
        assert problem.startswith(f"verify: {str(path)!r} is not a readable PEM file")
