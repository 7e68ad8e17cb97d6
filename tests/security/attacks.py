"""The table of attacks: what somebody tries who writes a job, and the refusal that is expected.

An attack on a job is `Attack(title, words, groups)`: the job with those groups is refused with
words that match. `origin` is who runs it: its owner, or "elsewhere": Prefect's API or a job server,
under the strict policy plus `policy`, the fields of a policy file.

`HIDDEN` and `MARKUP` are what rows, files, nodes, stages and errors hold to reach whoever looks at
them: through a terminal, a page or a Markdown viewer.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

OWNER, ELSEWHERE = "owner", "elsewhere"
EVERYWHERE = {"read": ["*"], "write": ["*"], "hosts": ["*"]}
ALLOWED = {"read": ["{folder}/in"], "write": ["{folder}/out"]}


@dataclass(frozen=True)
class Attack:
    """A job that is refused: `words` is a pattern of the refusal."""

    title: str
    words: str
    groups: dict[str, Any]
    origin: str = ELSEWHERE
    policy: dict[str, Any] = field(default_factory=lambda: dict(ALLOWED))


def _code(argument: str, value: Any) -> Attack:
    """An engine argument that runs code, for a job's owner as for anybody."""
    words = rf"engine\.{argument.partition('.')[0]}\S* may name code"
    name, _, inner = argument.partition(".")
    given = {inner: value} if inner else value
    return Attack(f"engine.{argument}", words, {"engine": {name: given}}, OWNER)


def _variable(name: str) -> Attack:
    words = f"engine.env: a job may not set {name}"
    return Attack(f"engine.env.{name}", words, {"engine": {"env": {name: "/tmp/x"}}}, OWNER)


def _argument(argument: str, value: Any) -> Attack:
    """An engine argument that names a place: its owner's, and nobody's from elsewhere."""
    words = rf"engine\.{argument}\S* may name code, a file or a host"
    return Attack(f"engine.{argument} elsewhere", words, {"engine": {argument: value}})


def _read(uri: str) -> Attack:
    return Attack(f"source.uri {uri}", r"source\.uri: .* may not read", {"source": {"uri": uri}})


def _host(uri: str, **more: Any) -> Attack:
    source = {"uri": uri, **more}
    return Attack(f"source.uri {uri}", r"source\.uri: .* may not name", {"source": source})


def _sql(uri: str, words: str) -> Attack:
    source = {"uri": uri, "query": "SELECT 1"}
    return Attack(f"source.uri {uri}", words, {"source": source}, policy={"read": ["{folder}/in"]})


def _target(words: str, **target: Any) -> Attack:
    output = {"uri": "{folder}/out", "publish": [target]}
    return Attack(f"output.publish {target}", words, {"output": output})


def _option(words: str, options: dict[str, Any], **policy: Any) -> Attack:
    groups = {"output": {"uri": "s3://mine/out", "options": options}}
    given = {"read": ["{folder}/in"], "write": ["s3://mine"], **policy}
    return Attack(f"output.options {options}", words, groups, policy=given)


def _catalog(words: str, **catalog: Any) -> Attack:
    """A catalog of a source, where good.com and every folder of {folder}/in may be named."""
    source = {"uri": "a.b", "catalog": catalog}
    given = {**ALLOWED, "hosts": ["good.com", "*.example.com"]}
    return Attack(f"source.catalog {catalog}", words, {"source": source}, policy=given)


def _among(uri: str, words: str, query: bool = False) -> Attack:
    """A URL that one reader takes for an allowed host's, and another for evil.com's."""
    source = {"uri": uri, **({"query": "SELECT 1"} if query else {})}
    given = {**ALLOWED, "hosts": ["good.com", "*.example.com"]}
    return Attack(f"source.uri {uri}", words, {"source": source}, policy=given)


def _value(name: str, value: str) -> Attack:
    """A variable that a job may set, with a value that names a file or a module."""
    words = rf"engine\.env: {name} may not contain"
    return Attack(f"engine.env.{name} {value!r}", words, {"engine": {"env": {name: value}}}, OWNER)


def _pods(title: str, words: str, kubernetes: dict[str, Any], **given: Any) -> Attack:
    groups = {"cluster": {"kubernetes": kubernetes}, "engine": {"device": "cpu"}}
    return Attack(f"cluster.kubernetes {title}", words, groups, **given)


def manifest(
    pod: dict[str, Any] | None = None, container: dict[str, Any] | None = None, **spec: Any
) -> dict[str, Any]:
    """A RayCluster whose worker pods have these fields besides."""
    ray = {"name": "ray", "image": "ray:1", "resources": {"limits": {"cpu": "1"}}}
    head = {"template": {"spec": {"containers": [ray]}}}
    pods = {"containers": [{**ray, **(container or {})}], **(pod or {})}
    workers = {"groupName": "w", "replicas": 1, "template": {"spec": pods}}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "spec": {"headGroupSpec": head, "workerGroupSpecs": [workers], **spec},
    }


REFUSED_FIELD = r"cluster\.kubernetes\.manifest\.spec\S*: is not a field that a pod may have"


def _manifest(title: str, **fields: Any) -> Attack:
    return _pods(title, REFUSED_FIELD, {"manifest": manifest(**fields)}, origin=OWNER)


def _metadata(title: str, **metadata: Any) -> Attack:
    """A manifest whose worker pods have this metadata."""
    made = manifest()
    made["spec"]["workerGroupSpecs"][0]["template"]["metadata"] = metadata
    return _pods(title, REFUSED_FIELD, {"manifest": made}, origin=OWNER)


def _group(title: str, words: str, **fields: Any) -> Attack:
    """A manifest whose group of workers has these fields."""
    made = manifest()
    made["spec"]["workerGroupSpecs"][0].update(fields)
    return _pods(title, words, {"manifest": made}, origin=OWNER)


