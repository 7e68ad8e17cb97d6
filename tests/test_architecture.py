"""The rooms of the package: which may import which, and what is imported only where needed."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from helpers.small import small_run

import prefect_raybatch

PACKAGE = Path(prefect_raybatch.__file__).parent
ROOT = PACKAGE.parent

# The rooms from the ground up: each line imports only from lines above it, and from itself.
FLOORS = [
    "errors",
    "words harmless exit_codes bounded cpu_limit installed proxies schemes uncollected",
    "temporary_server yaml_text",
    "nvml",
    "demo",
    "policy",
    "job",
    "spec",
    "storage",
    "ledger",
    "result_reader",
    "source",
    "model",
    "sizing",
    "distill",
    "stages",
    "imports",
    "quality",
    "report",
    "learning",
    "cluster",
    "standby",
    "driver",
    "kuberay",
    "plan",
    "result",
    "publish",
    "compile",
    "batches",
    "runs",
    "compare",
    "remote",
    "api",
    "doctor",
    "flow",
    "tasks blocks",  # addresses of names that live in flow
    "cli",
    "frames",
]
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names.split()}
# No stage imports another.
STAGES = {"stages.read", "stages.prepare", "stages.engine", "stages.finish"}
PREFECT_SIDE = {"flow", "tasks", "blocks"}
# What users touch: imported by nobody below.
ENDS = {*PREFECT_SIDE, "cli.commands", "remote.__main__"}

# Heavy packages, and the modules that may import them at module level, or at all.
AT_MODULE_LEVEL = {
    "ray": {
        "cluster.connect",
        "cluster.pipeline",
        "cluster.spanning",
        "stages.read",
        "stages.ray_internals",
    },
    "vllm": set(),
    "torch": set(),
    "transformers": set(),
    "huggingface_hub": set(),
    "matplotlib": {"report.drawing"},
    "jinja2": {"report.html"},
    "pynvml": set(),
    "s3fs": {"storage"},
    "deltalake": set(),
    "pyiceberg": {"source.tables.cloud_files"},
    "lance": set(),
    "kubernetes": set(),
    "prefect": PREFECT_SIDE,
}
ANYWHERE = {
    "ray": {
        "cluster",
        "stages.read",
        "stages.ray_internals",
        "remote.client",
        "result_reader",
        "flow.blocks.cluster",
    },
    "vllm": {"stages.vllm.internals"},
    "transformers": {"stages.block"},
    "torch": {"stages.vllm.multimodal"},
    "s3fs": {"storage"},
    "botocore": {"storage"},
    "matplotlib": {"report.drawing"},
    "jinja2": {"report.html", "model.chat_template"},
    "pynvml": {"nvml"},
    "kubernetes": {"kuberay.api"},
    "prefect": {*PREFECT_SIDE, "doctor.services"},
}


def name_of(path: Path) -> str:
    """The dotted name of a module of ours; "" for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(module: str) -> int:
    """Programs stand above all rooms, wherever their file is."""
    return len(FLOORS) if module.endswith("__main__") else FLOOR[module.split(".")[0]]


def within(module: str, names: Iterable[str]) -> bool:
    """Whether a module is one of these, or in one of these rooms."""
    return any(module == name or module.startswith(f"{name}.") for name in names)


FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {name_of(path): path for path in FILES}


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file, which each is parsed once for. Not to be changed."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path, lazy: bool, types: bool = True) -> tuple[str, ...]:
    """Dotted names of what a file imports; without `lazy` only what importing it runs, without
    `types` not what type checkers alone see."""

    def visit(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{_module(path, node)}.{alias.name}" for alias in node.names)
        elif not lazy and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return
        elif (
            not (lazy and types)
            and isinstance(node, ast.If)
            and "TYPE_CHECKING" in ast.unparse(node.test)
        ):
            for inner in node.orelse:
                yield from visit(inner)
        else:
            for inner in ast.iter_child_nodes(node):
                yield from visit(inner)

    return tuple(visit(parsed(path)))


def _module(path: Path, node: ast.ImportFrom) -> str:
    """What stands after `from`, whole also where it is relative."""
    package = path.relative_to(ROOT).parent.parts
    above = package[: len(package) - node.level + 1] if node.level else ()
    return ".".join([*above, *([node.module] if node.module else [])])


def ours(name: str) -> str | None:
    """The module of ours that an imported name means."""
    package, _, rest = name.partition(".")
    if package != "prefect_raybatch":
        return None
    return rest if rest in MODULES else rest.rpartition(".")[0]


# --- the rooms ----------------------------------------------------------------------------------


def test_each_module_is_in_a_room():
    """A new room needs a line that says above which others it lies."""
    assert {module.split(".")[0] for module in MODULES if module} == set(FLOOR)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_room_imports_only_rooms_below_it(path):
    module = name_of(path)
    if not module:
        return  # fetches its names when they are asked for
    floor = floor_of(module)
    found = {ours(name) for name in imports(path, lazy=True)} - {None, module}
    assert {name for name in found if name and floor_of(name) > floor} == set()
    assert "" not in found, "a module imports from modules, not from the package"


def test_no_stage_imports_another():
    for stage in STAGES:
        found = {ours(name) for name in imports(MODULES[stage], lazy=True)}
        assert found & STAGES <= {stage}


def test_no_imports_go_round():
    """Also not by an import inside a function, except where only a type is meant."""
    graph = {
        module: {n for n in map(ours, imports(path, lazy=True, types=False)) if n} - {module}
        for module, path in MODULES.items()
        if module
    }
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join([*way, module])
        if module not in done:
            for name in sorted(graph[module]):
                visit(name, (*way, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("heavy", AT_MODULE_LEVEL)
def test_heavy_packages_are_not_imported_at_module_level(heavy):
    found = {
        module
        for module, path in MODULES.items()
        if any(name.split(".")[0] == heavy for name in imports(path, lazy=False))
    }
    assert {m for m in found if not within(m, AT_MODULE_LEVEL[heavy])} == set()


@pytest.mark.parametrize("heavy", ANYWHERE)
def test_only_their_own_modules_name_these_packages(heavy):
    found = {
        module
        for module, path in MODULES.items()
        if any(name.split(".")[0] == heavy for name in imports(path, lazy=True, types=False))
    }
    assert {m for m in found if not within(m, ANYWHERE[heavy])} == set()


def test_only_the_engine_stages_know_the_stepper():
    users = {
        module
        for module, path in MODULES.items()
        if any(ours(n) == "stages.vllm.stepper" for n in imports(path, lazy=True))
    }
    assert users <= {
        *("stages.engine", "stages.label_cutoff", "stages.pooling", "stages.meter"),
        *("stages.vllm.forward", "stages.endpoint.stage"),
    }


def test_flows_and_deployments_use_only_the_public_names():
    public = {f"prefect_raybatch.{name}" for name in prefect_raybatch.__all__}
    for folder in ("flows", "deployments"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for name in imports(path, lazy=True):
                if name.startswith("prefect_raybatch") and name != "prefect_raybatch":
                    assert name in public or name.startswith("prefect_raybatch.demo"), path


def is_there(name: str) -> bool:
    """Return whether a dotted name of ours is a module, or a name that a module has."""
    rest = name.partition(".")[2]
    if not rest or rest in MODULES:
        return True
    module, _, attribute = rest.rpartition(".")
    if module not in MODULES:
        return False
    home = importlib.import_module(f"prefect_raybatch.{module}".rstrip("."))
    return hasattr(home, attribute)


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "examples", "flows", "deployments"])
def test_what_is_imported_from_the_package_exists(folder):
    """Also inside functions, and in scripts that no quick test runs."""
    missing = {
        (str(path.relative_to(ROOT)), name)
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in imports(path, lazy=True)
        if name.split(".")[0] == "prefect_raybatch" and not is_there(name)
    }
    assert missing == set()


def test_no_assert_guards_anything():
    """`python -O` would drop it."""
    for path in FILES:
        tree = parsed(path)
        assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)], path


