"""API keys: one for everybody, or a file with a key per tenant.

    # name     SHA-256 of its API key, in hex                                      rights
    alice      5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8
    bob        6ca13d52ca70c883e0f0bb101e425a89e8624de51db2d2392593af6a84118090    requests=32
    prometheus 2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae    metrics
    operator   fcde2b2edba56bf408601fb721fe9b5c338d10ee429ea04fae5511b68fbf8fb9    admin

Tenants never share cached tokens; `cache_salt` in a request divides the cache within its tenant. A tenant can have
several lines, so that a key can be rotated; its cached tokens belong to the first one. With `repairs=off`, the chats of
a key are not changed by the service's repairs. The file is reloaded when it changes.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from raycache.config import Config
from raycache.errors import ConfigError

ADMIN, METRICS = "admin", "metrics"
_LOOK_AGAIN_S = 1.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_MAX_RUNNING = re.compile(r"requests=([1-9][0-9]{0,8})")
_NO_REPAIRS = "repairs=off"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tenant:
    """The owner of a key.

    Attributes:
        name: empty without an API key file.
        rights: subset of ADMIN and METRICS.
        max_requests: maximum concurrent requests; 0: no limit.
        has_repairs: whether the service's repairs are made in its chats.
        secret: key of its cache salts; empty: clients choose the salt.
    """

    name: str
    rights: frozenset[str]
    max_requests: int = 0
    has_repairs: bool = True
    secret: bytes = field(default=b"", repr=False)

    def salt(self, sent: str) -> str:
        """Cache salt for the one in a request; unpredictable for other tenants, as it depends on the secret."""
        if not self.secret:
            return sent
        return hmac.new(self.secret, sent.encode("utf-8"), hashlib.sha256).hexdigest()


EVERYBODY = Tenant("", frozenset({ADMIN, METRICS}))


class Keys(Protocol):
    """The valid API keys."""

    is_of_tenants: bool

    def find(self, key: bytes) -> Tenant | None:
        """Return the owner of a key, or None; its duration reveals nothing about valid keys."""
        ...

    def tenants(self) -> list[Tenant]:
        """The owners of all keys, each once."""
        ...


def keys_of(config: Config) -> Keys | None:
    """Read the configured keys; None if none are required.

    Raises:
        ConfigError: the API key file cannot be used.
    """
    if config.api_keys:
        return _KeyFile(Path(config.api_keys))
    return _OneKey(config.api_key) if config.api_key else None


def new_key(name: str, *, rights: tuple[str, ...] = ()) -> tuple[str, str]:
    """Create a key and its line for the API key file.

    Raises:
        ConfigError: the name or a right is invalid.
    """
    key = f"rck-{secrets.token_urlsafe(32)}"
    words = [name, hashlib.sha256(key.encode()).hexdigest(), *rights]
    _parse_line(words)
    return key, "  ".join(words)


def add_line(path: Path, line: str) -> None:
    """Append a line to an API key file; a new file is readable by this user only.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "r+", encoding="utf-8") as file:
            text = file.read()
            file.write(f"{line}\n" if not text or text.endswith("\n") else f"\n{line}\n")
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(f"cannot add a line to {path}: {cause}") from cause


class _OneKey:
    """A single key for everybody."""

    is_of_tenants = False

    def __init__(self, key: str) -> None:
        self._wanted = key.encode("utf-8")

    def find(self, key: bytes) -> Tenant | None:
        return EVERYBODY if hmac.compare_digest(key, self._wanted) else None

    def tenants(self) -> list[Tenant]:
        return [EVERYBODY]


class _KeyFile:
    """An API key file."""

    is_of_tenants = True

    def __init__(self, path: Path) -> None:
        self._path = path
        # Look up keyed hashes, which attackers cannot compute, so that the timing of a lookup reveals nothing.
        self._blind = secrets.token_bytes(32)
        self._version, self._tenants = self._read()
        self._looked_s = time.monotonic()

    def find(self, key: bytes) -> Tenant | None:
        if time.monotonic() - self._looked_s >= _LOOK_AGAIN_S:
            self._look_again()
        return self._tenants.get(self._blinded(hashlib.sha256(key).digest()))

    def tenants(self) -> list[Tenant]:
        return list({tenant.name: tenant for tenant in self._tenants.values()}.values())

    def _look_again(self) -> None:
        self._looked_s = time.monotonic()
        try:
            if _version(self._path) != self._version:
                self._version, self._tenants = self._read()
                _log.warning("reloaded %s: %d API keys", self._path, len(self._tenants))
        except (ConfigError, OSError) as cause:
            _log.error("%s; the API keys loaded before stay valid", cause)

    def _read(self) -> tuple[tuple[int, ...], dict[bytes, Tenant]]:
        try:
            version = _version(self._path)
            text = self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as cause:
            raise ConfigError(f"api_keys={str(self._path)!r} cannot be read: {cause}") from cause
        _check_permissions(self._path)
        tenants = parse_tenants(text, name=str(self._path))
        return version, {self._blinded(digest): tenant for digest, tenant in tenants.items()}

    def _blinded(self, digest: bytes) -> bytes:
        return hmac.digest(self._blind, digest, "sha256")


def parse_tenants(text: str, *, name: str) -> dict[bytes, Tenant]:
    """Parse the text of an API key file: SHA-256 of a key -> its tenant.

    Args:
        name: of the file, for errors.
    Raises:
        ConfigError: a line is invalid.
    """
    found: dict[bytes, Tenant] = {}
    secret_of: dict[str, bytes] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not (words := line.partition("#")[0].split()):
            continue
        try:
            digest, tenant = _parse_line(words)
            if digest in found:
                raise ConfigError("this key already belongs to " + found[digest].name)
        except ConfigError as cause:
            raise ConfigError(f"{name}, line {number}: {cause}; `raycache key NAME` creates a line") from cause
        own = hmac.digest(digest, b"raycache tenant " + tenant.name.encode(), "sha256")
        found[digest] = replace(tenant, secret=secret_of.setdefault(tenant.name, own))
    if not found:
        raise ConfigError(
            f"{name} contains no tenants, so nobody could connect; `raycache key NAME` creates a line for one"
        )
    return found


def _parse_line(words: list[str]) -> tuple[bytes, Tenant]:
    """The hash of a key, and the tenant without its secret."""
    name, digest = (*words, "", "")[:2]
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not a valid name; use letters, digits, '.', '_' and '-', at most 64")
    if not _DIGEST.fullmatch(digest):
        raise ConfigError(f"the name {name} must be followed by the SHA-256 of its key, 64 hex digits")
    rights, max_requests, has_repairs = set(), 0, True
    for word in words[2:]:
        if limit := _MAX_RUNNING.fullmatch(word):
            max_requests = int(limit[1])
        elif word in (ADMIN, METRICS):
            rights.add(word)
        elif word == _NO_REPAIRS:
            has_repairs = False
        else:
            raise ConfigError(f"{word!r} is not a right; use {ADMIN}, {METRICS}, requests=N or {_NO_REPAIRS}")
    return bytes.fromhex(digest), Tenant(name, frozenset(rights), max_requests, has_repairs)


def _version(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _check_permissions(path: Path) -> None:
    """Refuse a file that others can write, and warn if all can read it: names leak, and weak keys could be guessed."""
    found = path.stat()
    if found.st_uid not in (0, os.getuid()) or stat.S_IMODE(found.st_mode) & 0o022:
        raise ConfigError(f"other users can write to {path}; make it your own file and `chmod 600` it")
    if stat.S_IMODE(found.st_mode) & 0o004:
        _log.warning("all users of this machine can read %s; `chmod 600` it", path)
