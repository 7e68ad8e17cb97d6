"""Turns an engine's answers into outcomes of rows: decodes, parses, checks and postprocesses."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pyarrow as pa

from prefect_raybatch.job.output import LOGPROBS, PROBABILITIES
from prefect_raybatch.model import pinned as models
from prefect_raybatch.spec.request import SamplingSpec
from prefect_raybatch.spec.result import FinishSpec, ParsingSpec
from prefect_raybatch.stages.answer_forms import Spelling, form_of, not_of_form
from prefect_raybatch.stages.answer_logprobs import logprobs_column
from prefect_raybatch.stages.block import (
    Failure,
    Tokenizer,
    failures_of,
    input_columns,
    load_tokenizer,
    rows_of,
)
from prefect_raybatch.stages.calls.calling import Calls
from prefect_raybatch.stages.columns import (
    ANSWERS,
    CHANCES,
    ENDS,
    FINISH,
    OWN_FORM,
    POSITION,
    STEPS,
    TEXTS,
)
from prefect_raybatch.stages.parsing import AnswerText, Parsers, each_text
from prefect_raybatch.stages.row_outcomes import ColumnValues, FinishedRow, OutputRow, postprocessed
from prefect_raybatch.stages.typed_answers import MAX_ANSWER, reader_of
from prefect_raybatch.words import counted

CUT_OFF = "AnswerCutOff"


@dataclass(frozen=True)
class TextAnswers:
    """Reads the answers of a block as the job says: as text, parsed, typed, or postprocessed."""

    spec: FinishSpec
    sampling: SamplingSpec
    model: models.PinnedModel
    calls: Calls

    def outcomes(self, table: pa.Table) -> list[FinishedRow]:
        """Return the outcome of each row of a block with answers.

        An outcome is one of:
        - the row's output columns;
        - the row's failure;
        - that the result leaves the row out, because `output.postprocess` returned None for it.
        """
        texts = self.texts(table)
        failures = self._failures(table, texts)
        answers = self._answers(table, failures, texts)
        if self.spec.postprocess is None:
            return [f or OutputRow(a) for f, a in zip(failures, answers, strict=True)]
        names = input_columns(table)
        rows = rows_of(table, names)
        finish = table[FINISH].to_pylist()
        chances: list[ColumnValues] = [{} for _ in finish]
        if self.spec.probabilities:
            chances = [{PROBABILITIES: dict(c or ())} for c in table[CHANCES].to_pylist()]
        if self.sampling.logprobs is not None:
            chances = [{LOGPROBS: told} for told in self.logprobs(table)]
        kept = self.spec.kept(names)
        taken = {POSITION, self.spec.row_number, *kept, *self.spec.extras}
        taken |= {PROBABILITIES} if self.spec.probabilities else set()
        taken |= {LOGPROBS} if self.sampling.logprobs is not None else set()
        with self.calls.function(self.spec.postprocess, "output.postprocess") as function:
            return [
                failure
                or postprocessed(function, row, {**answer, "finish_reason": reason, **more}, taken)
                for failure, row, answer, reason, more in zip(
                    failures, rows, answers, finish, chances, strict=True
                )
            ]

    def _answers(
        self, table: pa.Table, failures: list[Failure | None], texts: list[AnswerText]
    ) -> list[ColumnValues]:
        """Return the answer columns of each row: {column: value}.

        A text that does not parse, or does not fit the schema, sets its row's entry in `failures`.
        """
        column = self.spec.column
        beside: list[ColumnValues] = [{} for _ in texts]
        if self.spec.parsing is not None:
            parsers = self._parsers(self.spec.parsing)
            texts, beside = parsers.split_answers(table, texts, failures)
        if (form := self.spec.schema) is None:
            texts = self._compared(table, texts, failures)
            return [{column: text, **more} for text, more in zip(texts, beside, strict=True)]
        reader, made = reader_of(form), []
        several = self.sampling.several
        for i, text in enumerate(texts):
            answers = [] if failures[i] else each_text(text)
            found = [reader.read(answer or "") for answer in answers]
            if failure := next((one for one in found if isinstance(one, Failure)), None):
                failures[i], found = failure, []
            parsed = [one[0] for one in found if not isinstance(one, Failure)]
            rows = [one[1] for one in found if not isinstance(one, Failure)]
            if several:
                own: ColumnValues = {column: parsed if self.spec.postprocess else rows}
            elif self.spec.postprocess:
                own = {column: parsed[0] if parsed else None}
            else:
                own = rows[0] if rows else {}
            made.append({**own, **beside[i]})
        return made

    def _compared(
        self, table: pa.Table, texts: list[AnswerText], failures: list[Failure | None]
    ) -> list[AnswerText]:
        """Return the texts, with labels spelled as in the choice.

        A text that does not have the required form (choice, JSON or the like) sets its row's entry
        in `failures`, unless it was truncated and the job keeps truncated answers.
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
            form = None if failures[i] else form_of(usual, own[i])
            if form is None:
                continue
            answers = each_text(text)
            ends = several[i] or [reasons[i]] * len(answers)
            for k, (answer, end) in enumerate(zip(answers, ends, strict=True)):
                if end == "length" and self.spec.keeps_cut_off:
                    continue
                fitting, why = spelling.fitted(form, answer, i, k)
                if why is None:
                    answers[k] = fitting
                    continue
                failures[i] = (
                    self._cut_off(answer or "", len(table[ANSWERS][i][k]))
                    if end == "length"
                    else not_of_form(form, why, answer or "")
                )
                break
            made[i] = answers if self.sampling.several else answers[0]
        return made

    def logprobs(self, table: pa.Table) -> list[object]:
        """Return the value of the sampling.logprobs column for each row."""
        return logprobs_column(
            STEPS.values(table),
            self.sampling.logprobs or 0,
            self.sampling.several,
            self._tokenizer,
        )

    def _parsers(self, parsing: ParsingSpec) -> Parsers:
        keep_special = not self.sampling.skip_special_tokens
        return Parsers(parsing, self._tokenizer(), keep_special)

    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(*models.tokenizer_place(self.model))

    def _failures(self, table: pa.Table, texts: list[AnswerText]) -> list[Failure | None]:
        """Return why each row failed: before this stage, or because its answer was truncated.

        None for a valid row. Truncated answers fail their rows only if the job says so.
        """
        failures = failures_of(table)
        if not self.spec.fails_cut_off:
            return failures
        answers = table[ANSWERS].to_pylist()
        for i, reason in enumerate(table[FINISH].to_pylist()):
            if reason == "length" and failures[i] is None:
                failures[i] = self._cut_off(texts[i], max(map(len, answers[i])))
        return failures

    def _cut_off(self, text: object, tokens: int) -> Failure:
        # The answer comes last: only the first COUNTED_CHARACTERS tell reasons apart in counts.
        text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
        kept = ", or set output.on_cut_off: keep" if self.spec.schema is None else ""
        return Failure(
            "engine",
            CUT_OFF,
            "the answer was cut off at sampling.max_tokens or at the end of the context "
            f"(engine.max_model_len). Raise the limit and retry the row{kept}. Answer after "
            f"{counted(tokens, 'token')}: {text[:MAX_ANSWER]}",
        )

    def texts(self, table: pa.Table) -> list[AnswerText]:
        """Return each row's text, or a list of texts in a job with several answers to each row.

        None for a row without an answer.
        """
        ready = table[TEXTS].to_pylist()
        answers = table[ANSWERS].to_pylist()
        todo = [i for i, a in enumerate(answers) if a is not None and ready[i] is None]
        if todo:
            tokenizer, skip = self._tokenizer(), self.sampling.skip_special_tokens
            flat = [ids for i in todo for ids in answers[i]]
            if self.spec.parsing is not None:  # parsers need special tokens, their possible markers
                flat, skip = list(map(self._parsers(self.spec.parsing).visible, flat)), False
            texts = iter(tokenizer.batch_decode(flat, skip_special_tokens=skip))
            for i in todo:
                ready[i] = [next(texts) for _ in answers[i]]
        return [t if t is None or self.sampling.several else t[0] for t in ready]
