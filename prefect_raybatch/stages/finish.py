"""From answer to result: detokenize, user postprocess, pieces and receipts. CPU, a block at a time.

Valid and failed rows of a shard go to a Parquet piece each. A piece is durable before its receipt
exists and has a fresh name, so nothing is ever overwritten, whatever Ray runs twice.
"""

from __future__ import annotations

import io
import json
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.installed import code_version
from prefect_raybatch.job.images import DIGESTS_COLUMN
from prefect_raybatch.job.output import LOGPROBS, PROBABILITIES
from prefect_raybatch.job.trust import check_types
from prefect_raybatch.ledger.failures import COUNTED_BY, FailureKey, Loss
from prefect_raybatch.ledger.increments import ASKED, MERGED_ROW, REUSED
from prefect_raybatch.ledger.layout import OUTPUT_SCHEMA, piece_path
from prefect_raybatch.ledger.part_files import dictionary_columns
from prefect_raybatch.ledger.positions import Positions
from prefect_raybatch.ledger.record_files import put_record_if_absent, read_record
from prefect_raybatch.ledger.record_texts import PieceKind
from prefect_raybatch.ledger.records import Piece, Receipt, Unit, digest
from prefect_raybatch.ledger.stats import ShardStats
from prefect_raybatch.model import pinned as models
from prefect_raybatch.spec.finish import FinishSpec, ParsingSpec
from prefect_raybatch.spec.sampling import SamplingSpec
from prefect_raybatch.stages.answer_counts import (
    MOST_COUNTED_LABELS,
    label_counts,
    length_counts,
)
from prefect_raybatch.stages.answer_forms import Spelling, form_of, not_of_form
from prefect_raybatch.stages.answer_logprobs import logprobs_told, logprobs_type
from prefect_raybatch.stages.block import (
    Failure,
    Tokenizer,
    copied,
    input_columns,
    is_lost,
    load_tokenizer,
    lost_units,
    rows_of,
)
from prefect_raybatch.stages.calls.apart import NoChild
from prefect_raybatch.stages.calls.calling import HERE, Calls
from prefect_raybatch.stages.columns import (
    ANSWERS,
    CACHED_TOKENS,
    CHANCES,
    DIGESTS,
    ENDS,
    ENGINE_BEGAN,
    ENGINE_SECONDS,
    ERROR,
    FINISH,
    FORMED,
    MERGED,
    OWN_FORM,
    POSITION,
    PREPARE_SECONDS,
    PROBABILITIES_TYPE,
    PROMPT_TOKENS,
    READ_SECONDS,
    REUSE,
    SHARD,
    STEPS,
    TEXTS,
    TRUNCATED,
    HiddenColumn,
)
from prefect_raybatch.stages.load import figures_of
from prefect_raybatch.stages.parsing import Parsers, parsed_types
from prefect_raybatch.stages.result_columns import declared_schema, extra_type
from prefect_raybatch.stages.typed_answers import MAX_ANSWER, reader_of
from prefect_raybatch.storage import Store, put_proved
from prefect_raybatch.words import counted

RECEIPT = "receipt"
CUT_OFF = "AnswerCutOff"


