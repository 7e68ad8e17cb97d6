"""The blocks against Prefect's own suite and a real Prefect server; no secret leaves them."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import logging
import subprocess
import tomllib
import urllib.error
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, cast
from uuid import UUID, uuid4

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.small import make_job, small_run
from helpers.web_server import served
from prefect import flow
from prefect.blocks.core import Block
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.testing.cli import invoke_and_assert
from prefect.testing.standard_test_suites import BlockStandardTestSuite
from prefect.types import SecretDict
from pydantic import SecretStr, ValidationError
from s3server import S3Server

from prefect_raybatch import BatchJob
from prefect_raybatch.api import finalize_run, sending
from prefect_raybatch.api.sending import sendable
from prefect_raybatch.cli.drive import run_job
from prefect_raybatch.compile.job import model_request
from prefect_raybatch.errors import ConfigError, IncompleteRun, PrefectUnavailable, RayBatchError
from prefect_raybatch.flow import tasks
from prefect_raybatch.flow.blocks import (
    BatchInferenceJob,
    BatchInferenceRun,
    HostedModel,
    ObjectStore,
    RayCluster,
    options_of,
)
from prefect_raybatch.flow.tasks import with_blocks
from prefect_raybatch.job.cluster import Cluster
from prefect_raybatch.model import pinned as models
from prefect_raybatch.remote.follower import Submission
from prefect_raybatch.runs.repair import repair_run
from prefect_raybatch.runs.run import Run
from prefect_raybatch.storage import open_store

BLOCKS = [RayCluster, ObjectStore, HostedModel, BatchInferenceJob]
ROOT = Path(__file__).parents[2]
BUCKET = "bucket"  # which the examples name
HUSH = ("hush-key-1", "hush-secret-2", "hush-token-3", "hush-header-4", "hush-bearer-5")


def store(**more: Any) -> ObjectStore:
    return ObjectStore(
        access_key_id=HUSH[0], secret_access_key=HUSH[1], session_token=HUSH[2], **more
    )


def cluster() -> RayCluster:
    return RayCluster(
        job_server="http://head:8265", headers={"X-Key": HUSH[3]}, token=SecretStr(HUSH[4])
    )


def job(**groups: Any) -> BatchJob:
    return make_job(output={"uri": "s3://b/out"}, **groups)


# --- Prefect's own suite ------------------------------------------------------------------------


class Suite(BlockStandardTestSuite):
    def test_has_a_valid_image(self, block: type[Block]) -> None:
        try:
            super().test_has_a_valid_image(block)
        except (urllib.error.URLError, TimeoutError) as error:
            pytest.skip(f"no network to {block._logo_url}: {error}")


class TestRayCluster(Suite):
    @pytest.fixture
    def block(self) -> type[Block]:
        return RayCluster


class TestObjectStore(Suite):
    @pytest.fixture
    def block(self) -> type[Block]:
        return ObjectStore


class TestHostedModel(Suite):
    @pytest.fixture
    def block(self) -> type[Block]:
        return HostedModel


class TestBatchInferenceJob(Suite):
    @pytest.fixture
    def block(self) -> type[Block]:
        return BatchInferenceJob


@pytest.mark.parametrize(
    ("block", "slug", "names"),
    [
        (RayCluster, "ray-cluster", "address job_server headers token kubernetes"),
        (
            ObjectStore,
            "object-store",
            "credentials access_key_id secret_access_key session_token endpoint_url region "
            "anonymous",
        ),
        (
            HostedModel,
            "hosted-model",
            "url model key requests_per_minute tokens_per_minute max_in_flight timeout price_in "
            "price_out",
        ),
        (BatchInferenceJob, "batch-inference-job", "job job_file cluster store"),
    ],
)
def test_slug_fields_and_their_order_are_what_saved_blocks_hold(
    block: type[Block], slug: str, names: str
) -> None:
    fields = names.split()
    assert block.get_block_type_slug() == slug
    assert list(block.model_fields) == fields
    shown = block.model_json_schema()["properties"]
    assert [shown[name]["position"] for name in fields] == list(range(len(fields)))
    assert all(shown[name]["title"] and shown[name]["description"] for name in fields)
    if block is not BatchInferenceJob:  # the form shows a union as tabs
        assert not [name for name in fields if "anyOf" in shown[name]]


def test_the_entry_point_imports_what_registers_the_blocks() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (value,) = project["entry-points"]["prefect.collections"].values()
    loaded = importlib.metadata.EntryPoint("x", value, "prefect.collections").load()
    for block in BLOCKS:
        assert getattr(loaded, block.__name__) is block
        assert Block.get_block_class_from_key(block.get_block_type_slug()) is block


@pytest.mark.parametrize("module", ["prefect_raybatch", "prefect_raybatch.blocks"])
def test_prefect_registers_the_blocks_of_the_package_by_its_name(
    prefect_api: None, module: str
) -> None:
    invoke_and_assert(
        ["block", "register", "-m", module],
        expected_code=0,
        expected_output_contains=[
            f"Successfully registered {len(BLOCKS)} blocks",
            *(block.get_block_type_name() for block in BLOCKS),
        ],
    )


# --- wrong values -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RayCluster(address="ray://head:10001"), "ends the work after 30 s"),
        (lambda: RayCluster(job_server="ray://head:10001"), "ends the work after 30 s"),
        (lambda: RayCluster(address="http://head:8265"), "into the field job_server"),
        (lambda: RayCluster(job_server="head:8265"), "write only http://host:8265"),
        (
            lambda: RayCluster(job_server=f"http://me:{HUSH[0]}@head:8265"),
            "not the URL of a job server",
        ),
        (lambda: RayCluster(address="a:1", job_server="http://a:8265"), "remove one"),
        (lambda: RayCluster(address="a:1", headers={"X": HUSH[3]}), "for the job server"),
        (lambda: RayCluster(token=HUSH[4]), "for a running cluster"),
        (lambda: ObjectStore(access_key_id=HUSH[0]), "belong together"),
        (lambda: ObjectStore(session_token=HUSH[2]), "belongs to"),
        (lambda: store(anonymous=True), "keep one"),
        (lambda: ObjectStore(endpoint_url=f"http://me:{HUSH[1]}@s3"), "not an endpoint"),
        (lambda: ObjectStore(endpoint_url="s3.local"), "not an endpoint"),
        (lambda: ObjectStore(credentials="object-store/other"), "another object store"),
        (lambda: ObjectStore(credentials=store()), "save it first"),
        (lambda: HostedModel(url="ftp://x", model="m"), "url: .*is not an http"),
        (lambda: HostedModel(url="http://x/v1", model="m", key=f"{HUSH[0]} x"), "key: .*spaces"),
        (lambda: HostedModel(url="http://x/v1", model="m", timeout=0), "timeout: .*greater"),
        (
            lambda: HostedModel(url="http://x/v1", model="m", requests_per_minute=0),
            "requests_per_minute: .*greater",
        ),
        (lambda: BatchInferenceJob(), "exactly one"),
        (lambda: BatchInferenceJob(job=job(), job_file="x.yaml"), "exactly one"),
    ],
)
def test_wrong_values_are_refused_without_being_quoted(make: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message) as caught:
        make()
    assert not [secret for secret in HUSH if secret in str(caught.value)]


# --- what they give -----------------------------------------------------------------------------


def test_a_cluster_puts_its_address_into_the_job() -> None:
    here = job(cluster={"address": "old:6379", "finish": {"num_cpus": 2}})
    found = RayCluster(address="new:6379").apply(here)
    assert found.cluster.address == "new:6379" and found.cluster.finish.num_cpus == 2
    assert found.cluster.prepare == here.cluster.prepare and found.source == here.source
    assert RayCluster().apply(here).cluster.address is None  # a local one, as the block says


def test_a_hosted_model_gives_a_job_what_the_job_does_not_set(prefect_api: None) -> None:
    hosted = HostedModel(
        url="http://host/v1", model="large", key=HUSH[0], requests_per_minute=60, price_in=0.5
    )
    hosted.save("large", overwrite=True)
    endpoint = {"block": "hosted-model/large", "requests_per_minute": 7}
    here = make_job(engine={"endpoint": endpoint}, limits={"max_cost": 5})
    assert HUSH[0] not in str(here.to_dict())
    found = with_blocks(here).engine.endpoint
    assert (found.url, found.model, found.key) == ("http://host/v1", "large", HUSH[0])
    assert (found.requests_per_minute, found.price_in) == (7, 0.5)
    assert HUSH[0] not in repr(found.model_dump(mode="json")) + repr(hosted)
    with pytest.raises(ConfigError, match=r"engine\.endpoint\.block.*set url and model"):
        model_request(here.engine)
    (headers,) = [hosted.get_client().headers]
    assert headers["Authorization"] == f"Bearer {HUSH[0]}"


def test_the_key_of_a_hosted_model_goes_to_no_other_server(prefect_api: None) -> None:
    HostedModel(url="http://host/v1", model="large", key=HUSH[0]).save("large", overwrite=True)
    endpoint = {"block": "hosted-model/large", "url": "http://other/v1"}
    with pytest.raises(ConfigError, match=r"engine\.endpoint\.url: .*remove url") as refused:
        with_blocks(make_job(engine={"endpoint": endpoint}))
    assert HUSH[0] not in str(refused.value)


def test_another_block_as_a_hosted_model_is_refused(prefect_api: None) -> None:
    store().save("keys", overwrite=True)
    wrong = make_job(engine={"endpoint": {"block": "object-store/keys"}})
    with pytest.raises(ConfigError, match="no HostedModel block"):
        with_blocks(wrong)


@pytest.mark.parametrize(
    ("status", "error", "remedy"),
    [
        *((status, PrefectUnavailable, "could not be loaded") for status in (0, 408, 429, 503)),
        *((status, ConfigError, "Check PREFECT_API_KEY") for status in (401, 403)),
        (404, ConfigError, "Save it in Prefect"),
    ],
)
def test_an_outage_of_the_api_is_told_from_a_block_that_cannot_be_loaded(
    status: int, error: type[RayBatchError], remedy: str
) -> None:
    """Only an outage is tried again."""

    class Api(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: Any) -> None:
            pass

    with served(Api) as url:
        here = f"{url if status else 'http://127.0.0.1:9'}/api"
        with temporary_settings({PREFECT_API_URL: here, PREFECT_CLIENT_MAX_RETRIES: 0}):
            named = job(engine={"endpoint": {"block": "hosted-model/large"}})
            with pytest.raises(error, match=rf"^engine\.endpoint\.block: .*{remedy}") as raised:
                with_blocks(named)
    assert raised.value.transient is (error is PrefectUnavailable)


class NotSent(Exception):
    """Raised in place of sending a job."""


def test_a_command_tells_the_cluster_the_api_of_the_profile(
    prefect_api: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Which a job server needs for blocks; `raybatch run --no-prefect` has no flow to ask."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    HostedModel(url="http://host/v1", model="large", key=HUSH[0]).save("large", overwrite=True)
    sent: list[Submission] = []

    def send(submission: Submission, *args: Any) -> Any:
        sent.append(submission)
        raise NotSent

    monkeypatch.setattr(sending, "infer_remotely", send)
    pq.write_table(pa.table({"Company": ["a"]}), tmp_path / "in.parquet")
    hosted = make_job(
        source={"uri": str(tmp_path / "in.parquet")},
        output={"uri": str(tmp_path / "out")},
        engine={"endpoint": {"block": "hosted-model/large"}},
        cluster={"job_server": "http://head:8265"},
    )
    with pytest.raises(NotSent):
        run_job(hosted, "key", prefect=False, quiet=True)
    assert sent[0].env["PREFECT_API_URL"] == PREFECT_API_URL.value()
    assert not secret_in(json.dumps([sent[0].env, sent[0].job]))


def test_headers_carry_the_token() -> None:
    assert cluster().request_headers() == {
        "X-Key": HUSH[3],
        "Authorization": f"Bearer {HUSH[4]}",
    }
    with pytest.raises(ConfigError, match="no job_server"):
        RayCluster(address="auto").get_client()


def test_the_client_of_a_job_server_sends_the_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class Client:
        def __init__(self, address: str, headers: dict[str, str]) -> None:
            seen.update(address=address, **headers)

    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", Client)
    assert isinstance(cluster().get_client(), Client)
    assert seen["address"] == "http://head:8265" and seen["X-Key"] == HUSH[3]


def test_a_store_gives_options_for_stores() -> None:
    found = store(endpoint_url="http://s3.local:9000", region="eu-1")
    assert found.store_options() == {
        "key": HUSH[0],
        "secret": HUSH[1],
        "token": HUSH[2],
        "endpoint_url": "http://s3.local:9000",
        "region": "eu-1",
    }
    assert found.get_client("s3://b/x").uri == "s3://b/x"
    assert ObjectStore(anonymous=True).store_options() == {"anon": True}
    assert ObjectStore().store_options() == {}
    with pytest.raises(ConfigError, match="not on an object store"):
        found.get_client("/tmp")


class LikeAws(Block):
    """The fields of prefect-aws's AwsCredentials that matter here."""

    _block_type_slug = "like-aws"

    aws_access_key_id: str | None = None
    aws_secret_access_key: SecretStr | None = None
    aws_session_token: SecretStr | None = None
    profile_name: str | None = None
    region_name: str | None = None


