"""Computes what a run would do, without writing to its directory."""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from prefect_raybatch.cluster import sizes as sized
from prefect_raybatch.compile.job import compile_job, compile_judge, read_spec
from prefect_raybatch.compile.resolved import Resolved
from prefect_raybatch.errors import ConfigError, InsufficientResources
from prefect_raybatch.job.edits import judging_job
from prefect_raybatch.job.openai_batch import REQUEST_FUNCTIONS
from prefect_raybatch.job.ray_cluster import check_made_cluster
from prefect_raybatch.learning.coming_run import PlannedRows
from prefect_raybatch.ledger.arrangement import ArrangementNote
from prefect_raybatch.ledger.increments import RowCounts
from prefect_raybatch.ledger.records import JsonObject
from prefect_raybatch.model.memory import Model
from prefect_raybatch.model.pinned import ENDPOINT, PinnedModel
from prefect_raybatch.plan import hosted_rows, image_bytes, image_paths
from prefect_raybatch.plan import plan as planning
from prefect_raybatch.plan import prompt_lengths as counting
from prefect_raybatch.plan.hosted_rows import HostedRows
from prefect_raybatch.plan.prompt_lengths import PromptLengths
from prefect_raybatch.publish.planned import check_targets_of
from prefect_raybatch.quality.golden import Golden
from prefect_raybatch.runs.arrangement import LearningSpec, expected_arrangement
from prefect_raybatch.runs.estimate import (
    CostEstimate,
    estimate,
    hosted_estimate,
    with_first,
    with_judge,
)
from prefect_raybatch.runs.judge_cost import HostedJudge, UnknownCost, judge_cost_text
from prefect_raybatch.runs.plan_run import (
    answer_spec,
    check_judge_model,
    check_pinned_model,
    check_places,
    check_schema_names,
    length_of_spec,
    too_few_rows,
)
from prefect_raybatch.runs.quality import (
    check_judge,
    check_quality_columns,
    golden_plan,
    judge_plan,
    judge_warning,
)
from prefect_raybatch.sizing import sizes
from prefect_raybatch.sizing.agreement import trial_rows
from prefect_raybatch.sizing.explain import Figure, figures
from prefect_raybatch.sizing.sizes import Capacity, Sizing
from prefect_raybatch.spec.cascade import most_rows
from prefect_raybatch.spec.endpoint import EndpointSpec
from prefect_raybatch.spec.run import RunSpec
from prefect_raybatch.storage import join, open_store
from prefect_raybatch.storage.uri import is_remote
from prefect_raybatch.words import counted

if TYPE_CHECKING:
    from prefect_raybatch.source import Inventory

log = logging.getLogger(__name__)

TRIED_ROWS = 3  # rows on which a prompt function is tried


@dataclass(frozen=True)
class DryRun:
    """What a run would do, as `raybatch plan` shows it.

    `columns` and `types` are those of the input. `result` lists (name, type) of the columns that
    the run adds, as far as known in advance. `rows_guessed`: `rows` is estimated from a part of the
    input. `needs` are the resources that the run takes, `have` those of its cluster, `figures` its
    sizes with their reasons; `problems` say why it cannot start or work well. `tokens` are the
    prompt lengths, if measured, `hosted` the token sizes for a hosted model. `table` names the
    table and version to read. `publish` has a line for each target. `golden` describes the golden
    rows, `judged` the judge's rows and cost. `classifier` is the file of a classifier that answers
    the rows, or "".

    For a cascade, `first` is the dry run of its first model, and the other fields are about the
    larger model. The larger model is asked about at most the share `at_most` of the rows, and about
    `check` more rows to compare both models.
    """

    job: str
    rows: int
    files: int
    format: str
    sizing: Sizing
    columns: tuple[str, ...]
    result: tuple[tuple[str, str], ...]
    model: PinnedModel
    run: str
    needs: JsonObject
    have: JsonObject
    figures: tuple[Figure, ...]
    problems: tuple[str, ...]
    tokens: PromptLengths | None = None
    hosted: HostedRows | None = None  # of a job with engine.endpoint
    table: JsonObject | None = None
    publish: tuple[str, ...] = ()
    reuse: ReusePlan | None = None
    types: tuple[str, ...] = ()  # of `columns`
    cost: CostEstimate | None = None  # of a job with prices
    rows_guessed: bool = False  # from a part of the input
    first: DryRun | None = None  # of the first model of a cascade; the others are the larger one's
    golden: str = ""  # number and columns of the golden rows
    judged: str = ""  # how many rows a judge would be asked about, and what a hosted one costs
    at_most: float | None = None  # share of rows that the larger model is asked about
    check: int = 0  # rows that the larger model is asked about only to compare
    classifier: str = ""  # file of the classifier that answers from the vectors


