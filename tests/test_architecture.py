"""The module table of the design: who may import whom, and what is imported only where needed."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.small import small_run

import prefect_raybatch

PACKAGE = Path(prefect_raybatch.__file__).parent
ROOT = PACKAGE.parent

VALUES = {"errors", "records"}
# What each module may import of ours. A package (source, storage) is one module here, whatever
# files it has; stages are one module a file, since no stage may import another.
MAY_IMPORT = {
    "__init__": {
        "blocks",
        "errors",
        "flow",
        "flow_runs",
        "job",
        "records",
        "runs",
        "tasks",
    },  # names fetched when asked
    "errors": set(),
    "records": {"errors"},
    "vllm_fields": set(),
    "secrets": set(),
    "sampling_ranges": set(),
    "job": {"errors", "sampling_ranges", "secrets", "vllm_fields"},
    "trust": {"errors", "job"},
    "functions": {"errors", "trust"},
    "storage": {"errors"},
    "installed": set(),
    "record_files": {"errors", "storage"},
    "demo": set(),
    "part_files": {"storage", *VALUES},
    "source": {"trust", "job", "part_files", "storage", "words", *VALUES},
    "cards": set(),
    "memory": {"errors"},
    "packing": {"cards", "errors", "job", "memory"},
    "misfit": {"cards", "errors", "job", "memory"},
    "shard_sizes": {"job", "words"},
    "sequences": {"cards", "job", "memory", "misfit", "packing", "shard_sizes"},
    "sizing": {"cards", "job", "memory", "misfit", "packing", "sequences", "shard_sizes"},
    "figures": {"job", "memory", "misfit", "sizing", "words"},
    "plan": {"trust", "functions", "job", "secrets", "shard_sizes", "sizing", *VALUES},
    "model": {"bounded", "demo", "job", "storage", *VALUES},
    "model_check": {"errors", "job", "model", "storage", "vllm_fields"},
    "checkpoints": {"record_files", "storage", *VALUES},
    "row_numbers": {"plan", *VALUES},
    "success": {"record_files", "storage", *VALUES},
    "ledger": {
        "checkpoints",
        "plan",
        "record_files",
        "row_numbers",
        "storage",
        "success",
        *VALUES,
    },
    "tally": {"records"},
    "charts": {"records", "tally"},
    # Of the driver the types alone, for annotations.
    "heartbeat": {"driver", "record_files", "storage", *VALUES},
    "stall": {"heartbeat", "job", *VALUES},
    "metrics": {"heartbeat", "errors"},
    "monitor": {
        "driver",
        "heartbeat",
        "job",
        "ledger",
        "metrics",
        "record_files",
        "stall",
        "storage",
        "words",
        *VALUES,
    },
    "missing": {"ledger", "storage", *VALUES},
    "words": set(),
    "stops": {"ledger", "plan", "row_numbers", "storage", "words", *VALUES},
    "driver": {"checkpoints", "job", "ledger", "plan", "stops", "tally", "words", *VALUES},
    "bounded": set(),
    "reach": {"bounded", "errors"},
    "sharing": {"errors"},
    "cluster": {"cards", "errors", "job", "reach", "sharing", "sizing", "words"},
    "sized": {"cluster", "job", "ledger", "memory", "model", "sizing", *VALUES},
    "stages": set(),
    "stages.blocks": {"records"},
    "stages.reaper": set(),
    "stages.hang": set(),
    "exits": set(),
    "stages.last_words": {"exits"},
    "stages.vllm_plugin": {"stages.last_words"},
    "stages.note": {"exits"},
    "stages.canary": {"stages.note"},
    "stages.forward": {"stages.canary", "stages.stepper"},
    "stages.stepper": {
        "exits",
        "stages.hang",
        "stages.last_words",
        "stages.reaper",
        "stages.vllm_plugin",
    },
    "stages.read": {"job", "stages.blocks", "storage", *VALUES},
    "stages.window": set(),
    "stages.child": {"errors", "functions"},
    "stages.apart": {"errors", "stages.child"},
    "stages.calls": {"functions", "stages.apart", "stages.child"},
    "stages.row_sampling": {"job", "vllm_fields"},
    "stages.prepare": {
        "job",
        "model",
        "stages.apart",
        "stages.blocks",
        "stages.calls",
        "stages.row_sampling",
        "storage",
        *VALUES,
    },
    "stages.figures": {"stages.blocks"},
    "stages.order": set(),
    "stages.engine": {
        "installed",
        "job",
        "memory",
        "model",
        "sizing",
        "stages.blocks",
        "stages.canary",
        "stages.figures",
        "stages.note",
        "stages.order",
        "stages.stepper",
        "storage",
        *VALUES,
    },
    "stages.ray_llm": {
        "model",
        "sizing",
        "stages.blocks",
        "stages.engine",
        "stages.finish",
        "stages.stepper",
        "stages.vllm_plugin",
        "words",
        *VALUES,
    },
    "stages.finish": {
        "trust",
        "job",
        "model",
        "record_files",
        "stages.apart",
        "stages.blocks",
        "stages.calls",
        "stages.figures",
        "storage",
        "words",
        *VALUES,
    },
    "row_sums": {*VALUES},
    "result_parts": {"part_files", "row_sums", "storage", "trust", *VALUES},
    "finalize": {
        "trust",
        "checkpoints",
        "ledger",
        "plan",
        "result_parts",
        "storage",
        "success",
        "tally",
        "words",
        *VALUES,
    },
    "verify_files": {"row_sums", "storage", "success", *VALUES},
    "verify": {
        "checkpoints",
        "finalize",
        "ledger",
        "missing",
        "plan",
        "row_numbers",
        "storage",
        "success",
        "verify_files",
        "words",
        *VALUES,
    },
    "family": {"job", "ledger", "missing", "storage", "success", *VALUES},
    "results": {
        "trust",
        "family",
        "finalize",
        "ledger",
        "part_files",
        "row_numbers",
        "success",
        *VALUES,
    },
    "chain": {"family", "results", "row_numbers", "storage", "verify", *VALUES},
    "reap": {"ledger", "missing", "storage", "success", "verify", *VALUES},
    "advice": {"job", "records", "shard_sizes", "words"},
    "report": {"charts", "records", "tally"},
    "svg": set(),
    "plots": {"records", "svg"},
    "html_report": {"plots", "records", "report", "svg", "words"},
    "job_logs": set(),
    "job_server": {"errors"},
    "job_records": {"job", "plan", "record_files", "secrets", "storage", *VALUES},
}
MAY_IMPORT["doctor"] = {
    "bounded",
    "cluster",
    "demo",
    "exits",
    "functions",
    "installed",
    "job",
    "model",
    "plan",
    "reach",
    "source",
    "stages.engine",
    "storage",
    "words",
    *VALUES,
}
MAY_IMPORT["tokens"] = {
    "job",
    "model",
    "source",
    "stages.apart",
    "stages.blocks",
    "stages.calls",
    "stages.order",
    "stages.prepare",
    "stages.read",
    "storage",
    "words",
    *VALUES,
}
STAGES = {
    f"stages.{name}"
    for name in ("blocks", "calls", "read", "window", "prepare", "engine", "ray_llm", "finish")
}
MAY_IMPORT["pipeline"] = {
    "cluster",
    "job",
    "ledger",
    "model",
    "plan",
    "sizing",
    "storage",
    *STAGES,
    *VALUES,
}
PREFECT_SIDE = {"tasks", "flow", "flow_runs", "blocks", "artifacts", "assets", "events", "page"}
# What users touch: imported by nobody below.
ENDS = {*PREFECT_SIDE, "cli", "remote", "__init__"}
MAY_IMPORT["retry"] = {
    "family",
    "job",
    "ledger",
    "model",
    "plan",
    "record_files",
    "results",
    "row_numbers",
    "runs",
    "sized",
    "source",
    "stages.finish",
    "tokens",
    *VALUES,
}
# Above the pipeline everything below may be used.
FREE = {"runs", "jobs", "tune", *ENDS}

# Heavy packages, and the modules that may import them at module level, or at all.
AT_MODULE_LEVEL = {
    "ray": {"cluster", "pipeline", "stages.read", "stages.window"},
    "vllm": set(),
    "torch": set(),
    "transformers": set(),
    "huggingface_hub": set(),
    "s3fs": {"storage"},
    "prefect": PREFECT_SIDE,
}
ANYWHERE = {
    "vllm": {"stages.engine", "stages.stepper"},
    "torch": set(),
    "s3fs": {"storage"},
    "botocore": {"storage"},
    "prefect": {*PREFECT_SIDE, "doctor"},
}


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts[0] == "stages":
        return ".".join(p for p in parts if p != "__init__")
    return parts[0]


FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = sorted({name_of(path) for path in FILES})


def imports(path: Path, lazy: bool) -> Iterator[str]:
    """Dotted names of what a file imports; without `lazy` only what importing it runs."""
    tree = ast.parse(path.read_text(encoding="utf-8"))

    def visit(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{_module(path, node)}.{alias.name}" for alias in node.names)
        elif not lazy and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return
        elif not lazy and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for inner in node.orelse:
                yield from visit(inner)
        else:
            for inner in ast.iter_child_nodes(node):
                yield from visit(inner)

    yield from visit(tree)


def _module(path: Path, node: ast.ImportFrom) -> str:
    """What stands after `from`, whole also where it is relative."""
    package = path.relative_to(ROOT).parent.parts
    above = package[: len(package) - node.level + 1] if node.level else ()
    return ".".join([*above, *([node.module] if node.module else [])])


def ours(name: str) -> str | None:
    """The module of ours that an imported name means."""
    parts = name.split(".")
    if parts[0] != "prefect_raybatch":
        return None
    if len(parts) == 1 or parts[1] not in {module.split(".")[0] for module in MODULES}:
        return "__init__"
    if parts[1] == "stages" and len(parts) > 2:
        return ".".join(parts[1:3])
    return parts[1]


# --- the table ----------------------------------------------------------------------------------


def test_each_module_is_in_the_table():
    """A new module needs a line that says what it may import."""
    assert set(MODULES) - FREE - set(MAY_IMPORT) == set()


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_only_what_the_table_allows(path):
    module = name_of(path)
    found = {ours(name) for name in imports(path, lazy=True)} - {None, module}
    if module in FREE:
        return
    assert found <= MAY_IMPORT[module]


def test_nothing_below_imports_what_users_touch():
    assert not [m for m, may in MAY_IMPORT.items() if m != "__init__" and may & ENDS]
    for path in (p for p in FILES if name_of(p) == "runs"):
        assert not {ours(name) for name in imports(path, lazy=True)} & ENDS


@pytest.mark.parametrize("heavy", AT_MODULE_LEVEL)
def test_heavy_packages_are_not_imported_at_module_level(heavy):
    found = {
        name_of(path)
        for path in FILES
        if any(name.split(".")[0] == heavy for name in imports(path, lazy=False))
    }
    assert found <= AT_MODULE_LEVEL[heavy]


@pytest.mark.parametrize("heavy", ANYWHERE)
def test_only_their_own_modules_name_these_packages(heavy):
    found = {
        name_of(path)
        for path in FILES
        if any(name.split(".")[0] == heavy for name in imports(path, lazy=True))
    }
    assert found <= ANYWHERE[heavy]


def test_only_the_engine_stages_know_the_stepper():
    users = {
        name_of(path)
        for path in FILES
        if any(ours(n) == "stages.stepper" for n in imports(path, lazy=True))
    }
    assert users <= {"stages.engine", "stages.ray_llm", "stages.forward"}


def test_flows_and_deployments_use_only_the_public_names():
    public = {f"prefect_raybatch.{name}" for name in prefect_raybatch.__all__}
    for folder in ("flows", "deployments"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for name in imports(path, lazy=True):
                if name.startswith("prefect_raybatch") and name != "prefect_raybatch":
                    assert name in public or name.startswith("prefect_raybatch.demo"), path


def test_no_assert_guards_anything():
    """`python -O` would drop it."""
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)], path


# --- what users import --------------------------------------------------------------------------


def test_the_public_names_are_these_and_each_is_there():
    assert prefect_raybatch.__all__ == [
        "BatchInferenceJob",
        "BatchJob",
        "ObjectStore",
        "RayBatchError",
        "RayCluster",
        "Run",
        "RunReport",
        "batch_inference",
        "finalize_run",
        "infer_shards",
        "plan_shards",
        "reconcile_jobs",
        "retry_failed",
        "tune_job",
    ]
    for name in prefect_raybatch.__all__:
        assert getattr(prefect_raybatch, name) is not None
        assert name in dir(prefect_raybatch)
    assert prefect_raybatch.__version__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        prefect_raybatch.nothing  # noqa: B018


HEAVY = ["ray", "vllm", "torch", "transformers", "prefect", "s3fs"]
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
except SystemExit:
    pass
"""
    assert python(code + LOADED) == []


