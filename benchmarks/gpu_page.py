"""The figures of `gpu.py` as tables and a plot in docs/performance.md.

    python benchmarks/gpu_page.py benchmarks/results/*.jsonl

Each file is one run of `gpu.py` on one machine; ratios are only made within a file, and what other
benchmarks left is passed over. What stands between the two marks in the page is replaced, the plot
is docs/images/gpu.svg.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from prefect_raybatch.report import drawing

DOCS = Path(__file__).parent.parent / "docs"
BEGIN, END = "<!-- gpu_page.py: begin -->", "<!-- gpu_page.py: end -->"
WORK = {
    "company": "company task: industry from a name, one of nine choices, 6 tokens out",
    "long": "long outputs: 512 tokens out",
    "varied": "long outputs of varied length: 128 to 512 tokens out",
    "prefix": "shared prefixes: 256 of about 512 tokens, shuffled, 128 tokens out",
    "triage": "short texts: about 150 tokens in, half of them shared, 24 out",
    "mid": "texts: about 370 tokens in, 64 out",
    "rag": "long texts: about 2,000 tokens in, 32 out",
}
SIZE = {"70b": "70B", "8b": "8B", "05b": "0.5B"}
PEERS = {"vllm": "`LLM.chat`", "raydata": "`ray.data.llm`"}
USUAL_CARD = "H200"
USUAL = "256"  # sequences, where a peer is told no other number
# (work, size) -> (peer, least ratio of ours to it)
BARS = {
    ("company", "8b"): (("vllm", 1.45), ("raydata", 1.4)),
    ("company", "05b"): (("vllm", 3.0),),
    ("long", "8b"): (("vllm", 1.0),),
    ("varied", "8b"): (("vllm", 1.15),),
    ("prefix", "8b"): (("raydata", 1.3),),
    **{(work, "8b"): (("vllm", 1.0),) for work in ("triage", "mid", "rag")},
}
EARLY = {"decided": "stopped when decided", "first_token": "one token asked first"}
# peer -> least ratio to `LLM.chat` with its own defaults, company task and 8B
EARLY_BARS = {"auto+decided": 2.0, "auto+first_token": 2.4}
LINEAR = 0.95  # of one GPU's rate, on each of several
ROW, LEFT, RIGHT = 22, 430, 100
BESIDE: dict[str, Any] = {"va": "center_baseline", "textcoords": "offset points"}


def name_of(peer: str) -> str:
    """`ours3` is three engines a GPU, `ours@512` one with max_num_seqs 512, `+3` takes 3 tokens."""
    peer, _, more = peer.partition("+")
    if more:
        return f"{name_of(peer)}, {EARLY.get(more) or f'{more} tokens at most'}"
    peer, _, seqs = peer.partition("@")
    if peer in PEERS:
        return PEERS[peer] + _at_once(peer, seqs or USUAL)
    if seqs:
        return f"{name_of(peer)}{_at_once(peer, seqs)}"
    if peer == "auto":
        return "ours, as it comes"
    if peer == "nocommit":
        return "ours, without pieces, commits and result"
    kind, number = peer.rstrip("0123456789"), peer[len(peer.rstrip("0123456789")) :] or "1"
    what = {"ours": "ours", "raydata": "`ray.data.llm`"}[kind]
    return f"{what}, {number} engine{'s' * (number != '1')} a GPU"


def label_of(record: dict[str, Any]) -> str:
    return name_of(record["peer"]) + (", by MPS" if record.get("mps") else "")


def _at_once(peer: str, seqs: str) -> str:
    if seqs != "none":
        return f", {seqs} sequences"
    return " with its own defaults" if peer == "vllm" else " as its guides' example has it"


def title_of(record: dict[str, Any]) -> str:
    """Its size and work; GPUs and card, where they are not the usual one H200."""
    card = re.search(r"NVIDIA (\w+)", record["device"])
    title = f"{SIZE[record['size']]}, {WORK[record['work']].partition(':')[0]}"
    title += f", {record['gpus']} GPUs" * (record["gpus"] > 1)
    title += f", {card[1]}" if card and card[1] != USUAL_CARD else ""
    return f"{title}, {record['rows']:,} rows"


def bases(group: list[dict[str, Any]]) -> dict[str, tuple[str, float]]:
    """What ratios are made against: (short name, rows/s) by peer."""
    found = {}
    for record in group:
        kind, _, seqs = record["peer"].partition("@")
        if kind in PEERS and "rows_s" in record:
            name = name_of(record["peer"]) if seqs else PEERS[kind]
            found[record["peer"]] = (name, record["rows_s"])
    return dict(sorted(found.items(), reverse=True))


def groups(records: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Records by (file, work, size, GPUs, rows), those of one run beside each other."""

    def key(record: dict[str, Any]) -> tuple[Any, ...]:
        place = list(WORK).index(record["work"])
        names = ("file", "size", "gpus", "rows")
        return (place, *(record[name] for name in names))

    for _, found in groupby(sorted(records, key=key), key):
        yield [record for record in found if record["peer"] != "resume"]


