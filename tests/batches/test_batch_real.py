"""The page about batch files, run as it stands by a real engine and read by vLLM's own model."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.environ import clean
from helpers.pages import ROOT, blocks
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion

from prefect_raybatch.demo import demo_model_path
from prefect_raybatch.stages.block import load_tokenizer

pytestmark = pytest.mark.whole
CONFIG = json.loads((Path(demo_model_path()) / "config.json").read_text(encoding="utf-8"))


def answered(tmp_path: Path, lines: str) -> list[str]:
    """Answer requests by a process of the command; return the output's lines."""
    (tmp_path / "requests.jsonl").write_text(lines, encoding="utf-8")
    words = ["batch", "-i", "requests.jsonl", "-o", "answers.jsonl", "--model", "demo"]
    done = subprocess.run(
        [sys.executable, "-m", "prefect_raybatch.cli", *words], env=clean(), cwd=tmp_path,
        timeout=600, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return (tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()


def test_the_page_about_batch_files(tmp_path: Path) -> None:
    run_batch = importlib.import_module("vllm.entrypoints.launchers.run_batch")
    page = (ROOT / "docs/how-to/batch-files.md").read_text(encoding="utf-8")
    lines = next(block.text for block in blocks(page) if block.language == "json")
    found = [answered(tmp_path, lines) for _ in range(2)]  # the second call finds the run complete
    assert found[0] == found[1]
    outputs = [run_batch.BatchRequestOutput.model_validate_json(line) for line in found[0]]
    asked = [json.loads(line)["custom_id"] for line in lines.splitlines()]
    assert [one.custom_id for one in outputs] == asked
    assert all(one.response.body.choices[0].message.content for one in outputs)


def test_completions_and_chats_in_one_file(tmp_path: Path) -> None:
    """A prompt with the text of the chat template gets the answer of the chat."""
    tokenizer = load_tokenizer(demo_model_path(), None)
    message = {"role": "user", "content": "What industry is this company in: Smith Law"}
    text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    line, same = {"method": "POST"}, {"max_tokens": 4, "temperature": 0}
    bodies = {"chat/completions": {"messages": [message]}, "completions": {"prompt": text}}
    requests = [
        json.dumps({**line, "custom_id": url, "url": f"/v1/{url}", "body": {**body, **same}})
        for url, body in bodies.items()
    ]
    chat, raw = map(json.loads, answered(tmp_path, "\n".join(requests)))
    answer = ChatCompletion.model_validate(chat["response"]["body"], strict=True)
    completion = Completion.model_validate(raw["response"]["body"], strict=True)
    assert completion.choices[0].text == answer.choices[0].message.content
    assert completion.usage is not None and completion.usage == answer.usage


def test_embeddings_and_an_answer_that_the_context_ends(tmp_path: Path) -> None:
    """The second file has no max_tokens and never ends by itself: the context ends the answer."""
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings"}
    embedding = json.dumps({**line, "body": {"model": "demo", "input": "Smith Law"}})
    (output,) = map(json.loads, answered(tmp_path, embedding))
    body = CreateEmbeddingResponse.model_validate(output["response"]["body"], strict=True)
    assert len(body.data[0].embedding) > 8 and body.usage.total_tokens > 0
    message = {"role": "user", "content": "Smith Law"}
    request = {"model": "demo", "messages": [message], "ignore_eos": True}
    chat = json.dumps({**line, "url": "/v1/chat/completions", "body": request})
    (output,) = map(json.loads, answered(tmp_path, chat))
    answer = ChatCompletion.model_validate(output["response"]["body"], strict=True)
    assert answer.choices[0].finish_reason == "length" and answer.usage is not None
    assert answer.usage.total_tokens == CONFIG["max_position_embeddings"]
