"""vLLM's arguments for an engine; those on which the sizes of a run depend are fields."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from prefect_raybatch.spec.engine import EngineFields

USABLE = 0.92  # of a GPU's memory, for all its engines; the rest: driver and fragmentation


@dataclass(frozen=True, kw_only=True)
class EngineArguments:
    """All arguments of an engine except its model.

    If `max_model_len` is None, the model's own context length applies. `more` has all arguments of
    the job that have no field here, unchanged.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None = None
    more: EngineFields = field(default_factory=dict, repr=False)  # may hold a token

    @classmethod
    def of(cls, arguments: EngineFields) -> EngineArguments:
        """Build from {vLLM's argument: value}; raise TypeError if a required one is missing."""
        named = {f.name for f in fields(cls)} & arguments.keys()
        more = {name: value for name, value in arguments.items() if name not in named}
        return cls(**{name: arguments[name] for name in named}, more=more)

    def vllm(self) -> EngineFields:
        """Return all arguments under the names that vLLM gives them."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "more"}
        if self.max_model_len is None:
            del named["max_model_len"]
        return {**named, **self.more}

    @property
    def usable(self) -> float:
        """Return the share of a GPU's memory (0 to 1) that all its engines may take together."""
        return float(self.more.get("gpu_memory_utilization") or USABLE)

    @property
    def kv_cache_bytes(self) -> int | None:
        """Return the bytes of KV cache per engine that the job sets.

        None if it sets none: an engine then uses all free memory for the cache.
        """
        given = self.more.get("kv_cache_memory_bytes")
        return int(given) if given else None

    @property
    def offloaded(self) -> float:
        """Return the bytes of weights that stay in host memory."""
        return float(self.more.get("cpu_offload_gb") or 0) * 2**30
