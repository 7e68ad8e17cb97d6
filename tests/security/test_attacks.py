"""Each attack of the table is refused, with the words that are expected."""

from __future__ import annotations

import itertools
import json
import re
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import sqlalchemy
from attacks import (
    ATTACKS,
    BOMBS,
    ENDLESS_TEMPLATES,
    NEVER_ASKED,
    OWNER,
    PLANTED,
    PRIVATE,
    TOKENS_IN_PATHS,
    Attack,
)
from helpers.policies import set_policy
from helpers.small import make_job, small_run
from helpers.specs import check_template_of, reads
from urllib3.util import parse_url

from prefect_raybatch.api.sending import sendable
from prefect_raybatch.compile.job import public_job
from prefect_raybatch.compile.resolved import fingerprint
from prefect_raybatch.errors import ConfigError, RayBatchError, SourceError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.publish import PublishTarget
from prefect_raybatch.job.secrets import hide_users, recorded
from prefect_raybatch.job.trust import check_trust
from prefect_raybatch.job.trusted_places import Reach
from prefect_raybatch.model import chat_template
from prefect_raybatch.policy.in_force import operator_policy, owner_policy, policy_applied
from prefect_raybatch.policy.policy import JobPolicy
from prefect_raybatch.source import peek
from prefect_raybatch.storage.internet import allowed, shown_url


def filled(value: Any, folder: Path) -> Any:
    """The value with {folder} in its texts filled in."""
    if isinstance(value, dict):
        return {name: filled(inner, folder) for name, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner, folder) for inner in value]
    if not isinstance(value, str):
        return value
    return value.replace("{folder}", str(folder)).replace("${{", "${").replace("}}", "}")


@pytest.mark.parametrize("attack", ATTACKS, ids=[attack.title for attack in ATTACKS])
def test_the_attack_is_refused(
    attack: Attack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("in", "out", "inside"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "link").symlink_to("/etc")
    (tmp_path / "in/a.csv").write_text("Company\nA\n")
    (tmp_path / "in/2026").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "in/2026")
    groups = {
        "source": {"uri": "{folder}/in/a.csv"},
        "output": {"uri": "{folder}/out"},
        **attack.groups,
    }
    if attack.origin == OWNER:
        monkeypatch.delenv("RAYBATCH_POLICY")
        policy = owner_policy()
    else:
        set_policy(monkeypatch, tmp_path, **filled(attack.policy, tmp_path))
        policy = operator_policy()
    job = make_job(**filled(groups, tmp_path))
    with policy_applied(policy), pytest.raises(ConfigError) as caught:
        check_trust(job)
    assert re.search(attack.words, str(caught.value)), str(caught.value)


def test_the_table_holds_150_attacks_with_a_refusal_each() -> None:
    """A pattern that matches nearly every error would expect no refusal in particular."""
    titles = Counter(attack.title for attack in ATTACKS)
    assert len(titles) == len(ATTACKS) >= 150, titles.most_common(3)
    assert not [a for a in ATTACKS if len(re.sub(r"\W", "", a.words)) <= 7]
    assert not [attack for attack in ATTACKS if re.search(attack.words, "this job is not valid")]


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_by_what_it_declares(tmp_path: Path, name: str) -> None:
    BOMBS[name](tmp_path / "a.arrow")
    words = r"a\.arrow: claims to decompress from \d+ to at least.*RAYBATCH_MAX_EXPANSION"
    with pytest.raises(SourceError, match=words):
        peek(reads(uri=str(tmp_path / "a.arrow")))


@pytest.mark.parametrize("name", ENDLESS_TEMPLATES)
def test_a_template_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    template, prompt, words = ENDLESS_TEMPLATES[name]
    monkeypatch.setattr(chat_template, "TEMPLATE_SECONDS", 1.0)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (tmp_path / "tokenizer.json").write_text("{}")
    job = make_job(prompt={"template": "{a}", **prompt}, engine={"model": str(tmp_path)})
    with pytest.raises(ConfigError, match=words):
        check_template_of(job, {"source": str(tmp_path), "revision": None})


