"""The page about batch files, run as it stands by a real engine and read by vLLM's own model."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import Raybatch
from helpers.pages import ROOT, blocks
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion

from prefect_raybatch.demo import demo_model_path
from prefect_raybatch.stages.block import load_tokenizer

pytestmark = [pytest.mark.whole, pytest.mark.timeout(900)]  # as other tests with engines have
CONFIG = json.loads((Path(demo_model_path()) / "config.json").read_text(encoding="utf-8"))


Answered = Callable[[str], list[str]]


@pytest.fixture
def answered(kept_engines: None, raybatch: Raybatch) -> Answered:
    """Answers requests by the command; returns the output's lines."""

    def answer(lines: str) -> list[str]:
        Path("requests.jsonl").write_text(lines, encoding="utf-8")
        words = ["batch", "-i", "requests.jsonl", "-o", "answers.jsonl", "--model", "demo"]
        code, _, err = raybatch(*words)
        assert code == 0, err[-3000:]
        return Path("answers.jsonl").read_text(encoding="utf-8").splitlines()

    return answer


def test_the_page_about_batch_files_and_lines_of_other_kinds(answered: Answered) -> None:
    """The page's chats; a chat and a prompt with the text of its chat template, which get the same
    answer; a chat without max_tokens that never ends by itself: the context ends its answer."""
    run_batch = importlib.import_module("vllm.entrypoints.launchers.run_batch")
    page = (ROOT / "docs/how-to/batch-files.md").read_text(encoding="utf-8")
    lines = next(block.text for block in blocks(page) if block.language == "json").splitlines()
    tokenizer = load_tokenizer(demo_model_path(), None)
    message = {"role": "user", "content": "What industry is this company in: Smith Law"}
    text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    same = {"max_tokens": 4, "temperature": 0}
    others: dict[str, tuple[str, dict[str, Any]]] = {
        "chat": ("/v1/chat/completions", {"messages": [message], **same}),
        "prompt": ("/v1/completions", {"prompt": text, **same}),
        "endless": ("/v1/chat/completions", {"messages": [message], "ignore_eos": True}),
    }
    lines += [
        json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})
        for name, (url, body) in others.items()
    ]
    found, again = (answered("\n".join(lines)) for _ in range(2))
    assert found == again  # the second call finds the run complete
    asked = [json.loads(line)["custom_id"] for line in lines]
    assert [json.loads(line)["custom_id"] for line in found] == asked
    outputs = [run_batch.BatchRequestOutput.model_validate_json(line) for line in found[:-3]]
    assert outputs and all(one.response.body.choices[0].message.content for one in outputs)

    chat, raw, endless = (json.loads(line)["response"]["body"] for line in found[-3:])
    answer = ChatCompletion.model_validate(chat, strict=True)
    completion = Completion.model_validate(raw, strict=True)
    assert completion.choices[0].text == answer.choices[0].message.content
    assert completion.usage is not None and completion.usage == answer.usage
    cut = ChatCompletion.model_validate(endless, strict=True)
    assert cut.choices[0].finish_reason == "length" and cut.usage is not None
    assert cut.usage.total_tokens == CONFIG["max_position_embeddings"]


def test_an_embedding(answered: Answered) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings"}
    embedding = json.dumps({**line, "body": {"model": "demo", "input": "Smith Law"}})
    (output,) = map(json.loads, answered(embedding))
    body = CreateEmbeddingResponse.model_validate(output["response"]["body"], strict=True)
    assert len(body.data[0].embedding) > 8 and body.usage.total_tokens > 0