class LikeMinio(Block):
    """The fields of prefect-aws's MinIOCredentials that matter here."""

    _block_type_slug = "like-minio"

    minio_root_user: str
    minio_root_password: SecretStr


class LikeGcp(Block):
    """The fields of prefect-gcp's GcpCredentials that matter here."""

    _block_type_slug = "like-gcp"

    service_account_file: Path | None = None
    service_account_info: SecretDict | None = None


class LikeAzure(Block):
    """The fields of prefect-azure's AzureBlobStorageCredentials."""

    _block_type_slug = "like-azure"

    connection_string: SecretStr | None = None
    account_url: str | None = None


def test_keys_of_google_come_from_its_block(prefect_api: None, tmp_path: Path) -> None:
    key = {"client_email": "robot@project", "private_key": HUSH[1]}
    (tmp_path / "key.json").write_text(json.dumps(key))
    LikeGcp(service_account_info=SecretDict(key)).save("info", overwrite=True)
    LikeGcp(service_account_file=tmp_path / "key.json").save("file", overwrite=True)
    LikeGcp().save("empty", overwrite=True)
    for name in ("info", "file"):
        (found,) = options_of(f"like-gcp/{name}").items()
        assert found[0] == "service_account_key" and json.loads(found[1]) == key
    with pytest.raises(ConfigError, match=r"no keys.*remove it to use"):
        options_of("like-gcp/empty")
    job = make_job(
        source={"uri": "gs://b/in", "credentials_block": "like-gcp/info"},
        output={"uri": "gs://b/out", "credentials_block": "like-gcp/file"},
    )
    loaded = tasks.with_blocks(job)
    assert "service_account_key" in loaded.source.options and loaded.output.options
    assert HUSH[1] not in f"{loaded!r} {loaded.model_dump_json()}"


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (
            {
                "connection_string": "DefaultEndpointsProtocol=https;AccountName=acct;"
                "AccountKey=a2V5PT0=;EndpointSuffix=core.windows.net"
            },
            {
                "account_name": "acct",
                "account_key": "a2V5PT0=",
                "endpoint": "https://acct.blob.core.windows.net",
            },
        ),
        (
            {
                "connection_string": "BlobEndpoint=https://acct.blob.core.windows.net;"
                "SharedAccessSignature=sv=1&sig=x"
            },
            {
                "account_name": "acct",
                "sas_key": "sv=1&sig=x",
                "endpoint": "https://acct.blob.core.windows.net",
            },
        ),
        (
            {"account_url": "https://acct.blob.core.windows.net/"},
            {"account_name": "acct", "endpoint": "https://acct.blob.core.windows.net/"},
        ),
    ],
)
def test_keys_of_azure_come_from_its_block(
    given: dict[str, str], options: dict[str, str], prefect_api: None
) -> None:
    LikeAzure.model_validate(given).save("one", overwrite=True)
    assert options_of("like-azure/one") == options
    assert open_store("az://box/x", options).uri == "az://box/x"


