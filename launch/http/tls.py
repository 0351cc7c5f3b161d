"""The server's TLS certificate and private key.

Both files are checked before the server listens: they must match, and a TLS handshake in memory, trusting only this
certificate, shows whether it is currently valid and meant for servers. Changed files, as after a renewal, are reloaded.
"""

from __future__ import annotations

import logging
import os
import ssl
import stat
import time
from pathlib import Path
from typing import NoReturn

from raycache.config import Config
from raycache.errors import ConfigError

_SOON_S = 14 * 86400.0
_NOT_YET_VALID, _EXPIRED, _PURPOSE = 9, 10, 26  # X509_V_ERR_* of OpenSSL
_NO_MATCH = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH")
_log = logging.getLogger(__name__)


class Certificate:
    """A certificate chain and its key, as files.

    Args:
        chain: PEM file, the server's own certificate first.
        key: PEM file without a password.
    Raises:
        ConfigError: a file is missing, invalid or does not match the other, or the certificate is not valid.
    Attributes:
        context: for new connections.
    """

    def __init__(self, chain: Path, key: Path) -> None:
        self._chain, self._key = chain, key
        self._versions = self._stat()
        _check_permissions(key)
        self.context = _context(chain, key)
        _check_validity(chain, self.context)

    def refresh(self) -> None:
        """Reload changed files if they are valid; open connections are not affected."""
        try:
            if (versions := self._stat()) == self._versions:
                return
            self._versions = versions
            Certificate(self._chain, self._key)
            self.context.load_cert_chain(self._chain, self._key, _no_password)
            _log.warning("reloaded the certificate in %s", self._chain)
        except (ConfigError, OSError) as cause:
            _log.error("%s; keeping the certificate loaded before", cause)

    def _stat(self) -> tuple[tuple[int, int], ...]:
        found = []
        for name, path in (("tls_cert", self._chain), ("tls_key", self._key)):
            try:
                seen = path.stat()
            except OSError as cause:
                raise ConfigError(f"{name}={str(path)!r} cannot be read: {cause.strerror}") from cause
            found.append((seen.st_mtime_ns, seen.st_size))
        return tuple(found)


def certificate_of(config: Config) -> Certificate | None:
    """The server's certificate; None for plain HTTP.

    Raises:
        ConfigError: the files cannot be used.
    """
    return Certificate(Path(config.tls_cert), Path(config.tls_key)) if config.tls_cert else None


def trust(certificates: str) -> ssl.SSLContext:
    """Client context that trusts the given CA or server certificates.

    Args:
        certificates: PEM file; empty: those trusted by this machine.
    Raises:
        ConfigError: the file cannot be read.
    """
    context = ssl.create_default_context()
    if certificates:
        _load(context, certificates)
    return context


def trust_exactly(certificate: str) -> ssl.SSLContext:
    """Client context that trusts exactly this certificate, whatever its name.

    Raises:
        ConfigError: the file cannot be read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # on 127.0.0.1, a service presents the certificate of its public name
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    _load(context, certificate)
    return context


def _load(context: ssl.SSLContext, certificates: str) -> None:
    try:
        context.load_verify_locations(certificates)
    except OSError as cause:  # includes SSLError
        raise ConfigError(f"cannot read the certificates in {certificates}: {_words(cause)}") from cause


def _context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    for name, path, marks in (("tls_cert", certificate, ["CERTIFICATE"]), ("tls_key", key, ["PRIVATE KEY"])):
        try:
            text = path.read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as cause:
            raise ConfigError(f"{name}={str(path)!r} cannot be read: {_words(cause)}") from cause
        if not any(f"{mark}-----" in text for mark in marks):
            raise ConfigError(f"{name}={str(path)!r} contains no {marks[0].lower()} in PEM format (-----BEGIN ...)")
        if "ENCRYPTED" in text:
            raise ConfigError(f"{name}={str(path)!r} has a password; remove it with `openssl pkey`")
    try:
        context.load_cert_chain(certificate, key, _no_password)
    except ssl.SSLError as cause:
        if cause.reason in _NO_MATCH:
            raise ConfigError(f"tls_key={str(key)!r} is not the key of tls_cert={str(certificate)!r}") from cause
        raise ConfigError(f"tls_cert={str(certificate)!r} and its key cannot be used: {_words(cause)}") from cause
    return context


def _check_validity(certificate: Path, server: ssl.SSLContext) -> None:
    """Check the certificate by a handshake in memory that trusts only this certificate."""
    name = f"tls_cert={str(certificate)!r}"
    try:
        seen = _handshake(server, trust_exactly(str(certificate)))
    except ssl.SSLCertVerificationError as cause:
        match cause.verify_code:
            case code if code == _EXPIRED:
                raise ConfigError(f"{name} has expired; renew it") from cause
            case code if code == _NOT_YET_VALID:
                raise ConfigError(f"{name} is not valid yet; check this machine's clock") from cause
            case code if code == _PURPOSE:
                raise ConfigError(f"{name} is not meant for servers (see its extended key usage)") from cause
        raise ConfigError(f"{name} cannot be used: {cause.verify_message}") from cause
    except ssl.SSLError as cause:
        raise ConfigError(f"{name} cannot be used: {_words(cause)}") from cause
    left_s = ssl.cert_time_to_seconds(str(seen["notAfter"])) - time.time()
    if left_s < _SOON_S:
        _log.warning("%s expires in %.1f days", name, left_s / 86400)


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, object]:
    """Do a handshake; returns the server's certificate as seen by the client."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True)]
    waiting = list(ends)
    for _ in range(10):  # more than the round trips of any handshake
        for end in list(waiting):
            try:
                end.do_handshake()
                waiting.remove(end)
            except ssl.SSLWantReadError:
                pass
        if not waiting:
            break
    return dict(ends[0].getpeercert() or {})


def _check_permissions(key: Path) -> None:
    if stat.S_IMODE(key.stat().st_mode) & 0o004:
        _log.warning("all users of this machine can read the private key in %s; `chmod 600` it", key)
    if not os.access(key, os.R_OK):
        raise ConfigError(f"tls_key={str(key)!r} cannot be read by this user")


def _no_password() -> NoReturn:
    """Fail instead of letting OpenSSL prompt on the terminal."""
    raise ssl.SSLError("it has a password")


def _words(cause: Exception) -> str:
    match cause:
        case ssl.SSLError():
            return cause.reason or str(cause)
        case OSError():
            return cause.strerror or str(cause)
    return "it is not text"
