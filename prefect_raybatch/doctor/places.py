"""Checks of the policy, and of a job's output, source, model and functions."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path

from prefect_raybatch.compile.job import compile_job, compile_judge, model_request, read_spec
from prefect_raybatch.doctor.check_result import CheckContext, CheckResult, failed, passed, warned
from prefect_raybatch.errors import ConfigError, HubUnavailable, RayBatchError
from prefect_raybatch.job.engine import Engine
from prefect_raybatch.job.escalate import larger_fields
from prefect_raybatch.job.functions import load_function
from prefect_raybatch.job.judge import judge_fields
from prefect_raybatch.job.secrets import recorded_endpoint
from prefect_raybatch.job.trust import check_trust
from prefect_raybatch.model import pinned as models
from prefect_raybatch.model.check import INDEX
from prefect_raybatch.model.pinned import WEIGHTS
from prefect_raybatch.plan import plan as planning
from prefect_raybatch.policy.in_force import (
    POLICY_FILE,
    operator_policy,
    owner_policy,
    policy_applied,
)
from prefect_raybatch.policy.policy import JobPolicy
from prefect_raybatch.runs.plan_run import answer_spec
from prefect_raybatch.runs.quality import check_quality_columns
from prefect_raybatch.spec.endpoint import EndpointSpec
from prefect_raybatch.spec.engine import ModelRequest
from prefect_raybatch.stages.hosted_batches.api import check_hosted_model
from prefect_raybatch.storage import is_remote, open_store
from prefect_raybatch.storage.uri import normalize
from prefect_raybatch.words import counted

HOSTED_REMEDY = "correct the URL, model or key; or see this machine's DNS, proxy and firewall"


def check_policy(context: CheckContext) -> Iterator[CheckResult]:
    """Report what the operator's policy allows to submitted jobs.

    If the operator has a policy file (RAYBATCH_POLICY), report too whether it allows this job.
    Raises `ConfigError` if the policy for jobs that a user runs by hand (`owner_policy`) refuses
    the job.
    """
    operator = operator_policy()
    yield passed(
        "policy",
        f"jobs sent through Prefect's API or a job server may use only {described(operator)} "
        f"({operator.title})",
    )
    if context.job is None:
        return
    with policy_applied(owner_policy()):
        check_trust(context.job)
    if not os.environ.get(POLICY_FILE):
        return
    try:
        with policy_applied(operator):
            check_trust(context.job)
    except ConfigError as error:
        yield warned(
            "policy",
            f"this job is refused as a deployment: {error}",
            "extend the policy file (RAYBATCH_POLICY), unless the job is only run by hand",
        )
    else:
        yield passed("policy", "allows this job as a deployment")


def described(policy: JobPolicy) -> str:
    """Return a text with the policy's fields that allow something; "nothing" if there are none."""
    settings = {
        field.name: getattr(policy, field.name)
        for field in fields(policy)
        if field.name not in ("title", "limited", "kubernetes")
    }
    limits = policy.kubernetes
    settings |= {f"kubernetes.{f.name}": getattr(limits, f.name) for f in fields(limits)}
    allowed = [f"{name}: {_shown(value)}" for name, value in settings.items() if value]
    return "; ".join(allowed) or "nothing"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(value)
    return str(value)


DISK_LEAST, DISK_GOOD = 1 << 30, 10 << 30  # bytes free
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tekken.json")


def check_disk(context: CheckContext) -> Iterator[CheckResult]:
    """Check the free space of the disk that a job writes to."""
    if context.job is not None and not is_remote(context.job.output.uri):
        yield _disk(Path(normalize(context.job.output.uri)))


def _disk(folder: Path) -> CheckResult:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    text = f"{free / (1 << 30):.1f} GiB free in {there}"
    if free >= DISK_GOOD:
        return passed("disk", text)
    make = failed if free < DISK_LEAST else warned
    return make(
        "disk", text, "free some space, or choose another output.uri: a full disk ends a run"
    )


def check_source(context: CheckContext) -> Iterator[CheckResult]:
    """Check that the input exists, is readable, and has the columns that the job uses."""
    job = context.keyed()
    if job is None:
        return
    from prefect_raybatch import source

    read = read_spec(job.source)
    if source.needs_snapshot(read):
        found = source.peek(read)
    else:  # the first file with rows is enough here; the plan reads every footer
        found = source.inventory(replace(read, limit=1))
    spec = compile_job(job, found.schema.names)
    planning.check_against_schema(spec, found.schema, compile_judge(job))
    check_quality_columns(job.quality, job.output, answer_spec(spec), found.schema.names)
    columns = ", ".join(found.schema.names)
    yield passed("source", f"{found.format}, columns {columns[:200]}")


