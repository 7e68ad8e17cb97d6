"""Write the measured figures of the pages from the results of the benchmarks.

    python benchmarks/gpu_page.py

A page shows figures between two marks. What stands between them is generated:

    <!-- figures: VIEW FILE.jsonl ... -->
    <!-- figures: end -->

VIEW is a function in VIEWS, FILE a file in benchmarks/results: one run of a benchmark on one
machine, so ratios are made within a file only. The command rewrites all such blocks in README.md
and docs/, and the plot docs/images/gpu.svg. tests/test_figures.py holds the pages to it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from prefect_raybatch.report import drawing
from prefect_raybatch.sizing import cost

ROOT = Path(__file__).parent.parent
DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks/results"
PLOT = DOCS / "images/gpu.svg"
BLOCK = re.compile(
    r"^<!-- figures: (?!end )([a-z-]+)((?: [\w.-]+)*) -->\n(.*?)^<!-- figures: end -->$",
    re.M | re.S,
)
Record = dict[str, Any]
WORK = {
    "company": "company task: industry from a name, one of nine choices, 6 tokens out",
    "record": "records held by a regular expression: about 265 tokens in, 58 to 72 out",
    "long": "long answers: 512 tokens out",
    "varied": "answers of varied length: 128 to 512 tokens out",
    "prefix": "shared prefixes: 256 of about 512 tokens, shuffled, 128 tokens out",
    "triage": "short texts: about 150 tokens in, half of them shared, 24 out",
    "mid": "texts: about 370 tokens in, 64 out",
    "rag": "long texts: about 2,000 tokens in, 32 out",
    "lora": "four LoRA adapters of rank 16, 64 tokens out",
}
SIZE = {"70b": "70B", "8b": "8B", "15b": "1.5B", "moe": "half of 30B-A3B", "05b": "0.5B"}
PEERS = {"vllm": "`LLM.chat`", "raydata": "`ray.data.llm`"}
USUAL = "256"  # sequences of a peer that names no number
WARM_UP = 512  # rows that gpu.py gives LLM.chat before the measured call
# Targets: (work, size) -> (peer, least ratio of our rate to the peer's).
TARGETS = {
    ("company", "8b"): (("vllm", 1.45), ("raydata", 1.4)),
    ("company", "05b"): (("vllm", 3.0),),
    ("long", "8b"): (("vllm", 1.0),),
    ("varied", "8b"): (("vllm", 1.15),),
    ("prefix", "8b"): (("raydata", 1.3),),
    **{(work, "8b"): (("vllm", 1.0),) for work in ("triage", "mid", "rag")},
}
EARLY = {"decided": "stopped when decided", "first_token": "one token first"}
# The same for answers that stop early, against LLM.chat with its own defaults.
EARLY_TARGETS = {"auto+decided": 2.0, "auto+first_token": 2.4}
ROW, LEFT, RIGHT = 22, 430, 100
BESIDE: dict[str, Any] = {"va": "center_baseline", "textcoords": "offset points"}


# --- records ------------------------------------------------------------------------------------


def records_of(files: Iterable[str]) -> list[Record]:
    """Return the records of these files in benchmarks/results, each with its file's name."""
    return [
        {"file": name, **json.loads(line)}
        for name in files
        for line in (RESULTS / name).read_text(encoding="utf-8").splitlines()
    ]


def plotted_records() -> list[Record]:
    """Return the records behind the tables of rates in docs/performance.md."""
    blocks = BLOCK.findall((DOCS / "performance.md").read_text(encoding="utf-8"))
    return records_of(
        [name for view, files, _ in blocks if view == "rates" for name in files.split()]
    )


def name_of(peer: str) -> str:
    """Return a peer in words: `ours3` has three engines a GPU, `ours@512` sets max_num_seqs to
    512, `vllm+3` sets max_tokens to 3."""
    peer, _, option = peer.partition("+")
    if option:
        return f"{name_of(peer)}, {EARLY.get(option) or f'at most {option} tokens'}"
    peer, _, seqs = peer.partition("@")
    if peer in PEERS:
        return PEERS[peer] + _sequences(peer, seqs or USUAL)
    if seqs:
        return f"{name_of(peer)}{_sequences(peer, seqs)}"
    if peer == "auto":
        return "ours, own sizes"
    if peer == "nocommit":
        return "ours, without commits"
    kind = peer.rstrip("0123456789")
    number = peer.removeprefix(kind) or "1"
    what = {"ours": "ours", "raydata": "`ray.data.llm`"}[kind]
    return f"{what}, {number} engine{'s' * (number != '1')}"


