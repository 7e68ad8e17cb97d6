"""The S3 client. Only this file knows s3fs, which it imports at the first call.

Requests are sent once, without the client's own retries, and callers see the HTTP status.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Any, cast

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.storage.base import local_size
from prefect_raybatch.storage.bucket import PARALLEL_PARTS, SLOWEST
from prefect_raybatch.storage.internet import MOVED
from prefect_raybatch.storage.library_errors import ca_file_problem
from prefect_raybatch.storage.redirects import redirect_problem
from prefect_raybatch.storage.s3_silence import Silence, without_keys

# HTTP status of each code with which a store refuses to delete a key, now and later.
PERMANENT = {
    **dict.fromkeys(("AccessDenied", "AllAccessDisabled", "InvalidObjectState"), 403),
    **dict.fromkeys(("ExpiredToken", "InvalidArgument", "InvalidRequest", "KeyTooLongError"), 400),
    **{"NoSuchBucket": 404, "MethodNotAllowed": 405, "NotImplemented": 501},
}
# Codes with which a store says that it cannot delete a key now.
PASSING = ("InternalError", "ServiceUnavailable", "SlowDown")
LEAST_WAIT = 60.0  # seconds that even the upload of a small file may take

Send = Callable[[Any], Awaitable[Any]]  # sends a request with s3fs's file system


class Connection:
    """s3fs's file system for one set of options, opened at first use, once in each process."""

    known: dict[str, Connection] = {}

    def __init__(self, options: StoreOptions) -> None:
        self.options = dict(options)
        self.silence = Silence()
        self._by_process: dict[int, Any] = {}  # keyed by pid: a fork must not share sockets

    @classmethod
    def shared(cls, options: StoreOptions) -> Connection:
        """Return the connection for these options and the AWS environment, reused if possible.

        Opening one takes about 0.1 s.
        """
        around = {k: v for k, v in os.environ.items() if k.startswith(("AWS_", "FSSPEC_"))}
        known = json.dumps([dict(options), around], sort_keys=True, default=repr)
        key = hashlib.sha256(known.encode()).hexdigest()
        if len(cls.known) > 16:
            cls.known.clear()  # stores that are alive keep theirs
        return cls.known.setdefault(key, cls(options))

    def __repr__(self) -> str:
        return "Connection()"  # options hold secrets

    def __reduce__(self) -> tuple[object, ...]:
        return (Connection.shared, (self.options,))

    def filesystem(self) -> Any:
        """Return this process's S3FileSystem.

        Raises ConfigError if s3fs is missing or rejects the options.
        """
        pid = os.getpid()
        return self._by_process.get(pid) or self._by_process.setdefault(pid, self._build())

    def renew(self, old: object) -> None:
        """Replace the file system `old` with one that looks up credentials again.

        Calls in flight still use `old`.
        """
        pid = os.getpid()
        if self._by_process.get(pid) is old:
            self._by_process[pid] = self._build()

    def run(self, fs: Any, send: Send) -> Any:
        """Run `send(fs)` to its end and return its result."""
        from fsspec.asyn import sync

        return sync(fs.loop, send, fs)

    def _build(self) -> Any:
        try:
            import s3fs
        except ImportError as error:
            raise ConfigError(
                "s3:// needs s3fs, which is not installed. Run pip install s3fs"
            ) from error
        options = dict(self.options)
        client = dict(options.pop("client_kwargs", None) or {})
        if region := options.pop("region", None):
            client.setdefault("region_name", region)
        config = {
            "connect_timeout": 10,
            "read_timeout": 30,
            "max_pool_connections": 32,
            # Ceph radosgw and other stores do not know the checksums newer clients send.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            **(options.pop("config_kwargs", None) or {}),
            # botocore's own retries would hide that a first answer was lost.
            "retries": {"total_max_attempts": 1},
            "http_session_cls": _session_without_redirects(),
        }
        options.update(skip_instance_cache=True, use_listings_cache=False)
        try:
            return s3fs.S3FileSystem(client_kwargs=client, config_kwargs=config, **options)
        except (TypeError, ValueError, KeyError) as error:
            raise ConfigError(_refused_options(self.scrub(error))) from None

    def endpoint(self, fs: object) -> str:
        """Return scheme://host:port that `fs` contacts; "AWS" if none is set or known yet."""
        client = self.options.get("client_kwargs") or {}
        url = getattr(getattr(getattr(fs, "_s3", None), "meta", None), "endpoint_url", None)
        given = (
            url,
            self.options.get("endpoint_url"),
            client.get("endpoint_url"),
            os.environ.get("AWS_ENDPOINT_URL_S3"),
            os.environ.get("AWS_ENDPOINT_URL"),
        )
        return next((without_keys(str(one)) for one in given if one), "AWS")

    def ca_problem(self, fs: object) -> str:
        """Return the setting whose file of CA certificates cannot be loaded; "" if none."""
        if self.endpoint(fs).startswith("http://"):
            return ""
        client = self.options.get("client_kwargs") or {}
        verify = client.get("verify")
        if verify is False:
            return ""
        session = getattr(fs, "session", None)
        return ca_file_problem(
            ("options.client_kwargs.verify", verify),
            ("AWS_CA_BUNDLE", os.environ.get("AWS_CA_BUNDLE")),
            (
                "ca_bundle in the AWS configuration",
                session and session.get_config_variable("ca_bundle"),
            ),
            ("REQUESTS_CA_BUNDLE", os.environ.get("REQUESTS_CA_BUNDLE")),
        )

    def credentials(self) -> str:
        """Return, for a message, where the credentials come from, without revealing them."""
        client = self.options.get("client_kwargs") or {}
        if self.options.get("anon"):
            return "none (anon=True)"
        if self.options.get("key") or client.get("aws_access_key_id"):
            return "key and secret in the options of the store"
        if profile := self.options.get("profile") or os.environ.get("AWS_PROFILE"):
            return f"profile {profile!r}"
        for name in ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"):
            if os.environ.get(name):
                return f"environment variable {name}"
        return "default chain of boto3 (configuration files, container or instance role)"

    def scrub(self, error: object) -> str:
        """Return the message of `error`, with URLs cut to their host and credentials removed."""
        text = re.sub(r"(\w+://)(?:[^/\s\"']*@)?([^/?\s\"']*)[^\s\"']*", r"\1\2", str(error))
        client = self.options.get("client_kwargs") or {}
        secrets = [
            *(self.options.get(name) for name in ("secret", "token", "password")),
            *(client.get(name) for name in ("aws_secret_access_key", "aws_session_token")),
            *(os.environ.get(name) for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")),
        ]
        for secret in filter(None, secrets):
            text = text.replace(str(secret), "***")
        return text[:300]


class _WithoutRedirects:
    """An aiohttp session that follows no redirects, but raises ClientError.

    Only S3's redirect to another region is returned: botocore repeats the request there.
    """

    def __init__(self, session: Any) -> None:
        self._session = session

    async def request(self, method: str, url: Any, **options: Any) -> Any:
        options["allow_redirects"] = False
        answer = await self._session.request(method, url=url, **options)
        # A redirect with a region leads to another endpoint of AWS, which botocore finds itself.
        # Without a region, botocore would look for it again and again, redirected each time.
        if answer.status in MOVED and "x-amz-bucket-region" not in answer.headers:
            answer.close()
            raise _redirect_error(answer.status, str(url), answer.headers.get("Location"))
        return answer


def _redirect_error(status: int, url: str, location: str | None) -> Exception:
    from botocore.exceptions import ClientError

    failed = {"Code": "Redirect", "Message": str(redirect_problem(url, location))}
    found = {"Error": failed, "ResponseMetadata": {"HTTPStatusCode": status}}
    error: Exception = ClientError(found, "request")
    return error


@cache
def _session_without_redirects() -> type[Any]:
    """Return a subclass of aiobotocore's HTTP session that follows no redirects.

    An endpoint could otherwise send requests, with the session's token, to any address of this
    network.
    """
    from aiobotocore.httpsession import AIOHTTPSession

    class Session(AIOHTTPSession):  # type: ignore[misc]
        async def _get_session(self, proxy_url: Any) -> Any:
            return _WithoutRedirects(await super()._get_session(proxy_url))

    return Session


def request(operation: str, arguments: Mapping[str, Any], max_bytes: int | None) -> Send:
    """Return a function that calls the S3 client's `operation` and returns its response.

    In the response, `Body` is the body's bytes, or None if it has more than `max_bytes`. The
    function uses the client of s3fs's session and not s3fs's methods, which would hide the status.
    """

    async def send(fs: Any) -> Any:
        try:
            await fs.set_session()
        except (TypeError, ValueError) as error:
            raise ConfigError(_refused_options(error)) from None
        method = getattr(await fs.get_s3(arguments["Bucket"]), operation)
        # s3fs drops arguments it does not know: only the user's extras may pass that filter.
        found = await method(**{**fs._get_s3_method_kwargs(method), **arguments})
        if "Body" in found:
            async with found["Body"] as body:
                found["Body"] = await _read(body, found, max_bytes)
        _raise_partial(found, operation)
        return found

    return send


async def _read(body: Any, found: dict[str, Any], max_bytes: int | None) -> bytes | None:
    """Read and return a response's body; None if it has more than `max_bytes` (None: no limit).

    `found` is the response. If it has no `ContentLength`, counts bytes while reading; when there
    are too many, stops and sets `found["ContentLength"]` to the number of bytes read so far.
    """
    if max_bytes is None:
        return cast(bytes, await body.read())
    if "ContentLength" in found:
        return await body.read() if found["ContentLength"] <= max_bytes else None
    parts, size = [], 0
    while part := await body.read(1 << 16):
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            found["ContentLength"] = size
            return None
    return b"".join(parts)


def _refused_options(error: object) -> str:
    return (
        f"the S3 client rejects the store options: {error}. Use key, secret, token, endpoint_url, "
        "region, profile, anon, client_kwargs, config_kwargs, or another name that s3fs takes"
    )


def put_file_at_once(arguments: Mapping[str, Any], source: str) -> Send:
    """Return a function that sends a local file by one `put_object`, reading it at each call.

    A file body is sent with `Expect: 100-continue`, so nothing is sent if a condition fails. If the
    store never answers this header, the call would block forever, so it has a time limit.
    """
    limit = LEAST_WAIT + local_size(source) / SLOWEST

    async def send(fs: Any) -> Any:
        with open(source, "rb") as body:
            sent = request("put_object", {**arguments, "Body": body}, None)(fs)
            return await asyncio.wait_for(sent, limit)

    return send


def upload(source: str, target: str, part_bytes: int) -> Send:
    """Return a function that uploads a file to `target` ("bucket/key") in parallel parts."""

    async def send(fs: Any) -> None:
        await fs._put_file(source, target, chunksize=part_bytes, max_concurrency=PARALLEL_PARTS)

    return send


def _raise_partial(found: Mapping[str, Any], operation: str) -> None:
    """Raise ClientError for the first key that a batch deletion could not delete.

    Without this, a caller would not notice: the answer to a batch has status 200 even if keys
    failed. The error has the status that fits the key's error code, or 200 if the code is unknown.
    The caller repeats the batch in the latter case too, since deleting twice does no harm.
    """
    from botocore.exceptions import ClientError

    for failed in found.get("Errors", ()):
        if failed.get("Code") != "NoSuchKey":
            code = failed.get("Code", "")
            status = 503 if code in PASSING else PERMANENT.get(code, 200)
            said = {"Error": failed, "ResponseMetadata": {"HTTPStatusCode": status}}
            raise ClientError(said, operation)