def test_a_plain_job_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the attacks would be refused for nothing."""
    set_policy(monkeypatch, tmp_path, read=["in"], write=["out"])
    for uri in ("in/a.csv", "in", "in/*.csv", "in/b/../a.csv"):
        job = make_job(
            source={"uri": f"{tmp_path}/{uri}"}, output={"uri": f"file://{tmp_path}/out/b"}
        )
        with policy_applied(operator_policy()):
            check_trust(job)


def test_the_host_that_is_compared_is_the_one_that_libraries_connect_to() -> None:
    """Of all URLs that one can make of these parts, those that are not refused."""
    marks = ("", "@", "/", "?", "#", ":", "\\", ";", ",", "%", "%40", "%2f", "\t", "\n", "[", "]")
    hosts = ("good.com", "evil.com", "", "1", "[::1]")
    compared = 0
    for one, two, three in itertools.product(hosts, hosts, ("", "/db", "/@evil.com/db", "/a:b@x")):
        for before, between in itertools.product(("", "u@", "u:p@", ":@", "/@"), marks):
            url = f"postgresql://{before}{one}{between}{two}{three}"
            asked = hosts_asked(lambda reach, url=url: reach.database("f", url, False))
            if asked:
                assert asked == [sqlalchemy.make_url(url).host], url
            web = url.replace("postgresql", "http")
            found = hosts_asked(lambda reach, web=web: reach.connect_url("f", web))
            if found:
                plain = [host and host.strip("[]") for host in (parse_url(web).host, found[0])]
                assert plain[0] == plain[1] == urlsplit(web).hostname, web
            compared += len(asked) + len(found)
    assert compared > 300


def hosts_asked(ask: Callable[[Reach], None]) -> list[str]:
    """The hosts that the policy is asked about; none where the URL is refused."""
    asked: list[str] = []

    class Listening(JobPolicy):
        def may_connect(self, host: str, port: int | None = None) -> bool:
            asked.append(host)
            return True

    try:
        ask(Reach(Listening("test")))
    except ConfigError:
        return []
    return asked


@pytest.mark.parametrize("address", NEVER_ASKED)
def test_addresses_that_are_asked_for_nobody(address: str) -> None:
    assert not allowed(address, False) and not allowed(address, True)


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses(address: str) -> None:
    assert not allowed(address, False) and allowed(address, True)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "64:ff9b::8.8.8.8"])
def test_addresses_of_the_internet(address: str) -> None:
    assert allowed(address, False)


# --- databases ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "uri",
    [
        "sqlite:///file:{folder}/new.db?mode=rwc&uri=true",
        "sqlite:///file:{folder}/new.db?uri=true",
        "sqlite:////{folder}/new.db",
        "sqlite:///file:{folder}/there.db?mode=rw&uri=true",
        "sqlite:///file:///{folder}/new.db?uri=true",
    ],
)
def test_reading_makes_no_sqlite_file(tmp_path: Path, uri: str) -> None:
    sqlite3.connect(tmp_path / "there.db").close()
    before = sorted(tmp_path.iterdir())
    source = reads(uri=uri.replace("{folder}", str(tmp_path)), query="SELECT 1 AS a")
    with pytest.raises(RayBatchError, match=r"no database file|mode=rw"):
        peek(source)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "query",
    [
        "ATTACH '{folder}/new.db' AS x",
        "VACUUM INTO '{folder}/new.db'",
        "SELECT load_extension('x')",
    ],
)
def test_a_query_opens_no_other_file(tmp_path: Path, query: str) -> None:
    with sqlite3.connect(tmp_path / "a.db") as base:
        base.execute("CREATE TABLE t (a)")
    source = reads(uri=f"sqlite:///{tmp_path}/a.db", query=query.replace("{folder}", str(tmp_path)))
    with pytest.raises(RayBatchError):
        peek(source)
    assert not (tmp_path / "new.db").exists()


# --- what is shown of a job ---------------------------------------------------------------------


def larger(**engine: Any) -> dict[str, Any]:
    """The group `output` of a cascade to an engine."""
    to = engine if "endpoint" in engine else {"model": "demo", **engine}
    return {"output": {"uri": "o", "escalate": {"to": to, "when": {"logprob_below": -1}}}}


@pytest.mark.parametrize(
    "groups",
    [
        {"engine": {"additional_config": {"a": {"b": PLANTED}}}},
        {"engine": {"additional_config": {"a": ["x", PLANTED]}}},
        {"engine": {"model_loader_extra_config": {"uri": PLANTED}}},
        {"engine": {"kv_transfer_config": {"kv_connector_extra_config": {"a": PLANTED}}}},
        {"engine": {"otlp_traces_endpoint": f"https://host/v1/{PLANTED}/traces"}},
        {"engine": {"otlp_traces_endpoint": f"https://host/?k={PLANTED}"}},
        {"engine": {"env": {"HTTPS_PROXY": f"http://host/{PLANTED}"}}},
        larger(additional_config={"a": PLANTED}),
        larger(env={"HTTPS_PROXY": f"http://host/{PLANTED}"}),
        larger(endpoint={"url": "https://host/v1", "model": "large", "key": PLANTED}),
        {"engine": {"env": {"AWS_ENDPOINT_URL": f"https://me:{PLANTED}@host"}}},
        {"output": {"uri": "o", "options": {"endpoint_url": f"https://host/{PLANTED}/"}}},
        {"source": {"uri": f"https://host/a.csv?api-key={PLANTED}"}},
        {"source": {"uri": f"https://host/a.csv?X-Api-Token={PLANTED}"}},
        {"source": {"uri": f"https://host/{PLANTED}/a.csv"}},
        {"source": {"uri": [f"https://host/{PLANTED}/a.csv", "https://host/b.csv"]}},
        {"source": {"uri": f"https://host/x;token={PLANTED}/a.csv"}},
        {"source": {"uri": "a.b", "catalog": {"uri": f"https://host/{PLANTED}/v1"}}},
        {"source": {"uri": "a.b", "catalog": {"uri": f"https://host/v1?sig={PLANTED}"}}},
        {"source": {"uri": "a.b", "catalog": {"uri": "u", "warehouse": f"https://h/{PLANTED}"}}},
    ],
)
def test_a_key_is_in_nothing_that_others_see(groups: dict[str, Any]) -> None:
    job = make_job(**groups)
    shown = " ".join([job.model_dump_json(), repr(job), json.dumps(job.model_dump(mode="json"))])
    assert PLANTED not in shown and PLANTED in json.dumps(job.to_dict())


@pytest.mark.parametrize("token", TOKENS_IN_PATHS)
@pytest.mark.parametrize("place", ["source", "catalog"])
def test_a_token_in_a_path_is_in_no_record_of_a_run(tmp_path: Path, token: str, place: str) -> None:
    """It counts in the fingerprint all the same: it may be the name of something else."""
    url = f"https://host.example.com/dl/{token}/a.csv"
    source = {"uri": url} if place == "source" else {"uri": "a.b", "catalog": {"uri": url}}
    run = small_run(tmp_path / "run", source=source)
    run.commit_all()
    for path in (tmp_path / "run").rglob("*.json"):
        assert token not in path.read_text(), path
    job = make_job(source=source)
    assert token not in job.model_dump_json()
    if place == "source":
        assert token not in json.dumps(sendable(job))
    else:
        with pytest.raises(ConfigError, match=r"source\.catalog\.uri may be a secret") as caught:
            sendable(job)
        assert token not in str(caught.value)
    assert token not in json.dumps(public_job(job)) and token not in shown_url(url)
    assert BatchJob.from_dict(run.plan.job).name == "nightly"
    other = json.loads(json.dumps(source).replace(token, "another"))
    assert fingerprint(job).fingerprint != fingerprint(make_job(source=other)).fingerprint


@pytest.mark.parametrize(
    "url",
    [
        "https://host/datasets/owner/name/resolve/main/data/train-00000-of-00001.parquet",
        "https://host/2024/11/25/customers-2024-11-25.csv",
        "https://host/resolve/da39a3ee5e6b4b0d3255bfef95601890afd80709/a.csv",
        "https://host/tokens/a.csv",
        "https://host/a/550e8400-e29b-41d4-a716-446655440000/a.csv",
    ],
)
def test_plain_paths_are_shown(url: str) -> None:
    assert hide_users(url) == url and recorded(url) == url


@pytest.mark.parametrize(
    "query",
    [
        *("apikey", "api_key", "API-KEY", "access_token", "x-api-key", "sslpassword", "passwd"),
        *("client_secret", "account_key", "sig", "private_key", "auth"),
    ],
)
def test_a_target_holds_no_key_in_its_url(query: str) -> None:
    with pytest.raises(ValueError, match=r"contains a password or key.*\$\{NAME\}") as caught:
        PublishTarget(format="sql", table="t", uri=f"clickhouse://host/db?{query}={PLANTED}")
    assert PLANTED not in str(caught.value)
    PublishTarget(format="sql", table="t", uri=f"clickhouse://host/db?{query}=${{KEY}}")
