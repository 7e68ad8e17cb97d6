"""What reuse does with a row, by what became of it the night before: the table in the docs, tried
row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers import engines
from helpers.nights import Nights, words

from prefect_raybatch.api import plan_run
from prefect_raybatch.api.retry import Retry, plan_retry
from prefect_raybatch.ledger.increments import read_answers
from prefect_raybatch.runs.repair import repair_run
from prefect_raybatch.storage import open_store

PAGE = Path(__file__).parents[2] / "docs/how-to/reuse-answers.md"
HEADING = "## What becomes of a row"
TAKES, ASKED = "takes its answer", "is asked again"


def documented() -> dict[str, str]:
    """Return the table in the docs: what became of a row, and what the next night does."""
    section = PAGE.read_text().partition(f"{HEADING}\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:2] == "| "]
    return {row: does for row, does in rows[2:]}


@dataclass
class Table:
    """A night with the rows `good` and `row`, the second of which a scenario is about."""

    nights: Nights
    said: str = "fine"  # the engine's answer about `row`

    def job(self, **groups: Any) -> Any:
        output = {"uri": str(self.nights.folder / "out"), "columns": ["text"]}
        output |= {"postprocess": "helpers.functions:judged", **groups.pop("output", {})}
        return self.nights.job(output=output, **groups)

    def night(self, key: str, text: str | None = "row", **groups: Any) -> None:
        self.nights.write("good", text)
        self.nights.answer = lambda prompt: self.said if words(prompt) == "row" else "fine"
        self.nights.night(key, self.job(**groups))

    def retry(self, said: str) -> None:
        self.said = said
        retry = plan_retry(str(self.nights.folder / "out" / "n1"))
        assert isinstance(retry, Retry)
        self.nights.drive(retry.job, retry.run)

    def failed_of(self, key: str) -> list[str]:
        return [row["error"] for row in self.nights.quarantined(key)]


def good(table: Table) -> None:
    table.night("n1")


def failed_in_prepare(table: Table) -> None:
    table.night("n1", text=None)
    assert len(table.failed_of("n1")) == 1


def failed_in_the_engine(table: Table) -> None:
    table.nights.refuses = lambda prompt: words(prompt) == "row"
    table.night("n1")
    assert table.failed_of("n1") == ["ValueError"]
    table.nights.refuses = lambda prompt: False


def failed_in_postprocess(table: Table) -> None:
    table.said = "no label"
    table.night("n1")
    assert table.failed_of("n1") == ["ValueError"]
    table.said = "fine"


def failed_by_its_columns(table: Table) -> None:
    table.said = "other columns"
    table.night("n1", output={"schema": {"label": "string"}})
    assert table.failed_of("n1") == ["SchemaError"]
    table.said = "fine"


def left_out(table: Table) -> None:
    table.said = "left out"
    table.night("n1")
    assert table.failed_of("n1") == [] and len(table.nights.result("n1")) == 1


def retried_with_success(table: Table) -> None:
    failed_in_postprocess(table)
    table.retry("fine")
    assert len(table.nights.result("n1.r1")) == 1


def retried_with_failure(table: Table) -> None:
    failed_in_postprocess(table)
    table.retry("no label")
    assert table.failed_of("n1.r1") == ["ValueError"]
    table.said = "fine"


def repaired(table: Table) -> None:
    table.night("n1")
    (part,) = (table.nights.folder / "out/n1/data").glob("*.parquet")
    part.unlink()
    assert repair_run(str(table.nights.folder / "out" / "n1")).run_key == "n1.m1"
    job = table.job()
    table.nights.drive(job, plan_run(job, "n1"))
    assert len(table.nights.result("n1.m1")) == 2


def failed_and_repaired(table: Table) -> None:
    table.said = "no label"
    repaired_with = table.nights.folder / "out" / "n1"
    table.night("n1")
    (repaired_with / "data" / "part-00000.parquet").unlink()
    repair_run(str(repaired_with))
    job = table.job()
    table.nights.drive(job, plan_run(job, "n1"))
    assert table.failed_of("n1.m1") == ["ValueError"]
    table.said = "fine"


def damaged(table: Table) -> None:
    table.night("n1")
    (part,) = (table.nights.folder / "out/n1/_raybatch/asks/data").glob("*.parquet")
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)


SCENARIOS: dict[str, Callable[[Table], None]] = {
    "came out good": good,
    "failed before it made a request (a null, a prompt too long)": failed_in_prepare,
    "failed in the engine": failed_in_the_engine,
    "failed in postprocess": failed_in_postprocess,
    "failed because postprocess returned other columns": failed_by_its_columns,
    "was left out by postprocess": left_out,
    "failed, and a retry brought a good answer": retried_with_success,
    "failed, and failed again in each retry": retried_with_failure,
    "came out good in a run that was repaired": repaired,
    "failed in a run that was repaired": failed_and_repaired,
    "came out good, but its stored answer is damaged": damaged,
}
TYPED = ("failed the check of a typed answer", "failed because its answer was cut off")


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(Nights(tmp_path))


def test_each_row_of_the_table_is_tried() -> None:
    assert set(documented()) == {*SCENARIOS, *TYPED}
    assert set(documented().values()) == {TAKES, ASKED}


@pytest.mark.parametrize("state", SCENARIOS)
def test_the_next_night(table: Table, state: str) -> None:
    SCENARIOS[state](table)
    table.nights.asked.clear()
    table.night("n2", output={"schema": {"label": "string"}} if "columns" in state else {})
    about_the_row = "row" in map(words, table.nights.asked)
    assert (ASKED if about_the_row else TAKES) == documented()[state]
    expected = 1 if "left out" in state else 2
    assert len(table.nights.result("n2")) == expected and not table.failed_of("n2")


def test_a_typed_answer_that_does_not_fit(table: Table) -> None:
    schema = {"type": "object", "properties": {"label": {"enum": ["a", "b"]}}}
    schema |= {"required": ["label"], "additionalProperties": False}
    output = {"postprocess": None, "schema_model": schema}
    table.said = '{"label": "c"}'
    table.nights.answer = lambda prompt: '{"label": "c"}' if words(prompt) == "row" else GOOD
    table.nights.write("good", "row")
    table.nights.night("n1", table.job(output=output))
    assert table.failed_of("n1") == ["AnswerNotValid"]
    table.nights.asked.clear()
    table.nights.answer = lambda prompt: GOOD
    table.nights.night("n2", table.job(output=output))
    assert list(map(words, table.nights.asked)) == ["row"]
    assert documented()[TYPED[0]] == ASKED and not table.failed_of("n2")


def test_an_answer_that_is_cut_off(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    def completion(text: str) -> Any:
        return whole(text, "length" if text == "cut" else "stop")

    whole = engines.completion
    monkeypatch.setattr(engines, "completion", completion)
    output = {"postprocess": None, "on_cut_off": "fail"}
    table.said = "cut"
    table.night("n1", output=output)
    assert table.failed_of("n1") == ["AnswerCutOff"]
    table.nights.asked.clear()
    table.said = "whole"
    table.night("n2", output=output)
    assert list(map(words, table.nights.asked)) == ["row"]
    assert documented()[TYPED[1]] == ASKED and not table.failed_of("n2")


GOOD = '{"label": "a"}'


def test_rows_that_share_an_answer_keep_it_while_one_of_them_is_good(table: Table) -> None:
    """A failure that is due to the row's other columns brings no ask: a greedy answer to the same
    request would be the same."""
    job = table.nights.job(
        output={
            "uri": str(table.nights.folder / "out"),
            "columns": ["text"],
            "postprocess": "helpers.functions:fails_by_flag",
        }
    )
    table.nights.write("a", "a", "b", flag=[False, True, True])
    table.nights.night("n1", job)
    assert len(table.failed_of("n1")) == 2
    found = read_answers(open_store(str(table.nights.folder / "out" / "n1")))
    assert found is not None and sum(map(len, found.rejected.values())) == 1
    table.nights.asked.clear()
    table.nights.write("a", "a", "b", "c", flag=[False] * 4)
    table.nights.night("n2", job)
    assert sorted(map(words, table.nights.asked)) == ["b", "c"] and not table.failed_of("n2")


def test_a_sampled_answer_that_failed_is_not_another_rows_answer(table: Table) -> None:
    table.nights.write("a", "a", "a")
    replies = iter(["fine", "no label", "fine"])
    table.nights.answer = lambda prompt: next(replies)
    hot = {"temperature": 0.9, "max_tokens": 4}
    table.nights.night("n1", table.job(sampling=hot))
    assert table.failed_of("n1") == ["ValueError"]
    table.nights.asked.clear()
    table.nights.answer = lambda prompt: "asked again"
    table.nights.night("n2", table.job(sampling=hot))
    assert len(table.nights.asked) == 1
    assert sorted(row["label"] for row in table.nights.result("n2")) == [
        "asked again",
        "fine",
        "fine",
    ]


def test_an_answer_that_was_taken_over_and_fails_is_asked_again(table: Table) -> None:
    """In the second night the row has another column, with which its old answer fails."""
    job = table.nights.job(
        output={
            "uri": str(table.nights.folder / "out"),
            "columns": ["text"],
            "postprocess": "helpers.functions:fails_by_flag",
        }
    )
    for key, flag, asks in (("n1", False, 3), ("n2", True, 0), ("n3", False, 1)):
        table.nights.asked.clear()
        table.nights.write("a", "b", "c", flag=[False, flag, False])
        table.nights.night(key, job)
        assert len(table.failed_of(key)) == flag and len(table.nights.asked) == asks
