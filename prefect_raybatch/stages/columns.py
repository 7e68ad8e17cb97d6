"""The hidden columns of a block: values that travel with a row from stage to stage.

Each entry has the column's name, its Arrow type, the modules that write it, and those that read it
(`tests/stages/test_columns.py` compares these with the code). A column stays in a block from the
stage that writes it at least to the last stage that reads it. A column that is not described as "in
every block" is only in blocks of jobs that need it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from prefect_raybatch.job.checks import RESERVED
from prefect_raybatch.ledger.layout import POSITION_COLUMN

KEY_BYTES = 16
KEY_TYPE = pa.binary(KEY_BYTES)
LOSS_TYPE = pa.struct(
    [
        ("kind", pa.string()),
        ("message", pa.string()),
        ("fatal", pa.bool_()),
        ("counted", pa.bool_()),
    ]
)
# The vLLM version that made the features, the key of the images, and the features themselves.
MM_TYPE = pa.struct([("vllm", pa.string()), ("key", pa.binary()), ("features", pa.large_binary())])
DIGESTS_TYPE = pa.list_(pa.struct([("sha256", pa.string()), ("bytes", pa.int64())]))
PROBABILITIES_TYPE = pa.map_(pa.string(), pa.field("value", pa.float64(), nullable=False))
ERROR_TYPE = pa.struct([("stage", pa.string()), ("kind", pa.string()), ("message", pa.string())])
# For each answer and each of its tokens: that token, then the most probable ones. An engine sets
# token ids, a hosted model sets token texts.
_TOKEN = pa.struct([("id", pa.int32()), ("logprob", pa.float32()), ("token", pa.string())])
STEPS_TYPE = pa.list_(pa.list_(pa.list_(_TOKEN)))
TOKENS_TYPE = pa.list_(pa.int32())


class HiddenColumn(str):
    """The name of a hidden column, with its type and the modules that write and read it.

    `type` is None if it depends on the model. Modules in `stages` are named without that prefix.
    """

    type: pa.DataType | None
    writers: tuple[str, ...]
    readers: tuple[str, ...]

    def __new__(
        cls, name: str, type: pa.DataType | None, writers: str, readers: str = ""
    ) -> HiddenColumn:
        column = super().__new__(cls, RESERVED + name.removeprefix(RESERVED))
        column.type = type
        column.writers, column.readers = tuple(writers.split()), tuple(readers.split())
        return column

    def __reduce__(self) -> tuple[object, ...]:
        return str, (str(self),)  # pickled as a plain str: stages need only the name

    def add_to(self, table: pa.Table, values: Iterable[object]) -> pa.Table:
        """Return the block with this column added; `values` has one value for each row."""
        return table.append_column(str(self), pa.array(values, self.type))

    def values(self, table: pa.Table) -> list[Any]:
        """Return the column's value for each row; all None if the block lacks the column."""
        if self not in table.column_names:
            return [None] * table.num_rows
        values: list[Any] = table[self].to_pylist()
        return values


SHARD = HiddenColumn(
    "shard", pa.int32(), "block", "block cascade endpoint.stage finish load parsing"
)
"""The number of the row's shard; in every block."""
POSITION = HiddenColumn(
    POSITION_COLUMN,
    pa.int32(),
    "block",
    "block cascade endpoint.stage finish parsing text_answers vectors",
)
"""The row's position in its shard; in every block."""
ERROR = HiddenColumn("error", ERROR_TYPE, "block", "block runs.preview trial")
"""Why the row failed (stage, kind, message), null while the row is valid; in every block."""
LOST = HiddenColumn("lost", LOSS_TYPE, "block", "block")
"""The reason (`Loss`) of a lost block; only lost blocks have this column."""
LOST_ROWS = HiddenColumn("lost_rows", pa.int32(), "block", "block")
"""The number of input rows, from POSITION on, that this row of a lost block stands for."""
READ_SPENT = HiddenColumn("times_read", pa.float64(), "read", "shard_figures")
"""Seconds that the read stage took for the block, the same in each row."""
PREPARE_SPENT = HiddenColumn("times_prepare", pa.float64(), "prepare texts lookup", "shard_figures")
"""Seconds that the prepare stage took for the block; in every block."""
ENGINE_SPENT = HiddenColumn("times_engine", pa.float64(), "engine lookup", "shard_figures")
"""Seconds that the block spent in the engine stage; in every block."""
ENGINE_BEGAN = HiddenColumn("times_began", pa.float64(), "cascade engine lookup", "shard_figures")
"""When the block reached the engine stage, in seconds since 1970; in every block."""
TOKENS = HiddenColumn(
    "tokens", TOKENS_TYPE, "cascade endpoint.prepare prepare texts", "engine runs.preview"
)
"""The prompt's token ids, empty for a failed row; in every block that goes to an engine."""
CHAT = HiddenColumn(
    "chat", pa.string(), "cascade endpoint.prepare", "endpoint.stage engine runs.preview"
)
"""JSON of the row's chat messages, for a hosted model."""
SECOND = HiddenColumn("second", TOKENS_TYPE, "texts", "engine")
"""Token ids of the second prompt, in jobs whose rows compare two texts by their vectors."""
PARAMS = HiddenColumn(
    "params",
    pa.string(),
    "cascade endpoint.prepare prepare texts trial",
    "endpoint.stage engine trial",
)
"""JSON of the sampling fields that the row itself sets; in every block that goes to an engine."""
MM = HiddenColumn("mm", MM_TYPE, "prepare", "engine")
"""The row's preprocessed images for the engine (`multimodal.RowFeatures`); null for text alone."""
DIGESTS = HiddenColumn("digests", DIGESTS_TYPE, "endpoint.prepare prepare lookup", "finish")
"""SHA-256 and size in bytes of each of the row's images, as fetched."""
KEY = HiddenColumn(
    "key", KEY_TYPE, "plan.row_keys", "endpoint.prepare lookup prepare raw_answers texts"
)
"""The content hash of the row's request (see `request_key`), as computed at planning."""
FORMED = HiddenColumn(
    "formed",
    pa.bool_(),
    "endpoint.prepare prepare lookup",
    "cluster.lookups prepare raw_answers shard_figures",
)
"""Whether the answer must have a form (`choice` or `structured_outputs`)."""
OWN_FORM = HiddenColumn("form", pa.string(), "prepare", "text_answers")
"""JSON of the row's own `choice` and `structured_outputs`, which override the job's."""
REASONING_OPEN = HiddenColumn(
    "open", pa.bool_(), "prepare lookup", "answer_forms cluster.lookups parsing raw_answers"
)
"""Whether the answer may begin with thinking (reasoning text)."""
TRUNCATED = HiddenColumn(
    "truncated", pa.bool_(), "prepare texts lookup", "cluster.lookups raw_answers shard_figures"
)
"""Whether the prompt was cut to fit."""
ANSWERS = HiddenColumn(
    "answers",
    pa.list_(TOKENS_TYPE),
    "cascade engine lookup",
    "answer_forms finish parsing raw_answers shard_figures text_answers",
)
"""Token ids of the answers, a list for each answer to the row; in every block."""
TEXTS = HiddenColumn(
    "texts", pa.list_(pa.string()), "cascade engine lookup", "answer_forms raw_answers text_answers"
)
"""Texts of the answers where vLLM itself had to detokenize, else null; in every block."""
FINISH = HiddenColumn(
    "finish", pa.string(), "cascade engine lookup", "finish raw_answers shard_figures text_answers"
)
"""vLLM's finish reason; in every block."""
ENDS = HiddenColumn(
    "ends", pa.list_(pa.string()), "cascade engine lookup", "finish raw_answers text_answers"
)
"""The finish reason of each answer, if a row has several answers; in every block."""
STEPS = HiddenColumn("steps", STEPS_TYPE, "engine lookup", "raw_answers text_answers")
"""Log probabilities of the answers' tokens."""
CHANCES = HiddenColumn(
    "chances", PROBABILITIES_TYPE, "classified engine lookup", "finish raw_answers text_answers"
)
"""The probability of each label."""
VECTOR = HiddenColumn("vector", None, "engine lookup", "raw_answers vectors")
"""The answer of a pooling task: fixed_size_list<float32>."""
PROMPT_TOKENS = HiddenColumn(
    "prompt_tokens", pa.int32(), "cascade engine lookup", "finish raw_answers shard_figures"
)
"""The length of the prompt in tokens; in every block."""
CACHED_TOKENS = HiddenColumn("cached_tokens", pa.int32(), "cascade engine lookup", "shard_figures")
"""The number of prompt tokens that were in the prefix cache; in every block."""
MERGED = HiddenColumn("merged", pa.bool_(), "cascade engine lookup", "shard_figures")
"""Whether the answer was computed for another row with an equal request; in every block."""
REUSE = HiddenColumn("reuse", pa.int8(), "lookup", "shard_figures")
"""The source of the row's answer: REUSED or another kind in ledger/increments.py."""
FIGURES = HiddenColumn("figures", pa.string(), "load", "load")
"""JSON of the engine's load figures while it had the block; only in each shard's first row."""
SPENT_COLUMNS = {"read": READ_SPENT, "prepare": PREPARE_SPENT, "engine": ENGINE_SPENT}