def test_a_connection_string_without_an_account_is_refused(prefect_api: None) -> None:
    LikeAzure(connection_string=SecretStr(f"AccountKey={HUSH[1]}")).save("bad", overwrite=True)
    with pytest.raises(ConfigError, match="names no storage account") as caught:
        options_of("like-azure/bad")
    assert HUSH[1] not in str(caught.value)


def test_keys_come_from_nested_credentials(prefect_api: None) -> None:
    aws = LikeAws(aws_access_key_id="id", aws_secret_access_key=HUSH[1], region_name="eu-2")
    aws.save("one", overwrite=True)
    minio = LikeMinio(minio_root_user="root", minio_root_password=HUSH[1])
    minio.save("two", overwrite=True)
    LikeAws(profile_name="night").save("three", overwrite=True)
    assert ObjectStore(credentials=aws).credentials == "like-aws/one"
    assert ObjectStore(credentials="like-aws/one").store_options() == {
        "key": "id",
        "secret": HUSH[1],
        "region": "eu-2",
    }
    nested = ObjectStore(credentials=minio, endpoint_url="http://minio:9000", region="eu-3")
    nested.save("nested", overwrite=True)
    whole = {"key": "root", "secret": HUSH[1], "region": "eu-3"}
    whole["endpoint_url"] = "http://minio:9000"
    assert options_of("object-store/nested") == whole
    assert options_of("like-aws/three") == {"profile": "night"}
    LikeAws().save("empty", overwrite=True)
    with pytest.raises(ConfigError, match="no keys"):
        options_of("like-aws/empty")
    both = make_job(
        source={"uri": "s3://b/in", "credentials_block": "object-store/nested"},
        output={
            "uri": "s3://b/out",
            "credentials_block": "like-aws/one",
            "options": {"region": "x"},
        },
    )
    found = tasks.with_blocks(both)
    assert found.source.options == whole
    assert found.output.options == {"key": "id", "secret": HUSH[1], "region": "x"}


