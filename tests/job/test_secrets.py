"""Keys that a job holds come out nowhere: not in records, logs, errors or Prefect's parameters."""

from __future__ import annotations

import gzip
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.policies import set_policy
from helpers.small import MODEL, job_dict, make_job
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run

from prefect_raybatch.api import plan_run
from prefect_raybatch.api.sending import environment, sendable
from prefect_raybatch.compile.job import model_request, public_job
from prefect_raybatch.compile.resolved import fingerprint
from prefect_raybatch.errors import ConfigError, PlanMismatch, RayBatchError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.secrets import MASK
from prefect_raybatch.model.pinned import pin
from prefect_raybatch.runs.run import run_store
from prefect_raybatch.storage import S3Store, s3_silence

SECRETS = {
    "key": "PLANTEDkey0001",
    "secret": "PLANTEDsecret0002",
    "token": "PLANTEDtoken0003",
    "inner": "PLANTEDinner0004",
    "env": "PLANTEDenv0005",
    "hf": "PLANTEDhf0006",
}


def job_with_secrets(tmp_path: Path, uri: str, **options: Any) -> BatchJob:
    given = {
        "key": SECRETS["key"],
        "secret": SECRETS["secret"],
        "token": SECRETS["token"],
        "client_kwargs": {"aws_session_token": SECRETS["inner"], "region_name": "us-east-1"},
        **options,
    }
    return make_job(
        source={"uri": str(tmp_path / "in.parquet"), "options": given},
        output={"uri": uri, "options": given},
        engine={"env": {"MY_API_KEY": SECRETS["env"], "A": "b"}, "hf_token": SECRETS["hf"]},
    )


def found_in(text: str) -> list[str]:
    return [name for name, secret in SECRETS.items() if secret in text]


def test_a_run_directory_holds_no_key(tmp_path, monkeypatch):
    set_policy(monkeypatch, tmp_path, engine_variables=["MY_API_KEY", "A"])
    pq.write_table(pa.table({"Company": ["a", "b"]}), tmp_path / "in.parquet")
    job = job_with_secrets(tmp_path, str(tmp_path / "out"))
    plan_run(job, "k")
    files = [p for p in (tmp_path / "out").rglob("*") if p.is_file()]
    assert len(files) >= 3
    for path in files:
        data = path.read_bytes()
        if path.suffix == ".parquet":
            data += str(pq.read_table(path).to_pylist()).encode()
        if path.suffix == ".gz":
            data += gzip.decompress(data)
        assert found_in(data.decode("latin-1")) == [], path


@pytest.mark.parametrize("wrong", ["bucket", "credentials", "down"])
def test_errors_and_logs_hold_no_key(tmp_path, s3, wrong, caplog, capfd, monkeypatch):
    pq.write_table(pa.table({"Company": ["a"]}), tmp_path / "in.parquet")
    options = {"endpoint_url": s3.endpoint}
    if wrong == "bucket":
        options |= {"key": s3.key, "secret": s3.secret, "token": None}
        options["client_kwargs"] = {}
    if wrong == "down":
        options["endpoint_url"] = "http://127.0.0.1:9"
    bucket = "missing" if wrong == "bucket" else "secrets"
    job = job_with_secrets(tmp_path, f"s3://{bucket}/out", **options)
    monkeypatch.setattr(S3Store.__init__, "__defaults__", (1.0,))
    monkeypatch.setattr(s3_silence, "WARN_AFTER", 0.5)
    store = run_store(job.output, "k")
    with caplog.at_level(logging.DEBUG), pytest.raises(RayBatchError) as caught:
        plan_run(job, "k")
    known = {**SECRETS, "server": s3.secret}
    error = caught.value
    shown = "".join(capfd.readouterr()) + str(error) + repr(error) + repr(error.__cause__)
    shown += str(pickle.dumps(error)) + repr(store)
    ours = "".join(r.getMessage() for r in caplog.records if r.name.startswith("prefect_raybatch"))
    assert [name for name, secret in known.items() if secret in shown + ours] == []


