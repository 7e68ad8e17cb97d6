"""The simulation's own tests: one seed is one schedule, its checks see what is wrong, and schedules
of a fixed seed hold, while each of the planted bugs is found."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from simulation import checker
from simulation.campaign import seeds
from simulation.mutants import MUTANTS, Edit, Mutant, planted
from simulation.watch import Watch, kind_of

ROOT = Path(__file__).parent.parent
SEED = "20261122"
SCHEDULES = 24
SAME = seeds(SEED, 3)


def parquet(rows: list[dict[str, object]]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out)
    return out.getvalue()


def row(number: int, **more: object) -> dict[str, object]:
    given = {"id": number, "Company": f"Company {number}"}
    return {**given, "response": f"a answers {number}", "_row": number, **more}


def finished(data: list[int], failed: list[int], run: str = "key") -> dict[str, bytes]:
    """The files of a finished run with these rows."""
    bad: list[dict[str, object]] = [
        {"error": "ValueError", "input": {"id": n, "Company": f"Company {n}"}, "_row": n}
        for n in failed
    ]
    files = {
        f"{run}/_raybatch/plan.json": b"{}",
        f"{run}/data/part-00000.parquet": parquet([row(n) for n in data]),
        f"{run}/_quarantine/part-00000.parquet": parquet(bad),
    }
    named = {key: hashlib.sha256(body).hexdigest() for key, body in files.items() if "part" in key}
    parts = [{"path": key.partition("/")[2], "sha256": sha} for key, sha in named.items()]
    files[f"{run}/_SUCCESS"] = json.dumps({"parts": parts, "compact": True}).encode()
    return files


def test_the_checker_accepts_a_whole_result_and_sees_rows_lost_doubled_and_changed():
    assert checker.check(finished([0, 1, 3], [2]), "key", 4) == []
    assert "it lacks [3]" in checker.check(finished([0, 1], [2]), "key", 4)[0]
    assert checker.check(finished([0, 1, 2, 3], [2]), "key", 4)
    assert checker.check(finished([0, 3, 1], [2]), "key", 4)
    files = finished([0, 1, 3], [2])
    files["key/data/part-00001.parquet"] = files["key/data/part-00000.parquet"]
    assert "row 0 is 2 times in data/" in checker.check(files, "key", 4)
    files = finished([0], [1])
    files["key/data/part-00000.parquet"] = parquet([row(0, response="a answers 1")])
    assert "has the answer" in checker.check(files, "key", 2)[0]
    files["key/data/part-00000.parquet"] = b"PAR1"
    assert "is not readable" in checker.check(files, "key", 2)[0]
    del files["key/_SUCCESS"]
    assert checker.check(files, "key", 2) == ["key is not finished"]


def test_the_checker_knows_nothing_of_the_package():
    code = "import sys, simulation.checker, simulation.watch; "
    code += "print([m for m in sys.modules if 'raybatch' in m])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "tests", capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


COMMIT = "key/_raybatch/commits/00000003.json"
PIECE = "key/_raybatch/pieces/00000003-aa.parquet"


@pytest.mark.parametrize(
    ("key", "before", "after", "said"),
    [
        (COMMIT, b"a", b"b", "is replaced"),
        ("key/_raybatch/plan.json", b"a", None, "is deleted"),
        ("key/_SUCCESS", b"a", b"b", "is replaced"),
        ("key/data/part-00000.parquet", b"a", None, "is deleted"),
        ("key/_quarantine/part-00000.parquet", None, b"b", "is not what _SUCCESS names"),
        (PIECE, b"a", None, "the result is not there"),
        (PIECE.replace("3-aa", "4-bb"), b"a", None, "may be committed with it"),
    ],
)
def test_what_no_change_may_do(key, before, after, said):
    commit = json.dumps({"pieces": [{"path": "00000003-aa.parquet"}]}).encode()
    watch = Watch(lambda: {COMMIT: commit})
    if "_quarantine" in key:
        watch.ended["key"] = {}
    watch.changed(key, before, after)
    assert len(watch.faults) == 1 and said in watch.faults[0]


def test_what_a_change_may_do():
    files = finished([0], [1])
    watch = Watch(lambda: files)
    watch.changed("key/_SUCCESS", None, files["key/_SUCCESS"])
    watch.changed(PIECE, b"a", None)
    watch.changed("key/data/part-00000.parquet", b"x", files["key/data/part-00000.parquet"])
    watch.changed(COMMIT, b"a", b"a")
    assert watch.faults == []
    files["key/data/more.parquet"] = b"x"
    watch.changed("key/_SUCCESS", None, files["key/_SUCCESS"])
    assert "names other files than are there" in watch.faults[0]
    assert kind_of("key/_raybatch/row_sums/data-part-00000.parquet") == "row_sums"


def apart(*given: str, hashes: str = "7") -> subprocess.CompletedProcess[str]:
    """Python in a process of its own: one that has run other tests is many times slower, with its
    threads and its memory, and planting a bug changes the package."""
    return subprocess.run(
        [sys.executable, *given],
        env={**os.environ, "PYTHONHASHSEED": hashes},
        cwd=ROOT / "tests",
        capture_output=True,
        text=True,
    )


def digests(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(re.findall(r"digest (\S+) (\S+)", done.stdout))


@pytest.mark.timeout(900)
@pytest.mark.whole
def test_schedules_hold_planted_bugs_are_found_and_a_seed_is_a_schedule():
    """As many more schedules as one likes: `make chaos`."""
    same = ("-m", "simulation", "--seed", SEED, "--digests", ",".join(SAME))
    done = apart(*same, "--schedules", str(SCHEDULES), "--mutants", "quick")
    found = digests(done)
    assert f"{SCHEDULES} schedules" in done.stdout and "0 not ok" in done.stdout
    quick = [mutant.name for mutant in MUTANTS if mutant.quick]
    assert re.findall(r"^found (\w+) ", done.stdout, re.MULTILINE) == quick and len(quick) >= 12
    assert digests(apart(*same, "--schedules", "0", hashes="1")) == found
    assert set(found) == set(SAME) and len({*found.values()}) == 3


FAILING = """
from simulation.campaign import seeds
from simulation.mutants import MUTANTS, planted
from simulation.schedule import run_schedule
bug = next(mutant for mutant in MUTANTS if mutant.name == "commit_put")
with planted(bug):
    found = next(o for o in map(run_schedule, seeds({seed!r}, bug.within)) if o.faults)
print(found.seed)
print(found.text())
assert not run_schedule(found.seed).faults  # the bug is gone again
"""


def test_a_failure_tells_its_seed_its_trace_and_how_to_see_it_again():
    done = apart("-c", FAILING.format(seed=SEED))
    assert done.returncode == 0, done.stderr
    seed, _, text = done.stdout.partition("\n")
    assert f"seed {seed} (" in text and "commits/" in text and "is replaced" in text
    assert f"python -m simulation --one {seed}" in text


def test_each_planted_bug_fits_the_code_and_one_that_does_not_says_so():
    for mutant in MUTANTS:
        with planted(mutant):
            pass
    old = Mutant("old", "", (Edit("result.reap:orphans", "what is not there", ""),))
    said = "mutant old: 'what is not there' is 0 times"
    with pytest.raises(ValueError, match=said), planted(old):
        pass


def test_the_documented_bugs_are_these():
    pages = [ROOT / f"docs/decisions/planted-bugs{of}.md" for of in ("", "-of-results")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (\d+) \|$", text, re.MULTILINE)
    assert rows == [(m.name, m.title, str(m.within)) for m in MUTANTS]