def test_importing_everything_below_the_pipeline_loads_nothing_heavy():
    light = [m for m in MODULES if m not in {"pipeline", "stages.read", "stages.window", *ENDS}] + [
        "cli"
    ]
    code = "".join(f"import prefect_raybatch.{m}\n" for m in light)
    assert python(code + LOADED) == []


@pytest.mark.parametrize("command", ["status", "verify", "report"])
def test_looking_at_a_run_loads_nothing_heavy(tmp_path, command):
    run = small_run(tmp_path)
    run.commit_all()
    code = f"""
from prefect_raybatch import cli
try:
    cli.main(["{command}", {str(tmp_path)!r}, "--json"])
except SystemExit:
    pass
"""
    assert python(code + LOADED) == []


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_pyarrow_reads_python_files_in_the_calling_thread(path):
    """`Store.open` says why: otherwise 35 of 160 short scripts were aborted at their end."""
    for call in (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)):
        name = getattr(call.func, "attr", "")
        native = bool(call.args) and "BufferReader" in ast.unparse(call.args[0])
        options = {word.arg: ast.unparse(word.value) for word in call.keywords}
        if name == "read_table":
            assert native, f"{path}: {ast.unparse(call)}"
        elif name == "ParquetFile":
            assert native or options.get("pre_buffer") == "False", f"{path}: {ast.unparse(call)}"
        elif name in ("read_row_group", "read_row_groups") or (
            name == "iter_batches" and "dataset" not in ast.unparse(call.func) and call.args
        ):
            assert options.get("use_threads") == "False", f"{path}: {ast.unparse(call)}"
