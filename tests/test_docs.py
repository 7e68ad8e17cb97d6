"""The documentation says what the code does: fields, commands, links, modules, and is short.

`python tests/test_docs.py` prints the rows of docs/reference/job.md as they should be, and
`python tests/test_docs.py --write` writes them anew, and the tables between
`<!-- generated: NAME -->` and `<!-- end: NAME -->` in the other reference pages.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from helpers.pages import DOCS, FENCE, PAGES, ROOT, page_name, pages_in
from helpers.reference_tables import COMMANDS, GENERATED, TABLES, generated, rewritten
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from prefect_raybatch.api.sending import OUTPUT_ENV
from prefect_raybatch.cli.commands import INTERRUPTED, exit_status
from prefect_raybatch.cli.recovery import DRAINED_STATUS, PARTIAL_STATUS
from prefect_raybatch.compile.job import model_request
from prefect_raybatch.driver.metrics import COMPLETED_METRIC, COUNTERS, GAUGES
from prefect_raybatch.errors import IncompleteRun
from prefect_raybatch.flow.artifacts import ARTIFACT_KINDS
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.counted_fields import FREE_ENGINE_ARGUMENTS
from prefect_raybatch.ledger.stats import MEANS, PEAKS
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.stages.vllm.engine_errors import PLACE as LAST_WORDS
from prefect_raybatch.stages.vllm.forking import FIRST_VARIABLE
from prefect_raybatch.stages.vllm.phases import PHASES_PLACE

PACKAGE = ROOT / "prefect_raybatch"
SMALL = {
    "name": "j",
    "source": {"uri": "in"},
    "prompt": {"template": "x"},
    "output": {"uri": "out"},
}
NAMES = {str: "text", int: "whole number", float: "number", bool: "true or false", Any: "any"}


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


# --- docs/reference/job.md: the fields ----------------------------------------------------------


def kind(annotation: Any) -> str:
    """A field's type in words: `text or list of text`; None is left out."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inside)
    if origin in (Union, types.UnionType):
        kinds = [item for item in inside if item is not type(None)]
        if set(kinds) == {int, float}:
            return "number"
        return " or ".join(kind(item) for item in kinds)
    if origin is list:
        return f"list of {kind(inside[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    if origin is dict:
        return "mapping" if inside[1] is Any else f"mapping to {kind(inside[1])}"
    return NAMES[annotation]


def shown(default: Any) -> str:
    if default is PydanticUndefined:
        return "required"
    return "none" if default is None else f"`{str(default).lower()}`"


