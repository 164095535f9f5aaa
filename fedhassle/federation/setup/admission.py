"""Who is admitted to a federation: the coordinator's record of names and public keys, `sites.toml`."""

from __future__ import annotations

import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import tomli_w

from fedhassle.errors import UserError, require
from fedhassle.federation.setup.folder import FederationFolder, checked_name
from fedhassle.federation.setup.keys import checked_public_key, fingerprint
from fedhassle.files import locked, write_text
from fedhassle.names import nearest

FORMAT = 1
HEADER = "# Written by `fedhassle federation admit` and `expel`.\n"


class AdmittedSite(NamedTuple):
    """A site that may join."""

    name: str
    key: str  # a line of OpenSSH
    since: str  # a date and time, ISO 8601


class Record(NamedTuple):
    """The whole file."""

    sites: dict[str, AdmittedSite]  # by name, in the order of their names
    expelled: dict[str, str]  # by key: when it was taken out


def admitted(folder: Path) -> dict[str, AdmittedSite]:
    """The admitted sites by name, in the order of their names."""
    return read_record(folder).sites


def read_record(folder: Path) -> Record:
    """Who is admitted, and which keys were."""
    path = FederationFolder(folder).sites
    if not path.exists():
        return Record({}, {})
    try:
        content = tomllib.loads(path.read_text("utf-8"))
        found = [AdmittedSite(name, site["key"], site["since"]) for name, site in content["sites"].items()]
        expelled = {one["key"]: one["since"] for one in content.get("expelled", [])}
        require(content["format"] == FORMAT, f"its format is not {FORMAT}")
        words = [part for site in (*found, *expelled.items()) for part in site]
        require(all(isinstance(word, str) for word in words), "a key or a time in it is no text")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be read as the record of admitted sites ({error})") from error
    for site in found:
        checked_name(site.name)
        checked_public_key(site.key, f"{path}: the key of {site.name}")
    return Record({site.name: site for site in sorted(found)}, expelled)


def admit_site(folder: Path, name: str, key: str) -> str:
    """Adds a site, or gives one that is admitted with this key another name; returns the name that it had.

    Neither names nor keys occur twice. A key that was taken out stays out: Flower takes none again.
    """
    checked_name(name)
    with locked(folder):
        sites, expelled = read_record(folder)
        before = next((site for site in sites.values() if site.key == key), None)
        if before is not None and before.name == name:
            return name
        if name in sites:
            known = fingerprint(sites[name].key)
            raise UserError(f"{name} is admitted with another key ({known}): expel it first")
        require(
            key not in expelled,
            f"this key was expelled on {expelled.get(key, '')[:10]} and stays out: the site removes its "
            "private key, and joins again for a new one",
        )
        others = {other: site for other, site in sites.items() if site.key != key}
        since = _now() if before is None else before.since
        _write(folder, Record({**others, name: AdmittedSite(name, key, since)}, expelled))
    return "" if before is None else before.name


def expel_site(folder: Path, name: str) -> AdmittedSite:
    """Takes a site out; returns what was known of it."""
    with locked(folder):
        sites, expelled = read_record(folder)
        hint = nearest(name, sites) or (f" (admitted are {', '.join(sites)})" if sites else "")
        require(name in sites, f"no site {name!r} is admitted{hint}")
        left = {other: site for other, site in sites.items() if other != name}
        _write(folder, Record(left, {**expelled, sites[name].key: _now()}))
    return sites[name]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _write(folder: Path, record: Record) -> None:
    sites, expelled = record
    tables = {name: {"key": sites[name].key, "since": sites[name].since} for name in sorted(sites)}
    gone = [{"key": key, "since": since} for key, since in expelled.items()]
    text = tomli_w.dumps({"format": FORMAT, "sites": tables, **({"expelled": gone} if gone else {})})
    write_text(FederationFolder(folder).sites, HEADER + text)
