"""Measure prompt lengths from a bounded sample of rows.

The same prepare stage as in a run makes the prompts. `raybatch plan --tokens` shows the lengths,
and `engine.max_model_len: auto` is resolved with them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from prefect_raybatch.errors import ConfigError, SourceError
from prefect_raybatch.job.checks import template_fields
from prefect_raybatch.job.openai_batch import REQUEST_FUNCTIONS
from prefect_raybatch.ledger.records import JsonObject, Unit
from prefect_raybatch.model import pinned as models
from prefect_raybatch.model.memory import CACHE_BLOCK
from prefect_raybatch.plan.prefix_hints import prefix_hints
from prefect_raybatch.spec.read import ReadSpec
from prefect_raybatch.spec.request import PromptSpec
from prefect_raybatch.spec.run import RunSpec
from prefect_raybatch.stages.block import Failure, Row, rows_of
from prefect_raybatch.storage import Store
from prefect_raybatch.words import counted

if TYPE_CHECKING:
    import pyarrow as pa

    from prefect_raybatch.source import Inventory

SAMPLE_ROWS = 2000  # rows
SAMPLE_SECONDS = 20.0  # seconds after the first block at which sampling stops
NEIGHBOURS = 50  # rows read at one place: a few in a row cost little more than one
CONTEXT_STEP = 64  # a context length is rounded up to a multiple of this
MARGIN = 1.1  # times the longest sampled prompt with answer, if all rows are to fit
FAR = 4  # multiple of P99 beyond which a note mentions the longest prompt
HISTOGRAM_BARS = 10
EXAMPLES = 3  # prompts that are kept as texts
HEADS = 16  # files whose first blocks are sampled if the input is not copied yet


class NoPromptMade(ConfigError):
    """No row of a sample made a prompt."""


Block = tuple[str, int, "pa.Table"]  # file, number in it of the table's first row, table


@dataclass(frozen=True)
class PromptExample:
    """A sampled prompt as the model gets it: its text, decoded from `tokens` token ids.

    `row` is the number (0-based) of its row in `file`, a URI.
    """

    file: str
    row: int
    tokens: int
    text: str


@dataclass(frozen=True)
class PromptLengths:
    """Prompt tokens of `rows` sampled rows; `failed` further rows made no prompt.

    `shared` is the share of all prompt tokens that a prefix cache could save, because another
    prompt of the sample begins with the same tokens. Only whole blocks of the cache count.
    `repeated` is the share of rows whose request equals that of an earlier row. `longest` names the
    row with the longest prompt: {file, row}. `histogram` lists (from, to, rows), both ends
    included. `max_model_len` is the value for `auto`, and `why` is the reason for it. `over` is the
    share of sampled rows whose prompts are too long for it. `seconds` is the time that measuring
    took.
    """

    rows: int
    failed: int
    seconds: float
    least: int
    median: int
    p90: int
    p99: int
    most: int
    longest: JsonObject
    histogram: tuple[tuple[int, int, int], ...]
    shared: float
    repeated: float
    max_model_len: int
    why: str
    over: float
    notes: tuple[str, ...] = ()
    examples: tuple[PromptExample, ...] = ()
    hints: tuple[str, ...] = ()  # changes that would let prompts share longer prefixes

    def context(self) -> JsonObject:
        """Return the figures that a plan records (`Plan.context`)."""
        names = ("max_model_len", "why", "rows", "median", "p99", "most")
        hints = {"hints": list(self.hints)} if self.hints else {}
        return {**{name: getattr(self, name) for name in names}, **hints}


def of_files(
    spec: RunSpec,
    model: models.PinnedModel,
    inventory: Inventory,
    store: Store | None = None,
    sample: int = SAMPLE_ROWS,
) -> PromptLengths:
    """Measure prompt lengths in Parquet files, on a sample spread over all their rows.

    `store` is the run's store if the files are a snapshot in it. Raises `SourceError` for
    unreadable files and `ConfigError` if no row makes a prompt.
    """
    rows = sum(file.rows for file in inventory.files)
    blocks = spread_blocks(spec.prompt, spec.read, inventory, store, sample)
    return measure(spec, model, blocks, sample, rows=rows)


def of_heads(spec: RunSpec, model: models.PinnedModel, sample: int = SAMPLE_ROWS) -> PromptLengths:
    """Measure prompt lengths of an input that is not copied yet, and do not copy it.

    The sample is from the first block of each of up to 16 files. Raises `SourceError` for
    unreadable files and `ConfigError` if no row makes a prompt.
    """
    return measure(spec, model, blocks_of_heads(spec.read, sample), sample)


def blocks_of_heads(read: ReadSpec, sample: int) -> Iterator[Block]:
    """Yield (file, first row, table) of row ranges from the first blocks of up to 16 files.

    Nothing is copied. The tables have about `sample` rows in all.
    """
    from prefect_raybatch import source

    heads = list(source.heads(read, HEADS))
    each = -(-sample // max(1, len(heads)))
    return (block for head in heads for block in _thinned(*head, each))


def spread_blocks(
    prompt: PromptSpec, read: ReadSpec, inventory: Inventory, store: Store | None, sample: int
) -> Iterator[Block]:
    """Yield (file, first row, table) of row ranges spread over Parquet files, in random order.

    The tables have about `sample` rows in all (all rows if there are no more), and the columns that
    `prompt` needs. `store` holds the files if they are a snapshot. Raises `SourceError` for rows
    that cannot be read.
    """
    import numpy as np

    from prefect_raybatch.stages.block import is_lost, losses
    from prefect_raybatch.stages.read import ShardReader

    schema = inventory.schema
    if not prompt.function:  # no other columns are needed
        wanted = set(prompt.columns) or {schema.names[0]}
        schema = schema.empty_table().select([n for n in schema.names if n in wanted]).schema
    reader = ShardReader(inventory.files, schema, store, dict(read.options))
    starts = np.cumsum([0, *(file.rows for file in inventory.files)])
    units = [(Unit(i, 0, n), at) for i, (at, n) in enumerate(places(reader.rows, sample))]
    # In random order, so that a sample that is cut short is spread over the input as well.
    tasks = reader.tasks(units, len(units), units_per_task=1, shuffle_seed="sample")
    at = {unit.shard: start for unit, start in units}
    for task in tasks:
        (unit,) = task.units
        for table in reader.read(task):
            if is_lost(table):
                raise SourceError(losses(table)[0].message)
            number = int(np.searchsorted(starts, at[unit.shard], side="right")) - 1
            yield inventory.files[number].uri, int(at[unit.shard] - starts[number]), table


def places(rows: int, sample: int) -> list[tuple[int, int]]:
    """Return (first row, length) of ranges spread evenly over `rows` rows.

    They have about `sample` rows in all, or all rows if there are no more than that.
    """
    if rows <= sample:
        return [(start, min(NEIGHBOURS, rows - start)) for start in range(0, rows, NEIGHBOURS)]
    size = min(NEIGHBOURS, sample)
    count = -(-sample // size)
    return [(i * (rows - size) // max(1, count - 1), size) for i in range(count)]


def _thinned(uri: str, table: pa.Table, most: int) -> Iterator[Block]:
    """Yield (file, first row, table) of ranges spread over `table`, about `most` rows in all."""
    for start, rows in places(table.num_rows, most):
        yield uri, start, table.slice(start, rows)


@dataclass
class _Seen:
    """Measurements of the sampled rows.

    Three lists have an entry for each row that made a prompt: `sizes` (tokens of the prompt),
    `needs` (tokens of prompt and answer) and `keys` (the prompt's token ids as bytes). `failures`
    has an entry for each row that made no prompt. `requests` are the distinct pairs (token ids as
    bytes, sampling). `longest` names the row with the longest prompt: {file, row}. `first` has the
    first few prompts. `values` has each sampled row's values in the columns of the template.
    """

    sizes: list[int] = field(default_factory=list)
    needs: list[int] = field(default_factory=list)  # with the answer
    keys: list[bytes] = field(default_factory=list)
    requests: set[tuple[bytes, str]] = field(default_factory=set)
    failures: list[Failure] = field(default_factory=list)
    longest: dict[str, object] = field(default_factory=dict)
    first: list[tuple[str, int, Sequence[int]]] = field(
        default_factory=list
    )  # file, row, token ids
    values: list[Row] = field(default_factory=list)  # of the columns of a template


def _check_measured(seen: _Seen, of_file: bool) -> None:
    """Raise `ConfigError` if no row was sampled, `NoPromptMade` if no sampled row made a prompt.

    `of_file`: each line of the input is a request (e.g. an OpenAI batch file).
    """
    if not seen.sizes and not seen.failures:
        raise ConfigError(
            "no row was found in the part of the input that was sampled, so prompts cannot be "
            "measured. Set engine.max_model_len"
        )
    if not seen.sizes:
        first = seen.failures[0]
        field, wrong = ("source.uri: ", "the lines of the file") if of_file else ("", "the prompt")
        raise NoPromptMade(
            f"{field}none of {counted(len(seen.failures), 'sampled row')} made a prompt: "
            f"{first.kind}: {first.message}. Correct {wrong}, then run `raybatch preview` on the "
            "job"
        )


def measure(
    spec: RunSpec,
    model: models.PinnedModel,
    blocks: Iterable[Block],
    sample: int = SAMPLE_ROWS,
    seconds: float = SAMPLE_SECONDS,
    rows: int | None = None,
) -> PromptLengths:
    """Measure prompt lengths of about `sample` rows of `blocks`, fewer if that takes too long.

    Stops with the first block that ends over `seconds` after the first one. `rows` is the number of
    rows of the whole input, None if unknown. Raises `ConfigError` if no row makes a prompt.
    """
    from prefect_raybatch.stages.calls.calling import Calls
    from prefect_raybatch.stages.pooling import Pooling
    from prefect_raybatch.stages.texts import prepare_of

    pinned = models.with_arguments(model, spec.engine.model)
    limits = spec.limits
    # In a child process: a function that ends its process would end the driver at each attempt.
    calls = Calls(limits.function_seconds or None, in_child=True, deaths=limits.engine_deaths)
    prepare = prepare_of(
        Pooling.of(spec, pinned),
        spec.prompt,
        spec.sampling,
        pinned,
        None,
        calls=calls,
    )
    began = time.monotonic()
    looked: float | None = None
    seen = _Seen()
    fields = template_fields(spec.prompt.template) if spec.prompt.template else ()
    for uri, start, table in blocks:
        _look(seen, prepare, spec.sampling.max_tokens, uri, start, table, fields)
        # The first block loads the reader and the tokenizer, which says nothing about the others.
        looked = time.monotonic() if looked is None else looked
        if len(seen.sizes) + len(seen.failures) >= sample or time.monotonic() - looked >= seconds:
            break
    _check_measured(seen, of_file=spec.prompt.function in REQUEST_FUNCTIONS)
    share, quarantines = spec.engine.model.context_share, spec.prompt.on_too_long == "quarantine"
    lengths = _summary(share, quarantines, pinned, seen, time.monotonic() - began)
    tokens = sum(seen.sizes) / len(seen.sizes)
    return replace(lengths, hints=prefix_hints(spec, rows or len(seen.sizes), seen.values, tokens))


def _look(
    seen: _Seen,
    prepare: Any,
    longest: int,
    uri: str,
    start: int,
    table: pa.Table,
    fields: Sequence[str] = (),
) -> None:
    import numpy as np

    from prefect_raybatch.stages.calls.isolated import NoChild
    from prefect_raybatch.stages.tokens import LongPrompt

    try:
        requests, tokens = prepare.prompts(table)
    except NoChild as error:
        raise ConfigError(f"cannot make prompts of the sampled rows: {error}") from None
    for i, (request, ids) in enumerate(zip(requests, tokens, strict=True)):
        if isinstance(ids, Failure):
            seen.failures.append(ids)
            continue
        size = ids.estimate if isinstance(ids, LongPrompt) else len(ids)
        if size > max(seen.sizes, default=-1):
            seen.longest = {"file": uri, "row": start + i}
        if len(seen.first) < EXAMPLES:
            seen.first.append((uri, start + i, ids))
        key = np.asarray(ids, ">u4").tobytes()
        seen.sizes.append(size)
        seen.needs.append(size + request.answer(longest))
        seen.keys.append(key)
        seen.requests.add((key, repr(request.sampling)))
    if fields:
        rows = rows_of(table, list(fields))
        seen.values += [row for row in rows if not isinstance(row, Failure)]


def _summary(
    share: float, quarantines: bool, model: models.PinnedModel, seen: _Seen, seconds: float
) -> PromptLengths:
    import numpy as np

    sizes = np.array(seen.sizes)
    median, p90, p99 = (int(np.quantile(sizes, q, method="inverted_cdf")) for q in (0.5, 0.9, 0.99))
    most = int(sizes.max())
    length, why = choose_max_model_len(share, seen.needs, _models_own(model))
    over = float((sizes >= length).mean())
    notes = []
    if most > FAR * p99:
        notes.append(
            f"the longest sampled prompt has {most:,} tokens, over {FAR} times the 99th percentile "
            f"({p99:,}). Prompts of engine.max_model_len tokens or more are "
            f"{'quarantined' if quarantines else 'cut'} "
            "(prompt.on_too_long)"
        )
    return PromptLengths(
        rows=len(sizes),
        failed=len(seen.failures),
        seconds=round(seconds, 2),
        least=int(sizes.min()),
        median=median,
        p90=p90,
        p99=p99,
        most=most,
        longest=seen.longest,
        histogram=histogram(seen.sizes, p99),
        shared=round(_shared(seen.keys), 4),
        repeated=round(1 - len(seen.requests) / len(sizes), 4),
        max_model_len=length,
        why=why,
        over=over,
        notes=tuple(notes),
        examples=_examples(model, seen),
    )


def _examples(model: models.PinnedModel, seen: _Seen) -> tuple[PromptExample, ...]:
    from prefect_raybatch.stages.block import load_tokenizer

    tokenizer = load_tokenizer(*models.tokenizer_place(model))
    return tuple(
        PromptExample(uri, row, len(ids), tokenizer.decode(list(ids)))
        for uri, row, ids in seen.first
    )


def choose_max_model_len(share: float, needs: list[int], own: int | None) -> tuple[int, str]:
    """Return (context length in tokens, reason) that suffices for the fraction `share` of the rows.

    `needs` has the tokens of prompt and answer of each sampled row. If `share` is 1, the length is
    that of the longest sampled row plus a tenth. It is rounded up. `own` is the model's context
    length, which is the upper limit; None if unknown.
    """
    import numpy as np

    if share < 1:
        need = int(np.quantile(needs, share, method="inverted_cdf"))
        what = f"P{share * 100:g} of"
    else:
        need, what = math.ceil(max(needs) * MARGIN), "a tenth over the longest of"
    length = -(-need // CONTEXT_STEP) * CONTEXT_STEP
    why = f"{need:,} tokens, prompt and answer: {what} {len(needs):,} sampled rows"
    if own is not None and length > own:
        return own, f"the model's own; the rows would take {why}"
    return length, f"{why}; a multiple of {CONTEXT_STEP}"


def histogram(sizes: list[int], p99: int) -> tuple[tuple[int, int, int], ...]:
    """Return (from, to, rows) of up to 10 bars of equal width up to `p99`, and of one bar above it.

    Both bounds are inclusive; `p99` is the 99th percentile of `sizes`.
    """
    import numpy as np

    least, most = min(sizes), max(sizes)
    width = max(1, -(-(p99 - least + 1) // HISTOGRAM_BARS))
    edges = list(range(least, p99 + 1, width))
    bars = [(low, min(low + width - 1, p99)) for low in edges]
    if most > p99:
        bars.append((p99 + 1, most))
    values = np.array(sizes)
    return tuple((a, b, int(((values >= a) & (values <= b)).sum())) for a, b in bars)


def _shared(keys: list[bytes]) -> float:
    from prefect_raybatch.stages.order import common_tokens

    ordered = sorted(keys)
    # In sorted order, a prompt shares its longest prefix with one of its neighbours.
    held = common_tokens(ordered) // CACHE_BLOCK * CACHE_BLOCK
    return float(held.sum()) / (sum(map(len, keys)) / 4)


def _models_own(model: models.PinnedModel) -> int | None:
    """Return the model's context length from config.json, else its tokenizer; None if unknown."""
    own = models.context_length(model)
    if own is None:
        from prefect_raybatch.stages.block import load_tokenizer

        said = load_tokenizer(*models.tokenizer_place(model)).model_max_length
        own = said if isinstance(said, int) and said < 1 << 30 else None
    return own
