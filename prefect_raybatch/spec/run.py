"""What a run does, what makes two runs the same run, and whose answers it reuses."""

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

    `parts` are what went into it, as records hold them: without credentials.
    """

    fingerprint: str
    parts: Mapping[str, Any]

    @property
    def retry(self) -> Mapping[str, Any] | None:
        """The failed rows that are the input ({parent, errors}); None for an ordinary input."""
        return self.parts.get("retry")


@dataclass(frozen=True, kw_only=True)
class ReuseSpec:
    """The answers of earlier runs that a run reuses, and whether it keeps its own for later ones.

    `run` is the URI of the run whose answers are reused, `latest` for the newest complete one of
    the job, `all` for each complete one, None for none. `keep_days` is how many days raw answers
    are kept, None for as long as the run. `keeps`: the run looks its answers up and keeps them for
    later runs. `ordered`: the requests of the whole run are asked in the order of their prompts.
    """

    run: str | None
    keep_days: float | None
    keeps: bool
    ordered: bool

    @property
    def asks_apart(self) -> bool:
        """True if a phase with its own ledger asks the requests, and rows then look answers up."""
        return self.keeps or self.ordered


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Everything that a run does, compiled from its job, with one part for each concern.

    What a job leaves to the rows or to a trial is settled by `decide`, which returns another spec.
    Only two other places copy a spec with changes: the requests that a run asks first
    (`runs.increment.asks_of`) and the trial of a precision (`runs.precision.SampleBench`).
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
    # Of a cascade: what its first model does, and which rows this model then answers.
    first: RunSpec | None = None
    cascade: CascadeSpec | None = None

    def of_cascade(self, cascade: CascadeSpec, first: RunSpec) -> RunSpec:
        """Return the spec as that of the larger model, for the rows that `first` leaves to it."""
        finish = replace(self.finish, answered_by=True)
        return replace(self, finish=finish, cascade=cascade, first=first)

    def decide(
        self, *, context: int | None = None, precision: Mapping[str, str] | None = None
    ) -> RunSpec:
        """Return the spec with open decisions settled.

        `context` is the context length in tokens that `auto` resolved to; `precision` are the
        engine arguments that a trial chose, {} for the model as it is stored.
        """
        engine, sizes = self.engine, self.sizes
        if context is not None:
            model = replace(engine.model, context=context, context_auto=False)
            engine, sizes = replace(engine, model=model), replace(sizes, context=context)
        if precision is not None:
            given = {**engine.model.given, **precision}
            engine = replace(engine, model=replace(engine.model, given=given), tries=())
            sizes = replace(sizes, given=given)
        return replace(self, engine=engine, sizes=sizes)
