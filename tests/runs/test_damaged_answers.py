"""Stored answers that are lost or changed: no row takes a wrong one, verify says so, and the next
night goes on without them."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import functions
from helpers.nights import Killed, Nights, words

from prefect_raybatch.api import dry_run, plan_run
from prefect_raybatch.errors import ConfigError, CorruptRun
from prefect_raybatch.ledger.increments import read_answers
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.result.reap import reap
from prefect_raybatch.result.verify import verify
from prefect_raybatch.runs import answers_by_row
from prefect_raybatch.runs.repair import repair_run
from prefect_raybatch.stages import raw_answers
from prefect_raybatch.storage import open_store

FIRST = [f"text {i}" for i in range(9)]
SECOND = [*FIRST[3:], "new 1", "new 2", "new 3"]


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    return Nights(tmp_path)


def two_nights(nights: Nights) -> Path:
    """Run two nights; the second takes answers over and asks. Return its directory."""
    nights.write(*FIRST)
    nights.night("n1")
    nights.write(*SECOND)
    nights.night("n2")
    nights.asked.clear()
    return nights.folder / "out" / "n2"


def flip(path: Path, bit: int) -> None:
    """Flip a bit and keep the modification time, as rot on a disk does."""
    times, data = path.stat(), bytearray(path.read_bytes())
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def rot(path: Path) -> None:
    flip(path, 8 * (path.stat().st_size // 2))


def asks_part(run: Path) -> Path:
    (part,) = (run / "_raybatch/asks/data").glob("*.parquet")
    return part


def reused_part(run: Path) -> Path:
    (part,) = (run / "_raybatch/reused").rglob("*.parquet")
    return part


def answers_record(run: Path) -> Path:
    return run / "_raybatch/answers.json"


def is_proved(run: Path) -> bool:
    try:
        return verify(open_store(str(run))).ok
    except CorruptRun:
        return False


def are_right(nights: Nights, key: str, texts: list[str]) -> bool:
    return [(row["text"], row["response"]) for row in nights.result(key)] == [
        (text, f"answer to {text}") for text in texts
    ]


def asked(nights: Nights) -> list[str]:
    found = sorted(map(words, nights.asked))
    nights.asked.clear()
    return found


def everything_below(run: Path) -> list[Path]:
    return sorted(path for path in (run / "_raybatch").rglob("*") if path.is_file())


@pytest.mark.parametrize("seed", range(2))
def test_whatever_rots_below_raybatch_no_wrong_answer_is_taken(nights: Nights, seed: int) -> None:
    """Each file alone: verify reports it. Then all files at once that it does not report: the next
    night comes out right all the same."""
    draw = random.Random(seed)
    run = two_nights(nights)
    assert is_proved(run)
    unreported = []
    for path in everything_below(run):
        bit, whole = draw.randrange(8 * max(1, path.stat().st_size)), path.read_bytes()
        if not whole:
            continue
        flip(path, bit)
        if is_proved(run):
            unreported.append((path, bit))
        path.write_bytes(whole)
    names = {path.relative_to(run / "_raybatch").as_posix() for path, _ in unreported}
    assert not [name for name in names if "reused" in name or name.startswith("places-")]
    assert not {"plan.json", "answers.json", "asks/_raybatch/plan.json"} & names
    assert not [name for name in names if name.startswith("asks/data")]
    for path, bit in unreported:
        flip(path, bit)
    nights.night("n3")
    assert are_right(nights, "n3", SECOND)


def test_whatever_is_gone_below_raybatch_no_wrong_answer_is_taken(nights: Nights) -> None:
    run = two_nights(nights)
    unreported = []
    for path in everything_below(run):
        whole = path.read_bytes()
        path.unlink()
        if is_proved(run):
            unreported.append(path)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(whole)
    names = {path.relative_to(run / "_raybatch").as_posix() for path in unreported}
    depended_on = ("reused", "places-", "files-", "shards-", "layout", "plan.json", "answers.json")
    assert not [name for name in names if name.startswith(depended_on)]
    assert not [name for name in names if name.startswith(("asks/data", "asks/_SUCCESS"))]
    assert not [name for name in names if name.startswith("asks/_raybatch/commits")]
    for path in unreported:
        path.unlink()
    nights.night("n3")
    assert are_right(nights, "n3", SECOND)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "asks rot": lambda run: rot(asks_part(run)),
    "asks gone": lambda run: asks_part(run).unlink(),
    "asks are no Parquet": lambda run: asks_part(run).write_bytes(b"PAR1"),
    "reused rot": lambda run: rot(reused_part(run)),
    "reused gone": lambda run: reused_part(run).unlink(),
    "record rots": lambda run: rot(answers_record(run)),
    "record gone": lambda run: answers_record(run).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_night_is_passed_over(
    nights: Nights, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The one before takes its place; the rows that only the damaged one has are asked again."""
    run = two_nights(nights)
    DAMAGE[damage](run)
    assert not is_proved(run)
    told = dry_run(nights.job()).reuse
    assert told is not None
    nights.night("n3")
    assert are_right(nights, "n3", SECOND)
    assert asked(nights) == ["new 1", "new 2", "new 3"]
    if damage != "record gone":  # which is a night that keeps nothing
        assert "n2" in caplog.text


