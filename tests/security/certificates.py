"""A certificate authority and what it signs, made with the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")

_SETTINGS = """\
[ca]
default_ca = own
[own]
database = {folder}/index
new_certs_dir = {folder}
certificate = {folder}/ca.pem
private_key = {folder}/ca.key
rand_serial = yes
default_md = sha256
policy = names
[names]
commonName = supplied
"""


@dataclass(frozen=True)
class Authority:
    """A CA in a folder; keys are elliptic, which are made in no time."""

    folder: Path

    @property
    def certificate(self) -> Path:
        return self.folder / "ca.pem"

    @classmethod
    def make(cls, folder: Path) -> Authority:
        folder.mkdir(exist_ok=True)
        made = cls(folder)
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30"),
            *("-subj", "/CN=test CA", "-keyout", folder / "ca.key", "-out", made.certificate),
        )
        return made

    def sign(self, name: str, *, extensions: str = "subjectAltName=IP:127.0.0.1", valid: str = "") -> tuple[Path, Path]:
        """Certificate and key for a name; `valid` is of the form BEGIN/END, each YYYYMMDDHHMMSSZ."""
        key, request, made = (self.folder / f"{name}.{kind}" for kind in ("key", "csr", "pem"))
        _openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}"),
            *("-keyout", key, "-out", request),
        )
        (self.folder / "extensions").write_text(extensions + "\n")
        (self.folder / "index").write_text("")
        (self.folder / "settings").write_text(_SETTINGS.format(folder=self.folder))
        begin, end = valid.split("/") if valid else ("", "")
        days = ("-startdate", begin, "-enddate", end) if valid else ("-days", "30")
        _openssl(
            *("ca", "-batch", "-notext", "-config", self.folder / "settings", *days, "-in", request, "-out", made),
            *("-extfile", self.folder / "extensions"),
        )
        key.chmod(0o600)
        return made, key


def _openssl(*arguments: object) -> None:
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