def rows(model: type[BaseModel], prefix: str = "", given: BaseModel | None = None) -> list[str]:
    """One table row for each field that holds a value: path, type, default, title, text."""
    found = []
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        default = field.default if given is None else getattr(given, name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            group = default if isinstance(default, BaseModel) else None
            found += rows(field.annotation, f"{path}.", group)
            continue
        if field.default_factory is not None and given is None:
            default = field.default_factory()  # type: ignore[call-arg]
        told = f"{field.title}. {field.description}"
        cells = (f"`{path}`", kind(field.annotation), shown(default), told)
        found.append("| " + " | ".join(cells) + " |")
        inside = get_args(field.annotation)
        if inside and isinstance(inside[0], type) and issubclass(inside[0], BaseModel):
            found += rows(inside[0], f"{path}.")  # of each in the list
    return found


@pytest.mark.parametrize("row", rows(BatchJob), ids=lambda row: row.split("`")[1])
def test_every_job_field_stands_in_its_table(row: str) -> None:
    assert row in text_of("reference/job.md").splitlines(), (
        f"docs/reference/job.md needs the row:\n{row}"
    )


def test_no_row_tells_of_a_field_that_is_gone() -> None:
    lines = text_of("reference/job.md").splitlines()
    tables = [line for line in lines if re.match(r"\| `[a-z_.]+` \| .* \| .* \| .* \|$", line)]
    assert tables == rows(BatchJob)


def test_the_full_example_is_a_job_that_uses_only_known_fields() -> None:
    import yaml

    blocks = re.findall(r"```yaml\n(name: .*?)```", text_of("reference/job.md"), re.S)
    assert blocks
    for block in blocks:
        BatchJob.from_dict(yaml.safe_load(block))


def test_the_examples_of_the_chat_page_are_jobs_and_a_conversation() -> None:
    import yaml

    from prefect_raybatch.stages.conversations import messages_of

    jobs = re.findall(r"```yaml\n(.*?)```", text_of("how-to/chat-and-tools.md"), re.S)
    made = [BatchJob.from_dict(yaml.safe_load(block)) for block in jobs]
    assert [job.name for job in made] == ["sums", "weather"]
    (chat,) = re.findall(r"```json\n(.*?)```", text_of("how-to/chat-and-tools.md"), re.S)
    asked, called, told = messages_of(chat, "chat")
    assert called["tool_calls"][0]["function"]["arguments"] == {"city": "Bonn"}
    assert (asked["role"], told["tool_call_id"]) == ("user", "c1")


def test_the_engine_arguments_that_may_change_are_all_named() -> None:
    _, _, rest = text_of("reference/job.md").partition("these are free as well:\n")
    named = re.findall(r"`(\w+)`", rest.strip().split("\n\n")[0])
    assert set(named) == FREE_ENGINE_ARGUMENTS


def test_what_the_command_line_sets_is_told_as_it_is() -> None:
    source = (PACKAGE / "cli/drive.py").read_text(encoding="utf-8")
    pairs = re.findall(r'os\.environ\.setdefault\("(\w+)", "(\w+)"\)', source)
    _, _, rest = text_of("reference/environment.md").partition("sets these for its own process")
    assert pairs and sorted(re.findall(r"`(\w+)=(\w+)`", rest)) == sorted(pairs)


def test_the_page_says_which_engine_arguments_reach_the_cpu_stages() -> None:
    from prefect_raybatch.model.pinned import with_arguments

    _, _, rest = text_of("reference/job.md").partition("The CPU stages load the tokenizer")
    both, _, engine_only = rest.partition(" only.")[0].partition(";")
    reach, stay = re.findall(r"`(\w+)`", both), re.findall(r"`(\w+)`", engine_only)
    job = BatchJob.from_dict({**SMALL, "engine": dict.fromkeys([*reach, *stay], "x")})
    assert reach and set(with_arguments({}, model_request(job.engine))) == set(reach)


def sources() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py")))


def test_every_environment_variable_of_ours_is_told() -> None:
    ours = set(re.findall(r'"(RAYBATCH_[A-Z_]+)"', sources()))
    ours -= {FIRST_VARIABLE, OUTPUT_ENV, LAST_WORDS, PHASES_PLACE}  # set by us alone
    told = re.findall(r"^\| (.*?) \| .* \| .* \|$", text_of("reference/environment.md"), re.M)
    assert ours and ours <= {name for cell in told for name in re.findall(r"`(\w+)`", cell)}


def test_every_event_and_metric_is_told() -> None:
    events = set(re.findall(r'(?:emit|events\.send)\(\s*"([a-z.]+)"', sources()))
    metrics = {f"{name}_total" for name in COUNTERS} | set(GAUGES) | {COMPLETED_METRIC}
    page = text_of("reference/events-and-metrics.md")
    assert len(events) == 17 and len(metrics) > 10
    assert set(re.findall(r"^\| `raybatch\.([a-z.]+)` \|", page, re.M)) == events
    assert set(re.findall(r"`(raybatch_[a-z_]+)`", page)) == metrics


def test_every_field_of_the_report_is_told() -> None:
    page, _, _ = text_of("reference/report.md").partition("## Figures")
    told = re.findall(r"^\| `(\w+)` \|", page, re.M)
    assert sorted(told) == sorted(field.name for field in fields(RunReport))


def test_every_figure_of_the_report_is_told() -> None:
    _, _, rest = text_of("reference/report.md").partition("## Figures")
    told = re.findall(r"^\| `(\w+)` \|", rest.split("\n## ")[0], re.M)
    assert sorted(told) == sorted([*MEANS, *PEAKS])


# --- commands, errors, modules ------------------------------------------------------------------


def options_of(command: str) -> set[str]:
    return {
        opt for param in COMMANDS[command].params for opt in [*param.opts, *param.secondary_opts]
    }


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_commands_and_options_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        # A line of code may go on to a comment or, in a table, to another command.
        for call in re.finditer(r"(?<![\w-])raybatch ([a-z][a-z-]*)([^`#|]*)", line):
            command, rest = call.groups()
            assert command in COMMANDS, f"{page_name(page)}: {line}"
            unknown = set(re.findall(r"(?<!\S)--[a-z-]+", rest)) - options_of(command)
            assert not unknown, f"{page_name(page)}: {line}"
        for arguments in re.findall(r'make demo ARGS="([^"]*)"', line):
            assert set(re.findall(r"--[a-z-]+", arguments)) <= options_of("demo"), line
    known = {"--help", "--version"}.union(*map(options_of, COMMANDS))
    for option in re.findall(r"`(--[a-z-]+)", text):
        assert option in known, f"{page_name(page)}: {option}"


def test_every_exit_status_is_explained() -> None:
    page, _, _ = text_of("reference/errors.md").partition("## Errors of a run")
    told = {int(number) for number in re.findall(r"^\| (\d+) \|", page, re.M)}
    ours = {0, 1, 2, PARTIAL_STATUS, DRAINED_STATUS, 75, INTERRUPTED}
    assert told == ours and exit_status(IncompleteRun()) == 75


def test_every_artifact_is_explained() -> None:
    _, _, rest = text_of("reference/events-and-metrics.md").partition("## Artifacts")
    told = set(re.findall(r"^\| `([a-z-]+)` \|", rest.split("\n## ")[0], re.M))
    assert told == {*ARTIFACT_KINDS, "backfill"}


@pytest.mark.parametrize("page", pages_in("reference"), ids=page_name)
def test_generated_tables_are_as_the_code_is(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert rewritten(text) == text, "run `python tests/test_docs.py --write`"


def test_every_generated_table_stands_in_a_page() -> None:
    told = [name for page in pages_in("reference") for name in generated(page.read_text("utf-8"))]
    assert sorted(told) == sorted(TABLES)


def test_the_room_table_names_every_room() -> None:
    """Every package and module right below ours has its duty there."""
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    table = re.findall(r"^\| `(\w+)(?:/|\.py)` \| .+ \|$", text_of("architecture.md"), re.M)
    assert sorted(table) == sorted(rooms - {"__init__", "__pycache__"})


def symbols_of(path: Path) -> set[str]:
    """The names that a module defines: its functions, classes and values, and those of classes."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        for inner in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(inner, ast.FunctionDef):
                names.add(f"{node.name}.{inner.name}")
    return names


WHERE = text_of("architecture.md").partition("## Where is ...?")[2].partition("\n## ")[0]
NAMED = re.compile(r"`(prefect_raybatch/[\w/]+\.py)`: (`[\w.]+`(?:, `[\w.]+`)*)")


def test_where_is_names_symbols_of_the_files_that_it_names() -> None:
    rows = re.findall(r"^\| (.+) \| (.+) \|$", WHERE.partition("Everything else")[0], re.M)[2:]
    assert len(rows) > 25
    assert [behaviour for behaviour, place in rows if not NAMED.search(place)] == []
    for file, symbols in NAMED.findall(WHERE):
        lacking = set(re.findall(r"`([\w.]+)`", symbols)) - symbols_of(ROOT / file)
        assert not lacking, f"{file} does not define {sorted(lacking)}"


def test_every_file_that_a_page_names_is_there() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(
            r"`((?:prefect_raybatch|tests|flows|training|stages|deployments|docs|benchmarks)"
            r"/(?:[\w/-]*/|[\w/-]*\.\w+)?)`",
            text,
        ):
            there = ROOT / name, PACKAGE / name
            assert any(path.exists() for path in there), f"{page_name(page)}: {name}"


# --- links --------------------------------------------------------------------------------------


def slugs(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), f"{page_name(page)} links to {target}"
        if anchor and other.suffix == ".md":
            assert anchor in slugs(other), f"{page_name(page)} links to {target}"


def test_the_site_is_built_and_each_of_its_links_and_anchors_leads_somewhere(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in tmp_path.rglob("*.html"):  # an item that Markdown took for the paragraph before it
        assert not re.findall(r"^- .*", page.read_text(encoding="utf-8"), re.M), page.name
    assert "raybatch retry-failed" in (tmp_path / "search/search_index.json").read_text()


def test_the_list_of_pages_names_every_page_once() -> None:
    listed = re.findall(r"\]\(([\w./-]+\.(?:md|ipynb))\)", text_of("README.md"))
    every = [*PAGES, *DOCS.rglob("*.ipynb")]
    own = [page.relative_to(DOCS).as_posix() for page in every if page.is_relative_to(DOCS)]
    pages = [name for name in own if name != "README.md" and not name.startswith("decisions/")]
    inside = [name for name in listed if not name.startswith(("../", "decisions/"))]
    assert sorted(inside) == sorted(pages)


# --- length -------------------------------------------------------------------------------------


def word_count(lines: Iterable[str]) -> int:
    """Return how many words the lines have; rules and bars of tables are none."""
    return sum(any(c.isalnum() for c in word) for line in lines for word in line.split())


def words(page: Path) -> int:
    """Return how many words a page has, code and tables included."""
    return word_count(page.read_text(encoding="utf-8").splitlines())


def counted_words(page: Path) -> int:
    """Return how many words a page has outside fenced code and generated rows of tables."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    lines = GENERATED.sub(lambda block: re.sub(r"^\|.*$", "", block[0], flags=re.M), text)
    fields_of_the_job = set(rows(BatchJob))
    return word_count(line for line in lines.splitlines() if line not in fields_of_the_job)


def test_the_documentation_is_short() -> None:
    """Decisions, fenced code blocks and the table rows that are generated from the code (by
    `rows(BatchJob)` or helpers/reference_tables.py) do not count; everything else does.

    3,200 of the words came with rooms of their own: quality, hosted models and their batches, batch
    files, diff, distill, Google and Azure."""
    counted = {page: counted_words(page) for page in PAGES if page not in pages_in("decisions")}
    longest = sorted(((n, page_name(page)) for page, n in counted.items()), reverse=True)[:8]
    assert sum(counted.values()) <= 39_400, f"{sum(counted.values())} words; the longest: {longest}"


@pytest.mark.parametrize("page", pages_in("how-to"), ids=page_name)
def test_a_how_to_page_is_short(page: Path) -> None:
    assert words(page) <= 600


@pytest.mark.parametrize("page", pages_in("decisions"), ids=page_name)
def test_a_decision_page_is_short(page: Path) -> None:
    assert words(page) <= 300


def test_the_glossary_is_short() -> None:
    assert text_of("glossary.md").count("\n") <= 40


def test_long_pages_begin_with_a_summary() -> None:
    for page in PAGES[1:]:
        text = page.read_text(encoding="utf-8")
        if text.count("\n") > 200 and page not in pages_in("tutorials"):
            head = text.split("\n#")[0]
            assert "**In short.**" in head, page_name(page)


def write_tables() -> None:
    """Write the generated tables of the reference pages anew, and the fields that job.md has."""
    fresh = {row.split("`")[1]: row for row in rows(BatchJob)}
    for page in pages_in("reference"):
        text = rewritten(page.read_text(encoding="utf-8"))
        if page.name == "job.md":
            found = re.compile(r"^\| `([a-z_.]+)` \| .* \| .* \| .* \|$", re.M)
            text = found.sub(lambda row: fresh.get(row[1], row[0]), text)
        if text != page.read_text(encoding="utf-8"):
            page.write_text(text, encoding="utf-8")
            print(page_name(page))


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        write_tables()
    else:
        print("\n".join(rows(BatchJob)))
