"""Two nights: what was answered is taken over, what is new is asked once, each row comes out."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.nights import Killed, Nights, words

from prefect_raybatch.api import dry_run, plan_run, publish_run
from prefect_raybatch.api.retry import Retry, plan_retry
from prefect_raybatch.cluster import side_by_side
from prefect_raybatch.compile.resolved import resolve
from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.driver.heartbeat import Counts, Heartbeat
from prefect_raybatch.errors import ConfigError, ErrorBudgetExceeded
from prefect_raybatch.ledger.increments import read_answers
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.plan import prefix_order, row_keys
from prefect_raybatch.result.reap import reap
from prefect_raybatch.result.verify import verify
from prefect_raybatch.runs import answers_by_row
from prefect_raybatch.runs.reusable_runs import ReusableRuns
from prefect_raybatch.runs.status import report_of, status
from prefect_raybatch.storage import open_store


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    return Nights(tmp_path)


def answers(nights: Nights, key: str) -> list[tuple[str, str]]:
    found = nights.result(key)
    assert [row["_row"] for row in found] == sorted(row["_row"] for row in found)
    return [(row["text"], row["response"]) for row in found]


def right(*texts: str) -> list[tuple[str, str]]:
    return [(text, f"answer to {text}") for text in texts]


def asked(nights: Nights) -> list[str]:
    """What the engine was asked since the last look."""
    found = sorted(map(words, nights.asked))
    nights.asked.clear()
    return found


def run_dir(nights: Nights, key: str) -> str:
    return str(nights.folder / "out" / key)


def test_moved_edited_deleted_and_doubled_rows_come_out_right(nights: Nights) -> None:
    first = ["a", "b", "c", "d", "e", "f", "g", "b", "a"]
    nights.write(*first)
    report = nights.night("n1")
    assert answers(nights, "n1") == right(*first)
    assert asked(nights) == list("abcdefg")  # b and a once, though they are in several shards
    assert (report.reuse["asked"], report.reuse["merged"], report.reuse["reused"]) == (7, 2, 0)
    # a moved and doubled, b edited, c deleted, z new and doubled
    second = ["g", "z", "a", "b2", "d", "e", "f", "a", "z", "a", "g"]
    nights.write(*second)
    told = dry_run(nights.job(), "n2")
    assert told.reuse is not None
    assert (told.reuse.counts.asked, told.reuse.counts.merged) == (2, 1)
    assert told.reuse.earlier == (run_dir(nights, "n1"),)
    assert not nights.asked and not (nights.folder / "out" / "n2").exists()
    report = nights.night("n2")
    assert answers(nights, "n2") == right(*second)
    assert asked(nights) == ["b2", "z"]
    assert (report.reuse["asked"], report.reuse["merged"], report.reuse["reused"]) == (2, 1, 8)
    assert report.reuse["saved_tokens"] == 9 * 4 and "saved_seconds" in report.reuse
    # The third night takes over what the second had taken over; nothing is asked at all.
    shutil.rmtree(run_dir(nights, "n1"))
    nights.write(*reversed(second))
    nights.night("n3")
    assert answers(nights, "n3") == right(*reversed(second)) and asked(nights) == []
    for key in ("n2", "n3"):
        assert verify(open_store(run_dir(nights, key))).ok
    origins = {part.origin for part in read_answers(open_store(run_dir(nights, "n3"))).files}
    assert origins == {None}  # told row by row


def test_failed_rows_are_asked_again_and_a_failed_ask_fails_all_its_rows(nights: Nights) -> None:
    nights.write("a", "bad", "b", None, "c", "bad")
    nights.refuses = lambda prompt: words(prompt) == "bad"
    nights.night("n1")
    assert answers(nights, "n1") == right("a", "b", "c")
    bad = nights.quarantined("n1")
    assert [(row["_row"], row["error"]) for row in bad] == [
        (1, "ValueError"),
        (3, "ValueError"),
        (5, "ValueError"),
    ]
    assert bad[0]["message"] == "refused" and "null" in bad[1]["message"]
    assert asked(nights) == ["a", "b", "bad", "c"]
    nights.refuses = lambda prompt: False
    nights.night("n2")
    assert asked(nights) == ["bad"]
    assert answers(nights, "n2") == right("a", "bad", "b", "c", "bad")


def test_the_budget_counts_all_rows_that_wait_for_a_failed_ask(nights: Nights) -> None:
    nights.write("a", *["bad"] * 5, "b")
    nights.refuses = lambda prompt: words(prompt) == "bad"
    job = nights.job(limits={"max_failed_rows": 4})
    with pytest.raises(ErrorBudgetExceeded, match="5 of 7 rows failed"):
        nights.night("n1", job)
    nights.night("n1", nights.job(limits={"max_failed_rows": 5}))
    assert len(nights.quarantined("n1")) == 5


def test_progress_is_one_count_of_requests_and_rows(nights: Nights) -> None:
    """It never goes back, and failed rows are those of the run from the first failed request on."""
    nights.write("a", "b", *["bad"] * 3, "c", "d", "e", "a")
    nights.refuses = lambda prompt: words(prompt) == "bad"
    seen: list[Counts] = []
    job = nights.job()
    run = plan_run(job, "n1")

    def observe(progress: Progress) -> None:
        seen.append(Counts.whole(progress))
        assert progress.unit == ("step", "steps")

    done = nights.infer(job, run, observe)
    assert (done.rows, done.done, done.shards) == (9, 9, 3)  # of the run itself
    assert {(c.rows, c.shards) for c in seen} == {(6 + 9, 2 + 3)}
    counts = [(c.done, c.committed, c.failed) for c in seen]
    assert counts == sorted(counts) and counts[0] == (0, 0, 0) and counts[-1] == (15, 5, 3)
    assert (4, 1, 3) in counts  # the request that failed is in the first shard of the asks
    left = [
        Heartbeat.of(replace(c, window_start=c.at - 1), c.at).seconds_left
        for c in seen
        if c.commits
    ]
    assert left[1] == 0.0 == left[-1]  # of the requests, while these are asked
    again: list[int] = []
    nights.infer(job, run, lambda progress: again.append(progress.whole_done))
    assert again in ([], [15])


def test_an_automatic_length_stays_while_prompts_fit(nights: Nights) -> None:
    """Longer ones need another length, under which all is asked anew; then that one stays."""
    job = nights.job(engine={"max_model_len": "auto"})

    def length(key: str) -> int:
        plan = Ledger(open_store(run_dir(nights, key))).load_plan()
        assert plan is not None and plan.context is not None
        return int(plan.context["max_model_len"])

    long, longer = "word " * 60, "word " * 600
    nights.write("a", "b", long)
    nights.night("n1", job)
    asked(nights)
    nights.write("b", "c", "a")
    told = dry_run(job, "n2")
    assert told.tokens is not None and told.tokens.max_model_len == length("n1")
    assert "the reused answers" in told.tokens.why
    assert told.reuse is not None and told.reuse.counts.reused == 2 and not told.reuse.differs
    report = nights.night("n2", job)
    assert asked(nights) == ["c"] and length("n2") == length("n1") and report.good == 3
    nights.write("b", longer)
    told = dry_run(job, "n3")
    assert told.reuse is not None and told.reuse.counts.reused == 0
    assert "engine.max_model_len" in told.reuse.differs[0]
    nights.night("n3", job)
    assert len(asked(nights)) == 2 and length("n3") > length("n2")
    nights.write("b")
    nights.night("n4", job)
    assert asked(nights) == [] and length("n4") == length("n3")


def test_another_postprocess_asks_nothing(nights: Nights) -> None:
    nights.write("a", "b")
    nights.night("n1")
    asked(nights)
    output = {
        "uri": str(nights.folder / "out"),
        "columns": [],
        "postprocess": "helpers.functions:shout",
    }
    nights.night("n2", nights.job(output=output))
    assert asked(nights) == []
    assert len(nights.result("n2")) == 2 and "response" not in nights.result("n2")[0]


def test_another_context_takes_nothing_over_and_the_plan_names_the_field(nights: Nights) -> None:
    nights.write("a")
    nights.night("n1")
    job = nights.job(sampling={"max_tokens": 5})
    told = dry_run(job)
    assert told.reuse is not None and told.reuse.counts.asked == 1
    assert told.reuse.differs == ("sampling.max_tokens: 16 -> 5",)


def test_sampled_rows_have_an_answer_each(nights: Nights) -> None:
    hot = {"temperature": 0.9, "max_tokens": 4}
    nights.write("a", "a", "b")
    nights.night("n1", nights.job(sampling=hot))
    assert asked(nights) == ["a", "a", "b"]
    nights.write("a", "b", "a", "a", "a")
    report = nights.night("n2", nights.job(sampling=hot))
    assert asked(nights) == ["a", "a"] and report.reuse["reused"] == 3
    assert answers(nights, "n2") == right("a", "b", "a", "a", "a")


def test_a_retry_of_failed_rows_gives_its_answers_to_the_next_night(nights: Nights) -> None:
    nights.write("a", "bad", "b", "bad")
    nights.refuses = lambda prompt: words(prompt) == "bad"
    nights.night("n1")
    nights.refuses = lambda prompt: False
    with pytest.raises(ConfigError, match="Retry the failed rows of the run itself"):
        plan_retry(f"{run_dir(nights, 'n1')}/_raybatch/asks")
    retry = plan_retry(run_dir(nights, "n1"))
    assert isinstance(retry, Retry)
    asked(nights)
    nights.drive(retry.job, retry.run)
    assert asked(nights) == ["bad"]
    assert [row["_row"] for row in nights.result("n1.r1")] == [1, 3]
    nights.write("bad", "c", "a")
    nights.night("n2")
    assert asked(nights) == ["c"]
    assert answers(nights, "n2") == right("bad", "c", "a")


@pytest.mark.parametrize("receipts", [0, 2, 4])
def test_a_night_that_is_killed_goes_on_where_it_was(nights: Nights, receipts: int) -> None:
    """In either ledger: three shards of asks come first, then three of the run itself."""
    texts = [*"abcdefghij", "a"]
    nights.write(*texts)
    nights.stop_after = receipts
    with pytest.raises(Killed):
        nights.night("n1")
    before = len(nights.asked)
    said = status(run_dir(nights, "n1"))
    assert said.first_phase is not None and (said.first_phase.state == "completed") == (
        receipts > 3
    )
    nights.stop_after = None
    nights.night("n1")
    assert answers(nights, "n1") == right(*texts)
    assert len(nights.asked) - before <= 4 + 10 - min(before, 10)


def test_a_prompt_that_comes_out_otherwise_fails_its_row(nights: Nights) -> None:
    nights.write("a", "b")
    nights.night("n1", nights.job(prompt={"function": "helpers.functions:at_random"}))
    assert {row["error"] for row in nights.quarantined("n1")} == {"PromptNotDeterministic"}
    assert not nights.asked and not nights.result("n1")


def test_a_named_run_must_be_there_finished_and_keep_answers(nights: Nights) -> None:
    nights.write("a")
    with pytest.raises(ConfigError, match=r"reuse: .*not a run directory"):
        nights.night("n1", nights.job(reuse=run_dir(nights, "n0")))
    plain = nights.job(reuse=None)
    nights.night("plain", plain)
    with pytest.raises(ConfigError, match="kept no answers"):
        nights.night("n1", nights.job(reuse=run_dir(nights, "plain")))
    nights.stop_after = 0
    with pytest.raises(Killed):
        nights.night("half")
    nights.stop_after = None
    with pytest.raises(ConfigError, match="not finished"):
        nights.night("n1", nights.job(reuse=run_dir(nights, "half")))
    nights.night("half")
    asked(nights)
    nights.night("n1", nights.job(reuse=run_dir(nights, "half")))
    assert asked(nights) == []


def test_answers_that_are_kept_no_longer_are_asked_again_and_removed(nights: Nights) -> None:
    nights.write("a", "b")
    output = {"uri": str(nights.folder / "out"), "columns": ["text"]}
    job = nights.job(output={**output, "keep_answers": 1e-9})
    nights.night("n1", job)
    asked(nights)
    nights.night("n2", job)
    assert asked(nights) == ["a", "b"]
    store = open_store(run_dir(nights, "n1"))
    assert reap(store, older_than=-1.0).files["answers"] == 2
    assert read_answers(store) is None
    assert verify(store).ok and answers(nights, "n1") == right("a", "b")


def test_latest_is_the_newest_complete_run_that_is_there_and_keeps_answers(nights: Nights) -> None:
    """Passed over: runs that are gone, not finished, of another job, or that keep nothing."""
    nights.write("a", "b")
    nights.night("n1")
    nights.write("a", "b", "c")
    nights.night("n2")
    nights.write("a", "b", "c", "d")
    nights.night("n3", nights.job(output={"uri": str(nights.folder / "out"), "keep_answers": 1e-9}))
    nights.night("n4", nights.job(reuse=None))
    nights.night("n5", nights.job(name="another"))
    nights.stop_after = 0
    with pytest.raises(Killed):
        nights.night("n6")
    nights.stop_after = None
    asked(nights)

    def latest() -> tuple[str, ...]:
        told = dry_run(nights.job())
        assert told.reuse is not None
        return tuple(Path(run).name for run in told.reuse.earlier)

    assert latest() == ("n2",)
    shutil.rmtree(run_dir(nights, "n2"))
    assert latest() == ("n1",)
    nights.night("n7")
    assert asked(nights) == ["c", "d"]
    shutil.rmtree(run_dir(nights, "n1"))
    assert latest() == ("n7",)  # which holds the answers that it took over
    nights.night("n8")
    assert asked(nights) == [] and answers(nights, "n8") == right("a", "b", "c", "d")
    for key in ("n7", "n8"):
        shutil.rmtree(run_dir(nights, key))
    assert latest() == ()


def test_all_reuses_the_answers_of_each_complete_run(nights: Nights) -> None:
    every = nights.job(reuse="all")
    for key, texts in {"n1": "ab", "n2": "cd", "n3": "ace"}.items():
        nights.write(*texts)
        nights.night(key, every)
    assert asked(nights) == ["a", "b", "c", "d", "e"]
    (path,) = Path(run_dir(nights, "n2"), "_raybatch/asks/data").glob("*.parquet")
    path.write_bytes(b"gone")
    nights.write(*"abcde")
    report = nights.night("n4", every)
    assert asked(nights) == ["c", "d"]  # n3 holds a copy of c, and a copy is not reused
    assert report.reuse["reused"] == 3 and answers(nights, "n4") == right(*"abcde")


def test_all_prefers_the_newest_answer_and_its_figures(nights: Nights) -> None:
    nights.write("a", "b")
    output = {"uri": str(nights.folder / "out"), "columns": ["text"], "keep_answers": 60}
    for key in ("n1", "n2"):
        nights.answer = lambda prompt, key=key: f"{key} to {words(prompt)}"  # type: ignore[misc]
        nights.night(key, nights.job(output=output, reuse=None))
    nights.write("b")
    nights.night("n3", nights.job(reuse="all"))
    assert answers(nights, "n3") == [("b", "n2 to b")]
    store = open_store(run_dir(nights, "n2"))
    found = read_answers(store)
    assert found is not None
    held = tuple((store, replace(found, seconds=seconds)) for seconds in (1.0, 2.0))
    assert ReusableRuns(held=held, every_run=True).seconds == 1.0, "the newest run is first"
    assert ReusableRuns(held=held).seconds == 2.0, "a run's retry follows it"


def test_a_sampled_answer_that_was_copied_is_reused_once(nights: Nights) -> None:
    hot = nights.job(reuse="all", sampling={"temperature": 0.9, "max_tokens": 4})
    nights.write("a")
    nights.night("n1", hot)
    nights.night("n2", hot)
    assert asked(nights) == ["a"]
    nights.write("a", "a")
    assert nights.night("n3", hot).reuse["reused"] == 1 and asked(nights) == ["a"]


def test_a_night_that_reuses_is_published_whole(nights: Nights) -> None:
    out = {"uri": str(nights.folder / "out"), "columns": ["text"]}
    target = {"format": "jsonl", "uri": str(nights.folder / "lake/{run_key}")}
    job = nights.job(output={**out, "publish": [target]})

    def published(key: str) -> list[tuple[str, str]]:
        publish_run(job, run_dir(nights, key))
        (path,) = (nights.folder / "lake" / key).glob("part-*")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return [(row["text"], row["response"]) for row in rows]

    nights.write("a", "b", "a")
    nights.night("n1", job)
    assert published("n1") == right("a", "b", "a")
    nights.write("c", "a", "b")
    assert nights.night("n2", job).reuse["reused"] == 2
    assert published("n2") == right("c", "a", "b")
    assert report_of(run_dir(nights, "n2")).published[0].rows == 3
    assert not (Path(run_dir(nights, "n2")) / "_raybatch/asks/_raybatch/published").exists()


def test_nothing_of_a_whole_run_is_reaped(nights: Nights) -> None:
    nights.write("a", "b")
    nights.night("n1")
    nights.write("a", "c")
    nights.night("n2")
    (nights.folder / "out/n2/_raybatch/reused/x").mkdir()
    (nights.folder / "out/n2/_raybatch/reused/x/part-00000.parquet").write_bytes(b"left over")
    found = reap(open_store(run_dir(nights, "n2")), older_than=-1.0)
    assert found.files == {"snapshots": 1}
    nights.write("c", "a")
    asked(nights)
    nights.night("n3")
    assert asked(nights) == []


def test_a_csv_that_was_copied_can_be_told_and_run(nights: Nights) -> None:
    path = nights.folder / "in.csv"
    path.write_text("text,id\na,1\nb,2\na,3\n")
    job = nights.job(source={"uri": str(path)})
    told = dry_run(job).reuse
    assert told is not None and (told.counts.asked, told.counts.merged) == (2, 1)
    nights.night("n1", job)
    assert answers(nights, "n1") == right("a", "b", "a")
    path.write_text("id,text\n7,b\n8,c\n")
    asked(nights)
    nights.night("n2", job)
    assert asked(nights) == ["c"]


def test_a_job_that_reuses_nothing_writes_what_it_always_wrote(nights: Nights) -> None:
    nights.write("a", "b")
    nights.night("n1", nights.job(reuse=None))
    plan = json.loads((nights.folder / "out/n1/_raybatch/plan.json").read_bytes())
    assert plan["increment"] is None
    names = {path.name for path in (nights.folder / "out/n1/_raybatch").iterdir()}
    assert not names & {"asks", "reused", "answers.json"}


def test_vectors_are_taken_over(nights: Nights) -> None:
    """As raw answers: another vector_type asks nothing, another normalize all."""
    engine = {"task": "embed", "max_model_len": 128}

    def job(**output: Any) -> Any:
        out = {"uri": str(nights.folder / "out"), "columns": ["text"], "column": "vector"}
        return nights.job(prompt={"template": "{text}"}, engine=engine, output={**out, **output})

    def vectors(key: str) -> list[tuple[str, list[float]]]:
        return [(row["text"], row["vector"]) for row in nights.result(key)]

    def right(*texts: str) -> list[tuple[str, list[float]]]:
        return [(text, [float(len(text)), float(ord(text[0]))]) for text in texts]

    first = ["apple", "bee", "coat", "dot", "apple", "egg"]
    nights.write(*first)
    report = nights.night("n1", job())
    assert vectors("n1") == right(*first) and report.reuse["merged"] == 1
    assert sorted(nights.asked) == sorted(set(first))
    nights.asked.clear()
    second = ["egg", "apples", "bee", None, "apple", "apple"]
    nights.write(*second)
    told = dry_run(job(), "n2")
    assert told.reuse is not None and told.reuse.counts.asked == 1
    report = nights.night("n2", job(vector_type="float16"))
    assert vectors("n2") == right(*[text for text in second if text])
    assert nights.asked == ["apples"] and report.failed == 1 and report.reuse["reused"] == 4
    assert report.reuse["saved_tokens"] == 4 * 3
    told = dry_run(job(normalize=False))
    assert told.reuse is not None and told.reuse.counts.reused == 0
    assert "use_activation" in told.reuse.differs[0]
    nights.night("n3", job())  # what was taken over is taken over again
    assert nights.asked == ["apples"] and len(vectors("n3")) == 5
    assert verify(open_store(run_dir(nights, "n3"))).ok


def test_scores_of_pairs_are_taken_over(nights: Nights) -> None:
    job = nights.job(
        prompt={"template": "{text}", "second": "{other}"},
        engine={"task": "score", "max_model_len": 128},
    )
    nights.write("a", "a", other=["b", "c"])
    nights.night("n1", job)
    first = [row["response"] for row in nights.result("n1")]
    nights.asked.clear()
    nights.write("c", "a", "a", other=["a", "c", "b"])
    report = nights.night("n2", job)
    assert [row["response"] for row in nights.result("n2")][1:] == first[::-1]
    assert sorted(nights.asked) == ["a", "c"] and report.reuse["reused"] == 2


def test_keys_are_made_side_by_side_where_there_are_many_rows(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever order they come, and a worker's error comes out as it is."""
    monkeypatch.setattr(row_keys, "ROWS_A_TASK", 3)
    given: list[tuple[int, str]] = []

    @contextmanager
    def workers(job: Any, size: int, made: str = "result") -> Iterator[int]:
        given.append((size, made))
        yield 0 if made == "result" else 2

    def backwards(work: Any, items: Iterator[int], at_once: int) -> Iterator[Any]:
        assert at_once == 4
        yield from map(pickle.loads(pickle.dumps(work)), reversed(list(items)))

    monkeypatch.setattr(side_by_side, "workers_for", workers)
    monkeypatch.setattr(side_by_side, "run_in_parallel", backwards)
    texts = ["a", "b", None, "d", "b", "f", "g", "a"]
    nights.write(*texts)
    report = nights.night("n1")
    assert given[0] == (8 * 512, "plan of what is reused")
    assert answers(nights, "n1") == right(*[text for text in texts if text])
    assert asked(nights) == list("abdfg") and report.reuse["merged"] == 2
    given.clear()  # what a plan copies to TMPDIR no other node can read
    path = nights.folder / "in.csv"
    path.write_text("text\n" + "a\n" * 8)
    told = dry_run(nights.job(source={"uri": str(path)})).reuse
    assert told is not None and told.counts.reused == 8 and not given