# Rooms in which a job is written, compiled, and taken by the public functions.
TAKE_A_JOB = ("job", "compile", "api", "frames")
# Modules of other rooms that import BatchJob. None may be added: whoever needs a few fields of a
# job is given these.
JOB_IMPORTERS = """
    cli: drive
    doctor: check_result
    flow: blocks.cluster blocks.job flows job_flow tasks
"""


def job_importers() -> set[str]:
    """Return the modules of JOB_IMPORTERS."""
    rooms = [line.strip().split(": ") for line in JOB_IMPORTERS.strip().splitlines()]
    names = [f"{room}.{module}" for room, modules in rooms for module in modules.split()]
    return {name.removesuffix(".__init__") for name in names}


def imports_batch_job(path: Path) -> bool:
    home = "prefect_raybatch.job.batch_job"
    wanted = (home, "prefect_raybatch.BatchJob")
    return any(
        name in wanted or name.startswith(f"{home}.BatchJob") for name in imports(path, lazy=True)
    )


def test_no_further_module_imports_the_whole_job():
    """What works on a whole job can depend on any field of it: the list may only become shorter."""
    importing = {
        module
        for module, path in MODULES.items()
        if module and module.split(".")[0] not in TAKE_A_JOB and imports_batch_job(path)
    }
    listed = job_importers()
    assert not importing - listed, (
        f"{', '.join(sorted(importing - listed))} now imports BatchJob: pass it the group of "
        "fields that it needs (job.engine, job.limits, ...), or the value that follows from them"
    )
    assert not listed - importing, (
        f"{', '.join(sorted(listed - importing))} no longer imports BatchJob: take it off "
        "JOB_IMPORTERS"
    )


@pytest.mark.parametrize("whole", ["BatchJob", "RunSpec"])
def test_few_modules_name_what_has_everything(whole):
    """A module that takes a part of a job or of a spec says what it depends on."""
    word = re.compile(rf"\b{whole}\b")
    naming = [module for module, path in MODULES.items() if word.search(path.read_text("utf-8"))]
    assert len(naming) <= 20, f"pass a part of {whole} to one of {', '.join(sorted(naming))}"


# Where a spec is copied with a change, and what returns one: a job is compiled once, and only what
# is open in it is decided afterwards.
REPLACES_A_SPEC = {"spec.run", "runs.increment", "runs.precision"}
GIVES_A_SPEC = {
    "compile.job.compile_job",
    "compile.job.compile_plan",
    "compile.job.compile_planned",
    "compile.job._compile_cascade",  # of both its models
    "spec.run.RunSpec.decide",
    "spec.run.RunSpec.of_cascade",
    "runs.increment.requests_spec",
    "api.tune.tune",  # a lambda: the spec of each trial's job, which is another job
}
GIVERS = ("compile_job", "compile_plan", "compile_planned", "decide")


def functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions of a module, with the class of a method in its name."""

    def visit(body: Iterable[ast.stmt], within: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                yield f"{within}{node.name}", node
            elif isinstance(node, ast.ClassDef):
                yield from visit(node.body, f"{within}{node.name}.")

    yield from visit(parsed(path).body, "")


def gives_a_spec(node: ast.AST) -> bool:
    """Whether it is a lambda that returns a spec."""
    called = (
        node.body.func if isinstance(node, ast.Lambda) and isinstance(node.body, ast.Call) else None
    )
    return called is not None and ast.unparse(called).rsplit(".", 1)[-1] in GIVERS


def test_a_job_is_copied_in_its_room_alone():
    """`model_copy` checks nothing: `job.edits` changes a job, and all else takes its spec."""
    others = {"publish.iceberg", "publish.stores"}  # models of pyiceberg, and a target's place
    using = {
        module
        for module, path in MODULES.items()
        if module.split(".")[0] != "job"
        and {"model_copy", "model_extra"}
        & {node.attr for node in ast.walk(parsed(path)) if isinstance(node, ast.Attribute)}
    }
    assert using == others


def test_only_what_is_open_in_a_spec_is_decided_after_it_was_compiled():
    replacing, giving = set(), set()
    for module, path in MODULES.items():
        for name, function in functions(path):
            if function.returns is not None and ast.unparse(function.returns) == "RunSpec":
                giving.add(f"{module}.{name}")
            if any(map(gives_a_spec, ast.walk(function))):
                giving.add(f"{module}.{name}")
            specs = {"self"} if module == "spec.run" else set()
            for argument in [*function.args.args, *function.args.kwonlyargs]:
                if argument.annotation and ast.unparse(argument.annotation) == "RunSpec":
                    specs.add(argument.arg)
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "replace":
                    replacing |= {module} if ast.unparse(node.args[0]) in specs else set()
    assert giving == GIVES_A_SPEC
    assert replacing == REPLACES_A_SPEC


# --- size ---------------------------------------------------------------------------------------


def test_functions_are_short():
    """Lines with the signature and the docstring: none over 60, and at most 12 over 50."""
    long = {}
    for module, path in MODULES.items():
        for node in ast.walk(parsed(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                long |= {f"{module}.{node.name}": lines} if lines > 50 else {}
    assert {name for name, lines in long.items() if lines > 60} == set(), "split it"
    assert len(long) <= 12, f"split one where it changes subject: {long}"


def test_few_values_are_of_any_type():
    """At most 12 `Any` in 1,000 lines."""
    nodes = [node for path in FILES for node in ast.walk(parsed(path))]
    named = sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes)
    lines = sum(path.read_text("utf-8").count("\n") for path in FILES)
    assert 1000 * named <= 12 * lines, f"{named} in {lines} lines: give one its type"


# What may change in any release of a package is imported in one module, which says how it is used.
USE_INTERNALS = {
    "ray": "stages.ray_internals",
    "vllm": "stages.vllm.internals",
    "prefect": "flow.blocks.job",
}


@pytest.mark.parametrize("package", USE_INTERNALS)
def test_private_names_of_a_package_are_imported_in_one_module(package):
    using = {
        module
        for module, path in MODULES.items()
        for name in imports(path, lazy=True)
        if name.split(".")[0] == package and re.search(r"\._(?!_)", name)
    }
    assert using <= {USE_INTERNALS[package]}


# What works out which answers of earlier runs are taken, and looks them up; and who may call it.
REUSE = {
    *("plan.joining", "plan.row_keys", "stages.lookup", "cluster.lookups", "runs.increment"),
    *("runs.reusable_runs", "runs.answers_by_row", "runs.rejected_answers"),
}
CALL_REUSE = {
    *("cluster.cascade", "cluster.pipeline"),  # a cascade looks up the first model's answers
    *("runs.plan_run", "runs.infer_run", "runs.finalize_run"),
    *("runs.dry_run", "runs.restore_records"),
}


def test_few_modules_call_what_reuses_answers():
    """All others read its record in the plan (`ledger.increments`), or figures of a report."""
    calling = {
        module
        for module, path in MODULES.items()
        if module not in REUSE and REUSE & {ours(name) for name in imports(path, lazy=True)}
    }
    assert calling == CALL_REUSE


# --- names --------------------------------------------------------------------------------------

# Public names that two modules define, and why. All others have one home, or a name each.
TWICE = {
    "log": "each module's own logger",
    "main": "each program's entry point",
    # Typer and Prefect call a command and a task what its function is called, and users know the
    # verb by that name; the function in `runs` or `result` is what all of them call.
    "finalize_run": "the task, and the verb",
    "plan_retry": "the task, and the verb",
    "reap": "the command, and the verb",
    "publish": "the command, and the verb",
    "publish_run": "the task, and the verb",
    "retry_failed": "the command, and the flow",
    "status": "the command, and the verb",
    "tune": "the command, and the verb",
    "verify": "the command, and the verb",
}


def defined(body: Iterable[ast.stmt]) -> Iterator[str]:
    """The names of a module's functions, classes and constants."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found = (name for target in targets for name in ast.walk(target))
            yield from (name.id for name in found if isinstance(name, ast.Name))
        elif isinstance(node, (ast.If, ast.Try)):
            yield from defined(node.body)


