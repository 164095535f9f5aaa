"""Where the files of a federation lie, at the coordinator and at a site."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from fedhassle.errors import require

TAKEN = ("ca", "server")  # names of the coordinator's own keys; it may be a site too, in the same folder


@dataclass(frozen=True)
class FederationFolder:
    """A folder with the federation's file; what is in `private` never leaves the machine."""

    path: Path

    @property
    def agreement(self) -> Path:
        """What all agree on; for everyone."""
        return self.path / "federation.toml"

    @property
    def ca(self) -> Path:
        """The certificate that the server's is checked against; for everyone."""
        return self.path / "ca.crt"

    @property
    def private(self) -> Path:
        """The folder of private keys."""
        return self.path / "private"

    @property
    def ca_key(self) -> Path:
        """At the coordinator: signs the server's certificate."""
        return self.private / "ca.key"

    @property
    def certificate(self) -> Path:
        """At the coordinator: the server's certificate."""
        return self.path / "server.crt"

    @property
    def server_key(self) -> Path:
        """At the coordinator: the key of the server's certificate."""
        return self.private / "server.key"

    @property
    def sites(self) -> Path:
        """At the coordinator: who is admitted."""
        return self.path / "sites.toml"

    @property
    def server(self) -> Path:
        """At the coordinator: what a server keeps: its data base, its log, Flower's own files."""
        return self.path / "server"

    def node(self, name: str) -> Path:
        """At a site: what a node keeps: its log, and what methods have it keep between rounds."""
        return self.path / "node" / checked_name(name)

    @property
    def keys(self) -> list[str]:
        """At a site: the names that there are private keys for; the coordinator's own are no site's."""
        return sorted(path.stem for path in self.private.glob("*.key") if path.stem.lower() not in TAKEN)

    def site_key(self, name: str) -> Path:
        """At a site: its private key."""
        free = f"a site cannot be called {name!r}, as the coordinator's own keys are: choose another name"
        require(name.lower() not in TAKEN, free)
        return self.private / f"{checked_name(name)}.key"

    def site_public(self, name: str) -> Path:
        """At a site: its public key, to be sent to the coordinator."""
        return self.path / f"{checked_name(name)}.pub"


def federation_folder(path: Path) -> FederationFolder:
    """The folder by its path, or by that of the federation's file in it."""
    found = FederationFolder(path.parent if path.name == "federation.toml" and not path.is_dir() else path)
    where = f"{path} holds no federation.toml: name the folder that has it"
    require(found.agreement.is_file(), where)
    return found


def checked_name(name: str) -> str:
    """The name of a site, which names files too."""
    require(is_name(name), f"{name!r} is no name for a site: letters, digits, '.', '_' and '-', at most 63")
    return name


def is_name(text: str) -> bool:
    """Whether a text can be the name of a site."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", text) is not None
