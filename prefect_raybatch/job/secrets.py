"""Masks credentials wherever a job is turned into text for others.

Prefect keeps a flow's parameters, and shows them to everybody who can see its page.

A value counts as secret unless its name is known as harmless, because nobody can list all names of
credentials.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import quote_plus, unquote, unquote_plus, urlsplit, urlunsplit

from prefect_raybatch.job.variables import VARIABLE

MASK = "**********"
ELLIPSIS = "..."  # in a URL that must stay valid, because a job is made of it again
CLEAR = {"clear": True}  # pydantic context that leaves credentials unmasked
SAFE_NAMES = "RAYBATCH_SAFE_NAMES"  # variable: comma-separated names of harmless values
# Store options that hold no secret.
OPTIONS = frozenset(
    (
        *("acl", "ACL", "RequestPayer", "ServerSideEncryption", "SSEKMSKeyId", "StorageClass"),
        *("addressing_style", "api_version", "asynchronous", "cache_regions", "cache_type"),
        *("connect_timeout", "default_block_size", "default_cache_type", "default_fill_cache"),
        *("account_name", "base_url", "endpoint", "skip_signature"),
        *("endpoint_url", "http", "https", "max_attempts", "max_concurrency"),
        *("max_pool_connections", "mode", "parameter_validation", "profile", "read_timeout"),
        *("region", "region_name", "request_checksum_calculation", "requester_pays"),
        *("response_checksum_validation", "signature_version", "tcp_keepalive"),
        *("total_max_attempts", "use_ssl", "user_agent_extra", "verify", "version_aware"),
        *("username_env", "password_env", "token_env"),  # names of variables
    )
)
# Properties of a catalog that hold no secret, besides OPTIONS.
CATALOG = frozenset(("type", "name", "uri", "warehouse", "prefix", "s3.endpoint", "s3.region"))
# Variables of the libraries in an engine. A name with a word of SECRET_WORD is a key even so.
VARIABLES = re.compile(
    r"(VLLM|NCCL|CUDA|RAY|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|OMP|MKL|KMP|OPENBLAS|GLOO|UCX|FI|HSA"
    r"|HIP|ROCR|ROCM|NVIDIA|FLASHINFER|RAYBATCH|TRANSFORMERS)_[A-Z0-9_]+"
    r"|TOKENIZERS_PARALLELISM|HF_(HOME|HUB_[A-Z_]+|DATASETS_[A-Z_]+)|TMPDIR|TZ|LANG|LC_[A-Z]+"
    r"|HTTPS?_PROXY|NO_PROXY|https?_proxy|no_proxy|AWS_(DEFAULT_)?REGION|AWS_ENDPOINT_URL(_S3)?"
)
SECRET_WORD = re.compile(
    r"(^|_)[A-Z0-9]*(KEYS?|TOKEN|SECRETS?|PASS(WORD|WD|PHRASE)?|PWD|PAT|CRED(ENTIAL)?S?|AUTH"
    r"|AUTHORIZATION|COOKIES?|SIGNATURE|DSN)(_|$)",
    re.IGNORECASE,
)
# Most engine arguments hold no secret, so only those with such a name count as keys.
ARGUMENT = re.compile(
    r"(^|[_.])(key|token|pass|passwd|credentials?|cookie)(_id)?$|secret|password|authorization",
    re.IGNORECASE,
)
# Not az://container@account, as Azure's URLs are written: a container's name holds no colon.
USERINFO = re.compile(
    r"://(?<!(?i:az)://)(?<!(?i:abfs)://)(?<!(?i:abfss)://)[^/@\s\"']*@|://[^/@\s\"']*:[^/@\s\"']*@"
)
# Parameters of a URL that sign it, or that a database's driver takes a password from.
SIGNATURE = re.compile(
    r"x-(amz|goog|ms)-.*|sig(nature)?|expires|key-pair-id|policy|(aws|oss)accesskeyid|googleaccessid"
    r"|(.*[_-])?(token|key|secret|password)|api_?key|access_?key|code"
    r"|se|sp|sv|sr|st|spr|skoid|sktid|skt|ske|sks|skv",
    re.IGNORECASE,
)
PASSWORD = re.compile(
    r"(ssl)?(.*[_-])?(pass(word|wd|phrase)?|pwd|token|secret|credentials?|auth|authorization)"
    r"|(.*[_-])?(api|access|account|auth|private|secret|shared|subscription)[_-]?(key|token|secret)"
    r"|sig(nature)?|sas",
    re.IGNORECASE,
)
SHORT_URL_HASH = 12  # hex digits
# (names that a URL has, parameters that are then part of its signature); some say so themselves.
# Without these names, such a parameter may as well select the rows.
_SIGNED_WITH = (
    (
        frozenset[str](),  # S3, GCS, OAuth, GitLab
        re.compile(
            r"x-(amz|goog)-.*|sig(nature)?|(access|auth|job|oauth|private)[-_]?token", re.IGNORECASE
        ),
    ),
    (
        frozenset(("sig", "sv")),  # Azure
        re.compile(r"s[eprtv]|spr|skoid|sktid|sk[testv]|x-ms-.*", re.IGNORECASE),
    ),
    (
        frozenset(("signature",)),  # CloudFront, Alibaba, older ones of S3 and GCS
        re.compile(
            r"expires|policy|key-pair-id|(aws|oss)accesskeyid|googleaccessid|security-token",
            re.IGNORECASE,
        ),
    ),
    (
        frozenset(("token", "expires")),  # Bunny
        re.compile(r"token|expires|token_path", re.IGNORECASE),
    ),
)
_SIGNING_TOKEN = re.compile(r"eyJ[\w-]+\.[\w-]+\.[\w-]+|GHSAT\w+")  # Supabase, GitHub
# Engine arguments that are mappings with arbitrary names: each text in them counts as secret.
FREE_ARGUMENTS = frozenset(
    (
        *("additional_config", "ec_transfer_config", "kv_transfer_config", "media_io_kwargs"),
        *("model_loader_extra_config", "weight_transfer_config"),
    )
)
# Well-known prefixes of tokens, and patterns of other tokens in a path.
_TOKEN_BEGINS = re.compile(
    r"(gh[opsur]|github_pat|glpat|sk|xox[a-z]|dapi)[-_]\w{8,}|hf_\w{8,}|dapi[0-9a-f]{32}"
    r"|sk-(?=.*\d)[\w-]{16,}|eyJ\w{8,}"
    r"|gsk_\w{16,}|AIza[\w-]{20,}|(nvapi|pplx|xai)-[\w-]{16,}"
)
_MIXED = re.compile(r"(?=.*[a-z])(?=.*[A-Z])(?=.*\d)[\w~+=-]{16,}")
_LOWER = re.compile(r"(?=(?:\D*\d+\D+){3})(?:[a-z\d]{20,}|[A-Z\d]{20,})")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # a commit or a checksum, which name content
_FORMS = (_MIXED, _LOWER)
_NAMED_SEGMENT = re.compile(r"([^=:]+)[=:](.+)")
_WEB_PATH = re.compile(r"(\bhttps?://[^/?#\s\"']+)(/[^?#\s\"']*)", re.IGNORECASE)
_URL_PATH = re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]*://[^/?#\s\"']*)([/?#][^\s\"']+)")
_PARAMETER = re.compile(r"([?&])([^=&#?\s]+)=([^&#\s\"']*)")


def hide_options(value: object, name: str = "") -> Any:
    """Return store options with their values masked, except values that cannot be secret.

    A value is not masked if it is empty or boolean, or if `safe_option` says that its name is
    harmless. In values that are not masked, `hide_path` still masks URLs. `value` is a mapping of
    options or, if `name` is given, the value of the option `name`.
    """
    if isinstance(value, Mapping):
        return {key: hide_options(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [hide_options(inner, name) for inner in value]
    return hide_path(value) if _is_open(value) or safe_option(name) else MASK


def hide_catalog(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return an Iceberg catalog's properties with values masked unless their names are harmless.

    Names in CATALOG and names for which `safe_option` is true are harmless. A value with ${NAME} is
    shown, because the variable's value is not in the job. In values that are shown, credentials in
    URLs are masked.
    """
    return {name: _shown_property(str(name), inner) for name, inner in value.items()}


