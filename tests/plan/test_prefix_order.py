"""Requests of a run put in the order of their prompts, on the local disk."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from prefect_raybatch.plan import prefix_order
from prefect_raybatch.plan.prefix_order import (
    RANK,
    PrefixOrder,
    compared_text,
    sort_text,
    sorted_by_rank,
)
from prefect_raybatch.stages.block import Failure
from prefect_raybatch.stages.messages import ChatRequest


def asked(*contents: object) -> ChatRequest:
    return ChatRequest([{"role": "user", "content": content} for content in contents])


def test_a_prompt_s_text_is_what_a_template_begins_with() -> None:
    image = {"type": "image_url", "image_url": {"url": "s3://b/1.png"}}
    other = {"type": "image", "image": b"\x89PNG"}
    with_image = asked([image, {"type": "text", "text": "What is it?"}])
    assert sort_text(with_image) == sort_text(
        asked([other, {"type": "text", "text": "What is it?"}])
    )
    assert sort_text(asked("a", "b")) == b"\nuser\na\nuser\nb"
    assert sort_text(asked("a"), "x") != sort_text(asked("a"))
    documents = ChatRequest(asked("a").messages, documents=[{"text": "long"}])
    assert sort_text(documents).index(b"long") < sort_text(documents).index(b"user")
    assert sort_text(asked("\ud800")) and sort_text(asked(None)) == b"\nuser\n"
    assert sort_text(Failure("prepare", "ValueError", "no")) == b""


@pytest.mark.parametrize("seed", range(4))
def test_prompts_that_begin_alike_stand_together(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the reference, and over sorted runs of several additions."""
    monkeypatch.setattr(prefix_order, "RUN_ROWS", 50)
    monkeypatch.setattr(prefix_order, "MERGED_ROWS", 7)
    monkeypatch.setattr(prefix_order, "CUT_ROWS", 4)
    draw = random.Random(seed)
    shared = [b"System. " + draw.randbytes(30) for _ in range(9)]
    groups = [draw.randrange(9) for _ in range(400)]
    texts = [shared[group] + draw.randbytes(8) for group in groups]
    reference = draw.choice([*texts, b"", b"System. ", b"else"])
    order = PrefixOrder(tmp_path / "prompts")
    for start in range(0, 400, 33):
        part = [compared_text(text, reference) for text in texts[start : start + 33]]
        order.add(start, pa.array(part, pa.binary()))
    rows = np.concatenate(list(order.rows())).tolist()
    assert sorted(rows) == list(range(400))
    changes = sum(groups[a] != groups[b] for a, b in pairwise(rows))
    # The group of the reference may be parted in two: those that go further with it stand last.
    assert changes <= len(set(groups)) + 1


@pytest.mark.parametrize("rows", [1, 50, 51, 1000])
def test_sorted_runs_are_merged_as_one_sort_would(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where most texts are equal and rows come in any order; in parts of bounded size."""
    monkeypatch.setattr(prefix_order, "RUN_ROWS", 50)
    monkeypatch.setattr(prefix_order, "MERGED_ROWS", 7)
    monkeypatch.setattr(prefix_order, "CUT_ROWS", 4)
    draw = random.Random(rows)
    texts = [draw.choice([b"", b"same", b"same", b"\xff", draw.randbytes(3)]) for _ in range(rows)]
    order = PrefixOrder(tmp_path / "prompts")
    starts = list(range(0, rows, 13))
    draw.shuffle(starts)
    for start in starts:
        order.add(start, pa.array(texts[start : start + 13], pa.binary()))
    parts = list(order.rows())
    assert np.concatenate(parts).tolist() == sorted(range(rows), key=lambda row: texts[row])
    assert max(map(len, parts)) <= 50 + 4 * (rows // 50 + 1)
    assert list(PrefixOrder(tmp_path / "none").rows()) == []


def test_what_is_compared_begins_where_prompts_part() -> None:
    reference = b"s" * 5000 + b"shop A"
    one, other = (b"s" * 5000 + b"shop " + name * 9 for name in (b"B", b"C"))
    assert compared_text(one, reference)[4:] == b"B" * 9
    assert compared_text(one, reference)[:4] == compared_text(other, reference)[:4]
    assert len(compared_text(b"t" * 5000, reference)) == 4 + prefix_order.COMPARED


def test_rows_are_dealt_out_by_their_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_order, "BUCKET_BYTES", 1000)
    ranks = np.random.default_rng(1).permutation(500)
    table = pa.table({"text": [f"row {rank}" for rank in ranks], RANK: pa.array(ranks)})
    tables = [("rows", table.slice(start, 70)) for start in range(0, 500, 70)]
    for _ in range(2):  # again from the start, as where a column's type turns out wider
        made = list(sorted_by_rank(iter(tables), 500, tmp_path))
        assert len(made) > 5 and not list(tmp_path.iterdir())
        assert {what for what, _ in made} == {"rows"}
        found = pa.concat_tables([part for _, part in made])
        assert found.column_names == ["text"]
        assert found["text"].to_pylist() == [f"row {rank}" for rank in range(500)]
    assert list(sorted_by_rank(iter(()), 0, tmp_path)) == []


def test_ranks_that_repeat_or_are_missing_are_dealt_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_order, "BUCKET_BYTES", 500)
    monkeypatch.setattr(prefix_order, "DEALT_BYTES", 300)
    ranks = np.random.default_rng(2).integers(0, 90, 400) // 7 * 7
    table = pa.table({"row": pa.array(np.arange(400)), RANK: pa.array(ranks)})
    tables = (("rows", table.slice(start, 9)) for start in range(0, 400, 9))
    made = list(sorted_by_rank(tables, 400, tmp_path, ranks=90, keep=True))
    found = pa.concat_tables([part for _, part in made])
    assert len(made) > 5 and found.equals(table.sort_by(RANK).combine_chunks())
