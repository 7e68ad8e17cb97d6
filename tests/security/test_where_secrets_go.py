"""Where the secrets of a job go: to the workers that need them, and into nothing that is kept.

Every field that can hold a secret gets one. Runs with the fake engine are then searched for them:
everything that is sent to Ray's workers, every file of the run directory, every log line, and the
artifacts. `MAY_HOLD` lists who may hold which secret, and why.
"""

from __future__ import annotations

import ast
import dataclasses
import gzip
import io
import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, get_args, get_origin

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import ray.cloudpickle as cloudpickle
from helpers.engines import FineEngine, Fp8Engine
from helpers.gcs_server import GcsServer, serving
from helpers.policies import set_policy
from helpers.small import input_rows, job_dict, make_job, receipts
from helpers.web_server import served
from helpers.without_ray import CLUSTER, instead_of_ray
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pyiceberg.catalog import load_catalog

import prefect_raybatch
from prefect_raybatch.api import dry_run, finalize_run, infer_run, plan_run, publish_run
from prefect_raybatch.cluster import connect, side_by_side, trial_actor
from prefect_raybatch.cluster.pipeline import Pipeline, warm_kind_of
from prefect_raybatch.cluster.sharing import Tenant
from prefect_raybatch.cluster.warm import WarmKind
from prefect_raybatch.compile.job import compile_job, compile_planned
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.cluster import ClusterAccess
from prefect_raybatch.job.edits import edited, with_access
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.plan.row_keys import RowKeys
from prefect_raybatch.report.report import failure_table, markdown, stage_table
from prefect_raybatch.runs.finalize_run import load_report
from prefect_raybatch.runs.precision import decided_precision
from prefect_raybatch.runs.run import Run, load_run
from prefect_raybatch.runs.status import status
from prefect_raybatch.source import cuts, side_copies
from prefect_raybatch.spec.request import ImageSpec
from prefect_raybatch.stages.images.rows import row_images
from prefect_raybatch.stages.read import ShardDatasource
from prefect_raybatch.stages.trial import TrialEngine
from prefect_raybatch.storage import Store, open_store

BUCKET = "where-secrets-go"
ROWS = 40

# Secrets by the field, or other place, that holds them.
SECRETS = {
    "source.uri": "PLANTEDsigned0001",
    "source.options": "PLANTEDsource0002",
    "source.catalog": "PLANTEDcatalog0003",
    "engine.env": "PLANTEDenv0004",
    "engine.(arguments)": "PLANTEDargument0005",
    "output.options": "PLANTEDoutput0006",
    "output.publish.options": "PLANTEDpublish0007",
    "output.publish.catalog": "PLANTEDlake0008",
    "output.publish.uri": "PLANTEDdatabase0009",
    "access.token": "PLANTEDraytoken0011",
    "access.headers": "PLANTEDheader0012",
    "environment": "PLANTEDenviron0013",
}

# Which worker may hold which secret, and why. Anything else is a leak.
MAY_HOLD = {
    ("source.options", "read"): "reads the files of the input",
    ("source.options", "copy"): "reads the files of the input, which are copied",
    ("source.options", "keys"): "reads the files of the input, to make keys of their rows",
    ("source.options", "trial"): "reads the sampled rows from the files of the input",
    ("source.options", "images"): "fetches s3:// images that the rows name",
    ("output.options", "read"): "looks whether a shard is committed; reads copied input",
    ("output.options", "copy"): "writes the copy of the input into the run directory",
    ("output.options", "keys"): "reads copied input from the run directory",
    ("output.options", "engine"): "looks whether a shard is committed, to skip it",
    ("output.options", "look up"): "reads answers from the run directory",
    ("output.options", "finish"): "writes pieces into the run directory",
    ("output.options", "result"): "writes the files of the result",
    ("output.options", "trial"): "reads copied input, as `read` does",
    ("engine.env", "engine"): "sets the environment of the engine's process",
    ("engine.env", "trial"): "starts an engine",
    ("engine.(arguments)", "engine"): "gives vLLM its arguments",
    ("engine.(arguments)", "trial"): "starts an engine",
}

