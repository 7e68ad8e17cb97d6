"""Nights of images: an image is known by its bytes, wherever it lies and whatever it is called."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import albums
from helpers.albums import Album, photo

from prefect_raybatch.api import dry_run, plan_run
from prefect_raybatch.api.retry import Retry, plan_retry
from prefect_raybatch.errors import StoreUnavailable
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.plan import row_keys
from prefect_raybatch.stages.images.http import ImageUnavailable
from prefect_raybatch.stages.images.places import ImagePlaces


@pytest.fixture
def album(tmp_path: Path) -> Iterator[Album]:
    with albums.opened(tmp_path) as album:
        yield album


def test_an_image_whose_bytes_are_unchanged_is_not_asked_again(album: Album) -> None:
    album.put(a=photo(10), b=photo(20), c=photo(30), bad=b"<html>no</html>")
    album.write(*["x"] * 5, image=["a", "b", "c", "a", "bad"])
    report = album.night("n1")
    assert album.told() == ["10 Say x", "20 Say x", "30 Say x"]
    assert (report.reuse["asked"], report.reuse["merged"], report.failed) == (3, 1, 1)
    assert album.quarantined("n1")[0]["error"] == "BadImage"
    made = album.result("n1")
    assert [len(row["image_digests"]) for row in made] == [1] * 4
    assert made[0]["image_digests"] == made[3]["image_digests"] != made[1]["image_digests"]
    # a moved to another name, b changed under its own, c stays, bad is mended
    album.put(moved=photo(10), b=photo(21), bad=photo(40))
    album.write(*["x"] * 4, image=["moved", "b", "c", "bad"])
    told = dry_run(album.job(), "n2")
    assert told.reuse is not None and told.reuse.counts.asked == 2
    report = album.night("n2")
    assert album.told() == ["21 Say x", "40 Say x"] and report.reuse["reused"] == 2
    assert [row["response"].split()[-1] for row in album.result("n2")] == ["x"] * 4


def test_bytes_in_the_row_and_other_limits_take_answers_over(album: Album) -> None:
    """A smaller limit fails its row, and a larger one asks nothing anew."""
    album.put()
    album.write("x", "x", image=[photo(10), photo(20, side=90)])
    album.night("n1")
    assert len(album.told()) == 2

    def within(pixels: int, **more: Any) -> BatchJob:
        images = {"columns": ["image"], "max_pixels": pixels, **more}
        return album.job(prompt={"template": "Say {text}", "images": images})

    album.night("n2", within(40 * 40))
    assert album.told() == [] and len(album.result("n2")) == 1
    assert "max_pixels 1600" in album.quarantined("n2")[0]["message"]
    album.night("n3", within(10_000))
    assert album.told() == ["20 Say x"]  # n2 did not keep it
    told = dry_run(within(10_000, resize=20))
    assert told.reuse is not None and told.reuse.differs == ("prompt.images.resize: None -> 20",)


def test_an_image_that_changes_while_the_run_works_fails_its_row(album: Album) -> None:
    album.put(a=photo(10), b=photo(20))
    album.write("x", "x", image=["a", "b"])
    job = album.job()
    run = plan_run(job, "n1")
    album.put(a=photo(11))
    report = album.drive(job, run)
    assert report.failed == 1 and album.quarantined("n1")[0]["error"] == "ImageChanged"
    assert album.told() == ["20 Say x"]
    album.night("n2")
    assert album.told() == ["11 Say x"] and len(album.result("n2")) == 2


def test_images_that_are_away_when_the_run_is_planned(
    album: Album, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many stop the plan, which may be tried again; few fail their rows, and are asked about the
    next night."""
    monkeypatch.setattr(row_keys, "ROWS_A_TASK_IMAGES", 4)
    names = [f"p{i}" for i in range(10)]
    album.put(**{name: photo(10 * i) for i, name in enumerate(names)})
    album.write(*["x"] * 10, image=names)
    away = set(names)

    def fetch(self: ImagePlaces, value: Any) -> bytes:
        if value in away:
            raise ImageUnavailable(f"{value} does not answer")
        return (album.folder / "media" / value).read_bytes()

    monkeypatch.setattr(ImagePlaces, "fetch", fetch)
    with pytest.raises(StoreUnavailable, match=r"rows 0 to 3 .*does not answer"):
        album.night("n1")
    monkeypatch.setattr(row_keys, "ROWS_A_TASK_IMAGES", 16)
    away = {"p3", "p4"}
    run = plan_run(album.job(), "n1")
    away = {"p3"}
    report = album.drive(album.job(), run)
    assert report.failed == 2 and len(album.told()) == 8
    one, other = (row["message"] for row in album.quarantined("n1"))
    assert "p3 does not answer" in one and "available now: retry the row" in other
    away.update({"p3", "p4"})
    retry = plan_retry(str(album.folder / "out/n1"), job=album.job())  # both rows lack an image
    assert isinstance(retry, Retry)
    assert album.drive(retry.job, retry.run).failed == 2
    away.clear()
    album.night("n2")
    assert album.told() == ["30 Say x", "40 Say x"]
    assert [name for name, _ in album.answers("n2")] == names
