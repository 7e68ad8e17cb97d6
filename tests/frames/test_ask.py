"""Questions about the rows of a DataFrame, through the stages of a run with a stand-in engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pandas
import polars
import pyarrow as pa
import pytest
from helpers.engines import FakeEngine, NoEngine, VectorEngine, with_answers
from pydantic import BaseModel
from s3server import S3Server

from prefect_raybatch import (
    RowsFailed,
    ask,
    ask_async,
    ask_run,
    embed,
    end_engines,
    open_run,
    warm_engines,
)
from prefect_raybatch.cluster.connect import CLUSTER_SESSION
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.stages.block import Failure
from prefect_raybatch.stages.columns import ERROR, TOKENS

pytestmark = pytest.mark.usefixtures("without_ray")


class SumEngine(FakeEngine):
    """Answers with the sum of the prompt's tokens, refuses an even one, and counts the asks."""

    asked = 0
    refuses = False

    def numbers(self, table: pa.Table) -> list[int]:
        type(self).asked += table.num_rows - sum(table[ERROR].is_valid().to_pylist())
        return [sum(tokens or ()) for tokens in table[TOKENS].to_pylist()]

    def refused(self, number: int) -> bool:
        return self.refuses and number % 2 == 0

    def text(self, number: int) -> str:
        return str(number)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[SumEngine]:
    monkeypatch.setattr(SumEngine, "asked", 0)
    return SumEngine


@pytest.fixture
def options(engine: type[SumEngine], tmp_path: Path) -> dict[str, Any]:
    return {"model": "demo", "cache": tmp_path, "engine": engine, "progress": False}


NAMES = ["Smith Law", "Acme Health", "Smith Law", "Byte Tech"]
QUESTION = "What industry is this company in: {Company}"


def test_a_dataframe_gets_a_column_in_its_own_order(
    options: dict[str, Any], engine: type[SumEngine]
) -> None:
    given = pandas.DataFrame({"Company": NAMES, "x": [object()] * 4}, index=list("dbca"))
    found = ask(given, QUESTION, **options)
    assert list(found.index) == list("dbca") and list(found.columns) == ["Company", "x", "answer"]
    first, second, third, fourth = found["answer"]
    assert first == third and len({first, second, fourth}) == 3
    assert engine.asked == 3  # equal rows are asked once


def test_the_same_call_takes_the_stored_answers(options: dict[str, Any]) -> None:
    first = ask_run(polars.DataFrame({"Company": NAMES}), QUESTION, **options)
    options["engine"] = NoEngine
    again = ask_run([{"Company": name, "other": 1} for name in NAMES], QUESTION, **options)
    assert again.run == first.run and again.report == first.report
    assert [row["answer"] for row in again.data] == first.data["answer"].to_list()
    page = vars(type(again))["_repr_html_"](again)  # as notebooks call it
    assert "All 4 rows are accounted for" in page and open_run(again.run).state == "completed"
    with pytest.raises(AssertionError, match="an engine was started"):
        ask(polars.DataFrame({"Company": NAMES}), QUESTION + "?", **options)


def test_changed_data_asks_only_new_requests(
    options: dict[str, Any], engine: type[SumEngine]
) -> None:
    first = ask(["Smith", "Acme"], "Industry: {text}", **options)
    ask(["Byte"], "Industry: {text}", **options)
    assert engine.asked == 3
    found = ask(["Zoo", "Byte", "Acme", "Smith"], "Industry: {text}", **options)
    assert engine.asked == 4
    assert [row["answer"] for row in found[:1:-1]] == [row["answer"] for row in first]
    options["engine"] = NoEngine
    assert ask(["Acme", "Zoo"], "Industry: {text}", **options)[1]["answer"] == found[0]["answer"]
    ask(["Acme"], "Industry: {text}", column="other", **options)
    with pytest.raises(AssertionError, match="an engine was started"):
        ask(["Acme"], "Industry: {text}", max_tokens=7, **options)


