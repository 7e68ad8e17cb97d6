"""The chat template of a job and of its model, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.small import make_job
from helpers.specs import check_template_of
from helpers.thinking import TEMPLATE, WEATHER

from prefect_raybatch.compile.job import compile_planned
from prefect_raybatch.compile.resolved import resolve
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.model import chat_template

TOOLS = {"template": "{Company}", "tools": [WEATHER]}


def folder(root: Path, **files: Any) -> dict[str, Any]:
    """A model whose tokenizer has these files; names with __ for a dot."""
    root.mkdir(exist_ok=True)
    (root / "tokenizer.json").write_text("{}")
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (root / name.replace("__", ".")).write_text(text)
    return {"source": str(root), "revision": None, "identity": "0" * 64}


def refused(prompt: dict[str, Any], model: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        check_template_of(make_job(prompt=prompt), model)
    return str(caught.value)


# --- where it is read ---------------------------------------------------------------------------


def test_a_files_text_counts_and_not_its_name(tmp_path):
    """So a run goes on where the file is another one's, and not where it has changed."""
    one, other = tmp_path / "one.jinja", tmp_path / "other.jinja"
    one.write_text(TEMPLATE)
    other.write_text(TEMPLATE)
    jobs = [
        make_job(prompt={"template": "{a}", "chat_template": given})
        for given in (str(one), str(other), TEMPLATE)
    ]
    resolved = [resolve(job) for job in jobs]
    assert len({r.identity.fingerprint for r in resolved}) == 1
    assert resolved[0].job.prompt.chat_template == TEMPLATE
    assert resolved[0].identity.parts["prompt.chat_template"] == TEMPLATE
    one.write_text(TEMPLATE + " ")
    assert resolve(jobs[0]).identity.fingerprint != resolved[0].identity.fingerprint


def test_where_a_run_works_the_file_need_not_be(tmp_path):
    from helpers.small import small_run

    run = small_run(tmp_path, prompt={"template": "{Company}", "chat_template": TEMPLATE})
    elsewhere = make_job(prompt={"template": "{Company}", "chat_template": "only/there.jinja"})
    assert compile_planned(elsewhere, run.plan).prompt.chat_template == TEMPLATE


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no file or folder"),
        (b"\xff{{ x }}", "not UTF-8 text"),
        (b"x" * (1 << 20) + b"{{}}", "more than"),
        (b"{% for m in messages %}{{ m }}", "line 1: Unexpected end of template"),
        (b"\n{{ messages[ }}", "line 2"),
    ],
)
def test_a_file_that_is_no_template_is_refused(tmp_path, content, said):
    path = tmp_path / "mine.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"prompt\.chat_template") as caught:
        resolve(make_job(prompt={"template": "{a}", "chat_template": str(path)}))
    assert said in str(caught.value) and "mine.jinja" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "{% generation %}{{ x }}{% endgeneration %}",
        "{% for m in messages %}{% if m %}{% break %}{% endif %}{% endfor %}",
    ],
)
def test_what_transformers_adds_to_jinja_is_known(text):
    resolve(make_job(prompt={"template": "{a}", "chat_template": text}))


# --- what it must know --------------------------------------------------------------------------


def test_tools_and_documents_that_a_template_would_lose_are_refused(tmp_path):
    plain = folder(tmp_path / "m", chat_template__jinja="{{ messages }}")
    assert "prompt.tools: the chat template of" in refused(TOOLS, plain)
    assert "prompt.documents" in refused({"template": "{Company}", "documents": "d"}, plain)
    check_template_of(make_job(prompt={**TOOLS, "chat_template": TEMPLATE}), plain)


def test_a_misspelt_argument_is_named_with_the_nearest(tmp_path):
    model = folder(tmp_path / "m", tokenizer_config__json={"chat_template": TEMPLATE})
    prompt = {"template": "{Company}", "chat_template_kwargs": {"enable_thinkin": False}}
    assert "did you mean 'enable_thinking'" in refused(prompt, model)
    prompt["chat_template_kwargs"] = {"enable_thinking": False}
    check_template_of(make_job(prompt=prompt), model)


def test_a_model_without_chat_template_is_told_by_the_field_that_helps(tmp_path):
    model = folder(tmp_path / "m", tokenizer_config__json={})
    said = refused({"messages": "chat"}, model)
    assert "prompt.messages" in said and "Set prompt.chat_template" in said
    check_template_of(make_job(), model)  # a plain prompt goes without, as ever
    check_template_of(make_job(prompt={"messages": "c", "chat_template": TEMPLATE}), model)


def test_of_several_templates_the_one_for_tools_is_taken(tmp_path):
    several = [
        {"name": "default", "template": "{{x}}"},
        {"name": "tool_use", "template": "{{tools}}"},
    ]
    check_template_of(
        make_job(prompt=TOOLS),
        folder(tmp_path / "m", tokenizer_config__json={"chat_template": several}),
    )


def test_of_a_model_that_is_not_here_nothing_is_known():
    model = {"source": "owner/name", "revision": "abc", "identity": "owner/name@abc"}
    check_template_of(make_job(prompt=TOOLS), model)


ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}x"
)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (ENDLESS, "take over 1 s to render"),
        ("{{ 2**(10**10) }}", "operation [*][*] makes too large a value"),
        ("{{ 'x' * 10000000000 }}", "operation [*] makes too large a value"),
        ("{% set n = namespace(t=['x']) %}{{ 99999999 * n.t }}", "makes too large a value"),
    ],
)
def test_a_template_that_does_not_end_is_refused_when_the_run_is_planned(
    monkeypatch, template, said
):
    if template is ENDLESS:
        monkeypatch.setattr(chat_template, "TEMPLATE_SECONDS", 1.0)
    job = make_job(prompt={"template": "{a}", "chat_template": template})
    with pytest.raises(ConfigError, match=rf"^prompt.chat_template: .*{said}"):
        check_template_of(job, {"source": "demo", "revision": None})


def test_a_models_own_template_that_does_not_end_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(chat_template, "TEMPLATE_SECONDS", 1.0)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": ENDLESS}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    job = make_job(engine={"model": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"^the chat template of .*take over 1 s to render"):
        check_template_of(job, {"source": str(tmp_path), "revision": None})


def test_templates_that_raise_or_need_transformers_are_left_to_the_rows():
    for text in ("{{ raise_exception('no system') }}", "{{ messages | tojson }}", "{{ 'a' * 20 }}"):
        job = make_job(prompt={"template": "{a}", "chat_template": text})
        check_template_of(job, {"source": "demo", "revision": None})


ENDLESS_FOR_IMAGES = (
    "{% for m in messages %}{% if m['content'] is not string %}"
    + ENDLESS
    + "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.json"])
def test_a_template_that_does_not_end_for_images_is_refused(monkeypatch, tmp_path, file):
    monkeypatch.setattr(chat_template, "TEMPLATE_SECONDS", 1.0)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (tmp_path / file).write_text(json.dumps({"chat_template": ENDLESS_FOR_IMAGES}))
    (tmp_path / "tokenizer.json").write_text("{}")
    model = {"source": str(tmp_path), "revision": None}
    prompt = {"template": "{a}", "images": {"columns": ["b"]}}
    job = make_job(prompt=prompt, engine={"model": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"^the chat template of .*take over 1 s to render"):
        check_template_of(job, model)
    text = make_job(prompt={"template": "{a}"}, engine={"model": str(tmp_path)})
    check_template_of(text, model)  # which it does not reach
