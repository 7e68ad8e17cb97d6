"""`raybatch doctor` of a place: each operation of a run, and the permission that is missing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.azurite import running_azurite
from helpers.findings import found
from helpers.gcs_server import GcsServer, serving
from helpers.small import make_job
from s3server import S3Server, proxy

from prefect_raybatch.cli import commands as cli
from prefect_raybatch.doctor import CheckResult, stores
from prefect_raybatch.storage import open_store
from prefect_raybatch.storage.permissions import PERMISSIONS

STEPS = ["write", "read", "list", "create", "replace", "delete"]
BUCKET = "doctor-stores"


def checked(uri: str, options: dict[str, Any]) -> dict[str, CheckResult]:
    return found(stores.check_store, make_job(output={"uri": uri, "options": options}))


@pytest.fixture(scope="module")
def gcs() -> Iterator[GcsServer]:
    with serving(GcsServer("secret-token", "bucket")) as running:
        yield running


def test_the_command_of_a_bucket(
    gcs: GcsServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in gcs.env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "gs://bucket/out"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and "gs://bucket/out: files can be written" in text, text
    assert "7 pass, 0 warn, 0 fail" in text and "0 s from the object store" in text
    assert not gcs.buckets["bucket"], "it leaves nothing"
    arguments = ["--set", "output.options.bearer_token=other-token", "--json"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "gs://bucket/out", *arguments])
    told = json.loads(capsys.readouterr().out)
    assert ended.value.code == 1 and told["findings"][0]["mark"] == "fail"
    assert "other-token" not in str(told) and "secret-token" not in str(told)


def test_the_command_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "."])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and "files can be deleted" in text and "free in" in text, text
    assert not list(tmp_path.iterdir()), "it leaves nothing"


@pytest.mark.parametrize("operation", ["read", "list", "write", "delete"])
def test_a_missing_role_is_named(gcs: GcsServer, operation: Any) -> None:
    gcs.denied = {operation}
    try:
        got = checked("gs://bucket/out", gcs.options)
    finally:
        gcs.denied = set()
    wrong = {name for name, finding in got.items() if finding.mark == "fail"}
    assert operation in wrong and wrong <= {operation, "create", "replace"}
    assert PERMISSIONS["gs"][operation] in got[operation].remedy
    left = gcs.buckets["bucket"]
    assert bool(left) == (operation == "delete")
    for name in left:
        assert f"gs://bucket/{name.rpartition('/')[0]}" in got["delete"].remedy
    left.clear()


def test_all_that_is_missing_is_named_at_once(gcs: GcsServer) -> None:
    gcs.denied = gcs_denied = {"write", "list", "delete"}
    try:
        got = checked("gs://bucket/out", gcs.options)
    finally:
        gcs.denied = set()
    assert {name for name, finding in got.items() if finding.mark == "fail"} == gcs_denied
    assert "read" in got and "then delete" not in got["delete"].remedy


def test_credentials_that_are_missing_are_the_remedy_and_not_all_that_may_be_wrong(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (finding,) = checked("s3://bucket/out", {"endpoint_url": s3.endpoint, "region": "r"}).values()
    assert finding.remedy.startswith("set AWS_ACCESS_KEY_ID"), finding
    assert "s3://bucket/out" in finding.found and "_probe" not in finding.found


@pytest.fixture(scope="module")
def s3_bucket(s3: S3Server) -> S3Server:
    s3.create_bucket(BUCKET)
    return s3


def test_a_bucket_of_s3(s3_bucket: S3Server) -> None:
    got = checked(f"s3://{BUCKET}/a", s3_bucket.options)
    assert list(got) == STEPS and {finding.mark for finding in got.values()} == {"pass"}
    assert not list(open_store(f"s3://{BUCKET}/a", s3_bucket.options).list())


@pytest.mark.parametrize(
    ("operation", "fits"),
    [
        ("write", lambda method, path: method == "PUT"),
        ("list", lambda method, path: method == "GET" and "list-type" in path),
        ("delete", lambda method, path: method == "POST" and "delete" in path),
    ],
)
def test_a_missing_action_of_s3_is_named(
    s3_bucket: S3Server, operation: Any, fits: Callable[[str, str], bool]
) -> None:
    with proxy(s3_bucket, lambda m, path, _: "403" if fits(m, path) else "pass") as between:
        options = {**s3_bucket.options, "endpoint_url": between.endpoint}
        got = checked(f"s3://{BUCKET}/b", options)
    assert got[operation].mark == "fail"
    assert PERMISSIONS["s3"][operation] in got[operation].remedy


def test_a_store_without_conditions(s3_bucket: S3Server) -> None:
    with proxy(s3_bucket, lambda m, path, h: "strip" if "If-None-Match" in h else "pass") as there:
        got = checked(f"s3://{BUCKET}/c", {**s3_bucket.options, "endpoint_url": there.endpoint})
    assert got["create"].mark == "fail" and "put-if-absent" in got["create"].found
    with proxy(s3_bucket, lambda m, path, h: "501" if "If-Match" in h else "pass") as there:
        got = checked(f"s3://{BUCKET}/d", {**s3_bucket.options, "endpoint_url": there.endpoint})
    assert got["replace"].mark == "warn" and got["delete"].mark == "pass"


def test_a_folder_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **more: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "makedirs", refuse)
    monkeypatch.setattr(os, "mkdir", refuse)
    got = checked(str(tmp_path), {})
    assert list(got) == ["write"] and got["write"].mark == "fail"
    assert "permissions" in got["write"].remedy


@pytest.mark.whole
def test_a_container_of_azure_and_a_missing_role(tmp_path: Path) -> None:
    with running_azurite(tmp_path, "bucket") as server:
        got = checked("az://bucket/out", server.options)
        assert list(got) == STEPS and {finding.mark for finding in got.values()} == {"pass"}
        for permissions, wrong in (
            ("rcwd", {"list"}),
            ("rcwl", {"delete"}),
            ("rl", {"write", "delete"}),
        ):
            options = {**server.options, "sas_key": server.sas("bucket", permissions)}
            del options["account_key"]
            got = checked("az://bucket/out", options)
            failed = {name for name, finding in got.items() if finding.mark == "fail"}
            assert failed == wrong, got
            for name in wrong:
                assert PERMISSIONS["az"][name] in got[name].remedy
            assert options["sas_key"] not in str(got)
