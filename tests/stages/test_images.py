"""Rows with images through the stages: what prepare makes of them, and real vLLM's answers."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.needs import needs_vllm
from helpers.small import make_job, receipts
from helpers.specs import finish_stage, images_of, prepare_stage
from helpers.vision import make_vision_model
from PIL import Image

from prefect_raybatch.compile.job import finish_spec, prompt_spec
from prefect_raybatch.job.images import Images
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.model import chat_template
from prefect_raybatch.stages.block import Failure, is_lost, losses, tag
from prefect_raybatch.stages.columns import ERROR, KEY, KEY_TYPE, MM, TOKENS
from prefect_raybatch.stages.engine import EngineLaunch, EngineStage
from prefect_raybatch.stages.images.http import ImageUnavailable
from prefect_raybatch.stages.images.places import ImagePlaces
from prefect_raybatch.stages.images.rows import RowImages, TooManyAway, row_images
from prefect_raybatch.stages.request_key import Keying
from prefect_raybatch.stages.vllm import multimodal
from prefect_raybatch.storage import open_store

pytestmark = needs_vllm

CONTEXT = 256
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def picture(*colour: int, side: int = 300) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (side, side), tuple(colour)).save(out, "PNG")
    return out.getvalue()


RED, BLUE, GREEN = picture(255, 0, 0), picture(0, 0, 255), picture(0, 255, 0)


def conversation(text: str = "What is it?") -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def put(rows: dict[str, Any], messages: Any = None, **given: Any) -> list[Any]:
    table = pa.table(rows)
    empty = given.pop("empty", False)
    given.setdefault("columns", list(rows))
    images = RowImages(images_of(Images(**given)), ImagePlaces(), empty)
    return images.fetched(table, [messages or conversation()] * table.num_rows)[0]


# --- gathering ----------------------------------------------------------------------------------


def test_images_of_columns_stand_before_the_text_of_the_last_user_message():
    system = {"role": "system", "content": "Be short."}
    (made,) = put({"A": [RED], "B": [[BLUE, GREEN]]}, [system, *conversation()], per_row=3)
    assert made[0] == system
    kinds = [part["type"] for part in made[1]["content"]]
    assert kinds == ["image_pil"] * 3 + ["text"]
    colours = [part["image_pil"].getpixel((1, 1)) for part in made[1]["content"][:3]]
    assert colours == [(255, 0, 0), (0, 0, 255), (0, 255, 0)]


def test_parts_that_a_function_returns_are_decoded_where_they_stand():
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image", "image": RED},
        {"type": "image_url", "image_url": {"url": "nowhere.png"}},
    ]
    (made,) = put({"x": [1]}, [{"role": "user", "content": parts[:2]}], columns=[], per_row=1)
    assert [part["type"] for part in made[0]["content"]] == ["text", "image_pil"]
    (made,) = put({"x": [1]}, [{"role": "user", "content": parts}], columns=[], per_row=2)
    assert made.kind == "BadImage" and "media_root" in made.message


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "column A is null"),
        ({"bytes": None, "path": None}, "column A is null"),
        (b"", "column A: the image is empty"),
        (b"<html>", "column A: this is HTML"),
        (RED[: len(RED) // 2], "column A: "),
    ],
)
def test_a_bad_image_fails_its_row_alone(value, words):
    good = {"bytes": RED, "path": None}
    value = {"bytes": value, "path": None} if isinstance(value, bytes) else value
    rows = put({"A": [good, value, good]})
    assert isinstance(rows[1], Failure) and words in rows[1].message
    assert rows[1].kind == "BadImage" and not isinstance(rows[0], Failure)
    assert not isinstance(rows[2], Failure)


def test_a_null_may_be_no_image():
    rows = put({"A": [RED, None]}, empty=True)
    assert len(rows[0][0]["content"]) == 2 and rows[1][0]["content"] == "What is it?"


def test_too_many_images_fail_their_row():
    (row,) = put({"A": [[RED, RED]]})
    assert row.kind == "BadImage" and "2 images" in row.message and "per_row 1" in row.message


class Away(ImagePlaces):
    def fetch(self, value: Any) -> bytes:
        if value == "away":
            raise ImageUnavailable("HTTP 503")
        return RED


@pytest.mark.parametrize(("away", "lost"), [(2, False), (3, True)])
def test_a_place_that_is_away_loses_the_block_and_not_the_rows(away, lost):
    table = pa.table({"A": ["away"] * away + ["here"] * (10 - away)})
    images = RowImages(images_of(Images(columns=["A"])), Away())
    if lost:
        with pytest.raises(TooManyAway, match="503"):
            images.fetched(table, [conversation()] * 10)
        job = make_job(prompt={"template": "What?", "images": {"columns": "A"}})
        made = prepare_stage(job.prompt, {}, 100, images=images)(tag(table, Unit(0, 0, 10)))
        (why,) = losses(made)
        assert is_lost(made) and why.kind == "TooManyAway" and not why.fatal
    else:
        rows = images.fetched(table, [conversation()] * 10)[0]
        assert [r.kind for r in rows if isinstance(r, Failure)] == ["ImageUnavailable"] * away


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_one_row_whose_image_is_away_loses_no_block(rows):
    table = pa.table({"A": ["away"] + ["here"] * (rows - 1)})
    images = RowImages(images_of(Images(columns=["A"])), Away())
    made = images.fetched(table, [conversation()] * rows)[0]
    assert [r.kind for r in made if isinstance(r, Failure)] == ["ImageUnavailable"]


# --- with real vLLM -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        folder = make_vision_model(tmp_path_factory.mktemp("vision"))
        yield {"source": folder, "revision": None, "identity": "0" * 64}


def test_a_chat_template_that_does_not_end_fails_its_rows(
    model: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row for which it is tried, and after three of a block all others at once."""
    endless = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    shutil.copytree(model["source"], tmp_path / "model")
    for path in (tmp_path / "model").glob("*chat_template*"):
        path.unlink()
    config = tmp_path / "model/tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": endless}))
    monkeypatch.setattr(chat_template, "TEMPLATE_SECONDS", 0.5)
    renderer = multimodal.Renderer(str(tmp_path / "model"), None, {"max_model_len": CONTEXT})
    tokens, features = renderer.rows([conversation()] * 5)
    assert [failure.kind for failure in tokens] == ["TemplateTooSlow"] * 5 and not any(features)
    assert ["for earlier rows" in failure.message for failure in tokens] == [False] * 3 + [True] * 2
    again, _ = renderer.rows([conversation()])
    assert "took over 0.5 s for this row" in again[0].message


