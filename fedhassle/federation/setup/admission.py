"""The coordinator's record of admitted sites, `sites.toml`: their names and public keys."""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import tomli_w
from pydantic import AfterValidator, Field, StrictInt, StrictStr

from fedhassle.errors import UserError, require
from fedhassle.federation.agreement import MOST_IMAGES, checked
from fedhassle.federation.setup.folder import FederationFolder, checked_name
from fedhassle.federation.setup.keys import checked_public_key, fingerprint
from fedhassle.files import locked, write_text
from fedhassle.names import nearest

HEADER = "# Written by `fedhassle federation admit` and `expel`.\n"


def _checked_key(key: str) -> str:
    checked_public_key(key, "this")
    return key


@dataclass(frozen=True)
class AdmittedSite:
    """A site that may join."""

    key: Annotated[StrictStr, AfterValidator(_checked_key)]  # a line of OpenSSH
    since: StrictStr  # a date and time, ISO 8601
    images: Annotated[StrictInt, Field(ge=1, le=MOST_IMAGES)] | None = None  # the most that it may count


@dataclass(frozen=True)
class ExpelledKey:
    """A key that is never admitted again."""

    key: StrictStr
    since: StrictStr


@dataclass(frozen=True)
class AdmissionRecord:
    """The whole file; keys that are not known here are ignored."""

    format: Literal[1]
    sites: dict[Annotated[StrictStr, AfterValidator(checked_name)], AdmittedSite]  # by name
    expelled: list[ExpelledKey] = field(default_factory=list)


def admitted(folder: Path) -> dict[str, AdmittedSite]:
    """The admitted sites by name, sorted by name."""
    sites = read_record(folder).sites
    return {name: sites[name] for name in sorted(sites)}


def read_record(folder: Path) -> AdmissionRecord:
    """Reads and checks the record; an empty one if there is no file yet."""
    path = FederationFolder(folder).sites
    if not path.exists():
        return AdmissionRecord(1, {})
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"the record of admitted sites {path} cannot be read: {error}") from error
    return checked(AdmissionRecord, content, str(path))


def admit_site(folder: Path, name: str, key: str, images: int | None = None) -> str:
    """Adds a site, or renames the one that is admitted with this key; returns its previous name or "".

    Names and keys are unique. An expelled key stays out: Flower registers no key a second time. `images`: the
    most that it may count from now on; None leaves this as it is.
    """
    checked_name(name)
    fits = images is None or 1 <= images <= MOST_IMAGES
    require(fits, f"a site has 1 to {MOST_IMAGES:,} images, got {images}")
    with locked(folder):
        record = read_record(folder)
        sites = record.sites
        before = next((known for known, site in sites.items() if site.key == key), "")
        if before != name and name in sites:
            raise UserError(
                f"{name} is already admitted with another key ({fingerprint(sites[name].key)}): to replace "
                f"it, first run fedhassle federation expel {name}"
            )
        expelled = next((one.since for one in record.expelled if one.key == key), None)
        if expelled is not None:
            raise UserError(
                f"this key was expelled on {expelled[:10]} and cannot come back: the site deletes its "
                "private key, runs fedhassle federation join again, and sends you the new public key"
            )
        site = sites[before] if before else AdmittedSite(key, _now())
        site = replace(site, images=site.images if images is None else images)
        others = {known: other for known, other in sites.items() if known != before}
        if sites.get(name) != site:
            _write(folder, replace(record, sites={**others, name: site}))
    return before


def expel_site(folder: Path, name: str) -> AdmittedSite:
    """Removes a site, bars its key for good, and returns its entry."""
    with locked(folder):
        record = read_record(folder)
        hint = nearest(name, record.sites) or f" (admitted: {', '.join(sorted(record.sites)) or 'none'})"
        require(name in record.sites, f"no site {name!r} is admitted{hint}")
        site = record.sites[name]
        others = {known: other for known, other in record.sites.items() if known != name}
        expelled = [*record.expelled, ExpelledKey(site.key, _now())]
        _write(folder, replace(record, sites=others, expelled=expelled))
    return site


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _write(folder: Path, record: AdmissionRecord) -> None:
    content = asdict(record)
    content["sites"] = {
        name: {key: value for key, value in site.items() if value is not None}
        for name, site in sorted(content["sites"].items())
    }
    if not record.expelled:
        del content["expelled"]
    write_text(FederationFolder(folder).sites, HEADER + tomli_w.dumps(content))
