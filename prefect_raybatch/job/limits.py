"""The limits at which a run fails or warns, and their values for a number of rows."""

from __future__ import annotations

from pydantic import field_validator

from prefect_raybatch.job.checks import check_duration
from prefect_raybatch.job.group import Group, field, field_check
from prefect_raybatch.words import counted

MAX_FAILED = 0.01  # fraction of the planned rows that may fail by default
FAILED_LIMITS = ("max_failed_rows", "max_failed_fraction")  # the fields that bound the failed rows


class Limits(Group):
    """How many failed rows, how much time and what cost are acceptable."""

    max_failed_fraction: float | None = field(
        None,
        title="Failed rows, fraction",
        text="Maximum fraction of the planned rows that may fail before the run "
        "fails. A value above 0 allows at least one row; a value below 1 never allows all rows. "
        "Default: 0.01 if max_failed_rows is not set either.",
        ge=0,
        le=1,
        allow_inf_nan=False,
    )
    max_failed_rows: int | None = field(
        None,
        title="Failed rows, count",
        text="Maximum number of rows that may fail before the run fails. With "
        "max_failed_fraction, the lower limit applies.",
        ge=0,
    )
    engine_deaths: int = field(
        2,
        title="Engine deaths per row",
        text="Number of times a row may crash the engine when it runs alone. At this "
        "number the row is quarantined.",
        gt=0,
    )
    warn_failed: int | float | None = field(
        None,
        title="Failed rows, warning",
        text="Number or fraction of failed rows above which a warning and the event "
        "raybatch.quarantine.high are sent. Default: half of the allowed failed rows.",
        ge=0,
        allow_inf_nan=False,
    )
    stall_seconds: float | None = field(
        None,
        title="Stall timeout",
        text="Maximum time without a commit before the run is reported as stalled, in "
        "seconds. Default: the largest of 60 s, 10 times the mean time between commits and 3 "
        "times the slowest shard.",
        gt=0,
        allow_inf_nan=False,
    )
    stall_start_seconds: float = field(
        1800.0,
        title="First commit timeout",
        text="Stall timeout until the first commit of a pass, in seconds. It includes "
        "the start of the engines.",
        gt=0,
        allow_inf_nan=False,
    )
    fail_on_stall: bool = field(
        False,
        title="Fail on stall",
        text="Fail a stalled run with EngineFailure, which Prefect retries. If off, a "
        "stall is only reported.",
    )
    deadline: str | None = field(
        None,
        title="Deadline",
        text="Time that all attempts of a run may take together, such as 45m or 6h. "
        "Engine starts and waits count, copying the input does not. A run that exceeds it is not "
        "stopped; the report says what would meet it.",
    )
    hang_seconds: float = field(
        600.0,
        title="Engine step timeout",
        text="Maximum time for one engine step, in seconds; twice that until the "
        "engine's first answer. An engine that takes longer is restarted. 0: no limit.",
        ge=0,
        allow_inf_nan=False,
    )
    function_seconds: float = field(
        600.0,
        title="Function timeout",
        text="Maximum time for one call of prompt.function or output.postprocess, in "
        "seconds. A row that takes longer is quarantined. 0: no limit.",
        ge=0,
        allow_inf_nan=False,
    )
    max_cost: float | None = field(
        None,
        title="Maximum cost",
        text="Maximum cost of all attempts of a run, in "
        "cluster.currency. A run that reaches it stops and keeps its committed rows.",
        gt=0,
        allow_inf_nan=False,
    )

    min_agreement: float = field(
        0.99,
        title="Minimum agreement",
        text="Fraction of answers that must not change, at 95 % confidence, for "
        "engine.quantization or engine.kv_cache_dtype: try-fp8 to use fp8.",
        gt=0,
        lt=1,
        allow_inf_nan=False,
    )

    min_rows: int | None = field(
        None,
        title="Minimum rows",
        text="Minimum number of input rows. A run with fewer fails before it starts engines, "
        "unless source.limit or source.sample leaves rows out.",
        gt=0,
    )

    @field_validator("hang_seconds", "function_seconds", mode="before")
    @classmethod
    def _any_time(cls, value: object) -> object:
        # Prefect's form shows a field as a plain one only if it is null by default or never null.
        return 0 if value is None else value

    _known_duration = field_check("deadline", by=check_duration)

    def _limits(self) -> dict[str, float]:
        """Return {field: value} of the limits on failed rows; the default limit if none is set."""
        given = {
            name: getattr(self, name) for name in FAILED_LIMITS if getattr(self, name) is not None
        }
        return given or {"max_failed_fraction": MAX_FAILED}

    def allowed(self, rows: int) -> int:
        """Return how many of `rows` planned rows may fail; the lowest of several limits counts.

        A limit that is a fraction is rounded down. But if it is above 0, it allows at least one
        failed row; and if it is below 1, it never allows all rows to fail. So one failed row of 20
        does not fail a run. But if the only row of a run fails, the run fails.
        """
        allowed = []
        for name, value in self._limits().items():
            most = int(value)
            if name == "max_failed_fraction":
                share = _share(value, rows)
                at_most = max(0, rows - 1)
                most = round(rows * value) if value in (0, 1) else min(max(1, share), at_most)
            allowed.append(most)
        return min(allowed)

    def sentence_start(self, rows: int) -> str:
        """Return the start of a sentence, such as "limits.max_failed_rows 2 (2 rows) allows"."""
        fields = [f"limits.{name} {value}" for name, value in self._limits().items()]
        words = counted(self.allowed(rows), "row")
        return f"{' and '.join(fields)} ({words}) allow{'s' if len(fields) == 1 else ''}"

    def reported(self, rows: int) -> int:
        """Return how many of `rows` rows may fail before a warning and an event are sent."""
        return (
            self.allowed(rows) // 2 if self.warn_failed is None else _share(self.warn_failed, rows)
        )


def _share(value: float, rows: int) -> int:
    if isinstance(value, float) and value < 1:
        return int(value * rows + 1e-6)  # 0.29 * 100 is 28.999999999999996
    return int(value)
