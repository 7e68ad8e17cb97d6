"""Functions and classes from a file beside the job file, from a script and from a notebook."""

from __future__ import annotations

import linecache
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.small import job_dict, make_job
from pydantic import BaseModel

from prefect_raybatch.compile.job import prompt_spec
from prefect_raybatch.compile.resolved import fingerprint
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.functions import load_function, source_digest
from prefect_raybatch.job.own_code.loading import function_digest
from prefect_raybatch.job.trust import check_trust
from prefect_raybatch.policy.in_force import operator_policy, policy_applied
from prefect_raybatch.policy.policy import STRICT_POLICY, JobPolicy
from prefect_raybatch.stages.calls.isolated import IsolatedFunction

PROMPTS = """\
from pydantic import BaseModel
import json

WORD = "industry"

def helper(text):
    return text.upper()

def ask(row):
    return f"{WORD} of {helper(row['Company'])}?"

class Answer(BaseModel):
    industry: str
"""
JOB = """\
name: j
source: {uri: in.csv}
prompt: {function: "code/prompts.py:ask"}
output: {uri: out, schema_model: "code/prompts.py:Answer"}
"""
ROW = {"Company": "acme"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "code/prompts.py"
    path.parent.mkdir()
    path.write_text(PROMPTS)
    (tmp_path / "job.yaml").write_text(JOB)
    return path


def job_of(file: Path) -> BatchJob:
    return BatchJob.from_yaml(file.parent.parent / "job.yaml")


def test_a_file_beside_the_job_file_is_found_from_any_folder(file: Path) -> None:
    job = job_of(file)
    assert job.prompt.function == f"{file}:ask"
    assert load_function(f"{file}:ask", "f")(ROW) == "industry of ACME?"
    assert "industry" in str(job.output.answer_form)
    check_trust(job)
    assert BatchJob.from_dict(job.to_dict()) == job


def test_a_worker_gets_the_function_with_all_that_it_uses_and_needs_no_file(file: Path) -> None:
    sent = pickle.dumps(prompt_spec(job_of(file)))
    file.unlink()
    script = (
        "import pickle, sys\n"
        "from prefect_raybatch.job.functions import load_function\n"
        "spec = pickle.loads(sys.stdin.buffer.read())\n"
        "function = load_function(spec.function, 'prompt.function')\n"
        f"print(function({ROW!r}), load_function(spec.function, 'f') is function)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], input=sent, capture_output=True)
    assert ran.stdout.decode().split("\n")[0] == "industry of ACME? True", ran.stderr.decode()


def test_a_function_by_value_is_called_apart_and_another_text_of_it_too(file: Path) -> None:
    for word in ("industry", "country"):
        file.write_text(PROMPTS.replace("industry", word))
        received = pickle.loads(pickle.dumps(prompt_spec(job_of(file)).function))
        assert IsolatedFunction(received, "f", None)(ROW) == f"{word} of ACME?"


def test_the_files_text_counts_in_the_fingerprint_and_its_folder_does_not(
    file: Path, tmp_path: Path
) -> None:
    first = fingerprint(job_of(file))
    assert first.parts["prompt.function"] == "prompts.py:ask"
    moved = tmp_path / "moved/code/prompts.py"
    moved.parent.mkdir(parents=True)
    moved.write_text(PROMPTS)
    (tmp_path / "moved/job.yaml").write_text(JOB)
    assert fingerprint(job_of(moved)) == first
    file.write_text(PROMPTS.replace("upper", "lower"))
    assert fingerprint(job_of(file)) != first
    assert load_function(f"{file}:ask", "f")(ROW) == "industry of acme?"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import json\nimport no_such\n", ["No module named 'no_such'", "line 2", "files beside"]),
        ("def ask(row:\n", ["SyntaxError", "line 1"]),
        ("x = 1\ny = x / 0\n", ["ZeroDivisionError", "line 2"]),
        ("def aks(row): pass\n", ["no function 'ask'", "did you mean 'aks'"]),
        ("\ndef ask(row, more): pass\n", ["ask(row, more) cannot be called", "'more'", "line 2"]),
        ("def ask(): pass\n", ["too many positional", "line 1"]),
        ("async def ask(row): pass\n", ["is async", "line 1"]),
        ("def ask(row):\n    yield 'a'\n", ["is a generator", "line 1", "`return`"]),
        ("async def ask(row):\n    yield 'a'\n", ["is a generator", "line 1"]),
        ("class Ask:\n    def __call__(self, row): yield 'a'\nask = Ask()\n", ["is a generator"]),
        ("ask = 7\n", ["is no function or class, but of type int"]),
        ("from json import dumps as ask\n", ["is defined in json, not in"]),
        (
            "import threading\nlock = threading.Lock()\ndef ask(row): return lock\n",
            ["cannot be sent to other processes", "lock", "create it within the function"],
        ),
        (None, ["no file or folder 'prompts.py' in", "check the path"]),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line_with_its_place(
    file: Path, text: str | None, words: list[str]
) -> None:
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        source_digest(f"{file}:ask", "prompt.function")
    (line,) = str(caught.value).splitlines()
    assert line.startswith("prompt.function: ") and str(file.parent) in line
    for word in words:
        assert word in line


def test_a_class_that_is_no_model_is_refused(file: Path) -> None:
    file.write_text("class Answer: pass\n")
    with pytest.raises(ConfigError, match="is no pydantic class"):
        _ = job_of(file).output.answer_form


@pytest.mark.parametrize(
    "policy", [STRICT_POLICY, JobPolicy("all modules", function_modules=("*",))]
)
@pytest.mark.parametrize("field", ["prompt.function", "output.postprocess", "output.schema_model"])
@pytest.mark.parametrize("place", ["{file}", "__main__"])
def test_a_job_from_elsewhere_may_not_name_a_file_or_a_script(
    file: Path, policy: JobPolicy, field: str, place: str
) -> None:
    name = f"{place.format(file=file)}:{'Answer' if field.endswith('model') else 'ask'}"
    group, last = field.split(".")
    value = job_dict(**{group: {**({"uri": "out"} if group == "output" else {}), last: name}})
    file.write_text("raise SystemExit('executed')\n")
    with policy_applied(policy):
        job = BatchJob.from_dict(value)
        with pytest.raises(ConfigError, match=f"{field}: under .*may not come from"):
            check_trust(job)
        with pytest.raises(ConfigError, match="may not come from"):
            if field.endswith("model"):
                _ = job.output.answer_form
            else:
                load_function(name, field)


@pytest.mark.parametrize(
    "cluster", [{"job_server": "http://head:8265"}, {"kubernetes": {"image": "ray:1"}}]
)
def test_a_job_that_runs_elsewhere_names_no_file(file: Path, cluster: dict[str, Any]) -> None:
    name = f"{file}:ask"
    with pytest.raises(ConfigError, match=r"prompt\.function: .*is not on the machines of cluster"):
        make_job(prompt={"function": name}, cluster=cluster)
    make_job(prompt={"function": "helpers.functions:ask"}, cluster=cluster)


def test_all_tasks_of_a_run_get_the_text_that_the_first_got(file: Path) -> None:
    function = prompt_spec(job_of(file)).function
    first = pickle.loads(pickle.dumps(function))
    file.write_text(PROMPTS.replace("industry", "country"))
    assert pickle.loads(pickle.dumps(function)).payload == first.payload


def test_the_operators_policy_is_strict_by_default() -> None:
    assert operator_policy().limited


# --- scripts and notebooks ----------------------------------------------------------------------

CELLS = """
WORD = "industry"
LIMITS = {"a": [1, 2]}

def other(row):
    return "unused"

def helper(text):
    return text.upper() + str(LIMITS["a"])

def ask(row):
    return f"{WORD} of {helper(row['Company'])}?"
"""


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of a notebook, whose cells have no file."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(CELLS, main.__dict__)
    return main.__dict__


def test_a_function_of_a_notebook_is_given_as_it_is(notebook: dict[str, Any]) -> None:
    job = make_job(prompt={"function": notebook["ask"]})
    assert job.prompt.function == "__main__:ask"
    function = prompt_spec(job).function
    assert function is not None
    assert load_function(function, "f")(ROW) == "industry of ACME[1, 2]?"
    assert IsolatedFunction(function, "f", None)(ROW) == "industry of ACME[1, 2]?"


@pytest.mark.parametrize(
    ("cell", "changes"),
    [
        ("def other(row):\n    return 'also unused'\n", False),
        ("UNUSED = 2\n", False),
        ("WORD = 'country'\n", True),
        ("LIMITS = {'a': [1, 3]}\n", True),
        ("def helper(text):\n    return text.lower() + str(LIMITS['a'])\n", True),
        ("def ask(row):\n    return 'else'\n", True),
    ],
)
def test_what_a_function_of_a_notebook_uses_counts_in_the_fingerprint(
    notebook: dict[str, Any], cell: str, changes: bool
) -> None:
    before = function_digest("__main__:ask", "f")
    exec(CELLS, notebook)
    assert function_digest("__main__:ask", "f") == before
    exec(cell, notebook)
    assert (function_digest("__main__:ask", "f") != before) is changes


CLASSES = """
import functools

def clean(text):
    return text.strip()

def decorated(function):
    @functools.wraps(function)
    def call(*given):
        return clean(function(*given))
    return call

class Base:
    def end(self):
        return "?"

class Words(Base):
    def __init__(self, first):
        self.first = first
    @staticmethod
    def plain(text):
        return clean(text)
    @classmethod
    def of(cls):
        return "static"
    @property
    def word(self):
        return self.first
    def __call__(self, row):
        return self.word + self.plain(row["Company"]) + self.of() + self.end()

def asked(first, row):
    return first + clean(row["Company"])

@functools.lru_cache
def cached(text):
    return clean(text)

@decorated
def plain(text):
    return text

words = Words("a")
partial = functools.partial(asked, "a")

def by_class(row):
    return Words("b")(row)

def by_object(row):
    return words(row)

def by_cached(row):
    return cached(row["Company"])

def by_decorated(row):
    return plain(row["Company"])
"""


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("by_class", "return clean(text)", "return text"),
        ("by_class", "text.strip()", "text.upper()"),
        ("by_class", '"static"', '"other"'),
        ("by_class", "return self.first", "return self.first * 2"),
        ("by_class", 'return "?"', 'return "!"'),
        ("by_object", "text.strip()", "text.upper()"),
        ("by_object", 'Words("a")', 'Words("c")'),
        ("words", 'return "?"', 'return "!"'),
        ("words", 'Words("a")', 'Words("c")'),
        ("partial", "text.strip()", "text.upper()"),
        ("partial", 'asked, "a"', 'asked, "c"'),
        ("by_cached", "text.strip()", "text.upper()"),
        ("by_decorated", "text.strip()", "text.upper()"),
        ("by_decorated", "clean(function(*given))", "clean(function(*given)) * 2"),
    ],
)
def test_code_in_classes_objects_and_decorators_counts_in_the_fingerprint(
    notebook: dict[str, Any], tmp_path: Path, name: str, before: str, after: str, in_file: bool
) -> None:
    def digest(cells: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(cells)
        linecache.clearcache()
        notebook["__file__"] = str(path)
        exec(compile(cells, str(path) if in_file else "<stdin>", "exec"), notebook)
        return function_digest(f"__main__:{name}", "f")

    assert before in CLASSES
    assert digest(CLASSES) == digest(f"UNUSED = 1\n{CLASSES}")
    assert digest(CLASSES.replace(before, after)) != digest(CLASSES)


def test_a_function_that_no_name_leads_to_is_refused(notebook: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="define it at the top level with `def`"):
        make_job(prompt={"function": lambda row: "a"})
    with pytest.raises(ConfigError, match=r"no function 'aks'.*did you mean 'ask'\?"):
        load_function("__main__:aks", "f")


def test_a_pydantic_class_is_taken_as_its_schema() -> None:
    class Answer(BaseModel):
        industry: str

    job = make_job(output={"uri": "out", "schema_model": Answer})
    assert '"industry"' in str(job.output.schema_model)
    with pytest.raises(ConfigError, match="int is no pydantic class"):
        make_job(output={"uri": "out", "schema_model": int})


def test_a_script_runs_with_its_own_function(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from prefect_raybatch.compile.job import prompt_spec\n"
        "from prefect_raybatch.compile.resolved import fingerprint\n"
        "from prefect_raybatch.job.batch_job import BatchJob\n"
        "from prefect_raybatch.stages.calls.isolated import IsolatedFunction\n"
        f"{CELLS}\n"
        "if __name__ == '__main__':\n"
        "    job = BatchJob.from_dict({'name': 'j', 'source': {'uri': 'a.csv'},\n"
        "        'prompt': {'function': ask}, 'output': {'uri': 'o'}})\n"
        f"    print(IsolatedFunction(prompt_spec(job).function, 'f', None)({ROW!r}))\n"
        "    print(fingerprint(job).fingerprint)\n"
    )
    outputs = []
    for more in ("", "# another comment\n"):
        script.write_text(script.read_text() + more)
        ran = subprocess.run(
            [sys.executable, script], capture_output=True, text=True, env={**os.environ}
        )
        assert ran.returncode == 0, ran.stderr
        outputs.append(ran.stdout.splitlines())
    assert outputs[0][0] == "industry of ACME[1, 2]?"
    assert outputs[0] == outputs[1]
