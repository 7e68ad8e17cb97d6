"""Our store on S3 over s3fs, and the same over obstore, on one server side by side.

Measures writing and reading a large file, small commits by put-if-absent, and each process's peak
memory. Every measurement is a process of its own, in the order s3fs, obstore, obstore, s3fs. The
server is Ceph radosgw on this machine, which keeps objects in memory.

    python benchmarks/s3_clients.py
    python benchmarks/s3_clients.py --mib 8 --commits 100 --rounds 1 --out s3-clients.jsonl

Prints a line for each measurement and appends it to --out. The store over obstore is here only: it
shows what a change of S3's client would bring. To run the tests of our store on it:

    PYTHONPATH=.:tests:benchmarks python -m pytest -p s3_clients tests/storage/test_storage.py -k s3
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prefect_raybatch import storage
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.storage import Store, object_store_options, open_store, s3_settings
from prefect_raybatch.storage.clouds import connection as clouds
from prefect_raybatch.storage.clouds import store as cloud_store
from prefect_raybatch.storage.s3_silence import without_keys

BUCKET = "clients"
CLIENTS = ("s3fs", "obstore")
READ_BYTES = 16 * 2**20  # of one read of a large file
COMMIT_BYTES = 2000  # of one commit record
WRITERS = 16


class ObstoreConnection(clouds.CloudConnection):
    """obstore's client for a bucket on S3, with the options of s3fs."""

    known = {}

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self).shared, (self.scheme, self.bucket, self.options))

    def endpoint(self) -> str:
        return without_keys(s3_settings(self.options).endpoint or "https://s3.amazonaws.com")

    def client(self, extra: int = 0) -> Any:
        key = (os.getpid(), clouds.ANSWER_SECONDS + extra)
        if key not in self._clients:
            from obstore.store import S3Store

            config: Any = object_store_options(s3_settings(self.options)) or {}
            config.pop("allow_http", None)
            retries: Any = {"max_retries": 0}
            self._clients[key] = S3Store(
                self.bucket,
                config=config,
                client_options=self._limits(key[1]),  # type: ignore[arg-type]
                retry_config=retries,
            )
        return self._clients[key]


class ObstoreS3Store(cloud_store.CloudStore):
    """A prefix of a bucket on S3 over obstore, with all else as for Google and Azure."""

    most_put_bytes = 5 * 2**30

    def __init__(self, root: str, connection: Any, *more: Any) -> None:
        if not isinstance(connection, ObstoreConnection):  # that of s3fs
            bucket = root.partition("://")[2].partition("/")[0]
            connection = ObstoreConnection.shared("s3", bucket, connection.options)
        super().__init__(root, connection, *more)


def pytest_configure() -> None:
    """Let `open_store` return a store over obstore, where pytest loads this file as a plugin."""
    storage.S3Store = ObstoreS3Store  # type: ignore[misc]


def opened(client: str, uri: str, options: StoreOptions) -> Store:
    if client == "obstore":
        pytest_configure()
    return open_store(uri, options)


# --- what is measured, each in a process of its own ---------------------------------------------


def write_large(store: Store, args: argparse.Namespace) -> None:
    store.put_file("large", args.file)


def read_large(store: Store, args: argparse.Namespace) -> None:
    size = 0
    with store.open("large") as handle:
        while part := handle.read(READ_BYTES):
            size += len(part)
    assert size == args.mib * 2**20


def commit(store: Store, args: argparse.Namespace) -> None:
    def one(number: int) -> bool:
        body = hashlib.sha256(str(number).encode()).digest() * (COMMIT_BYTES // 32)
        return store.put_if_absent(f"commits/{number:08}", body)

    with ThreadPoolExecutor(WRITERS) as pool:
        won = sum(pool.map(one, range(args.commits)))
    assert won == args.commits
    assert sum(1 for _ in store.list("commits")) == args.commits


STEPS: dict[str, Callable[[Store, argparse.Namespace], None]] = {
    "write": write_large,
    "read": read_large,
    "commits": commit,
}


def measure(args: argparse.Namespace) -> None:
    """Print one measurement as JSON; the first answer, with the client's import, is not in it."""
    given = json.loads(os.environ["S3_CLIENTS_OPTIONS"])
    store = opened(args.client, f"s3://{BUCKET}/run", given)
    list(store.list("nothing"))
    before, cpu = time.perf_counter(), time.process_time()
    STEPS[args.step](store, args)
    taken, used = time.perf_counter() - before, time.process_time() - cpu
    record = {"client": args.client, "step": args.step, "seconds": round(taken, 2)}
    print(json.dumps({**record, "cpu_s": round(used, 2), "peak_mb": round(peak_mb())}))


def peak_mb() -> float:
    """Return the most resident memory of this program in MiB: not that of its parent's fork."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mib", type=int, default=1024, help="size of the large file")
    parser.add_argument("--commits", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=2, help="the second is in the other order")
    parser.add_argument("--out", default="s3-clients.jsonl")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        return measure(args)
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from s3server import start_s3

    about = {"date": f"{date.today()}", "mib": args.mib, "commits": args.commits}
    about |= {name: version(name) for name in CLIENTS}
    with tempfile.TemporaryDirectory() as folder:
        args.file = f"{folder}/large"
        with open(args.file, "wb") as file:
            for _ in range(args.mib):
                file.write(os.urandom(2**20))
        for number in range(args.rounds):
            for client in CLIENTS[:: -1 if number % 2 else 1]:
                # A server of its own: deleted objects keep their memory in the server for hours.
                with start_s3(f"{folder}/{number}-{client}") as server:
                    server.create_bucket(BUCKET)
                    for step in STEPS:
                        record = {"round": number + 1, **measured(client, step, server, args)}
                        print(record, flush=True)
                        with open(args.out, "a", encoding="utf-8") as out:
                            out.write(json.dumps({**about, **record}) + "\n")


def measured(client: str, step: str, server: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Return one measurement, made in a process of its own."""
    command = [sys.executable, __file__, "--client", client, "--step", step, "--file", args.file]
    command += ["--mib", str(args.mib), "--commits", str(args.commits)]
    env = {**os.environ, "S3_CLIENTS_OPTIONS": json.dumps(server.options)}
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
