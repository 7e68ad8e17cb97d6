"""When a run gives up: the limits of a job, and their values for a number of rows."""

from __future__ import annotations

from typing import Any

from pydantic import field_validator

from prefect_raybatch.job.checks import check_duration
from prefect_raybatch.job.form import field
from prefect_raybatch.job.group import Group
from prefect_raybatch.words import counted

MAX_FAILED = 0.01  # of the planned rows, where a job sets no limit
FAILED_LIMITS = ("max_failed_rows", "max_failed_fraction")  # the fields that bound the failed rows


class Limits(Group):
    """When to give up."""

    max_failed_fraction: float | None = field(
        1,
        None,
        title="Most failed rows, as a fraction",
        text="Of the planned rows; one more fails the run. Above 0 it allows at least one row, "
        "and below 1 never all of them. By default 0.01 where no other limit is set.",
        ge=0,
        le=1,
        allow_inf_nan=False,
    )
    max_failed_rows: int | None = field(
        2,
        None,
        title="Most failed rows, as a count",
        text="One more fails the run. With max_failed_fraction both must hold.",
        ge=0,
    )
    engine_deaths: int = field(
        3,
        2,
        title="Deaths a row may cause",
        text="A row that, alone, kills its engine this often goes to quarantine.",
        gt=0,
    )
    warn_failed: int | float | None = field(
        4,
        None,
        title="Failed rows that are reported",
        text="A count or a fraction as above; one more warns and sends the event "
        "raybatch.quarantine.high. By default half of what may fail.",
        ge=0,
        allow_inf_nan=False,
    )
    stall_seconds: float | None = field(
        5,
        None,
        title="Longest pause between commits",
        text="In seconds; a longer one is reported as a stall. By default at least 60, and 10 "
        "times the mean time between commits or 3 times the slowest shard if that is more.",
        gt=0,
        allow_inf_nan=False,
    )
    stall_start_seconds: float = field(
        6,
        1800.0,
        title="Longest wait for the first commit",
        text="In seconds, from the start of a pass, whose engines must start first.",
        gt=0,
        allow_inf_nan=False,
    )
    fail_on_stall: bool = field(
        7,
        False,
        title="A stall ends the run",
        text="With EngineFailure, which is retried; off only reports it.",
    )
    deadline: str | None = field(
        8,
        None,
        title="Time the run may take",
        text="Such as 45m or 6h, from the begin of an attempt to its end: engines that start and "
        "all waiting count, the copy of the input before it and pauses between attempts do not. A "
        "run that takes longer is told what would make it fit; it is not ended.",
    )
    hang_seconds: float = field(
        9,
        600.0,
        title="Longest engine step",
        text="In seconds, twice that until an engine's first answer; an engine that takes longer "
        "is hung: it is killed and another started. 0 (or null): any time.",
        ge=0,
        allow_inf_nan=False,
    )
    function_seconds: float = field(
        10,
        600.0,
        title="Longest call of a function",
        text="In seconds, of prompt.function or output.postprocess for a row; a row that takes "
        "longer is ended and goes to quarantine. 0 (or null): any time.",
        ge=0,
        allow_inf_nan=False,
    )
    max_cost: float | None = field(
        11,
        None,
        title="Most that a run may cost",
        text="Of all its attempts, in the currency of cluster.price_per_gpu_hour; a run that "
        "reaches it is stopped, and what is committed is kept.",
        gt=0,
        allow_inf_nan=False,
    )

    min_agreement: float = field(
        12,
        0.99,
        title="Least agreement",
        text="Share of the answers, shown with 95 % confidence, that must be the same for "
        "engine.quantization or engine.kv_cache_dtype: try-fp8 to take fp8.",
        gt=0,
        lt=1,
        allow_inf_nan=False,
    )

    @field_validator("hang_seconds", "function_seconds", mode="before")
    @classmethod
    def _any_time(cls, value: object) -> Any:
        # Prefect's form shows a field as a plain one only if it is null by default or never null.
        return 0 if value is None else value

    @field_validator("deadline")
    @classmethod
    def _known_duration(cls, value: str | None) -> str | None:
        return check_duration(value)

    def _limits(self) -> dict[str, float]:
        """Return the limits of failed rows that are set, else the default."""
        given = {
            name: getattr(self, name) for name in FAILED_LIMITS if getattr(self, name) is not None
        }
        return given or {"max_failed_fraction": MAX_FAILED}

    def allowed(self, rows: int) -> int:
        """Return the failed rows allowed among `rows` planned.

        A fraction is rounded down; `max_failed_fraction` above 0 allows at least one row, and below
        1 not all of them, so that neither one bad row of 20 fails a run, nor one of 1 passes.
        """
        allowed = []
        for name, value in self._limits().items():
            most = int(value)
            if name == "max_failed_fraction":
                share = _share(value, rows)
                most = round(rows * value) if value in (0, 1) else min(max(1, share), rows - 1)
            allowed.append(most)
        return min(allowed)

    def said(self, rows: int) -> str:
        """Return the limit in words: `limits.max_failed_rows 2 (2 rows) allows`."""
        fields = [f"limits.{name} {value}" for name, value in self._limits().items()]
        words = counted(self.allowed(rows), "row")
        return f"{' and '.join(fields)} ({words}) allow{'s' if len(fields) == 1 else ''}"

    def reported(self, rows: int) -> int:
        """Return the number of failed rows, of `rows` planned, above which the quarantine is
        reported."""
        return (
            self.allowed(rows) // 2 if self.warn_failed is None else _share(self.warn_failed, rows)
        )


def _share(value: float, rows: int) -> int:
    if isinstance(value, float) and value < 1:
        return int(value * rows + 1e-6)  # 0.29 * 100 is 28.999999999999996
    return int(value)
