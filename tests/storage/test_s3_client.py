"""How options and environment become the settings of S3 clients, and what their errors mean."""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path
from typing import Any

import pytest
import s3fs
from aiohttp import ClientError as AioError
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError
from helpers.tls import untrusted_server
from pyarrow import fs

from prefect_raybatch.errors import (
    AccessDenied,
    ConfigError,
    CredentialsUnusable,
    StoreError,
    StoreUnavailable,
    UnsafeStore,
)
from prefect_raybatch.storage import (
    S3Settings,
    arrow_filesystem,
    iceberg_options,
    object_store_options,
    open_store,
    s3_settings,
    s3_silence,
    table_settings,
)
from prefect_raybatch.storage.delta_access import delta_access
from prefect_raybatch.storage.s3_answers import Answer, judge
from prefect_raybatch.storage.s3_client import Connection
from prefect_raybatch.storage.s3_silence import Silence, without_keys


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "FSSPEC_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


KEYS = {"aws_access_key_id": "k", "aws_secret_access_key": "s", "aws_session_token": "t"}
OPTIONS = {"key": "k", "secret": "s", "token": "t", "region": "r", "endpoint_url": "http://h"}
CLIENT = {**KEYS, "region_name": "r", "endpoint_url": "http://h"}
WHOLE = S3Settings("http://h", "r", "k", "s", "t")
IN_ENVIRONMENT = {name.upper(): value for name, value in KEYS.items()}


