"""What trials share: one Ray cluster, one S3 server, the truth about the real model's answers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from s3server import S3Server, start_s3

from .cluster import RayCluster
from .places import Bucket, Folder, Place, client_of

BUCKET = "chaos"
# Logical CPUs: each may cost a worker process, and Ray Data gives each of three drivers a third.
CPUS = 5


class World:
    """Started on first use; `folder` is on a local disk and holds everything but Ray's sockets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.aws_config = folder / "aws-config"
        self._clusters: dict[str, RayCluster] = {}
        self._s3: S3Server | None = None
        self._client: Any = None
        self._truth: dict[str, str] | None = None

    @property
    def address(self) -> str:
        return self._address("127.0.0.1")

    @property
    def other_address(self) -> str:
        """A second cluster: a stopped driver keeps what it leased of the first one."""
        return self._address("127.0.0.5")

    def _address(self, head: str) -> str:
        if head not in self._clusters:
            env = {"AWS_CONFIG_FILE": str(self.aws_config)}
            self._clusters[head] = RayCluster(head, CPUS, env)
        return self._clusters[head].address

    @property
    def s3(self) -> S3Server:
        if self._s3 is None:
            self._s3 = start_s3(self.folder / f"s3-{os.getpid()}", "bluestore")
            self.second_key = self._s3.add_key()
            self._s3.create_bucket(BUCKET)
        return self._s3

    def options(self, store: str) -> dict[str, str]:
        return self.s3.options if store == "s3" else {}

    def out(self, store: str, folder: Path, name: str) -> str:
        return f"s3://{BUCKET}/{os.getpid()}/{name}" if store == "s3" else str(folder / "out")

    def place(self, store: str, out: str, run_key: str) -> Place:
        if store != "s3":
            return Folder(Path(out) / run_key if run_key else Path(out))
        if self._client is None:
            self._client = client_of(self.s3.options)
        prefix = out.removeprefix(f"s3://{BUCKET}/")
        return Bucket(self._client, BUCKET, f"{prefix}/{run_key}".rstrip("/"))

    @property
    def truth(self) -> dict[str, str]:
        """Text to answer of the real model, from an undisturbed run; kept in a file."""
        if self._truth is None:
            path = self.folder / "truth.json"
            if not path.exists():
                from .undisturbed import real_answers

                path.write_text(json.dumps(real_answers(self, path.with_name("undisturbed"))))
            self._truth = json.loads(path.read_text())
        return self._truth

    def close(self) -> None:
        for cluster in self._clusters.values():
            cluster.stop()
        if self._s3 is not None:
            self._s3.stop()
