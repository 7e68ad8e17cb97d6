"""Assigns a LoRA adapter to each row of a block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from prefect_raybatch.model import adapters
from prefect_raybatch.model.pinned import PinnedModel
from prefect_raybatch.stages.block import Failure

Adapter = tuple[str, int, str]  # name, number from 1 on, folder on this node


@dataclass(frozen=True)
class Adapted:
    """The LoRA adapters of a plan (`pinned`, by name), and how to choose a row's adapter.

    `column` is the input column that holds the name of each row's adapter. If it is None, all rows
    use the only adapter, whose name is "".

    If `null` and `alone` are both true, the base model answers rows in which `column` is null;
    otherwise these rows fail. `null` is the job's choice. `alone` says whether the engine can
    answer rows with the base model while others use adapters. It is false on a CPU, where vLLM
    answers a row without an adapter with the adapter of another row (measured with vLLM 0.29).
    """

    column: str | None
    pinned: Mapping[str, PinnedModel] = field(default_factory=dict)
    null: bool = False
    alone: bool = True

    def copy_to_node(self, numbers: dict[str, int] | None = None) -> dict[str, Adapter]:
        """Copy the adapters to this node if necessary; return {name: adapter}.

        An adapter is (unique name for vLLM, number, folder on this node).

        `numbers` maps the content hash of an adapter to its number in the engine; None stands for
        an empty dict. An adapter that is not in it gets the next number, and is added to the dict.
        """
        numbers = {} if numbers is None else numbers
        made = {}
        for name, adapter in sorted(self.pinned.items()):
            identity = str(adapter["identity"])
            # vLLM treats adapters with the same name, or with the same number, as the same adapter.
            # So the content hash is part of the name.
            unique = f"{name or 'adapter'}-{identity[-12:]}"
            path = adapters.adapter_path(adapter)
            made[name] = (unique, numbers.setdefault(identity, len(numbers) + 1), path)
        return made

    def row_adapters(
        self, table: pa.Table, here: Mapping[str, Adapter]
    ) -> tuple[list[Adapter | None], dict[int, Failure]]:
        """Return each row's adapter, and {row index: failure}.

        The adapter is None for a row that the base model answers, and for a failed row. `here` is
        the result of `copy_to_node`.
        """
        if not self.pinned:
            return [None] * table.num_rows, {}
        if self.column is None:
            return [here[""]] * table.num_rows, {}
        found: list[Adapter | None] = []
        failures: dict[int, Failure] = {}
        for i, name in enumerate(table[self.column].to_pylist()):
            found.append(None if name is None else here.get(str(name)))
            if found[-1] is None and not (name is None and self.null and self.alone):
                failures[i] = self._unknown(name)
        return found, failures

    def _unknown(self, name: object) -> Failure:
        if name is None and self.null:
            return Failure(
                "engine",
                "UnknownAdapter",
                f"column {self.column} is null, so the row has no adapter, and on a CPU vLLM "
                "cannot use the base model beside adapters. Run such rows as a separate job "
                "without engine.adapters",
            )
        problem = f"names the unknown adapter {str(name)[:100]!r}"
        if name is None:
            problem = "is null (prompt.on_null: empty would use the base model)"
        known = ", ".join(sorted(self.pinned))[:200]
        return Failure(
            "engine",
            "UnknownAdapter",
            f"column {self.column} {problem}. Use one of engine.adapters: {known}",
        )