def test_no_public_name_is_defined_in_two_modules():
    """What means the same is imported from one home; what does not is called differently."""
    homes: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        for name in defined(parsed(path).body):
            if not name.startswith("_"):
                homes.setdefault(name, set()).add(module)
    twice = {name: modules for name, modules in homes.items() if len(modules) > 1}
    assert {name: modules for name, modules in twice.items() if name not in TWICE} == {}
    assert set(twice) == set(TWICE), "TWICE names what is defined once"


# Private attributes of the package that tests use, file and attribute, and why.
PRIVATE = {
    ("stages/test_hang.py", "_engine"): "stops or kills the process of vLLM's core from outside",
    ("stages/test_hang.py", "_thread"): "that it ended is what the test is about",
    ("publish/test_refused_at_plan.py", "_insert"): "a database that rejects the rows themselves",
    ("runs/test_damaged_answers.py", "_kept"): "emptied, as in a worker that has read nothing",
    ("runs/test_damaged_answers.py", "_files"): "emptied, as in a worker that has read nothing",
    ("chaos/engine.py", "_engine"): "vLLM itself runs out of memory, in a step of its own",
}
OTHERS = {  # of Prefect, under names that some of ours have, too
    ("flow/test_blocks.py", "_client"),
    ("flow/test_blocks.py", "_logo_url"),
}


def private_names() -> set[str]:
    """All that a module or class of ours keeps for itself."""
    found: set[str] = set()
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return {name for name in found if name.startswith("_") and not name.endswith("__")}


