"""The key of a request: equal where the request is, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys

import pyarrow as pa
import pytest

from prefect_raybatch.stages.block import Failure
from prefect_raybatch.stages.messages import ChatRequest
from prefect_raybatch.stages.request_key import (
    NOT_DETERMINISTIC,
    Keying,
    canonical,
    context_of,
    request_key,
)

CONTEXT = context_of({"model": "m"})
SECRET = bytes.fromhex(CONTEXT)


def request(text: str = "hello", **more: object) -> ChatRequest:
    return ChatRequest([{"role": "user", "content": text}], **more)  # type: ignore[arg-type]


def test_equal_requests_have_equal_keys_whatever_the_order_of_fields() -> None:
    turned = ChatRequest([{"content": "hello", "role": "user"}])
    assert request_key(SECRET, request()) == request_key(SECRET, turned)
    assert len(request_key(SECRET, request())) == 16


@pytest.mark.parametrize(
    "other",
    [
        request("hello "),
        request(sampling={"temperature": 0.5}),
        request(documents=[{"text": "a"}]),
        ChatRequest([{"role": "system", "content": "hello"}]),
        ChatRequest([*request().messages, *request().messages]),
        ChatRequest([{"role": "user", "content": [{"type": "text", "text": "hello"}]}]),
    ],
)
def test_other_requests_have_other_keys(other: ChatRequest) -> None:
    assert request_key(SECRET, other) != request_key(SECRET, request())


def test_context_and_adapter_are_part_of_the_key() -> None:
    key = request_key(SECRET, request())
    assert request_key(bytes.fromhex(context_of({"model": "n"})), request()) != key
    assert request_key(SECRET, request(), "a") != key
    assert request_key(SECRET, request(), "a") != request_key(SECRET, request(), "b")


def test_no_sampling_of_its_own_and_an_empty_one_are_the_same_request() -> None:
    assert request_key(SECRET, request(sampling={})) == request_key(SECRET, request())


def test_an_image_counts_by_its_content() -> None:
    def seen(data: bytes) -> bytes:
        parts = [{"type": "image", "image": data}]
        return request_key(SECRET, ChatRequest([{"role": "user", "content": parts}]))

    assert seen(b"one") == seen(bytes(bytearray(b"one"))) != seen(b"two")
    assert b"sha256" in canonical({"image": b"one"})


def test_text_that_is_no_unicode_has_a_key() -> None:
    assert request_key(SECRET, request("a\ud800")) != request_key(SECRET, request("a?"))


def test_another_process_makes_the_same_key() -> None:
    """Keys are kept for months: neither hash seed nor order of insertion may show in them."""
    code = (
        "from prefect_raybatch.stages.messages import ChatRequest as R;"
        "from prefect_raybatch.stages.request_key import *;"
        "s = bytes.fromhex(context_of({'b': 1, 'a': [True, None, 0.1]}));"
        "print(request_key(s, R([{'role': 'user', 'content': 'h\u00e9'}], {'n': 2}), 'x').hex())"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "d04358a906f63f9c28cbd1afdd2aa7fc"


def test_a_row_without_a_request_has_no_key() -> None:
    table = pa.table({"id": [1, 2]})
    failed = Failure("prepare", "ValueError", "null")
    assert Keying(CONTEXT).keys([failed, request()], table) == [
        None,
        request_key(SECRET, request()),
    ]


def test_adapters_count_by_content_and_not_by_name() -> None:
    table = pa.table({"tenant": ["a", "b", None, "c"]})
    asked = [request()] * 4
    keying = Keying(CONTEXT, {"a": "id-1", "b": "id-1"}, "tenant")
    a, b, none, unknown = keying.keys(asked, table)
    assert a == b == request_key(SECRET, request(), "id-1")
    assert none == request_key(SECRET, request())
    assert len({a, none, unknown}) == 3
    assert Keying(CONTEXT, {"": "id-1"}).keys(asked, table)[0] == a


def test_only_greedy_requests_share_an_answer() -> None:
    greedy = Keying(CONTEXT, sampling={"temperature": 0.0})
    assert greedy.exact(request())
    assert not greedy.exact(request(sampling={"temperature": 0.7}))
    assert not Keying(CONTEXT, sampling={"temperature": 1.0}).exact(request())
    assert not Keying(CONTEXT, sampling={"temperature": 0.0}, merge=False).exact(request())


def test_a_request_that_came_out_otherwise_fails_its_row() -> None:
    keying, table = Keying(CONTEXT), pa.table({"id": [1, 2, 3, 4]})
    failed = Failure("prepare", "ValueError", "null")
    now = [request("a"), request("b"), request("c"), failed]
    planned = [*keying.keys([request("a"), request("x")], table.slice(0, 2)), None, b"k" * 16]
    assert keying.checked(now, table, planned) == [
        now[0],
        NOT_DETERMINISTIC,
        NOT_DETERMINISTIC,
        failed,
    ]
    assert json.dumps(NOT_DETERMINISTIC.to_dict())