# --- no secret leaves ---------------------------------------------------------------------------


def secret_in(text: str) -> list[str]:
    return [secret for secret in HUSH if secret in text]


def test_no_secret_is_in_what_is_printed_dumped_or_saved(
    prefect_api: None, caplog: pytest.LogCaptureFixture
) -> None:
    saved_store, saved_cluster = store(), cluster()
    with caplog.at_level(logging.DEBUG):
        saved_store.save("hush", overwrite=True)
        saved_cluster.save("hush", overwrite=True)
        nested = BatchInferenceJob(job=job(), store=saved_store)
        nested.save("hush", overwrite=True)
        anonymous = BatchInferenceJob(job=job(), store=store())  # saved with its store inside
        anonymous.save("inside", overwrite=True)
        loaded = BatchInferenceJob.load("hush")
        assert loaded.store is not None and loaded.store.store_options()["secret"] == HUSH[1]
        assert RayCluster.load("hush").request_headers()["X-Key"] == HUSH[3]
        for block in (saved_store, saved_cluster, nested, loaded, anonymous):
            shown = f"{block!s} {block!r} {block.model_dump()} {block.model_dump_json()}"
            assert not secret_in(shown), shown
            logging.getLogger("x").warning("block %s %r", block, block)
    assert not secret_in(caplog.text)
    with get_client(sync_client=True) as client:
        for secrets in (False, True):
            documents = client.read_block_documents(include_secrets=secrets)
            ours = {d.block_type_name: d for d in documents}
            assert {"Ray Cluster", "Object Store", "Batch Inference Job"} <= set(ours)
            text = json.dumps([d.model_dump(mode="json") for d in documents], default=str)
            # The second reading shows that the first could have failed.
            assert bool(secret_in(text)) is secrets
        raw = client._client.post("/block_documents/filter", json={})
        assert isinstance(raw, httpx.Response) and raw.status_code == 200
        assert not secret_in(raw.text)