# Where the package hands something to Ray, and what: the tests search it below these names.
SENDS = {
    "cluster/pipeline.py: Pipeline._dataset": "read, prepare, look up, finish",
    "stages/ray_internals.py: map_actors": "engine, which `Pipeline._dataset` sends by it",
    "cluster/side_by_side.py: run_in_parallel": "copy, keys, result",
    "cluster/trial_actor.py: trial_on_worker": "trial",
    "cluster/warm_actors.py: Forwarder._claim_host": "a token and an id of the pass, both random",
    "cluster/warm_actors.py: Forwarder._begin": "engine: the launch of a pass",
    "cluster/warm_actors.py: Forwarder.__call__": "blocks",
    "cluster/warm_hosts.py: RayHosts.make": "engine: its class",
    "cluster/warm_hosts.py: RayHosts.begin": "engine: the launch of a start before the pass",
    "cluster/endpoint.py: limiter_of": "limits of a hosted model, which are numbers",
    "cluster/endpoint.py: ActorLimiter.ask": "a number of tokens",
    "cluster/endpoint.py: ActorLimiter.settle": "numbers, and the status of an answer",
    "cluster/endpoint.py: ActorLimiter.lower": "limits that a server reports, which are numbers",
    "cluster/endpoint.py: ActorLimiter.bill": "numbers of tokens",
    "cluster/endpoint.py: ActorLimiter.note_batches": "numbers of a shard and its batches",
    "source/dataset_copies.py: _written": "the store of the run, to copy a data set of Ray's",
}

# Fields whose texts are no credentials. A field that is neither here nor hidden must refuse one.
NO_SECRET = {
    "a part of the request, which decides the answers and is shown on purpose": [
        *("prompt.template", "prompt.second", "prompt.system", "prompt.messages"),
        "quality.judge.prompt",
        *("prompt.chat_template", "prompt.chat_template_kwargs", "prompt.prefill"),
        *("prompt.tools", "prompt.documents", "sampling.choice", "output.schema_model"),
        *("source.filter", "source.query"),
    ],
    "a name of a column, its type or its form": [
        *("source.columns", "source.types", "source.csv.names", "source.csv.null_values"),
        *("source.csv.delimiter", "source.csv.encoding", "source.csv.quote"),
        *("source.csv.escape", "prompt.adapter_column", "prompt.images.columns"),
        *("output.column", "output.columns", "output.schema", "output.row_number"),
        *("output.reasoning_column", "output.tool_calls_column", "output.publish.key"),
        *("output.publish.partition_by", "quality.key", "quality.answer"),
    ],
    "a name of something else, or a number": [
        *("name", "source.version", "source.config", "source.split", "source.credentials_block"),
        *("prompt.function", "engine.revision", "engine.accelerator_type"),
        "engine.endpoint.model",
        *("output.credentials_block", "output.postprocess", "output.reasoning_parser"),
        *("output.tool_parser", "output.publish.table", "output.publish.name"),
        *(
            "limits.deadline",
            "cluster.address",
            "cluster.block",
            "engine.endpoint.block",
            "cluster.price_by_card",
        ),
        *("cluster.kubernetes.image", "cluster.kubernetes.worker_cpu"),
        *("cluster.kubernetes.worker_memory", "cluster.kubernetes.head_cpu"),
        *("cluster.kubernetes.head_memory", "cluster.kubernetes.shm"),
        *("cluster.kubernetes.service_account", "cluster.kubernetes.secrets"),
        *("cluster.kubernetes.manifest_file", "cluster.kubernetes.namespace"),
        *("cluster.kubernetes.context", "cluster.kubernetes.ready_within"),
        *("cluster.kubernetes.lease", "cluster.kubernetes.keep"),
    ],
}


# --- every field ----------------------------------------------------------------------------------


def kinds_in(annotation: Any) -> Iterator[Any]:
    yield get_origin(annotation) or annotation
    for inner in get_args(annotation):
        yield from kinds_in(inner)


