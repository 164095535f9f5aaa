"""Who is admitted to a federation: the coordinator's record of names and public keys, `sites.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import tomli_w

from fedhassle.errors import UserError, require
from fedhassle.federation.folder import FederationFolder, checked_name
from fedhassle.federation.keys import checked_public_key, fingerprint
from fedhassle.files import locked, write_text
from fedhassle.names import nearest

FORMAT = 1
HEADER = "# Written by `fedhassle federation admit` and `expel`.\n"


class AdmittedSite(NamedTuple):
    """A site that may join."""

    name: str
    key: str  # a line of OpenSSH
    since: str  # a date and time, ISO 8601


def admitted(folder: Path) -> dict[str, AdmittedSite]:
    """The admitted sites by name, in the order of their names."""
    path = FederationFolder(folder).sites
    if not path.exists():
        return {}
    try:
        content = tomllib.loads(path.read_text("utf-8"))
        found = [AdmittedSite(name, site["key"], site["since"]) for name, site in content["sites"].items()]
        assert content["format"] == FORMAT
        assert all(isinstance(part, str) for site in found for part in site)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise UserError(
            f"{path} cannot be read as the record of admitted sites ({error or 'wrong format'})"
        ) from error
    for site in found:
        checked_name(site.name)
        checked_public_key(site.key, f"{path}: the key of {site.name}")
    return {site.name: site for site in sorted(found)}


def admit_site(folder: Path, name: str, key: str) -> bool:
    """Adds a site; False if it is admitted with this key already. Neither names nor keys occur twice."""
    checked_name(name)
    with locked(folder):
        sites = admitted(folder)
        if name in sites and sites[name].key == key:
            return False
        if name in sites:
            known = fingerprint(sites[name].key)
            raise UserError(f"{name} is admitted with another key ({known}): expel it first")
        for other in sites.values():
            require(other.key != key, f"{other.name} is admitted with this key: each site has its own")
        now = datetime.now(UTC).isoformat(timespec="seconds")
        _write(folder, {**sites, name: AdmittedSite(name, key, now)})
    return True


def expel_site(folder: Path, name: str) -> AdmittedSite:
    """Takes a site out; returns what was known of it."""
    with locked(folder):
        sites = admitted(folder)
        hint = nearest(name, sites) or (f" (admitted are {', '.join(sites)})" if sites else "")
        require(name in sites, f"no site {name!r} is admitted{hint}")
        _write(folder, {other: site for other, site in sites.items() if other != name})
    return sites[name]


def _write(folder: Path, sites: Mapping[str, AdmittedSite]) -> None:
    tables = {name: {"key": sites[name].key, "since": sites[name].since} for name in sorted(sites)}
    text = tomli_w.dumps({"format": FORMAT, "sites": tables})
    write_text(FederationFolder(folder).sites, HEADER + text)