def test_as_json_keys_are_hidden_and_yaml_keeps_them(tmp_path):
    job = job_with_secrets(tmp_path, "s3://b/out", endpoint_url="http://store:9000")
    shown = job.model_dump_json()
    assert found_in(shown) == []
    value = json.loads(shown)
    assert value["output"]["options"]["endpoint_url"] == "http://store:9000"
    assert value["output"]["options"]["client_kwargs"]["region_name"] == "us-east-1"
    assert value["engine"]["env"] == {"MY_API_KEY": MASK, "A": MASK}
    assert BatchJob.from_dict(job.to_dict()) == job
    assert pickle.loads(pickle.dumps(job)) == job
    with pytest.raises(ConfigError, match="credentials_block"):
        BatchJob.from_dict(value)
    plain = make_job(output={"uri": "out", "options": {"anon": True, "endpoint_url": "http://x"}})
    assert BatchJob.from_dict(json.loads(plain.model_dump_json(by_alias=True))) == plain


def test_prefect_keeps_no_key_of_a_flow_called_in_python(tmp_path, prefect_api):
    @flow
    def night(job: BatchJob) -> tuple[str, str]:
        return str(flow_run.id), job.output.options["secret"]

    job = job_with_secrets(tmp_path, "s3://b/out")
    run_id, secret = night(job)
    assert secret == SECRETS["secret"]
    with get_client(sync_client=True) as client:
        kept = client.read_flow_run(run_id).parameters
        assert found_in(json.dumps(kept)) == []
        assert kept["job"]["output"]["options"]["secret"] == MASK


def test_what_signs_a_url_is_shown_and_kept_nowhere(tmp_path, monkeypatch):
    """Nor is it what tells one job from another: tomorrow's signature is a new one."""
    url = "https://h/a.csv?version=7&X-Amz-Signature={}&sig={}"
    job, other = (
        make_job(source={"uri": [url.format(*keys), "s3://b/x?.csv"]})
        for keys in (("PLANTEDkey0001", "PLANTEDsecret0002"), ("a", "b"))
    )
    shown = [job.model_dump_json(), repr(job), str(job.source), json.dumps(public_job(job))]
    assert found_in(" ".join([*shown, json.dumps(sendable(job))])) == []
    assert f"version=7&X-Amz-Signature={MASK}&sig={MASK}" in shown[0]
    assert public_job(job)["source"]["uri"] == ["https://h/a.csv?version=7", "s3://b/x?.csv"]
    assert fingerprint(job, MODEL) == fingerprint(other, MODEL)
    assert BatchJob.from_dict(job.to_dict()).source.uris[0] == job.source.uris[0]
    with pytest.raises(
        ConfigError, match=r"signature of the URL was masked .* with a credentials_block"
    ):
        BatchJob.from_dict(job.model_dump(mode="json"))


TOKEN_URL = "https://h/token/{}EFGH12345678x/v1"


def hosted(token: str = "PLANTEDkey0001") -> BatchJob:
    """A cascade of two hosted models and a judge, all at servers with a token in the path."""
    endpoint = {"url": TOKEN_URL.format(token), "model": "m", "key": "${KEY}"}
    return make_job(
        engine={"endpoint": endpoint},
        output={
            "uri": "out",
            "schema_model": '{"type": "object", "properties": {"a": {"type": "string"}}}',
            "escalate": {"to": {"endpoint": endpoint}, "when": {"fails_schema": True}},
        },
        quality={"judge": {"endpoint": endpoint, "prompt": "{answer}?"}},
    )


def test_a_token_in_the_path_to_a_hosted_model_counts_and_is_kept_nowhere():
    job, other = hosted(), hosted("PLANTEDsecret0002")
    kept = public_job(job)
    url = "https://h/token/.../v1"
    assert kept["engine"]["endpoint"] == {"url": url, "model": "m"}
    assert kept["output"]["escalate"]["to"]["endpoint"]["url"] == url
    assert kept["quality"]["judge"]["endpoint"]["url"] == url
    assert public_job(BatchJob.from_dict(kept, "plan.json")) == kept
    one, two = fingerprint(job, MODEL), fingerprint(other, MODEL)
    assert one.fingerprint != two.fingerprint
    shown_urls = [each.parts["engine.endpoint.url"] for each in (one, two)]
    assert len(set(shown_urls)) == 2 and all(text.startswith(f"{url}#") for text in shown_urls)
    pinned, moved = (pin(model_request(a_job.engine))["identity"] for a_job in (job, other))
    assert pinned != moved and pinned.startswith(f"m@{url}#")
    shown = [job.model_dump_json(), repr(job), json.dumps([kept, one.parts, pinned])]
    assert found_in(" ".join(shown)) == []
    with pytest.raises(ConfigError, match=r"url contains a key that was masked"):
        BatchJob.from_dict(job.model_dump(mode="json"))


