"""The images that accompany a row's text."""

from __future__ import annotations

from pydantic import field_validator

from prefect_raybatch.job.group import Group, field

MOST_PIXELS = 178_956_970  # Pillow refuses larger images, whatever its settings
ASPECT = 200  # models refuse images with at least this ratio of their sides
UNKNOWN = (512, 512)  # (width, height) assumed for images if no size is set
DIGESTS_COLUMN = "image_digests"  # a name in output.extras


class Images(Group):
    """Images that accompany the text of a row."""

    columns: list[str] = field(
        [],
        title="Image columns",
        text="Columns with an image or a list of images, which are placed before the "
        "text. An image is bytes, {bytes, path} as in Hugging Face datasets, a path under "
        "source.media_root, or an s3://, http(s) or data URL.",
    )
    resize: int | list[int] | None = field(
        None,
        title="Image size",
        text="Exact size in pixels as [width, height], or the maximum length of the "
        "longer side. Default: images are not resized.",
    )
    per_row: int | None = field(
        None,
        title="Images per row",
        text="Maximum number of images per row; a row with more fails. Default: 1. "
        "Set it if prompt.function or prompt.messages supplies the images.",
        gt=0,
        le=256,
    )
    max_pixels: int = field(
        50_000_000,
        title="Maximum pixels",
        text="Largest image to decode, in pixels (width times height). A row with a "
        "larger image fails.",
        gt=0,
        le=MOST_PIXELS,
    )
    max_bytes: int = field(
        20_000_000,
        title="Maximum file size",
        text="Largest image file to read, in bytes. A row with a larger file fails.",
        gt=0,
        le=1_000_000_000,
    )
    fetch_seconds: float = field(
        20.0,
        title="Fetch timeout",
        text="Time limit for one attempt to fetch an image, in seconds. An http(s) "
        "image is attempted three times.",
        gt=0,
        le=3600,
        allow_inf_nan=False,
    )
    allow_private: bool = field(
        False,
        title="Private addresses",
        text="Allow rows to name http(s) hosts in a private network and ports other "
        "than 80 and 443. Link-local addresses are always refused.",
    )

    @field_validator("columns", mode="before")
    @classmethod
    def _one(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("columns")
    @classmethod
    def _distinct(cls, value: list[str]) -> list[str]:
        repeated = sorted({name for name in value if value.count(name) > 1})
        if repeated:
            raise ValueError(f"duplicate column {repeated[0]!r}; remove one")
        return value

    @field_validator("resize")
    @classmethod
    def _size(cls, value: int | list[int] | None) -> int | list[int] | None:
        sides = [value] if isinstance(value, int) else value or []
        if isinstance(value, list) and len(value) != 2:
            raise ValueError("must be a number or [width, height]; write for example [225, 225]")
        for side in sides:
            if not 1 <= side <= 16384:
                raise ValueError(f"{side} is not a valid image side; write 1 to 16384")
        if len(sides) == 2 and max(sides) >= ASPECT * min(sides):
            raise ValueError(
                f"one side is at least {ASPECT} times the other, which models reject; write "
                "another size"
            )
        return value

    @property
    def used(self) -> bool:
        return bool(self.columns) or self.per_row is not None

    @property
    def most(self) -> int:
        """Return the maximum number of images of a row."""
        return self.per_row or 1
