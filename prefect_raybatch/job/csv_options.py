"""The CSV options of a source."""

from __future__ import annotations

import codecs

from pydantic import field_validator, model_validator

from prefect_raybatch.job.group import Group, field

TAB = ("tab", "\\t")  # a form cannot send the character itself


class Csv(Group):
    """Delimiter, encoding and header of CSV files."""

    delimiter: str | None = field(
        None,
        title="Delimiter",
        text="Character between values, such as a semicolon; write tab for a tab. "
        "Default: a comma, or a tab if the file name contains .tsv.",
    )
    encoding: str = field(
        "utf-8",
        title="Encoding",
        text="Text encoding by its Python name, such as cp1252 (Excel in Western "
        "Europe), latin-1 or utf-16.",
    )
    quote: str = field(
        '"',
        title="Quote character",
        text="Character around values that contain delimiters or line breaks. Leave "
        "empty if values are never quoted.",
    )
    escape: str | None = field(
        None,
        title="Escape character",
        text="Character that makes the quote or delimiter after it part of the value. "
        "Default: none; a quote inside a quoted value is doubled.",
    )
    header: bool = field(
        True,
        title="Header line",
        text="The first line contains the column names. If off, columns are named by "
        "names, or f0, f1 and so on.",
    )
    names: list[str] | None = field(
        None,
        title="Column names",
        text="Names of all columns, in order. They replace the names in the header line.",
        min_length=1,
    )
    skip_rows: int = field(
        0,
        title="Lines to skip",
        text="Number of lines to skip before the header.",
        ge=0,
        le=1_000_000,
    )
    null_values: list[str] = field(
        [],
        title="Null values",
        text="Unquoted texts that are read as null, such as NULL or \\N. An empty "
        "unquoted cell is always null.",
    )

    @field_validator("delimiter", "quote", "escape", mode="before")
    @classmethod
    def _tab(cls, value: object) -> object:
        return "\t" if value in TAB else value

    @field_validator("delimiter", "quote", "escape")
    @classmethod
    def _one_character(cls, value: str | None) -> str | None:
        if value and (len(value) != 1 or not value.isascii() or value in "\r\n\0"):
            raise ValueError(f"{value!r} is not a single ASCII character; write one, or tab")
        return value

    @field_validator("delimiter", "escape")
    @classmethod
    def _not_empty(cls, value: str | None) -> str | None:
        if value == "":
            raise ValueError("is empty; write a character, or remove it")
        return value

    @field_validator("encoding")
    @classmethod
    def _known_encoding(cls, value: str) -> str:
        try:
            found = codecs.lookup(value)
            "a".encode(value)  # some of Python's codecs are not of text
        except (LookupError, ValueError, UnicodeError):
            raise ValueError(
                f"{value!r} is not a text encoding in Python; write for example utf-8, cp1252, "
                "latin-1 or utf-16"
            ) from None
        return "utf-8" if found.name == "utf-8-sig" else found.name

    @field_validator("names")
    @classmethod
    def _distinct(cls, value: list[str] | None) -> list[str] | None:
        repeated = sorted({name for name in value or () if (value or []).count(name) > 1})
        if repeated:
            raise ValueError(f"duplicate name {repeated[0]!r}; rename one")
        return value

    @model_validator(mode="after")
    def _apart(self) -> Csv:
        used = [one for one in (self.delimiter, self.quote, self.escape) if one]
        if len(set(used)) < len(used):
            raise ValueError(
                "delimiter, quote and escape are not all different; change one of them"
            )
        return self
