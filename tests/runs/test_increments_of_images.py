"""Nights of images: an image is known by its bytes, wherever it lies and whatever it is called."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.nights import Nights, ToldApart
from PIL import Image

from prefect_raybatch import demo
from prefect_raybatch.errors import StoreUnavailable
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.plan import row_keys
from prefect_raybatch.runs.dry_run import dry_run
from prefect_raybatch.runs.plan_run import plan_run
from prefect_raybatch.stages.images import rows
from prefect_raybatch.stages.images.http import ImageUnavailable
from prefect_raybatch.stages.images.places import ImagePlaces


def photo(grey: int, side: int = 40) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full((side, side, 3), grey, np.uint8)).save(out, "PNG")
    return out.getvalue()


class Album(Nights):
    """Rows with a text and the name of a file, or with an image's bytes."""

    def put(self, **files: bytes) -> None:
        (self.folder / "media").mkdir(exist_ok=True)
        for name, data in files.items():
            (self.folder / "media" / name).write_bytes(data)

    def job(self, **groups: Any) -> BatchJob:
        source = {"uri": str(self.folder / "in.parquet"), "rows_per_shard": 4}
        prompt = groups.pop("prompt", {"template": "Say {text}", "images": {"columns": ["image"]}})
        return super().job(
            source={**source, "media_root": str(self.folder / "media")},
            prompt=prompt,
            engine={"model": str(self.folder / "model"), "max_model_len": 512},
            output={
                "uri": str(self.folder / "out"),
                "columns": ["image"],
                "extras": ["image_digests"],
            },
            **groups,
        )

    def answers(self, key: str) -> list[tuple[str, str]]:
        """(file, answer) of each row of a result."""
        return [(row["image"], row["response"]) for row in self.result(key)]

    def told(self) -> list[str]:
        """What the engine was asked since the last look."""
        found = sorted(self.asked)
        self.asked.clear()
        return found


@pytest.fixture
def album(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Album:
    monkeypatch.setattr(rows, "renderer", ToldApart)
    shutil.copytree(demo.demo_model_path(), tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    value = json.loads(config.read_text())
    value |= {"architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3"}
    config.write_text(json.dumps(value))
    return Album(tmp_path)


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
    """Many stop the plan, which may be tried again; one fails its row, and is asked the next
    night."""
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
    with pytest.raises(StoreUnavailable, match=r"rows 0 to 4 .*does not answer"):
        album.night("n1")
    monkeypatch.setattr(row_keys, "ROWS_A_TASK_IMAGES", 16)
    away = {"p3"}
    report = album.night("n1")
    assert report.failed == 1 and len(album.told()) == 9
    assert "p3 does not answer" in album.quarantined("n1")[0]["message"]
    away.clear()
    album.night("n2")
    assert album.told() == ["30 Say x"]
    assert album.answers("n2")[3][0] == "p3"