def text_fields(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """The fields of a job that can hold a text, by their dotted names."""
    for name, field in model.model_fields.items():
        kinds = list(kinds_in(field.annotation))
        groups = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        where = f"{path}{field.alias or name}"
        for group in groups:
            yield from text_fields(group, f"{where}.")
        if not groups and (str in kinds or Any in kinds or dict in kinds):
            yield where, field


FIELDS = dict(text_fields(BatchJob))
KEY = "PLANTEDkey0014"
URL = f"https://me:{KEY}@host/x?password={KEY}&X-Amz-Signature={KEY}"


def with_key(field: FieldInfo) -> Any:
    kinds = list(kinds_in(field.annotation))
    if dict in kinds:
        return {"anything": KEY, "inner": {"url": URL}} if Any in kinds else {"anything": KEY}
    return URL if str in get_args(field.annotation) or field.annotation is str else [URL]


def set_in(path: str, value: Any) -> dict[str, Any]:
    """A job's mapping with one field set, and the fields that must be set beside it."""
    job = job_dict(cluster={}, limits={}, engine={}, sampling={})
    names = path.split(".")
    if path.startswith("output.publish."):
        target = {"format": "sql", "uri": "sqlite:///x", "table": "t"}
        if names[-1] == "catalog":
            target = {"format": "iceberg", "table": "a.t"}
        job["output"]["publish"] = [{**target, names[-1]: value}]
        return job
    if path.startswith("cluster.kubernetes.") and names[-1] != "manifest":
        job["cluster"]["kubernetes"] = {"image": "an-image"}
    if path.startswith("engine.endpoint."):
        job["engine"]["endpoint"] = {"url": "https://host/v1", "model": "m"}
    if path.startswith("quality.judge."):
        own = {} if names[-1] == "endpoint" else {"model": "demo"}
        job["quality"] = {"judge": {"prompt": "Is {response} right?", **own}}
    if path == "source.catalog":
        job["source"] = {"uri": "sales.orders", "format": "iceberg"}
    place = job
    for name in names[:-1]:
        place = place.setdefault(name, {})
    place[names[-1]] = value
    return job


@pytest.mark.parametrize("path", sorted(set(FIELDS) - {f for v in NO_SECRET.values() for f in v}))
def test_a_field_hides_a_secret_or_refuses_it_without_quoting_it(path):
    """For a new field that fails: hide it (`Group._shown`), refuse it, or list it in NO_SECRET."""
    try:
        job = BatchJob.from_dict(set_in(path, with_key(FIELDS[path])))
    except ConfigError as error:
        assert KEY not in str(error)
        assert path.rpartition(".")[2] in str(error), "another field was refused"
        return
    shown = job.model_dump_json(by_alias=True) + repr(job)
    assert KEY not in shown
    assert "anything" in shown or "*****" in shown


def test_fields_without_secrets_exist_and_all_others_are_planted():
    listed = [field for fields in NO_SECRET.values() for field in fields]
    assert set(listed) <= set(FIELDS) and len(set(listed)) == len(listed)
    mappings = {p for p, f in FIELDS.items() if dict in kinds_in(f.annotation)} - set(listed)
    # The values of a second model are those of an engine, which hides them.
    refused = {
        "output.escalate.to",
        "quality.judge.endpoint",
        "quality.judge.engine",
        "engine.adapters",
        "cluster.kubernetes.env",
        "cluster.kubernetes.manifest",
    }
    assert mappings - refused <= set(SECRETS)


def test_the_access_to_a_cluster_hides_its_secrets():
    hidden = {field.name for field in dataclasses.fields(ClusterAccess) if not field.repr}
    assert {f"access.{name}" for name in hidden} == {n for n in SECRETS if n.startswith("access.")}


def test_names_of_keys_in_a_manifest_are_refused(tmp_path):
    def group(**more: Any) -> dict[str, Any]:
        pod = {"spec": {"containers": [{"image": "i", **more.pop("container", {})}]}}
        return {"template": pod, **more}

    for head, name in (
        ({"container": {"env": [{"name": "MY_API_KEY", "value": KEY}]}}, "MY_API_KEY"),
        ({"rayStartParams": {"redis-password": KEY}}, "redis-password"),
    ):
        worker = {**group(), "groupName": "gpu", "replicas": 1}
        spec = {"headGroupSpec": group(**head), "workerGroupSpecs": [worker]}
        manifest = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "spec": spec}
        with pytest.raises(ConfigError, match=rf"{name} may be a key") as caught:
            make_job(cluster={"kubernetes": {"manifest": manifest}})
        assert KEY not in str(caught.value)


