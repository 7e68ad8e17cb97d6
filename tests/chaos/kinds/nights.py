"""A second night that reuses the first one's answers, killed in either of its two ledgers."""

from __future__ import annotations

from ..trial import Bad, Trial
from . import kind
from .kills import hook, killed_itself

FIRST = "night-1"
# Records of the night, by the order in which they are written: its plan and that of its asks; a
# commit of either; the end of either; which files hold its answers.
RECORDS = ("_raybatch/plan.json", "_raybatch/commits/", "_SUCCESS", "_raybatch/answers.json")


@kind("driver killed in a night that reuses answers")
def killed_reusing(t: Trial) -> None:
    t.setup(rows=t.rng.choice([300, 500]))
    t.job["reuse"] = "latest"
    t.orders(sleep=0.002)
    first = list(t.rows)
    status = t.start(run_key=FIRST).wait(t.limit)
    if "error" in status:
        raise Bad(f"the first night should have succeeded: {status}")
    t.forget_seen()
    t.rows = edited(t, first)
    t.write_input(t.rows)
    path = t.rng.choice([*RECORDS, *["_raybatch/commits/"] * 3])
    most = {"_raybatch/commits/": t.shards, "_raybatch/answers.json": 1}.get(path, 2)
    when = t.rng.choice(["before", "after"])
    killed_itself(t, hook("put_if_absent", path, t.rng.randint(1, most), when))
    if path in RECORDS[:2] and t.rng.random() < 0.5:  # and at the end of what is left
        killed_itself(t, hook("put_if_absent", "_SUCCESS", 1, t.rng.choice(["before", "after"])))
    t.complete()
    again = t.inferred_again()
    new = len({row["text"] for row in t.rows} - {row["text"] for row in first})
    if not t.seen_rows() or t.seen_rows() > new + again:
        raise Bad(f"{t.seen_rows()} rows were asked of an engine, and {new} requests are new")


def edited(t: Trial, rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """The table a night later: rows deleted, moved, edited and doubled, and new ones."""
    kept = [row for row in rows if t.rng.random() > 0.1]
    t.rng.shuffle(kept)
    for row in t.rng.sample(kept, len(kept) // 10):
        kept[kept.index(row)] = {**row, "text": f"{row['text']}, edited"}
    kept += t.rng.sample(kept, len(kept) // 5)
    kept += [{"id": 10_000 + i, "text": f"new {i % 20}"} for i in range(40)]
    return kept
