"""The command `init`: write a first job file for a table, by options or by questions."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from prefect_raybatch.cli.arguments import field_changes, in_catalog
from prefect_raybatch.cli.ending import print_next
from prefect_raybatch.cli.terminal import err
from prefect_raybatch.errors import ConfigError, RayBatchError
from prefect_raybatch.harmless import visible
from prefect_raybatch.job.job_file import with_fields
from prefect_raybatch.job.table_formats import format_of_scheme, scheme_of
from prefect_raybatch.model.pinned import DEMO
from prefect_raybatch.words import counted

first_job_file = typer.Typer()
# The option of `init` for a field of the source; the others are set by --set.
OPTION_OF_FIELD = {
    "source.format": "--format",
    "source.query": "--query",
    "source.csv.delimiter": "--delimiter",
    "source.csv.encoding": "--encoding",
}


def _text_option(metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, help=text)


Text = str | None


@first_job_file.command(**in_catalog("init"))
def init(
    table: Annotated[
        Text, typer.Argument(metavar="TABLE", help="File, folder, table or database to read")
    ] = None,
    file: Annotated[Path, _text_option("FILE", "Job file to write")] = Path("job.yaml"),
    name: Annotated[Text, _text_option("NAME", "Name of the job; else that of the table")] = None,
    template: Annotated[
        Text, _text_option("TEXT", "Prompt of a row, with {Column} for values")
    ] = None,
    function: Annotated[
        Text, _text_option("FILE.py:NAME", "Function that builds the prompt, instead of a template")
    ] = None,
    model: Annotated[Text, _text_option("MODEL", "Hugging Face name or local folder")] = None,
    output: Annotated[Text, _text_option("OUTPUT", "Folder of the runs")] = None,
    format: Annotated[Text, _text_option("FORMAT", "Format, if the name does not tell it")] = None,
    query: Annotated[Text, _text_option("SELECT", "Query of a database")] = None,
    delimiter: Annotated[Text, _text_option("C", "Delimiter of CSV files; tab for a tab")] = None,
    encoding: Annotated[Text, _text_option("NAME", "Encoding of CSV files, e.g. cp1252")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="FIELD=VALUE", help="Set another field of the source; repeatable"
        ),
    ] = None,
    example: Annotated[
        bool, typer.Option("--example", help="Write companies.csv and a job for it")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist")] = False,
) -> None:
    """Write a commented job file for a table.

    In a terminal it prompts for missing options; elsewhere it uses the defaults. With --example
    it writes a table of 300 companies and a job for it into the current folder.
    """
    if example == (table is not None):
        raise ConfigError("init needs either TABLE or --example. Try `raybatch init --help`.")
    if example:
        _write_example(force)
        return
    if file.exists() and not force:
        raise ConfigError(f"{file} already exists. Name another --file, or replace it with --force")
    if template is not None and function is not None:
        raise ConfigError("--template and --function exclude each other. Use one of them.")
    changes = {
        "source.format": format,
        "source.query": query,
        "source.csv.delimiter": delimiter,
        "source.csv.encoding": encoding,
    }
    source = _source(str(table), changes, set_)
    prompt = {"template": template} if template is not None else {}
    prompt |= {"function": function} if function is not None else {}
    _write_first_job(source, file, name, prompt, model, output)


def _write_example(force: bool) -> None:
    from prefect_raybatch.api import first_job

    for path in first_job.write_example(Path(), force):
        err.print(f"wrote {path}", markup=False)
    print_next("raybatch", "preview", first_job.EXAMPLE_JOB)


def _source(table: str, changes: dict[str, str | None], set_: list[str] | None) -> dict[str, Any]:
    """Return the job's source fields for `table`; ask on a terminal for a database's missing query.

    `changes` are {field: value of its option, or None}, `set_` the changes of `--set`. Raises
    `ConfigError` if a query is missing and cannot be asked for.
    """
    others = field_changes(set_)
    for field in others:
        if not field.startswith("source."):
            raise ConfigError(f"--set {field}: init sets fields of source only. Edit the job file")
    given = {field: value for field, value in changes.items() if value is not None}
    _refuse_database_file(table, changes["source.query"])
    if format_of_scheme(scheme_of(table)) == "sql" and not {"source.query"} & {*given, *others}:
        if not sys.stdin.isatty():
            raise ConfigError(
                f'{table} is a database. Add --query "SELECT ... FROM ... ORDER BY ..." with the '
                "rows to read and a unique key"
            )
        given["source.query"] = _answer("Query (SELECT ... ORDER BY a unique key)")
    made: dict[str, Any] = with_fields({"source": {"uri": table}}, {**given, **others})["source"]
    return made


def _refuse_database_file(table: str, query: str | None) -> None:
    """Raise `ConfigError` if `table` is a database file.

    The message shows the `raybatch init` command to type instead.
    """
    from prefect_raybatch.source.find import database_of_file

    if "://" not in table and (dialect := database_of_file(table)) is not None:
        query = query or "SELECT ... FROM ... ORDER BY ..."
        command = shlex.join(["raybatch", "init", f"{dialect}:///{table}", "--query", query])
        raise ConfigError(f"{table} is a database, not a table. Write: {command}")


def _write_first_job(
    source: dict[str, Any],
    file: Path,
    name: str | None,
    prompt: dict[str, str],
    model: str | None,
    output: str | None,
) -> None:
    """Write a job file for a table; print its columns, and the next command.

    A missing prompt, `model` or `output` is asked for on a terminal; elsewhere it gets a default. A
    missing `name` is made from that of the table.
    """
    from prefect_raybatch.api import first_job

    table = str(source["uri"])
    with _options_named():
        seen = first_job.profile_table(source)
    columns = seen.columns
    if "template" in prompt:
        first_job.check_first_template(prompt["template"], columns)
    elif not prompt:
        prompt = first_job.default_prompt(columns)
        if "template" in prompt and sys.stdin.isatty():
            err.print(f"columns: {', '.join(one.name for one in columns)}", markup=False)
            prompt["template"] = _answer(
                "Prompt of a row",
                prompt["template"],
                lambda text: first_job.check_first_template(text, columns),
            )
    question = "Model (demo only knows the industries of companies)"
    model = _option_or_answer(question, model, DEMO)
    text = first_job.job_text(
        seen,
        name=name or first_job.name_of(table),
        source=source,
        prompt=prompt,
        model=model,
        output=_option_or_answer("Folder of the runs", output, "out"),
    )
    file.write_text(text, encoding="utf-8")
    err.print(f"wrote {file}: {counted(len(columns), 'column')} in {table}", markup=False)
    _warn_of_first_job(source, model)
    words = ["raybatch", "preview", str(file)]
    if seen.guessed:
        guess = f"source.csv.encoding: {seen.csv['encoding']}"
        err.print(f"{table} is not UTF-8, and {guess} is a guess. Check the prompts.", markup=False)
        words.append("--no-answers")
    print_next(*words)


def _warn_of_first_job(source: dict[str, Any], model: str) -> None:
    """Print a warning if the model is the demo model, and one if the query has no ORDER BY."""
    from prefect_raybatch.api import first_job

    if model == DEMO:
        warning = f"{first_job.DEMO_WARNING} For anything else set engine.model, or use --model."
        err.print(warning, markup=False)
    query = source.get("query")
    if query is not None and not re.search(r"\border\s+by\b", query, re.IGNORECASE):
        err.print(
            "The query has no ORDER BY, so the order of rows may change each time. "
            "End it with ORDER BY and a unique key.",
            markup=False,
        )


@contextmanager
def _options_named() -> Iterator[None]:
    """Add to an error of the `with` block the options of `init` that would help.

    These are the options for the source fields that the message names. The error is raised again.
    """
    try:
        yield
    except RayBatchError as error:
        remedy = str(error).partition(": ")[2] or str(error)
        fields = dict.fromkeys(re.findall(r"\bsource\.(?!uri\b)[a-z]+(?:\.[a-z_]+)?", remedy))
        ways = [OPTION_OF_FIELD.get(field, f"--set {field}=VALUE") for field in fields]
        if not ways:
            raise
        raise type(error)(f"{error} (here: {', '.join(ways)})") from None


def _option_or_answer(question: str, option: str | None, default: str) -> str:
    """Return the option's value; if None, ask `question` on a terminal, else return the default."""
    if option is not None or not sys.stdin.isatty():
        return option or default
    return _answer(question, default)


def _answer(
    question: str, default: str | None = None, check: Callable[[str], str] | None = None
) -> str:
    """Ask `question` until `check` raises no `ConfigError`; return what `check` returns."""

    def accepted(text: str) -> str:
        try:
            return text if check is None else check(text)
        except ConfigError as error:
            raise typer.BadParameter(visible(str(error))) from None

    shown = visible(question if default is None else f"{question} [{default}]")
    answer: str = typer.prompt(
        shown, default=default, show_default=False, err=True, value_proc=accepted
    )
    return answer
