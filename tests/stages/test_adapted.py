"""Rows under LoRA adapters: which one, in which order, on planned engines and on real vLLM."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from helpers import tiny_models
from helpers.engine_stage import LAUNCH, block
from helpers.engines import Stepped, completion
from helpers.needs import needs_vllm

from prefect_raybatch import demo
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.model.memory import describe
from prefect_raybatch.stages.adapted import Adapted
from prefect_raybatch.stages.columns import ERROR, TEXTS, TOKENS
from prefect_raybatch.stages.engine import EngineStage
from prefect_raybatch.stages.vllm.stepper import Completion, Request, SteppedEngine

HERE = {"a": ("a-1", 1, "/a"), "b": ("b-2", 2, "/b")}


class _Stage(EngineStage):
    def __init__(self, spec: Any, planned: Stepped):
        self.launch, self.planned, self._adapters = spec, planned, HERE

    def ready(self) -> Any:
        return self.planned


def asked(
    names: list[str | None], null: bool = False, alone: bool = True
) -> tuple[pa.Table, list[Request]]:
    """A block of rows with these adapters, all of one prompt, and what the engine was asked."""

    def answers(requests: Sequence[Request]) -> list[Completion]:
        return [completion(str(r.adapter and r.adapter[0])) for r in requests]

    table = block(Unit(0, 0, len(names)))
    table = table.append_column("which", pa.array(names, pa.string()))
    table = table.set_column(
        table.column_names.index(TOKENS),
        TOKENS,
        pa.array([[7, 7]] * len(names), pa.list_(pa.int32())),
    )
    engine = Stepped(answers)
    adapted = Adapted("which", {name: {} for name in HERE}, null, alone)
    return _Stage(replace(LAUNCH, adapted=adapted), engine)(table), engine.seen[0]


def test_equal_prompts_under_different_adapters_are_asked_apart():
    table, requests = asked(["b", "a", "b", "a", "b"])
    assert sorted(r.adapter[1] for r in requests if r.adapter) == [1, 2]
    assert [t[0] for t in table[TEXTS].to_pylist()] == ["b-2", "a-1", "b-2", "a-1", "b-2"]


def test_rows_of_an_adapter_stand_together():
    table = block(Unit(0, 0, 40)).append_column("which", pa.array(["a", "b"] * 20))
    engine = Stepped(lambda requests: [completion("x") for _ in requests])
    spec = replace(LAUNCH, adapted=Adapted("which", {name: {} for name in HERE}))
    _Stage(spec, engine)(table)
    order = [r.adapter[1] for r in engine.seen[0] if r.adapter]
    assert sum(x != y for x, y in pairwise(order)) == 1


def test_an_adapter_that_is_not_known_fails_its_row_alone():
    table, requests = asked(["a", "none", None])
    assert len(requests) == 1
    found = [e and (e["kind"], e["message"]) for e in table[ERROR].to_pylist()]
    assert found == [
        None,
        (
            "UnknownAdapter",
            "column which names the unknown adapter 'none'. Use one of engine.adapters: a, b",
        ),
        (
            "UnknownAdapter",
            "column which is null (prompt.on_null: empty would use the base model). "
            "Use one of engine.adapters: a, b",
        ),
    ]
    table, _ = asked(["a", None], null=True)
    assert [t[0] for t in table[TEXTS].to_pylist()] == ["a-1", "None"]


def test_on_a_cpu_no_row_is_asked_of_the_model_alone():
    """vLLM's CPU kernels take "no adapter" (-1) for the last one."""
    table, requests = asked(["a", None], null=True, alone=False)
    assert len(requests) == 1
    assert "on a CPU vLLM cannot use the base model" in table[ERROR].to_pylist()[1]["message"]


@needs_vllm
@pytest.mark.whole
def test_real_vllm_answers_as_the_merged_weights_do(tmp_path, monkeypatch):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM
    from vllm.lora.layers import BaseLayerWithLoRA

    for name, value in {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    base = demo.demo_model_path()
    config = json.loads((Path(base) / "config.json").read_text())
    folders = [tiny_models.lora(tmp_path / str(i), base, config, seed=i) for i in (1, 2)]
    prompt = list(range(5, 25))
    fields = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
    arguments = {
        "model": base,
        "dtype": "float32",
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1024,
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 2,
        "max_lora_rank": 8,
    }
    layers: list[Any] = []
    first = BaseLayerWithLoRA.__init__

    def noted(layer: Any, *given: Any, **named: Any) -> None:
        first(layer, *given, **named)
        layers.append(layer)

    monkeypatch.setattr(BaseLayerWithLoRA, "__init__", noted)
    under = [(str(i), i, str(folder)) for i, folder in enumerate(folders, 1)]
    with SteppedEngine(arguments) as engine:
        found = engine.run([Request(prompt, fields, adapter) for adapter in under * 2])
        held = sum(map(_held_for_adapters, layers))
    assert held == describe(config, arguments).adapters()
    assert [f.error for f in found] == [None] * 4
    answers = [f.token_ids[0] for f in found]
    assert answers[:2] == answers[2:]
    assert answers[0] != answers[1]
    for answer, adapter in zip(answers, under, strict=False):
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        _merge(model, load_file(Path(adapter[2]) / "adapter_model.safetensors"))
        made = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=6, min_new_tokens=6
        )
        assert made[0, len(prompt) :].tolist() == answer


def _held_for_adapters(layer: Any) -> int:
    """Bytes of the tensors that vLLM has set aside in a layer."""
    import torch

    stacked = (getattr(layer, name, ()) for name in ("lora_a_stacked", "lora_b_stacked"))
    tensors = [[t] if isinstance(t, torch.Tensor) else t for t in stacked]
    return sum(one.nbytes for some in tensors for one in some)


def _merge(model: Any, tensors: dict[str, Any]) -> None:
    """W + B A * alpha / r, as a LoRA adapter is defined."""
    import torch

    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, down in tensors.items():
            if ".lora_A." in name:
                up = tensors[name.replace("lora_A", "lora_B")]
                stem = name.removeprefix("base_model.model.").replace(".lora_A", "")
                weights[stem] += up @ down * (8 / down.shape[0])