def vision_job(model: dict[str, Any], **output: Any) -> Any:
    return make_job(
        prompt={"template": "{ask}", "images": {"columns": ["image"], "resize": [225, 225]}},
        engine={"model": model["source"], "max_model_len": CONTEXT},
        sampling={"max_tokens": 6},
        output={"uri": "out", **output},
    )


def prepared(model: dict[str, Any], job: Any, table: pa.Table, **more: Any) -> pa.Table:
    limits = {
        "limit_mm_per_prompt": images_of(job.prompt.images).limits(),
        "max_model_len": CONTEXT,
    }
    images = row_images(prompt_spec(job), {"dtype": "float32", **limits})
    stage = prepare_stage(job.prompt, model, CONTEXT, images=images, **more)
    return stage(tag(table, Unit(0, 0, len(table))))


def test_images_of_a_conversation_reach_the_engine(model):
    """Structs, in which Arrow fills in with null what other parts have."""
    job = make_job(
        prompt={"messages": "chat", "images": {"per_row": 2, "resize": [225, 225]}},
        engine={"model": model["source"], "max_model_len": CONTEXT},
    )
    parts = [{"type": "text", "text": "a"}, {"type": "image", "image": {"bytes": RED}}]
    turns = [[{"role": "user", "content": parts}], [{"role": "user", "content": parts[:1]}]]
    block = prepared(model, job, pa.table({"chat": turns}))
    assert block[ERROR].to_pylist() == [None, None]
    many, few = map(len, block[TOKENS].to_pylist())
    sent, nothing = block[MM].to_pylist()
    assert many > few + 20 and sent["key"] and nothing is None