def catalog_secrets(properties: Mapping[str, Any]) -> Iterator[str]:
    """Yield the secret texts in a catalog's properties, in which ${NAME} is already filled in.

    For a value such as ID:SECRET, yields both the whole and each part after a colon.
    """
    for name, inner in properties.items():
        if isinstance(inner, Mapping):
            yield from catalog_secrets(inner)
        elif isinstance(inner, str) and is_masked(_shown_property(str(name), inner)):
            yield inner
            yield from inner.split(":")[1:]  # credential: ID:SECRET


def _shown_property(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return hide_catalog(value)
    if name in CATALOG or (isinstance(value, str) and VARIABLE.search(value)):
        return hide_users(value)
    return hide_options(value, name)


CATALOG_PLACE = ("type", "name", "uri", "warehouse", "prefix")


def catalog_place(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties that identify a catalog, without credentials, for the job in a plan.

    Each credential is replaced by `...`, because the usual mask would make the job invalid.
    """
    return {
        name: hide_users(item).replace(MASK, ELLIPSIS) if isinstance(item, str) else item
        for name, item in counted_catalog(value).items()
    }


def counted_catalog(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties that identify a catalog, for the fingerprint, with credentials masked.

    Masks users, passwords and signatures in URLs. A part of a URL's path that resembles a token
    stays, because it may be the name of a warehouse. Returns {"name": "default"} if no property
    identifies the catalog.
    """
    place = {name: _without_users(value[name]) for name in CATALOG_PLACE if name in value}
    return place or {"name": "default"}


def hide_env(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return environment variables with their values masked, except variables with harmless names.

    `safe_variable` says which names are harmless. Their values are shown, but in http(s) URLs
    everything after the host is masked.
    """
    return {k: hide_path(v) if safe_variable(k) else MASK for k, v in value.items()}


def hide_argument(value: object, name: str) -> Any:
    """Return an engine argument with credentials masked, recognized by names such as api_key.

    `name` is the argument's name. All texts in a mapping with such a name, or in an argument of
    FREE_ARGUMENTS, are masked. In other texts, URLs are masked by `hide_path`.
    """
    if isinstance(value, Mapping):
        above = name if ARGUMENT.search(name) or name in FREE_ARGUMENTS else None
        return {key: hide_argument(inner, above or str(key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [hide_argument(inner, name) for inner in value]
    if isinstance(value, str) and value and (ARGUMENT.search(name) or name in FREE_ARGUMENTS):
        return MASK
    return hide_path(value)


def hide_path(value: object) -> Any:
    """Return a text in which everything after the host of an http(s) URL is masked.

    Many services put a credential into the path. In other URLs, masks only what `hide_users` masks.
    A value that is no text is returned unchanged.
    """
    if not isinstance(value, str):
        return value

    def shown(match: re.Match[str]) -> str:
        is_web = match[1].lower().startswith(("http://", "https://"))
        return f"{match[1]}/{MASK}" if is_web and match[2] != "/" else match[0]

    return _URL_PATH.sub(shown, hide_users(value))


def hide_users(value: object) -> Any:
    """Return a text with users, passwords, signatures and tokens masked in its URLs.

    A value that is no text is unchanged.
    """
    return hide_tokens(_without_users(value)) if isinstance(value, str) else value


def _without_users(value: object) -> Any:
    return hide_signature(USERINFO.sub(f"://{MASK}@", value)) if isinstance(value, str) else value


def hide_endpoint(value: object, mask: str = MASK) -> Any:
    """Return a hosted model's URL with everything masked that is certainly a credential.

    Masks users, passwords and signatures. Puts `mask` in place of path segments that begin like a
    token, or that follow or contain a name such as `token`. Other segments stay, even if they look
    random, because they may name a model or an account: Qwen3-235B-A22B, or 32 hexadecimal digits.
    A value that is no text is returned unchanged.
    """
    return hide_tokens(_without_users(value), mask, ()) if isinstance(value, str) else value


def hide_tokens(text: str, mask: str = MASK, forms: tuple[re.Pattern[str], ...] = _FORMS) -> str:
    """Return `text` with `mask` in place of path segments of http(s) URLs that look like tokens.

    A segment looks like a token if it has a token's prefix, if a name such as `token` stands before
    it, or if one of the patterns in `forms` matches all of it.
    """

    def shown(match: re.Match[str]) -> str:
        before, segments = "", []
        for segment in match[2].split("/"):
            segments.append(mask if _is_token(unquote(segment), before, forms) else segment)
            before = segment
        return match[1] + "/".join(segments)

    return _WEB_PATH.sub(shown, text)


def _is_token(segment: str, before: str, forms: tuple[re.Pattern[str], ...]) -> bool:
    """Return whether a path segment may be a credential, by its form or the segment `before` it.

    Commits, checksums, and names in RAYBATCH_SAFE_NAMES count as harmless.
    """
    if not segment or _named(segment) or set(segment) <= set("*.") or _DIGEST.fullmatch(segment):
        return False
    for part in segment.split(";"):
        named = _NAMED_SEGMENT.fullmatch(part)
        if named and (PASSWORD.fullmatch(named[1]) or SIGNATURE.fullmatch(named[1])):
            return True
    if len(segment) >= 6 and PASSWORD.fullmatch(before) and any(map(str.isdigit, segment)):
        return True
    if _TOKEN_BEGINS.match(segment):
        return True
    return any(form.fullmatch(segment) for form in forms)


def recorded(url: str) -> str:
    """Return a URL for records and messages, without its signature.

    Puts `...` in place of other values that may be secret. The result is still a valid URL, so that
    the job in a plan is still valid.
    """
    return hide_tokens(_without_signature(url, lambda value: ELLIPSIS), ELLIPSIS)


def url_identity(url: str) -> str:
    """Return `recorded(url)`, with # and a short hash appended if it hides a part of the URL.

    The hash keeps URLs apart that differ only in a hidden part. Signatures do not count: two URLs
    that differ only in them have the same identity.
    """
    return _with_hash(recorded(url), unsigned(url))


def recorded_endpoint(url: str) -> str:
    """Return a hosted model's URL with `...` in place of tokens, for records and messages."""
    return str(hide_endpoint(unsigned(url), ELLIPSIS))


def endpoint_identity(url: str) -> str:
    """Return `recorded_endpoint(url)`, with # and a short hash if it hides a part of the URL.

    The hash keeps URLs apart that differ only in a hidden part.
    """
    return _with_hash(recorded_endpoint(url), unsigned(url))


def _with_hash(shown: str, counted: str) -> str:
    if shown == counted:
        return shown
    return f"{shown}#{hashlib.sha256(counted.encode()).hexdigest()[:SHORT_URL_HASH]}"


def unsigned(url: str) -> str:
    """Return a URL without its signature and fragment, for the fingerprint.

    Signatures expire, so they differ between runs of a job. Any other parameter that may be secret
    counts by the SHA-256 of its value, because it may also select the rows.
    """
    return _without_signature(url, lambda value: hashlib.sha256(value.encode()).hexdigest())


def _without_signature(url: str, hidden: Callable[[str], str]) -> str:
    """Return a URL without its signature and fragment.

    `hidden` gets the value of each other parameter that may be secret. It returns the text to put
    in place of the value.
    """
    parts = urlsplit(url)
    query = [text.partition("=") for text in parts.query.split("&") if text]
    names = {unquote_plus(name).lower() for name, _, _ in query}
    signing = [pattern for needed, pattern in _SIGNED_WITH if needed <= names]
    kept = []
    for name, _, value in query:
        plain, text = unquote_plus(name), unquote_plus(value)
        is_token = plain.lower() == "token" and _SIGNING_TOKEN.fullmatch(text)
        if not is_token and not any(pattern.fullmatch(plain) for pattern in signing):
            shown = hidden(value) if _hides(plain, value) else quote_plus(text)
            kept.append(f"{quote_plus(plain)}={shown}")
    return urlunsplit((parts.scheme.lower(), parts.netloc, parts.path, "&".join(kept), ""))


def hide_signature(url: str) -> str:
    """Return a URL with masked values for the parameters that sign it or hold a password."""

    def shown(match: re.Match[str]) -> str:
        hidden = _hides(unquote(match[2]), match[3])
        return f"{match[1]}{match[2]}={MASK}" if hidden else match[0]

    return _PARAMETER.sub(shown, url)


def _hides(name: str, value: str) -> bool:
    """Return whether the value of a URL's parameter `name` may be secret."""
    return bool(value and (SIGNATURE.fullmatch(name) or PASSWORD.fullmatch(name)))


def holds_password(url: str) -> bool:
    """Return whether a database's or catalog's URL has a password among its parameters."""
    found = _PARAMETER.findall(url)
    return any(value and PASSWORD.fullmatch(unquote(name)) for _, name, value in found)


def safe_option(name: str) -> bool:
    """Return whether a store option of this name holds no secret."""
    return name in OPTIONS or _named(name)


def safe_variable(name: str) -> bool:
    """Return whether an environment variable of this name holds no secret."""
    known = VARIABLES.fullmatch(name) is not None and not SECRET_WORD.search(name)
    return known or _named(name)


def is_masked(value: object) -> bool:
    """Return whether a value contains a masked text, at any depth of mappings and lists."""
    if isinstance(value, Mapping):
        return any(is_masked(inner) for inner in value.values())
    if isinstance(value, list):
        return any(is_masked(inner) for inner in value)
    return isinstance(value, str) and MASK in value


def masked(shown: object, where: str) -> Iterator[str]:
    """Yield the dotted names of masked values in `shown`, a value of a job at the path `where`.

    Each name begins with `where`. A list counts as one value.
    """
    if isinstance(shown, Mapping):
        for name, inner in shown.items():
            yield from masked(inner, f"{where}.{name}")
    elif is_masked(shown):
        yield where


def _is_open(value: object) -> bool:
    """Return whether the value is None, "" or a boolean: no credential, whatever its name."""
    return value is None or isinstance(value, bool) or value == ""


def _named(name: str) -> bool:
    """Return whether the variable RAYBATCH_SAFE_NAMES lists a name as not secret.

    A `*` in the list does not match names that contain a word such as "token" (`SECRET_WORD`).
    """
    given = [one.strip() for one in os.environ.get(SAFE_NAMES, "").split(",")]
    wild = not SECRET_WORD.search(name) and any(fnmatchcase(name, one) for one in given)
    return name in given or wild
