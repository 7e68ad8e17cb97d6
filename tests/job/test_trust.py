"""What a job file or a file of the input may not bring about."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.policies import set_policy
from helpers.small import make_job, small_run

from prefect_raybatch.api import dry_run, infer_run, plan_run, precheck
from prefect_raybatch.errors import ConfigError, CorruptRun, SourceError
from prefect_raybatch.job.answer_schema import schema_text
from prefect_raybatch.job.column_types import check_types
from prefect_raybatch.job.functions import load_function
from prefect_raybatch.job.trust import check_trust
from prefect_raybatch.ledger.plan_tables import decode_schema, encode_schema
from prefect_raybatch.policy.in_force import operator_policy, policy_applied
from prefect_raybatch.result.finalize import finalize, first_rows
from prefect_raybatch.runs.run import Run, run_store

ASK = {"function": "helpers.functions:ask"}


@pytest.mark.parametrize(
    "name",
    ["os:system", "subprocess:run", "builtins:eval", "importlib:import_module", "os.path:exists"],
)
def test_functions_of_python_itself_are_refused_before_anything_is_imported(name):
    for groups in ({"prompt": {"function": name}}, {"output": {"uri": "o", "postprocess": name}}):
        with pytest.raises(ConfigError, match="is part of Python"):
            check_trust(make_job(**groups))
    with pytest.raises(ConfigError, match="is part of Python"):
        load_function(name, "prompt.function")


def test_an_operator_can_say_where_functions_of_jobs_from_elsewhere_come_from(
    monkeypatch, tmp_path
):
    read = {"read": ["*"], "write": ["*"]}
    set_policy(monkeypatch, tmp_path, function_modules=["acme", "other.module"], **read)
    for name in ("acme.prompts:ask", "acme:ask", "other.module.deep:ask"):
        with policy_applied(operator_policy()):
            check_trust(make_job(prompt={"function": name}))
    for name in ("acmeology:ask", "elsewhere:ask", "other:ask"):
        job = make_job(prompt={"function": name})
        check_trust(job)  # of its owner
        with (
            policy_applied(operator_policy()),
            pytest.raises(ConfigError, match=r"functions may come from acme, other\.module, not"),
        ):
            check_trust(job)


@pytest.mark.parametrize(
    "name",
    [
        *("PYTHONPATH", "LD_PRELOAD", "ld_library_path", "PATH", "BASH_ENV", "VLLM_PLUGINS"),
        *(
            "VLLM_LOGGING_CONFIG_PATH",
            "HF_HOME",
            "HTTPS_PROXY",
            "VLLM_ALLOW_INSECURE_SERIALIZATION",
        ),
        *(
            "VLLM_LOGGING_PREFIX",
            "TORCHINDUCTOR_CACHE_DIR",
            "VLLM_CACHE_ROOT",
            "RAY_RUNTIME_ENV_HOOK",
        ),
        *("CUDA_HOME", "NCCL_NET_PLUGIN", "NCCL_CONF_FILE", "PYTORCH_NVML_BASED_CUDA_CHECK"),
    ],
)
def test_a_job_sets_only_the_variables_on_the_list(monkeypatch, tmp_path, name):
    job = make_job(engine={"env": {name: "/tmp/x"}})
    with pytest.raises(ConfigError, match=f"engine.env: a job may not set {name}"):
        check_trust(job)
    set_policy(monkeypatch, tmp_path, engine_variables=[name])
    check_trust(job)


def test_a_job_may_set_other_variables():
    check_trust(make_job(engine={"env": {"VLLM_CPU_KVCACHE_SPACE": "2", "OMP_NUM_THREADS": "1"}}))


def test_code_of_a_model_needs_the_operator(monkeypatch, tmp_path):
    for name, value in {"trust_remote_code": True, "worker_cls": "evil.Worker"}.items():
        job = make_job(engine={name: value})
        monkeypatch.delenv("RAYBATCH_POLICY")
        with pytest.raises(ConfigError, match=f"add {name} to engine_arguments in the file of"):
            check_trust(job)
        set_policy(monkeypatch, tmp_path, engine_arguments=[name])
        check_trust(job)
    check_trust(make_job(engine={"trust_remote_code": False, "worker_cls": "auto"}))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("acting:check_call", "is defined in subprocess, not in acting"),
        ("acting:quiet", "is defined in subprocess"),
        ("acting:loads", "is defined in .*pickle"),
        ("acting:counted", "is defined in builtins"),
        ("acting:Template", "is defined in string, not in acting"),
        ("acting:template", "is defined in string"),
        ("acting:nameless", "does not say which module defines it"),
    ],
)
def test_a_function_is_named_where_it_is_defined(monkeypatch, tmp_path, name, words):
    """A module may import what runs commands, as `alembic.util.editor` does `check_call`."""
    (tmp_path / "acting.py").write_text(ACTING)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=words):
        load_function(name, "prompt.function")
    for own in ("ask", "wrapped", "partly", "method", "instance"):
        assert callable(load_function(f"acting:{own}", "prompt.function"))
    if name == "acting:check_call":
        with pytest.raises(ConfigError, match=r"editor:check_call is defined in sub"):
            load_function("alembic.util.editor:check_call", "prompt.function")
    with pytest.raises(ConfigError, match=r"is defined in pydantic\.main, not in acting"):
        schema_text("acting:BaseModel")


ACTING = """
import functools
from pickle import loads
from string import Template
from subprocess import check_call
from pydantic import BaseModel