def test_the_same_call_asks_rows_again_that_failed_in_the_engine(
    options: dict[str, Any], engine: type[SumEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["Smith", "Acme", "Byte", "Law", "Zoo", None]
    monkeypatch.setattr(engine, "refuses", True)
    first = ask_run(texts, "Industry: {text}", **options)
    refused = sum(row["error"] == "ValueError: refused" for row in first.data)
    assert refused and engine.asked == 5
    monkeypatch.setattr(engine, "refuses", False)
    second = ask_run(texts, "Industry: {text}", **options)
    assert engine.asked == 5 + refused and second.run != first.run
    assert [row["error"] is not None for row in second.data] == [False] * 5 + [True]
    options["engine"] = NoEngine  # a null is no request, so it is not asked again
    assert ask_run(texts, "Industry: {text}", **options).run == second.run


def test_progress_is_off_without_a_terminal_unless_wanted(
    options: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    del options["progress"]
    ask(["a"], "{text}", **options)
    assert "rows" not in capfd.readouterr().err
    ask(["b"], "{text}", progress=True, **options)
    assert "2 of 2 steps" in capfd.readouterr().err


def test_an_engine_ends_with_the_block_of_warm_engines(options: dict[str, Any]) -> None:
    end_engines()
    with warm_engines():
        ask(["a"], "{text}", **options)
        assert CLUSTER_SESSION.warm.is_keeping
    assert not CLUSTER_SESSION.warm.is_keeping
    ask(["b"], "{text}", **options)
    assert CLUSTER_SESSION.warm.is_keeping
    end_engines()
    assert not CLUSTER_SESSION.warm.is_keeping


def test_texts_in_an_event_loop(options: dict[str, Any]) -> None:
    found = asyncio.run(
        ask_async(["Smith Law", "Byte"], "Industry: {text}", column="is", **options)
    )
    assert [row["text"] for row in found] == ["Smith Law", "Byte"]
    assert len({row["is"] for row in found}) == 2


def test_failed_rows_have_the_reason(
    options: dict[str, Any], engine: type[SumEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "refuses", True)
    given = pa.table({"Company": ["Smith", None, "Byte", "Zoo", "Law", "Alpha", "Beta", "Gamma"]})
    found = ask(given, QUESTION, **options).to_pylist()
    assert found[1]["answer"] is None and "null" in found[1]["error"]
    refused = [row for row in found if row["error"] == "ValueError: refused"]
    assert refused and all(row["answer"] is None for row in refused)
    assert all((row["answer"] is None) == (row["error"] is not None) for row in found)
    options["errors"] = "raise"
    failed = len(refused) + 1
    with pytest.raises(RowsFailed, match=rf"{failed} of 8 rows have no answer. Row \d: .*Run: "):
        ask(given, QUESTION, **options)


class Company(BaseModel):
    staff: int
    city: str | None = None


FAULTS = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}


def test_an_answer_column_may_have_the_name_of_the_reasons_if_failed_rows_raise(
    options: dict[str, Any], engine: type[SumEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    options |= {"column": "error", "errors": "raise"}
    found = ask(["Smith", "Acme"], "{text}", **options)
    assert all(row["error"].isdecimal() for row in found)
    monkeypatch.setattr(engine, "refuses", True)
    with pytest.raises(RowsFailed, match=r"have no answer. Row \d: ValueError: refused"):
        ask(["Smith", "Byte", "Zoo", "Law"], "{text}", max_tokens=7, **options)


class JsonEngine(SumEngine):
    def text(self, number: int) -> str:
        return f'{{"staff": {number}, "city": null}}'


class CutOffEngine(FakeEngine):
    def __call__(self, table: pa.Table) -> pa.Table:
        cut = Failure("engine", "AnswerCutOff", "it is long").to_dict()
        return with_answers(table, [cut] * table.num_rows, [""] * table.num_rows)


def test_an_answer_that_is_always_cut_off_is_not_asked_for_again(options: dict[str, Any]) -> None:
    options["engine"] = CutOffEngine
    hot = {**options, "temperature": 0.5}
    first, sampled = ask_run(["a"], "{text}", **options), ask_run(["a"], "{text}", **hot)
    assert "AnswerCutOff" in first.data[0]["error"]
    assert ask_run(["a"], "{text}", **hot).run != sampled.run
    options["engine"] = NoEngine
    assert ask_run(["a"], "{text}", **options).run == first.run


class YesEngine(SumEngine):
    def text(self, number: int) -> str:
        return "yes"


@pytest.mark.parametrize("familiar", ["labels", "response_model", "return_format"])
def test_names_of_other_libraries(familiar: Any, options: dict[str, Any]) -> None:
    ours: Any = "choice" if familiar == "labels" else "schema"
    value = ["yes", "no"] if familiar == "labels" else Company
    options["engine"] = YesEngine if familiar == "labels" else JsonEngine
    first = ask_run(["a"], "{text}", **{ours: value}, **options)
    assert first.report is not None and not first.report.failed
    assert ask_run(["a"], "{text}", **{familiar: value}, **options).run == first.run
    with pytest.raises(ConfigError, match=f"{familiar} and {ours} are the same option"):
        ask(["a"], "{text}", **{familiar: value, ours: value}, **options)
    with pytest.raises(TypeError, match=rf"embed\(\) got .* '{familiar}'. .* use ask"):
        embed(["a"], "{text}", **{familiar: value}, **options)


def test_a_schema_makes_typed_columns(options: dict[str, Any]) -> None:
    options["engine"] = JsonEngine
    found = ask(pa.table({"Company": NAMES}), QUESTION, schema=Company, **options)
    assert found.schema.field("staff").type == pa.int64() and found["city"].null_count == 4
    empty = ask(found.slice(0, 0).select(["Company"]), QUESTION, schema=Company, **options)
    assert empty.column_names == ["Company", "staff", "city"]
    assert empty.schema.field("staff").type == pa.int64()


def test_vectors(options: dict[str, Any]) -> None:
    options["engine"] = VectorEngine
    settings = {"engine.convert": "embed"}
    found = embed(pa.table({"Company": NAMES}), "{Company}", settings=settings, **options)
    assert found.column_names == ["Company", "vector"] and found["vector"].null_count == 0


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (
            {"answer": ["a"], "Company": ["b"]},
            {},
            r"has a column 'answer'.*column= names the answer",
        ),
        ({"error": ["a"], "Company": ["b"]}, {}, r"has a column 'error'.*errors=\"raise\""),
        ({"Company": ["a"]}, {"column": "error"}, r"the name 'error'.*errors=\"raise\""),
        ({"Company": ["a"]}, {"schema": FAULTS}, r"the name 'error'.*a property of the schema"),
        ({"Firm": ["a"]}, {}, r"no column 'Company'. Its columns: Firm"),
        ({"Company": ["a"]}, {"errors": "ignore"}, r"errors is 'ignore'"),
        ({"Company": ["a"]}, {"schema": 3}, r"schema is 3. Give a pydantic class"),
        ({"Company": ["a"]}, {"settings": {"prompt.sytem": "x"}}, r"the job of ask\(\).*sytem"),
        ({"Company": ["a"]}, {"temperature": -1}, r"temperature"),
        ({"Company": ["a"]}, {"choice": "Law"}, r"choice is the text 'Law'. Give a list"),
        ({"Company": ["a"]}, {"choice": ["a"], "schema": {}}, r"choice and schema exclude"),
        ({"Company": ["a"]}, {"keep_seconds": -1}, r"keep_seconds is -1. Give a number"),
        ({"Company": ["a"]}, {"max_tokens": 0}, r"max_tokens"),
        ({"Company": ["a"]}, {"settings": {"prompt.template": "x"}}, r"'x' names no column"),
    ],
)
def test_wrong_calls_start_no_engine(
    given: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){message}"):
        ask(
            pa.table(given), QUESTION,
            **{"model": "demo", "cache": tmp_path, "engine": NoEngine, **options},
        )  # fmt: skip


def test_an_unknown_option_is_a_type_error_with_the_nearest_name(tmp_path: Path) -> None:
    wrong: dict[str, Any] = {"choices": ["a"]}
    with pytest.raises(TypeError, match=r"ask\(\) got .* 'choices'. Did you mean 'choice'\?"):
        ask(["a"], "{text}", model="demo", engine=NoEngine, cache=tmp_path, **wrong)


def test_data_of_which_all_rows_fail_has_the_columns(options: dict[str, Any]) -> None:
    found = ask([{"Company": None}] * 2, QUESTION, **options)
    assert all(row["answer"] is None and "null" in row["error"] for row in found)
    typed = ask([{"Company": None}], QUESTION, schema=Company, **options)
    assert {"Company", "staff", "city", "error"} == set(typed[0])


def test_a_store_may_be_reached_by_its_options_alone(
    options: dict[str, Any], s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in s3.env:
        monkeypatch.delenv(name, raising=False)
    options["cache"] = "s3://ask/cache"
    options["settings"] = {"source.options": s3.options, "output.options": s3.options}
    found = ask_run(["Smith", "Byte"], "{text}", **options)
    assert all(row["answer"] for row in found.data)
    assert open_run(found.run, s3.options).state == "completed"


def test_a_new_cache_is_private(options: dict[str, Any], tmp_path: Path) -> None:
    options["cache"] = tmp_path / "new"
    ask(["Smith"], "{text}", **options)
    assert options["cache"].stat().st_mode & 0o077 == 0


def test_settings_that_would_replace_a_whole_group_are_refused() -> None:
    with pytest.raises(ConfigError, match=r'settings=\{"prompt\.on_null": \.\.\.\}'):
        ask([{"a": "x"}], "{a}", model="demo", settings={"prompt": {"on_null": "empty"}})
    with pytest.raises(TypeError, match=r"settings="):
        ask([{"a": "x"}], "{a}", model="demo", top_p=0.5)  # type: ignore[call-overload]