MERGED = {"type": "rest", "uri": "http://evil.example.com"}
ATTACKS = (
    # code
    *map(
        _variable,
        (
            *("VLLM_LOGGING_CONFIG_PATH", "VLLM_PLUGINS", "VLLM_CONFIG_ROOT", "VLLM_CACHE_ROOT"),
            *("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_SERVER_DEV_MODE", "VLLM_USE_MODELSCOPE"),
            *("PYTHONPATH", "PYTHONSTARTUP", "LD_PRELOAD", "LD_AUDIT", "PATH", "HOME", "BASH_ENV"),
            *("HF_HOME", "HF_ENDPOINT", "HF_MODULES_CACHE", "TORCH_HOME", "TRITON_CACHE_DIR"),
            *("NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN", "CUDA_INJECTION64_PATH", "HTTPS_PROXY"),
            *("RAY_JOB_HEADERS", "RAY_RUNTIME_ENV_HOOK", "RAYBATCH_POLICY", "AWS_CONFIG_FILE"),
        ),
    ),
    *(
        _code(argument, value)
        for argument, value in (
            ("reasoning_parser_plugin", "/tmp/evil.py"),
            ("structured_outputs_config.reasoning_parser_plugin", "/tmp/evil.py"),
            ("io_processor_plugin", "evil"),
            ("worker_cls", "evil.Worker"),
            ("worker_extension_cls", "evil.Extension"),
            ("scheduler_cls", "evil.Scheduler"),
            ("distributed_executor_backend", "evil.Executor"),
            ("logits_processors", ["evil:Processor"]),
            ("model_impl", "terratorch"),
            ("model_class_overrides", {"A": "evil:Model"}),
            ("hf_config_path", "/tmp/evil"),
            ("trust_remote_code", True),
            ("hf_overrides.trust_remote_code", True),
            ("mm_processor_kwargs.trust_remote_code", True),
            ("compilation_config.backend", "evil.compile"),
            ("compilation_config.cache_dir", "/tmp/evil"),
            ("compilation_config.inductor_passes", {"a": "evil.run"}),
            ("kv_transfer_config.kv_connector_module_path", "evil"),
            ("ec_transfer_config.ec_connector_module_path", "evil"),
            ("speculative_config", {"method": "custom_class", "model": "evil.Proposer"}),
            ("speculative_config.model", "evil.Proposer"),
            # a port that tells whoever asks the tokens of all rows; a program that is started
            ("kv_events_config", {"enable_kv_cache_events": True}),
            ("ray_workers_use_nsight", True),
        )
    ),
    *(
        _value(name, value)
        for name, value in (
            ("TZ", ":/etc/shadow"),
            ("TZ", "/etc/shadow"),
            ("TZ", "../../../etc/shadow"),
            ("VLLM_LOGGING_LEVEL", "ext://evil.module"),
            ("VLLM_LOGGING_LEVEL", "INFO\nx"),
            ("NCCL_DEBUG", "/tmp/x"),
            ("VLLM_ATTENTION_BACKEND", "evil\\x"),
        )
    ),
    *(
        Attack(name, "is part of Python", {"prompt": {"function": name}}, OWNER)
        for name in (
            *("os:system", "subprocess:check_call", "builtins:eval", "pickle:loads"),
            *("test.support.os_helper:rmtree", "__mp_main__:run", "posix:system"),
            *("idlelib.run:Executive", "_posixsubprocess:fork_exec"),
        )
    ),
    Attack("a module", "functions may come from no module", {"prompt": {"function": "acme:ask"}}),
    Attack(
        "a schema's module",
        "functions may come from acme, not from 'acmeology'",
        {"output": {"uri": "{folder}/out", "schema_model": "acmeology:Answer"}},
        policy={**ALLOWED, "function_modules": ["acme"]},
    ),
    # places of an engine
    *(
        _argument(argument, value)
        for argument, value in (
            ("tokenizer", "/etc"),
            ("download_dir", "/etc"),
            ("allowed_local_media_path", "/"),
            ("additional_config", {"a": 1}),
            ("model_loader_extra_config", {"tensorizer_uri": "s3://evil/x"}),
            ("hf_overrides", {"a": "b"}),
            ("mm_processor_kwargs", {"a": 1}),
            ("otlp_traces_endpoint", "http://169.254.169.254/"),
            ("profiler_config", {"torch_profiler_dir": "/etc"}),
            ("generation_config", "/etc"),
            ("default_mm_loras", {"image": "/etc"}),
            ("override_generation_config", {"a": "b"}),
        )
    ),
    *(
        Attack(f"quality.judge {own}", words, {"quality": {"judge": {"prompt": "right?", **own}}})
        for own, words in (
            ({"model": "/etc"}, r"quality\.judge\.model: .* may not read /etc"),
            (
                {"endpoint": {"url": "http://evil/v1", "model": "m"}},
                r"quality\.judge\.endpoint\.url: .* name the host evil",
            ),
            (
                {"model": "demo", "engine": {"env": {"LD_PRELOAD": "/tmp/x"}}},
                r"env: a job may not set LD_PRELOAD",
            ),
        )
    ),
    *(
        Attack(
            f"output.escalate.to {to}",
            words,
            {"output": {"uri": "o", "escalate": {"to": to, "when": {"logprob_below": -1}}}},
        )
        for to, words in (
            ({"model": "/etc"}, r"output\.escalate\.to\.model: .* may not read /etc"),
            (
                {"endpoint": {"url": "http://evil/v1", "model": "m"}},
                r"output\.escalate\.to\.endpoint\.url: .* name the host evil",
            ),
            (
                {"model": "demo", "env": {"LD_PRELOAD": "/tmp/x"}},
                r"env: a job may not set LD_PRELOAD",
            ),
        )
    ),
    *(
        Attack(f"engine.model {name}", words, {"engine": {"model": name}})
        for name, words in (
            ("/etc", r"engine\.model: .* may not read /etc"),
            ("s3://evil/model", r"engine\.model: .* may not read"),
            ("owner/name", r"engine\.model: .* may not name the host huggingface\.co"),
        )
    ),
    Attack("an adapter", r"engine\.adapter: .* may not", {"engine": {"adapter": "/etc"}}),
    Attack(
        "adapters",
        r"engine\.adapters\.a: .* may not name the host",
        {
            "engine": {"adapters": {"a": "o/n"}},
            "prompt": {"template": "{Company}", "adapter_column": "c"},
        },
    ),
    # files
    *map(
        _read,
        (
            *("/etc/passwd", "file:///etc/passwd", "file://localhost/etc/passwd", "/etc/*"),
            *("file:///%65tc/passwd", "{folder}/in/../../../../../etc/passwd", "~/secret.csv"),
            *("{folder}/in/link/passwd", "{folder}/inside/a.csv", "{folder}/in*/a.csv", "/"),
            *("s3://mine/x.csv", "{folder}", "data.csv", "../x.csv", "{folder}/in/link/*"),
            # A store takes `..` off the text, the kernel off the folder that a link leads to.
            *("{folder}/latest/../secret.csv", "file://{folder}/latest/%2e%2e/secret.csv"),
            *("{folder}/latest/../*.csv", "data::x", "~root/x.csv", "$HOME/x.csv"),
            *("file:{folder}/in/a.csv", "{folder}/in/**/../../x.csv", "{folder}/IN/a.csv"),
            *("{folder}/in/%2e%2e/x.csv", "{folder}/in/%252E./x.csv"),
            *("{folder}/in /a.csv", "{folder}/i\u0301n/a.csv", "{run_date}/../etc"),
        ),
    ),
    *(
        Attack(
            f"{group}.{name} {given[name]}", rf"{group}\.{name}: .* may not {verb}", {group: given}
        )
        for group, name, verb, given in (
            ("prompt", "chat_template", "read", {"messages": "m", "chat_template": "/etc/passwd"}),
            ("engine", "classifier", "read", {"task": "embed", "classifier": "/etc/passwd"}),
            ("output", "schema_model", "read", {"uri": "{folder}/out", "schema_model": "/x.json"}),
            ("output", "uri", "write", {"uri": "/etc/cron.d"}),
            ("output", "uri", "write", {"uri": "{folder}/in"}),
            ("output", "uri", "write", {"uri": "{folder}/out/../../out2"}),
            ("output", "uri", "write", {"uri": "{folder}/out/link"}),
        )
    ),
    Attack(
        "source.media_root",
        r"source\.media_root: .* may not read /etc",
        {
            "source": {"uri": "{folder}/in/a.csv", "media_root": "/etc"},
            "prompt": {"template": "x", "images": {"columns": ["i"]}},
        },
    ),
    Attack("reuse", r"reuse: .* may not read", {"reuse": "/etc/run"}),
    *(
        Attack(
            f"source.uri {uri}",
            r"source\.uri: .* may not read",
            {"source": {"uri": uri, **more}},
            policy={"read": ["s3://mine/a"], "write": ["{folder}/out"]},
        )
        for uri, more in (
            # Readers of tables make a URL of it, in which %2e%2e is the folder above.
            ("s3://mine/a/%2e%2e/b", {"format": "delta"}),
            ("s3://mine/a/.%2E/b", {}),
            ("s3://mine/a/%2e/b", {"format": "lance"}),
            ("s3://mine/a/x%2f..%2f..%2fb", {"format": "delta"}),
            ("s3://mine/a/%252e%252e/b", {"format": "lance"}),
            ("s3://mine/a/../b", {}),
            ("s3://mine/a\\..\\b", {}),
            ("s3://MINE/a/x", {}),
            ("s3://mine/a*/x", {}),
            ("s3://mine/ab", {}),
        )
    ),
    # hosts
    *(
        _among(uri, r"source\.uri: .* may not name a URL without a plain host", query=True)
        for uri in (
            # The host of SQLAlchemy and libpq is evil.com.
            *("postgresql://good.com:5432/@evil.com/db", "postgresql://good.com/@evil.com/db"),
            *("postgresql://evil.com,x.example.com/db", "postgresql://good.com%x.evil.com/db"),
            *("postgresql://good.com:5432,evil.com/db", "postgresql://good.com%2cevil.com/db"),
            *("postgresql://%2Ftmp%2Fx.example.com/db", "mysql://evil.com;x.example.com/db"),
            *("mssql://good.com/db;SERVER=evil.com", "db2://good.com/db;HOSTNAME=evil.com"),
            *("postgresql://good.com/db#x", "postgresql://good.com/a\\b"),
        )
    ),
    *(
        _among(uri, r"source\.uri: .* may not name")
        for uri in (
            *("http://good.com%x.evil.com/a.csv", "http://good.com%2eevil.com/a.csv"),
            *("http://evil.com;.example.com/a.csv", "http://evil.com&.example.com/a.csv"),
            *("http://.example.com/a.csv", "http://x..example.com/a.csv"),
            *("http://good.com\t.evil.com/a.csv", "http://\uff47ood.com/a.csv"),
            *("http://good\u3002com/a.csv", "http://x.example.com.evil.com/a.csv"),
            *("http://[fe80::1%25.example.com]/a.csv", "http://0x7f.1/a.csv"),
            *("http://017700000001/a.csv", "http://127.1/a.csv", "http://[::ffff:7f00:1]/a.csv"),
            *("http://[64:ff9b::7f00:1]/a.csv", "http://good.com:99999/a.csv"),
        )
    ),
    *map(
        _host,
        (
            *("http://evil.example.com/a.csv", "https://10.0.0.7/a.csv", "http://[::1]/a.csv"),
            *("http://2130706433/a.csv", "HTTP://EVIL.EXAMPLE.COM./a.csv"),
            *("hf://datasets/owner/name",),
        ),
    ),
    Attack(
        "private addresses of the source",
        r"source\.web\.allow_private: .* may not reach private",
        {"source": {"uri": "http://a.com/a.csv", "web": {"allow_private": True}}},
        policy={**ALLOWED, "hosts": ["a.com"]},
    ),
    Attack(
        "private addresses of images",
        r"prompt\.images\.allow_private: .* may not reach private",
        {"prompt": {"template": "x", "images": {"columns": ["i"], "allow_private": True}}},
    ),
    *(
        Attack(f"cluster {given}", words, {"cluster": given})
        for given, words in (
            ({"address": "10.0.0.7:6379"}, r"cluster\.address: .* name the host 10\.0\.0\.7:6379"),
            ({"job_server": "http://evil:8265"}, r"cluster\.job_server: .* host evil:8265"),
            ({"block": "ray-cluster/admin"}, r"cluster\.block: .* Prefect block ray-cluster/admin"),
        )
    ),
    _option(r"endpoint_url: .* host evil", {"endpoint_url": "http://evil:9000"}),
    _option(
        r"endpoint_url: .* host 169", {"client_kwargs": {"endpoint_url": "http://169.254.1.1"}}
    ),
    _option(
        r"without a plain host", {"endpoint_url": "http://evil\\@good.com"}, hosts=["good.com"]
    ),
    _option(r"without a plain host", {"endpoint_url": "http://good.com%.evil"}, hosts=["good.com"]),
    _option(r"endpoint_url: .* host evil", {"endpoint_url": ["http://evil"]}),
    _option(r"region: .* may not use this region name", {"region": "x.evil.com/#"}),
    _option(r"region_name: .* region", {"client_kwargs": {"region_name": "evil.com/"}}),
    _option(r"verify: .* may not set this option", {"client_kwargs": {"verify": "/tmp/ca"}}),
    _option(r"fo: .* may not set this option", {"fo": "/etc/passwd"}),
    _option(r"target_protocol: .* may not set this option", {"target_protocol": "file"}),
    _option(r"storage_options: .* may not set this option", {"storage_options": {"a": 1}}),
    _option(r"token_env: .* variable HOME", {"token_env": "HOME"}),
    _option(r"proxies: .* may not set this option", {"config_kwargs": {"proxies": {"http": "x"}}}),
    _option(r"profile: .* may not set this option", {"profile": "admin"}),
    # secrets
    Attack(
        "a variable as a password",
        r"source\.options\.password_env: .* name the environment variable AWS_SECRET_ACCESS_KEY",
        {
            "source": {
                "uri": "postgresql://db/x",
                "query": "SELECT 1",
                "options": {"password_env": "AWS_SECRET_ACCESS_KEY"},
            }
        },
        policy={**ALLOWED, "hosts": ["db"]},
    ),
    Attack(
        "a variable in a catalog",
        r"source\.catalog: .* name the environment variable PREFECT_API_KEY",
        {"source": {"uri": "a.b", "catalog": {**MERGED, "token": "${{PREFECT_API_KEY}}"}}},
        policy={**ALLOWED, "hosts": ["*"]},
    ),
    Attack(
        "a catalog's host",
        r"source\.catalog\.uri: .* name the host evil\.example\.com",
        {"source": {"uri": "a.b", "catalog": {"name": "prod", "uri": MERGED["uri"]}}},
    ),
    Attack(
        "a catalog's file io",
        r"may not set this property",
        {"source": {"uri": "a.b", "catalog": {**MERGED, "adlfs.account-host": "x"}}},
        policy={**ALLOWED, "hosts": ["*"]},
    ),
    Attack(
        "a credentials block",
        r"output\.credentials_block: .* name the Prefect block aws-credentials/admin",
        {"output": {"uri": "{folder}/out", "credentials_block": "aws-credentials/admin"}},
    ),
    _catalog(r"without a plain host", type="rest", uri="http://good.com%x.evil.com"),
    _catalog(r"without a plain host", type="sql", uri="postgresql://good.com:1/@evil.com/x"),
    _catalog(r"uri: .* may not set this property", type="rest", uri=["http://evil.com"]),
    _catalog(r"host evil", type="rest", uri="//evil.com"),
    _catalog(r"without a plain host", type="rest", uri="evil.com"),
    _catalog(r"may not read file:", type="in-memory", warehouse="file:/etc"),
    _catalog(r"may not read etc", type="in-memory", warehouse="etc"),
    _catalog(r"may not read", type="in-memory", warehouse="hdfs://good.com/x"),
    _catalog(r"may not read s3:/", name="x", warehouse="s3:/evil"),
    _catalog(r"name a catalog of type glue", type="glue"),
    _catalog(r"name a catalog of type REST", type="REST", uri="http://good.com"),
    _catalog(
        r"s3\.region: .* may not use this region name",
        **{"type": "rest", "uri": "http://good.com", "s3.region": "x.evil.com/#"},
    ),
    *(
        _catalog(
            r"auth: .* may not set this property", type="rest", uri="http://good.com", auth=auth
        )
        for auth in (
            {"type": "google", "google": {"credentials_path": "/etc/passwd"}},
            {"type": "oauth2", "oauth2": {"token_url": "evil.com"}},
            {"type": "custom", "custom": {"x": 1}},
        )
    ),
    _catalog(
        r"variable HOME", type="rest", uri="http://good.com", token="${RAYBATCH_SECRET_A:-${HOME}}"
    ),
    _catalog(r"variable HOME", name="${{HOME}}"),
    # databases
    _sql("sqlite:////etc/x.db", r"source\.uri: .* may not read /etc/x\.db"),
    _sql("sqlite:///file:/etc/x.db?mode=rwc&uri=true", r"source\.uri: .* may not read /etc"),
    _sql("sqlite:///file:%2Fetc/x.db?uri=true", r"source\.uri: .* may not read /etc"),
    _sql("sqlite:///file:///etc/x.db?uri=true", r"source\.uri: .* may not read /etc"),
    _sql("sqlite:////{folder}/in/a.db?vfs=x", r"may not set the parameter vfs"),
    _sql("duckdb:////{folder}/in/a.db", r"may not query DuckDB"),
    _sql("postgresql://evil/db", r"may not name the host evil"),
    _sql("postgresql:///db", r"may not name a URL without a plain host"),
    _sql("postgresql://a/db?host=evil", r"may not set the parameter host"),
    _sql("postgresql://a/db?service=x", r"may not set the parameter service"),
    _sql("mssql+pyodbc:///?odbc_connect=DRIVER=/tmp/x.so", r"may not name the driver pyodbc"),
    # targets
    _target(r"may not write", format="parquet", uri="/etc/x"),
    _target(r"may not write", format="jsonl", uri="s3://evil/x"),
    _target(r"may not write", format="delta", uri="{folder}/in/t"),
    _target(r"may not write", format="sql", table="t", uri="sqlite:////etc/x.db"),
    _target(
        r"may not write",
        format="sql",
        table="t",
        uri="sqlite:///file:/etc/x#/../..{folder}/out/y?uri=true",
    ),
    _target(
        r"may not write",
        format="iceberg",
        table="a.b",
        catalog={
            "type": "sql",
            "uri": "sqlite:///{folder}/out/c.db",
            "warehouse": "file:///etc/x#/../..{folder}/out",
        },
    ),
    _target(  # pyiceberg takes it for a SQL catalog, and the name for a folder
        r"may not write",
        format="iceberg",
        table="a.b",
        catalog={"uri": "sqlite:///{folder}/out/c.db", "warehouse": "flows"},
    ),
    _target(
        r"may not write",
        format="iceberg",
        table="a.b",
        catalog={"type": None, "uri": "sqlite:///{folder}/out/c.db", "warehouse": "flows"},
    ),
    _target(r"may not write", format="sql", table="t", uri="sqlite:///file:/etc/x?mode=rwc&uri=1"),
    _target(r"host evil", format="sql", table="t", uri="postgresql://evil/db"),
    _target(r"variable HOME", format="parquet", uri="{folder}/out/${{HOME}}"),
    _target(
        r"without a plain host",
        format="sql",
        table="t",
        uri="postgresql://${{RAYBATCH_SECRET_X}}/db",
    ),
    _target(r"may not write", format="delta", uri="s3://mine/out/%2e%2e/a"),
    _target(r"may not write", format="lance", uri="{folder}/out/{run_key}/../../x", mode="append"),
    _target(
        r"without a plain host", format="sql", table="t", uri="postgresql://good.com#@evil.com/db"
    ),
    _target(r"of dialect access", format="sql", table="t", uri="access://good.com/db"),
    _target(r"may not write", format="sql", table="t", uri="duckdb:///md:evil"),
    _target(r"may not write", format="sql", table="t", uri="duckdb:///http://evil.com/x"),
    _target(r"host evil\.example\.com", format="iceberg", table="a.b", catalog=MERGED),
    # Kubernetes
    _pods(
        "kube-system",
        r"kube-system belongs to",
        {"image": "a", "namespace": "kube-system"},
        origin=OWNER,
    ),
    _pods("workers", r"are more than 4,096", {"image": "a", "workers": 10**9}, origin=OWNER),
    _pods("at all", r"image: a is not allowed \(allowed: none\)", {"image": "a"}),
    _pods(
        "namespace",
        r"namespace: other is not allowed \(allowed: mine\)",
        {"image": "a", "namespace": "other"},
        policy={**ALLOWED, "kubernetes": {"namespaces": ["mine"], "images": ["*"]}},
    ),
    _pods(
        "Secrets",
        r"secrets: admin is not allowed \(allowed: none\)",
        {"image": "a", "secrets": ["admin"]},
        policy={**ALLOWED, "kubernetes": {"images": ["*"], "max_workers": 2}},
    ),
    _pods(
        "service account",
        r"service_account: admin is not allowed \(allowed: none\)",
        {"image": "a", "service_account": "admin"},
        policy={**ALLOWED, "kubernetes": {"images": ["*"], "max_workers": 2}},
    ),
    _pods(
        "too many",
        r"workers: 3 are more than 2",
        {"image": "a", "workers": 3},
        policy={**ALLOWED, "kubernetes": {"images": ["*"], "max_workers": 2}},
    ),
    _pods("a manifest", r"manifest: a manifest can set", {"manifest": manifest()}),
    _pods(
        "a server",
        r"url: .* name the host raybatch-run-00000000\.evil\.com",
        {"image": "a", "url": "http://{name}.evil.com"},
        policy={**ALLOWED, "hosts": ["name.evil.com"], "kubernetes": {"images": ["*"]}},
    ),
    _pods("manifest_file", r"manifest_file: .* may not read", {"manifest_file": "/etc/passwd"}),
    _pods(
        "a manifest's Secret",
        r"envFrom: admin is not allowed \(allowed: none\)",
        {"manifest": manifest(container={"envFrom": [{"secretRef": {"name": "admin"}}]})},
        policy={
            **ALLOWED,
            "kubernetes": {"images": ["*"], "max_workers": 9, "manifest": True},
        },
    ),
    _manifest("hostPID", pod={"hostPID": True}),
    _manifest("hostIPC", pod={"hostIPC": True}),
    _manifest("hostNetwork", pod={"hostNetwork": True}),
    _manifest("nodeName", pod={"nodeName": "master"}),
    _manifest("hostPath", pod={"volumes": [{"name": "r", "hostPath": {"path": "/"}}]}),
    _manifest("projected", pod={"volumes": [{"name": "r", "projected": {"sources": []}}]}),
    _manifest("privileged", container={"securityContext": {"privileged": True}}),
    _manifest("capabilities", container={"securityContext": {"capabilities": {"add": ["ALL"]}}}),
    _manifest("procMount", container={"securityContext": {"procMount": "Unmasked"}}),
    _manifest("escalation", container={"securityContext": {"allowPrivilegeEscalation": True}}),
    _manifest("devices", container={"volumeDevices": [{"name": "a", "devicePath": "/dev/sda"}]}),
    _manifest("hostPort", container={"ports": [{"containerPort": 1, "hostPort": 22}]}),
    _manifest(
        "an init container",
        pod={"initContainers": [{"name": "a", "securityContext": {"privileged": True}}]},
    ),
    _manifest("an unknown field", authOptions={"mode": "none"}),
    _manifest("ephemeral containers", pod={"ephemeralContainers": [{"name": "a"}]}),
    _manifest("csi", pod={"volumes": [{"name": "r", "csi": {"driver": "x"}}]}),
    _manifest("an ephemeral volume", pod={"volumes": [{"name": "r", "ephemeral": {}}]}),
    _manifest("two kinds", pod={"volumes": [{"name": "r", "emptyDir": {}, "nfs": {"path": "/"}}]}),
    _manifest("volumes as a mapping", pod={"volumes": {"hostPath": {"path": "/"}}}),
    _manifest("a Secret as a list", pod={"volumes": [{"secret": [{"secretName": "admin"}]}]}),
    _manifest("init containers as a mapping", pod={"initContainers": {"image": "evil"}}),
    _manifest("a shared process namespace", pod={"shareProcessNamespace": True}),
    _manifest("another runtime", pod={"runtimeClassName": "x"}),
    _manifest("priority", pod={"priorityClassName": "system-node-critical"}),
    _manifest("serviceAccount", pod={"serviceAccount": "admin"}),
    _manifest("sysctls", pod={"securityContext": {"sysctls": []}}),
    _manifest("hostUsers", pod={"hostUsers": True}),
    _manifest("hostAliases", pod={"hostAliases": []}),
    _manifest("a scheduler", pod={"schedulerName": "x"}),
    _manifest("a context as a list", container={"securityContext": [{"privileged": True}]}),
    _manifest("Add", container={"securityContext": {"capabilities": {"Add": ["ALL"]}}}),
    _manifest("capabilities as a list", container={"securityContext": {"capabilities": ["ALL"]}}),
    _manifest("seccomp", container={"securityContext": {"seccompProfile": {"type": "Unconfined"}}}),
    _manifest("ports as a mapping", container={"ports": {"a": {"hostPort": 22}}}),
    _manifest("hostIP", container={"ports": [{"containerPort": 1, "hostIP": "10.0.0.1"}]}),
    _manifest("a variable of a file", container={"env": [{"valueFrom": {"fileKeyRef": {}}}]}),
    # The kubelet asks these from the node.
    *(
        _manifest(f"{kind} {how} of a host", container={kind: {how: {"host": "169.254.169.254"}}})
        for kind in ("livenessProbe", "readinessProbe", "startupProbe")
        for how in ("httpGet", "tcpSocket")
    ),
    *(
        _manifest(f"{kind} {how} of a host", container={"lifecycle": {kind: {how: {"host": "a"}}}})
        for kind in ("postStart", "preStop")
        for how in ("httpGet", "tcpSocket")
    ),
    # What these say is done to a pod by others, with rights of their own.
    *(
        _metadata(f"annotation {name}", annotations={name: "x"})
        for name in (
            *("iam.amazonaws.com/role", "k8s.v1.cni.cncf.io/networks", "sidecar.istio.io/inject"),
            *("container.AppArmor.security.beta.kubernetes.io/ray", "vault.hashicorp.com/role"),
        )
    ),
    *(
        _metadata(f"label {name}", labels={name: "x"})
        for name in ("azure.workload.identity/use", "aadpodidbinding")
    ),
    _metadata("metadata.namespace", namespace="kube-system"),
    _metadata("metadata.ownerReferences", ownerReferences=[{}]),
    _group("minReplicas", r"workers: 1,000,000,000 are more than 4,096", minReplicas=10**9),
    *(
        _group(f"{name} {value!r}", rf"{name}: {value!r} is not a number", **{name: value})
        for name in ("minReplicas", "maxReplicas", "numOfHosts")
        for value in (1e9, "1000", True)
    ),
    _pods(
        "a variable of pods",
        r"env: a job may not set RAYBATCH_POLICY",
        {"image": "a", "env": {"RAYBATCH_POLICY": "/tmp/policy.yaml"}},
        policy={**ALLOWED, "kubernetes": {"images": ["*"], "max_workers": 2}},
    ),
    _pods(
        "a variable of pods with a path",
        r"env: TZ may not contain a path",
        {"image": "a", "env": {"TZ": "/tmp/planted"}},
        policy={**ALLOWED, "kubernetes": {"images": ["*"], "max_workers": 2}},
    ),
    _pods(
        "a variable of a manifest with a URL",
        r"env: TZ may not contain a path, a URL",
        {"manifest": manifest(container={"env": [{"name": "TZ", "value": "http://evil.com"}]})},
        policy={**ALLOWED, "kubernetes": {"images": ["*"], "max_workers": 2, "manifest": True}},
    ),
    _pods(
        "a variable of a manifest",
        r"env: a job may not set RAYBATCH_POLICY",
        {"manifest": manifest(container={"env": [{"name": "RAYBATCH_POLICY", "value": "/tmp/a"}]})},
        policy={**ALLOWED, "kubernetes": {"images": ["*"], "max_workers": 2, "manifest": True}},
    ),
)

