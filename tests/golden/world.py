"""The folder that the jobs of the corpus work in: inputs of a few rows, and models without weights.

Jobs name all of it relative to the working directory, so that no hash depends on where it lies.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import yaml
from helpers import environ
from helpers.models import LLAMA_8B, LLAMA_70B, MIXTRAL
from PIL import Image

from prefect_raybatch import demo
from prefect_raybatch.distill.classifier import CLASSIFIER_FORMAT, Classifier, Training
from prefect_raybatch.model import pinned
from prefect_raybatch.spec.engine import ModelRequest

ROWS = 24
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for page in documents or [] %}{{ page['title'] }}: {{ page['text'] }}\n{% endfor %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ tone }} {{ enable_thinking }}{% endif %}"
)
# Environment variables that a job's plan, sizes or engines could follow.
SETTINGS = ("RAY_", "PREFECT_", "RAYBATCH_", "VLLM_", "HF_", "AWS_", "CUDA_", "OMP_", "PYICEBERG_")
SMALL_ENCODER = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 128,
    "torch_dtype": "float32",
}
CATALOG = {"type": "sql", "uri": "sqlite:///data/catalog.db", "warehouse": "warehouse"}
POD = {
    "spec": {
        "containers": [
            {"name": "ray", "image": "raybatch:1", "resources": {"limits": {"cpu": "4"}}}
        ]
    }
}
MANIFEST = {
    "apiVersion": "ray.io/v1",
    "kind": "RayCluster",
    "spec": {
        "headGroupSpec": {"rayStartParams": {"num-cpus": "2"}, "template": POD},
        "workerGroupSpecs": [
            {
                "groupName": "gpu",
                "replicas": 2,
                "rayStartParams": {"num-cpus": "16", "num-gpus": "4"},
                "template": POD,
            }
        ],
    },
}
LABELS = ("bank", "farm", "shop")
# name: (config.json, bytes of its weights)
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "llama-8b": ({**LLAMA_8B, "architectures": ["LlamaForCausalLM"]}, 16 << 30),
    "llama-70b": ({**LLAMA_70B, "architectures": ["LlamaForCausalLM"]}, 141 << 30),
    "mixtral": ({**MIXTRAL, "architectures": ["MixtralForCausalLM"]}, 93 << 30),
    "qwen3-embedding": (
        {
            "architectures": ["Qwen3ForCausalLM"],
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151669,
            "torch_dtype": "bfloat16",
        },
        1 << 30,
    ),
    "bert": ({**SMALL_ENCODER, "architectures": ["BertModel"]}, 2 << 20),
    "bert-labels": (
        {
            **SMALL_ENCODER,
            "architectures": ["BertForSequenceClassification"],
            "id2label": dict(enumerate(LABELS)),
            "label2id": {label: i for i, label in enumerate(LABELS)},
        },
        2 << 20,
    ),
    "bert-pairs": (
        {
            **SMALL_ENCODER,
            "architectures": ["BertForSequenceClassification"],
            "id2label": {0: "LABEL_0"},
            "label2id": {"LABEL_0": 0},
        },
        2 << 20,
    ),
    "vision": (
        {
            "architectures": ["Idefics3ForConditionalGeneration"],
            "vision_config": {
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 56,
                "patch_size": 14,
            },
            "text_config": {**LLAMA_8B, "model_type": "llama", "max_position_embeddings": 16384},
            "scale_factor": 2,
            "torch_dtype": "bfloat16",
        },
        17 << 30,
    ),
}


@contextmanager
def world(folder: Path) -> Iterator[Path]:
    """Make the inputs and models in an empty folder; inside, it is the working directory and the
    environment has no settings but the tests' policy."""
    _write_inputs(folder / "data")
    for name, (config, weights) in MODELS.items():
        _write_model(folder / "models" / name, config, weights)
    for rank in (4, 16):
        _write_adapter(folder / "adapters" / f"rank-{rank}", rank)
    (folder / "chat.jinja").write_text(TEMPLATE, encoding="utf-8")
    (folder / "golden.csv").write_text("id,right\n1,a\n", encoding="utf-8")
    (folder / "cluster.yaml").write_text(yaml.safe_dump(MANIFEST), encoding="utf-8")
    _write_classifier(folder)
    (folder / "answer.json").write_text(
        json.dumps({"type": "object", "properties": {"rating": {"type": "integer"}}}), "utf-8"
    )
    before, there = dict(os.environ), Path.cwd()
    for name in before:
        if name.startswith(SETTINGS):
            del os.environ[name]
    os.environ["RAYBATCH_POLICY"] = environ.POLICY
    os.environ["RAYBATCH_CACHE"] = str(folder / "cache")
    os.chdir(folder)
    try:
        _make_catalog()
        yield folder
    finally:
        os.chdir(there)
        os.environ.clear()
        os.environ.update(before)


def _write_classifier(folder: Path) -> None:
    """Write a classifier of the labels over the vectors of the encoder `bert`."""
    encoder = ModelRequest(
        name=str(folder / "models" / "bert"),
        revision=None,
        task="embed",
        context=None,
        context_auto=False,
        context_share=0.99,
        adapter=None,
        adapters={},
        vllm_arguments={},
        env={},
    )
    parts = {
        "prompt.template": "{Note}",
        "prompt.on_null": "fail",
        "prompt.on_too_long": "quarantine",
        "prompt.special_tokens_in_rows": "split",
        "engine.max_model_len": None,
        "engine": {},
        "output.normalize": True,
        "output.vector_type": "float32",
    }
    identity = str(pinned.pin(encoder)["identity"])
    training = Training.of("models/bert", identity, LABELS, parts)
    weights = tuple((float(number), *[0.0] * 127) for number in range(len(LABELS)))
    made = Classifier(CLASSIFIER_FORMAT, training, LABELS, weights, (0.0, 0.0, 0.0))
    (folder / "classifier.json").write_bytes(made.to_bytes())