@dataclass(frozen=True)
class Finish:
    """The stage as a function of one block; `store` is rooted at the run directory.

    `model` is the plan's pinned model; `calls`: how the user's function is called.
    """

    spec: FinishSpec
    sampling: SamplingSpec
    model: dict[str, Any]
    store: Store
    attempt: str
    calls: Calls = HERE

    @property
    def several(self) -> bool:
        """Return whether a row has a list of answers."""
        return self.sampling.answers > 1

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return one row for each shard in the block: its receipt, as JSON."""
        if is_lost(table):
            lost = lost_units(table)
            return _receipts([Receipt.of_lost(unit, self.attempt, why) for unit, why in lost])
        if not table.num_rows:
            return _receipts([])
        made = []
        shards = table[SHARD].to_numpy()
        for shard in dict.fromkeys(shards.tolist()):  # a batch may bundle several small shards
            rows = table.filter(pa.array(shards == shard)) if (shards != shard).any() else table
            made.append(self._shard(int(shard), rows))
        return _receipts(made)

    def _shard(self, shard: int, table: pa.Table) -> Receipt:
        began = time.time()
        try:
            return self._write(shard, table, began)
        except Exception as error:
            # The store or this node failed, not a row: the shard is lost for this pass.
            positions = table[POSITION].to_numpy()
            low, high = int(positions.min()), int(positions.max())
            unit = Unit(shard, low, high - low + 1)
            return Receipt.of_lost(unit, self.attempt, Loss.of(error))

    def _write(self, shard: int, table: pa.Table, began: float) -> Receipt:
        outcome = self._outcome(table)
        names = input_columns(table)
        kept = self.spec.kept(names)
        positions = table[POSITION].to_numpy()
        pieces = []
        good = [i for i, o in enumerate(outcome) if isinstance(o, dict)]
        if good:
            columns, bad = self._result(table, outcome, good)
            for i, failure in bad.items():
                outcome[i] = failure
            good = [i for i in good if i not in bad]
        if good:
            columns += self._extras(table, good)
            data = table.select([POSITION, *kept])
            data = data.take(pa.array(good)) if len(good) < table.num_rows else data
            for column, values in columns:
                data = data.append_column(column, values)
            pieces.append(self.write_piece(shard, "data", data, positions[good]))
        failures = [o for o in outcome if isinstance(o, Failure)]
        failed = [i for i, o in enumerate(outcome) if isinstance(o, Failure)]
        if failed:
            rows = table.select([POSITION, *names]).take(pa.array(failed))
            pieces.append(
                self.write_piece(shard, "quarantine", quarantine(rows, failures), positions[failed])
            )
        skipped = [i for i, o in enumerate(outcome) if o is None]
        load, engine = figures_of(table)
        return Receipt(
            shard=shard,
            attempt=self.attempt,
            good=Positions.of(positions[good]),
            failed=Positions.of(positions[failed]),
            skipped=Positions.of(positions[skipped]),
            pieces=tuple(pieces),
            stats=_reused(table, self._stats(load, table, began, outcome)),
            failures=dict(Counter(map(_key, failures))),
            where={
                "node": socket.gethostname(),
                "pid": str(os.getpid()),
                "code": code_version(),
                **engine,
            },
        )

    def failed(self, unit: Unit, rows: pa.Table, failure: Failure, attempts: int) -> Receipt:
        """Quarantine a whole unit after `attempts`; raises the store's errors."""
        positions = rows[POSITION].to_numpy()
        table = quarantine(rows, [failure] * unit.rows, attempts)
        piece = self.write_piece(unit.shard, "quarantine", table, positions)
        return Receipt(
            shard=unit.shard,
            attempt=self.attempt,
            failed=Positions.of(positions),
            pieces=(piece,),
            stats=ShardStats(rows=unit.rows),
            failures={_key(failure): unit.rows},
        )

    def _outcome(self, table: pa.Table) -> list[dict[str, Any] | Failure | None]:
        """Return for each row its output columns, its failure, or None if it is left out."""
        texts = self._texts(table)
        errors = self._errors(table, texts)
        answers = self._answers(table, errors, texts)
        if self.spec.postprocess is None:
            return [Failure(**e) if e else a for e, a in zip(errors, answers, strict=True)]
        names = input_columns(table)
        rows = rows_of(table, names)
        finish = table[FINISH].to_pylist()
        chances: list[dict[str, Any]] = [{} for _ in finish]
        if self.spec.probabilities:
            chances = [{PROBABILITIES: dict(c or ())} for c in table[CHANCES].to_pylist()]
        if self.sampling.logprobs is not None:
            chances = [{LOGPROBS: told} for told in self._told(table)]
        kept = self.spec.kept(names)
        taken = {POSITION, self.spec.row_number, *kept, *self.spec.extras}
        taken |= {PROBABILITIES} if self.spec.probabilities else set()
        taken |= {LOGPROBS} if self.sampling.logprobs is not None else set()
        made = []
        with self.calls.function(self.spec.postprocess, "output.postprocess") as function:
            for e, row, a, f, c in zip(errors, rows, answers, finish, chances, strict=True):
                answer = {**(a or {}), "finish_reason": f, **c}
                made.append(Failure(**e) if e else postprocessed(function, row, answer, taken))
        return made

    def _answers(
        self, table: pa.Table, errors: list[dict[str, str] | None], texts: list[Any]
    ) -> list[dict[str, Any]]:
        """Return each row's answer by column.

        A text that does not parse, or does not fit the schema, adds its row to `errors`.
        """
        column = self.spec.column
        beside: list[dict[str, Any]] = [{} for _ in texts]
        if self.spec.parsing is not None:
            parsers = self._parsers(self.spec.parsing)
            texts, beside = parsers.take_apart(table, texts, errors, self.several)
        if (form := self.spec.schema) is None:
            texts = self._compared(table, texts, errors)
            return [{column: text, **more} for text, more in zip(texts, beside, strict=True)]
        reader, made = reader_of(form), []
        several = self.several
        for i, text in enumerate(texts):
            answers = [] if errors[i] else list(text) if several else [text]
            found = [reader.read(answer or "") for answer in answers]
            if failure := next((one for one in found if isinstance(one, Failure)), None):
                errors[i], found = failure.to_dict(), []
            parsed = [one[0] for one in found if not isinstance(one, Failure)]
            rows = [one[1] for one in found if not isinstance(one, Failure)]
            if several:
                own: dict[str, Any] = {column: parsed if self.spec.postprocess else rows}
            elif self.spec.postprocess:
                own = {column: parsed[0] if parsed else None}
            else:
                own = rows[0] if rows else {}
            made.append({**own, **beside[i]})
        return made

    def _compared(
        self, table: pa.Table, texts: list[Any], errors: list[dict[str, str] | None]
    ) -> list[Any]:
        """Return the texts, with labels as written in the choice.

        One without the required form adds its row to `errors`, unless it was truncated and the job
        keeps such answers.
        """
        job = (
            {"choice": self.sampling.choices}
            if self.sampling.choices
            else {"structured_outputs": self.sampling.form}
        )
        has_form = bool(self.sampling.choices or self.sampling.form)
        if not has_form and OWN_FORM not in table.column_names:
            return texts
        usual = json.dumps(job)
        own = OWN_FORM.values(table)
        spelling = Spelling(table, self.spec.parsing, self._tokenizer)
        reasons, several = table[FINISH].to_pylist(), table[ENDS].to_pylist()
        made = list(texts)
        for i, text in enumerate(texts):
            form = None if errors[i] else form_of(usual, own[i])
            if form is None:
                continue
            answers = list(text or ()) if self.several else [text]
            ends = several[i] or [reasons[i]] * len(answers)
            for k, (answer, end) in enumerate(zip(answers, ends, strict=True)):
                if end == "length" and self.spec.keeps_cut_off:
                    continue
                fitting, why = spelling.fitted(form, answer, i, k)
                if why is None:
                    answers[k] = fitting
                    continue
                errors[i] = (
                    self._cut_off(answer or "", len(table[ANSWERS][i][k]))
                    if end == "length"
                    else not_of_form(form, why, answer or "")
                ).to_dict()
                break
            made[i] = answers if self.several else answers[0]
        return made

    def _told(self, table: pa.Table) -> list[Any]:
        """Return the value of the sampling.logprobs column for each row."""
        return logprobs_told(
            STEPS.values(table), self.sampling.logprobs or 0, self.several, self._tokenizer()
        )

    def _parsers(self, parsing: ParsingSpec) -> Parsers:
        keep_special = not self.sampling.skip_special_tokens
        return Parsers(parsing, self._tokenizer(), keep_special)

    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(*models.tokenizer_place(self.model))

    def _errors(self, table: pa.Table, texts: list[Any]) -> list[dict[str, str] | None]:
        """Return why each row failed before this stage, or because its answer is incomplete."""
        errors: list[dict[str, str] | None] = table[ERROR].to_pylist()
        if not self.spec.fails_cut_off:
            return errors
        answers = table[ANSWERS].to_pylist()
        for i, reason in enumerate(table[FINISH].to_pylist()):
            if reason == "length" and errors[i] is None:
                errors[i] = self._cut_off(texts[i], max(map(len, answers[i]))).to_dict()
        return errors

    def _cut_off(self, text: object, tokens: int) -> Failure:
        # Equal in the COUNTED_BY characters by which failures are counted, whatever the answer is.
        text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
        kept = ", or set output.on_cut_off: keep" if self.spec.schema is None else ""
        return Failure(
            "engine",
            CUT_OFF,
            "the answer was cut off at sampling.max_tokens or at the end of the context "
            f"(engine.max_model_len). Raise the limit and retry the row{kept}. Answer after "
            f"{counted(tokens, 'token')}: {text[:MAX_ANSWER]}",
        )

    def _texts(self, table: pa.Table) -> list[Any]:
        ready = table[TEXTS].to_pylist()
        answers = table[ANSWERS].to_pylist()
        todo = [i for i, a in enumerate(answers) if a is not None and ready[i] is None]
        if todo:
            tokenizer, skip = self._tokenizer(), self.sampling.skip_special_tokens
            flat = [ids for i in todo for ids in answers[i]]
            if self.spec.parsing is not None:  # their marks may be special tokens
                flat, skip = list(map(self._parsers(self.spec.parsing).visible, flat)), False
            texts = iter(tokenizer.batch_decode(flat, skip_special_tokens=skip))
            for i in todo:
                ready[i] = [next(texts) for _ in answers[i]]
        return [t if t is None or self.several else t[0] for t in ready]

    def _result(
        self, table: pa.Table, outcome: list[Any], good: list[int]
    ) -> tuple[list[tuple[pa.Field, pa.Array]], dict[int, Failure]]:
        """Return the output columns of the valid rows, and which of them do not fit the schema."""
        schema = self._schema([outcome[i] for i in good])
        bad: dict[int, Failure] = {}
        for i in good:
            if outcome[i].keys() != set(schema.names):
                odd = sorted(set(outcome[i]) ^ set(schema.names))
                bad[i] = Failure(
                    "postprocess",
                    "SchemaError",
                    f"columns {', '.join(odd)} are missing or unexpected. Return exactly the "
                    f"run's output columns: {', '.join(schema.names)}",
                )
        for column in schema:
            rest = [i for i in good if i not in bad]
            try:
                pa.array([outcome[i][column.name] for i in rest], column.type)
            except (pa.ArrowException, TypeError, ValueError, OverflowError):
                bad |= {
                    i: failure
                    for i in rest
                    if (failure := _cast_failure(outcome[i][column.name], column))
                }
        rest = [i for i in good if i not in bad]
        return [(c, pa.array([outcome[i][c.name] for i in rest], c.type)) for c in schema], bad

    def _extras(self, table: pa.Table, good: list[int]) -> list[tuple[pa.Field, pa.Array]]:
        """Return the columns with details about the answers of the valid rows."""
        made = []
        for name in self.spec.extras:
            if name == "finish_reason":
                values = table[FINISH].to_pylist()
                if self.several:  # a row that asked for one has no list
                    several = table[ENDS].to_pylist()
                    values = [s or [v] for s, v in zip(several, values, strict=True)]
            elif name == DIGESTS_COLUMN:
                values = table[DIGESTS].to_pylist()
            elif name == "prompt_tokens":
                values = table[PROMPT_TOKENS].to_pylist()
            else:
                counts = [[len(ids) for ids in a or ()] for a in table[ANSWERS].to_pylist()]
                values = counts if self.several else [sum(c) for c in counts]
            kind = extra_type(name, self.sampling.answers)
            made.append((pa.field(name, kind), pa.array([values[i] for i in good], kind)))
        if self.spec.probabilities:
            values = table[CHANCES].combine_chunks().take(pa.array(good))
            made.append((pa.field(PROBABILITIES, PROBABILITIES_TYPE), values))
        if self.sampling.logprobs is not None:
            kind, every = (
                logprobs_type(self.sampling.logprobs, self.sampling.answers),
                self._told(table),
            )
            made.append((pa.field(LOGPROBS, kind), pa.array([every[i] for i in good], kind)))
        return made

    def _schema(self, rows: list[dict[str, Any]]) -> pa.Schema:
        """Return the output columns' types: declared, or fixed for the run by its first shard."""
        if self.spec.postprocess is None:
            form, several = self.spec.schema, self.several
            record = pa.struct(list(reader_of(form).schema)) if form is not None else pa.string()
            columns = [(self.spec.column, record)] if several or form is None else []
            columns += parsed_types(self.spec.parsing) if self.spec.parsing is not None else []
            beside = [pa.field(n, pa.list_(k) if several else k) for n, k in columns]
            alone = reader_of(form).schema if form is not None and not several else ()
            return pa.schema([*alone, *beside])
        if self.spec.types is not None:
            return declared_schema(self.spec.types)
        try:
            return _read_schema(self.store)
        except FileNotFoundError:
            # The loser of the race takes the winner's, so all pieces agree.
            schema = _infer(rows).serialize().to_pybytes()
            put_record_if_absent(self.store, OUTPUT_SCHEMA, schema)
            return _read_schema(self.store)

    def write_piece(
        self, shard: int, kind: PieceKind, table: pa.Table, positions: np.ndarray
    ) -> Piece:
        out = io.BytesIO()
        # As the result's files are: a piece becomes a row group of one as it is.
        dictionary = dictionary_columns(table)
        pq.write_table(table, out, compression="zstd", use_dictionary=dictionary)
        data = out.getvalue()
        name = f"{shard:08d}-{uuid.uuid4().hex}.parquet"
        # Found bad when it is written, a piece costs a PUT; at the end it would cost the rows.
        put_proved(self.store, piece_path(name), data)
        return Piece(name, kind, table.num_rows, len(data), digest(data), Positions.of(positions))

    def _counts(self, table: pa.Table, outcome: Sequence[Any]) -> dict[str, float]:
        """Return the counts of the answers of rows that did not fail."""
        well = [i for i, made in enumerate(outcome) if not isinstance(made, Failure)]
        if 0 < len(self.sampling.choices) <= MOST_COUNTED_LABELS and self.spec.schema is None:
            column = self.spec.column
            if self.spec.postprocess is None:
                given = [outcome[i][column] for i in well]
            else:  # labels are short, so that making their texts again costs little
                texts = self._texts(table)
                given = [texts[i] for i in well]
            flat = [text for one in given for text in (one if self.several else [one])]
            return label_counts(flat, self.sampling.choices)
        answers, reasons = table[ANSWERS].to_pylist(), table[FINISH].to_pylist()
        return length_counts([answers[i] or () for i in well], [reasons[i] for i in well])

    def _stats(
        self, load: ShardStats, table: pa.Table, began: float, outcome: Sequence[Any]
    ) -> ShardStats:
        """Return the engine's `load` figures plus the counts of the rows."""
        answers = table[ANSWERS].to_pylist()
        ends = table[FINISH].to_pylist()
        merged = table[MERGED].to_pylist()
        truncated = formed = read = None
        if TRUNCATED in table.column_names:
            truncated = sum(map(bool, table[TRUNCATED].to_pylist()))
        if FORMED in table.column_names:
            formed = sum(
                bool(form) and reason == "length"
                for form, reason in zip(table[FORMED].to_pylist(), ends, strict=True)
            )
        if READ_SECONDS in table.column_names:
            read = _spent(table, READ_SECONDS)
        return replace(
            load,
            others={**load.others, **self._counts(table, outcome)},
            rows=table.num_rows,
            prompt_tokens=sum(
                n or 0
                for n, m in zip(table[PROMPT_TOKENS].to_pylist(), merged, strict=True)
                if not m
            ),
            cached_tokens=_sum(table, CACHED_TOKENS),
            output_tokens=sum(
                len(ids) for a, m in zip(answers, merged, strict=True) if a and not m for ids in a
            ),
            cut_off=sum(reason == "length" for reason in ends),
            cut_off_structured=formed,
            deduplicated=sum(map(bool, merged)),
            truncated=truncated,
            started=_spent(table, ENGINE_BEGAN),
            ended=round(time.time(), 4),
            read_s=read,
            prepare_s=_spent(table, PREPARE_SECONDS),
            engine_s=_spent(table, ENGINE_SECONDS),
            finish_s=round(time.time() - began, 4),
        )


def _reused(table: pa.Table, stats: ShardStats) -> ShardStats:
    """Return the figures with rows by the origin of their answers, and the tokens saved."""
    if REUSE not in table.column_names:
        return stats
    kinds = table[REUSE].to_numpy()
    answers, prompts = table[ANSWERS].to_pylist(), table[PROMPT_TOKENS].to_pylist()
    saved = [
        (prompts[i] or 0) + sum(map(len, answers[i] or ()))
        for i in np.flatnonzero((kinds == REUSED) | (kinds == MERGED_ROW)).tolist()
    ]
    return replace(
        stats,
        deduplicated=None,
        reused=int((kinds == REUSED).sum()),
        merged=int((kinds == MERGED_ROW).sum()),
        asked=int((kinds == ASKED).sum()),
        saved_tokens=sum(saved),
    )


def quarantine(rows: pa.Table, failures: list[Failure], attempts: int = 1) -> pa.Table:
    """Return failed rows as the quarantine keeps them: reason, attempts and the input row.

    `rows` holds the position column and the input columns, which become one struct column, so that
    their names cannot collide with ours.
    """
    names = input_columns(rows)
    arrays = [rows[name].combine_chunks() for name in names]
    fields = [pa.field(name, rows.schema.field(name).type) for name in names]
    nested = pa.StructArray.from_arrays(arrays, fields=fields) if names else None
    columns = {
        POSITION: rows[POSITION],
        "stage": pa.array([f.stage for f in failures], pa.string()),
        "error": pa.array([f.kind for f in failures], pa.string()),
        "message": pa.array([f.message for f in failures], pa.string()),
        "attempts": pa.array([attempts] * len(failures), pa.int32()),
    }
    if nested is not None:
        columns["input"] = nested
    return pa.table(columns)


def _read_schema(store: Store) -> pa.Schema:
    data = read_record(store, OUTPUT_SCHEMA)
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(data))
    except (pa.ArrowException, OSError) as error:
        raise CorruptRun(f"{OUTPUT_SCHEMA} is not a readable Arrow schema: {error}") from None
    check_types(schema, OUTPUT_SCHEMA)
    return schema


def _infer(rows: list[dict[str, Any]]) -> pa.Schema:
    """Return types from the first shard's rows; a column of nulls is taken as text."""
    # The names most rows have: the odd rows then fail, and not all the others.
    names = Counter(frozenset(row) for row in rows).most_common(1)[0][0]
    rows = [row for row in rows if row.keys() == names]
    fields = []
    for name in rows[0]:
        kind = _infer_type([row[name] for row in rows])
        fields.append((name, pa.string() if pa.types.is_null(kind) else kind))
    return pa.schema(fields)


def _infer_type(values: list[Any]) -> pa.DataType:
    """Return the type of all values, or of most of them; the others then fail to cast."""
    try:
        return pa.infer_type(values)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        kinds = Counter(kind for v in values if (kind := _type_of(v)) is not None)
        return kinds.most_common(1)[0][0] if kinds else pa.string()


def _type_of(value: object) -> pa.DataType | None:
    try:
        return None if value is None else pa.infer_type([value])
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return None


def postprocessed(
    function: Callable[[dict[str, Any]], Any], row: Any, answer: dict[str, Any], taken: set[str]
) -> Any:
    """Return what a user's function makes of a row and its answer: columns, None or a failure."""
    if isinstance(row, Failure):
        return row
    try:
        made = copied(function({**row, **answer}))
        if made is not None and not isinstance(made, dict):
            raise TypeError(
                f"output.postprocess must return a dict or None, not {type(made).__name__}"
            )
        for name in made or ():
            if not isinstance(name, str):
                raise TypeError(
                    f"output.postprocess must return a dict with column names as keys, not {name!r}"
                )
            if name in taken:  # two columns of a name make a file that nothing can read
                return Failure(
                    "postprocess",
                    "SchemaError",
                    f"column {name} is already in the result. Return it under another name, or "
                    "exclude the input's column with output.columns",
                )
        return made
    except NoChild:  # the function's process did not start, which is no fault of the row
        raise
    except Exception as error:
        return Failure.of("postprocess", error)


def _cast_failure(value: object, column: pa.Field) -> Failure | None:
    try:
        pa.array([value], column.type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        return Failure(
            "postprocess",
            "SchemaError",
            f"column {column.name} has type {column.type}, but the value is "
            f"{type(value).__name__}: {error}"[:500],
        )
    return None


def _key(failure: Failure) -> FailureKey:
    return FailureKey(failure.stage, failure.kind, failure.message[:COUNTED_BY])


def _spent(table: pa.Table, column: HiddenColumn) -> float:
    """Return the seconds in a column that is the same in each row."""
    return round(float(table[column][0].as_py()), 4)


def _sum(table: pa.Table, name: str) -> int:
    return int(np.nansum(table[name].to_numpy(zero_copy_only=False).astype(float)))


def _receipts(receipts: list[Receipt]) -> pa.Table:
    return pa.table({RECEIPT: pa.array([r.to_json() for r in receipts], pa.string())})
