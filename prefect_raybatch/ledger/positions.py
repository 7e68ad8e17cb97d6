"""Sets of positions in a shard, packed to one bit each, and their text in records.

A record holds a set of few ranges as ranges, and any other set as a compressed bitmap. So equal
sets have equal texts, and the bitmap of a large shard takes at most about a sixth of a byte for
each row.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

Range = tuple[int, int]
Ranges = tuple[Range, ...]  # sorted, disjoint, half-open
PositionsText = Ranges | str
"""Positions as records hold them: ranges, or base64 of zlib of a bitmap."""

FEW_RANGES = 4  # most ranges in a record; a bitmap is usually shorter than more of them
MOST_POSITIONS = 1 << 24  # rows of a shard, so that a set in a record unpacks to at most 2 MB


@dataclass(frozen=True)
class Positions:
    """A set of positions from 0 on: bit i of `bits` stands for position i.

    `bits` is a Python int: for 4,000 positions its operations take 0.1 to 0.6 us, a tenth of
    numpy's, and for 1,000,000 about as long as numpy's.
    """

    bits: int = 0

    @classmethod
    def of(cls, numbers: np.ndarray) -> Positions:
        """Return the set of these integers, which may be in any order.

        Raises ValueError for an integer that is repeated, negative, or not below MOST_POSITIONS.
        """
        if not len(numbers):
            return cls()
        most = int(numbers.max())
        if int(numbers.min()) < 0 or most >= MOST_POSITIONS:
            raise ValueError(
                f"positions {numbers.min()} to {most} exceed 0 to {MOST_POSITIONS - 1}"
            )
        flags = np.zeros(most + 1, bool)
        flags[numbers] = True
        if np.count_nonzero(flags) != len(numbers):
            raise ValueError("a position is repeated")
        return cls(int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little"))

    @classmethod
    def spans(cls, *ranges: Range) -> Positions:
        """Return the set of all positions in these half-open ranges.

        Raises ValueError unless the ranges are ascending, disjoint and within [0, MOST_POSITIONS).
        """
        if len(ranges) > FEW_RANGES:
            try:
                return cls._of_many(np.array(ranges, dtype=np.int64))
            except OverflowError as error:
                raise ValueError(f"position out of range: {error}") from None
        bits = reached = 0
        for start, stop in ranges:
            if not reached <= start < stop <= MOST_POSITIONS:
                raise ValueError(
                    f"range [{start}, {stop}) is not within [{reached}, {MOST_POSITIONS})"
                )
            bits |= (1 << stop) - (1 << start)
            reached = stop
        return cls(bits)

    @classmethod
    def _of_many(cls, ranges: np.ndarray) -> Positions:
        edges = ranges.reshape(-1)
        ascending = (np.diff(edges) >= 0).all() and (ranges[:, 0] < ranges[:, 1]).all()
        if not ascending or edges[0] < 0 or edges[-1] > MOST_POSITIONS:
            raise ValueError(f"the ranges are not ascending, or not within [0, {MOST_POSITIONS})")
        steps = np.zeros(int(edges[-1]) + 1, np.int8)  # neighbours that touch add up to 0
        np.add.at(steps, ranges[:, 0], 1)
        np.add.at(steps, ranges[:, 1], -1)
        flags = np.cumsum(steps[:-1], dtype=np.int8)
        return cls(int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little"))

    def __len__(self) -> int:
        return self.bits.bit_count()

    def __bool__(self) -> bool:
        return self.bits != 0

    def __or__(self, other: Positions) -> Positions:
        return Positions(self.bits | other.bits)

    def __and__(self, other: Positions) -> Positions:
        return Positions(self.bits & other.bits)

    def __repr__(self) -> str:
        return f"Positions({self.ranges_text()})"

    @property
    def start(self) -> int:
        """Return the first position; 0 if empty."""
        return max(0, (self.bits & -self.bits).bit_length() - 1)

    @property
    def end(self) -> int:
        """Return the last position plus one; 0 if empty."""
        return self.bits.bit_length()

    def lacking(self, rows: int) -> Positions:
        """Return the positions of [0, rows) that are not in the set."""
        return Positions(~self.bits & ((1 << rows) - 1))

    @property
    def numbers(self) -> np.ndarray:
        """Return the positions as int64, ascending."""
        packed = np.frombuffer(self._packed(), np.uint8)
        found: np.ndarray = np.flatnonzero(np.unpackbits(packed, bitorder="little"))
        return found

    @property
    def ranges(self) -> Ranges:
        """Return the positions as the fewest possible ranges."""
        if (self.bits & ~(self.bits << 1)).bit_count() <= FEW_RANGES:
            return self._few_ranges()
        numbers = self.numbers
        breaks = np.flatnonzero(np.diff(numbers) != 1)
        starts = numbers[np.concatenate([[0], breaks + 1])].tolist()
        stops = (numbers[np.concatenate([breaks, [len(numbers) - 1]])] + 1).tolist()
        return tuple(zip(starts, stops, strict=True))

    def _few_ranges(self) -> Ranges:
        ranges, bits, at = [], self.bits, 0
        while bits:
            gap = (bits & -bits).bit_length() - 1
            bits >>= gap
            length = (~bits & (bits + 1)).bit_length() - 1
            bits >>= length
            ranges.append((at + gap, at + gap + length))
            at += gap + length
        return tuple(ranges)

    def ranges_text(self, most: int = 5) -> str:
        """Return the first `most` ranges as text, e.g. `0 to 3, 7 to 7 and more`."""
        ranges = self.ranges
        shown = ", ".join(f"{start} to {stop - 1}" for start, stop in ranges[:most])
        return shown + (" and more" if len(ranges) > most else "")

    def to_text(self) -> PositionsText:
        """Encode the positions for a record: as ranges if there are few, else as a bitmap."""
        if (self.bits & ~(self.bits << 1)).bit_count() <= FEW_RANGES:
            return self._few_ranges()
        return base64.b64encode(zlib.compress(self._packed())).decode()

    @classmethod
    def from_text(cls, text: PositionsText, rows: int) -> Positions:
        """Return the positions that `to_text` encoded, all of which must be below `rows`.

        Raises ValueError for any other text.

        A bitmap is never unpacked to more bytes than `rows` positions need.
        """
        if not isinstance(text, str):
            positions = cls.spans(*text)
        else:
            positions = cls(int.from_bytes(_unpacked(text, rows), "little"))
        if positions.end > rows:
            raise ValueError(f"position {positions.end - 1} is not in a shard of {rows} rows")
        return positions

    def _packed(self) -> bytes:
        return self.bits.to_bytes(-(-self.end // 8), "little")


def _unpacked(text: str, rows: int) -> bytes:
    most = min(rows, MOST_POSITIONS) // 8 + 1
    unzip = zlib.decompressobj()
    try:
        data = unzip.decompress(base64.b64decode(text, validate=True), most + 1)
    except (ValueError, binascii.Error, zlib.error) as error:
        raise ValueError(f"not a bitmap: {error}") from None
    if not unzip.eof or unzip.unused_data or len(data) > most:
        raise ValueError(f"not a bitmap of {rows} rows")
    return data


def disjoint(parts: Iterable[Positions]) -> Positions | None:
    """Return the union of sets that share no position, or None if two share one."""
    bits = 0
    for part in parts:
        if bits & part.bits:
            return None
        bits |= part.bits
    return Positions(bits)
