"""Records against damage, errors across processes."""

from __future__ import annotations

import inspect
import json
import pickle
import tracemalloc
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
from helpers.reports import COMMIT, PIECE, RECEIPT, REPORT
from hypothesis import given
from hypothesis import strategies as st

from prefect_raybatch import errors
from prefect_raybatch.errors import CorruptRun, RayBatchError, is_transient
from prefect_raybatch.ledger.failures import Loss
from prefect_raybatch.ledger.positions import Positions, disjoint
from prefect_raybatch.ledger.records import (
    FORMAT,
    Commit,
    Plan,
    Receipt,
    Unit,
    digest,
    dump,
    load,
)
from prefect_raybatch.ledger.stats import ShardStats, fold_stats
from prefect_raybatch.report.records import RunReport


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")),
        lambda inner: (
            st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner)
        ),
        max_leaves=10,
    )
)
def test_dump_is_canonical(value):
    assert json.loads(dump(value)) == value
    if isinstance(value, dict):
        assert dump(dict(reversed(value.items()))) == dump(value)


# --- records ------------------------------------------------------------------------------------

PLAN = Plan(
    run_key="k",
    job_name="j",
    created="2026-01-01T00:00:00+00:00",
    rows=10,
    rows_per_shard=5,
    shards=2,
    fingerprint="f",
    parts={"source.uri": ["Straße"]},
    model={"source": "demo"},
    input_schema="",
    shards_table="shards-1.parquet",
    files_table="files-1.parquet",
    snapshot=False,
    job={"name": "j"},
    row_bytes=12.5,
)
READERS = {
    "plan": (Plan.from_bytes, PLAN.to_bytes()),
    "receipt": (Receipt.from_json, RECEIPT.to_json().encode()),
    "commit": (Commit.from_bytes, COMMIT.to_bytes()),
    "report": (RunReport.from_bytes, REPORT.to_bytes()),
}


def test_records_round_trip():
    assert Plan.from_bytes(PLAN.to_bytes()) == PLAN
    assert Receipt.from_json(RECEIPT.to_json()) == RECEIPT
    assert Commit.from_bytes(COMMIT.to_bytes()) == COMMIT
    assert RunReport.from_bytes(REPORT.to_bytes()) == REPORT
    for fatal in (True, False):
        lost = Receipt.of_lost(Unit(1, 2, 3), "a", Loss("EngineDied", "x: y", fatal))
        assert Receipt.from_json(lost.to_json()) == lost


def test_records_cross_process_borders():
    for record in (PIECE, RECEIPT, COMMIT, PLAN, REPORT):
        assert pickle.loads(pickle.dumps(record)) == record


def test_a_wrong_field_is_named():
    value = json.loads(COMMIT.to_bytes())
    for change, said in (
        ({"shard": -1}, "shard is '-1'"),
        ({"stats": {"rows": "many"}}, r"stats\.rows is 'many'"),
        ({"failed": [[0, "x"]]}, r"failed\.0\.1 is 'x'"),
        ({"failures": {"a|b|c": -1}}, r"failures\.a\|b\|c is '-1'"),
        ({"pieces": [{**value["pieces"][0], "kind": "other"}]}, r"pieces\.0\.kind is 'other'"),
        ({"pieces": [{**value["pieces"][0], "more": 1}]}, r"unknown fields pieces\.0\.more"),
    ):
        with pytest.raises(CorruptRun, match=rf"^commits/7 .*{said}"):
            Commit.from_bytes(dump({**value, **change}), "commits/7")
    del value["token"]
    with pytest.raises(CorruptRun, match="commits/7 is malformed: token is missing"):
        Commit.from_bytes(dump(value), "commits/7")


def test_a_plan_with_a_whole_number_where_a_fraction_may_be_keeps_its_hash():
    data = dump({**json.loads(PLAN.to_bytes()), "row_bytes": 12})
    assert Plan.from_bytes(data).to_bytes() == data


def test_the_plan_hash_is_that_of_its_bytes_and_survives_reading():
    assert PLAN.hash == digest(PLAN.to_bytes())
    assert Plan.from_bytes(PLAN.to_bytes()).hash == PLAN.hash


def test_records_are_frozen():
    for record in (PIECE, RECEIPT, COMMIT, PLAN, REPORT):
        with pytest.raises(FrozenInstanceError):
            record.shard = 1  # type: ignore[misc]


def _commit_with(name: str, item: bytes) -> bytes:
    data = dump({**json.loads(COMMIT.to_bytes()), name: []})
    return data.replace(
        b'"%b":[]' % name.encode(), b'"%b":[%b%b]' % (name.encode(), item, (b"," + item) * 60_000)
    )


@pytest.mark.parametrize(
    "hostile",
    [
        b"{%b}" % b",".join(b'"x%d":1' % i for i in range(60_000)),
        b'{"stats":{%b}}' % b",".join(b'"x%d":"1"' % i for i in range(60_000)),
        b'{"pieces":[{%b}]}' % b",".join(b'"x%d" : 1' % i for i in range(60_000)),
        _commit_with("pieces", b'{"path":1}'),
        _commit_with("failed", b'[0,"x"]'),
    ],
    ids=["keys", "figures", "keys of a piece", "pieces", "ranges"],
)
def test_a_record_of_very_many_faults_costs_no_error_for_each(hostile):
    tracemalloc.start()
    with pytest.raises(CorruptRun) as caught:
        Commit.from_bytes(hostile)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(str(caught.value)) < 300 and most < 20 * len(hostile)


def test_a_receipt_whose_own_parts_overlap_holds_nothing():
    assert (
        Receipt(0, "a", good=Positions.spans((0, 3)), failed=Positions.spans((2, 4))).held is None
    )
    assert RECEIPT.held == Positions.spans((0, 5))
    assert Receipt.of_lost(Unit(0, 0, 5), "a", Loss("", "x")).held == Positions()


def test_a_receipt_tells_of_the_unit_it_is_of():
    assert Receipt.of_lost(Unit(2, 5, 1), "a", Loss("", "x")).unit == Unit(2, 5, 1)
    held = {"good": Positions.spans((5, 6), (8, 9)), "skipped": Positions.spans((6, 7))}
    assert Receipt(2, "a", **held).unit == Unit(2, 5, 4)
    # Of workers with other code, which do not say it: the shard.
    whole = Receipt(2, "a", lost=Loss("", "x")).unit
    assert whole.overlaps(Unit(2, 1_000_000, 1)) and not whole.overlaps(Unit(1, 0, 1))


def test_what_is_left_of_a_unit():
    unit = Unit(1, 10, 10)
    assert unit.without(Unit(1, 12, 3)) == [Unit(1, 10, 2), Unit(1, 15, 5)]
    assert unit.without(Unit(1, 0, 12)) == [Unit(1, 12, 8)]
    assert unit.without(Unit(1, 0, 30)) == []
    for other in (Unit(2, 12, 3), Unit(1, 0, 10), Unit(1, 20, 1), Unit(1, 15, 0)):
        assert unit.without(other) == [unit]


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{", b"[]", b"null", b"7", b'"text"', b"\xff\xfe", b"{" * 50_000, b"[" * 50_000),
        *(b"{}", b'{"format": 1}', b'{"format": 2}', b'{"good": [[0, Infinity]]}', b"1" * 6000),
    ],
)
def test_what_is_no_record_is_a_corrupt_run(kind, data):
    with pytest.raises(CorruptRun):
        READERS[kind][0](data)


@pytest.mark.parametrize("kind", READERS)
def test_unknown_and_missing_fields_are_a_corrupt_run(kind):
    reader, data = READERS[kind]
    value = json.loads(data)
    with pytest.raises(CorruptRun, match="unknown fields surprise"):
        reader(dump({**value, "surprise": 1}))
    for name in value:
        less = {k: v for k, v in value.items() if k != name}
        try:
            reader(dump(less))  # a field with a default may be left out
        except CorruptRun:
            continue


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_a_constant_that_json_has_not_is_refused_where_anything_may_stand(constant):
    plan = json.loads(READERS["plan"][1])
    free = {**plan, "job": {**plan["job"], "name": "X"}}
    with pytest.raises(CorruptRun, match="not valid JSON"):
        Plan.from_bytes(dump(free).replace(b'"X"', constant.encode()))
    named = {**plan, "job": {**plan["job"], "name": constant}}  # as text it is fine
    assert Plan.from_bytes(dump(named)).job["name"] == constant


@pytest.mark.parametrize("other", [FORMAT + 1, FORMAT - 1, 1, None, "3"])
def test_a_plan_of_another_format_is_refused_whatever_its_fields_are(other):
    value = {"format": other, "quarantine": "quarantine"}
    with pytest.raises(CorruptRun) as refused:
        Plan.from_bytes(dump(value))
    assert str(refused.value) == (
        f"plan.json has format {other!r}; this version reads {FORMAT}. Finish the run with the "
        "version that planned it, or choose a new run key."
    )


def test_a_plan_says_all_of_its_fields():
    kept = replace(
        PLAN,
        classifier_table="classifier-0123456789abcdef.parquet",
        original_created=PLAN.created,
    )
    names = {field.name for field in fields(Plan)}
    in_file = {"night" if name == "original_created" else name for name in names}
    assert json.loads(kept.to_bytes()).keys() == in_file
    assert Plan.from_bytes(kept.to_bytes()) == kept


def test_a_plan_from_before_classifiers_keeps_its_hash():
    value = json.loads(PLAN.to_bytes())
    assert "classifier_table" not in value and Plan.from_bytes(dump(value)).hash == PLAN.hash


def test_a_commit_of_another_format_is_refused():
    reader, data = READERS["commit"]
    with pytest.raises(CorruptRun, match=rf"format {FORMAT + 1}; this version reads {FORMAT}"):
        reader(dump({**json.loads(data), "format": FORMAT + 1}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rows", -1),
        ("rows", 1.5),
        ("shards", "2"),
        ("shards", None),
        ("shards_table", "../../etc/passwd"),
        ("shards_table", "a/b.parquet"),
        ("files_table", "x.txt"),
        ("files_table", 5),
        ("parent", "../k"),
        ("forked_from", {"run_key": "k"}),
        ("forked_from", {"run_key": "k", "plan": 1}),
        ("forked_from", {"run_key": "../k", "plan": "h"}),
        ("context", {"max_model_len": 0}),
        ("context", {"max_model_len": True}),
        ("table", {"format": "delta", "uri": "u", "id": "i"}),
        ("table", {"format": "delta", "uri": "u", "id": "i", "version": 1}),
    ],
)
def test_a_plan_with_wrong_values_is_corrupt(name, value):
    with pytest.raises(CorruptRun, match=name):
        Plan.from_bytes(dump({**json.loads(PLAN.to_bytes()), name: value}))


@pytest.mark.parametrize("path", ["../x.parquet", "a/b.parquet", "/etc/passwd"])
def test_a_piece_cannot_name_a_file_outside(path):
    value = json.loads(COMMIT.to_bytes())
    value["pieces"][0]["path"] = path
    with pytest.raises(CorruptRun, match="not a file name"):
        Commit.from_bytes(dump(value))


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 1 << 70)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["data", [[0, 1]], [[1]], [["a", "b"]], {}, []]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("kind", READERS)
@given(data=st.data())
def test_a_damaged_record_is_read_or_corrupt_never_another_error(kind, data):
    """A reader that hands on a record hands on one that the ledger can work with."""
    reader, good = READERS[kind]
    value = json.loads(good)
    at: Any = value
    for _ in range(data.draw(st.integers(0, 2), "depth")):
        inner = (
            [k for k in at if isinstance(at[k], (dict, list)) and at[k]]
            if isinstance(at, dict)
            else [i for i, v in enumerate(at) if isinstance(v, (dict, list)) and v]
        )
        if inner:
            at = at[data.draw(st.sampled_from(inner), "into")]
    keys = sorted(at) if isinstance(at, dict) else list(range(len(at)))
    at[data.draw(st.sampled_from(keys), "key")] = data.draw(junk, "junk")
    try:
        record = reader(json.dumps(value).encode())
    except CorruptRun:
        return
    if isinstance(record, (Commit, Receipt)):
        from prefect_raybatch.report.tally import Tally

        assert record.shard >= 0
        assert isinstance(record.attempt, str)
        disjoint((record.good, record.failed, record.skipped))
        if isinstance(record, Commit):
            Tally().add(record)
        fold_stats([record.stats])


