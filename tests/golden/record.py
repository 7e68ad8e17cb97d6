"""What the package makes of a job, as plain values that a person can read.

Everything is what the package's own functions give, without Ray, an engine or a network. Values
that differ from machine to machine (places, times, random names, the files' own times) are left
out or replaced; texts that are long stand as a hash.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, fields, is_dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
from helpers.hosts import FakeHosts
from helpers.specs import PLAIN, prompt_of, reads, sampling_of
from pydantic import BaseModel

from prefect_raybatch import source
from prefect_raybatch.api import plan_run
from prefect_raybatch.cluster import connect, lookups
from prefect_raybatch.cluster import sizes as sized
from prefect_raybatch.cluster.pipeline import Pipeline, resources_of, warm_kind_of
from prefect_raybatch.cluster.sharing import ClusterSession
from prefect_raybatch.cluster.warm import WarmEngines
from prefect_raybatch.cluster.warm_actors import warm_kind
from prefect_raybatch.compile.job import compile_job, compile_planned, finish_spec
from prefect_raybatch.compile.resolved import resolve
from prefect_raybatch.errors import RayBatchError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.cluster import ClusterAccess
from prefect_raybatch.job.prompt import Prompt
from prefect_raybatch.ledger.increments import OF_ROWS, begin_requests_phase, increment_of
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.plan_tables import decode_schema
from prefect_raybatch.ledger.records import Plan, load
from prefect_raybatch.plan.row_keys import RowKeys, keying_of
from prefect_raybatch.runs.increment import requests_spec
from prefect_raybatch.sizing.sizes import Capacity, expected_engines
from prefect_raybatch.source import Inventory
from prefect_raybatch.spec.read import ReadSpec
from prefect_raybatch.spec.result import FinishSpec
from prefect_raybatch.spec.run import RunSpec
from prefect_raybatch.spec.sizes import SizeSpec
from prefect_raybatch.stages.endpoint.limiter import Limiter
from prefect_raybatch.stages.engine import EngineLaunch, EngineStage
from prefect_raybatch.stages.raw_answers import AnswerFiles
from prefect_raybatch.stages.result_columns import result_columns
from prefect_raybatch.storage import Store, open_store
from prefect_raybatch.storage.local import LocalStore

from .jobs import GoldenJob

CLUSTERS = {
    "cpu": Capacity(16.0, 0.0, 1, "10.0.0.1:6379"),
    "h100": Capacity(192.0, 8.0, 1, "10.0.0.1:6379", (8.0,), ("H100",), 24.0, 79 << 30),
    "mixed": Capacity(
        *(256.0, 12.0, 4, "10.0.0.1:6379"),
        gpus_by_node=(8.0, 2.0, 2.0),
        accelerators=("A100", "H100", "L4"),
        cpus_a_gpu=8.0,
        gpu_bytes=22 << 30,
    ),
}
LONG = 1500  # characters of a text from which on its hash is recorded
DIGITS = 6  # of a number: the last bits of a logarithm are the processor's
KEYED_ROWS = 2  # rows whose request keys are recorded
# In a plan, and other on each machine or each day.
NAMED = (
    (re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"), "UUID"),
    (re.compile(r"\b[0-9a-f]{32}\b"), "UUID"),
    (re.compile(r"\b(files|shards|uris|places|weights)-[0-9a-f]{16}\b"), r"\1-HASH"),
    (re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[\d.]*(\+00:00|Z)?"), "TIME"),
)


def record(golden: GoldenJob, folder: Path) -> dict[str, Any]:
    """Return the outcome of a job; `folder` is the working directory, as `world` makes it."""
    return canonical(_recorded(golden), folder)


def _recorded(golden: GoldenJob) -> dict[str, Any]:
    with ExitStack() as stack:
        for patch in _outside(golden):
            stack.enter_context(patch)
        try:
            job = _loaded(BatchJob.from_dict(golden.job))
            run = plan_run(job, golden.name)
        except RayBatchError as error:
            return {"refused": _refusal(error)}
        store = open_store(run.uri)
        ledger = Ledger(store)
        plan = ledger.load_plan()
        if plan is None:
            raise RuntimeError(f"{run.uri} has no plan")
        spec = compile_planned(job, plan)
        made: dict[str, Any] = {
            "plan": _plan_record(plan),
            "files": [_file(file) for file in ledger.files(plan)],
            "shards": [ledger.shards(plan)[shard].rows for shard in range(plan.shards)],
            "keys": _keys(compile_job(resolve(job).job), plan, ledger),
            "result": dict(result_columns(spec.finish, spec.sampling, spec.engine.model.task)),
            "expected_engines": {
                name: expected_engines(spec.sizes, have) for name, have in CLUSTERS.items()
            },
            "clusters": {
                name: plain(_on_cluster(spec, plan, ledger, have))
                for name, have in CLUSTERS.items()
            },
        }
    made["on_all_clusters"] = _lifted(made["clusters"])
    return made


def _loaded(job: BatchJob) -> BatchJob:
    """The job with the block of its cluster, as a flow loads it."""
    if job.cluster.block is None:
        return job
    access = ClusterAccess("10.0.0.1:6379", token="a-token", block=job.cluster.block)
    return job.model_copy(update={"cluster": job.cluster.with_access(access)})


class _NoRay:
    """Ray, which this process is not in."""

    def joined(self) -> bool:
        return False


def _outside(golden: GoldenJob) -> Iterator[Any]:
    """Stand-ins for what lies outside of the process: disk, Ray, this machine, remote inputs."""
    yield mock.patch.object(os, "fsync", lambda handle: None)
    yield mock.patch.object(LocalStore, "probe", lambda store: None)
    shared = ClusterSession(_NoRay(), WarmEngines(FakeHosts()))  # type: ignore[arg-type]
    yield mock.patch.object(connect, "CLUSTER_SESSION", shared)
    yield mock.patch.object(connect, "this_machine", lambda cluster: CLUSTERS["cpu"])
    if golden.remote:
        yield mock.patch.object(source, "needs_snapshot", lambda given: True)
        yield mock.patch.object(source, "snapshot", partial(_snapshot_of_csv, source.snapshot))


def _snapshot_of_csv(snapshot: Any, given: ReadSpec, *args: Any, **more: Any) -> Inventory:
    found: Inventory = snapshot(reads(uri="data/rows.csv"), *args, **more)
    return found


# --- the plan -----------------------------------------------------------------------------------


def _plan_record(plan: Plan) -> dict[str, Any]:
    value: dict[str, Any] = load(plan.to_bytes(), "the plan")
    return _readable(value)


def _readable(plan: Mapping[str, Any]) -> dict[str, Any]:
    schema = decode_schema(plan["input_schema"])
    value = {**plan, "input_schema": _columns(schema)}
    increment = plan.get("increment")
    if increment and increment.get("asks"):
        value["increment"] = {**increment, "asks": _readable(increment["asks"])}
    return value


def _columns(schema: pa.Schema) -> list[str]:
    return [f"{field.name}: {field.type}" for field in schema]


def _file(file: Any) -> dict[str, Any]:
    return {"uri": file.uri, "rows": file.rows, "values": dict(file.values)}


def _keys(given: RunSpec, plan: Plan, ledger: Ledger) -> dict[str, Any]:
    """What requests are known by, and the keys of the first rows."""
    if plan.context is not None:
        given = given.decide(context=plan.context["max_model_len"])
    keying, parts = keying_of(given, plan.model)
    made = {
        "context": keying.context,
        "parts": parts,
        "merge": keying.merge,
        "adapters": keying.adapters,
        "column": keying.column,
    }
    schema, files = decode_schema(plan.input_schema), ledger.files(plan)
    found = Inventory(tuple(files), schema, plan.row_bytes, "parquet")
    store = ledger.store if plan.snapshot else None
    try:
        rows = RowKeys.of(given, dict(plan.model), found, store, keying)
        rows = replace(rows, rows_a_task=KEYED_ROWS)
        keyed = rows(0)
    except RayBatchError as error:
        return {**made, "rows": _refusal(error)}
    raw = keyed.keys.tobytes()
    size = len(raw) // len(keyed.keys)
    made["rows"] = {
        "columns": rows.reader.schema.names,
        "chunk": rows.chunk,
        "keys": [raw[at : at + size].hex("-", 4) for at in range(0, len(raw), size)],
        "well": keyed.row_is_valid.tolist(),
        "exact": keyed.exact.tolist(),
    }
    return made


# --- a cluster ----------------------------------------------------------------------------------


def _on_cluster(spec: RunSpec, plan: Plan, ledger: Ledger, capacity: Capacity) -> dict[str, Any]:
    """What each phase of the run is on that cluster."""
    increment = increment_of(plan)
    if increment is None:
        made = {"rows": _phase(spec.decide(precision={}), plan, ledger, capacity)}
        for tried in spec.engine.tries:
            name = ", ".join(f"{field} {value}" for field, value in tried.items())
            made[name] = _phase(spec.decide(precision=tried), plan, ledger, capacity)
        return made
    made = {}
    begun = begin_requests_phase(ledger.store, increment)
    if begun is not None:
        asks, asks_plan = begun
        made["asks"] = _phase(requests_spec(spec), asks_plan, asks, capacity)
    if increment.ledger == OF_ROWS:
        made["rows"] = _phase(spec, plan, ledger, capacity, spec.sizes.without_engine())
    return made


def _phase(
    spec: RunSpec, plan: Plan, ledger: Ledger, capacity: Capacity, sizes: SizeSpec | None = None
) -> dict[str, Any]:
    """Sizes, engines and stages of one ledger; the sizes are for `sizes` where it is given."""
    sizes = sizes or spec.sizes
    try:
        size = sized.for_attempt(sizes, plan, capacity)
    except RayBatchError as error:
        return {"refused": _refusal(error)}
    made: dict[str, Any] = {"sizing": size.to_dict(), "rate": size.rate}
    made["needs"] = connect.needs(sizes, size.pool)
    try:
        connect.check_fit(sizes, capacity, size.pool)
    except RayBatchError as error:
        made["does_not_fit"] = _refusal(error)
    pipeline = Pipeline(spec, plan, ledger.shards(plan), ledger.store, "attempt", size)
    with _no_answers(ledger.store):
        first, launch, finish = pipeline.stages(isolated=False)
        alone, _, alone_finish = pipeline.stages(isolated=True)
    reader = pipeline.reader
    made["reader"] = {
        "columns": reader.schema.names,
        "options": sorted(reader.options),
        "store": reader.store,
    }
    made |= {"first": first, "finish": finish}
    made["alone"] = {"first": _changes(first, alone), "finish": _changes(finish, alone_finish)}
    if launch is not None:
        made["engine"] = launch
        made["resources"] = pipeline.engine_resources()
        made["warm"] = _warm(spec, plan, size, launch)
    return made


@contextmanager
def _no_answers(store: Store) -> Iterator[None]:
    """Asks that are finished, and of which nothing came: where answers lie is no wiring."""
    none = AnswerFiles(store, (), ())
    known = lookups.LookUpFiles(none, none, none)
    with mock.patch.object(lookups, "look_up_files", lambda *args: known):
        yield


def _warm(spec: RunSpec, plan: Plan, size: Any, launch: EngineLaunch) -> dict[str, Any] | None:
    """What makes an engine the one that another run can take over; `key` is over canonical places.

    Raises ValueError if the engine of a run and the kind that is looked for differ.
    """
    kind = warm_kind_of(spec, plan.model, size)
    if kind is None:
        return None
    resources = resources_of(spec.sizes, size)
    calls = min(size.concurrent, size.shards)
    own = warm_kind(EngineStage, launch, resources, calls)
    if own != kind:
        raise ValueError(f"{spec.name}: its engines are not the kind that warm_kind_of names")
    model = canonical(dict(launch.model), Path.cwd())
    own = warm_kind(EngineStage, replace(launch, model=model), resources, calls)
    return {
        "key": own and own.key,
        "calls": kind.calls,
        "options": kind.options,
        "takes": kind.takes,
    }


def _changes(one: Any, other: Any) -> list[str]:
    return [f.name for f in fields(one) if getattr(one, f.name) != getattr(other, f.name)]


def _lifted(clusters: dict[str, Any]) -> dict[str, Any]:
    """Take out of the clusters, and return, what is the same on all of them."""
    lifted: dict[str, Any] = {}
    for phase in next(iter(clusters.values())):
        on_each = [cluster[phase] for cluster in clusters.values()]
        same = _common(on_each)
        engines = [one["engine"] for one in on_each if "engine" in one]
        if len(engines) == len(on_each):
            same["engine"] = _common(engines)
        lifted[phase] = same
    return lifted


def _common(values: list[dict[str, Any]]) -> dict[str, Any]:
    """Move the entries that all of these have alike to a dict of their own."""
    names = [n for n in values[0] if all(n in one and one[n] == values[0][n] for one in values)]
    common = {name: values[0][name] for name in names}
    for one in values:
        for name in names:
            del one[name]
    return common


# --- plain values -------------------------------------------------------------------------------


def _refusal(error: RayBatchError) -> dict[str, str]:
    return {"error": type(error).__name__, "message": str(error)}


def canonical(value: Any, folder: Path) -> Any:
    """Return the value as JSON has it, with nothing in it that is this machine's or this day's."""
    return _renamed(plain(value), (str(folder.resolve()), str(folder)))


def _renamed(value: Any, places: Sequence[str]) -> Any:
    if isinstance(value, dict):
        return {_renamed(name, places): _renamed(v, places) for name, v in value.items()}
    if isinstance(value, list):
        return [_renamed(one, places) for one in value]
    if not isinstance(value, str):
        return value
    for place in places:
        value = value.replace(place, "FOLDER")
    for pattern, name in NAMED:
        value = pattern.sub(name, value)
    return value if len(value) <= LONG else f"sha256 {hashlib.sha256(value.encode()).hexdigest()}"


def plain(value: Any) -> Any:
    """Return objects as their fields by name, of which those that are as by default are left out.

    Raises TypeError for an object of a kind that nothing is known of.
    """
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {str(name): plain(value[name]) for name in value}
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain, value))
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, BaseModel):
        return plain(value.model_dump(mode="json", exclude_defaults=True))
    if isinstance(value, Store):
        return {"is": type(value).__name__, "uri": value.uri}
    if isinstance(value, Limiter):
        return {"is": "Limiter", "limits": [value.requests, value.tokens, value.most]}
    if isinstance(value, AnswerFiles):
        return {"columns": list(value.columns), "files": [file.path for file in value.files]}
    if is_dataclass(value) and not isinstance(value, type):
        return {"is": type(value).__name__, **_fields(value)}
    if isinstance(value, partial):
        return f"calls {value.func.__qualname__}"
    if callable(value):
        return f"calls {getattr(value, '__qualname__', type(value).__name__)}"
    raise TypeError(f"{type(value).__name__} is no value that the corpus can hold: {value!r}")


# Specs have no defaults: what they hold of a job that sets nothing is left out.
USUAL: dict[type, Any] = {
    type(part): part for part in (prompt_of(Prompt(template="")), sampling_of())
}
USUAL[FinishSpec] = finish_spec(PLAIN)


def _fields(value: Any) -> dict[str, Any]:
    made = {}
    for field in fields(value):
        given = getattr(value, field.name)
        usual = field.default
        if type(value) in USUAL:
            usual = getattr(USUAL[type(value)], field.name)
        if field.default_factory is not MISSING:
            usual = field.default_factory()
        if usual is MISSING or type(given) is not type(usual) or given != usual:
            made[field.name] = plain(given)
    return made
