"""The federation's own file, `federation.toml`: what its members agree on."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

import tomli_w

from fedhassle.data.npz import CHANNELS
from fedhassle.data.site.folder import ImageForm
from fedhassle.data.site.labels import UNLABELLED, nfc
from fedhassle.errors import UserError, require
from fedhassle.files import write_text
from fedhassle.names import nearest
from fedhassle.settings.request import MACHINE, Requested, expanded, parsed

T = TypeVar("T")

FORMAT = 1
ELSEWHERE = ("data", "split")  # tables of a simulated run that a federation has no use for in [run]
SERVERS_OWN = ("rounds", "clients_per_round", "evaluate_every", "seed", "track")  # of [run], for it alone
SITES_OWN = tuple(key for key in MACHINE if key not in SERVERS_OWN)  # how a machine trains
LARGEST_SIDE = 4096
MOST_SITES = 1_000_000
WEEK = 7 * 24 * 3600


@dataclass(frozen=True)
class DataTerms:
    """What every site's images become, and what a site tells of them."""

    class_names: tuple[str, ...]
    height: int
    width: int
    channels: int
    mean: tuple[float, ...]  # per channel, of pixels in [0, 1]
    std: tuple[float, ...]
    flip: bool  # weak augmentation: random horizontal flip
    crop: int  # weak augmentation: random crop after reflect padding by so many pixels; 0 is none
    validation: float = 0.1  # the share of its labelled images that a site never trains on
    coarse_counts: bool = False  # whether sites tell their numbers of images in coarse steps only

    @property
    def form(self) -> ImageForm:
        """What a site's images are read as."""
        return ImageForm(self.class_names, self.height, self.width, self.channels)


@dataclass(frozen=True)
class Rules:
    """When the server waits, and when it goes on."""

    minimum_sites: int = 2  # with fewer answers a round is not worth having
    timeout: float = 3600.0  # seconds a site may take for a round
    wait: float = 600.0  # seconds to wait for enough sites at the start


@dataclass(frozen=True)
class Agreement:
    """The whole file."""

    name: str
    address: str  # of the server, as sites reach it: host:port
    data: DataTerms
    run: Mapping[str, Any] = field(default_factory=dict)  # settings as `fedhassle run` takes them
    rules: Rules = Rules()


class Address(NamedTuple):
    """A host, by name or number, and a port."""

    host: str
    port: int


def read_agreement(path: Path) -> Agreement:
    """The agreement in a file, or in the folder that holds `federation.toml`; all of it is checked."""
    path = path / "federation.toml" if path.is_dir() else path
    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"the federation's file {path} cannot be read: {reason}") from error
    return checked_agreement(parsed(text, str(path)), str(path))


def write_agreement(agreement: Agreement, path: Path) -> None:
    """Writes the file that `read_agreement` reads."""
    content = to_toml(agreement)
    checked_agreement(content, str(path))
    write_text(path, tomli_w.dumps(content))


def to_toml(agreement: Agreement) -> dict[str, Any]:
    """The content of the file, as TOML has it."""
    content: dict[str, Any] = _plain({"format": FORMAT, **asdict(agreement)})
    return content


def agreement_hash(agreement: Agreement) -> str:
    """Equal where sites can train together: the name, [data], and [run] without what is the server's affair.

    The address and the rules may change without a site having to agree again, and so may the settings that
    the server alone follows (rounds, clients per round, evaluation, seed, who is told).
    """
    run = expanded(dict(agreement.run))
    shared = {key: value for key, value in run.items() if key not in SERVERS_OWN}
    content = {"format": FORMAT, "name": agreement.name, "data": asdict(agreement.data), "run": shared}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def run_request(agreement: Agreement) -> Requested:
    """[run] as the layers of settings that `config.resolve` takes."""
    return Requested((expanded(dict(agreement.run)),))


def parsed_address(address: str) -> Address:
    """`host:port` in its parts; an IPv6 address stands in brackets."""
    match = re.fullmatch(r"(?:\[(?P<six>[^\]]+)\]|(?P<host>[^:\[\]\s/]+)):(?P<port>\d{1,5})", address)
    require(match is not None, f"address {address!r} is not host:port, such as fl.example.org:8443")
    assert match is not None
    host, port = match["six"] or match["host"], int(match["port"])
    require(0 < port < 2**16, f"address {address!r}: a port lies between 1 and 65535")
    if match["six"]:
        require(_is_ip(host), f"address {address!r}: in brackets stands an IPv6 address")
    require(
        not (_is_ip(host) and ipaddress.ip_address(host).is_unspecified),
        f"address {address!r} stands for every network of a machine: name the one that sites can reach",
    )
    return Address(host, port)


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def checked_agreement(content: Mapping[str, Any], where: str) -> Agreement:
    """The content of a file as an agreement; an error names the file and the key."""
    version = content.get("format")
    if type(version) is int and version > FORMAT:
        raise UserError(f"{where} has format {version}, written by a newer fedhassle: update this one")
    require(type(version) is int and version == FORMAT, f"{where}: expected format = {FORMAT} at its top")
    parts = {key: value for key, value in content.items() if key != "format"}
    for table in ("data", "run", "rules"):
        require(isinstance(parts.get(table, {}), dict), f"{where}: {table} must be a table, [{table}]")
    _check_keys(Agreement, parts, where, "")
    agreement = Agreement(
        _typed(str, parts["name"], where, "name"),
        _typed(str, parts["address"], where, "address"),
        _table(DataTerms, parts["data"], where, "data."),
        dict(parts.get("run", {})),
        _table(Rules, parts.get("rules", {}), where, "rules."),
    )
    try:
        _check_values(agreement)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    return agreement