def test_a_note_about_engines_that_differ_hides_their_secrets():
    def kind(**arguments: Any) -> WarmKind:
        return WarmKind("", FineEngine, {}, 1, {}, arguments, "base")

    note = kind(hf_token=KEY, max_num_seqs=4).differing_arguments(kind(max_num_seqs=8))
    assert KEY not in note and "hf_token" in note and "max_num_seqs 4, not 8" in note
    assert KEY not in repr(kind(hf_token=KEY))


# --- what is sent to Ray's workers ----------------------------------------------------------------


class Sent:
    """What was sent to each kind of worker, as bytes."""

    def __init__(self) -> None:
        self.places: dict[str, list[bytes]] = defaultdict(list)

    def add(self, place: str, *values: Any) -> None:
        self.places[place] += [cloudpickle.dumps(value) for value in values]
        assert found_in(repr(values).encode()) == set(), place  # Ray and tracebacks may print it

    def holders(self) -> set[tuple[str, str]]:
        return {
            (name, place)
            for name, secret in SECRETS.items()
            for place, values in self.places.items()
            if any(secret.encode() in value for value in values)
        }


def stays(table: pa.Table) -> pa.Table:
    return table


def place_of(work: Any) -> str:
    """Below which name the work of tasks side by side is searched."""
    inner = work
    while isinstance(inner, partial):  # some number the items of another function
        inner = inner.args[0] if inner.args and callable(inner.args[0]) else inner.func
    if isinstance(inner, RowKeys):
        return "keys"
    module = getattr(inner, "__module__", type(inner).__module__)
    return "copy" if module.startswith("prefect_raybatch.source") else "result"


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Runs work in this process; whatever would be sent to a worker is noted."""
    instead_of_ray(monkeypatch)
    made = Sent()

    def one_pass(self: Pipeline, units: Sequence[Unit], isolated: bool) -> Iterator[Any]:
        first, launch, finish = self.stages(isolated)
        made.add("prepare" if launch is not None else "look up", first)
        made.add("finish", finish)
        engine: Any = stays
        if launch is not None:
            kind = warm_kind_of(self.spec, self.plan.model, self.size, self.engine)
            made.add("engine", launch, self.engine, kind)
            assert kind is not None and kind.key
            engine = self.engine(launch)
        tasks = self.read_tasks(units, isolated)
        made.add("read", ShardDatasource(self.reader, tasks))
        for task in tasks:
            made.add("read", self.reader.bind(task))
            for table in self.reader.read(task):
                blocks = [table]
                for stage in (first, engine, finish):
                    blocks.append(stage(blocks[-1]))
                made.add("blocks", *blocks)
                yield from receipts(blocks[-1])

    @contextmanager
    def two_workers(*_: Any) -> Iterator[int]:
        yield 2

    def one_by_one(work: Any, items: Iterator[Any], *_: Any) -> Iterator[Any]:
        place = place_of(work)
        for item in items:
            made.add(place, work, item)
            value = work(item)
            made.add(place, value)
            yield value

    monkeypatch.setattr(Pipeline, "__call__", one_pass)
    monkeypatch.setattr(side_by_side, "workers_for", two_workers)
    monkeypatch.setattr(side_by_side, "run_in_parallel", one_by_one)
    monkeypatch.setattr(side_by_side, "address_of", lambda cluster: "head:6379")
    return made


# --- runs -----------------------------------------------------------------------------------------


def engine_with_secrets(**more: Any) -> dict[str, Any]:
    argument = SECRETS["engine.(arguments)"]
    return {
        "device": "cpu",
        "env": {"MY_API_KEY": SECRETS["engine.env"], **more.pop("env", {})},
        "hf_token": argument,
        "model_loader_extra_config": {"access_key": argument},
        **more,
    }


def on_s3(server: Any, name: str) -> dict[str, Any]:
    """Options of a store that works with a secret of its own: a proxy for a scheme not in use."""
    proxy = f"http://me:{SECRETS[name]}@proxy:1"
    return {**server.options, "config_kwargs": {"proxies": {"gopher": proxy}}}


def put_in(store: Store, name: str, table: pa.Table) -> None:
    made = io.BytesIO()
    write: Any = pq.write_table if name.endswith("parquet") else pyarrow.csv.write_csv
    write(table, made)
    store.put(name, made.getvalue())


def job_on_cluster(**groups: Any) -> BatchJob:
    """A job whose block gives the address of a cluster, a token and headers."""
    job = make_job(cluster={"block": "ray-cluster/nightly"}, **groups)
    headers = {"Authorization": f"Basic {SECRETS['access.headers']}"}
    access = ClusterAccess("head:6379", None, headers, SECRETS["access.token"], "nightly")
    return with_access(job, access)


def stored_job(s3: Any, place: str) -> BatchJob:
    """Parquet on S3, published to other places with keys of their own."""
    target = {
        "format": "jsonl",
        "uri": f"s3://{BUCKET}/{place}/published",
        "options": on_s3(s3, "output.publish.options"),
    }
    put_in(open_store(f"s3://{BUCKET}/{place}", s3.options), "in.parquet", input_rows(0, ROWS))
    return job_on_cluster(
        source={
            "uri": f"s3://{BUCKET}/{place}/in.parquet",
            "options": on_s3(s3, "source.options"),
            "rows_per_shard": 20,
        },
        output={
            "uri": f"s3://{BUCKET}/{place}/out",
            "options": on_s3(s3, "output.options"),
            "publish": [target],
        },
        engine=engine_with_secrets(),
    )


def copied_job(s3: Any, place: str) -> BatchJob:
    """CSV on S3, copied by workers; its requests are asked first, and rows look answers up."""
    store = open_store(f"s3://{BUCKET}/{place}", s3.options)
    for number in range(2):
        rows = input_rows(20 * number, 20).drop_columns(["tags"])
        put_in(store, f"in/{number}.csv", rows)
    return job_on_cluster(
        source={
            "uri": f"s3://{BUCKET}/{place}/in",
            "options": on_s3(s3, "source.options"),
            "rows_per_shard": 20,
        },
        output={"uri": f"s3://{BUCKET}/{place}/out", "options": on_s3(s3, "output.options")},
        engine=engine_with_secrets(order="run"),
    )


def table_job(tmp_path: Path) -> BatchJob:
    """A table of a catalog, published to another catalog and to a database."""
    folder = tmp_path / "lake"
    folder.mkdir(parents=True)

    def catalog(name: str) -> dict[str, str]:
        place = {"uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}/w"}
        keys = {"token": SECRETS[name], "s3.secret-access-key": SECRETS[name]}
        return {"name": "lake", "type": "sql", **place, **keys}

    made = load_catalog(**catalog("source.catalog"))
    made.create_namespace("sales")
    rows = input_rows(0, ROWS).drop_columns(["tags"])
    made.create_table("sales.orders", schema=rows.schema).append(rows)
    answers = pa.schema([*rows.schema, ("response", pa.string()), ("_row", pa.int64())])
    made.create_table("sales.answers", schema=answers)
    lake = {"format": "iceberg", "table": "sales.answers"}
    database = {"format": "sql", "uri": f"sqlite:///{folder}/${{DB_PASSWORD}}.db", "table": "a"}
    return job_on_cluster(
        source={
            "uri": "sales.orders",
            "catalog": catalog("source.catalog"),
            "options": {"password": SECRETS["source.options"]},
        },
        output={
            "uri": str(tmp_path / "out"),
            "options": {"secret": SECRETS["output.options"]},
            "publish": [{**lake, "catalog": catalog("output.publish.catalog")}, database],
        },
        engine=engine_with_secrets(),
    )


def signed_job(tmp_path: Path, server: str) -> BatchJob:
    """A file by http, of which a signature is a part of the URL."""
    secret = SECRETS["source.uri"]
    return job_on_cluster(
        source={
            "uri": f"{server}/in.csv?X-Amz-Signature={secret}&token={secret}",
            "web": {"allow_private": True},
        },
        output={"uri": str(tmp_path / "signed")},
        engine=engine_with_secrets(),
    )


class Files(BaseHTTPRequestHandler):
    """Serves one CSV file to who has the signature."""

    def do_GET(self) -> None:
        found = SECRETS["source.uri"] in self.path
        body = b"id,Company\n1,a\n2,b\n" if found else b""
        self.send_response(200 if found else 403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def cloud_job(source: GcsServer, output: GcsServer) -> BatchJob:
    """Parquet on Google's store, answered there, by a token each."""
    put_in(open_store("gs://in/rows", source.options), "in.parquet", input_rows(0, ROWS))
    return make_job(
        source={"uri": "gs://in/rows", "options": source.options, "rows_per_shard": 20},
        output={"uri": "gs://out/runs", "options": output.options},
    )