@dataclass(frozen=True)
class ReusePlan:
    """The answers of earlier runs that a job would reuse.

    `counts` has the number of rows by origin of the answer. `earlier` are the URIs of the runs
    whose answers are considered. `differs` are the job fields (model, sampling, ...) that differ
    from the run named in `reuse`; if there are any, nothing is reused.
    """

    counts: RowCounts
    earlier: tuple[str, ...]
    differs: tuple[str, ...]


@dataclass(frozen=True)
class _Checked:
    """A job with its model pinned, its spec and its input.

    `copied`: a run would first copy the input; `inventory` then covers only the part that was read.
    `publish` has a line for each target. `golden` are the golden rows, None without any.
    """

    resolved: Resolved
    spec: RunSpec
    inventory: Inventory
    copied: bool
    publish: tuple[str, ...]
    golden: Golden | None

    @property
    def model(self) -> PinnedModel:
        return self.resolved.model

    @property
    def rows(self) -> int:
        """Return the number of input rows; an estimate if `inventory.guessed`."""
        return sum(file.rows for file in self.inventory.files)


def _checked(resolved: Resolved, run_key: str | None, what_if: Capacity | None) -> _Checked:
    """Compile the job, read its input, pin its model and check all three, as before a run.

    Raises the errors that a run would raise. With an assumed cluster `what_if`, the model's files
    are not checked.
    """
    from prefect_raybatch import source

    job = resolved.job
    read = read_spec(job.source)
    check_places(read, job.output.uri, job.output.options)
    check_schema_names(job.output.output_schema)
    check_judge(job.quality)
    check_made_cluster(job.cluster.access, job.engine, job.output.escalate.engine)
    copied = source.needs_snapshot(read)
    found = source.peek(read) if copied else source.inventory(read)
    spec = compile_job(job, found.schema.names)
    planning.check_against_schema(spec, found.schema, compile_judge(job))
    names = found.schema.names
    golden = check_quality_columns(job.quality, job.output, answer_spec(spec), names)
    whole = None if copied else found
    publish = check_targets_of(spec, found.schema, run_key or "RUN_KEY", whole, later=copied)
    resolved = resolved.pinned()  # may ask Hugging Face, so after the checks of the input
    check_pinned_model(spec, resolved.model, files=what_if is None)
    check_judge_model(resolved, files=what_if is None)
    return _Checked(resolved, spec, found, copied, publish, golden)


def _with_warnings(fitted: _Fitted, checked: _Checked, what_if: Capacity | None) -> _Fitted:
    """Return `fitted` with more warnings in its sizing, and with the problem of too few rows.

    The warnings are about a judge that judges its own model's answers, a cascade whose larger model
    is asked about no row, an estimate of too few rows, and an image that cannot be read. With an
    assumed cluster `what_if`, no image is tried.
    """
    job = checked.resolved.job
    warnings = [
        judge_warning(job.quality, job.engine, job.output.escalate.engine),
        _no_row_warning(checked),
    ]
    problems, guessed = fitted.problems, checked.inventory.guessed
    few = too_few_rows(checked.spec, checked.rows, guessed)
    if few and checked.resolved.first is None:  # a cascade's first model reads the same input
        warnings += [few] if guessed else []
        problems = problems if guessed else (*problems, few)
    if what_if is None:
        spec, found = checked.spec, checked.inventory
        warnings.append(image_paths.unreadable_image(spec.prompt, spec.read, found, checked.copied))
    added = tuple(filter(None, warnings))
    sizing = replace(fitted.sizing, warnings=(*fitted.sizing.warnings, *added))
    return replace(fitted, sizing=sizing, problems=problems)


def _no_row_warning(checked: _Checked) -> str:
    """Return a warning if output.escalate.at_most allows a cascade's larger model no row.

    Returns "" otherwise, and for a run that is no cascade.
    """
    cascade, rows = checked.spec.cascade, checked.rows
    if cascade is None or not rows or most_rows(cascade.at_most, rows):
        return ""
    return (
        f"output.escalate.at_most {cascade.at_most:g} of {counted(rows, 'row')} is less than one: "
        "the larger model would be asked about none. Raise output.escalate.at_most to at least "
        f"{math.ceil(100_000 / rows) / 100_000:g}"
    )


def dry_run_resolved(
    resolved: Resolved,
    run_key: str | None,
    what_if: Capacity | None,
    sample: int,
    rows_left: int | None = None,
) -> DryRun:
    """Return what a run would do; starts no Ray and writes nothing to the run directory.

    `what_if` is a cluster to assume instead of the job's. `sample` prompts are measured (0: none,
    or as many as max_model_len: auto needs). The cost is for `rows_left` rows, by default all.
    """
    job = resolved.job
    checked, tokens = _with_lengths(_checked(resolved, run_key, what_if), run_key, sample)
    spec, found, rows = checked.spec, checked.inventory, checked.rows
    hosted = _hosted_rows(checked)
    made = [] if tokens or what_if else _function_problem(checked)
    fitted = _with_warnings(_fitted(checked, run_key, what_if), checked, what_if)
    reuse = _reuse_plan(checked, run_key) if spec.reuse.keeps else None
    left = rows if rows_left is None else rows_left
    cost = _cost(spec, hosted, fitted, left if reuse is None else reuse.counts.asked, rows)
    first = None
    if checked.resolved.first is not None:
        first = dry_run_resolved(checked.resolved.first, run_key, what_if, sample)
        first = _with_own_cost(first, hosted, is_done=left < rows)
    judged, cost = _judge_plan(checked, cost, None if first is None else first.cost)
    return DryRun(
        job=job.name,
        rows=rows,
        files=len(found.files),
        format=found.format,
        sizing=fitted.sizing,
        columns=tuple(found.schema.names),
        result=answer_spec(spec).columns,
        model=checked.model,
        run=join(job.output.uri, run_key or f"{job.name}-..."),
        needs=fitted.needs,
        have=asdict(fitted.capacity),
        figures=fitted.figures(spec),
        problems=(
            *made,
            *_hosted_problems(spec.engine.model.endpoint, hosted),
            *fitted.problems,
            *(first.problems if first is not None else ()),
        ),
        tokens=tokens,
        hosted=hosted,
        table=found.table,
        publish=checked.publish,
        types=tuple(str(found.schema.field(name).type) for name in found.schema.names),
        reuse=reuse,
        cost=cost,
        rows_guessed=found.guessed,
        first=first,
        golden=golden_plan(checked.golden),
        judged=judged,
        at_most=None if spec.cascade is None else spec.cascade.at_most,
        check=0 if spec.cascade is None else min(rows, spec.cascade.check),
        classifier=job.engine.classifier or "" if first is None else "",
    )


def _with_lengths(
    checked: _Checked, run_key: str | None, sample: int
) -> tuple[_Checked, PromptLengths | None]:
    """Return (`checked` with max_model_len decided, prompt lengths).

    Lengths are measured if `sample` is set or max_model_len is auto; else they are None, and
    `checked` is unchanged. Raises `ConfigError` for `sample` with a hosted model.
    """
    if sample and checked.model["source"] == ENDPOINT:
        raise ConfigError(
            "--tokens needs the model's tokenizer, which engine.endpoint has not; remove --tokens"
        )
    auto = checked.spec.engine.model.context_auto
    if not sample and not auto:
        return checked, None
    tokens = _prompt_lengths(checked, run_key, sample)
    decided = checked.spec.decide(context=tokens.max_model_len if auto else None)
    return replace(checked, spec=decided), tokens


def _cost(
    spec: RunSpec, hosted: HostedRows | None, fitted: _Fitted, rows: int, whole: int
) -> CostEstimate | None:
    """Return the estimated cost of `rows` of a run's `whole` rows; None for a job without prices.

    For a hosted model, this is the most that these rows can cost.
    """
    most, endpoint = spec.limits.max_cost, spec.engine.model.endpoint
    if hosted is None or endpoint is None:
        return estimate(spec.cluster, spec.sizes, spec.output, most, fitted.capacity, rows)
    assumes = f"each answer is as long as it may be ({counted(hosted.longest_answer, 'token')})"
    if (cascade := spec.cascade) is not None:
        rows = min(rows, most_rows(cascade.at_most, whole) + cascade.check)
        check = f" and {cascade.check:,} to check" if cascade.check else ""
        assumes += (
            " and the larger model is asked about as many rows as output.escalate.at_most "
            f"({cascade.at_most:g}) allows{check}"
        )
    cost, currency = hosted.cost(endpoint, rows), spec.cluster.prices.currency
    return None if cost is None else hosted_estimate(cost, rows, most, currency, assumes)


def _with_own_cost(first: DryRun, hosted: HostedRows | None, is_done: bool) -> DryRun:
    """Return a cascade's first model with its own cost; with none if the larger's includes it.

    The larger model's estimate includes it if both use GPUs. `hosted` is None if the larger model
    is not hosted. `is_done`: the larger model has answered rows, so the first one is done. Warnings
    are left out, because limits.max_cost is for both models.
    """
    apart = not is_done and (hosted is not None or first.hosted is not None)
    return replace(first, cost=replace(first.cost, warning=None) if first.cost and apart else None)


def _judge_plan(
    checked: _Checked, cost: CostEstimate | None, first: CostEstimate | None
) -> tuple[str, CostEstimate | None]:
    """Return (text on the rows to judge, `cost`).

    The text includes the cost of a hosted judge. `cost` is the estimate for the run. It gets a
    warning if the rows, or rows and judge together, cost more than limits.max_cost. `first` is the
    cost of a cascade's first model if `cost` does not include it.
    """
    spec, job = checked.spec, checked.resolved.job
    text, currency = judge_plan(job.quality, checked.rows), spec.cluster.prices.currency
    cost = with_first(cost, first, spec.limits.max_cost, currency)
    judge = _hosted_judge(checked)
    if judge is None:
        return text, cost
    added = [name for name, _ in answer_spec(spec).columns]
    try:
        most = judge.cost(*(spec.sampling, added, spec.read, checked.inventory, checked.copied))
    except UnknownCost as error:
        return f"{text}; its cost is unknown: {error}", cost
    text = f"{text}; {judge_cost_text(most, currency)}"
    return text, with_judge(cost, first, most, spec.limits.max_cost, currency)


def _hosted_judge(checked: _Checked) -> HostedJudge | None:
    """Return the job's judge if it is a hosted model, else None."""
    job = checked.resolved.job
    if not job.quality.judge.endpoint:
        return None
    judging = compile_job(judging_job(job, "rows.parquet", "runs"))
    model = judging.engine.model
    if model.endpoint is None:
        return None
    golden = checked.golden
    most = job.quality.judge.sample + (0 if golden is None else len(golden.answers))
    return HostedJudge(
        *(model.endpoint, model, judging.prompt, judging.sampling, judging.limits),
        rows=min(most, checked.rows),
    )


def _hosted_rows(checked: _Checked) -> HostedRows | None:
    """Return the token sizes of sampled rows' requests; None if the job's model is not hosted."""
    spec, endpoint = checked.spec, checked.spec.engine.model.endpoint
    if endpoint is None:
        return None
    rows = hosted_rows.HOSTED_SAMPLE
    if checked.copied:
        blocks = counting.blocks_of_heads(spec.read, rows)
    else:
        blocks = counting.spread_blocks(spec.prompt, spec.read, checked.inventory, None, rows)
    return hosted_rows.look_at(
        endpoint, spec.prompt, spec.sampling, spec.limits, checked.model, blocks
    )


def _hosted_problems(endpoint: EndpointSpec | None, hosted: HostedRows | None) -> list[str]:
    """Return [reason] if no sampled row can be sent to the hosted model, else []."""
    problem = "" if hosted is None or endpoint is None else hosted.problem(endpoint)
    return [problem] if problem else []


def _function_problem(checked: _Checked) -> list[str]:
    """Return [error] if the prompt function fails on each of the first TRIED_ROWS rows, else [].

    Also returns [] if the function cannot be tried here, for example without a local tokenizer.
    """
    place = str(checked.model["source"])
    without = place == ENDPOINT or is_remote(place)  # a tokenizer, which comes with the weights
    if not checked.spec.prompt.function or not checked.inventory.files or without:
        return []
    try:
        _prompt_lengths(checked, None, TRIED_ROWS)
    except counting.NoPromptMade as error:
        is_of_file = checked.spec.prompt.function in REQUEST_FUNCTIONS
        return [str(error) if is_of_file else f"prompt.function: {error}"]
    except ConfigError as error:
        log.debug("could not try prompt.function: %s", error)
    return []


def _prompt_lengths(checked: _Checked, run_key: str | None, sample: int) -> PromptLengths:
    """Measure `sample` prompts (0: SAMPLE_ROWS); return their lengths and the max_model_len."""
    sample = sample or counting.SAMPLE_ROWS
    spec, model = checked.spec, checked.model
    if checked.copied:
        lengths = counting.of_heads(spec, model, sample)
    else:
        lengths = counting.of_files(spec, model, checked.inventory, sample=sample)
    return length_of_spec(spec, run_key, lengths)


@dataclass(frozen=True)
class _Fitted:
    """The sizes of a run on a cluster with `capacity`.

    `needs` are the resources that the run takes from it. `model` is the model's size in memory,
    None if unknown. `problems` say why the run cannot start or keep its engines busy. `arrangement`
    is how its engines would be arranged by earlier runs, None if it would not learn from these.
    """

    sizing: Sizing
    capacity: Capacity
    needs: JsonObject
    model: Model | None
    problems: tuple[str, ...]
    arrangement: ArrangementNote | None = None

    def figures(self, spec: RunSpec) -> tuple[Figure, ...]:
        """Return the run's settings (engines, GPUs, rows per shard, ...), each with its reason."""
        least = spec.limits.min_agreement
        have, size, model = self.capacity, self.sizing, self.model
        found = figures(spec.sizes, spec.engine, spec.cluster, have, size, model, least)
        if (note := self.arrangement) is not None and note.read:
            found.insert(0, Figure("engines a GPU, learned", f"{note.incumbent}", note.why))
        return tuple(found)


def _fitted(checked: _Checked, run_key: str | None, what_if: Capacity | None) -> _Fitted:
    """Return the sizes of the run, on the job's cluster or on `what_if`."""
    spec, model, rows, asked = checked.spec, checked.model, checked.rows, checked.spec.sizes
    row_bytes = image_bytes.row_bytes(
        *(spec.prompt.images, spec.engine.model, spec.read, model, checked.inventory),
        samples=not checked.copied,
    )
    have, problems = (what_if, []) if what_if else sized.capacity_or_assumed(asked, spec.cluster)
    known, unknown = sized.model_sizes(asked, model, have)
    if what_if:
        expected = sizes.expected_engines(asked, what_if, known, row_bytes)
    else:
        expected = sized.engines_to_plan_for(asked, spec.cluster, model, row_bytes)
    try:
        size = sizes.sizes_of(asked, rows, row_bytes, have, known, unknown, expected=expected)
    except (ConfigError, InsufficientResources) as error:
        problems.append(str(error))
        size = sizes.sizes_of(asked, rows, row_bytes, have, expected=expected)
    if note := planning.equal_requests_warning(spec):
        size = replace(size, warnings=(note, *size.warnings))
    problems += size.problems
    try:
        trial_rows(spec.engine.tries, spec.limits.min_agreement, rows)
    except ConfigError as error:
        problems.append(str(error))
    needs = sized.checked_needs(asked, have, size, problems)
    made = _Fitted(size, have, needs, known, tuple(problems))
    if what_if or have.assumed or spec.reuse.has_requests_phase or spec.cascade or spec.first:
        return made
    planned = PlannedRows(rows, row_bytes, size.rows_per_shard, size.shards, model)
    learning = LearningSpec(asked, spec.engine, spec.output, checked.resolved.job.name)
    learned = expected_arrangement(learning, planned, have, run_key or "")
    return replace(made, arrangement=learned)


def _reuse_plan(checked: _Checked, run_key: str | None) -> ReusePlan:
    """Return which answers of earlier runs the job would reuse; reads all its rows.

    Input that a run would copy is copied to TMPDIR for the time of the call.
    """
    import tempfile

    from prefect_raybatch import source
    from prefect_raybatch.runs.increment import join_answers

    spec, found, copied = checked.spec, checked.inventory, checked.copied
    with tempfile.TemporaryDirectory(prefix="raybatch-") as folder:
        store = None
        if copied:
            store = open_store(folder)
            found = source.snapshot(spec.read, store, "plan")
        with join_answers(checked.resolved, spec, found, store, run_key, alone=copied) as worked:
            return ReusePlan(worked.counts, worked.earlier.runs, worked.earlier.differs)
