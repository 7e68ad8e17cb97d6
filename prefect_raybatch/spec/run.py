"""What a run does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from prefect_raybatch.job.limits import Limits
from prefect_raybatch.spec.cluster import ClusterSpec
from prefect_raybatch.spec.engine import EngineSpec
from prefect_raybatch.spec.finish import FinishSpec
from prefect_raybatch.spec.output import OutputSpec
from prefect_raybatch.spec.prompt import PromptSpec
from prefect_raybatch.spec.read import ReadSpec
from prefect_raybatch.spec.reuse import ReuseSpec
from prefect_raybatch.spec.sampling import SamplingSpec
from prefect_raybatch.spec.sizes import SizeSpec


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What a run does, compiled from its job.

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