# Addresses that are asked for nobody, also where private ones are allowed.
NEVER_ASKED = (
    *("169.254.169.254", "169.254.170.2", "168.63.129.16", "100.100.100.200", "192.0.0.192"),
    *("0.0.0.0", "224.0.0.1", "255.255.255.255", "240.0.0.1", "::", "ff02::1", "fe80::1"),
    *("fe80::a9fe:a9fe%eth0", "fec0::1", "fec0:0:0:ffff::1", "feff::1"),
    *("fd00:ec2::254", "fd20:ce::254", "fd00:42::42", "fd00:c1::a9fe:a9fe"),
    *("::ffff:169.254.169.254", "::ffff:168.63.129.16", "::169.254.169.254"),
    *("::ffff:0:169.254.169.254", "::ffff:0:168.63.129.16", "::ffff:0:a9fe:a9fe"),
    *("64:ff9b::169.254.169.254", "64:ff9b::a83f:8110"),
    *("64:ff9b:1::169.254.169.254", "64:ff9b:1:a9fe:a9:fe00::", "64:ff9b:1::a83f:8110"),
    *("2002:a9fe:a9fe::1", "2002:a83f:8110::", "2001:0:a9fe:a9fe::1"),
    *("2001:0:808:808::5601:5601", "2606:4700::5efe:169.254.169.254"),
    *("2606:4700::200:5efe:a9fe:a9fe", "fe80::5efe:a9fe:a9fe"),
)
# Addresses that are asked only where private ones are allowed.
PRIVATE = (
    *("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "::1", "fd12::1"),
    *("::ffff:10.0.0.1", "::ffff:0:10.0.0.1", "::10.0.0.1", "64:ff9b::10.0.0.1"),
    *("64:ff9b:1::8.8.8.8", "64:ff9b:1::10.0.0.1", "2002:a00:1::", "2001:0:808:808::f7f7:f7f7"),
    *("2606:4700::5efe:10.0.0.1", "2606:4700::200:5efe:7f00:1"),
)

# A key, in places where nobody else may see it.
PLANTED = "PLANTEDvalue0007"
# Parts of a URL's path that no record of a run and no message holds.
TOKENS_IN_PATHS = (
    *(PLANTED, "ghp_0123456789abcdefghij", "github_pat_11ABCDEFG0abc", "glpat-abcdefgh12345678"),
    *("hf_abcdefghijklmnop", "sk-abcdefghijk", "eyJhbGciOiJIUzI1NiJ9.e30.c2ln", "token=abc"),
    *("AbCdEfGhIjKlMnOpQr12", "a1b2c3d4e5f6g7h8i9j0", "key;apikey=abc"),
    "9f86d081884c7d659a2feaa0c55ad015",
)
# Answers of a server that sends a request, with its keys, on to another host.
REDIRECTS = (302, 307)
# Where the server of a source or an image sends whoever asks it: to what a cloud's machine asks for
# its own keys.
METADATA_URLS = (
    "http://169.254.169.254/latest/meta-data/",
    "http://[fd00:ec2::254]/latest/meta-data/",
    "http://[::ffff:169.254.169.254]/",
    "http://168.63.129.16/machine",
    "http://2852039166/",
    "//169.254.169.254/latest/meta-data/",
)


def _link_to_pipe(path: Path) -> None:
    os.mkfifo(f"{path}.pipe")
    path.symlink_to(f"{path}.pipe")


# What somebody puts in the place of a file, for which or of which one would read without end.
PLANTED_FILES: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link to a pipe": _link_to_pipe,
}


