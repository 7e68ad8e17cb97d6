"""Checks the servers of hosted models that a run needs only later: larger model and judge."""

from __future__ import annotations

import logging
from collections.abc import Callable

from prefect_raybatch.compile.job import model_request
from prefect_raybatch.compile.resolved import Resolved
from prefect_raybatch.errors import ConfigError, EndpointRefused, EndpointUnavailable
from prefect_raybatch.job.engine import Engine
from prefect_raybatch.job.escalate import larger_fields
from prefect_raybatch.job.judge import judge_fields
from prefect_raybatch.stages.hosted_batches.api import check_hosted_model

log = logging.getLogger(__name__)


def check_later_servers(resolved: Resolved, is_judged: bool = True) -> None:
    """Check the servers of a cascade's larger model and of the judge, as far as these are hosted.

    `is_judged`: the run is judged; a retry of failed rows is not. Raises `EndpointRefused` if a
    server refuses or lacks the model, `ConfigError` if the environment variable of an API key is
    not set. Only logs that a server cannot be reached: it may be up when the run needs it.
    """
    larger, judge = resolved.job.output.escalate.engine, resolved.job.quality.judge
    if larger is not None:
        _check_server(larger, larger_fields)
    if judge.asked and is_judged:
        _check_server(judge.whole_engine, judge_fields)


def _check_server(engine: Engine, named: Callable[[str], str]) -> None:
    """Ask the server of an engine's hosted model whether it has the model.

    Does nothing for a model that is not hosted; raises as `check_later_servers` does. `named`
    rewrites an error text so that it names the fields as in the job.
    """
    endpoint = model_request(engine).endpoint
    if endpoint is None:
        return
    try:
        check_hosted_model(endpoint)
    except EndpointUnavailable as error:
        log.warning("%s. The run needs this server later", named(str(error)))
    except (ConfigError, EndpointRefused) as error:
        error.args = (named(str(error)),)
        raise