@pytest.mark.parametrize(
    ("options", "env", "settings"),
    [
        ({}, {}, S3Settings(None, "us-east-1")),
        (OPTIONS, {}, WHOLE),
        ({"client_kwargs": CLIENT}, {}, WHOLE),
        ({**OPTIONS, "client_kwargs": {name: "other" for name in CLIENT}}, {}, WHOLE),
        ({"key": "k"}, {}, S3Settings(None, "us-east-1", "k")),
        ({"anon": True}, {}, S3Settings(None, "us-east-1", anon=True)),
        ({"anon": True}, IN_ENVIRONMENT, S3Settings(None, "us-east-1", anon=True)),
        ({}, {**IN_ENVIRONMENT, "AWS_DEFAULT_REGION": "r", "AWS_ENDPOINT_URL": "http://h"}, WHOLE),
        ({}, {"AWS_ENDPOINT_URL_S3": "http://h", "AWS_ENDPOINT_URL": "http://i"},
         S3Settings("http://h", "us-east-1")),
        ({}, {"AWS_ENDPOINT_URL": "http://h", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"},
         S3Settings(None, "us-east-1")),
        ({"profile": "p"}, {}, S3Settings("http://f", "of-p", "k", "s")),
        ({"profile": "role"}, {}, S3Settings(None, "us-east-1")),
    ],
)  # fmt: skip
def test_settings_of_other_clients(
    options: Any, env: Any, settings: S3Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = "aws_access_key_id=k\naws_secret_access_key=s\n"
    answer = '{"Version": 1, "AccessKeyId": "a", "SecretAccessKey": "b"}'
    process = f"credential_process=echo '{answer}'"
    (tmp_path / "config").write_text(
        f"[profile p]\nregion=of-p\nendpoint_url=http://f\n{keys}[profile role]\n{process}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert s3_settings(options) == settings


def test_settings_by_the_names_of_each_library(monkeypatch: pytest.MonkeyPatch) -> None:
    anonymous = S3Settings("https://h", "r", anon=True)
    assert object_store_options(WHOLE) == {
        **KEYS,
        "aws_endpoint": "http://h",
        "aws_region": "r",
        "allow_http": "true",
    }
    assert object_store_options(anonymous) == {
        "aws_endpoint": "https://h",
        "aws_region": "r",
        "aws_skip_signature": "true",
    }
    assert iceberg_options(WHOLE) == {
        "s3.endpoint": "http://h",
        "s3.region": "r",
        "s3.access-key-id": "k",
        "s3.secret-access-key": "s",
        "s3.session-token": "t",
    }
    assert iceberg_options(anonymous)["s3.anonymous"] == "true"
    assert object_store_options(None) is table_settings("/x", OPTIONS) is None
    assert iceberg_options(None) == {} and table_settings("s3a://b/x", OPTIONS) == WHOLE
    secret = S3Settings(None, "r", "key", "hush", "token")
    assert secret.scrub("hush, token and hush of key") == "***, *** and *** of key"
    with pytest.raises(ConfigError, match=r"source\.options: .*\(nobody\)"):
        s3_settings({"profile": "nobody"})
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(fs, "S3FileSystem", lambda **given: seen.append(given))
    host = {"region": "r", "scheme": "http", "endpoint_override": "h"}
    keys = {"access_key": "k", "secret_key": "s", "session_token": "t"}
    assert arrow_filesystem(open_store("s3://b/x", {**OPTIONS, "endpoint_url": "http://h/"})) == (
        *(None, "b/x"),
    )
    arrow_filesystem(open_store("s3://b/x", {"anon": True}))
    assert seen == [{**host, **keys}, {"region": "us-east-1", "anonymous": True}]


@pytest.mark.parametrize(
    ("uri", "options", "place", "used"),
    [
        ("/x", OPTIONS, "/x", None),
        ("s3://b/x", {"key": "k", "secret": "s"}, "s3://b/x",
         {"aws_region": "us-east-1", "aws_access_key_id": "k", "aws_secret_access_key": "s"}),
        ("gs://b/x", {"service_account_key": "hush"}, "gs://b/x",
         {"google_service_account_key": "hush"}),
        ("gs://b", {"base_url": "http://h", "skip_signature": True}, "gs://b",
         {"google_base_url": "http://h", "google_skip_signature": "True", "allow_http": "true"}),
        ("az://c@a/x/y", {"sas_key": "hush"}, "az://c/x/y",
         {"sas_key": "hush", "account_name": "a"}),
    ],
)  # fmt: skip
def test_what_deltalake_is_given(uri: str, options: Any, place: str, used: Any) -> None:
    found = delta_access(uri, options)
    assert (found.uri, found.options) == (place, used)
    hidden = "hush" if "hush" in options.values() else "s" if uri.startswith("s3") else "-"
    assert found.scrub(f"<{hidden}>") == ("<***>" if hidden != "-" else "<->")


@pytest.mark.parametrize("name", ["service_account", "service_account_key",
                                  "application_credentials"])  # fmt: skip
def test_other_credentials_of_google_come_before_a_bearer_token(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "hush")
    assert delta_access("gs://b/t", {name: "f"}).options == {f"google_{name}": "f"}
    with pytest.raises(ConfigError, match="bearer_token"):
        delta_access("gs://b/t", {name: "f", "bearer_token": "x"})
    monkeypatch.setenv(f"GOOGLE_{name.upper()}", "f")
    assert delta_access("gs://b/t", {}).options == {}


CREDENTIALS = "key and secret in the options of the store"


@pytest.mark.parametrize(
    ("options", "env", "credentials", "endpoint"),
    [
        ({}, {}, r"default chain of boto3", "AWS"),
        ({"anon": True, "key": "k"}, {}, r"none \(anon=True\)", "AWS"),
        ({"key": "k", "profile": "p", "endpoint_url": "http://h"}, {"AWS_ENDPOINT_URL": "http://e"},
         CREDENTIALS, "http://h:80"),
        ({"client_kwargs": CLIENT}, {}, CREDENTIALS, "http://h:80"),
        ({"profile": "p"}, {"AWS_PROFILE": "q", "AWS_ENDPOINT_URL_S3": "https://e",
                            "AWS_ENDPOINT_URL": "http://f"}, "profile 'p'", "https://e:443"),
        ({}, {"AWS_PROFILE": "q", "AWS_ACCESS_KEY_ID": "k", "AWS_ENDPOINT_URL": "http://f"},
         "profile 'q'", "http://f:80"),
        ({}, IN_ENVIRONMENT, "environment variable AWS_ACCESS_KEY_ID", "AWS"),
        ({}, {"AWS_WEB_IDENTITY_TOKEN_FILE": "f"}, "variable AWS_WEB_IDENTITY_TOKEN_FILE", "AWS"),
    ],
)  # fmt: skip
def test_credentials_and_endpoint_are_named(
    options: Any, env: Any, credentials: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    link = Connection(options)
    with pytest.raises(AssertionError, match=credentials):
        raise AssertionError(link.credentials())
    assert link.endpoint(object()) == endpoint


def test_no_secret_is_in_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    client = {"aws_secret_access_key": "four", "aws_session_token": "five"}
    for number, name in enumerate(("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")):
        monkeypatch.setenv(name, ("six", "seven")[number])
    options = {"secret": "one", "token": "two", "password": "three", "client_kwargs": client}
    link = Connection({**options, "key": "shown"})
    assert link.scrub("one two three four five six seven shown") == "*** " * 7 + "shown"
    assert link.scrub("x" * 301) == "x" * 300
    assert Connection({}).scrub('get "https://u:p@h:9/x?y" now') == 'get "https://h:9" now'


def test_what_s3fs_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(s3fs, "S3FileSystem", lambda **given: seen.append(given) or len(seen))
    changed = {"read_timeout": 5, "retries": 9}
    link = Connection({"key": "k", "region": "r", "config_kwargs": changed})
    assert link.filesystem() == link.filesystem() == 1
    link.renew(7)
    assert link.filesystem() == 1, "another call has renewed it"
    link.renew(link.filesystem())
    assert link.filesystem() == 2
    config = seen[0].pop("config_kwargs")
    assert issubclass(config.pop("http_session_cls"), object)
    assert seen[0] == {
        "key": "k",
        "client_kwargs": {"region_name": "r"},
        "skip_instance_cache": True,
        "use_listings_cache": False,
    }
    assert config == {
        "connect_timeout": 10,
        "read_timeout": 5,
        "max_pool_connections": 32,
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "retries": {"total_max_attempts": 1},
    }
    Connection({"region": "r", "client_kwargs": {"region_name": "first"}}).filesystem()
    assert seen[-1]["client_kwargs"] == {"region_name": "first"}


def test_connections_are_shared_by_options_and_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Connection, "known", {})
    links = [Connection.shared({"key": "k"}), Connection.shared({"key": "l"})]
    assert links[0] is Connection.shared({"key": "k"}) and links[0].options == {"key": "k"}
    for name in ("AWS_X", "FSSPEC_X"):
        monkeypatch.setenv(name, "1")
        links.append(Connection.shared({"key": "k"}))
    assert len(set(map(id, links))) == 4
    for number in range(13):
        Connection.shared({"key": str(number)})
    assert len(Connection.known) == 17
    assert Connection.shared({"key": "last"}).options and len(Connection.known) == 1


def failed(*answer: Any) -> Any:
    return Answer(*answer).error("put_object", "b", "k", 4, "CREDENTIALS", "http://h:9")


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        ((0, "X", ""), StoreUnavailable, r"^s3://b/k: .* from http://h:9 in 4 tries \(.*: X\)\. C"),
        ((503, "X", "y"), StoreUnavailable, r"\(the last: 503 X: y\)"),
        *[((status, "X", ""), StoreUnavailable, "4 tries") for status in (408, 409, 429, 500)],
        *[((400, code, ""), StoreUnavailable, "4 tries")
          for code in ("RequestTimeout", "NoSuchUpload", "SlowDown", "BadDigest", "EntityTooSmall",
                       "XAmzContentSHA256Mismatch")],
        ((200, "X", "y"), StoreError, r"^s3://b/k: .* refused put_object in 4 tries \(200 X: y\)"),
        ((404, "NoSuchBucket", ""), StoreError, r"^bucket 'b' of s3://b/k .*credentials: CREDENT"),
        ((404, "NoSuchKey", ""), FileNotFoundError, "'s3://b/k'"),
        ((507, "X", "y"), StoreError, r"^s3://b/k: .*over its quota \(507 X: y\)"),
        ((403, "QuotaExceeded", ""), StoreError, "over its quota"),
        *[((400, code, ""), CredentialsUnusable, r"^s3://b/k: the cred.*expired.*CREDENTIALS")
          for code in ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired")],
        *[((status, "X", "y"), AccessDenied, rf"denied \({status} X: y; .*allow s3:PutObject on")
          for status in (401, 403)],
        *[((status, "X", ""), StoreError, r"region or at another endpoint \(3\d\d X\)")
          for status in (301, 302, 303, 307, 308)],
        ((400, "AuthorizationHeaderMalformed", ""), StoreError, "another region"),
        ((501, "X", "y"), UnsafeStore, r"^s3://b/k: .*put-if-absent \(501 X: y\)"),
        ((505, "X", "y"), StoreError, r"^s3://b/k: the store refused put_object \(505 X: y\)"),
        ((400, "400", ""), StoreError, "refused put_object"),
        ((-1, "NoCredentialsError", "y"), CredentialsUnusable,
         r"cannot send the request \(NoCredentialsError: y; credentials: CREDENTIALS\)"),
        ((-1, "SSLError", "y"), StoreError, "cannot send"),
    ],
)  # fmt: skip
def test_what_becomes_of_an_answer(answer: Any, kind: type[Exception], words: str) -> None:
    error = failed(*answer)
    assert type(error) is kind
    with pytest.raises(kind, match=words):
        raise error


def test_other_operations_have_errors_of_their_own() -> None:
    def error(operation: str, *answer: Any) -> Any:
        return Answer(*answer).error(operation, "b", "k", 1, "c", "e")

    assert type(error("get_object", 501, "X", "")) is StoreError
    found = error("head_object", 400, "400", "")
    assert type(found) is CredentialsUnusable and "s3://b/k: refused (400 400)" in str(found)
    assert "s3:AbortMultipartUpload" in str(error("abort_multipart_upload", 403, "X", ""))


REFUSED = boto.ClientError(
    {"Error": {"Code": "C", "Message": "s"}, "ResponseMetadata": {"HTTPStatusCode": 404}}, "x"
)
WRAPPED = OSError("w")
WRAPPED.__cause__ = REFUSED
TLS = boto.SSLError(endpoint_url="u", error=ssl.SSLError("s"))
NO_KEYS = boto.NoCredentialsError()


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (REFUSED, (404, "C", "<s>")),
        (WRAPPED, (404, "C", "<s>")),
        (boto.HTTPClientError(error=REFUSED), (404, "C", "<s>")),
        (boto.ClientError({}, "x"), (0, "", "<>")),
        (OSError("s"), (0, "OSError", "<s>")),
        (TimeoutError("s"), (0, "TimeoutError", "<s>")),
        (AioError("s"), (0, "ClientError", "<s>")),
        (ResponseParserError("s"), (0, "ResponseParserError", "<s>")),
        (boto.CredentialRetrievalError(provider="p", error_msg="e"),
         (0, "CredentialRetrievalError", "<Error when retrieving credentials from p: e>")),
        (TLS, (-1, "SSLError", f"<{TLS}>")),
        (NO_KEYS, (-1, "NoCredentialsError", f"<{NO_KEYS}>")),
    ],
)  # fmt: skip
def test_what_an_error_of_the_client_says(error: Exception, answer: Any) -> None:
    assert judge(error, lambda text: f"<{text}>") == answer