def label_of(record: Record) -> str:
    return name_of(record["peer"]) + (", MPS" if record.get("mps") else "")


def _sequences(peer: str, seqs: str) -> str:
    if seqs != "none":
        return f", {seqs} sequences"
    return ", own defaults" if peer == "vllm" else ", its guides' example"


def card_of(record: Record) -> str:
    found = re.search(r"(\d+ )?NVIDIA (\w+)", record["device"])
    return f"{found[1] or ''}{found[2]}" if found else record["device"]


def setting_of(record: Record) -> str:
    """Return card, CPUs, versions, date and file of a record."""
    about = (record["device"], record["versions"], record["date"], f"`{record['file']}`")
    return ", ".join(about)


def rate_text(rate: float) -> str:
    return f"{rate:,.{0 if rate >= 200 else 1}f}"


def whole_seconds(record: Record) -> float | None:
    """Return the seconds from the start of the process to the last row, or None if the record does
    not tell.

    Records that hold no such figure tell it all the same. LLM.chat: the start of the call, the call
    itself, less the warm-up at the same rate. Ours: the first shard's commit, the rows after it at
    the rate between the first and the last commit, and the writing of the result.
    """
    for field in ("whole_s", "total_s"):
        if field in record:
            return float(record[field])
    if record["peer"].startswith("vllm"):
        rows = record["rows"] - min(WARM_UP, record["rows"])
        return float(record["first_row_s"] + rows / record["rows_s"])
    if record.get("steady_rows_s") and record.get("shards", 0) >= 3:
        later = record["rows"] * (1 - 1 / record["shards"])
        return float(record["first_row_s"] + later / record["steady_rows_s"] + record["finalize_s"])
    return None


def whole_text(record: Record) -> str:
    seconds = whole_seconds(record)
    return "not recorded" if seconds is None else f"{seconds:,.0f} s"