def ordered(nights: Nights, **engine: Any) -> Any:
    """A job that reuses nothing and asks in the order of all its prompts."""
    return nights.job(reuse=None, engine={"order": "run", **engine})


def test_rows_are_asked_in_the_order_of_the_run_s_prompts(nights: Nights) -> None:
    """Those that begin alike one after the other, over all shards, also after a kill; the result is
    that of the input's order, and its answers are no longer kept than the run needs them."""
    texts = [f"about shop {shop} item {item}" for item in range(4) for shop in "cab"]
    nights.write(*texts, "about shop a item 0", None)
    plain = nights.job(reuse=None)
    assert (
        resolve(plain).pinned().identity.fingerprint
        == resolve(ordered(nights)).pinned().identity.fingerprint
    )
    nights.night("plain", plain)
    assert [words(p)[11] for p in nights.asked] == list("cab") * 4 + ["a"]
    nights.asked.clear()

    job = ordered(nights)
    run = plan_run(job, "n1")
    nights.stop_after = 1
    with pytest.raises(Killed):
        nights.infer(job, run)
    nights.stop_after = None
    nights.asked = nights.asked[:4]  # the shard that was committed before the kill
    nights.drive(job, plan_run(plain, "n1"))  # which order it was begun in says the plan
    shops = "".join(words(prompt)[11] for prompt in nights.asked)
    assert len(shops) == 12 and [len(set(s)) for s in (shops[:4], shops[4:8], shops[8:])] == [1] * 3
    assert answers(nights, "n1") == answers(nights, "plain")
    assert [row["_row"] for row in nights.quarantined("n1")] == [13]
    store = open_store(run_dir(nights, "n1"))
    assert verify(store).ok and read_answers(store).expired
    assert reap(store, older_than=-1.0).files["answers"] and verify(store).ok


