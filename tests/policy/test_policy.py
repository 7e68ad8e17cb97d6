"""The policy's file, what it allows, and which policy is in force."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.policies import set_policy

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.policy.in_force import (
    STRICT_POLICY,
    operator_policy,
    policy_applied,
    policy_in_force,
    register_origin_check,
)
from prefect_raybatch.policy.policy import JobPolicy, KubernetesLimits
from prefect_raybatch.policy.policy_file import FIELDS, read_policy


def test_without_a_file_the_default_is_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYBATCH_POLICY")
    policy = operator_policy()
    assert policy == STRICT_POLICY and policy.limited
    assert not policy.may_read("/") and not policy.may_write(".") and not policy.may_connect("a")
    assert not policy.may_use_module("acme") and not policy.may_name_block("a/b")
    assert policy.may_name_secret("RAYBATCH_SECRET_DB") and not policy.may_name_secret("HOME")
    assert policy.kubernetes == KubernetesLimits() and policy.kubernetes.max_workers == 0


def test_each_field_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"namespaces": ["a"], "manifest": True, "max_workers": 4}
    path = set_policy(
        monkeypatch, tmp_path,
        read=["in", "s3://b/in"], write=["/data/out"], hosts=["a.com", "*.b.com", "[::1]:80"],
        function_modules=["acme"], engine_variables=["X"], engine_arguments=["tokenizer"],
        secrets=["DB_*"], blocks=["object-store/a"], allow_private=True, kubernetes=limits,
    )  # fmt: skip
    policy = operator_policy()
    assert str(path) in policy.title
    assert policy.may_read(f"{tmp_path}/in/a.csv") and policy.may_read("/data/out/x")
    assert policy.may_write("/data/out") and not policy.may_write(f"{tmp_path}/in")
    assert policy.may_read("s3://b/in/x") and not policy.may_read("s3://b/input")
    assert policy.may_connect("A.com.") and policy.may_connect("a.com", 9000)
    assert policy.may_connect("x.b.com") and not policy.may_connect("b.com.evil.com")
    assert policy.may_connect("::1", 80) and not policy.may_connect("::1", 81)
    assert policy.may_name_secret("DB_A") and policy.may_name_secret("RAYBATCH_SECRET_A")
    assert policy.may_set_variable("X") and policy.may_set_variable("OMP_NUM_THREADS")
    assert policy.may_set_argument("tokenizer") and not policy.may_set_argument("tokenizer_x")
    assert policy.kubernetes == KubernetesLimits(namespaces=("a",), manifest=True, max_workers=4)
    assert policy.allow_private and policy.may_name_block("object-store/a")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("reads: [a]", "unknown field 'reads'. The fields are read, write"),
        ("kubernetes: {max: 1}", "kubernetes: unknown field 'max'"),
        ("read: a", "read: must be a list of texts"),
        ("hosts: [1]", "hosts: must be a list of texts"),
        ("read: ['/data/*']", "read: '/data/.' is not a folder"),
        ("read: ['http://a/b']", "is not a folder"),
        ("allow_private: 1", "allow_private: must be true or false"),
        ("kubernetes: {max_workers: true}", "max_workers: must be an integer"),
        ("kubernetes: {manifest: 'yes'}", "manifest: must be true or false"),
        ("[a]", "must be a mapping"),
        ("a: [", "not valid YAML"),
        ("hosts: [a]\nread: [b]\nhosts: ['*']", "hosts: duplicate key in lines 1 and 3; remove"),
        ("kubernetes: {images: [a], images: ['*']}", "kubernetes.images: duplicate key in lines 1"),
        ("[" * 5000, "nested too deeply"),
    ],
)
def test_a_wrong_file_is_an_error_and_no_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    monkeypatch.setenv("RAYBATCH_POLICY", str(path))
    with pytest.raises(ConfigError, match=words) as caught:
        operator_policy()
    assert str(path) in str(caught.value)
    monkeypatch.setenv("RAYBATCH_POLICY", str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match=r"none.yaml: the policy cannot be read"):
        policy_in_force()


def test_links_are_followed_before_a_folder_is_compared(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/out").symlink_to("/etc")
    (tmp_path / "alias").symlink_to(tmp_path / "in")
    policy = JobPolicy("test", read=(f"{tmp_path}/alias",))
    for uri in ("in/a.csv", "alias/a.csv", "in/*.csv", "in/x/../a.csv"):
        assert policy.may_read(f"{tmp_path}/{uri}"), uri
    for uri in ("in/out/passwd", "in/../b", "in/out/*", "input", "*/a"):
        assert not policy.may_read(f"{tmp_path}/{uri}"), uri
    assert not policy.may_read(f"simplecache::file://{tmp_path}/in/a.csv")


def test_a_path_that_readers_take_for_another_is_in_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the working directory is allowed, in which `file:` could be a folder."""
    (tmp_path / "in/2026").mkdir(parents=True)
    (tmp_path / "latest").symlink_to(tmp_path / "in/2026")
    monkeypatch.chdir(tmp_path / "in")
    policy = JobPolicy("test", read=(f"{tmp_path}/in", "s3://b/a"))
    assert policy.may_read("x.csv") and policy.may_read("2026/../x.csv")
    assert policy.may_read("s3://b/a/50%25 off/x.csv") and policy.may_read("s3://b/a/c=%20/x.csv")
    for uri in ("file:/etc", "s3:/b", f"{tmp_path}/latest/../x.csv", "../latest/../x.csv"):
        assert not policy.may_read(uri), uri
    for key in ("%2e%2e/x", "[x]/%2e%2e/x", "*/%2E./x", "x%2F..%2f..%2fb", "%252e%252e/x", "%5c.."):
        assert not policy.may_read(f"s3://b/a/{key}"), key


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1", "2130706433", "0x7f.0.0.1", "017700000001"])
def test_an_address_is_the_same_in_each_notation(host: str) -> None:
    assert JobPolicy("test", hosts=("127.0.0.1",)).may_connect(host)
    assert not JobPolicy("test", hosts=("10.0.0.1", "*.com")).may_connect(host)


def test_the_origin_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    origin = [False]
    register_origin_check(lambda: origin[0])
    assert not policy_in_force().limited
    origin[0] = True
    assert policy_in_force() == operator_policy() and policy_in_force().limited
    with policy_applied(STRICT_POLICY):
        assert policy_in_force() is STRICT_POLICY
    origin[0] = False
    assert not policy_in_force().limited


def test_the_owner_gets_of_code_what_the_operator_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_policy(monkeypatch, tmp_path, engine_arguments=["trust_remote_code"], read=["/none"])
    policy = policy_in_force()
    assert policy.may_read("/etc/passwd") and policy.may_connect("anywhere")
    assert policy.may_set_argument("trust_remote_code") and policy.may_set_argument("tokenizer")
    assert not policy.may_set_argument("worker_cls") and not policy.kubernetes.privileged


def test_the_example_policies_can_be_read() -> None:
    root = Path(__file__).parents[2]
    policy = read_policy(str(root / "deployments/policy.yaml"))
    assert policy.may_read(str(root / "deployments/customers.csv"))
    assert policy.may_write(str(root / "out/dev")) and policy.function_modules == ()
    assert set(FIELDS) > {"read", "write", "hosts"}