def used_privately(tree: ast.AST, private: set[str]) -> Iterator[str]:
    """Private names of ours that a test reads, replaces, imports, or makes objects around."""
    own = {
        node.name if isinstance(node, ast.FunctionDef) else node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        or (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            ours_alone = node.attr in private and not (of_self and node.attr in own)
            if ours_alone or node.attr == "__new__":
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "prefect_raybatch"
        ):
            yield from (alias.name for alias in node.names if alias.name in private)
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("getattr", "setattr", "delattr"):
                words = [a.value for a in node.args[:2] if isinstance(a, ast.Constant)]
                names = [word.rpartition(".")[2] for word in words if isinstance(word, str)]
                yield from (name for name in names if name in private)


def test_tests_go_through_what_is_public():
    """So that what is inside can change, and a test says what users and other rooms can rely on."""
    private, used = private_names(), set()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        tree = parsed(path)
        file = str(path.relative_to(ROOT / "tests"))
        used |= {(file, name) for name in used_privately(tree, private)} - OTHERS
    assert used - set(PRIVATE) == set()
    assert set(PRIVATE) - used == set(), "PRIVATE names what no test uses"


# --- what users import --------------------------------------------------------------------------


def test_the_public_names_are_these_and_each_is_there():
    assert prefect_raybatch.__all__ == [
        "Answered",
        "BatchInferenceJob",
        "BatchJob",
        "ConfigError",
        "HostedModel",
        "ObjectStore",
        "OpenRun",
        "RayBatchError",
        "RayCluster",
        "RowsFailed",
        "Run",
        "RunReport",
        "ask",
        "ask_async",
        "ask_run",
        "backfill_job",
        "batch_inference",
        "classify",
        "embed",
        "end_engines",
        "finalize_partial",
        "finalize_run",
        "infer_shards",
        "open_run",
        "plan_shards",
        "publish_run",
        "reconcile_jobs",
        "restart_crashed",
        "retry_failed",
        "score",
        "tune_job",
        "warm_engines",
    ]
    for name in prefect_raybatch.__all__:
        assert getattr(prefect_raybatch, name) is not None
        assert name in dir(prefect_raybatch)
    assert prefect_raybatch.__version__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        prefect_raybatch.nothing  # noqa: B018


HEAVY = ["ray", "vllm", "torch", "transformers", "prefect", "s3fs"]
HEAVY += ["matplotlib", "jinja2", "pynvml"]
LOADED = f"import sys, json; print(json.dumps([m for m in {HEAVY} if m in sys.modules]))"


def python(code: str, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "RAY_ADDRESS": ""},
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_the_package_loads_nothing_heavy():
    code = "import prefect_raybatch\nfrom prefect_raybatch import BatchJob, Run, RunReport\n"
    assert python(code + LOADED) == []


def test_asking_for_the_version_loads_nothing_heavy():
    code = """
from prefect_raybatch import cli
try:
    cli.main(["--version"])
except SystemExit as end:
    if end.code:
        raise
"""
    assert python(code + LOADED) == []


def test_importing_everything_below_the_pipeline_loads_nothing_heavy():
    heavy = {
        "cluster.pipeline",
        "cluster.spanning",
        "stages.read",
        "stages.ray_internals",
        "stages.vllm.preload",
        "stages.vllm.preload_core",
        "report.drawing",
        "report.html",
        *ENDS,
    }
    light = [module for module in MODULES if module and not within(module, heavy)] + [
        "cli.commands"
    ]
    code = "".join(f"import prefect_raybatch.{module}\n" for module in [*light, "cli.commands"])
    assert python(code + LOADED) == []


@pytest.mark.parametrize(
    ("command", "status"),
    [("status", 0), ("verify", 1), ("report", 0)],  # 1: the run is not finished
)
def test_looking_at_a_run_loads_nothing_heavy(tmp_path, command, status):
    run = small_run(tmp_path)
    run.commit_all()
    code = f"""
from prefect_raybatch import cli
try:
    cli.main(["{command}", {str(tmp_path)!r}, "--json"])
except SystemExit as end:
    if (end.code or 0) != {status}:
        raise
"""
    assert python(code + LOADED) == []


def test_commands_before_the_first_run_load_nothing_heavy_but_the_template(tmp_path):
    commands = [["init", "--example"], ["schema"], ["plan", "companies.yaml"], ["runs", "out"]]
    code = f"""
import os
from prefect_raybatch import cli
os.chdir({str(tmp_path)!r})
os.mkdir("out")
for command in {commands!r}:
    try:
        cli.main(command)
    except SystemExit as end:
        if end.code:
            raise
"""
    # The first is for prompts, the second for this machine's GPUs.
    assert set(python(code + LOADED)) <= {"jinja2", "pynvml"}


def test_a_run_with_nothing_left_to_infer_loads_nothing_heavy(tmp_path):
    run = small_run(tmp_path)
    run.commit_all()
    code = f"""
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.api import infer_run
from prefect_raybatch.runs.run import run_of
from prefect_raybatch.storage import open_store
store = open_store({str(tmp_path)!r})
ledger = Ledger(store)
job = BatchJob.from_dict({run.job.to_dict()!r}, "here")
if infer_run(job, run_of(store, ledger.load_plan(), ledger)).done != 20:
    raise SystemExit("rows are missing")
"""
    assert python(code + LOADED) == []


# The second reads some row groups only.
READERS_OF_BYTES = {"storage.parquet", "result.parts"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_pyarrow_reads_python_files_in_the_calling_thread(path):
    """`Store.open` says why: otherwise 35 of 160 short scripts were aborted at their end.

    `read_table` uses threads for bytes in memory too: `parquet_table` is there for these.
    """
    for call in (n for n in ast.walk(parsed(path)) if isinstance(n, ast.Call)):
        name = getattr(call.func, "attr", "")
        native = bool(call.args) and "BufferReader" in ast.unparse(call.args[0])
        options = {word.arg: ast.unparse(word.value) for word in call.keywords}
        assert name != "read_table", f"{path}: {ast.unparse(call)} (call parquet_table)"
        if name == "ParquetFile":
            assert native or options.get("pre_buffer") == "False", f"{path}: {ast.unparse(call)}"
            assert not native or name_of(path) in READERS_OF_BYTES, f"{path}: call parquet_table"
        elif name in ("read_row_group", "read_row_groups") or (
            name == "iter_batches" and "dataset" not in ast.unparse(call.func) and call.args
        ):
            assert options.get("use_threads") == "False", f"{path}: {ast.unparse(call)}"