def _check_keys(of: type[Any], content: Mapping[str, Any], where: str, prefix: str) -> None:
    """Every key is known, and none that has no default is missing."""
    known = [part.name for part in fields(of)]
    for key in content:
        hint = nearest(key, known) or f" (known are {', '.join(known)})"
        require(key in known, f"{where}: unknown key {prefix + key!r}{hint}")
    needed = [part.name for part in fields(of) if part.default is MISSING and part.default_factory is MISSING]
    missing = [prefix + key for key in needed if key not in content]
    require(not missing, f"{where}: lacks {', '.join(missing)}")


def _table(of: type[T], content: Mapping[str, Any], where: str, prefix: str) -> T:
    """A table of the file as its dataclass."""
    _check_keys(of, content, where, prefix)
    types = get_type_hints(of)
    return of(**{key: _typed(types[key], value, where, prefix + key) for key, value in content.items()})


def _typed(wanted: Any, value: Any, where: str, key: str) -> Any:
    """A value of TOML as a field has it: lists are tuples, whole numbers may stand for others."""
    if wanted in (tuple[str, ...], tuple[float, ...]):
        require(isinstance(value, list), f"{where}: {key} must be a list, got {value!r}")
        part = str if wanted == tuple[str, ...] else float
        return tuple(_typed(part, one, where, key) for one in value)
    if wanted is float and type(value) is int:
        value = _as_float(value)
    names = {str: "text", int: "a whole number", float: "a finite number", bool: "true or false"}
    fits = type(value) is wanted and (wanted is not float or math.isfinite(value))
    require(fits, f"{where}: {key} must be {names[wanted]}, got {value!r}")
    return value


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _check_values(agreement: Agreement) -> None:
    """What types cannot say."""
    data, rules = agreement.data, agreement.rules
    name = agreement.name
    require(bool(name.strip()) and name.isprintable() and len(name) <= 100, f"name {name!r} is no name")
    parsed_address(agreement.address)
    _check_classes(data.class_names)
    for key, side in (("height", data.height), ("width", data.width)):
        require(1 <= side <= LARGEST_SIDE, f"data.{key} must lie between 1 and {LARGEST_SIDE}, got {side}")
    require(data.channels in CHANNELS, f"data.channels must be 1 or 3, got {data.channels}")
    for key, values in (("mean", data.mean), ("std", data.std)):
        fits = len(values) == data.channels
        require(fits, f"data.{key} needs a number per channel ({data.channels}), got {list(values)}")
    require(min(data.std) > 0, f"data.std must be positive, got {list(data.std)}")
    side = min(data.height, data.width)
    require(0 <= data.crop < side, f"data.crop must be less than the side ({side}), got {data.crop}")
    require(0 <= data.validation < 1, f"data.validation must lie in [0, 1), got {data.validation}")
    sites = rules.minimum_sites
    require(1 <= sites <= MOST_SITES, f"rules.minimum_sites must be at least 1, got {sites}")
    for key, seconds in (("timeout", rules.timeout), ("wait", rules.wait)):
        require(0 < seconds <= WEEK, f"rules.{key} must lie between 0 and {WEEK} seconds, got {seconds:g}")
    for table in ELSEWHERE:
        require(table not in agreement.run, f"run.{table} has no place here: sites hold the data, see [data]")
    for key in SITES_OWN:
        require(
            key not in agreement.run,
            f"run.{key} has no place here: each site says for itself how it trains, by the options of "
            "fedhassle federation node",
        )


def _check_classes(class_names: tuple[str, ...]) -> None:
    require(len(class_names) >= 2, f"data.class_names needs two classes or more, got {list(class_names)}")
    for name in class_names:
        sound = bool(name) and name == name.strip() and name.isprintable()
        require(sound, f"data.class_names: {name!r} is no name")
        require(name.lower() not in UNLABELLED, f"data.class_names: {name!r} means an image without a label")
    names = [nfc(name) for name in class_names]
    twice = [name for name in names if names.count(name) > 1]
    require(not twice, f"data.class_names has {twice[0]!r} twice" if twice else "")


def _plain(content: Any) -> Any:
    """Content as TOML gives it back."""
    if isinstance(content, Mapping):
        return {key: _plain(value) for key, value in content.items()}
    return [_plain(value) for value in content] if isinstance(content, list | tuple) else content
