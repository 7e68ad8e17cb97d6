"""Each command that a page gives is run here in a folder with a finished run, or is read by the
program whose it is, as far as that goes without what it needs: a server, a cluster, an index."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.command_line import called
from helpers.industries import finished_night, stand_in
from helpers.pages import PAGES, ROOT, blocks, commands, page_name
from helpers.reference_tables import COMMANDS
from prefect.cli._app import _app as PREFECT
from prefect.utilities.callables import parameter_schema
from test_deployments import DEPLOYMENTS
from test_docs import SMALL

from prefect_raybatch import batch_inference
from prefect_raybatch.job.batch_job import BatchJob

TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
GIVEN = sorted({command for text in TEXTS.values() for command in commands(text)})

# What a page leaves to its reader, and what stands for it in the folder of these tests.
PLACES = {
    "JOB": "job.yaml",
    "TABLE": "customers.csv",
    "RUN_DIR": "out/monday",
    "OUTPUT": "out",
    "FILE": "report.html",
    "N": "1",
    "ID": "37fdf645-8aa4-4cc3-a229-5692f77eb581",
    "fixed.yaml": "job.yaml",
}
# Read by the command line and not run here: why, and where they are run.
READ = {
    "batch": "a real engine: tests/batches/test_batch_real.py",
    "demo": "a real engine: tests/test_wheel.py",
    "doctor": "a real engine: tests/test_wheel.py",
    "tune": "engines for minutes: tests/runs/test_tune.py",
    "distill": "a real engine: tests/distill/test_distill_real.py",
    "reconcile": "a job server: tests/flow/test_browser.py",
}
# Other programs' commands: why they are not run here.
ELSEWHERE = {
    r"(uv )?pip (install|uninstall|wheel|freeze) ": "an environment is there; tests/test_wheel.py",
    r"apt-get install ": "the machine has what it needs",
    r"(cd|mkdir|source|export|kill) ": "the reader's shell; tests/tour",
    r"kubectl ": "no cluster is here; tests/kuberay asks an API server that stands in",
    r"ray start": "tests/helpers/ray_head.py starts a head",
    r"ray drain-node": "SIGTERM drains a node by the same call: tests/cluster/test_cluster.py",
    r"ray get-auth-token": "prints a head's token, as in tests/cluster/test_tokens.py",
}
# What is rightly refused in this folder, and what is said then.
REFUSED = {
    "--error EngineDied": "no row",
    "--error AnswerCutOff": "no row",
    "flows/image_captions.yaml": "'data/images' does not exist",
    "raybatch publish": "no `output.publish`",
    "engine.replicas=2": "too small",
    "--partial": "is complete",
    "raybatch drain": "is complete",
    "raybatch backfill": "no {run_date}",
    "limits.max_cost": "price_per_gpu_hour",
}
VERB = re.compile(r"raybatch( [a-z-]+)?(( --[a-z-]+)?( \.\.\.)?)?")  # a command is spoken of
OURS = [command for command in GIVEN if command.startswith("raybatch ")]
RUN = [command for command in OURS if not VERB.fullmatch(command)]


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table, a job and a finished run of it, of which one row failed."""
    return finished_night(tmp_path_factory.mktemp("night"))


def filled(command: str) -> list[str]:
    """The arguments of a command of ours, with the folder's own for what is left to the reader."""
    words = shlex.split(command.removesuffix(" &"))[1:]
    return [PLACES.get(word, word) for word in words]


@pytest.mark.parametrize("command", RUN)
def test_a_command_of_ours_does_what_it_is_given_for(command, night, tmp_path, monkeypatch, capsys):
    verb, *rest = filled(command)
    if verb in READ:
        COMMANDS[verb].make_context(verb, list(rest))
        return
    shutil.copytree(night, tmp_path / "night", symlinks=True)
    monkeypatch.chdir(tmp_path / "night")
    stand_in(tmp_path, monkeypatch)
    if "monday.r1" in command:
        assert called(capsys, "retry-failed", "out/monday", "--no-prefect")[0] == 0
    if verb in ("run", "retry-failed"):
        rest.append("--no-prefect")
    if verb == "init":
        rest += ["--file", "other.yaml"]
    code, out, err = called(capsys, verb, *rest)
    for words, said in REFUSED.items():
        if words in command:
            assert code in (1, 2) and said in err + out, out + err
            return
    wrong = f"it fails; where that is right here, say so in REFUSED:\n{out}{err}"
    assert code == 0 or (verb == "plan" and code == 1), wrong