@pytest.mark.parametrize("kind", READERS)
@given(cut=st.integers(0, 2000), flip=st.integers(0, 2000), byte=st.binary(min_size=1, max_size=1))
def test_a_truncated_or_flipped_record_is_read_or_corrupt(kind, cut, flip, byte):
    reader, good = READERS[kind]
    for data in (
        good[: cut % len(good)],
        good[: flip % len(good)] + byte + good[flip % len(good) + 1 :],
    ):
        try:
            reader(data)
        except CorruptRun as error:
            assert len(str(error)) < 1000


def test_load_names_what_is_broken():
    with pytest.raises(CorruptRun, match="_SUCCESS is not valid JSON"):
        load(b"{", "_SUCCESS")


def test_times_fold_to_first_start_and_last_end():
    parts = [
        ShardStats(rows=2, started=5.0, ended=9.0),
        ShardStats(rows=3, started=4.0, ended=6.0),
    ]
    assert fold_stats(parts) == ShardStats(rows=5, started=4.0, ended=9.0)
    assert fold_stats([ShardStats(rows=1)]) == ShardStats(rows=1)


# --- errors -------------------------------------------------------------------------------------

TREE = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, RayBatchError)
]
TRANSIENT = {
    "BadUpload",
    "StoreUnavailable",
    "HubUnavailable",
    "ImagesUnavailable",
    "EngineFailure",
    "EndpointUnavailable",
    "IncompleteRun",
    "ClusterUnavailable",
    "JobLost",
    "PrefectUnavailable",
    "JobServerUnavailable",
    "PublishFailed",
}


@pytest.mark.parametrize("kind", TREE)
def test_errors_cross_process_borders(kind):
    there = pickle.loads(pickle.dumps(kind("what, which value, what to do")))
    assert type(there) is kind and str(there) == "what, which value, what to do"
    assert there.transient is is_transient(there) is (kind.__name__ in TRANSIENT)
    assert kind.__doc__


def test_what_is_not_ours_is_retried_unless_it_is_a_mistake_in_code():
    assert (
        is_transient(ConnectionError()) and is_transient(OSError()) and is_transient(RuntimeError())
    )
    assert not is_transient(TypeError()) and not is_transient(ValueError())
    assert not is_transient(KeyboardInterrupt())