def test_a_url_that_may_hold_a_token_is_not_sent_to_a_cluster_unless_it_holds_none(monkeypatch):
    with pytest.raises(ConfigError, match=r"engine\.endpoint\.url may be a secret") as caught:
        sendable(hosted())
    assert found_in(str(caught.value)) == []
    monkeypatch.setenv("RAYBATCH_SAFE_NAMES", "PLANTED*")
    url = hosted().engine.endpoint.url
    assert sendable(hosted())["engine"]["endpoint"] == {"url": url, "model": "m", "key": "${KEY}"}
    assert environment(hosted(), "")["RAYBATCH_SAFE_NAMES"] == "PLANTED*"


NAMES_IN_URLS = [
    "deployments/Meta-Llama-3-8B-Instruct",
    "Qwen3-235B-A22B-Instruct-2507/v1",
    "accounts/0f1e2d3c4b5a69788796a5b4c3d2e1f0/ai/v1",
    "hf-inference/v1",
    "hf-internal-testing/v1",
]


@pytest.mark.parametrize("path", NAMES_IN_URLS)
def test_a_hosted_url_that_names_its_model_or_account_is_shown_and_sent(path):
    url = f"https://h/{path}"
    job = make_job(engine={"endpoint": {"url": url, "model": "m", "key": "${KEY}"}})
    assert sendable(job)["engine"]["endpoint"]["url"] == url
    assert public_job(job)["engine"]["endpoint"]["url"] == url
    assert fingerprint(job, MODEL).parts["engine.endpoint.url"] == url
    assert BatchJob.from_dict(job.model_dump(mode="json")) == job


@pytest.mark.parametrize(
    "path",
    [
        *("ghp_PLANTEDkey0001", "hf_PLANTEDkey", "sk-proj-PLANTEDkey-0001", "glpat-PLANTEDkey"),
        *("eyJPLANTEDkey0001.e30.x", "dapi0f1e2d3c4b5a69788796a5b4c3d2e1f0"),
        *("gsk_PLANTEDkey00010001", "AIzaPLANTEDkey0001-00010001", "nvapi-PLANTEDkey0001-01"),
        *("token=PLANTEDkey0001", "key=PLANTEDkey0001", "x;token=PLANTED", "token/PLANTEDkey0001"),
    ],
)
def test_a_key_of_a_known_form_in_a_hosted_url_is_hidden_and_not_sent(path):
    job = make_job(engine={"endpoint": {"url": f"https://h/{path}/v1", "model": "m"}})
    key = path.rpartition("/")[2]
    kept = json.dumps([public_job(job), fingerprint(job, MODEL).parts])
    assert key not in job.model_dump_json() + repr(job) + kept
    with pytest.raises(ConfigError, match=r"engine\.endpoint\.url may be a secret"):
        sendable(job)


def test_a_password_behind_the_question_mark_of_a_database_is_refused():
    for uri in ("postgresql://h/x?user=u&password=PLANTEDkey0001", "mysql://h/x?passwd=q"):
        with pytest.raises(ConfigError, match=r"after the \?; .*password_env") as caught:
            make_job(source={"uri": uri, "query": "SELECT 1"})
        assert found_in(str(caught.value)) == []
    plain = "postgresql://h/x?sslmode=require&sslkey=/etc/key.pem"
    assert make_job(source={"uri": plain, "query": "SELECT 1"}).source.uri == plain


# --- what is secret goes by a list of what is not -------------------------------------------------

