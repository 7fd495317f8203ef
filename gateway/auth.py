"""API keys: who may call what, and whose prompts may share cached prefixes.

Once a key exists, everything that is not on a short public list needs one, unknown paths included. The
decision is made on the resource the router chose, never on the text of the path or the Host header, so
no spelling of a request is authorised as one thing and served as another (CVE-2026-48746).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import hdrs, web

from gateway.config import CONFIG, GatewayConfig
from gateway.errors import ApiError, Handler

TENANT = web.RequestKey("tenant", str)  # goes to the executor: prefix hits never cross it
KEY_ID = web.RequestKey("key_id", str)  # whose limits count; "" without API keys

# The chat page is public because it is where a person types the key; it holds no data.
PUBLIC = frozenset({"/", "/health", "/v1/health", "/ready", "/version", "/favicon.ico"})

_PLAIN_KEY = re.compile(r"[\x21-\x7e]+")
_HASHED_KEY = re.compile(r"sha256:([0-9a-fA-F]{64})")
_MAX_KEY = 1024


@dataclass(frozen=True, slots=True)
class Key:
    """One API key; the key itself is not kept."""

    digest: bytes  # SHA-256 of the key
    id: str  # a short name derived from the digest, for limits
    tenant: str  # digest of the tenant's name


class KeyRing:
    """All keys of this server. Empty: anyone may call."""

    def __init__(self, keys: Sequence[Key] = ()) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, given: str) -> Key | None:
        """The key equal to `given`. Takes the same time for every wrong one: digests are compared,
        in constant time, and all of them."""
        digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
        found: Key | None = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


KEYS = web.AppKey("api_keys", KeyRing)


def _key(text: str, tenant: str, source: str) -> Key:
    if hashed := _HASHED_KEY.fullmatch(text):
        digest = bytes.fromhex(hashed[1])
    elif text.startswith("sha256:"):
        raise ValueError(f"{source}: sha256: must be followed by 64 hex digits")
    elif not _PLAIN_KEY.fullmatch(text) or len(text) > _MAX_KEY:
        raise ValueError(
            f"{source}: a key is 1 to {_MAX_KEY} printable ASCII characters, no spaces"
        )
    else:
        digest = hashlib.sha256(text.encode()).digest()
    # A key without a tenant's name is a tenant of its own: nothing is shared by accident.
    name = f"name {tenant}" if tenant else f"key {digest.hex()}"
    return Key(
        digest=digest,
        id=digest.hex()[:16],
        tenant=hashlib.sha256(b"pagekeeper tenant " + name.encode()).hexdigest(),
    )


def load_keys(config: GatewayConfig) -> KeyRing:
    """The keys of `--api-keys` and `--api-key-file` together.

    Raises:
        ValueError: a setting that is given but holds no key, or a line that is none; the message
            names the setting or the line, never the key.
    """
    keys: list[Key] = []
    if config.api_keys is not None:
        # An empty part is refused as a key: "a,,b" is a mistake in whatever made the list.
        keys += [_key(text.strip(), "", "--api-keys") for text in config.api_keys.split(",")]
    if config.api_key_file is not None:
        path = config.api_key_file
        try:
            lines = path.read_text("utf-8").splitlines()
        except (OSError, UnicodeError) as error:
            raise ValueError(f"--api-key-file {path} cannot be read: {error}") from None
        before = len(keys)
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) > 2:
                raise ValueError(f"--api-key-file {path} line {number}: must be 'KEY [TENANT]'")
            keys.append(_key(words[0], "".join(words[1:]), f"--api-key-file {path} line {number}"))
        if len(keys) == before:
            raise ValueError(f"--api-key-file {path} holds no key")
    if len({key.digest for key in keys}) != len(keys):
        raise ValueError("an API key is given twice; a key has one tenant")
    return KeyRing(keys)


def check_exposure(config: GatewayConfig, keys: KeyRing) -> None:
    """Refuse to serve the network without keys.

    Raises:
        ValueError: what to do about it.
    """
    if len(keys) or config.insecure_no_auth or is_loopback(config.host):
        return
    raise ValueError(
        f"--host {config.host} can be reached from other machines, and no API key is set: anyone "
        "could use this server. Set --api-keys or --api-key-file, listen on 127.0.0.1, or say "
        "--insecure-no-auth if something in front of it checks who calls."
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to `host`. Names other than localhost count as not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@web.middleware
async def auth_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Sets TENANT and KEY_ID, or refuses with 401. A missing key ring is an error, not a free pass."""
    keys = request.app[KEYS]
    key = keys.find(_bearer(request)) if len(keys) else None
    if len(keys) and key is None and not _is_public(request):
        raise _unauthorised(request)
    request[TENANT] = key.tenant if key else ""
    request[KEY_ID] = key.id if key else ""
    return await handler(request)


def _bearer(request: web.Request) -> str:
    """The one bearer token of the request; "" when there is none, or more than one header."""
    given = request.headers.getall(hdrs.AUTHORIZATION, [])
    if len(given) != 1:
        return ""
    scheme, _, token = given[0].partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _is_public(request: web.Request) -> bool:
    route = request.match_info.route
    if request.method not in ("GET", "HEAD") or route.resource is None:
        return False
    path = route.resource.canonical
    return path in PUBLIC or (path == "/metrics" and request.app[CONFIG].public_metrics)


def _unauthorised(request: web.Request) -> ApiError:
    given = hdrs.AUTHORIZATION in request.headers
    said = "The API key is not known here" if given else "This server needs an API key"
    return ApiError(
        401,
        f"{said}; send 'Authorization: Bearer KEY' with a key of this server.",
        type="authentication_error",
        code="invalid_api_key",
        headers={hdrs.WWW_AUTHENTICATE: 'Bearer realm="pagekeeper"'},
    )
