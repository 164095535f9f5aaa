"""Paths of a federation's files, at the coordinator and at a site."""

from __future__ import annotations

import re
from pathlib import Path

from fedhassle.errors import require

RESERVED = ("ca", "server")  # the coordinator's own keys: it may be a site too, in the same folder


class FederationFolder:
    """The folder of a federation; files in `private` never leave the machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.private = path / "private"
        # For everyone
        self.agreement = path / "federation.toml"
        self.ca = path / "ca.crt"  # the certificate authority that certifies the server
        # At the coordinator
        self.ca_key = self.private / "ca.key"
        self.certificate, self.server_key = path / "server.crt", self.private / "server.key"
        self.sites = path / "sites.toml"  # the record of admitted sites
        self.server = path / "server"  # the server's database and log, and Flower's own files

    def node(self, name: str) -> Path:
        """At a site: the node's log, and what methods keep at the site between rounds."""
        return self.path / "node" / checked_name(name)

    @property
    def keys(self) -> list[str]:
        """At a site: the names of its private keys, without the coordinator's own."""
        return sorted(path.stem for path in self.private.glob("*.key") if path.stem.lower() not in RESERVED)

    def site_key(self, name: str) -> Path:
        """At a site: its private key."""
        reserved = f"{name!r} is reserved for the coordinator's own keys: choose another name for the site"
        require(name.lower() not in RESERVED, reserved)
        return self.private / f"{checked_name(name)}.key"

    def site_public(self, name: str) -> Path:
        """At a site: its public key, for the coordinator."""
        return self.path / f"{checked_name(name)}.pub"


def federation_folder(path: Path) -> FederationFolder:
    """Finds the folder by its path, or by the path of its federation.toml."""
    found = FederationFolder(path.parent if path.name == "federation.toml" and not path.is_dir() else path)
    require(found.agreement.is_file(), f"{path} contains no federation.toml: give the folder that has it")
    return found


def checked_name(name: str) -> str:
    """Checks the name of a site, which is also part of file names."""
    require(is_name(name), f"{name!r} cannot name a site: use at most 63 letters, digits, '.', '_' and '-'")
    return name


def is_name(text: str) -> bool:
    """True for a text that can name a site."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", text) is not None
