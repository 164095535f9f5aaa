"""The federation's own file, `federation.toml`: the terms that its members agree on.

No PyTorch here: every command of a federation imports this module. `federation.build` makes a run from it.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_type_hints

import tomli_w
from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import ErrorDetails

from fedhassle.data.npz import CHANNELS, LARGEST_SIDE
from fedhassle.data.site.folder import ImageForm
from fedhassle.data.site.intensities import intensity_rule, parsed_intensities
from fedhassle.data.site.labels import UNLABELLED, nfc
from fedhassle.data.site.patients import parsed_patients
from fedhassle.errors import UserError, require
from fedhassle.files import write_text
from fedhassle.names import brief, class_name, nearest, some_lines
from fedhassle.settings.request import MACHINE, Request, expanded, parsed

T = TypeVar("T")

FORMAT = 1
SIMULATED = ("data", "split", "workers", "ray", "metrics")  # in a federation the sites hold the data
SERVERS_OWN = ("rounds", "clients_per_round", "evaluate_every", "seed", "track")  # the server's only
SITES_OWN = tuple(key for key in MACHINE if key not in SERVERS_OWN)  # each site chooses these for itself
MOST_SITES = 1_000_000
MOST_IMAGES = 10**12
FEWEST_OF_A_CLASS = 10  # with fewer images a rate tells how many there are
WEEK = 7 * 24 * 3600
CLOSED = ConfigDict(extra="forbid")  # no unknown keys


class Address(NamedTuple):
    """A host, by name or number, and a port."""

    host: str
    port: int


def parsed_address(address: str, listening: bool = False) -> Address:
    """Splits `host:port`; an IPv6 address stands in brackets. To listen, 0.0.0.0 means every network."""
    match = re.fullmatch(r"(?:\[(?P<six>[^\]]+)\]|(?P<host>[^:\[\]\s/]+)):(?P<port>\d{1,5})", address)
    if match is None:
        raise UserError(f"{address!r} is not an address: expected host:port, such as fl.example.org:8443")
    host, port = match["six"] or match["host"], int(match["port"])
    require(0 < port < 2**16, f"{address!r} is not an address: the port must lie between 1 and 65535")
    try:
        number = ipaddress.ip_address(host)
    except ValueError:
        require(not match["six"], f"{address!r} is not an address: brackets are for IPv6, such as [::1]:8443")
    else:
        require(
            listening or not number.is_unspecified,
            f"{address!r} means every network of a machine: give the address that sites connect to",
        )
    return Address(host, port)


# Checks beyond types; pydantic calls them, and names the key


def _checked_name(name: str) -> str:
    fits = bool(name.strip()) and name.isprintable() and len(name) <= 100
    require(fits, f"expected 1 to 100 printable characters, got {name!r}")
    return name


def _checked_address(address: str) -> str:
    parsed_address(address)
    return address


def _checked_classes(class_names: tuple[str, ...]) -> tuple[str, ...]:
    require(len(class_names) >= 2, f"expected two classes or more, got {list(class_names)}")
    for name in class_names:
        fits = bool(name) and class_name(name) == name.strip()
        require(fits, f"{name!r} cannot name a class: it is empty, or has spaces around it")
        require(name.lower() not in UNLABELLED, f"{name!r} cannot name a class: it means 'no label'")
    names = [nfc(name) for name in class_names]
    twice = next((name for name in names if names.count(name) > 1), None)
    require(twice is None, f"{twice!r} is there twice")
    return class_names


def _checked_channels(channels: int) -> int:
    require(channels in CHANNELS, f"expected 1 (grey) or 3 (colour), got {channels}")
    return channels


def _checked_patients(text: str) -> str:
    parsed_patients(text)
    return text


def _checked_intensities(text: str) -> str:
    parsed_intensities(text)
    return text


def _checked_data(data: DataTerms) -> DataTerms:
    for key, values in (("mean", data.mean), ("std", data.std)):
        fits = len(values) == data.channels
        require(fits, f"{key} needs one number per channel ({data.channels}), got {list(values)}")
    require(min(data.std) > 0, f"std must be positive, got {list(data.std)}")
    side = min(data.height, data.width)
    require(data.crop < side, f"crop must be less than the shorter side ({side}), got {data.crop}")
    return data


def _checked_run(run: dict[str, Any]) -> dict[str, Any]:
    for key in SIMULATED:
        require(key not in run, f"{key} is for simulated runs, remove it: here the sites hold the data")
    for key in SITES_OWN:
        advice = "remove it: see fedhassle federation node --help"
        require(key not in run, f"{key} is for each site to choose, {advice}")
    return run


Number = Annotated[StrictFloat, Field(allow_inf_nan=False)]  # whole numbers count
KindOfSite = Literal["full", "partial", "unlabelled"]
Side = Annotated[StrictInt, Field(ge=1, le=LARGEST_SIDE)]
NotNegative = Annotated[Number, Field(ge=0)]
Seconds = Annotated[Number, Field(gt=0, le=WEEK)]


@dataclass(frozen=True)
class DataTerms:
    """[data]: the form of every site's images, and the figures that a site reports of them."""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED
    class_names: Annotated[tuple[StrictStr, ...], AfterValidator(_checked_classes)]
    height: Side
    width: Side
    channels: Annotated[StrictInt, AfterValidator(_checked_channels)]
    mean: tuple[Number, ...]  # per channel, of pixels in [0, 1]
    std: tuple[Number, ...]
    flip: StrictBool  # weak augmentation: random horizontal flip
    crop: Annotated[StrictInt, Field(ge=0)]  # weak augmentation: random crop after padding by so many pixels
    validation: Annotated[Number, Field(ge=0, lt=1)] = 0.1  # share of labelled images never trained on
    coarse_counts: StrictBool = False  # sites report their numbers of images as powers of two
    # How sites know their patients: column, folder N, name PATTERN or dicom; None: they do not.
    patients: Annotated[StrictStr, AfterValidator(_checked_patients)] | None = None
    # How grey images of more than 8 bits become 0 … 255: N bits, a window or percentiles; None: 16 bits.
    intensities: Annotated[StrictStr, AfterValidator(_checked_intensities)] | None = None
    # Sites report AUROC, calibration, and recall of classes with so many validation images; None: nothing.
    class_figures: Annotated[StrictInt, Field(ge=FEWEST_OF_A_CLASS)] | None = None

    @property
    def form(self) -> ImageForm:
        """The form that a site's images are converted to."""
        size = (self.height, self.width, self.channels)
        patients = None if self.patients is None else parsed_patients(self.patients)
        return ImageForm(self.class_names, *size, patients, intensity_rule(self.intensities))

    def said(self) -> dict[str, Any]:
        """The terms that are not left open, as [data] holds them: TOML has no None."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Rules:
    """[rules]: how long the server waits for how many sites, and what one of them can do to a round."""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED
    minimum_sites: Annotated[StrictInt, Field(ge=1, le=MOST_SITES)] = 2  # with fewer answers the run stops
    timeout: Seconds = 3600.0  # for a site's answer in a round
    wait: Seconds = 600.0  # for enough sites, and for required ones
    required_sites: tuple[StrictStr, ...] = ()  # names; they take part in every round, or there is none
    required_kinds: tuple[KindOfSite, ...] = ()  # full, partial, unlabelled: one site of each, likewise
    most_images: Annotated[StrictInt, Field(ge=1, le=MOST_IMAGES)] = 1_000_000  # of each kind that a site has
    largest_share: Annotated[Number, Field(gt=0, le=1)] = 0.5  # of the weight in a mean, that one site has
    clip_above: NotNegative = 10.0  # times the usual change: a larger one is clipped; 0: none is
    refuse_above: NotNegative = 100.0  # times the usual change: a larger one is refused; 0: none is
    worst_drop: Annotated[Number, Field(gt=0, le=1)] = 0.3  # of accuracy: a larger one undoes rounds


@dataclass(frozen=True)
class Agreement:
    """The whole file."""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED
    name: Annotated[StrictStr, AfterValidator(_checked_name)]
    address: Annotated[StrictStr, AfterValidator(_checked_address)]  # of the server, for sites: host:port
    data: Annotated[DataTerms, AfterValidator(_checked_data)]
    # Settings as `fedhassle run` takes them.
    run: Annotated[dict[str, Any], AfterValidator(_checked_run)] = field(default_factory=dict)
    rules: Rules = Rules()


# The file


def read_agreement(path: Path) -> Agreement:
    """Reads and checks the agreement in a file, or in the folder that holds `federation.toml`."""
    path = path / "federation.toml" if path.is_dir() else path
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"the federation's file {path} cannot be read: {reason}") from error
    return checked_agreement(parsed(text, str(path)), str(path))


def write_agreement(agreement: Agreement, path: Path) -> None:
    """Checks an agreement, and writes the file that `read_agreement` reads."""
    content = to_toml(agreement)
    checked_agreement(content, str(path))
    write_text(path, tomli_w.dumps(content))


def to_toml(agreement: Agreement) -> dict[str, Any]:
    """The content of the file."""
    return {"format": FORMAT, **asdict(agreement), "data": agreement.data.said()}


def checked_agreement(content: Mapping[str, Any], where: str) -> Agreement:
    """Checks the content of a file; an error names the file and the key."""
    version = content.get("format")
    if type(version) is int and version > FORMAT:
        raise UserError(f"{where} has format {version}: it needs a newer fedhassle; update this one")
    require(type(version) is int and version == FORMAT, f"{where}: expected format = {FORMAT} at the top")
    return checked(Agreement, {key: value for key, value in content.items() if key != "format"}, where)


def checked(model: type[T], content: Any, where: str) -> T:
    """Checks the content of a TOML file against a model; an error has up to ten lines."""
    try:
        return TypeAdapter(model).validate_python(content)
    except ValidationError as error:
        lines = some_lines(error.errors(), lambda one: f"{where}: {_explained(model, one)}")
        raise UserError(lines) from error


def _explained(model: Any, error: ErrorDetails) -> str:
    """A line that says what is wrong with one key."""
    *tables, last = key = [str(part) for part in error["loc"]] or ["the file"]
    name, kind, given = ".".join(key), error["type"], error["input"]
    if kind == "missing":
        return f"{name} is missing"
    if kind == "unexpected_keyword_argument":
        for table in tables:
            model = get_type_hints(model)[table]
        known = [part.name for part in fields(model)]
        return f"unknown key {brief(name)}" + (nearest(last, known) or f" (known are {', '.join(known)})")
    if kind in ("dict_type", "dataclass_type"):
        return f"{name} must be a table, [{name}]"
    if kind == "value_error":  # of a whole table: the message begins with the key in it
        return name + ("." if isinstance(given, dict) else ": ") + str(error["ctx"]["error"])
    message = error["msg"].replace("tuple", "list")
    return f"{name}: {message[0].lower()}{message[1:]}, got {brief(given)}"


def agreement_hash(agreement: Agreement) -> str:
    """A hash of what sites must share to train together: the name, [data], and most of [run].

    The address, the rules and the settings that the server alone follows (rounds, clients per round,
    evaluation, seed, trackers) may change without a new agreement.
    """
    run = expanded(dict(agreement.run))
    shared = {key: value for key, value in run.items() if key not in SERVERS_OWN}
    content = {"format": FORMAT, "name": agreement.name, "data": agreement.data.said(), "run": shared}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def run_request(agreement: Agreement) -> Request:
    """[run] as the layers of settings that `settings.schema.resolve` takes."""
    return Request((expanded(dict(agreement.run)),))