def _make_catalog() -> None:
    """Make the catalog that a job publishes to, in the working directory."""
    from pyiceberg.catalog import load_catalog

    load_catalog("default", **CATALOG).create_namespace_if_not_exists("sales")


def _write_inputs(folder: Path) -> None:
    folder.mkdir()
    table = _rows()
    pq.write_table(table, folder / "rows.parquet")
    plain = table.select(["id", "Company", "Country", "Note"])
    pa.csv.write_csv(plain, folder / "rows.csv")
    pa.feather.write_feather(plain, str(folder / "rows.arrow"))
    (folder / "rows.jsonl").write_text(_json_lines(plain), encoding="utf-8")
    asked = {"model": "demo", "messages": [{"role": "user", "content": "What is a shard?"}]}
    url = "/v1/chat/completions"
    requests = [{"custom_id": i, "method": "POST", "url": url, "body": asked} for i in "abc"]
    (folder / "requests.jsonl").write_text("\n".join(map(json.dumps, requests)), "utf-8")
    (folder / "rows.txt").write_bytes(
        "Export of Monday\n1;'Müller; Söhne';NULL;1,5\n2;'O~'Neill';IE;2,5\n".encode("cp1252")
    )
    for name, start in (("a", 0), ("b", 10), ("c", 18)):
        (folder / "several").mkdir(exist_ok=True)
        pa.csv.write_csv(plain.slice(start, 8), folder / "several" / f"{name}.csv")
    for country, year in (("DE", 2023), ("DE", 2024), ("FR", 2024)):
        place = folder / "parts" / f"country={country}" / f"year={year}"
        place.mkdir(parents=True)
        pq.write_table(plain.drop_columns(["Country"]).slice(year - 2023, 6), place / "x.parquet")
    answered = {"Company": ["A", "B"], "response": ["x", "y"], "_row": [0, 1]}
    pq.write_table(pa.table(answered), folder / "answered.parquet")
    with sqlite3.connect(folder / "rows.db") as base:
        base.execute("create table companies (id integer, Company text, amount numeric)")
        base.executemany("insert into companies values (?, ?, ?)", [(i, f"C{i}", i) for i in "123"])


def _rows() -> pa.Table:
    ids = range(ROWS)
    role, chat = pa.string(), pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    pages = pa.list_(pa.struct([("title", pa.string()), ("text", pa.string())]))
    asked = [[{"role": "user", "content": f"Tell me about company {i}"}] for i in ids]
    begun = [[*said, {"role": "assistant", "content": "It is"}] for said in asked]
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "Company": [f"Company {i % 20}" for i in ids],
            "Country": pa.array([None if i % 8 == 7 else ("DE", "FR")[i % 2] for i in ids], role),
            "Note": [" ".join(["good"] * (i % 5 + 1)) for i in ids],
            "chat": pa.array(asked, chat),
            "begun": pa.array(begun, chat),
            "pages": pa.array([[{"title": "Report", "text": f"Page {i}"}] for i in ids], pages),
            "style": [("formal", "short")[i % 2] for i in ids],
            "picture": pa.array([_png(i) for i in ids], pa.binary()),
        }
    )


def _png(shade: int) -> bytes:
    out = io.BytesIO()
    Image.new("L", (40, 30), shade).save(out, "PNG")
    return out.getvalue()


def _json_lines(table: pa.Table) -> str:
    return "".join(json.dumps(row) + "\n" for row in table.to_pylist())


def _write_model(folder: Path, config: Mapping[str, Any], weights: int) -> None:
    """Write a model with the demo's tokenizer. Its weights are a hole in a file: only their size
    counts."""
    folder.mkdir(parents=True)
    config = {"max_position_embeddings": 8192, **config}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in TOKENIZER:
        shutil.copyfile(Path(demo.demo_model_path()) / name, folder / name)
    _write_tensors(folder / "model.safetensors", {"all": ("U8", [weights], weights)})
    if "vision_config" in config:
        processor = {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 112},
            "max_image_size": {"longest_edge": 56},
            "do_image_splitting": True,
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")


def _write_adapter(folder: Path, rank: int) -> None:
    """Write a LoRA adapter for llama-8b, as peft does."""
    folder.mkdir(parents=True)
    stem = "base_model.model.model.layers.0.self_attn.q_proj"
    shapes = {"lora_A": [rank, 4096], "lora_B": [4096, rank]}
    tensors = {
        f"{stem}.{side}.weight": ("F32", shape, 4 * rank * 4096) for side, shape in shapes.items()
    }
    _write_tensors(folder / "adapter_model.safetensors", tensors)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "llama-8b",
        "r": rank,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def _write_tensors(path: Path, tensors: Mapping[str, tuple[str, list[int], int]]) -> None:
    header, end = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    head = json.dumps(header).encode()
    with path.open("wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        out.truncate(8 + len(head) + end)