quiet = functools.partial(functools.partial(check_call), stdout=None)
counted = len
template = Template("a").substitute


class Nameless:
    __module__ = None

    def __call__(self, row): ...


nameless = Nameless()


class Asker:
    def __call__(self, row): ...

    def ask(self, row): ...


instance, method = Asker(), Asker().ask


def ask(row): ...


def two(row, more): ...


@functools.wraps(ask)
def wrapped(row): ...


partly = functools.partial(two, more=1)
"""


def test_every_way_into_a_run_asks(tmp_path):
    pq.write_table(pa.table({"Company": ["a"]}), tmp_path / "in.parquet")
    job = make_job(
        source={"uri": str(tmp_path / "in.parquet")},
        prompt={"function": "os:system"},
        output={"uri": str(tmp_path / "out")},
    )
    run = Run(str(tmp_path / "out/k"), "k", "0" * 64, 1, 1, False)
    for way in (
        lambda: plan_run(job, "k"),
        lambda: dry_run(job),
        lambda: precheck(job, run_store(job.output, "k")),
        lambda: infer_run(job, run),
    ):
        with pytest.raises(ConfigError, match="is part of Python"):
            way()
    assert not (tmp_path / "out").exists()


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.mark),))


def bomb_column(mark: Path, known: bool) -> pa.Table:
    """A column of Ray's pickled objects, as a process that knows the type sees it, or does not."""
    from ray.data._internal.tensor_extensions import arrow as _  # noqa: F401
    from ray.data.extensions.object_extension import ArrowPythonObjectType

    kind = ArrowPythonObjectType()
    storage = pa.array([pickle.dumps(Bomb(mark))], kind.storage_type)
    if known:
        return pa.table({"Company": pa.ExtensionArray.from_storage(kind, storage)})
    marks = {b"ARROW:extension:name": kind.extension_name.encode()}
    return pa.table(
        [storage], schema=pa.schema([pa.field("Company", storage.type, metadata=marks)])
    )


@pytest.mark.parametrize("known", [True, False])
def test_pickled_objects_are_refused_wherever_a_file_is_read(tmp_path, known):
    mark = tmp_path / "mark"
    table = bomb_column(mark, known)
    pq.write_table(table, tmp_path / "in.parquet")
    job = make_job(
        source={"uri": str(tmp_path / "in.parquet")}, output={"uri": str(tmp_path / "out")}
    )
    with pytest.raises(SourceError, match=r"in.parquet: column 'Company' has the extension type"):
        plan_run(job, "k")
    with pytest.raises(CorruptRun, match="extension type"):
        decode_schema(encode_schema(table.schema))
    run = small_run(tmp_path / "run")
    run.commit_all()
    result = finalize(run.ledger, run.plan, run.shards, "_row", 1 << 20)
    pq.write_table(table, tmp_path / "run" / result.parts[0].path)
    with pytest.raises(CorruptRun, match="extension type"):
        first_rows(run.store, [result.parts[0].path], 10)
    assert not mark.exists()


def test_nested_and_canonical_types():
    kind = pa.fixed_shape_tensor(pa.float32(), (2, 2))
    check_types(pa.schema([("a", kind), ("b", pa.list_(pa.string()))]), "x")
    inner = pa.field("v", pa.binary(), metadata={b"ARROW:extension:name": b"evil.pickle"})
    for nested in (pa.struct([inner]), pa.list_(inner), pa.list_(pa.struct([inner]))):
        with pytest.raises(CorruptRun, match=r"column 'b' has the extension type evil.pickle"):
            check_types(pa.schema([("a", pa.int32()), ("b", nested)]), "x")