def ours(group: list[dict[str, Any]]) -> dict[str, Any] | None:
    """As it comes; where that was not run, the best of ours that gives whole answers."""
    mine = [r for r in group if r["peer"] == "auto" and "rows_s" in r and not r.get("mps")]
    whole = [r for r in group if "+" not in r["peer"] and "rows_s" in r]
    mine = mine or [r for r in whole if r["peer"].startswith("ours")]
    return max(mine, key=lambda r: r["rows_s"], default=None)


def table(group: list[dict[str, Any]]) -> list[str]:
    against = bases(group)
    heads = ["", "rows/s", *(f"of {name}" for name, _ in against.values())]
    heads += ["engines a GPU", "first row after"]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for record in sorted(group, key=lambda r: r.get("rows_s", 0)):
        if "rows_s" not in record:
            lines.append(f"| {label_of(record)} | failed |{' |' * (len(heads) - 2)}")
            continue
        rate = record["rows_s"]
        digits = 0 if rate >= 200 else 1
        cells = [label_of(record), f"{rate:,.{digits}f}"]
        cells += [f"{rate / base:.2f}" for _, base in against.values()]
        engines = record.get("engines_a_gpu")
        cells += [f"{engines:.0f}" if engines else "", f"{record['first_row_s']:.0f} s"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def early_verdicts(group: list[dict[str, Any]]) -> list[str]:
    """What answers that stop early give, of `LLM.chat` with its own defaults in the same run."""
    rates = {r["peer"]: r["rows_s"] for r in group if "rows_s" in r and not r.get("mps")}
    base = rates.get("vllm@none")
    found = [
        f"{EARLY[peer.partition('+')[2]]} {rates[peer] / base:.2f} "
        f"(aim {bar}: {'met' if rates[peer] >= bar * base else 'missed'})"
        for peer, bar in EARLY_BARS.items()
        if base and peer in rates
    ]
    return [f"Of `LLM.chat` with its own defaults: {'; '.join(found)}."] if found else []


def verdicts(work: str, size: str, group: list[dict[str, Any]]) -> list[str]:
    mine = ours(group)
    if mine is None:
        return early_verdicts(group)
    found = [
        f"{mine['rows_s'] / base:.2f} of {name} "
        f"(aim {bar}: {'met' if mine['rows_s'] >= bar * base else 'missed'})"
        for peer, (name, base) in bases(group).items()
        for kind, bar in BARS.get((work, size), ())
        if peer.partition("@")[0] == kind
    ]
    return [
        f"{name_of(mine['peer'])[0].upper()}{name_of(mine['peer'])[1:]}: {', '.join(found)}."
    ] * bool(found) + _commits(group, mine)


def _commits(group: list[dict[str, Any]], mine: dict[str, Any]) -> list[str]:
    """What commits cost."""
    without = next((r["rows_s"] for r in group if r["peer"] == "nocommit" and "rows_s" in r), None)
    if without is None:
        return []
    share = mine["rows_s"] / without
    met = "met" if share >= 0.99 else "missed"
    return [f"With commits on {share:.2f} of the rate without (aim 0.99: {met})."]


def resumes(records: list[dict[str, Any]]) -> list[str]:
    """Runs that were stopped and resumed."""
    lines = [
        f"{SIZE[r['size']]}, {r['work']} task, {r['rows']:,} rows, stopped after 90 %, resumed: "
        f"the first new row was in an engine {r['first_row_s']:.1f} s after the last engine was "
        f"ready (aim 10 s: {'met' if r['first_row_s'] <= 10 else 'missed'}), its shard committed "
        "after "
        f"{r['first_commit_s']:.1f} s; engines were ready {r['engine_ready_s']:.0f} s after the "
        f"start of the attempt. {r['date']}, {r['device']}."
        for r in records
        if r["peer"] == "resume" and "first_row_s" in r
    ]
    return ["### Resume", "", *lines, ""] if lines else []


def scaling(records: list[dict[str, Any]]) -> list[str]:
    """The same work on one GPU and on several, a table for each work and size."""
    lines = []
    for (_, work, size), found in series(records):
        one = found[0]["rows_s"] / found[0]["gpus"]
        last = found[-1]
        lines += [
            f"{SIZE[size]}, {WORK[work].partition(':')[0]}, ours as it comes (aim: {LINEAR} of "
            f"linear). {last['date']}, {last['device']}, {last['versions']}.",
            "",
            f"    {last['command']}",
            "",
            "| GPUs | rows | rows/s | of linear | seconds | GPUs busy |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for r in found:
            share, rate = r["rows_s"] / r["gpus"] / one, r["rows_s"]
            digits = 0 if rate >= 200 else 1
            lines.append(
                f"| {r['gpus']} | {r['rows']:,} | {rate:,.{digits}f} | {share:.2f} | "
                f"{r['rows'] / rate:.0f} | {r['gpu']:.0%} |"
            )
        lines.append("")
    return ["### Several GPUs", "", *lines] if lines else []


Series = tuple[tuple[str, str, str], list[dict[str, Any]]]


def series(records: list[dict[str, Any]]) -> list[Series]:
    """Runs of one file that differ in the number of GPUs, fewest first."""
    found: dict[tuple[str, str, str], dict[int, dict[str, Any]]] = {}
    for r in records:
        if r["peer"] == "auto" and "rows_s" in r and r.get("tensor_parallel", 1) == 1:
            found.setdefault((r["file"], r["work"], r["size"]), {})[r["gpus"]] = r
    return [
        (key, [by[gpus] for gpus in sorted(by)]) for key, by in sorted(found.items()) if len(by) > 1
    ]


def big(records: list[dict[str, Any]]) -> list[str]:
    """One model over several GPUs, and beside it copies on one each."""
    lines = []
    for r in sorted((r for r in records if r["size"] == "70b"), key=lambda r: -r["rows_s"]):
        copies = r["gpus"] // r["tensor_parallel"]
        lines.append(
            f"| {r['quantization'] or 'bf16'} | {copies} x TP {r['tensor_parallel']} | "
            f"{r['rows_s']:,.0f} | {r['gpu']:.0%} | {r['gpu_memory_peak']:,.0f} GiB | "
            f"{r['first_row_s']:.0f} s |"
        )
    if not lines:
        return []
    return [
        "### 70B on four GPUs",
        "",
        f"Company task, ours as it comes. {r['date']}, {r['device']}, {r['versions']}.",
        "",
        f"    {r['command']}",
        "",
        "| weights | copies | rows/s | GPUs busy | memory a GPU | first row after |",
        "| --- | --- | --- | --- | --- | --- |",
        *lines,
        "",
    ]


def markdown(records: list[dict[str, Any]]) -> str:
    lines = ["![Rows a second, peers and this package](images/gpu.svg)", ""]
    scaled = {id(record) for _, found in series(records) for record in found}
    for group in groups(records):
        first = group[0]
        work, size = first["work"], first["size"]
        if size == "70b" or all(id(record) in scaled for record in group):  # tables of their own
            continue
        lines += [
            f"### {title_of(first)}",
            "",
            f"{WORK[work].partition(': ')[2].capitalize()}. "
            f"{first['date']}, {first['device']}, {first['versions']}.",
            "",
            f"    {first['command']}",
            "",
            *table(group),
            "",
            *(f"{line}\n" for line in verdicts(work, size, group)),
        ]
    return "\n".join([*lines, *resumes(records), *scaling(records), *big(records)]).rstrip() + "\n"


def plot(records: list[dict[str, Any]]) -> str:
    """Bars of each group on a scale of its own."""
    shown = []
    for group in groups(records):
        rates = sorted((r for r in group if "rows_s" in r), key=lambda r: r["rows_s"])
        if len(rates) > 1:
            shown.append((title_of(rates[0]), rates))
    height = 18 + sum(ROW * (len(rates) + 2) for _, rates in shown)

    def draw(panel: drawing.Panel) -> None:
        y = 34.0
        for title, rates in shown:
            panel.text(14, y, title, size=13, color=drawing.INK)
            _bars(panel, y, rates)
            y += ROW * (len(rates) + 2)

    return drawing.svg("Rows a second, peers and this package", [drawing.Plot(height, draw)])


def _bars(panel: drawing.Panel, y: float, rates: list[dict[str, Any]]) -> None:
    """Below the title at `y`, slowest first."""
    axes = panel.axes(LEFT, y + ROW / 2, drawing.WIDTH - RIGHT, y + ROW * (len(rates) + 0.5))
    axes.set(xlim=(0, rates[-1]["rows_s"]), ylim=(len(rates) - 0.5, -0.5))
    axes.axis("off")
    rows = range(len(rates))
    mine = [not r["peer"].startswith(tuple(PEERS)) for r in rates]
    colours = [drawing.BLUE if ours else drawing.GREY for ours in mine]
    axes.barh(rows, [r["rows_s"] for r in rates], 15 / ROW, color=colours, clip_on=False)
    for row, record in enumerate(rates):
        name, rate = label_of(record).replace("`", ""), f"{record['rows_s']:,.0f} rows/s"
        axes.annotate(name, (0, row), (-8, 0), ha="right", size=12, **BESIDE)
        axes.annotate(rate, (record["rows_s"], row), (6, 0), color=drawing.INK, **BESIDE)


def main(paths: list[str]) -> int:
    records = []
    for path in paths:
        for line in Path(path).read_text().splitlines():
            record = {"file": Path(path).name, **json.loads(line)}
            if "command" in record and record.get("work") in WORK:
                records.append(record)
    page = DOCS / "performance.md"
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{markdown(records)}{END}{rest.split(END)[1]}", "utf-8")
    (DOCS / "images/gpu.svg").write_text(plot(records) + "\n", encoding="utf-8")
    print(f"{page}: {len(records)} figures")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