def test_an_error_of_another_kind_is_raised_again() -> None:
    with pytest.raises(KeyError):
        judge(KeyError("x"), str)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://u:p@h/x", "http://h:80"),
        ("https://h", "https://h:443"),
        ("https://h:80/?k", "https://h:80"),
        ("http://[fd00::1]", "http://[fd00::1]:80"),
        ("http://u@[fd00::1]:9/x", "http://[fd00::1]:9"),
        ("http://h:port", "an invalid endpoint_url"),
    ],
)
def test_an_endpoint_is_shown_without_keys(url: str, shown: str) -> None:
    assert without_keys(url) == shown


def test_warnings_come_late_and_seldom(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, clock: Any
) -> None:
    monkeypatch.setattr(s3_silence, "time", clock)
    silence, warned = Silence(), []
    with caplog.at_level(logging.WARNING):
        for seconds in (14.9, 0.1, 59.9, 0.1, 100):
            clock.at += seconds
            silence.warn("p", "e", 1000.0, 1100.0, "m")
            warned.append([record.getMessage()[:73] for record in caplog.records])
            caplog.clear()
    said = "p: no valid answer from e for {} s (m). Retrying for {} s. Check that the"
    expected = [[], [said.format(15, 85)], [], [said.format(75, 25)], [said.format(175, 0)]]
    assert warned == [[text[:73] for text in texts] for texts in expected]


