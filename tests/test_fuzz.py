"""Whatever stands in a job file or a run directory: a valid value, or one of our errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml
from helpers.small import job_dict, small_run
from hypothesis import example, given
from hypothesis import strategies as st

from prefect_raybatch.errors import ConfigError, CorruptRun, PlanMismatch
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.checks import check_run_key
from prefect_raybatch.job.trust import check_trust
from prefect_raybatch.ledger import checkpoints
from prefect_raybatch.ledger.checkpoints import CheckpointWriter
from prefect_raybatch.ledger.layout import CHECKPOINTS, COMMITS, commit_path
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.plan_tables import (
    classifier_table,
    decode_schema,
    encode_schema,
    files_table,
    read_classifier,
    read_files,
    read_shards,
    shards_table,
)
from prefect_raybatch.ledger.records import Commit, InputFile, Plan, Receipt
from prefect_raybatch.ledger.row_numbers import numbers_table
from prefect_raybatch.plan.plan import shard_starts
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.result.verify import verify
from prefect_raybatch.storage import open_store

OURS = (ConfigError, CorruptRun, PlanMismatch)
texts = st.text(st.characters(codec="utf-8"), max_size=12)
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | texts
    | st.sampled_from(["..", "../x", "/etc/passwd", "a/b", "\x00", "s3://", "{a.b}", "__class__"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)


def mutated(value: Any, data: st.DataObject) -> Any:
    """`value` with one place in it replaced, removed or added to."""
    value = json.loads(json.dumps(value))
    at: Any = value
    for _ in range(data.draw(st.integers(0, 3))):
        inner = (
            [k for k in at if isinstance(at[k], (dict, list)) and at[k]]
            if isinstance(at, dict)
            else [i for i, v in enumerate(at) if isinstance(v, (dict, list)) and v]
        )
        if not inner:
            break
        at = at[data.draw(st.sampled_from(inner))]
    keys = list(at) if isinstance(at, dict) else list(range(len(at)))
    key = data.draw(st.sampled_from(keys)) if keys else None
    what = data.draw(st.sampled_from(["replace", "remove", "add"]))
    if what == "replace" and keys:
        at[key] = data.draw(plain)
    elif what == "remove" and keys:
        del at[key]
    elif isinstance(at, dict):
        at[data.draw(texts)] = data.draw(plain)
    else:
        at.append(data.draw(plain))
    return value


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = small_run(tmp_path_factory.mktemp("run"))
    made.commit_all({(1, 2)})
    return made


def reads(read: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return read(data)
    except OURS:
        return None


READERS: dict[str, Callable[[bytes], Any]] = {
    "plan": Plan.from_bytes,
    "commit": Commit.from_bytes,
    "receipt": Receipt.from_json,
    "report": RunReport.from_bytes,
    "shards": read_shards,
    "files": read_files,
    "schema": lambda data: decode_schema(data.decode("latin-1")),
}


@pytest.mark.parametrize("kind", READERS)
@given(data=st.binary(max_size=200))
@example(data=b"{}")
@example(data=b"[" * 100_000)
@example(data=b'{"format":' + b"9" * 5000 + b"}")
@example(data=b'{"a":NaN,"a":1e999}')
@example(data=b"PAR1" + b"\xff" * 40 + b"PAR1")
def test_any_bytes_are_read_or_refused(kind, data):
    reads(READERS[kind], data)


@pytest.mark.parametrize("kind", ["plan", "commit"])
@given(data=st.data())
def test_a_changed_record_is_refused_or_reads_back_the_same(kind, run, data):
    record = run.plan if kind == "plan" else run.ledger.read_commit(run.plan, 1)
    changed = json.dumps(mutated(json.loads(record.to_bytes()), data)).encode()
    found = reads(READERS[kind], changed)
    if found is not None:
        assert reads(READERS[kind], found.to_bytes()) == found


@example(cut=1, flips=[(31, 128)])
@given(
    cut=st.integers(1, 400), flips=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)))
)
@example(cut=1, flips=[(3642, 128)])  # a column's name that is no UTF-8
def test_a_damaged_table_is_refused_or_a_partition(cut, flips):
    for good, read in (
        (shards_table(shard_starts(100, 7)), read_shards),
        (files_table([InputFile("a", 1, None, 2, 3)]), read_files),
        (numbers_table(np.array([1, 5, 9])), lambda data: data),
        (classifier_table(b"{}"), read_classifier),
    ):
        data = bytearray(good)
        for at, value in flips:
            data[at % len(data)] ^= value
        found = reads(read, bytes(data[: len(data) - cut % len(data)]))
        found = reads(read, bytes(data))
        if hasattr(found, "starts"):
            assert found.starts[0] == 0 and (np.diff(found.starts) > 0).all()


@given(data=st.data())
def test_a_changed_job_is_refused_or_survives_yaml(data):
    whole = job_dict(
        sampling={"temperature": 0, "max_tokens": 5, "choice": ["a", "b"]},
        engine={"model": "demo", "env": {"A": "b"}},
        limits={"max_failed_fraction": 0.1},
    )
    changed = mutated(whole, data)
    try:
        job = BatchJob.from_dict(changed)
        check_trust(job)
    except ConfigError as error:
        assert str(error)
        return
    assert BatchJob.from_dict(yaml.safe_load(yaml.safe_dump(job.to_dict()))) == job


@given(text=st.text(max_size=60) | st.binary(max_size=60).map(lambda b: b.decode("latin-1")))
@example(text="a: &a [x]\n" + "b: [*a, *a]\n" * 3)
@example(text="? " * 2000)
@example(text="[" * 3000)
@example(text="!!python/object/apply:os.system ['true']")
def test_any_text_is_a_job_or_refused(tmp_path, text):
    path = tmp_path / "job.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(ConfigError):
        BatchJob.from_yaml(path)


def test_aliases_cannot_blow_a_job_up(tmp_path):
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    for more in ("", "name: *a11", "source: {uri: *a11}", "engine: {env: {A: *a11}}"):
        (tmp_path / "job.yaml").write_text("\n".join([*levels, more]))
        with pytest.raises(ConfigError) as caught:
            BatchJob.from_yaml(tmp_path / "job.yaml")
        assert len(str(caught.value)) < 20_000


@given(
    key=st.text(max_size=20) | st.sampled_from(["..", "a/../b", "/a", "a\x00", "a" * 200, "a.."])
)
def test_a_run_key_is_one_name_below_the_root(key):
    try:
        good = check_run_key(key)
    except ConfigError:
        return
    assert "/" not in good and ".." not in good and good.isascii() and 0 < len(good) <= 128


@given(data=st.data())
def test_a_strange_record_in_a_run_directory_is_told(tmp_path_factory, data):
    made = small_run(tmp_path_factory.mktemp("run"))
    made.commit_all()
    path = made.root / data.draw(
        st.sampled_from(["_raybatch/plan.json", commit_path(2), made.plan.shards_table])
    )
    path = path if path.exists() else made.root / "_raybatch" / made.plan.shards_table
    path.write_bytes(data.draw(st.binary(max_size=80)))
    ledger = Ledger(open_store(str(made.root)))
    try:
        found = verify(ledger.store)
    except CorruptRun:
        return
    assert not found.ok


@given(body=st.binary(max_size=300))
def test_a_strange_checkpoint_only_costs_reads(run, body):
    for old in run.store.list(CHECKPOINTS):
        run.store.delete([old.path])
    folder = CheckpointWriter(run.store, run.plan.hash)
    folder.add(run.ledger.read_commit(run.plan, 0))
    folder.flush(1)
    run.store.put(f"{CHECKPOINTS}/strange.gz", body)
    listing = run.ledger.listing(run.plan)
    assert [c.shard for c in run.ledger.commits(run.plan, listing)] == [0, 1, 2, 3]
    assert checkpoints.CHECKPOINTS != COMMITS


@given(st.lists(st.tuples(texts, st.sampled_from([pa.string(), pa.int32(), pa.list_(pa.int8())]))))
def test_schemas_read_back_the_same(fields):
    schema = pa.schema(fields)
    assert decode_schema(encode_schema(schema)) == schema
