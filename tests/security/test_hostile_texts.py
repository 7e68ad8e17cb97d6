"""Texts of the table of attacks in a terminal, a log, Markdown and HTML: shown, nothing else."""

from __future__ import annotations

import ast
import io
import json
import logging
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import markdown as python_markdown
import pytest
import yaml
from attacks import FOREIGN, HIDDEN, HOSTILE_ARGUMENTS, MARKUP
from helpers.hostile import hostile_beat, hostile_cause, hostile_history, hostile_report
from helpers.small import small_run
from markdown_it import MarkdownIt
from prefect.artifacts import MarkdownArtifact, TableArtifact
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

import prefect_raybatch
from prefect_raybatch.api.first_job import ColumnProfile, TableProfile, job_text
from prefect_raybatch.cli import commands as cli
from prefect_raybatch.cli import ending, show, terminal
from prefect_raybatch.flow import artifacts
from prefect_raybatch.flow.page import live_rows
from prefect_raybatch.flow.texts import STORABLE_LINES, make_storable
from prefect_raybatch.harmless import code_span, fenced, link, markdown_text, visible
from prefect_raybatch.remote.logs import MarkedLines, parse
from prefect_raybatch.report.html import history_html, html
from prefect_raybatch.report.report import markdown, table_lines
from prefect_raybatch.report.run_history import history_markdown
from prefect_raybatch.result.verify import Verdict
from prefect_raybatch.stages.vllm.phases import START_PHASES
from prefect_raybatch.words import change_texts
from prefect_raybatch.yaml_text import visible_yaml

DRAWS = True

# What nothing that is shown may hold, but for line ends and tabs.
OBEYED = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ud800-\udfff]"
)
hidden = pytest.mark.parametrize("text", HIDDEN.values(), ids=list(HIDDEN))
markup = pytest.mark.parametrize("text", MARKUP.values(), ids=list(MARKUP))


# --- the terminal -------------------------------------------------------------------------------


@hidden
def test_a_hidden_character_is_shown_as_an_escape(text: str) -> None:
    shown = visible(text)
    assert not OBEYED.search(shown) and visible(shown) == shown
    assert change_texts({text: [text, (text, 1)]}, visible) == {shown: [shown, (shown, 1)]}


def test_other_characters_stay_as_they_are() -> None:
    plain = "line\n\ttab Zürich 🚀 שלום \u200d日本 a\u0301 \xa0 \\x1b"
    assert visible(plain) == plain
    assert visible("\x1b[31m\x9b\u202e") == r"\x1b[31m\x9b\u202e"


@hidden
def test_nothing_that_a_terminal_obeys_passes_the_console(text: str) -> None:
    said = io.StringIO()
    console = terminal.Terminal(file=said, width=200, soft_wrap=True)
    table = Table(title=text)
    table.add_column(text)
    table.add_row(text)
    for one in (text, Text(text), table):
        console.print(one, markup=False)
    with Progress(TextColumn("{task.description}", markup=False), console=console) as bar:
        bar.add_task(text)
    assert not OBEYED.search(said.getvalue())


def test_markup_in_a_text_makes_no_hyperlink() -> None:
    said = io.StringIO()
    console = terminal.Terminal(file=said, force_terminal=True, width=80)
    console.print(f"[link=http://{FOREIGN}]report[/link] [bold]x[/]")
    assert "]8;" not in said.getvalue() and "report" in said.getvalue()


def test_the_command_line_prints_in_one_place() -> None:
    """So that no text can pass it by: what prints else writes JSON, or our own version."""
    folder = Path(prefect_raybatch.__file__).parent / "cli"
    others = Counter[str]()
    for path in sorted(folder.glob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call):
                name = ast.unparse(call.func)
                if name in ("print", "typer.echo", "Console", "rich.print") or ".stdout" in name:
                    others[f"{path.stem}: {ast.unparse(call)}"] += 1
    assert sorted(others) == [
        "commands: typer.echo(f'{name} {metadata.version(name)}')",
        "outputs: print(json.dumps(job_schema(), indent=2))",
        "show: print(json.dumps(finite_in(value), default=str))",
    ]


