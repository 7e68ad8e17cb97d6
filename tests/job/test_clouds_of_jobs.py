"""What a job may say of Google Cloud Storage and Azure, and what it is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from helpers.small import make_job

from prefect_raybatch.compile.job import read_spec
from prefect_raybatch.errors import ConfigError, CredentialsUnusable
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.secrets import MASK, hide_options, hide_users
from prefect_raybatch.job.trusted_places import Reach
from prefect_raybatch.policy.policy import JobPolicy
from prefect_raybatch.runs.plan_run import check_places
from prefect_raybatch.source.tables.lance_sets import open_lance
from prefect_raybatch.storage import join, open_store, table_settings
from prefect_raybatch.storage.clouds import connection


def test_folders_of_a_policy_hold_in_every_cloud() -> None:
    policy = JobPolicy("test", read=("gs://b/in", "az://"), write=("abfss://c/out",))
    assert policy.may_read("gs://b/in/x.csv") and policy.may_write("az://c/out/run")
    assert policy.may_read("az://any/x") and policy.may_read("abfs://any/x")
    for uri in ("gs://b/input", "gs://b", "s3://b/in/x", "gs://b/in/../x", "gs://b/in/%2e%2e/x"):
        assert not policy.may_read(uri), uri
    assert not policy.may_write("gs://c/out")


@pytest.mark.parametrize(
    "options",
    [
        {"base_url": "http://other"},
        {"endpoint": "http://other/account"},
        {"account_name": "other"},
        {"account_name": "store.example/#"},
        {"application_credentials": "/etc/shadow"},
        {"federated_token_file": "/etc/shadow"},
        {"service_account_key": '{"token_uri": "http://other"}'},
        {"authority_host": "http://other"},
        {"use_azure_cli": "true"},
    ],
)
def test_a_job_from_elsewhere_reaches_no_other_host_or_file(options: dict[str, Any]) -> None:
    policy = JobPolicy("test", hosts=("mine.blob.core.windows.net", "store.example"))
    Reach(policy).options("output.options", {"account_name": "mine", "account_key": "k"})
    Reach(policy).options("output.options", {"base_url": "https://store.example"})
    with pytest.raises(ConfigError, match=r"output\.options\."):
        Reach(policy).options("output.options", options)


def test_keys_are_masked_and_places_are_not() -> None:
    keys = ("account_key", "sas_key", "bearer_token", "client_secret", "service_account_key")
    assert set(hide_options({name: "x" for name in keys}).values()) == {MASK}
    places = {"account_name": "a", "endpoint": "http://h", "base_url": "http://h"}
    assert hide_options(places) == places


def test_uris_of_one_store_are_one_place() -> None:
    assert join("abfss://c/a", "b") == join("abfs://c/a", "b") == join("az://c/a/", "b")
    assert make_job(output={"uri": "gs://b/out"}).output.uri == "gs://b/out"


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("gcs://b/x", r"gs://bucket.*prefect-raybatch\[gcs\].*prefect-raybatch\[azure\]"),
        ("abfss://c@acct.example.com/x", r"write az://container/path.*account_name and endpoint"),
        ("gs://", r"names no bucket; write gs://"),
        ("az://Box/out", r"capitals in the name of its bucket or container.*small letters"),
        ("abfss://acct@my-box.dfs.core.windows.net/x", r"CONTAINER@ACCOUNT.* in this order"),
    ],
)
def test_a_wrong_uri_is_answered_with_the_right_one(uri: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)output.uri.*{said}"):
        make_job(output={"uri": uri})


URL = "abfss://box@acct.dfs.core.windows.net/out"


def test_urls_with_an_account_are_taken_as_spark_takes_them() -> None:
    job = make_job(output={"uri": URL})
    assert BatchJob.from_dict(job.to_dict()).output.uri == hide_users(URL) == URL
    store = open_store(URL, {})
    assert store.uri == "az://box@acct/out" and open_store(store.uri, {}).uri == store.uri
    assert join(URL, "b") == join("abfs://box@ACCT/out", "b") == "az://box@acct/out/b"
    with pytest.raises(ConfigError, match="another account than options"):
        open_store(URL, {"account_name": "other"})
    with pytest.raises(ConfigError, match=r"before an @") as caught:
        make_job(output={"uri": "az://user:hush@acct/out"})
    assert "hush" not in str(caught.value)
    assert "hush" not in hide_users("abfss://user:hush@acct/out")


def test_a_policy_for_any_container_is_not_for_any_account() -> None:
    policy = JobPolicy("test", read=("az://",), write=(URL,))
    assert policy.may_read("az://box/x") and not policy.may_read("az://box@evil/x")
    assert policy.may_write("az://box@acct/out/x") and policy.may_write(f"{URL}/x")
    assert not policy.may_write("az://box/out/x") and not policy.may_write("az://box@evil/out/x")


def test_containers_of_two_accounts_are_two_places(monkeypatch: pytest.MonkeyPatch) -> None:
    read = read_spec(
        make_job(source={"uri": "az://box", "options": {"account_name": "one"}}).source
    )
    check_places(read, "az://box/out", {"account_name": "two"})
    check_places(read, URL, {})
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "one")
    for uri, options in (("az://box/out", {"account_name": "one"}), ("az://box@one/x", {}),
                         ("az://box/out", {})):  # fmt: skip
        with pytest.raises(ConfigError, match="inside the input"):
            check_places(read, uri, options)


@pytest.mark.parametrize("group", ["source", "output"])
def test_an_unknown_option_is_an_error_of_the_job(group: str) -> None:
    for uri, known in (("gs://b/x", "bearer_token"), ("az://c/x", "account_name")):
        with pytest.raises(ConfigError, match=rf"{group}.*'key'.*Use .*{known}") as caught:
            make_job(**{group: {"uri": uri, "options": {"key": "planted"}}})
        assert "planted" not in str(caught.value)


def test_an_unknown_option_of_s3_is_refused_with_known_names() -> None:
    with pytest.raises(ConfigError, match=r"'sekret'.*Use key, secret, .*endpoint_url") as caught:
        open_store("s3://b/x", {"sekret": "planted"}).read("x")
    assert "planted" not in str(caught.value)


def test_azure_without_an_account_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AZURE_"):
            monkeypatch.delenv(name)
    with pytest.raises(
        ConfigError, match=r"az://c names no storage account\. Set AZURE_.*options beside"
    ):
        open_store("az://c/x", {})
    with pytest.raises(ConfigError, match="names no storage account"):
        check_places(read_spec(make_job().source), "az://c/x", {})


@pytest.mark.parametrize(
    ("uri", "options", "remedy"),
    [
        ("gs://b/x", {}, "gcloud auth application-default login"),
        ("az://c@acct/x", {"msi_endpoint": "http://127.0.0.1:9/token"}, "AZURE_STORAGE_SAS_KEY"),
    ],
)
def test_missing_credentials_name_where_they_come_from(
    uri: str, options: dict[str, Any], remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP"):
        monkeypatch.setenv(name, "127.0.0.1:9")
    for name in list(os.environ):
        if name.startswith(("AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)
    store = open_store(uri, options)
    with pytest.raises(CredentialsUnusable, match=remedy):
        store.read("x")


def test_an_option_of_another_store_is_refused_without_its_value() -> None:
    with pytest.raises(ConfigError, match=r"no options 'google_bearer_token'") as error:
        open_store("gs://b/x", {"google_bearer_token": "planted"})
    assert "planted" not in str(error.value)


def test_lance_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"gs://b/t: Lance datasets.*not on gs://"):
        open_lance(read_spec(make_job(source={"uri": "gs://b/t", "format": "lance"}).source))
    with pytest.raises(ConfigError, match="not on az://"):
        table_settings("az://c/t", {})


@pytest.mark.parametrize(("uri", "extra"), [("gs://bucket/out", "gcs"), ("az://box/out", "azure")])
def test_a_missing_extra_is_named(uri: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"pip install \"prefect-raybatch\[{extra}\]\""):
        open_store(uri, {})
