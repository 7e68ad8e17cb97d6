"""The clients of Google Cloud Storage and Azure. Only this file and `store.py` import obstore.

obstore's own retries are off, because they would hide that a first answer was lost.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import urllib.error
import urllib.request
from datetime import timedelta
from http.client import HTTPException
from importlib.util import find_spec
from typing import Any, ClassVar

from prefect_raybatch.errors import ConfigError, StoreError
from prefect_raybatch.schemes import CLOUD_SECRETS, EXTRAS, check_cloud_options
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.storage.base import header_time
from prefect_raybatch.storage.library_errors import ca_file_problem
from prefect_raybatch.storage.s3_silence import Silence, without_keys

KNOWN_CONNECTIONS = 16
ANSWER_SECONDS = 60.0  # limit of a request of at most 64 MiB
SECRET_VARIABLES = re.compile(r"(AZURE|GOOGLE)_\w*(KEY|TOKEN|SECRET)$")
_used_in: set[int] = set()  # processes in which obstore's threads run


def _forked() -> None:
    _used_in.discard(os.getpid())  # process ids are reused


os.register_at_fork(after_in_child=_forked)


class CloudConnection:
    """obstore's clients for one bucket or container and one set of options."""

    known: ClassVar[dict[str, CloudConnection]] = {}

    def __init__(self, scheme: str, bucket: str, options: StoreOptions) -> None:
        self.scheme, self.bucket, self.options = scheme, bucket, dict(options)
        if find_spec("obstore") is None:
            raise self._missing()
        try:
            check_cloud_options(f"{scheme}://{bucket}", options)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self.endpoint()  # raises without an account
        self.silence = Silence()
        self._clients: dict[tuple[int, float], Any] = {}

    @classmethod
    def shared(cls, scheme: str, bucket: str, options: StoreOptions) -> CloudConnection:
        """Return the connection for these options and environment variables, reused if possible."""
        around = {k: v for k, v in os.environ.items() if k.startswith(("AZURE_", "GOOGLE_"))}
        told = json.dumps([scheme, bucket, dict(options), around], sort_keys=True, default=repr)
        key = hashlib.sha256(told.encode()).hexdigest()
        if len(cls.known) > KNOWN_CONNECTIONS:
            cls.known.clear()  # stores that are alive keep theirs
        return cls.known.setdefault(key, cls(scheme, bucket, options))

    def __repr__(self) -> str:
        return f"CloudConnection({self.scheme!r}, {self.bucket!r})"  # options hold secrets

    def __reduce__(self) -> tuple[object, ...]:
        return (CloudConnection.shared, (self.scheme, self.bucket, self.options))

    def client(self, extra: int = 0) -> Any:
        """Return this process's client whose requests may take ANSWER_SECONDS + `extra` seconds.

        Raises ConfigError if obstore rejects the options. Raises StoreError in a fork of a process
        that used obstore: its threads do not exist there, so a call would never end.
        """
        process = os.getpid()
        if _used_in and process not in _used_in:
            raise StoreError(
                f"{self.scheme}://{self.bucket} cannot be used in a fork of a process that used a "
                "store of Google Cloud or Azure. Start the process with spawn or forkserver"
            )
        key = (process, ANSWER_SECONDS + extra)
        return self._clients.get(key) or self._clients.setdefault(key, self._build(key[1]))

    def _build(self, seconds: float) -> Any:
        from obstore.store import AzureStore, GCSStore

        limits = self._limits(seconds)
        retries: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=seconds)}
        kind: Any = GCSStore if self.scheme == "gs" else AzureStore
        try:
            client = kind(
                self.bucket, config=self.options, client_options=limits, retry_config=retries
            )
        except Exception as error:  # obstore has its own classes, and raises ValueError
            if problem := self.ca_problem():
                raise ConfigError(f"{self.scheme}://{self.bucket}: {problem}") from None
            raise ConfigError(
                f"obstore rejects the options of {self.scheme}://{self.bucket}: {self.scrub(error)}"
            ) from None
        _used_in.add(os.getpid())
        return client

    def _missing(self) -> ConfigError:
        return ConfigError(
            f"{self.scheme}:// needs obstore, which is not installed. Run "
            f'pip install "prefect-raybatch[{EXTRAS[self.scheme]}]"'
        )

    def _limits(self, seconds: float) -> dict[str, Any]:
        return {
            "allow_http": self.endpoint().startswith("http://"),
            "connect_timeout": timedelta(seconds=10),
            "timeout": timedelta(seconds=seconds),
        }

    def endpoint(self) -> str:
        """Return scheme://host:port of the store, without credentials.

        Raises ConfigError if no storage account is known for Azure.
        """
        if self.scheme == "gs":
            url = self.options.get("base_url") or os.environ.get("GOOGLE_BASE_URL")
            return without_keys(str(url or "https://storage.googleapis.com"))
        given = ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
        url = self.options.get("endpoint") or next(filter(None, map(os.environ.get, given)), None)
        account = self.options.get("account_name") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
        if not account:
            raise ConfigError(
                f"az://{self.bucket} names no storage account. Set AZURE_STORAGE_ACCOUNT_NAME, or "
                "account_name in the options beside this URI, or write "
                f"abfss://{self.bucket}@ACCOUNT.dfs.core.windows.net/PATH"
            )
        return without_keys(str(url or f"https://{account}.blob.core.windows.net"))

    def ca_problem(self) -> str:
        """Return why the file of CA certificates in SSL_CERT_FILE cannot be loaded; "" if it can.

        obstore ignores such a file if it finds others in the system's folder of certificates.
        """
        if self.endpoint().startswith("http://"):
            return ""
        return ca_file_problem(("SSL_CERT_FILE", os.environ.get("SSL_CERT_FILE")))

    def clock(self) -> float | None:
        """Return the store's time (seconds since 1970) from a Date header; None if unknown."""
        asked = urllib.request.Request(self.endpoint(), method="HEAD")
        try:
            with urllib.request.urlopen(asked, timeout=ANSWER_SECONDS) as answer:
                date = answer.headers.get("Date")
        except urllib.error.HTTPError as refusal:
            date = refusal.headers.get("Date")
        except (OSError, HTTPException):
            return None
        return header_time(date)

    def scrub(self, error: object) -> str:
        """Return the message of `error`, with URLs cut to their host and credentials removed."""
        text = str(error).partition("\n\nDebug source:")[0]
        text = re.sub(r"(\w+://)(?:[^/\s\"']*@)?([^/?\s\"']*)[^\s\"']*", r"\1\2", text)
        secrets = [str(self.options.get(name) or "") for name in CLOUD_SECRETS]
        secrets += [value for name, value in os.environ.items() if SECRET_VARIABLES.match(name)]
        for secret in filter(None, secrets):
            text = text.replace(secret, "***").replace(json.dumps(secret)[1:-1], "***")
        return " ".join(text.split())[:300]