@hidden
def test_reports_and_verdicts_are_shown_visibly(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text += " [red]x[/nothing] [link=http://evil.test]y :x:"  # neither is rich's markup obeyed
    ending.show_ending(hostile_report(text))
    ending.show_partial_ending(hostile_report(text))
    verdict = Verdict(text, True, 3, faults=[text], orphans=1, orphan_names=[text], strays=[text])
    show.show_verdict(verdict, text)
    show.show_rows([{text: text, "rows": text}])
    show.print_prompt(text, 3, text)
    show.TerminalProgress(False).say(text)
    shown = capsys.readouterr()
    assert not OBEYED.search(shown.out) and not OBEYED.search(shown.err)
    for words in ("[/nothing]", "[link=http://evil.test]", ":x:"):
        assert words in shown.out and words in shown.err
    show.print_json({"text": text})
    assert json.loads(printed := capsys.readouterr().out)["text"] == text
    assert printed.isascii() and not OBEYED.search(printed)


@pytest.mark.parametrize("command", ["status", "verify", "report", "runs", "history"])
def test_a_planted_run_directory_is_shown_visibly(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "out \x1b]0;owned\x07\u202e"
    run = small_run(root / "night")
    run.commit(0, failed=[1])
    (root / "night/_raybatch/commits/\x1b[31m\x9b31m.json").write_text("{}")
    (root / "\x1b[2J/_raybatch").mkdir(parents=True)
    (root / "\x1b[2J/_raybatch/plan.json").write_text("\x1b[31m")
    place = root if command in ("runs", "history") else root / "night"
    for more in ([], ["--json"]):
        with pytest.raises(SystemExit):
            cli.main([command, str(place), *more])
        shown = capsys.readouterr()
        assert not OBEYED.search(shown.out + shown.err) and "\\" in shown.out


def test_an_error_is_told_visibly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["status", str(tmp_path / "no\x1b]0;owned\x07\x9b31m")])
    said = capsys.readouterr().err
    assert r"no\x1b]0;owned\x07\x9b31m" in said and not OBEYED.search(said)


@hidden
@pytest.mark.parametrize("words", HOSTILE_ARGUMENTS, ids=" ".join)
def test_an_argument_error_quotes_what_was_typed_visibly(
    words: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([word.replace("{text}", text) for word in words])
    shown = capsys.readouterr()
    assert ended.value.code == 2 and "Error" in shown.err
    assert not OBEYED.search(shown.out + shown.err)


def test_the_words_of_an_argument_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "a.yaml", "b\x1b[31m\u202e"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "Usage: " in said and "plan --help" in said
    assert re.search(r"Error: Got unexpected extra argument.*b\\x1b\[31m\\u202e", said)


def test_an_error_of_somebody_elses_code_is_told_visibly() -> None:
    script = (
        "from prefect_raybatch.cli import commands\n"
        "def fails(*_): raise LookupError('row \\x1b[31m\\x9b31m\\u202e')\n"
        "commands.status_of = fails\n"
        "commands.main(['status', 'x'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1 and not OBEYED.search(done.stderr)
    assert "Traceback" in done.stderr and r"LookupError: row \x1b[31m\x9b31m\u202e" in done.stderr


def test_log_lines_are_visible_whoever_prints_them() -> None:
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    log = logging.getLogger("somebody.else")
    log.addHandler(handler)
    try:
        with terminal.visible_logs():
            log.warning("row %s of %d", "\x1b[31m\x9b\x85", 3)
            try:
                raise ValueError("\x1b[31m")
            except ValueError:
                log.warning("traceback", exc_info=True)
        log.warning("afterwards \x1b[0m")
    finally:
        log.removeHandler(handler)
    assert r"row \x1b[31m\x9b\x85 of 3" in said.getvalue()
    assert r"ValueError: \x1b[31m" in said.getvalue() and "\x1b[31m" not in said.getvalue()
    assert "afterwards \x1b[0m" in said.getvalue()


@hidden
def test_a_first_job_file_reads_as_it_is(text: str) -> None:
    """Hidden characters of columns, files and options are escapes that YAML reads back."""
    text = text.encode("utf-8", "replace").decode().replace("\0", "")  # no table or file has these
    seen = TableProfile([ColumnProfile(text, f"struct<{text}: string>")], {})
    template = f"Zürich {text} {{a}}"
    made = job_text(
        seen,
        name="x",
        source={"uri": "a.csv"},
        prompt={"template": template},
        model=f"a{text}",
        output="out",
    )
    job = yaml.safe_load(made)
    assert not OBEYED.search(made) and "Zürich" in made
    assert job["engine"]["model"] == f"a{text}" and job["prompt"]["template"] == template


@hidden
def test_a_tuned_job_file_reads_as_it_is(text: str) -> None:
    text = text.encode("utf-8", "replace").decode().replace("\0", "")
    value = {"name": text, text: [text, {"a": f"{text}\n: #"}]}
    made = visible_yaml(value)
    assert yaml.safe_load(made) == value and not OBEYED.search(made)


def test_a_columns_name_adds_nothing_to_a_first_job_file() -> None:
    name = "a\nlimits: {max_failed_fraction: 1.0}\n# \x1b[31m\u202e"
    seen = TableProfile([ColumnProfile(name, "string"), ColumnProfile("b", "string")], {})
    text = job_text(
        seen,
        name="x",
        source={"uri": "in.csv"},
        prompt={"template": "{b}"},
        model="demo",
        output="out",
    )
    assert "limits" not in yaml.safe_load(text) and not OBEYED.search(text)


@hidden
def test_what_prefect_is_told_holds_no_control_character(text: str) -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "a row says %s", (text,), None)
    assert STORABLE_LINES.filter(record) and not OBEYED.search(record.getMessage())
    error = ValueError(text)
    make_storable(error)
    assert not OBEYED.search(str(error))


@hidden
def test_a_row_cannot_forge_a_line_of_a_ray_jobs_log(text: str) -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "row: %s", (text,), None)
    lines = MarkedLines("%(message)s").format(record).splitlines()
    (told,) = parse(lines)
    assert told[0] == logging.INFO and not OBEYED.search(told[1])


# --- Markdown -----------------------------------------------------------------------------------

READER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
TEXTS = ("text", "text_special", "softbreak", "code_inline")


def shape(page: str) -> list[str]:
    """What a reader of Markdown makes of a page, but for its texts; images of ours are named."""
    found: list[str] = []
    for token in READER.parse(page):
        inner = token.children or ()
        images = [str(one.attrs["src"])[:10] for one in inner if one.type == "image"]
        kinds = [one.type for one in inner if one.type not in TEXTS]
        found += [token.type + token.info, *images, *kinds]
    return found


def page_texts(page: str) -> str:
    """What people read of a page."""
    inner = (token.children or [token] for token in READER.parse(page))
    return "".join(one.content for tokens in inner for one in tokens)


class Tags(HTMLParser):
    """The tags of a page, but for those that only say how text looks."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "code":
            self.found.append(" ".join([tag, *(f"{name}={value}"[:20] for name, value in attrs)]))


def live(page: str) -> list[str]:
    """The addresses that GitHub's and Prefect's readers make links of without brackets."""
    outside = re.sub(r"^(`{3,})$.*?^\1$|^ {4}.*?$", "", page, flags=re.M | re.S)
    outside = re.sub(r"(?<!\\)`[^`\n]*`", "", outside)
    return re.findall(r"(?i)(?:https?|ftp)://\S+|(?<!\w)www\.\S+|(?<![\\])\w@\w\S+", outside)


@markup
def test_a_text_in_markdown_is_text(text: str) -> None:
    made = markdown_text(text)
    assert "\n" not in made and "<" not in made and not live(made), made
    plain = [*shape("x"), *Tags(python_markdown.markdown("x")).found]
    assert [*shape(made), *Tags(python_markdown.markdown(made)).found] == plain, made
    assert page_texts(made) == " ".join(text.split())
    in_table = [*shape("| a | b |\n| --- | --- |\n| x | y |")]
    assert shape(f"| a | b |\n| --- | --- |\n| {made} | y |") == in_table
    assert shape(f"# {made}: x") == shape("# x: x") and shape(f"- {made}") == shape("- x")
    assert shape(f"a {code_span(text)} b") == shape("a x b")


@markup
def test_a_block_of_code_is_not_left(text: str) -> None:
    lines = fenced(["before", text, "after"])
    assert shape("\n".join(["x", "", *lines, "", "x"])) == shape("x\n\n```\nx\n```\n\nx")


@markup
@pytest.mark.parametrize(
    "made",
    [
        lambda text: markdown(hostile_report(text)),
        lambda text: history_markdown(hostile_history(text), plots=False),
        lambda text: hostile_cause(text).markdown(),
        lambda text: "\n".join(table_lines(live_rows(hostile_beat(text)))),
        lambda text: "\n".join(table_lines([{text: text, "b": text}])),
    ],
    ids=["report", "history", "failure", "live", "table"],
)
def test_pages_of_hostile_texts_have_the_shape_of_plain_ones(made, text: str) -> None:
    page = made(text)
    whole = re.sub(r"data:image/svg\+xml;base64,[\w+/=]*", "data:", page)
    assert shape(whole) == shape(re.sub(r"data:image/svg\+xml;base64,[\w+/=]*", "data:", made("x")))
    assert not live(whole), whole
    tags = Tags(python_markdown.markdown(whole, extensions=["tables", "fenced_code"])).found
    assert not [tag for tag in tags if not re.match(r"[a-z0-9]+( style=text-align.*)?\Z", tag)
                and not tag.startswith("img alt=Nights src=data:")]  # fmt: skip


def test_hidden_characters_are_seen_in_markdown_and_html() -> None:
    texts = list(HIDDEN.values())
    for made in (
        markdown(hostile_report(*texts)),
        history_markdown(hostile_history(*texts), plots=False),
        hostile_cause(*texts).markdown(),
        html(hostile_report(*texts)),
        history_html([hostile_history(*texts)]),
    ):
        assert not OBEYED.search(made) and r"\u202e" in made


def test_texts_that_are_no_attack_are_readable() -> None:
    for plain in (
        *(
            "data/part-00000.parquet",
            "/runs/run_key_1",
            "2 h 07 min",
            "50.0% -> 30.0%",
            "a & b",
            "-",
        ),
        *("1,234.5", "KeyError: 'Company'", "node-1:4711", "engine.max_num_seqs: 8", "why (not)!"),
        *START_PHASES,
    ):
        assert markdown_text(plain) == plain
    hosted = "smallB@http://127.0.0.1:8000/v1"
    assert markdown_text(f"{hosted} and a@b.c") == f"`{hosted}` and `a@b.c`"
    assert code_span("out/night_1") == "`out/night_1`"


def test_only_the_dashboards_plain_address_is_a_link() -> None:
    for plain in ("http://10.0.0.7:8265", "https://ray.example.com/x/#/jobs"):
        assert markdown_text(link(plain)) == plain and plain in html(hostile_report(plain))
    for odd in ("javascript:alert(1)", "http://a@b/", "http://a/)", "http://a/ x", "http://a/<b>"):
        assert not live(markdown_text(link(odd)))
    page = html(hostile_report("https://ray.example.com"))
    assert page.count("<a ") == 1  # of the dashboard, though nodes and files are called so, too


# --- artifacts ----------------------------------------------------------------------------------


@markup
def test_cells_of_an_artifact_are_escaped_for_the_page(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect's page reads each text of a table as Markdown."""
    kept: list[TableArtifact] = []

    def create(self: TableArtifact, **_: object) -> TableArtifact:
        kept.append(self)
        self.__dict__["id"] = None
        return self

    monkeypatch.setattr(TableArtifact, "create", create)
    artifacts.put(TableArtifact(table=[{"what": text, "rows": 3}]), "a-key")
    (made,) = kept
    assert made.table == [{"what": markdown_text(text), "rows": 3}]


@hidden
def test_artifacts_hold_no_hidden_characters(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[MarkdownArtifact] = []

    def create(self: MarkdownArtifact, **_: object) -> MarkdownArtifact:
        kept.append(self)
        self.__dict__["id"] = None
        return self

    monkeypatch.setattr(MarkdownArtifact, "create", create)
    artifacts.put(MarkdownArtifact(markdown=f"a {text}", description=text), "a-key")
    assert not OBEYED.search(f"{kept[0].markdown}{kept[0].description}")