def _declare(path: Path, write: Callable[..., Any], **columns: Any) -> None:
    """Write an Arrow file or stream whose buffers of 1,234,568 bytes declare 1 TiB."""
    table = pa.table(columns)
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with write(str(path), table.schema, options=options) as writer:
        writer.write_table(table)
    data, size = path.read_bytes(), struct.pack("<q", 1_234_568)
    assert size in data
    path.write_bytes(data.replace(size, struct.pack("<q", 1 << 40)))


LONG = "x" * 1_234_568
# Small inputs that declare far more than their size.
BOMBS: dict[str, Callable[[Path], None]] = {
    "an Arrow file": lambda path: _declare(path, pa.ipc.new_file, a=[LONG]),
    "an Arrow stream": lambda path: _declare(path, pa.ipc.new_stream, a=[LONG]),
    "a dictionary in a file": lambda path: _declare(
        path, pa.ipc.new_file, a=pa.array([LONG]).dictionary_encode()
    ),
    "a dictionary in a stream": lambda path: _declare(
        path, pa.ipc.new_stream, a=pa.array([LONG]).dictionary_encode()
    ),
    "numbers": lambda path: _declare(path, pa.ipc.new_file, a=[0] * 154_321),
    "a list's values": lambda path: _declare(path, pa.ipc.new_stream, a=[[LONG]]),
}
_LOOPS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
# Chat templates that do not end, or make a text that no memory holds, by the prompt that they are
# for, and the refusal.
ENDLESS_TEMPLATES: dict[str, tuple[str, dict[str, Any], str]] = {
    "of text": (_LOOPS, {}, "take over 1 s to render"),
    "of images": (
        "{% for m in messages %}{% if m.content is not string %}" + _LOOPS + "{% endif %}"
        "{% endfor %}",
        {"images": {"columns": ["b"]}},
        "take over 1 s to render",
    ),
    "of images, large": (
        "{% if messages[-1].content is not string %}{{ 'x' * 10000000000 }}{% endif %}",
        {"images": {"columns": ["b"]}},
        "makes too large a value",
    ),
}


