"""Limits what a job may do.

What a job names (code, settings, folders, hosts) is compared with the policy in force, which is
decided where the job arrives and never by the job itself. docs/security.md explains the policies.
"""

from __future__ import annotations

from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.chat import is_template_text
from prefect_raybatch.job.checks import class_name, is_web
from prefect_raybatch.job.cluster import LOCAL, Cluster
from prefect_raybatch.job.engine import Engine
from prefect_raybatch.job.functions import check_place
from prefect_raybatch.job.publish import PublishTarget
from prefect_raybatch.job.table_formats import format_of_scheme, scheme_of
from prefect_raybatch.job.trusted_engine import check_engine_trust
from prefect_raybatch.job.trusted_places import HUB_HOST, Reach, limited_reach
from prefect_raybatch.job.trusted_pods import check_made_pods
from prefect_raybatch.policy.in_force import policy_in_force
from prefect_raybatch.policy.policy import JobPolicy


def check_trust(job: BatchJob) -> None:
    """Raise `ConfigError` for the first thing in a job that the policy in force does not allow.

    Checks functions and classes, engine settings, folders, hosts, variables, blocks and pods.
    Contacts no server, and imports no user module.
    """
    policy = policy_in_force()
    for field, name in (
        ("prompt.function", job.prompt.function),
        ("output.postprocess", job.output.postprocess),
        ("output.schema_model", class_name(job.output.schema_model)),
    ):
        if name:
            check_place(name, field)
    check_engine_trust(job.engine, policy)
    if (larger := job.output.escalate.engine) is not None:
        check_engine_trust(larger, policy)
    if job.quality.judge.asked:
        check_engine_trust(job.quality.judge.whole_engine, policy)
    check_reach(job, policy)
    check_made_pods(job.cluster, policy)


def check_reach(job: BatchJob, policy: JobPolicy) -> None:
    """Raise `ConfigError` for the first folder, host, variable or block that the policy rejects.

    Also checks store options and access to private addresses. Does nothing for a job that its owner
    runs: the owner's policy does not limit any of this.
    """
    if not policy.limited:
        return
    reach = Reach(policy)
    source, prompt, output, engine = job.source, job.prompt, job.output, job.engine
    for uri in source.uris if not source.catalog else ():
        _check_source(reach, uri)
    reach.catalog("source.catalog", source.catalog, writes=False)
    reach.options("source.options", source.options)
    _check_blocks(reach, job)
    reach.private("source.web.allow_private", source.web.allow_private)
    if source.media_root is not None:
        reach.read("source.media_root", source.media_root)
    reach.private("prompt.images.allow_private", prompt.images.allow_private)
    template = prompt.chat_template
    if template is not None and not is_template_text(template):
        reach.read("prompt.chat_template", template)
    schema = output.schema_model
    if isinstance(schema, str) and not schema.lstrip().startswith("{") and not class_name(schema):
        reach.read("output.schema_model", schema)
    _check_model(reach, "engine", engine)
    if (larger := output.escalate.engine) is not None:
        _check_model(reach, "output.escalate.to", larger)
    if job.quality.judge.asked:
        _check_model(reach, "quality.judge", job.quality.judge.whole_engine)
    for name, adapter in {"": engine.adapter, **engine.adapters}.items():
        if adapter is not None:
            reach.model(f"engine.adapters.{name}" if name else "engine.adapter", adapter)
    if engine.classifier is not None:
        reach.read("engine.classifier", engine.classifier)
    reach.write("output.uri", output.uri)
    reach.options("output.options", output.options)
    if job.reuse is not None and job.reuse not in ("latest", "all"):
        reach.read("reuse", job.reuse)
    if job.quality.golden is not None:
        reach.read("quality.golden", job.quality.golden)
    for target in output.publish:
        _check_target(reach, target)
    _check_cluster(reach, job.cluster)


def _check_model(reach: Reach, group: str, engine: Engine) -> None:
    if engine.endpoint.url is not None:
        reach.connect_url(f"{group}.endpoint.url", engine.endpoint.url)
        reach.variables(f"{group}.endpoint.key", engine.endpoint.key)
    if engine.model != "demo":
        reach.model(f"{group}.model", engine.model)


def check_blocks(job: BatchJob) -> None:
    """Raise `ConfigError` if the job names a saved Prefect block that the policy does not allow.

    Checks only the names of blocks, so no block needs to be loaded. Does nothing for a job that its
    owner runs: the owner's policy allows all blocks.
    """
    if reach := limited_reach():
        _check_blocks(reach, job)


def _check_source(reach: Reach, uri: str) -> None:
    kind = format_of_scheme(scheme_of(uri))
    if is_web(uri):
        reach.connect_url("source.uri", uri)
    elif kind == "huggingface":
        reach.connect("source.uri", HUB_HOST)
    elif kind == "sql":
        reach.database("source.uri", uri, writes=False)
    else:
        reach.read("source.uri", uri)


def _check_target(reach: Reach, target: PublishTarget) -> None:
    field = f"output.publish.{target.label}"
    for name in ("uri", "catalog", "options"):
        reach.variables(f"{field}.{name}", getattr(target, name))
    reach.options(f"{field}.options", target.options)
    reach.catalog(f"{field}.catalog", target.catalog, writes=True)
    if target.uri is None:
        return
    if target.format == "sql":
        reach.database(f"{field}.uri", target.uri, writes=True)
    else:
        reach.write(f"{field}.uri", target.uri)


def _check_blocks(reach: Reach, job: BatchJob) -> None:
    reach.block("source.credentials_block", job.source.credentials_block)
    reach.block("output.credentials_block", job.output.credentials_block)
    reach.block("cluster.block", job.cluster.block)
    reach.block("engine.endpoint.block", job.engine.endpoint.block)
    reach.block("quality.judge.endpoint.block", job.quality.judge.block)


def _check_cluster(reach: Reach, cluster: Cluster) -> None:
    access = cluster.access_if_loaded
    for address in {cluster.address, access and access.address} - {None, LOCAL, "auto"}:
        reach.connect_url("cluster.address", f"//{address}")
    for server in {cluster.job_server, access and access.job_server} - {None}:
        reach.connect_url("cluster.job_server", str(server))