@pytest.mark.whole
def test_prepare_engine_and_finish_take_images_to_answers(model, tmp_path):
    job = vision_job(model, extras=["image_digests"])
    table = pa.table(
        {
            "id": [1, 2, 3, 4, 5, 6],
            "ask": ["What is it?"] * 5 + ["long " * 300],
            "image": [RED, BLUE, RED, b"<html>no</html>", RED[:60], RED],
        }
    )
    block = prepared(model, job, table)
    errors = block[ERROR].to_pylist()
    assert [e and e["kind"] for e in errors] == [
        *[None] * 3, "BadImage", "BadImage", "PromptTooLong"
    ]  # fmt: skip
    tokens, sent = block[TOKENS].to_pylist(), block[MM].to_pylist()
    assert tokens[0] == tokens[1] and len(tokens[0]) > 40  # room for the same tiles
    assert sent[0]["key"] == sent[2]["key"] != sent[1]["key"]
    assert sent[3] is None and sent[5] is None
    spec = EngineLaunch(
        model,
        job.sampling.for_vllm(),
        {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": CONTEXT,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 512,
            "limit_mm_per_prompt": images_of(job.prompt.images).limits(),
            **multimodal.WITH_IMAGES,
        },
    )
    stage = EngineStage(spec)
    try:
        answers = stage(block)
        again = stage(prepared(model, job, table.slice(1, 1)))
    finally:
        stage.engine.close()
    assert not is_lost(answers), losses(answers)
    assert MM not in answers.column_names
    ids = answers["__rb_answers"].to_pylist()
    assert ids[0] == ids[2] != ids[1]  # merged by image, and not by text alone
    assert answers["__rb_merged"].to_pylist()[:3].count(True) == 1
    assert again["__rb_answers"].to_pylist()[0] == ids[1]
    _finished(job, model, answers, table, tmp_path)
    _known_by_their_keys(model, job, table, tokens)


def _known_by_their_keys(model: Any, job: Any, table: pa.Table, tokens: list[list[int]]) -> None:
    """An image that changed since the run was planned is not sent under the key of the old one."""
    keying = Keying("00" * 32)
    looked = prepare_stage(
        job.prompt, model, CONTEXT, images=row_images(prompt_spec(job), {}, digests_alone=True)
    ).keyed_requests(table)[0]
    keys = keying.keys(looked, table)
    assert keys[0] == keys[2] != keys[1] and keys[3] is None
    planned = table.append_column(KEY, pa.array(keys, KEY_TYPE))
    changed = planned.set_column(2, "image", pa.array([RED, RED, *table["image"].to_pylist()[2:]]))
    for given, kinds in ((planned, [None, None]), (changed, [None, "ImageChanged"])):
        block = prepared(model, job, given, keying=keying)
        errors = block[ERROR].to_pylist()
        assert [e and e["kind"] for e in errors[:2]] == kinds
        assert block[TOKENS].to_pylist()[0] == tokens[0] and block[MM].to_pylist()[0] is not None


def _finished(job: Any, model: Any, answers: pa.Table, table: pa.Table, folder: Path) -> None:
    output = job.output.model_copy(
        update={"columns": list(finish_spec(job, table.column_names).columns or ())}
    )
    (receipt,) = receipts(finish_stage(output, model, open_store(str(folder)), "a")(answers))
    pieces = {p.kind: pq.read_table(next(folder.rglob(p.path))) for p in receipt.pieces}
    assert pieces["data"].column_names[1:] == ["id", "ask", "response", "image_digests"]
    seen = [(d["sha256"], d["bytes"]) for (d,) in pieces["data"]["image_digests"].to_pylist()]
    assert seen == [(hashlib.sha256(i).hexdigest(), len(i)) for i in (RED, BLUE, RED)]
    assert pieces["data"]["id"].to_pylist() == [1, 2, 3]
    bad = pieces["quarantine"].to_pylist()
    assert [row["input"]["image"] for row in bad] == [b"<html>no</html>", RED[:60], RED]
    assert "HTML" in bad[0]["message"] and "column image" in bad[0]["message"]


@pytest.mark.whole
def test_features_of_another_vllm_are_refused_whole(model):
    job = vision_job(model)
    block = prepared(model, job, pa.table({"ask": ["a", "b"], "image": [RED, RED]}))
    sent = [{**row, "vllm": "0.0.1"} for row in block[MM].to_pylist()]
    column = pa.chunked_array([pa.array(sent, block.schema.field(MM).type)])
    why = multimodal.other_version(column)
    assert why is not None and why.fatal and "0.0.1" in why.message
    assert multimodal.other_version(block[MM]) is None


def test_a_model_of_text_alone_is_refused(model, tmp_path):
    from prefect_raybatch import demo

    job = vision_job(model)
    table = pa.table({"ask": ["a"], "image": [RED]})
    images = row_images(prompt_spec(job), {})
    path = {"source": demo.demo_model_path(), "revision": None}
    made = prepare_stage(job.prompt, path, CONTEXT, images=images)(tag(table, Unit(0, 0, 1)))
    (why,) = losses(made)
    assert "accepts only text" in why.message


