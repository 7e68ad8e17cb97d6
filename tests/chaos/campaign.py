"""The campaign: which trial comes when, its results file, the table."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from .kinds import Kind, load
from .trial import Bad, Record, Trial
from .world import World


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    kinds = load()
    if args.list:
        for kind in kinds.values():
            print(f"{kind.name:28} {kind.title}")
        return 0
    chosen = [kinds[name] for name in args.kinds.split(",")] if args.kinds else list(kinds.values())
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    records = _read(out) if args.resume else []
    if not args.resume:
        out.write_text("")
    done = {record["seed"] for record in records}
    print(f"seed {args.seed}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that clusters are cleaned up
    with tempfile.TemporaryDirectory(prefix="chaos-") as made:
        world = World(Path(args.work or made))
        try:
            began = time.monotonic()
            for kind, number in _order(chosen, args.trials):
                if args.minutes and time.monotonic() - began > args.minutes * 60:
                    print("time is up")
                    break
                if f"{args.seed}:{kind.name}:{number}" in done:
                    continue
                record = run_trial(world, kind, number, args)
                with out.open("a") as file:
                    file.write(record.to_json() + "\n")
                records.append(json.loads(record.to_json()))
        finally:
            world.close()
    table = markdown(records, kinds)
    print(table)
    if args.markdown:
        Path(args.markdown).write_text(table)
    return 0 if records and all(record["ok"] for record in records) else 1


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"))
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--kinds", help="only these, by comma")
    parser.add_argument("--store", choices=["local", "s3"], help="only this store")
    parser.add_argument("--engine", choices=["fast", "vllm", "mixed"], default="mixed")
    parser.add_argument("--real-every", type=int, default=4, help="each n-th trial of a kind: vLLM")
    parser.add_argument("--minutes", type=float, help="start no trial after this long")
    parser.add_argument("--out", default="chaos.jsonl", help="a line for each trial")
    parser.add_argument("--resume", action="store_true", help="go on with --out")
    parser.add_argument("--markdown", help="write the table to this file")
    parser.add_argument("--work", help="folder for everything a trial writes")
    parser.add_argument("--keep", action="store_true", help="keep the files of good trials")
    parser.add_argument("--list", action="store_true", help="show the kinds")
    return parser.parse_args(argv)


def _order(kinds: list[Kind], trials: int) -> list[tuple[Kind, int]]:
    """Round by round over the kinds, so that a campaign cut short has some of each."""
    usable = [kind for kind in kinds if not kind.needs_root or os.geteuid() == 0]
    found: list[tuple[Kind, int]] = []
    number = 0
    while len(found) < trials:
        for place, kind in enumerate(usable):
            if (number + place) % kind.every == 0:
                found.append((kind, number))
        number += 1
    return found[:trials]


def run_trial(world: World, kind: Kind, number: int, args: argparse.Namespace) -> Record:
    """One trial from set-up to verdict; never raises for what a trial finds."""
    turn = sum(kind.name.encode()) + number
    store = args.store if args.store in kind.stores else kind.stores[turn % len(kind.stores)]
    real = number % args.real_every == 1 % args.real_every
    engine = "vllm" if kind.real and args.engine != "fast" else "fast"
    if args.engine == "mixed" and not real:
        engine = "fast"
    began = time.monotonic()
    t = Trial(world, kind.name, number, args.seed, store, engine)
    try:
        kind.run(t)
        if t.done is None:
            t.complete()
        t.expect_success(t.start())  # once more: finished, and whatever was left is tidied up
        t.check()
        t.record.ok = True
    except Bad as bad:
        t.record.note = str(bad)
    except Exception:
        t.record.note = traceback.format_exc()[-1500:]
    finally:
        t.close(keep=args.keep or not t.record.ok)
    t.record.seconds = round(time.monotonic() - began, 1)
    print(line(t.record), flush=True)
    if not t.record.ok:
        print(f"    {t.record.note}\n    files: {t.folder}", file=sys.stderr, flush=True)
    return t.record


def line(record: Record) -> str:
    verdict = "ok  " if record.ok else "FAIL"
    where = f"{record.store}/{record.engine}"
    return (
        f"{verdict} {record.kind}#{record.number} {where} {record.seconds:.0f} s: "
        f"lost {record.lost} doubled {record.doubled} wrong {record.wrong} again {record.again}"
        f"/{record.bound} recover {record.recover} [{record.plan}]"
    )


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(text) for text in path.read_text().splitlines()]


def markdown(records: list[dict[str, Any]], kinds: dict[str, Kind]) -> str:
    """The table by kind, and the sum."""
    head = (
        "| fault | trials (S3, vLLM) | lost rows | doubled rows | wrong rows | inferred again "
        "(most, bound) | seconds to recover (median, most) |"
    )
    lines = [head, "| --- | --- | --- | --- | --- | --- | --- |"]
    for name, kind in kinds.items():
        mine = [record for record in records if record["kind"] == name]
        if mine:
            lines.append(_row(kind.title, mine))
    if records:
        lines.append(_row("**all**", records))
    failed = [f"{r['kind']}#{r['number']}" for r in records if not r["ok"]]
    seeds = sorted({record["seed"].split(":")[0] for record in records})
    lines.append(f"\nSeed {', '.join(seeds)}; {len(records)} trials, {len(failed)} not ok")
    return "\n".join(lines + ([f"Not ok: {', '.join(failed)}"] if failed else [])) + "\n"


def _row(title: str, mine: list[dict[str, Any]]) -> str:
    most = max(mine, key=lambda record: record["again"])
    times = [record["recover"] for record in mine if record["recover"] is not None]
    took = f"{statistics.median(times):.1f}, {max(times):.1f}" if times else "-"
    s3 = sum(record["store"] == "s3" for record in mine)
    real = sum(record["engine"] == "vllm" for record in mine)
    counts = [sum(record[key] for record in mine) for key in ("lost", "doubled", "wrong")]
    cells = [title, f"{len(mine)} ({s3}, {real})", *map(str, counts)]
    return "| " + " | ".join([*cells, f"{most['again']}, {most['bound']}", took]) + " |"
