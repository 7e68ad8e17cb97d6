"""What `raybatch --help` shows: groups, summaries, options and examples."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from typing import Any

import pytest
import typer
from helpers.command_line import called
from test_docs import COMMANDS

from prefect_raybatch.cli.arguments import COMMAND_EXAMPLES, GROUPS
from prefect_raybatch.cli.commands import app

NAMES = [name for names in GROUPS.values() for name in names]
VERB = re.compile(r"[A-Z][a-z]+ ")  # a summary begins with what the command does


def parsed(command: str) -> None:
    """Parse a command of ours as it is typed."""
    words = shlex.split(command.partition(" > ")[0])
    assert words[0] == "raybatch"
    COMMANDS[words[1]].make_context(words[1], words[2:])


def test_every_command_is_in_one_group_in_the_order_of_the_help() -> None:
    group: Any = typer.main.get_command(app)
    context = group.make_context("raybatch", [], resilient_parsing=True)
    assert group.list_commands(context) == NAMES == list(COMMAND_EXAMPLES)
    assert sorted(COMMANDS) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_help_ends_with_two_examples_that_parse(name: str, capsys: Any) -> None:
    code, out, _ = called(capsys, name, "--help")
    lines = [line.strip() for line in out.splitlines() if line.strip()]
    assert code == 0 and lines[-3] == "Examples:"
    examples = lines[-2:]
    assert tuple(examples) == COMMAND_EXAMPLES[name]
    for example in examples:
        assert example.startswith(f"raybatch {name}") and len(example) <= 78
        parsed(example)


@pytest.mark.parametrize("name", NAMES)
def test_summaries_and_options_are_one_line_without_a_full_stop(name: str) -> None:
    command = COMMANDS[name]
    assert VERB.match(command.short_help) and not command.short_help.endswith(".")
    assert len(command.short_help) <= 62  # what a terminal of 80 columns has room for
    for param in command.params:
        assert param.help and not param.help.endswith("."), param.name
        assert len(param.help) <= 58 and "\n" not in param.help, param.name


def test_the_help_of_the_program_has_the_groups(capsys: Any) -> None:
    code, out, _ = called(capsys, "--help")
    assert code == 0
    found = re.findall(r"^╭─ (\w[\w ]*?) ─", out, re.M)
    assert found == ["Options", *GROUPS]
    assert "init --example" in out and "<bool>" not in out


def test_the_help_imports_nothing_heavy() -> None:
    heavy = ("ray", "prefect", "vllm", "torch", "transformers", "pandas", "jinja2", "matplotlib")
    code = (
        "import sys\nfrom prefect_raybatch.cli.commands import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr
