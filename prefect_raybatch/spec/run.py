"""Everything that a run does, the fingerprint that identifies it, and the answers it reuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from prefect_raybatch.job.limits import Limits
from prefect_raybatch.spec.cascade import CascadeSpec
from prefect_raybatch.spec.cluster import ClusterSpec
from prefect_raybatch.spec.engine import EngineSpec
from prefect_raybatch.spec.read import ReadSpec
from prefect_raybatch.spec.request import PromptSpec, SamplingSpec
from prefect_raybatch.spec.result import FinishSpec, OutputSpec
from prefect_raybatch.spec.sizes import SizeSpec


@dataclass(frozen=True)
class Identity:
    """The fingerprint of everything that changes an answer, in hex.

    `parts` are the values from which it was computed, {name: value}, without credentials.
    """

    fingerprint: str
    parts: Mapping[str, Any]

    @property
    def retry(self) -> Mapping[str, Any] | None:
        """The failed rows that a retry run infers; None for any other run.

        `parent` is the run key of the run in which the rows failed. `errors` are the error classes
        of the rows to retry, None for all failed rows.
        """
        return self.parts.get("retry")


@dataclass(frozen=True, kw_only=True)
class ReuseSpec:
    """The answers of earlier runs that a run reuses, and whether it keeps its own for later runs.

    `run` names the runs whose answers are reused: the URI of one run, `latest` for the newest
    complete run of the job, or `all` for every complete run. None reuses nothing. `keep_days` is
    how many days raw answers are kept, None for as long as the run. If `keeps` is true, the run
    stores its raw answers. It takes the answers of its own rows from them, and later runs may reuse
    them. If `ordered` is true, the requests of the whole run are sent in the order of their
    prompts.
    """

    run: str | None
    keep_days: float | None
    keeps: bool
    ordered: bool

    @property
    def has_requests_phase(self) -> bool:
        """True if a run works in two phases, because it keeps answers or orders its requests.

        The requests phase sends to the model each distinct request that no earlier run has
        answered. Then the rows phase looks up the answer of each row.
        """
        return self.keeps or self.ordered


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Everything that a run does, compiled from its job, with one part for each concern.

    In a cascade this is the spec of the larger model's run; `first` is the spec of the first
    model's.

    Fields that depend on the rows or on a trial are set by `decide`, which returns another spec.
    Besides `of_cascade`, only two other places copy a spec with changes: the requests phase
    (`runs.increment.requests_spec`) and the trial of a precision (`runs.precision.SampleBench`).
    """

    name: str
    read: ReadSpec
    prompt: PromptSpec
    sampling: SamplingSpec
    engine: EngineSpec
    sizes: SizeSpec
    finish: FinishSpec
    output: OutputSpec
    limits: Limits
    cluster: ClusterSpec
    reuse: ReuseSpec
    # In a cascade: the run of the first model, and the rule for the rows that this model answers.
    first: RunSpec | None = None
    cascade: CascadeSpec | None = None

    def of_cascade(self, cascade: CascadeSpec, first: RunSpec) -> RunSpec:
        """Return a copy for the larger model, which answers the rows that `first` leaves unsure."""
        finish = replace(self.finish, answered_by=True)
        return replace(self, finish=finish, cascade=cascade, first=first)

    def decide(
        self,
        *,
        context: int | None = None,
        precision: Mapping[str, str] | None = None,
        sizes: SizeSpec | None = None,
    ) -> RunSpec:
        """Return the spec with open decisions settled; None leaves a decision open.

        `context` is the context length in tokens that `auto` resolved to. `precision` has the
        engine arguments that a trial chose, {} for the model as it is stored. `sizes` replaces the
        job's sizes by those that earlier runs led to.
        """
        engine, sizes = self.engine, sizes or self.sizes
        if context is not None:
            model = replace(engine.model, context=context, context_auto=False)
            engine, sizes = replace(engine, model=model), replace(sizes, context=context)
        if precision is not None:
            given = {**engine.model.vllm_arguments, **precision}
            engine = replace(engine, model=replace(engine.model, vllm_arguments=given), tries=())
            sizes = replace(sizes, vllm_arguments=given)
        return replace(self, engine=engine, sizes=sizes)