SECRET_NAMES = [
    "GITHUB_PAT", "DB_PWD", "WANDB_APIKEY", "AUTH", "MY_FLAG", "SENTRY_DSN", "VLLM_API_KEY",
    "RAY_AUTH_TOKEN", "NCCL_SECRET", "HF_TOKEN", "CUDA_PASSWORD", "vllm_lower_key",
]  # fmt: skip
SAFE = {
    "NCCL_DEBUG": "WARN",
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE": "1",
    "CUDA_VISIBLE_DEVICES": "0",
    "OMP_NUM_THREADS": "1",
    "RAY_DEDUP_LOGS": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
PLANTED = "PLANTEDvalue0007"


def shown_everywhere(job: BatchJob, tmp_path: Path) -> str:
    """A job in every form that others get to see."""
    pq.write_table(pa.table({"Company": ["a", "b"]}), tmp_path / "in.parquet")
    plan_run(job, "k")
    kept = "".join(p.read_text("latin-1") for p in (tmp_path / "out").rglob("*") if p.is_file())
    texts = (job.model_dump_json(), repr(job), str(job), f"{job.engine!r} {job.output}", kept)
    return " ".join([*texts, json.dumps(job.model_dump(mode="json")), repr([job])])


def at(tmp_path: Path, **groups: Any) -> BatchJob:
    source = {"uri": str(tmp_path / "in.parquet"), **groups.pop("source", {})}
    output = {"uri": str(tmp_path / "out"), **groups.pop("output", {})}
    return make_job(source=source, output=output, **groups)


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_an_environment_variable_is_secret_unless_its_name_is_known(tmp_path, monkeypatch, name):
    set_policy(monkeypatch, tmp_path, engine_variables=[name, *SAFE])
    job = at(tmp_path, engine={"env": {name: PLANTED, **SAFE}})
    shown = shown_everywhere(job, tmp_path)
    assert PLANTED not in shown and name in shown
    assert json.loads(job.model_dump_json())["engine"]["env"] == {name: MASK, **SAFE}
    with pytest.raises(ConfigError, match=rf"engine\.env\.{name} .*RAYBATCH_SAFE_NAMES") as caught:
        sendable(job)
    assert PLANTED not in str(caught.value)
    with pytest.raises(ConfigError, match="masked"):
        BatchJob.from_dict(json.loads(job.model_dump_json()))
    assert BatchJob.from_dict(job.to_dict()) == job


def test_known_variables_and_those_that_the_operator_names_get_through(tmp_path, monkeypatch):
    assert sendable(at(tmp_path, engine={"env": SAFE}))["engine"]["env"] == SAFE
    job = at(tmp_path, engine={"env": {"MY_FLAG": "on", "OUR_A": "1", "OUR_TOKEN": "2"}})
    monkeypatch.setenv("RAYBATCH_SAFE_NAMES", "MY_FLAG, OUR_*")
    with pytest.raises(ConfigError, match=r"engine\.env\.OUR_TOKEN"):
        sendable(job)
    job = at(tmp_path, engine={"env": {"MY_FLAG": "on", "OUR_A": "1"}})
    assert sendable(job)["engine"]["env"] == {"MY_FLAG": "on", "OUR_A": "1"}
    assert BatchJob.from_dict(json.loads(job.model_dump_json())) == job


@pytest.mark.parametrize(
    "options",
    [
        {"key": PLANTED},
        {"client_kwargs": {"aws_access_key_id": PLANTED}},
        {"config_kwargs": {"proxies": {"https": f"http://me:{PLANTED}@proxy:3128"}}},
        {"endpoint_url": f"http://me:{PLANTED}@store:9000"},
        {"client_kwargs": {"endpoint_url": f"https://{PLANTED}@store"}},
        {"pin": 7007007},
        {"list": [{"of": PLANTED}]},
    ],
)
def test_an_option_is_secret_unless_its_name_is_known_and_its_url_holds_no_user(tmp_path, options):
    job = at(tmp_path, output={"options": options}, source={"options": options})
    shown = shown_everywhere(job, tmp_path)
    assert PLANTED not in shown and "7007007" not in shown
    with pytest.raises(ConfigError, match=r"source\.options\.") as caught:
        sendable(job)
    assert PLANTED not in str(caught.value)
    with pytest.raises(ConfigError, match="masked"):
        BatchJob.from_dict(json.loads(job.model_dump_json()))


def test_options_that_are_no_secrets_are_shown_and_sent(tmp_path):
    options = {
        "anon": True,
        "endpoint_url": "http://store:9000",
        "region": "eu",
        "profile": "nightly",
        "config_kwargs": {"connect_timeout": 5, "s3": {"addressing_style": "path"}},
        "s3_additional_kwargs": {"ServerSideEncryption": "aws:kms"},
    }
    job = at(tmp_path, output={"options": options})
    assert json.loads(job.model_dump_json())["output"]["options"] == options
    assert sendable(job)["output"]["options"] == options
    assert BatchJob.from_dict(json.loads(job.model_dump_json())) == job


def test_properties_of_a_catalog_are_secret_unless_known_or_a_name_of_a_variable(tmp_path):
    table = {"uri": "sales.orders", "format": "iceberg"}
    plain = {"type": "rest", "uri": "https://lake", "auth": {"type": "basic"}, "ssl": {"a": True}}
    named = {"token": "${LAKE_TOKEN}", "auth": {"oauth2": {"client_secret": "${B}"}}}
    job = at(tmp_path, source={**table, "catalog": plain | named})
    assert json.loads(job.model_dump_json())["source"]["catalog"] == plain | named
    assert sendable(job)["source"]["catalog"] == plain | named
    assert BatchJob.from_dict(json.loads(job.model_dump_json())) == job
    for hidden in ({"token": PLANTED}, {"auth": {"a": "${B}", "basic": {"password": PLANTED}}}):
        job = at(tmp_path, source={**table, "catalog": {**plain, **hidden}})
        target = {"format": "iceberg", "table": "a.b", "catalog": {**plain, **hidden}}
        both = at(tmp_path, source=table, output={"publish": [target]})
        shown = "".join(f"{one!r} {one.model_dump_json()} {public_job(one)}" for one in (job, both))
        assert PLANTED not in shown and "rest" in shown
        with pytest.raises(ConfigError, match=r"source\.catalog\..*\$\{NAME\}") as caught:
            sendable(job)
        assert PLANTED not in str(caught.value)


def test_engine_arguments_that_hold_keys_are_hidden_and_still_count(tmp_path):
    def job(secret: str) -> BatchJob:
        extra = {"model_loader_extra_config": {"access_key": secret, "concurrency": 4}}
        return at(tmp_path, engine={**extra, "hf_token": secret, "enforce_eager": True})

    shown = shown_everywhere(job(PLANTED), tmp_path)
    assert PLANTED not in shown and "enforce_eager" in shown and '"concurrency": 4' in shown
    assert fingerprint(job(PLANTED)).fingerprint != fingerprint(job("other")).fingerprint
    with pytest.raises(PlanMismatch) as caught:
        plan_run(job("PLANTEDother0008"), "k")
    assert "PLANTED" not in str(caught.value) and "model_loader_extra_config" in str(caught.value)


def test_what_is_asked_of_the_model_is_never_hidden(tmp_path):
    """It decides the answers; a URL in a prompt or a pattern is no key."""
    asked = {
        "prompt": {"template": "Who is {Company}, http://me:pw@host?"},
        "sampling": {
            "structured_outputs": {"regex": "https?://[^@]+@b.c"},
            "extra_args": {"key": "a", "token": "b"},
        },
    }
    job = at(tmp_path, **asked)
    value = json.loads(job.model_dump_json())
    assert value["prompt"]["template"] == asked["prompt"]["template"]
    assert asked["sampling"].items() <= value["sampling"].items()
    assert BatchJob.from_dict(value) == job
    assert asked["sampling"].items() <= fingerprint(job).parts["sampling"].items()


def test_hiding_changes_no_fingerprint(tmp_path):
    """A run goes on though its keys are others; these are the fingerprints of format 3."""
    plain = make_job()
    keys = {"env": {"DB_PWD": PLANTED}, "hf_token": PLANTED}
    assert fingerprint(make_job(engine=keys)).fingerprint == fingerprint(plain).fingerprint
    loader = {"model_loader_extra_config": {"access_key": "k", "concurrency": 4}}
    assert fingerprint(plain).fingerprint.startswith("e0a52cd438e59027")
    assert fingerprint(make_job(engine=loader)).fingerprint.startswith("cb1d5197dcad2236")


@pytest.mark.parametrize("group", ["source", "output", "engine"])
def test_a_place_with_a_user_in_it_is_refused_and_not_quoted(tmp_path, group):
    field = "model" if group == "engine" else "uri"
    for uri in (f"s3://me:{PLANTED}@bucket/x", f"s3://{PLANTED}@bucket/x"):
        with pytest.raises(ConfigError, match=rf"{group}\.{field}.*options") as caught:
            make_job(**{group: {field: uri}})
        assert PLANTED not in str(caught.value)


@pytest.mark.parametrize(
    "engine",
    [{"env": {"DB_PWD": [PLANTED]}}, {"env": PLANTED}, {"env": {"DB_PWD": 7007007}}],
)
def test_what_is_wrong_with_a_job_is_said_without_its_keys(tmp_path, engine):
    with pytest.raises(ConfigError, match=r"engine\.env") as caught:
        make_job(engine=engine)
    assert PLANTED not in str(caught.value) and "7007007" not in str(caught.value)
    with pytest.raises(ValueError, match="env") as raw:
        BatchJob.model_validate(job_dict(engine=engine))
    assert PLANTED not in str(raw.value) and "7007007" not in str(raw.value)