@pytest.mark.parametrize("setting", ["client_kwargs.verify", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"])
@pytest.mark.parametrize("content", [b"\x30\x82", None], ids=["no PEM", "missing"])
def test_a_file_of_certificates_that_cannot_be_used_is_no_outage(
    setting: str, content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tmp_path / "ca.der"
    if content is not None:
        wrong.write_bytes(content)
    more: dict[str, Any] = {"client_kwargs": {"verify": str(wrong)}}
    if setting.isupper():
        monkeypatch.setenv(setting, str(wrong))
        more = {}
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("asked again"))
    with untrusted_server(tmp_path) as url:
        store = open_store("s3://b/x", {"key": "k", "secret": "s", "endpoint_url": url, **more})
        with pytest.raises(ConfigError, match=rf"s3://b/x/a: .*{setting}: '.*ca\.der' is not a r"):
            store.read("a")


def test_ca_bundle_of_a_profile_counts_before_that_of_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".aws").mkdir()
    config, wrong = tmp_path / ".aws/config", tmp_path / "wrong.pem"
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(wrong))
    with untrusted_server(tmp_path) as url:
        options = {"key": "k", "secret": "s", "endpoint_url": url}
        for path, kind, said in (
            (tmp_path / "certificate.pem", StoreError, "certificate verify failed|no valid answer"),
            (
                wrong,
                ConfigError,
                "s3://b/x/a: ca_bundle in the AWS configuration: '.*wrong.pem' is",
            ),
        ):
            config.write_text(f"[default]\nca_bundle = {path}\n")
            Connection.known.clear()
            store = open_store("s3://b/x", options)
            store.retry_seconds = 0
            with pytest.raises(kind, match=said):
                store.read("a")