def test_a_job_names_the_block_of_its_cluster(prefect_api: None) -> None:
    """The flow gets its place and its secrets; nothing that is written down has them."""
    cluster().save("named", overwrite=True)
    here = job(cluster={"block": "ray-cluster/named", "on_crash": "stop"})
    with pytest.raises(ConfigError, match="is not loaded"):
        _ = here.cluster.access
    loaded = with_blocks(here)
    access = loaded.cluster.access
    assert (access.job_server, access.address) == ("http://head:8265", None)
    assert (access.token, access.headers["X-Key"]) == (HUSH[4], HUSH[3])
    assert access.block == "ray-cluster/named" and loaded.cluster.on_crash == "stop"
    assert loaded.to_dict() == here.to_dict()
    shown = f"{loaded!r} {access!r} {loaded.model_dump()} {loaded.model_dump_json()}"
    assert not secret_in(shown) and not secret_in(json.dumps(sendable(loaded)))

    RayCluster(address="h:1", token=HUSH[4]).save("named", overwrite=True)
    triggered = BatchInferenceJob(job=here, cluster=RayCluster(address="h:2"))
    assert triggered.batch_job().cluster.block is None  # the block's own cluster is in its place
    assert with_blocks(here).cluster.access.address == "h:1"
    missing = r"^cluster\.block: Prefect has no block ray-cluster/none\. Save it in Prefect \(http"
    with pytest.raises(ConfigError, match=missing):
        with_blocks(job(cluster={"block": "ray-cluster/none"}))
    for wrong, why in (
        ({"block": "named"}, "write ray-cluster/NAME"),
        ({"block": "ray-cluster/named", "address": "auto"}, "remove one"),
    ):
        with pytest.raises(ConfigError, match=why):
            job(cluster=wrong)