def _swap(path: Path, target: Path) -> None:
    """Put a link to a copy of a folder or file in its place."""
    path.rename(target)
    path.symlink_to(target)


def _listing(place: Path) -> Path:
    return place.with_name(f"{place.name}.files")


# What becomes of a model's or adapter's folder in the cache of a node, and the refusal. The root of
# the cache is two folders above.
PLANTED_CACHES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "the cache is open to all": (
        lambda place: place.parent.parent.chmod(0o777),
        "writable by other users",
    ),
    "the cache is open to a group": (
        lambda place: place.parent.parent.chmod(0o770),
        "writable by other users",
    ),
    "the folder of entries is open to all": (
        lambda place: place.parent.chmod(0o777),
        "writable by other users",
    ),
    "the folder of entries is a link": (
        lambda place: _swap(place.parent, place.parent.parent / "elsewhere"),
        "is not a folder of this user",
    ),
    "the entry is a link": (
        lambda place: _swap(place, place.parent / "elsewhere"),
        "is not a folder of this user",
    ),
    "a file is a link": (
        lambda place: _swap(next(place.glob("*.json")), place.parent / "elsewhere"),
        "is not a regular file of this user",
    ),
    "a file is a pipe": (
        lambda place: (next(place.glob("*.json")).unlink(), os.mkfifo(place / "a.json")),
        "is not a regular file of this user",
    ),
    "a file was added": (
        lambda place: (place / "more.py").write_text("x"),
        "more.py is not in its listing",
    ),
    "a file is gone": (lambda place: next(place.glob("*.json")).unlink(), "is missing"),
    "a file is longer": (
        lambda place: next(place.glob("*.json")).write_text("{'planted': 1}"),
        "its listing",
    ),
    "the listing is another": (
        lambda place: _listing(place).write_text("[]"),
        "SHA-256 of its listing differs",
    ),
    "the listing is a link": (
        lambda place: _swap(_listing(place), place.parent / "elsewhere"),
        "its listing is not a regular file",
    ),
}