# --- the job ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({"prompt": {"template": "x", "images": {"resize": 9}}}, "images.columns is empty"),
        ({"prompt": {"template": "x", "images": {"per_row": 2}}}, "images.columns is empty"),
        ({"prompt": {"template": "x", "images": {"columns": ["a", "a"]}}}, "duplicate column"),
        ({"prompt": {"template": "x", "images": {"columns": "a", "resize": [1]}}}, "225"),
        (
            {"prompt": {"template": "x", "images": {"columns": "a", "resize": 0}}},
            "not a valid image side",
        ),
        ({"prompt": {"template": "x", "images": {"columns": "a", "resize": [1, 400]}}}, "200"),
        (
            {
                "prompt": {
                    "template": "x",
                    "images": {"columns": "a"},
                    "on_too_long": "truncate_left",
                }
            },
            "on_too_long",
        ),
        ({"prompt": {"template": "x", "images": {"columns": "a"}, "prefill": "A"}}, "prefill"),
        (
            {"prompt": {"template": "x", "images": {"columns": "a"}, "chat_template": "{{x}}"}},
            "chat_template cannot be combined with images",
        ),
        (
            {"source": {"uri": "in.parquet", "media_root": "/media"}},
            "media_root needs prompt.images",
        ),
        ({"source": {"uri": "in.parquet", "media_root": "s3://b/x"}}, "local folder"),
        (
            {"output": {"uri": "out", "extras": ["image_digests"]}},
            "image_digests needs prompt.images",
        ),
        ({"engine": {"task": "embed"}}, "accepts only text"),
        ({"engine": {"adapter": "adapters/a"}}, "cannot be combined with adapters"),
        ({"engine": {"max_model_len": "auto"}}, "such as 8192"),
        ({"engine": {"limit_mm_per_prompt": {"image": 9}}}, "per_row"),
    ],
)
def test_what_does_not_go_with_images_is_refused(groups, words):
    from prefect_raybatch.errors import ConfigError

    images = {"prompt": {"template": "x", "images": {"columns": "a"}}} if "engine" in groups else {}
    with pytest.raises(ConfigError, match=words):
        make_job(**{**images, **groups})


def test_what_images_are_is_in_the_fingerprint():
    from prefect_raybatch.compile.resolved import fingerprint

    plain = fingerprint(make_job()).fingerprint
    made = {
        json.dumps(images): fingerprint(
            make_job(prompt={"template": "x", "images": images})
        ).fingerprint
        for images in (
            {"columns": "a"},
            {"columns": "b"},
            {"columns": "a", "resize": [225, 225]},
            {"columns": "a", "resize": 225},
            {"columns": "a", "max_pixels": 1000},
            {"columns": "a", "max_bytes": 1000},
            {"columns": "a", "per_row": 2},
        )
    }
    assert len({plain, *made.values()}) == 8
    images = {"prompt": {"template": "x", "images": {"columns": "a"}}}
    same = {"fetch_seconds": 3, "allow_private": True}  # where they come from, not what they are
    reached = make_job(prompt={"template": "x", "images": {"columns": "a", **same}})
    assert fingerprint(reached).fingerprint == fingerprint(make_job(**images)).fingerprint
    told = make_job(**images, output={"uri": "out", "extras": ["image_digests"]})
    assert fingerprint(told).fingerprint != fingerprint(make_job(**images)).fingerprint


def test_a_column_that_cannot_hold_images_is_refused_at_plan():
    from helpers.specs import check_columns

    from prefect_raybatch.errors import ConfigError

    job = make_job(prompt={"template": "x", "images": {"columns": "image"}})
    media = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    for kind in (pa.binary(), pa.large_binary(), pa.string(), media, pa.list_(media)):
        check_columns(job, pa.schema([("image", kind)]))
    for kind in (pa.int64(), pa.list_(pa.float32()), pa.struct([("x", pa.int8())])):
        with pytest.raises(ConfigError, match=r"prompt\.images\.columns"):
            check_columns(job, pa.schema([("image", kind)]))
    with pytest.raises(ConfigError, match="no column 'image'"):
        check_columns(job, pa.schema([("picture", pa.binary())]))


def test_the_flow_of_captions_asks_as_the_guides_do(monkeypatch):
    import importlib

    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "flows"))
    job = importlib.import_module("image_captions").captions_job("data", "out", "demo")
    assert (job.source.uri, job.output.uri, job.engine.model) == ("data", "out", "demo")
    assert (job.prompt.images.columns, job.prompt.images.resize) == (["image"], [225, 225])
    assert (job.sampling.temperature, job.sampling.max_tokens) == (0.3, 256)
    assert (job.engine.max_model_len, job.engine.batch_size) == (8192, 16)
    assert finish_spec(job, ["image", "id"]).columns == ()