def whole_run(job: BatchJob) -> Run:
    run = plan_run(job, "k")
    finalize_run(job, run, infer_run(job, run, engine=FineEngine))
    if job.output.publish:
        publish_run(job, run.uri)
    return run


# --- what is kept and shown -----------------------------------------------------------------------


def found_in(data: bytes) -> set[str]:
    return {name for name, secret in SECRETS.items() if secret.encode() in data}


def content(name: str, data: bytes) -> bytes:
    """A file as it is, and what it says once it is decompressed."""
    if name.endswith(".parquet"):
        data += str(pq.read_table(io.BytesIO(data)).to_pylist()).encode()
    return data + gzip.decompress(data) if name.endswith(".gz") else data


def search_records(run: Run, options: dict[str, Any]) -> None:
    store = open_store(run.uri, options)
    names = [file.path for file in store.list()]
    assert {"plan.json", "report.json", "report.md", "report.html"} <= {
        name.removeprefix("_raybatch/") for name in names
    }
    for name in names:
        data = content(name, store.read(name))
        assert found_in(data) == set(), name
        for key in ("secret", "key"):
            assert str(options.get(key, "no key")).encode() not in data, name


def search_shown(job: BatchJob, run: Run) -> None:
    """Everything that shows a job or a run: artifacts of Prefect, `raybatch plan` and `status`."""
    report = load_report(open_store(run.uri, job.output.options))
    shown = [stage_table(report), failure_table(report.failures), markdown(report)]
    spec = compile_planned(job, Ledger(open_store(run.uri, job.output.options)).load_plan())
    state, dry = status(run.uri, job.output.options), dry_run(job)
    texts = [repr(one) for one in (job, run, report, spec, state, dry, *shown)]
    plan = {**dataclasses.asdict(dry), "sizing": dry.sizing and dry.sizing.to_dict()}
    texts.append(json.dumps(plan, default=repr))  # of `raybatch plan --json`
    texts.append(job.model_dump_json())
    for text in texts:
        assert found_in(text.encode()) == set(), text[:80]


