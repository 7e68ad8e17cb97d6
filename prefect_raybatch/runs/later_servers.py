"""Asks the servers of hosted models that a run needs late, before it answers a row."""

from __future__ import annotations

import logging
from collections.abc import Callable

from prefect_raybatch.compile.job import model_request
from prefect_raybatch.compile.resolved import Resolved
from prefect_raybatch.errors import ConfigError, EndpointRefused, EndpointUnavailable
from prefect_raybatch.job.engine import Engine
from prefect_raybatch.job.escalate import larger_fields
from prefect_raybatch.job.judge import judge_fields
from prefect_raybatch.stages.hosted_batches.api import ask_for_model

log = logging.getLogger(__name__)


def check_later_servers(resolved: Resolved, is_judged: bool = True) -> None:
    """Raise `EndpointRefused` if a server lacks the larger model of a cascade, or the judge.

    Raises `ConfigError` if the variable of a key is not set. Only logs that a server cannot be
    reached: it may be up when the run needs it. `is_judged`: the judge is asked about this run,
    which it is not about a retry of failed rows.
    """
    larger, judge = resolved.job.output.escalate.engine, resolved.job.quality.judge
    if larger is not None:
        _check_server(larger, larger_fields)
    if judge.asked and is_judged:
        _check_server(judge.whole_engine, judge_fields)


def _check_server(engine: Engine, named: Callable[[str], str]) -> None:
    """Ask the server of an engine's hosted model, if it has one, for that model.

    `named` returns an error text with the engine's fields named as in the job.
    """
    endpoint = model_request(engine).endpoint
    if endpoint is None:
        return
    try:
        ask_for_model(endpoint)
    except EndpointUnavailable as error:
        log.warning("%s. The run needs this server later", named(str(error)))
    except (ConfigError, EndpointRefused) as error:
        error.args = (named(str(error)),)
        raise
