"""What a job may say of Google Cloud Storage and Azure, and what it is refused."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.small import make_job

from prefect_raybatch.compile.job import read_spec
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.secrets import MASK, hide_options
from prefect_raybatch.job.trusted_places import Reach
from prefect_raybatch.policy.policy import JobPolicy
from prefect_raybatch.source.tables.delta import open_delta
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
        ("abfss://c@a.dfs.core.windows.net/x", r"write az://container/path.*account_name"),
        ("gs://", r"names no bucket; write gs://"),
    ],
)
def test_a_wrong_uri_is_answered_with_the_right_one(uri: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)output.uri.*{said}"):
        make_job(output={"uri": uri})


def test_an_option_of_another_store_is_refused_without_its_value() -> None:
    with pytest.raises(ConfigError, match=r"no options 'google_bearer_token'") as error:
        open_store("gs://b/x", {"google_bearer_token": "planted"})
    assert "planted" not in str(error.value)


def test_tables_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"gs://b/t: tables of Delta.*not on gs://"):
        open_delta(read_spec(make_job(source={"uri": "gs://b/t", "format": "delta"}).source))
    with pytest.raises(ConfigError, match="not on az://"):
        table_settings("az://c/t", {})


@pytest.mark.parametrize(("uri", "extra"), [("gs://bucket/out", "gcs"), ("az://box/out", "azure")])
def test_a_missing_extra_is_named(uri: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"pip install \"prefect-raybatch\[{extra}\]\""):
        open_store(uri, {})