def groups(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Yield the records that one run made of one kind of work, in the order of their files."""
    records = list(records)
    files = list(dict.fromkeys(record["file"] for record in records))

    def key(record: Record) -> tuple[Any, ...]:
        return (files.index(record["file"]), *(record[name] for name in ("size", "gpus", "rows")))

    for _, found in groupby(sorted(records, key=key), key):
        group = [record for record in found if record["peer"] != "resume"]
        if group:
            yield group


def baselines(group: list[Record]) -> dict[str, float]:
    """Return the rates to compare with, by peer."""
    found = {
        r["peer"]: float(r["rows_s"])
        for r in group
        if re.split("[@+]", r["peer"])[0] in PEERS and "rows_s" in r
    }
    return dict(sorted(found.items(), reverse=True))


def own_record(group: list[Record]) -> Record | None:
    """Return our record in a group: with the package's own sizes and defaults, else the fastest
    that writes whole answers."""
    rated = [r for r in group if "rows_s" in r and not r.get("mps")]
    mine = [r for r in rated if r["peer"] in ("auto", "auto+decided")]
    mine = mine or [r for r in rated if r["peer"].startswith("ours") and "+" not in r["peer"]]
    return max(mine, key=lambda r: r["rows_s"], default=None)


def chat_record(group: list[Record]) -> Record | None:
    """Return LLM.chat's record in a group: with its own defaults, else the fastest."""
    found = [r for r in group if r["peer"].startswith("vllm") and "+" not in r["peer"]]
    usual = [r for r in found if r["peer"] == "vllm@none"]
    return max(usual or found, key=lambda r: r["rows_s"], default=None)


# --- views --------------------------------------------------------------------------------------


def table(heads: Iterable[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    heads = list(heads)
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    return lines + [f"| {' | '.join(map(str, row))} |" for row in rows]


def summary(records: list[Record]) -> list[str]:
    """One row a file: this package beside LLM.chat, each with its own defaults where measured."""
    rows = []
    for file, found in groupby(records, lambda r: r["file"]):
        group = list(found)
        chat, mine = chat_record(group), own_record(group)
        if chat is None or mine is None:
            raise SystemExit(f"{file} has no record of LLM.chat or none of ours")
        what = f"{SIZE[mine['size']]}, {WORK[mine['work']].partition(':')[0]}"
        what += f", {mine['rows']:,} rows" + (f", {mine['pair']}" if "pair" in mine else "")
        times = f"{mine['rows_s'] / chat['rows_s']:.2f}"
        row = [what, card_of(mine), rate_text(chat["rows_s"]), rate_text(mine["rows_s"]), times]
        row += [whole_text(chat), whole_text(mine), _start(group), mine["date"]]
        rows.append(row)
    heads = ["work", "card", "`LLM.chat`, rows/s", "this package, rows/s", "ratio"]
    heads += ["`LLM.chat`, whole time", "this package, whole time", "compile cache", "measured"]
    if not any("compile_cache" in record for record in records):
        heads.remove("compile cache")
        rows = [row[:-2] + row[-1:] for row in rows]
    versions = "; ".join(sorted({record["versions"] for record in records}))
    return [*table(heads, rows), "", f"{versions}. Whole time: process start to last row."]


def _start(group: list[Record]) -> str:
    return "; ".join(dict.fromkeys(r["compile_cache"] for r in group if "compile_cache" in r))


def rates(records: list[Record]) -> list[str]:
    """A table for each group: rate, ratios, first row and whole time."""
    lines: list[str] = []
    for group in groups(records):
        first, against = group[0], baselines(group)
        lines += [
            f"{SIZE[first['size']]}, {first['rows']:,} rows. {setting_of(first)}:",
            "",
            *table(_heads(group, against), (_cells(r, against, group) for r in _sorted(group))),
            "",
        ]
    return lines[:-1]


def _sorted(group: list[Record]) -> list[Record]:
    return sorted(group, key=lambda r: r.get("rows_s", 0))


def _heads(group: list[Record], against: dict[str, float]) -> list[str]:
    packed = ["engines"] if any(r.get("engines_a_gpu") for r in group) else []
    cache = ["compile cache"] if any("compile_cache" in r for r in group) else []
    heads = ["", "rows/s", *(f"of {name_of(peer)}" for peer in against)]
    return [*heads, *packed, "first row", "whole time", *cache]


def _cells(record: Record, against: dict[str, float], group: list[Record]) -> list[str]:
    heads = _heads(group, against)
    if "rows_s" not in record:
        return [label_of(record), "failed", *[""] * (len(heads) - 2)]
    cells = [label_of(record), rate_text(record["rows_s"])]
    cells += [f"{record['rows_s'] / rate:.2f}" for rate in against.values()]
    if "engines" in heads:
        engines = record.get("engines_a_gpu")
        cells.append(f"{engines:.0f}" if engines else "")
    cells += [f"{record['first_row_s']:.0f} s", whole_text(record)]
    return cells + [record.get("compile_cache", "")] * (len(heads) - len(cells))


def gpus(records: list[Record]) -> list[str]:
    """The same work on one GPU and on several."""
    lines: list[str] = []
    for _, found in groupby(records, lambda r: r["file"]):
        group = sorted(found, key=lambda r: r["gpus"])
        one, last = group[0]["rows_s"] / group[0]["gpus"], group[-1]
        rows = [
            (
                f"{r['gpus']} | {r['rows']:,} | {rate_text(r['rows_s'])}",
                f"{r['rows_s'] / r['gpus'] / one:.2f}",
                f"{r['gpu']:.0%} | {r['first_row_s']:.0f} s | {whole_text(r)}",
            )
            for r in group
        ]
        title = f"{SIZE[last['size']]}, {WORK[last['work']].partition(':')[0]}, our own sizes"
        heads = "GPUs", "rows", "rows/s", "of linear", "GPU busy", "first row", "whole time"
        lines += [f"{title}. {setting_of(last)}:", "", *table(heads, rows), ""]
    return lines[:-1]


def copies(records: list[Record]) -> list[str]:
    """One model over several GPUs, and beside it copies on one each."""
    rows = [
        (
            r["quantization"] or "bf16",
            f"{r['gpus'] // r['tensor_parallel']} x TP {r['tensor_parallel']}",
            f"{r['rows']:,}",
            rate_text(r["rows_s"]),
            f"{r['gpu']:.0%}",
            f"{r['gpu_memory_peak']:,.0f} GiB",
            f"{r['first_row_s']:.0f} s",
            whole_text(r),
        )
        for r in sorted(records, key=lambda r: -r["rows_s"])
    ]
    heads = "weights", "copies", "rows", "rows/s", "GPU busy", "memory a GPU", "first row"
    first = records[0]
    title = f"{SIZE[first['size']]}, {WORK[first['work']].partition(':')[0]}, our own sizes"
    return [f"{title}. {setting_of(first)}:", "", *table((*heads, "whole time"), rows)]


def resume(records: list[Record]) -> list[str]:
    """Runs that were stopped and resumed."""
    return [
        f"{SIZE[r['size']]}, {r['work']} task, {r['rows']:,} rows, stopped after 90 % and resumed: "
        f"engines were ready {r['engine_ready_s']:.0f} s after the start, the first new row was in "
        f"an engine {r['first_row_s']:.1f} s after that, and its shard was committed after "
        f"{r['first_commit_s']:.1f} s. {setting_of(r | _about(records))}."
        for r in records
        if r["peer"] == "resume"
    ]


def _about(records: list[Record]) -> Record:
    return {name: records[0][name] for name in ("device", "versions", "date", "file")}


def lora(records: list[Record]) -> list[str]:
    """LoRA adapters by row."""
    names = {"vllm": "`LLM.generate` with a `LoRARequest` a row", "together": "ours, by adapter"}
    rows = [
        (
            f"{names.get(r['peer'], 'ours, in input order')} | {rate_text(r['rows_s'])}",
            rate_text(r["middle_rows_s"]) if "middle_rows_s" in r else "",
            f"{r['gpu']:.0%}" if "gpu" in r else "",
            f"{r['first_row_s']:.0f} s | {whole_text(r)}",
        )
        for r in records
    ]
    heads = "", "rows/s", "middle 70 %", "GPU busy", "first row", "whole time"
    first = records[0]
    return [f"{first['rows']:,} rows. {setting_of(first)}:", "", *table(heads, rows)]


def start(records: list[Record]) -> list[str]:
    """Seconds from the start of the process at which each mark of a start was reached."""
    marks = {
        "planned": "Ray is up, the run is planned",
        "engine starting": "the actor has imported vLLM",
        "vLLM configured": "the core has imported vLLM",
        "processes joined": "the workers have joined",
        "weights loaded": "weights are loaded",
        "compiled": "compiled",
        "CUDA graphs captured": "CUDA graphs are captured",
        "engine ready": "the engine is ready",
        "first row": "first row",
        "all committed": "all rows are committed",
    }
    heads = ["s", *(f"{r['name']}" for r in records)]
    rows = [
        (what, *(f"{r['marks'][mark]:.0f}" for r in records)) for mark, what in marks.items()
    ] + [("rows", *(f"{r['rows']:,}" for r in records))]
    rows += [("rows/s", *(rate_text(r["rows_s"]) for r in records))]
    return [f"{setting_of(records[0])}:", "", *table(heads, rows)]


def images_memory(records: list[Record]) -> list[str]:
    """Memory of each kind of process over a long run with images."""
    (record,) = records
    kinds = {
        "driver": "driver",
        "prepare": "largest prepare process",
        "finish": "largest finish process",
        "store": "object store",
    }
    shown = [record["tenths"][i] for i in (0, 2, 4, 6, 8, 9)]
    heads = ["MiB, at most", *(f"{tenth['rows']:,} photos" for tenth in shown)]
    rows = [(text, *(f"{t[kind]:,.0f}" for t in shown)) for kind, text in kinds.items()]
    return [f"{record['date']}, `{record['file']}`:", "", *table(heads, rows)]


def targets(records: list[Record]) -> list[str]:
    """What was aimed at, and whether it was reached."""
    rows = []
    for group in groups(records):
        chat, mine = chat_record(group), own_record(group)
        what = f"`{group[0]['file']}`"
        for peer, bar in EARLY_TARGETS.items():
            for r in group:
                if r["peer"] == peer and not r.get("mps") and chat and chat["peer"] == "vllm@none":
                    rows.append((what, label_of(r), label_of(chat), r["rows_s"], chat, bar))
        bars = TARGETS.get((group[0]["work"], group[0]["size"]), ())
        for peer in baselines(group):
            for kind, bar in bars:
                if mine and "+" not in mine["peer"] and peer.partition("@")[0] == kind:
                    other = next(r for r in group if r["peer"] == peer)
                    rows.append((what, label_of(mine), label_of(other), mine["rows_s"], other, bar))
    cells = []
    for what, our_name, other_name, rate, other, bar in rows:
        ratio = rate / other["rows_s"]
        verdict = "met" if ratio >= bar else "missed"
        cells.append((what, our_name, other_name, f"{ratio:.2f}", f"{bar}", verdict))
    return table(("result", "ours", "against", "ratio", "target", ""), cells)


def costs(records: list[Record]) -> list[str]:
    """The constants of the cost model, as the code has them."""
    del records
    fitted = cost.FITTED
    values = {
        "host, a step": f"{fitted.host_step * 1e3:.2g} ms",
        "a sequence in a step": f"{fitted.host_sequence * 1e6:.2g} us",
        "in a mixture of experts": f"{fitted.host_experts * 1e6:.2g} us more",
        "under a grammar": f"{fitted.host_grammar * 1e6:.2g} us more",
        "a row": f"{fitted.host_row * 1e3:.2g} ms",
        "share of the smaller of host and GPU that does not overlap": (
            f"{fitted.apart:.2g}, under a grammar {fitted.apart_grammar:.2g}"
        ),
        "reachable share of the card's 16-bit FLOPs": f"{fitted.compute:.2g}",
        "gain with fp8 weights on a card that multiplies fp8": f"{fitted.fp8:g}",
        "speed left where engines share a GPU": f"{fitted.sharing:.2g}",
    }
    return table(("constant of `sizing/cost.py`", "value"), values.items())


VIEWS: dict[str, Callable[[list[Record]], list[str]]] = {
    "summary": summary,
    "rates": rates,
    "gpus": gpus,
    "copies": copies,
    "resume": resume,
    "lora": lora,
    "start": start,
    "images-memory": images_memory,
    "targets": targets,
    "costs": costs,
}


def rendered(page: str) -> str:
    """Return a page's text with all its blocks of figures generated anew."""

    def block(found: re.Match[str]) -> str:
        view, files = found[1], found[2].split()
        if view not in VIEWS:
            raise SystemExit(f"no view {view}; choose one of {', '.join(VIEWS)}")
        lines = VIEWS[view](records_of(files))
        mark = f"<!-- figures: {' '.join([view, *files])} -->"
        return "\n".join([mark, "", *lines, "", "<!-- figures: end -->"])

    return BLOCK.sub(block, page)


def pages() -> list[Path]:
    """Return the pages that may hold figures."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


# --- the plot -----------------------------------------------------------------------------------


def plot(records: list[Record]) -> str:
    """Return an SVG with a bar for each rate, each group on a scale of its own."""
    shown = []
    for group in groups(records):
        rated = [r for r in _sorted(group) if "rows_s" in r]
        if len(rated) > 1:
            first = rated[0]
            title = f"{SIZE[first['size']]}, {WORK[first['work']].partition(':')[0]}"
            title += f", {card_of(first)}, {first['rows']:,} rows, {first['date']}"
            shown.append((title, rated))
    height = 18 + sum(ROW * (len(rated) + 2) for _, rated in shown)

    def draw(panel: drawing.Panel) -> None:
        y = 34.0
        for title, rated in shown:
            panel.text(14, y, title, size=13, color=drawing.INK)
            _bars(panel, y, rated)
            y += ROW * (len(rated) + 2)

    return drawing.svg("Rows per second, peers and this package", [drawing.Plot(height, draw)])


def _bars(panel: drawing.Panel, y: float, rated: list[Record]) -> None:
    """Draw the bars below the title at `y`, slowest first."""
    axes = panel.axes(LEFT, y + ROW / 2, drawing.WIDTH - RIGHT, y + ROW * (len(rated) + 0.5))
    axes.set(xlim=(0, rated[-1]["rows_s"]), ylim=(len(rated) - 0.5, -0.5))
    axes.axis("off")
    rows = range(len(rated))
    mine = [not r["peer"].startswith(tuple(PEERS)) for r in rated]
    colours = [drawing.BLUE if is_ours else drawing.GREY for is_ours in mine]
    axes.barh(rows, [r["rows_s"] for r in rated], 15 / ROW, color=colours, clip_on=False)
    for row, record in enumerate(rated):
        name, rate = label_of(record).replace("`", ""), f"{record['rows_s']:,.0f} rows/s"
        axes.annotate(name, (0, row), (-8, 0), ha="right", size=12, **BESIDE)
        axes.annotate(rate, (record["rows_s"], row), (6, 0), color=drawing.INK, **BESIDE)


def main() -> int:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new = rendered(text)
        if new != text:
            page.write_text(new, encoding="utf-8")
            print(f"{page.relative_to(ROOT)}: figures written")
    PLOT.write_text(plot(plotted_records()) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
