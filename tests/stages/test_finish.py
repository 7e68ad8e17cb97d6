"""Answers to pieces and receipts: postprocess, schemas, quarantine, and a store that fails."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.engines import with_answers
from helpers.small import MODEL, input_rows, receipts
from helpers.specs import finish_stage

from prefect_raybatch.errors import StoreError, StoreUnavailable
from prefect_raybatch.job.output import Output
from prefect_raybatch.ledger.failures import FailureKey, Loss
from prefect_raybatch.ledger.positions import Positions
from prefect_raybatch.ledger.records import QUARANTINE, Receipt, Unit, digest
from prefect_raybatch.ledger.stats import values_by_column
from prefect_raybatch.report.inputs import null_counts
from prefect_raybatch.stages.block import Failure, lost_block, tag, timed
from prefect_raybatch.stages.columns import (
    ANSWERS,
    CACHED_TOKENS,
    ENDS,
    ENGINE_BEGAN,
    ENGINE_SPENT,
    ERROR_TYPE,
    FINISH,
    FORMED,
    MERGED,
    PARAMS,
    PROMPT_TOKENS,
    TEXTS,
    TOKENS,
    TRUNCATED,
)
from prefect_raybatch.stages.engine import answered
from prefect_raybatch.stages.finish import Finish
from prefect_raybatch.stages.result_columns import declared_schema
from prefect_raybatch.stages.vllm.stepper import Completion
from prefect_raybatch.storage import open_store

ANSWERED = [ANSWERS, TEXTS, FINISH, MERGED, ENDS, PROMPT_TOKENS, CACHED_TOKENS]
ANSWERED += [ENGINE_BEGAN, ENGINE_SPENT]
REFUSED = Failure("engine", "ValueError", "refused").to_dict()


def block(unit: Unit, failed: Any = (), start: int = 0, rows: pa.Table | None = None) -> pa.Table:
    table = tag(input_rows(start, unit.rows) if rows is None else rows, unit)
    errors = [REFUSED if i in failed else None for i in range(unit.rows)]
    return with_answers(table, errors, [f"answer {start + i}" for i in range(unit.rows)])


def stage(root: Path, **output: Any) -> Finish:
    answers = output.pop("answers", 1)
    made = Output.model_validate({"uri": "out", **output})
    return finish_stage(made, dict(MODEL), open_store(str(root)), "attempt", answers=answers)


def one(root: Path, table: pa.Table, **output: Any) -> Receipt:
    (receipt,) = receipts(stage(root, **output)(table))
    assert receipt.lost is None, receipt.lost
    return receipt


def piece(root: Path, receipt: Receipt, kind: str = "data") -> pa.Table:
    (found,) = [p for p in receipt.pieces if p.kind == kind]
    data = (root / "_raybatch/pieces" / found.path).read_bytes()
    assert (found.bytes, found.sha256) == (len(data), digest(data))
    table = pq.read_table(pa.BufferReader(data))
    assert table.num_rows == found.rows == len(found.positions)
    return table


def reasons(root: Path, receipt: Receipt) -> dict[int, tuple[str, str, str]]:
    rows = piece(root, receipt, "quarantine").to_pylist()
    return {row["__rb_pos"]: (row["stage"], row["error"], row["message"]) for row in rows}


# --- without postprocess ------------------------------------------------------------------------


def test_good_and_failed_rows_go_to_a_piece_each(tmp_path):
    receipt = one(tmp_path, block(Unit(7, 10, 5), failed=[1, 4]))
    assert receipt.shard == 7 and receipt.attempt == "attempt"
    assert receipt.good.ranges == ((10, 11), (12, 14)) and receipt.failed.ranges == (
        (11, 12),
        (14, 15),
    )
    assert receipt.skipped.ranges == () and receipt.held.ranges == ((10, 15),)
    table = piece(tmp_path, receipt)
    assert table.column_names == ["__rb_pos", "id", "Company", "tags", "response"]
    assert table["response"].to_pylist() == ["answer 0", "answer 2", "answer 3"]
    bad = piece(tmp_path, receipt, "quarantine")
    assert bad["input"].to_pylist()[0] == {"id": 1, "Company": "Company 1", "tags": ["t1"]}
    assert receipt.failures == {FailureKey("engine", "ValueError", "refused"): 2}
    assert {p.path[:9] for p in receipt.pieces} == {"00000007-"}
    assert len({p.path for p in receipt.pieces}) == 2


def test_every_write_has_a_name_of_its_own(tmp_path):
    table = block(Unit(0, 0, 3))
    names = {p.path for _ in range(3) for p in one(tmp_path, table).pieces}
    assert len(names) == 3
    assert {p.name for p in (tmp_path / "_raybatch/pieces").iterdir()} == names


def test_the_counts_of_a_receipt(tmp_path):
    stats = one(tmp_path, block(Unit(0, 0, 4), failed=[0])).stats
    assert (stats.rows, stats.prompt_tokens, stats.cached_tokens) == (4, 9, 3)
    assert (stats.output_tokens, stats.cut_off, stats.prepare_s) == (3, 0, 0.25)
    assert stats.started is not None and stats.started <= (stats.ended or 0)


@pytest.mark.parametrize(
    ("columns", "kept"),
    [(None, ["id", "Company", "tags"]), (["tags", "id"], ["tags", "id"]), ([], [])],
)
def test_input_columns_are_kept_as_the_job_says(tmp_path, columns, kept):
    receipt = one(tmp_path, block(Unit(0, 0, 3), failed=[2]), columns=columns)
    assert piece(tmp_path, receipt).column_names == ["__rb_pos", *kept, "response"]
    # Quarantine keeps the whole input row, so that it can be tried again.
    bad = piece(tmp_path, receipt, "quarantine")
    assert bad.schema.field("input").type.names == ["id", "Company", "tags"]


def test_nested_and_odd_input_columns_survive_in_quarantine(tmp_path):
    rows = pa.table(
        {
            "struct": [{"a": [1, {"b": None}["b"]]}, None],
            "stage": ["their own", "stage"],
            "raw": pa.array([b"\xff", None], pa.binary()),
            "when": pa.array([1, None], pa.timestamp("us", "UTC")),
            "what": pa.array(["x", None]).dictionary_encode(),
        }
    )
    receipt = one(tmp_path, block(Unit(0, 0, 2), failed=[0, 1], rows=rows))
    bad = piece(tmp_path, receipt, "quarantine")
    assert bad.column_names == ["__rb_pos", *QUARANTINE]
    assert bad["stage"].to_pylist() == ["engine", "engine"]
    found = [row["input"] for row in bad.to_pylist()]
    assert found == rows.to_pylist()
    assert receipt.good.ranges == ()


def test_several_shards_in_a_block_give_a_receipt_each(tmp_path):
    parts = [block(Unit(4, 0, 2), failed=[0]), block(Unit(2, 3, 3)), block(Unit(4, 2, 1))]
    made = receipts(stage(tmp_path)(pa.concat_tables(parts)))
    assert [(r.shard, r.good.ranges, r.failed.ranges) for r in made] == [
        (4, ((1, 3),), ((0, 1),)),
        (2, ((3, 6),), ()),
    ]


def test_answers_are_detokenized_where_vllm_did_not(tmp_path):
    from prefect_raybatch import demo
    from prefect_raybatch.stages.block import load_tokenizer

    words = load_tokenizer(demo.demo_model_path(), None)(["Retail", "Law Firm"])["input_ids"]
    table = block(Unit(0, 0, 3), failed=[1])
    ids = pa.array([[words[0]], None, [[*words[1], 2]]], pa.list_(pa.list_(pa.int32())))
    table = table.set_column(table.column_names.index(ANSWERS), ANSWERS, ids)
    none = pa.array([None] * 3, pa.list_(pa.string()))
    table = table.set_column(table.column_names.index(TEXTS), TEXTS, none)
    made = piece(tmp_path, one(tmp_path, table))
    assert made["response"].to_pylist() == ["Retail", "Law Firm"]  # no end token in the text


def test_tokens_of_an_answer_that_several_rows_share_count_once(tmp_path):
    table = block(Unit(0, 0, 3))
    merged = table.column_names.index(MERGED)
    table = table.set_column(merged, MERGED, pa.array([False, True, None]))
    stats = one(tmp_path, table).stats
    assert (stats.rows, stats.output_tokens, stats.deduplicated) == (3, 2, 1)
    assert stats.truncated is None
    cut = table.append_column(TRUNCATED, pa.array([True, False, True]))
    assert one(tmp_path, cut).stats.truncated == 2


def test_several_answers_a_row_are_a_list(tmp_path):
    table = block(Unit(0, 0, 2))
    texts = pa.array([["a", "b"], ["c", "d"]], pa.list_(pa.string()))
    table = table.set_column(table.column_names.index(TEXTS), TEXTS, texts)
    made = piece(tmp_path, one(tmp_path, table, answers=2))
    assert made["response"].to_pylist() == [["a", "b"], ["c", "d"]]


def test_each_row_has_as_many_answers_as_it_asked_for(tmp_path):
    several = [Completion([[5], [6, 7], [8]], ["a", "b", "c"], "length", 4)]
    several[0].finish_reasons = ["stop", "length", "stop"]
    table = answered_by([*several, Completion([[5, 6]], ["d"], "stop", 3)])
    extras = ["finish_reason", "prompt_tokens", "output_tokens"]
    made = piece(tmp_path, one(tmp_path, table, answers=2, extras=extras)).to_pylist()
    assert [row["response"] for row in made] == [["a", "b", "c"], ["d"]]
    assert [row["finish_reason"] for row in made] == [["stop", "length", "stop"], ["stop"]]
    assert [row["output_tokens"] for row in made] == [[1, 2, 1], [2]]
    assert [row["prompt_tokens"] for row in made] == [4, 3]


def answered_by(completions: list[Completion]) -> pa.Table:
    """The block of rows that the engine answered so."""
    table = block(Unit(0, 0, len(completions))).drop_columns(ANSWERED)
    table = table.append_column(TOKENS, pa.array([[1]] * len(completions)))
    table = table.append_column(PARAMS, pa.array([None] * len(completions), pa.string()))
    return timed(
        answered(table, [(i, [i], c) for i, c in enumerate(completions)], 0.0), "engine", 0.0
    )


@pytest.mark.parametrize("post", [None, "helpers.functions:shout"])
def test_columns_about_the_answers_are_written_on_request(tmp_path, post):
    table = cut(3, {1})
    merged = table.column_names.index(MERGED)
    table = table.set_column(merged, MERGED, pa.array([False, False, True]))
    extras = ["output_tokens", "finish_reason", "prompt_tokens"]
    receipt = one(tmp_path, table, extras=extras, columns=["id"], postprocess=post)
    made = piece(tmp_path, receipt)
    assert made.column_names[-3:] == extras
    assert made["finish_reason"].to_pylist() == ["stop", "length", "stop"]
    assert made["prompt_tokens"].to_pylist() == [3, 3, 3] and receipt.stats.prompt_tokens == 6
    assert made["output_tokens"].to_pylist() == [1, 1, 1] and receipt.stats.output_tokens == 2


def cut(rows: int, at: Any, formed: Any = None) -> pa.Table:
    """A block whose answers at these positions ended at max_tokens; `formed` had to have a form."""
    table = block(Unit(0, 0, rows))
    reasons = pa.array(["length" if i in at else "stop" for i in range(rows)])
    table = table.set_column(table.column_names.index(FINISH), FINISH, reasons)
    if formed is not None:
        table = table.append_column(FORMED, pa.array([i in formed for i in range(rows)]))
    return table


@pytest.mark.parametrize("way", ["auto", "keep"])
def test_a_cut_off_answer_is_kept_unless_the_job_says_otherwise(tmp_path, way):
    receipt = one(tmp_path, cut(4, {1, 2}, formed={0, 2}), on_cut_off=way)
    assert receipt.good.ranges == ((0, 4),)
    assert (receipt.stats.cut_off, receipt.stats.cut_off_structured) == (2, 1)
    assert one(tmp_path, cut(4, {1})).stats.cut_off_structured is None


@pytest.mark.parametrize("post", [None, "helpers.functions:skip_odd"])
def test_a_job_may_fail_cut_off_answers_and_keeps_their_text(tmp_path, post):
    receipt = one(tmp_path, cut(4, {1, 2}), on_cut_off="fail", postprocess=post)
    assert receipt.failed.ranges == ((1, 3),)
    found = reasons(tmp_path, receipt)
    for i in (1, 2):
        stage, kind, message = found[i]
        assert (stage, kind) == ("engine", "AnswerCutOff")
        assert "sampling.max_tokens" in message and "output.on_cut_off: keep" in message
        assert message.endswith(f"Answer after 1 token: answer {i}")
    assert list(receipt.failures.values()) == [2]  # one cause, whatever the texts are


def test_of_several_answers_all_are_kept_where_one_is_cut_off(tmp_path):
    texts = pa.array([["a", "b"], ["c", "d"]], pa.list_(pa.string()))
    table = cut(2, {1})
    table = table.set_column(table.column_names.index(TEXTS), TEXTS, texts)
    receipt = one(tmp_path, table, answers=2, on_cut_off="fail")
    assert reasons(tmp_path, receipt)[1][2].endswith('token: ["c", "d"]')


def test_nulls_and_values_of_the_columns_that_the_prompt_uses_are_counted(tmp_path):
    rows = pa.table(
        {
            "Company": pa.array([f"c{i}" for i in range(100)]),
            "Country": pa.array(["DE"] * 60 + ["FR"] * 30 + [None] * 10),
            "Size": pa.array([1.0] * 50 + [None] * 50),  # whole numbers, as pandas writes them
            "Score": pa.array([0.5] * 100),
            "Tags": pa.array([["a"]] * 100),
            "Other": pa.array(["x"] * 100),
        }
    )
    table = block(Unit(0, 0, 100), failed=[0], rows=rows)
    names = ("Company", "Country", "Size", "Score", "Tags")
    made = stage(tmp_path)
    made = replace(made, spec=replace(made.spec, inputs=names))
    (receipt,) = receipts(made(table))
    counts = {n: v for n, v in receipt.stats.others.items() if n.startswith("inputs.")}
    assert null_counts(counts) == {
        "Company": {"null": 0, "filled": 100},
        "Country": {"null": 10, "filled": 90},
        "Size": {"null": 50, "filled": 50},
        "Score": {"null": 0, "filled": 100},
        "Tags": {"null": 0, "filled": 100},
    }
    # A hundred names of companies are no few values.
    values = values_by_column(counts)
    assert {name: sorted(rows.values()) for name, rows in values.items()} == {
        "Country": [30, 60],
        "Size": [50],
    }
    # By digests: a commit holds no text of a row.
    assert not [name for name in counts if "DE" in name or "FR" in name]


# --- postprocess --------------------------------------------------------------------------------


def test_what_postprocess_returns_takes_the_answers_place(tmp_path):
    table = block(Unit(0, 0, 3), failed=[1])
    made = piece(tmp_path, one(tmp_path, table, postprocess="helpers.functions:shout", columns=[]))
    assert made.to_pylist() == [
        {"__rb_pos": 0, "loud": "ANSWER 0", "length": 8},
        {"__rb_pos": 2, "loud": "ANSWER 2", "length": 8},
    ]


def test_none_leaves_a_row_out(tmp_path):
    receipt = one(tmp_path, block(Unit(0, 5, 4)), postprocess="helpers.functions:skip_odd")
    assert receipt.good.ranges == ((5, 6), (7, 8)) and receipt.skipped.ranges == ((6, 7), (8, 9))
    assert piece(tmp_path, receipt)["even"].to_pylist() == [0, 2]
    only = block(Unit(1, 0, 1), start=1)
    receipt = one(tmp_path, only, postprocess="helpers.functions:skip_odd")
    assert receipt.pieces == () and receipt.held.ranges == ((0, 1),)


@pytest.mark.parametrize("schema", ["declared", "of a good shard", "of this shard"])
def test_each_row_that_postprocess_spoils_fails_alone(tmp_path, schema):
    output: dict[str, Any] = {"postprocess": "helpers.functions:by_id"}
    if schema == "declared":
        output["schema"] = {"value": "int64"}
    elif schema == "of a good shard":  # the run's first
        one(tmp_path, block(Unit(9, 0, 2), start=20), **output)
    receipt = one(tmp_path, block(Unit(0, 0, 12)), **output)
    assert receipt.skipped.ranges == ((7, 8),)
    assert receipt.good.ranges == ((0, 1), (9, 12))
    assert piece(tmp_path, receipt)["value"].to_pylist() == [0, 9, 10, 11]
    found = reasons(tmp_path, receipt)
    assert sorted(found) == [1, 2, 3, 4, 5, 6, 8]
    assert {stage for stage, _, _ in found.values()} == {"postprocess"}
    assert found[1][1:] == ("KeyError", "'gone'")
    assert found[2][1] == "TypeError" and "not str" in found[2][2]
    assert (
        found[3][1] == "SchemaError"
        and "column value has type int64, but the value is str" in found[3][2]
    )
    assert found[4][1] == "SchemaError" and "more" in found[4][2]
    assert found[5][1] == "SchemaError" and "value" in found[5][2]
    assert found[6][1] in ("SchemaError", "TypeError")
    assert found[8][1] == "SchemaError" and "int64" in found[8][2]


def test_the_first_shard_fixes_the_schema_and_the_second_adopts_it(tmp_path):
    output = {"postprocess": "helpers.functions:changes_type"}
    first = one(tmp_path, block(Unit(0, 0, 5)), **output)
    second = one(tmp_path, block(Unit(1, 0, 5), start=8), **output)
    assert piece(tmp_path, first).schema.equals(piece(tmp_path, second).schema)
    assert second.good.ranges == ((0, 2),)
    assert {r[1] for r in reasons(tmp_path, second).values()} == {"SchemaError"}


def test_postprocess_may_return_the_same_dict_for_every_row(tmp_path):
    output: dict[str, Any] = {"postprocess": "helpers.functions:reuses_dict", "columns": []}
    receipt = one(tmp_path, block(Unit(0, 0, 3)), **output)
    assert piece(tmp_path, receipt)["id"].to_pylist() == [0, 1, 2]


def test_values_that_postprocess_changes_later_stay_as_they_were(tmp_path):
    output: dict[str, Any] = {"postprocess": "helpers.functions:reuses_result", "columns": []}
    receipt = one(tmp_path, block(Unit(0, 0, 3)), **output)
    assert piece(tmp_path, receipt).drop_columns(["__rb_pos"]).to_pylist() == [
        {
            "id": i,
            "tags": [f"answer {i}"],
            "deep": {"list": [{"at": i}]},
            "raw": b"%d" % i,
            "vector": [i, i],
        }
        for i in range(3)
    ]


def test_a_column_of_nulls_is_text(tmp_path):
    receipt = one(tmp_path, block(Unit(0, 0, 2)), postprocess="helpers.functions:nulls")
    assert piece(tmp_path, receipt).schema.field("value").type == pa.string()


@pytest.mark.parametrize(
    ("kind", "arrow"),
    [("string", pa.string()), ("float", pa.float32()), ("list<int64>", pa.list_(pa.int64()))],
)
def test_declared_types(kind, arrow):
    assert declared_schema({"a": kind}).field("a").type == arrow


@pytest.mark.parametrize("kind", ["strng", "list<x>", "list<string", ""])
def test_an_unknown_declared_type_is_a_value_error(kind):
    with pytest.raises(ValueError):
        declared_schema({"a": kind})


def test_columns_that_exist_already_cannot_be_returned(tmp_path):
    """`return {**row, ...}` is the likeliest mistake: two columns of a name are unreadable."""
    receipt = one(tmp_path, block(Unit(0, 0, 2)), postprocess="helpers.functions:whole_row")
    assert receipt.good.ranges == () and receipt.failed.ranges == ((0, 2),)
    stage, kind, message = reasons(tmp_path, receipt)[0]
    assert (stage, kind) == ("postprocess", "SchemaError")
    assert "column id is already in the result" in message and "output.columns" in message
    receipt = one(
        tmp_path, block(Unit(1, 0, 2)), postprocess="helpers.functions:whole_row", columns=[]
    )
    assert receipt.good.ranges == ((0, 2),)


@pytest.mark.parametrize("name", ["raises_surrogate_after", "raises_unprintable"])
def test_an_error_whose_text_cannot_be_kept_fails_only_its_row(tmp_path, name):
    receipt = one(tmp_path, block(Unit(0, 0, 2)), postprocess=f"helpers.functions:{name}")
    assert receipt.failed.ranges == ((0, 2),)


def test_a_cell_that_is_not_utf8_fails_its_row_in_postprocess(tmp_path):
    raw = pa.array([b"good", b"\xff"], pa.binary()).view(pa.string())
    rows = pa.table({"id": [0, 2], "Company": raw})
    table = block(Unit(0, 0, 2), rows=rows)
    receipt = one(tmp_path, table, postprocess="helpers.functions:skip_odd")
    assert receipt.good.ranges == ((0, 1),) and receipt.failed.ranges == ((1, 2),)


def test_a_time_in_an_unknown_zone_fails_its_row_in_postprocess(tmp_path):
    times = pa.array([0], pa.timestamp("us", "Mars/Phobos"))
    table = block(Unit(0, 0, 1), rows=pa.table({"id": [0], "Company": times}))
    receipt = one(tmp_path, table, postprocess="helpers.functions:skip_odd")
    (message,) = piece(tmp_path, receipt, "quarantine")["message"].to_pylist()
    assert "unknown time zone 'Mars/Phobos'" in message


# --- what is lost -------------------------------------------------------------------------------


@pytest.mark.parametrize("fatal", [True, False])
def test_a_lost_block_becomes_receipts_that_hold_nothing(tmp_path, fatal):
    units = [Unit(3, 0, 5), Unit(4, 2, 2)]
    why = Loss("EngineDied", "why", fatal)
    table = pa.concat_tables([lost_block(unit, why) for unit in units])
    made = receipts(stage(tmp_path)(table))
    assert made == [Receipt.of_lost(unit, "attempt", why) for unit in units]
    assert [receipt.unit for receipt in made] == units


@pytest.mark.parametrize(
    ("error", "fatal"),
    [
        (StoreUnavailable("no answer"), False),
        (StoreError("permission denied"), True),
        (OSError("busy"), False),
    ],
)
def test_a_store_that_fails_loses_the_shard_and_raises_nothing(tmp_path, error, fatal):
    finish = stage(tmp_path)

    def put(path: str, data: bytes) -> None:
        raise error

    finish.store.put = put  # type: ignore[method-assign]
    (receipt,) = receipts(finish(block(Unit(2, 4, 3))))
    assert (receipt.unit, receipt.held) == (Unit(2, 4, 3), Positions())
    assert receipt.lost == Loss(type(error).__name__, str(error), fatal)


def test_a_postprocess_that_is_not_there_stops_the_run(tmp_path):
    (receipt,) = receipts(stage(tmp_path, postprocess="helpers.gone:f")(block(Unit(0, 0, 1))))
    assert receipt.lost is not None and receipt.lost.fatal
    assert str(receipt.lost).startswith("ConfigError: output.postprocess")


def test_a_row_that_killed_its_engine_is_quarantined_with_its_input(tmp_path):
    rows = tag(input_rows(30, 1), Unit(3, 7, 1))
    finish = stage(tmp_path)
    receipt = finish.failed(Unit(3, 7, 1), rows, Failure("engine", "EngineDied", "signal 9"), 2)
    assert receipt.failed.ranges == ((7, 8),) and receipt.good.ranges == ()
    (row,) = piece(tmp_path, receipt, "quarantine").to_pylist()
    assert (row["error"], row["attempts"], row["input"]["id"]) == ("EngineDied", 2, 30)
    assert Receipt.from_json(receipt.to_json()) == receipt


def test_receipts_are_canonical_json(tmp_path):
    table = stage(tmp_path)(block(Unit(0, 0, 3), failed=[0]))
    text = table["receipt"][0].as_py()
    assert json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")) == text


def test_an_empty_block_gives_no_receipt(tmp_path):
    empty = tag(input_rows(0, 0), Unit(0, 0, 0))
    assert receipts(stage(tmp_path)(empty)) == []
    assert pa.types.is_struct(ERROR_TYPE)