def test_an_unsaved_store_cannot_travel() -> None:
    with pytest.raises(ConfigError, match="save it first"):
        BatchInferenceJob(job=job(), store=store()).batch_job()


def test_a_saved_store_travels_by_name(prefect_api: None) -> None:
    saved = store()
    saved.save("by-name", overwrite=True)
    found = BatchInferenceJob(job=job(), store=saved, cluster=RayCluster(address="h:1")).batch_job()
    assert found.output.credentials_block == "object-store/by-name"
    assert found.source.credentials_block is None  # local: it needs no keys
    assert found.cluster.address == "h:1"
    named = job(source={"uri": "s3://b/in", "credentials_block": "like-aws/one"})
    kept = BatchInferenceJob(job=named, store=saved).batch_job()
    assert kept.source.credentials_block == "like-aws/one"
    assert not secret_in(kept.model_dump_json() + repr(kept))


def test_the_process_of_a_triggered_run_is_not_taken_for_the_flow_run_that_triggers_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PREFECT__CONTROL_TOKEN", "of the flow run that triggers")
    assert "PREFECT__CONTROL_TOKEN" not in BatchInferenceJob(job=job()).environment()


@pytest.mark.parametrize(
    "fields",
    [
        {"job_server": "http://head:8265", "headers": {"X-Key": HUSH[3]}, "token": HUSH[4]},
        {"kubernetes": {"image": "ray"}, "headers": {"X-Key": HUSH[3]}},
        {"address": "h:1", "token": HUSH[4]},
    ],
)
def test_a_cluster_with_secrets_travels_by_name(prefect_api: None, fields: dict[str, Any]) -> None:
    block = RayCluster(**fields)
    for refused in (block.apply, lambda job: BatchInferenceJob(job=job, cluster=block).batch_job()):
        with pytest.raises(ConfigError, match="cluster: the Ray Cluster block is not saved"):
            refused(job())
    block.save("travels", overwrite=True)
    BatchInferenceJob(job=job(cluster={"on_crash": "stop"}), cluster=block).save(
        "travels", overwrite=True
    )
    for found in (
        block.apply(job(cluster={"address": "old:1", "on_crash": "stop"})),
        BatchInferenceJob.load("travels").batch_job(),
    ):
        assert found.cluster == Cluster(block="ray-cluster/travels", on_crash="stop")
        assert not secret_in(found.model_dump_json() + repr(found))
        access = with_blocks(found).cluster.access
        assert access.headers == block.request_headers()


# --- running ------------------------------------------------------------------------------------


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BatchJob:
    """A job whose run `key` is done: running it again returns its report and starts no engine."""
    monkeypatch.setattr("helpers.small.MODEL", models.pin(model_request(make_job().engine)))
    run = small_run(tmp_path / "out" / "key", output={"uri": str(tmp_path / "out")})
    run.commit_all()
    made = Run(run.store.uri, "key", run.plan.hash, run.plan.rows, run.plan.shards, False)
    finalize_run(run.job, made)
    return run.job


