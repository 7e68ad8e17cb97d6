"""What a job file or a file of the input may not bring about."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.small import make_job, small_run

from prefect_raybatch.errors import ConfigError, CorruptRun, SourceError
from prefect_raybatch.job.functions import load_function
from prefect_raybatch.job.trust import check_trust, check_types
from prefect_raybatch.ledger.plan_tables import decode_schema, encode_schema
from prefect_raybatch.result.finalize import finalize, first_rows
from prefect_raybatch.runs.dry_run import dry_run
from prefect_raybatch.runs.infer_run import infer_run
from prefect_raybatch.runs.plan_run import plan_run, precheck
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


def test_an_operator_can_say_where_functions_come_from(monkeypatch):
    job = make_job(prompt={"function": "acme.prompts:ask"})
    check_trust(job)
    monkeypatch.setenv("RAYBATCH_FUNCTION_MODULES", "acme, other.module")
    check_trust(job)
    for name in ("acmeology:ask", "elsewhere:ask", "other:ask"):
        with pytest.raises(ConfigError, match=r"may only come from acme, other\.module here"):
            check_trust(make_job(prompt={"function": name}))


@pytest.mark.parametrize(
    "name", ["PYTHONPATH", "LD_PRELOAD", "ld_library_path", "PATH", "BASH_ENV", "VLLM_PLUGINS"]
)
def test_a_job_cannot_choose_the_code_an_engine_loads(name):
    with pytest.raises(ConfigError, match=f"engine.env: {name} decides which code"):
        check_trust(make_job(engine={"env": {name: "/tmp/x"}}))


def test_a_job_may_set_other_variables():
    check_trust(make_job(engine={"env": {"VLLM_CPU_KVCACHE_SPACE": "2", "OMP_NUM_THREADS": "1"}}))


def test_code_of_a_model_needs_the_operator(monkeypatch):
    for extra in ({"trust_remote_code": True}, {"worker_cls": "evil.Worker"}):
        job = make_job(engine=extra)
        with pytest.raises(ConfigError, match="RAYBATCH_ALLOW_ENGINE_CODE=1"):
            check_trust(job)
        monkeypatch.setenv("RAYBATCH_ALLOW_ENGINE_CODE", "1")
        check_trust(job)
        monkeypatch.delenv("RAYBATCH_ALLOW_ENGINE_CODE")
    check_trust(make_job(engine={"trust_remote_code": False, "worker_cls": "auto"}))


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
    with pytest.raises(SourceError, match=r"in.parquet: column 'Company' is of extension type"):
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
        with pytest.raises(CorruptRun, match=r"column 'b' is of extension type evil.pickle"):
            check_types(pa.schema([("a", pa.int32()), ("b", nested)]), "x")
