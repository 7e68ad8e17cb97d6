"""Names of types in source.types."""

from __future__ import annotations

import re
from typing import Any

_DECIMAL = re.compile(r"decimal\((\d{1,2}),\s*(\d{1,2})\)")
_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns)(?:,\s*(?:tz=)?([\w/+:-]+))?\]")


def arrow_type(name: str) -> Any:
    """Return the Arrow type of that name; raise ValueError for an unknown one.

    Examples: int64, string, decimal(38,9), timestamp[us], timestamp[us, UTC].
    """
    import pyarrow as pa

    if match := _DECIMAL.fullmatch(name.strip()):
        precision, scale = int(match[1]), int(match[2])
        if 0 < precision <= 38 and scale <= precision:
            return pa.decimal128(precision, scale)
    if match := _TIMESTAMP.fullmatch(name.strip()):
        return pa.timestamp(match[1], match[2])
    try:
        return pa.type_for_alias(name.strip())
    except ValueError:
        raise ValueError(
            f"{name!r} is not an Arrow type; write for example int64, double, string, bool, "
            "date32, timestamp[us], timestamp[us, UTC] or decimal(38,9)"
        ) from None