def test_triggered_waited_for_and_fetched(
    prefect_api: None, finished: BatchJob, tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text(json.dumps(finished.to_dict()))
    BatchInferenceJob(job_file=str(tmp_path / "job.yaml")).save("nightly", overwrite=True)
    began: list[BatchInferenceRun] = []

    @flow
    def whole() -> int:
        run = BatchInferenceJob.load("nightly").trigger("key")
        began.append(run)
        run.wait_for_completion()
        return run.fetch_result().good

    assert whole() == 20
    with get_client(sync_client=True) as client:
        found = client.read_flow_run(began[0].flow_run_id)
        assert found.state_name == "Completed" and found.parameters["run_key"] == "key"
        assert client.read_flow(found.flow_id).name == "batch_inference"


def example(block: type[Block], **names: Any) -> dict[str, Any]:
    """The names that the example of a block's docstring leaves behind."""
    code = str(block.get_code_example())
    exec(code.partition("```python")[2].partition("```")[0], names)
    return names


def test_the_examples_run(
    prefect_api: None,
    finished: BatchJob,
    s3: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    RayCluster(address="h:1").save("block-name", overwrite=True)
    BatchInferenceJob(job=finished).save("block-name", overwrite=True)
    for block in BLOCKS:  # Prefect wants that placeholder, and has no such name itself
        code = str(block.get_code_example()).replace("BLOCK_NAME", "block-name")
        monkeypatch.setattr(block, "_code_example", code)
    assert example(RayCluster, job=job())["job"].cluster.address == "h:1"

    keys = ObjectStore(access_key_id=s3.key, secret_access_key=s3.secret, endpoint_url=s3.endpoint)
    keys.save("block-name", overwrite=True)
    keys.get_client("s3://bucket/folder").put("a.txt", b"12345")
    example(ObjectStore)
    assert "a.txt 5" in capsys.readouterr().out

    monkeypatch.setattr("prefect_raybatch.api.default_run_key", lambda job, scheduled=None: "key")
    assert example(BatchInferenceJob)["report"].good == 20


@pytest.mark.whole
def test_the_same_in_async_code(prefect_api: None, finished: BatchJob) -> None:
    block = BatchInferenceJob(job=finished)

    async def whole() -> int:
        run = await block.trigger("key")
        await run.wait_for_completion()
        return (await run.fetch_result()).good

    assert asyncio.run(whole()) == 20


def test_a_run_that_fails_raises_its_message(prefect_api: None, tmp_path: Path) -> None:
    missing = make_job(source={"uri": str(tmp_path / "none")}, output={"uri": str(tmp_path / "o")})
    run = BatchInferenceJob(job=missing).trigger("key")
    with pytest.raises(RayBatchError, match=r"did not complete .*Failed: .*none"):
        run.wait_for_completion()
    with pytest.raises(IncompleteRun, match="not finished"):
        run.fetch_result()


def test_the_result_of_a_repaired_run_is_that_of_the_repaired_run(
    finished: BatchJob, tmp_path: Path
) -> None:
    (tmp_path / "out/key/data/part-00000.parquet").unlink()
    repair_run(f"{tmp_path}/out/key")
    run = BatchInferenceRun(finished, "key", uuid4(), cast(Any, None))
    with pytest.raises(IncompleteRun, match=r"key\.m1 is not finished"):
        run.fetch_result()


class Hanging:
    """A process that ends only when it is told to."""

    def __init__(self, stubborn: bool = False) -> None:
        self.alive, self.stubborn, self.calls = True, stubborn, list[str]()

    def poll(self) -> int | None:
        return None if self.alive else -15

    def terminate(self) -> None:
        self.calls.append("terminate")
        self.alive = self.stubborn

    def kill(self) -> None:
        self.calls.append("kill")
        self.alive = False

    def wait(self, timeout: float | None = None) -> None:
        if self.alive and timeout is None:
            raise KeyboardInterrupt
        if self.alive:
            raise subprocess.TimeoutExpired("engine", timeout or 0)


@pytest.mark.parametrize(
    ("stubborn", "calls"), [(False, ["terminate"]), (True, ["terminate", "kill"])]
)
def test_who_stops_waiting_stops_the_run(stubborn: bool, calls: list[str]) -> None:
    process = Hanging(stubborn)
    run = BatchInferenceRun(job(), "k", UUID(int=1), process)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        run.wait_for_completion()
    assert process.calls == calls

    process = Hanging(stubborn)
    run = BatchInferenceRun(job(), "k", UUID(int=1), process)  # type: ignore[arg-type]

    async def cancelled() -> None:
        await asyncio.wait_for(run.await_for_completion(), 0.1)

    with pytest.raises(TimeoutError):
        asyncio.run(cancelled())
    assert process.calls == calls


def test_wrong_jobs_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such job file"):
        BatchInferenceJob(job_file=str(tmp_path / "none.yaml")).trigger()
    with pytest.raises(ConfigError, match="run key"):
        BatchInferenceJob(job=make_job(output={"uri": str(tmp_path)})).trigger("../x")