@pytest.mark.parametrize("damage", ["asks rot", "record rots", "asks gone"])
def test_a_damaged_night_that_is_named_is_asked_again(
    nights: Nights, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = two_nights(nights)
    DAMAGE[damage](run)
    nights.night("n3", nights.job(reuse=str(run)))
    assert are_right(nights, "n3", SECOND) and asked(nights) == sorted(SECOND)
    assert f"the answers of {run} are not reused" in caplog.text


def test_a_damaged_retry_is_passed_over_alone(nights: Nights) -> None:
    from prefect_raybatch.api.retry import plan_retry

    nights.write("a", "bad", "b")
    nights.refuses = lambda prompt: words(prompt) == "bad"
    nights.night("n1")
    nights.refuses = lambda prompt: False
    retry: Any = plan_retry(str(nights.folder / "out" / "n1"))
    nights.drive(retry.job, retry.run)
    rot(asks_part(nights.folder / "out" / "n1.r1"))
    asked(nights)
    nights.night("n2")
    assert asked(nights) == ["bad"] and are_right(nights, "n2", ["a", "bad", "b"])


def killed_after_its_asks(nights: Nights) -> Path:
    """Begin a second night and kill it once its requests are answered."""
    nights.write(*FIRST)
    nights.night("n1")
    nights.write(*SECOND)
    nights.stop_after = 1  # the three new requests are one shard
    with pytest.raises(Killed):
        nights.night("n2")
    nights.stop_after = None
    nights.asked.clear()
    return nights.folder / "out" / "n2"


@pytest.mark.parametrize("part", [asks_part, reused_part])
@pytest.mark.parametrize("lost", [False, True])
def test_a_run_stops_before_it_takes_a_damaged_answer(
    nights: Nights, part: Callable[[Path], Path], lost: bool
) -> None:
    run = killed_after_its_asks(nights)
    path = part(run)
    path.unlink() if lost else rot(path)
    with pytest.raises(
        CorruptRun, match=rf"{path.name} (was damaged|is missing).*raybatch repair {run}"
    ):
        nights.night("n2")
    assert any(path.name in fault for fault in verify(open_store(str(run))).faults)
    if part is reused_part:
        with pytest.raises(CorruptRun, match="under a new run key"):
            repair_run(str(run))
        return
    assert repair_run(str(run)).run_key == "n2.m1"
    nights.night("n2")
    assert asked(nights) == ["new 1", "new 2", "new 3"]
    assert are_right(nights, "n2.m1", SECOND) and is_proved(run.parent / "n2.m1")


def test_what_rots_while_a_run_reads_it_is_not_taken(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the driver has checked the file, a worker checks each block that it reads."""
    from prefect_raybatch.cluster import lookups

    run = killed_after_its_asks(nights)
    look_up = lookups.look_up

    def rotten_now(*args: Any) -> Any:
        made = look_up(*args)
        rot(reused_part(run))
        raw_answers._kept.clear()  # as in a worker that has not read the file
        raw_answers._files.clear()
        return made

    monkeypatch.setattr("prefect_raybatch.cluster.pipeline.look_up", rotten_now)
    with pytest.raises(CorruptRun, match="its checksum differs"):
        nights.night("n2")


def test_answers_in_the_order_of_the_rows_are_only_a_copy(
    nights: Nights, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("UNSORTED_BYTES", "FEW_READS"):
        monkeypatch.setattr(answers_by_row, name, 0)
    nights.write(*FIRST)
    nights.night("n1")
    nights.write(*SECOND)
    nights.stop_after = 2
    with pytest.raises(Killed):
        nights.night("n2")
    nights.stop_after = None
    run = nights.folder / "out" / "n2"
    (copy,) = (run / "_raybatch/by_row").rglob("*.parquet")
    rot(copy)
    assert any("by_row" in fault for fault in verify(open_store(str(run))).faults)
    assert repair_run(str(run)).run_key is None
    nights.night("n2")
    assert are_right(nights, "n2", SECOND) and "reading them in request order" in caplog.text


def test_a_folder_that_is_made_again_under_its_name_gives_its_own_answers(nights: Nights) -> None:
    """In one process: nothing of the deleted run is remembered."""
    for answer in ("one", "two"):
        shutil.rmtree(nights.folder / "out", ignore_errors=True)
        nights.answer = lambda prompt, answer=answer: f"{answer} {words(prompt)}"  # type: ignore[misc]
        nights.write(*FIRST)
        nights.night("n1")
        nights.write(*FIRST[::-1], "new")
        nights.night("n2")
        found = [row["response"] for row in nights.result("n2")]
        assert found == [f"{answer} {text}" for text in (*FIRST[::-1], "new")]


def test_a_row_takes_no_answer_whose_key_is_another(nights: Nights) -> None:
    """Its prompt changed after the asks: its key, which is made again, is not the stored one."""
    nights.write("a", "b")
    job = nights.job(prompt={"function": "helpers.functions:changing"})
    nights.stop_after = 1
    with pytest.raises(Killed):
        nights.night("n1", job)
    nights.stop_after = None
    functions.CHANGING |= {"a": "b", "b": "a"}
    try:
        nights.night("n1", job)
    finally:
        functions.CHANGING.clear()
    assert not nights.result("n1")
    assert {row["error"] for row in nights.quarantined("n1")} == {"PromptNotDeterministic"}


def test_a_repair_names_the_answers_that_are_whole(nights: Nights) -> None:
    """The result is whole, so that no row is lost and no run is begun."""
    run = two_nights(nights)
    rot(asks_part(run))
    found = repair_run(str(run))
    assert found.run_key is None and len(found.restored) == 1 and found.faults
    assert "the 6 raw answers that are intact, of 9" in found.restored[0]
    assert is_proved(run)
    shutil.rmtree(run.parent / "n1")
    nights.night("n3")
    assert asked(nights) == ["new 1", "new 2", "new 3"] and are_right(nights, "n3", SECOND)


@pytest.mark.parametrize("damage", ["record rots", "record gone"])
def test_a_repair_writes_a_lost_record_of_answers_again(nights: Nights, damage: str) -> None:
    run = two_nights(nights)
    before = read_answers(open_store(str(run)))
    DAMAGE[damage](run)
    assert repair_run(str(run)).restored
    found = read_answers(open_store(str(run)))
    assert found is not None and before is not None and found.files == before.files
    nights.night("n3")
    assert asked(nights) == [] and is_proved(run)


def test_a_repair_says_why_the_answers_are_lost(nights: Nights) -> None:
    """Damaged is not the same as have been deleted."""
    run = two_nights(nights)
    (part,) = (run / "data").glob("*.parquet")
    rot(part)
    rot(asks_part(run))
    with pytest.raises(ConfigError, match=r"are damaged as well \(.*asks/data/part-00000"):
        repair_run(str(run))
    short = nights.job(output={"uri": str(nights.folder / "out"), "keep_answers": 1e-9})
    nights.write("x", "y")
    nights.night("n4", short)
    run = run.parent / "n4"
    reap(open_store(str(run)), older_than=-1.0)
    assert is_proved(run)
    rot(next((run / "data").glob("*.parquet")))
    with pytest.raises(ConfigError, match="have been deleted"):
        repair_run(str(run))


def test_lost_tables_are_reported(nights: Nights) -> None:
    run = two_nights(nights)
    for pattern in ("files-*", "shards-*", "places-*", "layout-*", "layout.json"):
        (path,) = (run / "_raybatch").glob(pattern)
        whole = path.read_bytes()
        path.unlink()
        assert any(pattern.split("-")[0] in fault for fault in verify(open_store(str(run))).faults)
        path.write_bytes(whole)
    assert is_proved(run)


def night_of(nights: Nights, key: str, *texts: str) -> Any:
    """Run a night over an input of its own, so that it can be repaired later; return its job."""
    path = nights.folder / f"{key}.parquet"
    pq.write_table(pa.table({"text": pa.array(texts)}), path)
    job = nights.job(source={"uri": str(path), "rows_per_shard": 4})
    nights.night(key, job)
    return job


def repaired(nights: Nights, key: str, job: Any) -> None:
    """Lose the rows of a run, repair it, and finish it."""
    run = nights.folder / "out" / key
    for part in (run / "data").glob("*.parquet"):
        part.unlink()
    assert repair_run(str(run)).run_key == f"{key}.m1"
    nights.drive(job, plan_run(job, key))
    assert (run.parent / f"{key}.m1" / "_SUCCESS").is_file()


def test_latest_is_the_newest_night_and_not_the_last_key_or_plan(nights: Nights) -> None:
    """An old night that is repaired, or run again as a back-fill, stays old."""

    def latest() -> str:
        told = dry_run(new).reuse
        assert told is not None and len(told.earlier) == 1
        return Path(told.earlier[0]).name

    old = night_of(nights, "z", "a", "b")  # its key sorts last
    new = night_of(nights, "m", "b", "c")
    assert latest() == "m"
    repaired(nights, "z", old)
    assert latest() == "m"
    night_of(nights, "nightly-20200101T000000Z", "a")
    assert latest() == "m"
    repaired(nights, "m", new)
    assert latest() == "m.m1"


def test_a_repaired_night_keeps_the_answers_of_its_retries(nights: Nights) -> None:
    from prefect_raybatch.api.retry import plan_retry

    nights.write("a", "bad", "b")
    nights.refuses = lambda prompt: words(prompt) == "bad"
    nights.night("n1")
    nights.refuses = lambda prompt: False
    run = nights.folder / "out" / "n1"
    retry: Any = plan_retry(str(run))
    nights.drive(retry.job, retry.run)
    (part,) = (run / "data").glob("*.parquet")
    part.unlink()
    repair_run(str(run))
    nights.refuses = lambda prompt: words(prompt) == "bad"
    job = nights.job()
    nights.drive(job, plan_run(job, "n1"))
    nights.refuses = lambda prompt: False
    asked(nights)
    for number, reuse in enumerate(("latest", str(run))):  # which n1.m1 goes on for
        nights.night(f"next{number}", nights.job(reuse=reuse))
        assert asked(nights) == []
        shutil.rmtree(nights.folder / "out" / f"next{number}")


def test_a_link_to_a_run_is_not_the_latest(nights: Nights) -> None:
    run = two_nights(nights)
    (run.parent / "zz-latest").symlink_to(run.name)
    nights.night("n3")
    assert asked(nights) == []


def test_a_plan_names_the_time_of_its_original_only_when_the_run_was_repaired(
    nights: Nights,
) -> None:
    run = two_nights(nights)
    plan = Ledger(open_store(str(run))).load_plan()
    assert plan is not None and plan.original_created is None
    assert pq.ParquetFile(asks_part(run)).metadata.num_rows == 3