def logged(caplog: pytest.LogCaptureFixture) -> str:
    """The package's own log, with all that a formatter makes of a line."""
    form = logging.Formatter()
    records = [r for r in caplog.records if r.name.startswith("prefect_raybatch")]
    return "\n".join(form.format(record) for record in records)


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["MY_API_KEY", Fp8Engine.NOTES]
    set_policy(monkeypatch, tmp_path, engine_variables=names, allow_private=True)
    monkeypatch.setenv("DB_PASSWORD", SECRETS["output.publish.uri"])
    for name in ("HF_TOKEN", "RAY_AUTH_TOKEN", "PREFECT_API_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, SECRETS["environment"])
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    # Small inputs go the way of large ones.
    monkeypatch.setattr(cuts, "CUT_BYTES", 128)
    monkeypatch.setattr(side_copies, "SHARE_FILES", 1)
    monkeypatch.setattr("prefect_raybatch.plan.row_keys.ROWS_A_TASK", 16)


def test_secrets_go_only_where_they_are_needed(
    tmp_path, s3, sent, planted, caplog, capfd, monkeypatch
):
    caplog.set_level(logging.DEBUG, logger="prefect_raybatch")
    inbox = GcsServer(SECRETS["source.options"], "in")
    outbox = GcsServer(SECRETS["output.options"], "out")
    with served(Files) as server, serving(inbox), serving(outbox):
        for job in (
            cloud_job(inbox, outbox),
            signed_job(tmp_path, server),
            table_job(tmp_path),
            stored_job(s3, "stored"),
            copied_job(s3, "copied"),
        ):
            run = whole_run(job)
            search_records(run, job.output.options)
            search_shown(job, run)
    trial(stored_job(s3, "trial"), tmp_path, sent, monkeypatch)
    keys_and_images(s3, sent)
    lines = logged(caplog)
    assert "requests first" in lines and "copying the input" in lines
    assert found_in(lines.encode()) == set()
    assert found_in("".join(capfd.readouterr()).encode()) == set()
    other = Sent()
    trial(table_job(tmp_path / "other"), tmp_path, other, monkeypatch)
    assert ("source.options", "trial") not in other.holders(), "the input is copied"
    leaks = sent.holders() - set(MAY_HOLD)
    assert not leaks, "a worker holds a secret that it does not need"
    assert set(MAY_HOLD) - sent.holders() == set(), "no longer sent there: shorten MAY_HOLD"
    assert sent.places["prepare"] and sent.places["blocks"]


def trial(job: BatchJob, tmp_path: Path, sent: Sent, patch: pytest.MonkeyPatch) -> None:
    """Decide on a precision, by a sample of the rows on an engine of its own."""

    @contextmanager
    def here(engine: type, stages: Any, *_: Any) -> Iterator[Any]:
        sent.add("trial", engine, stages)
        made = TrialEngine(engine, stages)
        yield made.outcomes
        made.close()

    patch.setattr(trial_actor, "trial_on_worker", here)
    patch.setattr(connect, "admitted", lambda *_: nullcontext())
    notes = {Fp8Engine.NOTES: str(tmp_path / "notes")}
    engine = engine_with_secrets(quantization="try-fp8", env=notes)
    job = edited(job, {f"engine.{name}": value for name, value in engine.items()}, "trial")
    job = edited(job, {"limits.min_agreement": 0.5}, "trial")
    run = plan_run(job, "k")
    ledger = Ledger(open_store(run.uri, job.output.options))
    plan, shards = load_run(ledger, run)
    spec, user = compile_planned(job, plan), Tenant("trial")
    decided_precision(spec, plan, shards, ledger, CLUSTER, user, "attempt", Fp8Engine)
    search = [(file.path, ledger.store.read(file.path)) for file in ledger.store.list()]
    assert [name for name, data in search if found_in(content(name, data))] == []


def keys_and_images(s3: Any, sent: Sent) -> None:
    """The keys of rows that are not copied; and images, which prepare fetches."""
    job = stored_job(s3, "keys")
    plan_run(edited(job, {"engine.order": "run"}, "keys"), "k")
    images = ImageSpec(
        columns=("photo",),
        resize=None,
        most=1,
        max_pixels=1,
        max_bytes=1,
        fetch_seconds=1.0,
        allow_private=False,
        media_root=None,
        digests=False,
    )
    prompt = dataclasses.replace(compile_job(job).prompt, images=images)
    sent.add("images", row_images(prompt, {}, job.source.options))


# --- the places where something is sent -----------------------------------------------------------


def sending_functions() -> set[str]:
    """The functions of the package that hand something to Ray, by the names of its methods."""
    root, found = Path(prefect_raybatch.__file__).parent, set()
    for path in sorted(root.rglob("*.py")):
        text = path.read_text()
        if not any(word in text for word in ("map_batches", "remote(", "ray.put")):
            continue
        for name, function in functions_of(ast.parse(text)):
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                    sends = call.func.attr in ("map_batches", "map_batches_internal")
                    sends |= call.func.attr == "remote" and bool(call.args or call.keywords)
                    sends |= ast.unparse(call.func) == "ray.put"
                    if sends:
                        found.add(f"{path.relative_to(root)}: {name}")
    return found


def functions_of(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        for inner in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(inner, ast.FunctionDef):
                yield f"{node.name}.{inner.name}", inner


def test_every_place_that_sends_to_ray_is_searched():
    """For a new one that fails: search what it sends in `sent`, and list it in SENDS."""
    assert sending_functions() == set(SENDS)
