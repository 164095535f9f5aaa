"""The checks of a site before it joins: each reports what it found and, if that is wrong, what to do."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fedhassle.data.site.folder import Progress, read_site
from fedhassle.data.site.survey import skipped
from fedhassle.errors import UserError
from fedhassle.federation.agreement import Agreement, agreement_hash, parsed_address
from fedhassle.federation.setup.keys import fingerprint, others_may_read, public_line
from fedhassle.federation.setup.reach import TIMEOUT, Check, check_server
from fedhassle.names import counted, some_of
from fedhassle.version import FLOWER, package_version


def preflight(
    agreement: Agreement,
    ca: Path,
    key: Path,
    data: Path,
    labels: Path | None = None,
    expected_hash: str | None = None,
    progress: Progress | None = None,
    timeout: float = TIMEOUT,
) -> list[Check]:
    """Runs all checks of a site, the cheapest first."""
    checks = [check_versions(), check_agreement(agreement, expected_hash), check_method(agreement)]
    checks += [check_key(key)]
    checks += check_server(parsed_address(agreement.address), ca, timeout)
    return [*checks, check_data(data, agreement, labels, progress)]


# This machine


def check_versions() -> Check:
    """Checks that Flower and PyTorch are installed, in supported versions."""
    found = {name: _installed(name) for name in ("flwr", "torch")}
    said = ", ".join(f"{name} {known or 'missing'}" for name, known in found.items())
    said = f"fedhassle {package_version()}, {said}"
    flower = found["flwr"]
    lowest, above = FLOWER
    fits = flower is not None and _parts(lowest) <= _parts(flower) < _parts(above)
    advice = f"run: pip install 'fedhassle[flower]' (PyTorch, and flwr from {lowest} to below {above})"
    ok = fits and found["torch"] is not None
    return Check("versions", ok, said, "" if ok else advice)


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _parts(text: str) -> tuple[int, ...]:
    """The leading numbers of a version."""
    numbers = []
    for part in text.split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


def check_agreement(agreement: Agreement, expected_hash: str | None) -> Check:
    """Checks that this federation.toml is the coordinator's."""
    found = agreement_hash(agreement)
    if expected_hash is None or expected_hash.strip().lower() == found:
        said = f"{agreement.name}: {len(agreement.data.class_names)} classes, hash {found}"
        return Check("agreement", True, said)
    said = f"this federation.toml has the hash {found}, the coordinator's has {expected_hash}"
    return Check("agreement", False, said, "ask the coordinator for the current federation.toml")


def check_method(agreement: Agreement) -> Check:
    """Checks that the agreed method and network can be built here; the user's own code is never sent."""
    # PyTorch takes seconds to load, and every command of a federation imports this module.
    from fedhassle.federation.build import own_code_in, require_buildable, run_settings

    try:
        require_buildable(agreement)
        settings, own = run_settings(agreement), own_code_in(agreement)
    except UserError as error:
        advice = (
            "ask the coordinator for the Python file of the method or network, and put it into this folder"
        )
        return Check("method", False, str(error), advice)
    code = "".join(f", code of {name} {known}" for name, known in own.items())
    return Check("method", True, settings.method.name + code)


def check_key(key: Path) -> Check:
    """Checks that the site's private key exists, is valid, and only its owner can read it."""
    join = f"fedhassle federation join {key.parent.parent} --name {key.stem} --data IMAGES"
    if not key.exists():
        return Check("key", False, f"{key} does not exist", f"make a key with: {join}")
    if others_may_read(key):
        said = f"other users of this machine can read {key} (mode {key.stat().st_mode & 0o777:04o})"
        advice = f"run: chmod 600 {key} (if someone else has read it, delete it and run: {join})"
        return Check("key", False, said, advice)
    try:
        public = public_line(key, "")
    except UserError as error:
        return Check("key", False, str(error), f"delete it and make a new key with: {join}")
    return Check("key", True, fingerprint(public))


def check_data(
    data: Path, agreement: Agreement, labels: Path | None = None, progress: Progress | None = None
) -> Check:
    """Checks that the site's images can be read and have agreed labels."""
    try:
        site = read_site(data, agreement.data.form, labels, progress)
    except UserError as error:
        return Check("data", False, str(error), f"see what is wrong with: fedhassle data check {data}")
    labelled = int((site.y >= 0).sum())
    said = f"{counted(len(site.y), 'image')}, {labelled:,} labelled"
    lost = [problem.path for problem in skipped(site.problems)]
    if lost:
        said += f"; {len(lost):,} skipped: {some_of(lost, 3)}"
    return Check("data", True, said)