def check_saved_blocks(context: CheckContext) -> tuple[CheckResult, ...]:
    """Raise `ConfigError` if a Prefect block of the job cannot be loaded; else return ()."""
    context.keyed()
    return ()


def check_model(context: CheckContext) -> Iterator[CheckResult]:
    """Check that each model of the job exists and is complete, or can be downloaded."""
    job = context.keyed()
    if job is None:
        return
    yield _model_finding(job.engine, str)
    if (larger := job.output.escalate.engine) is not None:
        yield _model_finding(larger, larger_fields)
    if (judge := job.quality.judge).asked:
        yield _model_finding(judge.whole_engine, judge_fields)


def _model_finding(engine: Engine, named: Callable[[str], str]) -> CheckResult:
    """Check that an engine's model exists, or that its hosted model answers.

    `named` replaces the names of engine fields in an error text by their full names in the job.
    Raises `ConfigError` for a missing model.
    """
    try:
        request = model_request(engine)
        hosted = request.endpoint
        return _stored_model(request) if hosted is None else _hosted_model(hosted, named)
    except (ConfigError, HubUnavailable) as error:
        raise type(error)(named(str(error))) from None


def _hosted_model(hosted: EndpointSpec, named: Callable[[str], str]) -> CheckResult:
    try:
        check_hosted_model(hosted)
    except RayBatchError as error:
        return failed("model", f"{hosted.model}: {named(str(error))}", HOSTED_REMEDY)
    return passed("model", f"{hosted.model} is at {recorded_endpoint(hosted.url)}")


def _stored_model(request: ModelRequest) -> CheckResult:
    """Check that a model's folder is complete, or that a model can be downloaded.

    Raises `ConfigError` if neither a folder nor a model with this name is found.
    """
    found = models.pin(request)  # raises ConfigError with what to do
    source = str(found["source"])
    if found["revision"]:
        return passed("model", f"{source} at {found['revision']}")
    if is_remote(source):
        files = {info.path for info in open_store(source).list()}
        index = open_store(source).read(INDEX, 64 << 20) if INDEX in files else b"{}"
    else:
        folder = Path(models.local_path(found))
        files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        index = (folder / INDEX).read_bytes() if INDEX in files else b"{}"
    missing = _missing(files, index)
    if request.vllm_arguments.get("tokenizer"):
        missing = [name for name in missing if name != TOKENIZERS[0]]
    if missing:
        return failed(
            "model",
            f"{source} has no {', '.join(missing)[:300]}",
            "copy the whole folder again: a copy was interrupted",
        )
    return passed("model", f"{source}: {counted(len(files), 'file')}, complete")


def _missing(files: set[str], index: bytes) -> list[str]:
    """Return what a model folder lacks, as file names or texts for the user.

    `files` are the names of its files, `index` is the JSON that lists the files of its weights.
    """
    missing = sorted(set(json.loads(index).get("weight_map", {}).values()) - files)
    if not any(name.endswith(WEIGHTS) for name in files):
        missing.append("weights (*.safetensors)")
    if not any(name in files for name in TOKENIZERS) and not any(
        name.endswith(".gguf") for name in files
    ):
        missing.append(TOKENIZERS[0])
    return missing


def check_functions(context: CheckContext) -> Iterator[CheckResult]:
    """Check that the user's functions can be imported here."""
    if context.job is None:
        return
    functions = {
        "prompt.function": context.job.prompt.function,
        "output.postprocess": context.job.output.postprocess,
    }
    for field, name in functions.items():
        if name is None:
            continue
        try:
            load_function(name, field)
        except ConfigError as error:
            yield failed("functions", str(error), _where())
        except Exception as error:  # whatever their module does when it is imported
            text = f"{field}: importing {name} raises {type(error).__name__}: {error}"
            yield failed("functions", text[:500], "fix the module so that it can be imported here")
        else:
            yield passed("functions", f"{field}: {name}")


def _where() -> str:
    path = os.environ.get("PYTHONPATH")
    return (
        "install its package here and on every node, or add its folder to PYTHONPATH"
        f"{f' (now {path})' if path else ''}"
    )