def test_commands_that_are_spoken_of_are_there() -> None:
    for command in set(OURS) - set(RUN):
        _, *words = command.split()
        if words and words[0] in COMMANDS:
            known = {option for part in COMMANDS[words[0]].params for option in part.opts}
            assert set(words[1:]) <= known | {"..."}, command
        else:
            assert words in (["--version"], ["..."]), command


# --- of other programs ----------------------------------------------------------------------------


@pytest.mark.parametrize("command", [c for c in GIVEN if c.startswith("prefect ")])
def test_prefect_takes_its_commands(command: str) -> None:
    _, *words = [PLACES.get(word, word) for word in shlex.split(command)]
    if len(words) < 3 and words[-1] in ("deploy", "create"):
        return  # spoken of
    PREFECT.parse_args(words, exit_on_error=False, print_error=False)
    if words[:2] == ["deployment", "run"]:
        assert words[2].partition("/")[2] in DEPLOYMENTS
        given = [word for at, word in enumerate(words) if words[at - 1] == "-p"]
        known = parameter_schema(batch_inference).properties
        assert {text.partition("=")[0] for text in given} <= set(known)
    if "--prefect-file" in words:
        assert (ROOT / words[words.index("--prefect-file") + 1]).exists()
    if words[:1] == ["deploy"] and ".py:" in words[1]:
        path, _, flow = words[1].partition(":")
        assert f"def {flow}(" in (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("command", [c for c in GIVEN if c.startswith(("python ", "make "))])
def test_scripts_and_targets_are_there_with_their_options(command: str) -> None:
    program, name, *rest = shlex.split(command)
    if program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert re.search(rf"^{re.escape(name)}:", makefile, re.M), command
        return
    script = (ROOT / name).read_text(encoding="utf-8")
    for option in (word for word in rest if word.startswith("--")):
        assert f'"{option}"' in script, command


def test_every_command_is_run_or_read_or_has_its_reason() -> None:
    ours = ("raybatch ", "prefect ", "python ", "make ")
    left = [command for command in GIVEN if not command.startswith(ours)]
    without = [c for c in left if not any(re.match(pattern, c) for pattern in ELSEWHERE)]
    assert without == [], "say in ELSEWHERE why these are not run, or run them"
    for why in (*READ.values(), *ELSEWHERE.values()):
        for path in re.findall(r"tests/[\w/.]+", why):
            assert (ROOT / path).exists(), why


# --- what pages show of Python and of job files ---------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_what_python_imports_of_us_is_there(page: Path) -> None:
    for block in blocks(TEXTS[page]):
        if block.language != "python":
            continue
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("prefect_ray"):
                module = importlib.import_module(str(node.module))
                for name in node.names:
                    assert hasattr(module, name.name), f"{page_name(page)}: {name.name}"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_what_stands_of_a_job_file_is_one(page: Path) -> None:
    for block in blocks(TEXTS[page]):
        value: Any = yaml.safe_load(block.text) if block.language == "yaml" else None
        if isinstance(value, dict) and set(value) <= set(BatchJob.model_fields):
            whole = {**SMALL, **value}
            for group in ("source", "output", "prompt"):
                if group in value and group in SMALL:
                    whole[group] = {**needed(group, value[group]), **value[group]}
            BatchJob.from_dict(whole)


def needed(group: str, given: dict[str, Any]) -> dict[str, Any]:
    """What a page leaves out of a group for shortness."""
    if group == "prompt" and (not given or {"function", "messages", "template"} & set(given)):
        return {}
    return dict(SMALL[group])  # type: ignore[call-overload]