def test_a_night_that_reuses_asks_in_the_order_of_its_prompts(nights: Nights) -> None:
    texts = [f"about shop {shop} item {item}" for item in range(2) for shop in "cab"]
    nights.write(*texts)
    nights.night("n1")
    assert [words(prompt)[11] for prompt in nights.asked] == list("aabbcc")
    nights.asked.clear()
    nights.write(*texts, *(text + "1" for text in texts))
    nights.night("n2", nights.job(engine={"order": "input"}))
    assert [words(prompt)[11] for prompt in nights.asked] == list("cab") * 2
    assert answers(nights, "n2") == right(*texts, *(text + "1" for text in texts))


def test_answers_that_lie_far_apart_are_put_in_the_order_of_the_rows(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken over, asked, shared and failed ones; after a kill they are there, in the end gone."""
    texts = [f"about shop {i % 5} item {i % 23}" for i in range(60)]
    nights.write(*texts[:40])
    nights.night("n1")
    nights.refuses = lambda prompt: "item 7" in prompt
    nights.write(*reversed(texts), "new", None)
    nights.night("plain")
    for name in ("UNSORTED_BYTES", "FEW_READS"):
        monkeypatch.setattr(answers_by_row, name, 0)
    for name in ("ROW_STEP", "LOOKUP_ROWS", "ROWS_TOGETHER", "FILE_ROWS"):
        monkeypatch.setattr(answers_by_row, name, 3)
    monkeypatch.setattr(prefix_order, "BUCKET_BYTES", 200)
    placed, read = nights.folder / "out" / "n2" / "_raybatch" / "by_row", []
    job = nights.job(reuse=run_dir(nights, "n1"))
    run = plan_run(job, "n2")
    nights.stop_after = 12
    with pytest.raises(Killed):
        nights.infer(job, run)
    nights.stop_after = None
    made = sorted(placed.rglob("*.parquet"))
    assert len(made) > 5
    monkeypatch.setattr(answers_by_row, "sorted_by_rank", lambda *_, **__: read.append("again"))
    (placed / "cut-off").mkdir()
    shutil.copy(made[0], placed / "cut-off" / "part-00000.parquet")
    store = open_store(run.uri)
    assert reap(store, older_than=-1.0).files["pieces"] >= 1
    assert sorted(placed.rglob("*.parquet")) == made
    nights.drive(job, run)
    assert not read and not list(placed.rglob("*.parquet")) and verify(store).ok
    assert answers(nights, "n2") == answers(nights, "plain")
    assert [row["_row"] for row in nights.quarantined("n2")] == [
        row["_row"] for row in nights.quarantined("plain")
    ]


def test_answers_stay_where_they_are_without_room_for_another_order(
    nights: Nights, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("UNSORTED_BYTES", "FEW_READS"):
        monkeypatch.setattr(answers_by_row, name, 0)
    monkeypatch.setattr(answers_by_row, "DISK_TIMES", 1 << 60)
    nights.write(*"bacd")
    nights.night("n1", ordered(nights))
    assert "too little to sort the answers by row" in caplog.text
    assert answers(nights, "n1") == right(*"bacd")


def test_more_rows_than_can_be_sorted_are_asked_as_they_stand(
    nights: Nights, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("prefect_raybatch.runs.plan_run.MOST_ORDERED", 3)
    nights.write("b", "a", "b", "a")
    assert Ledger(open_store(plan_run(ordered(nights), "n1").uri)).load_plan().increment is None
    assert "engine.order: run is ignored: the input has 4 rows, and at most 3" in caplog.text


def test_the_report_repeats_what_would_let_prompts_share_more(
    nights: Nights, caplog: pytest.LogCaptureFixture
) -> None:
    nights.write(
        *(f"review {i}" for i in range(120)), about=[f"shop {i % 2} " * 9 for i in range(120)]
    )
    job = nights.job(
        reuse=None,
        source={"uri": str(nights.folder / "in.parquet"), "rows_per_shard": 60},
        prompt={"template": "Say {text}\nof {about}"},
        engine={"max_model_len": "auto"},
    )
    told = dry_run(job).tokens
    assert told is not None and len(told.hints) == 1
    assert told.hints[0].startswith("prompt.template: with its fields in the order {about}, {text}")
    report = nights.night("n1", job)
    assert told.hints[0] in report.notes and told.hints[0] in caplog.text
