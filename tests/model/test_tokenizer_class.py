"""The class of a tokenizer is the one that AutoTokenizer takes, and is found without torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prefect_raybatch.demo import demo_model_path
from prefect_raybatch.model.tokenizer_class import PLAIN_CLASS, REGISTERED, class_of_tokenizer
from prefect_raybatch.stages.block import load_tokenizer

TEXT = "Ünïcode  words, 1234 and\n\n an emoji 🙂 don't"


def a_model(folder: Path, kind: str, own: str, **more: Any) -> str:
    """Return a folder with the bundled model's tokenizer under another type and class."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(demo_model_path(), name), folder)
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **more}))
    said = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(said | {"tokenizer_class": own}))
    return str(folder)


@pytest.mark.parametrize("kind", sorted(REGISTERED))
def test_a_class_is_the_one_that_auto_tokenizer_takes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    only_class = classmethod(lambda taken, *_, **__: taken)
    monkeypatch.setattr(PreTrainedTokenizerBase, "from_pretrained", only_class)
    registered = REGISTERED[kind] or PLAIN_CLASS
    names = {
        PLAIN_CLASS,
        "PreTrainedTokenizerFast",
        registered,
        f"{registered}Fast",
        "CohereTokenizer",
    }
    known = 0
    for own in sorted(names):
        folder = a_model(tmp_path / own, kind, own)
        found = class_of_tokenizer(folder, None)
        taken: Any = AutoTokenizer.from_pretrained(folder)
        assert found in (None, taken.__name__), f"{kind} with {own}"
        assert load_tokenizer(folder, None) is taken
        known += found is not None
    assert known >= len(names) - 1


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "phi3"])
def test_a_tokenizer_is_loaded_as_auto_tokenizer_does(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = a_model(tmp_path / "model", kind, REGISTERED[kind] or PLAIN_CLASS)
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder, None)
    assert ours(TEXT, add_special_tokens=True)["input_ids"] == theirs(TEXT)["input_ids"]
    assert ours.model_max_length == theirs.model_max_length


@pytest.mark.parametrize(
    ("kind", "own", "more"),
    [
        ("mistral", "LlamaTokenizer", {}),
        ("llama", PLAIN_CLASS, {"auto_map": {"AutoTokenizer": "own.Tokenizer"}}),
    ],
    ids=["another-type", "code-of-its-own"],
)
def test_auto_tokenizer_decides_what_is_not_known(
    kind: str, own: str, more: dict[str, Any], tmp_path: Path
) -> None:
    assert class_of_tokenizer(a_model(tmp_path / "model", kind, own, **more), None) is None


def test_a_tokenizer_is_loaded_without_torch(tmp_path: Path) -> None:
    folders = [
        a_model(tmp_path / own, kind, own)
        for kind, own in [("llama", PLAIN_CLASS), ("qwen3", "Qwen2Tokenizer")]
    ]
    code = (
        "import sys\n"
        "from prefect_raybatch.stages.block import load_tokenizer\n"
        "for folder in sys.argv[1:]:\n"
        "    load_tokenizer(folder, None)\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *folders], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr[-2000:]