# Texts that a terminal obeys, or that show in another order than they are read, by what they do.
HIDDEN = {
    "colours": "\x1b[31mred\x1b[0m",
    "the title of the window": "\x1b]0;owned\x07",
    "a link": "\x1b]8;;http://evil.test/\x1b\\here\x1b]8;;\x1b\\",
    "the clipboard": "\x1b]52;c;ZXZpbA==\x07",
    "a question that is answered as if typed": "\x1b[6n",
    "a cleared screen": "\x1b[2J\x1b[H",
    "a reset": "\x1bc",
    "a device control string": '\x1bP$q"p\x1b\\',
    "colours in one character (C1)": "\x9b31mred",
    "an operating system command (C1)": "\x9d0;owned\x9c",
    "a device control string (C1)": "\x90q\x9c",
    "a line written over": "1 row failed\rproved",
    "characters taken back": "bad\x08\x08\x08good",
    "delete": "bad\x7f\x7f\x7fgood",
    "a bell": "\x07",
    "another character set": "\x0elqk\x0f",
    "a form feed": "\x0c",
    "the next line (C1)": "fine\x85[raybatch CRITICAL] forged",
    "a separator of lines": "fine\u2028[raybatch CRITICAL] forged\u2029",
    "a separator of records": "fine\x1c\x1d\x1e[raybatch CRITICAL] forged",
    "the order of letters": "invoice\u202efdp.exe",
    "embedded directions": "\u202aa\u202bb\u202cc\u202dd",
    "isolated directions": "\u2066a\u2067b\u2068c\u2069",
    "marks of direction": "a\u200eb\u200fc\u061cd",
    "old marks of direction": "a\u206ab\u206fc",
    "half a character": "a\ud800b",
    "a null": "a\0b",
}
# Arguments that the command line refuses, with such a text in them.
HOSTILE_ARGUMENTS = (
    ("{text}",),
    ("plan", "a.yaml", "{text}"),
    ("plan", "--{text}"),
    ("plan", "-{text}"),
    ("plan", "a.yaml", "--set={text}"),
    ("demo", "--rows", "{text}"),
    ("demo", "--prefect={text}"),
    ("status", "a", "{text}", "{text}"),
    ("preview", "a.yaml", "--rows={text}"),
    ("init", "a.csv", "--{text}=1"),
)
FOREIGN = "evil.test"  # a host that no page may ask for anything
# Texts that a page could take for more than text. What runs sets `window.ran`.
MARKUP = {
    "a script": "<script>window.ran=1</script>",
    "a script from elsewhere": f"<script src=http://{FOREIGN}/x.js></script>",
    "an image that is not there": "<img src=x onerror=window.ran=1>",
    "an image from elsewhere": f"<img src=http://{FOREIGN}/x.png>",
    "an image of the same host": f"<img src=//{FOREIGN}/x.png>",
    "a drawing": "<svg onload=window.ran=1><script>window.ran=1</script></svg>",
    "a frame": f"<iframe src=http://{FOREIGN}/></iframe>",
    "a frame with a script": "<iframe srcdoc='<script>parent.ran=1</script>'></iframe>",
    "a video": "<video><source onerror=window.ran=1></video>",
    "an open element": "<details open ontoggle=window.ran=1>",
    "a field with the focus": "<input autofocus onfocus=window.ran=1>",
    "styles": f"<style>@import url(http://{FOREIGN}/x.css);</style>",
    "a style": f"<div style='background:url(http://{FOREIGN}/x)'>x</div>",
    "a form": f"<form action=http://{FOREIGN}/><button>x</button></form>",
    "another address": f"<meta http-equiv=refresh content='0;url=http://{FOREIGN}/'>",
    "a base": f"<base href=http://{FOREIGN}/>",
    "the end of a cell": "</td></tr></table><script>window.ran=1</script>",
    "the end of a title": "</title></style></textarea><script>window.ran=1</script>",
    "the end of an attribute": "\"'><img src=x onerror=window.ran=1>",
    "an unclosed tag": "<img src=x onerror=window.ran=1 x=",
    "entities": "&lt;img src=x onerror=window.ran=1&gt;",
    "entities twice": "&amp;lt;img src=x onerror=window.ran=1&amp;gt;",
    "a processing instruction": "<?x <img src=x onerror=window.ran=1>?>",
    "a comment": "<!--><img src=x onerror=window.ran=1>-->",
    "a Markdown image": f"![x](http://{FOREIGN}/x.png)",
    "a Markdown image with spaces": f"![x]( <http://{FOREIGN}/x.png> 'x')",
    "a Markdown image by its name": f"![x][y]\n\n[y]: http://{FOREIGN}/x.png",
    "a Markdown link that runs": "[x](javascript:window.ran=1)",
    "a Markdown link": f"[x](http://{FOREIGN}/)",
    "a Markdown link around an image": f"[![x](http://{FOREIGN}/x.png)](javascript:window.ran=1)",
    "a Markdown autolink": f"<http://{FOREIGN}/>",
    "a Markdown autolink that runs": "<javascript:window.ran=1>",
    "an address": f"http://{FOREIGN}/ https://{FOREIGN} ftp://{FOREIGN}",
    "an address without a scheme": f"www.{FOREIGN} WWW.{FOREIGN} a@{FOREIGN}",
    "an escaped image": f"\\![x](http://{FOREIGN}/x.png) \\\\![x](http://{FOREIGN}/x.png)",
    "the end of code": f"` ![x](http://{FOREIGN}/x.png) <img src=x onerror=window.ran=1> `",
    "the end of more code": f"``` ![x](http://{FOREIGN}/x.png) `` <img src=x> ```` ~~~",
    "the end of a block of code": f"x\n```\n![x](http://{FOREIGN}/x.png)\n```\n",
    "a block of code that is drawn": "\n```mermaid\ngraph TD; A-->B; click A href 'x'\n```",
    "the end of a row": f"x | ![x](http://{FOREIGN}/x.png) |\n| y",
    "an escaped end of a row": f"x \\| ![x](http://{FOREIGN}/x.png) \\\\|",
    "a heading": "x\n\n# proved\n\n---\n\n1. x\n\n> x",
    "the start of a line": "# x",
    "a task": "- [x] x",
    "a footnote": "[^1]\n\n[^1]: x",
    "marks": "**x** _x_ ~~x~~ *x* __x__",
}
