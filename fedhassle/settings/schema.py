"""Settings: names, types and defaults (the paper's), and how a request is resolved to them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from fedhassle.data.catalogue import CATALOGUE
from fedhassle.engine.cluster import require_address
from fedhassle.engine.cores import available_cores
from fedhassle.engine.device import LANES, STACK
from fedhassle.errors import UserError, first_line, require
from fedhassle.method import Method
from fedhassle.methods import METHODS
from fedhassle.names import brief, find, some_lines, some_of
from fedhassle.nets import NETS
from fedhassle.ranges import require_in_ranges
from fedhassle.settings.mistakes import explain, hint_to_vary
from fedhassle.settings.request import DEFAULT_DATA, DEFAULT_METHOD, Request, expanded, merged

COMPILED_ROUNDS = 100  # the fewest rounds for which compiling the kernels of ResNet-8 pays (docs/speed.md)

PER_WORKERS = ("workers", "ray", "threads")  # chosen anew when a run gets other workers
PER_DEVICE = ("device", "precision", "compile", *PER_WORKERS)  # … and when it moves to another device

REQUIRED = ("networks", "initial", "phases", "predict")  # `Method` leaves these to its subclasses

Tool = Literal["tensorboard", "mlflow", "wandb"]  # experiment trackers

STRICT = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def split_words(value: Any) -> Any:
    """`a,b` as a list of words; any other value unchanged."""
    return [word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else value


def without_none(value: Any) -> Any:
    """A table without the entries that are None, which TOML cannot hold; any other value unchanged."""
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def without_empty(tables: dict[str, Any]) -> dict[str, Any]:
    """Settings without the tables in which nothing is set."""
    return {key: value for key, value in tables.items() if value != {}}


def trackers(value: Any) -> Any:
    """The words of `track`, which must be known tools."""
    words, known = split_words(value), typing.get_args(Tool)
    for word in words if isinstance(words, list) else ():
        require(
            word in known,
            f"there is no tracker {brief(word)}: there are {', '.join(known)}, also together "
            "(track=tensorboard,mlflow); other tools can read metrics.jsonl in the folder of the run",
        )
    return words


class DataSettings(BaseModel):
    """The images, and how training sees them; the data set has defaults for what is None."""

    model_config = STRICT
    name: str = DEFAULT_DATA  # of `fedhassle data list`, or the path of an .npz or of a folder of sites
    folder: str | None = None  # the folder of the named data sets
    holdout: float = Field(default=0.0, ge=0, lt=1)  # share of the training images to test on instead
    mean: list[float] | None = None
    std: list[float] | None = None
    flip: bool | None = None
    crop: int | None = Field(default=None, ge=0)
    size: int | list[int] | None = None  # of the images of sites: the side, or height and width
    channels: Literal[1, 3] | None = None  # of the images of sites
    patients: str | None = None  # of sites: how the patient of an image is known; test patients are held out
    intensities: str | None = None  # of sites: how grey images of more than 8 bits become 0 … 255


class SplitSettings(BaseModel):
    """The split: which client holds which images, and which of them are labelled."""

    model_config = STRICT
    kind: Literal["authors", "balanced", "dirichlet", "iid"] = "authors"
    annotation: Literal["independent", "own"] = "independent"
    alpha: float = 0.1
    clients: int = 20
    # A name, {full, partial, unlabelled, share}, or a list of shares.
    labels: Annotated[Any, BeforeValidator(without_none)] = "10%"
    size: int | None = None  # samples per client
    ratio: float | None = None  # |D_U| / |D_L|
    seed: int | None = Field(default=None, ge=0)  # default: the run's seed; 0 with kind=authors
    file: str | None = None  # a saved split; excludes all of the above


class PrivacySettings(BaseModel):
    """The protection of what a client sends; None: without."""

    model_config = STRICT
    unit: Literal["site", "sample"] | None = None  # whom noise protects; default: site
    epsilon: float | None = Field(default=None, gt=0)  # ε, the budget of a run
    noise: float | None = Field(default=None, gt=0)  # z; default: the least that all rounds need within ε
    delta: float | None = Field(default=None, gt=0, lt=1)  # δ; default: 1e-5
    # C, largest norm of an update or gradient; default: 1 with noise.
    clip: float | None = Field(default=None, gt=0)
    masks: bool | None = None  # secure aggregation, in a real federation
    hide: bool | None = None  # with masks: sites hide which models they train, and how many images they have


class MethodSettings(BaseModel):
    """The method's name; its settings are the fields of its class."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = DEFAULT_METHOD

    @property
    def settings(self) -> dict[str, Any]:
        """The settings without the name."""
        return dict(self.model_extra or {})


class Settings(BaseModel):
    """All settings of a run: equal settings and seed give equal results on one machine."""

    model_config = STRICT
    data: DataSettings = DataSettings()
    net: str | None = None  # a name, or a user's own nn.Module class; default: the data set's
    seed: int = Field(default=0, ge=0, lt=2**32)
    rounds: int = Field(default=200, ge=1, lt=1_000_000)  # T
    clients_per_round: int = Field(default=8, ge=1)  # C
    evaluate_every: int = Field(default=2, ge=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = Field(default=0, ge=0, le=1024)  # clients in parallel on a CPU; 0: one per core
    workers: int = Field(default=1, ge=1, le=64)  # processes that share a run, each with a GPU or `threads`
    ray: str | None = None  # the cluster of the workers: local, auto or HOST:PORT; default: local if several
    lanes: int = Field(default=LANES, ge=1, le=256)  # clients in parallel on a GPU, if its memory allows
    stack: int = Field(default=STACK, ge=1, le=64)  # clients of small networks that share a GPU's kernels
    precision: Literal["auto", "bf16", "tf32", "fp32"] = "auto"  # of matrix products on a GPU
    compile: bool | None = None  # compile kernels for a GPU, which takes a minute; default: when it pays
    deterministic: bool = False  # bitwise equal runs on one GPU; slower
    track: Annotated[list[Tool] | None, BeforeValidator(trackers)] = None
    metrics: Annotated[list[str] | None, BeforeValidator(split_words)] = None  # a user's own functions
    split: SplitSettings = SplitSettings()
    method: MethodSettings = MethodSettings()
    privacy: PrivacySettings = PrivacySettings()

    @property
    def distributed(self) -> bool:
        """True if the run trains on workers of a Ray cluster, not in its own process."""
        return self.workers > 1 or self.ray is not None

    def as_toml(self) -> dict[str, Any]:
        """The settings that are not None, as tables; of a split in a file only its path."""
        made = without_empty(self.model_dump(exclude_none=True))
        return made if self.split.file is None else made | {"split": {"file": self.split.file}}


def resolve(request: Request) -> Settings:
    """Valid settings, with every default and every choice of this machine filled in."""
    given_settings = expanded(merged(request))
    require_finite(given_settings)
    given = given_settings.get("method", {})
    name = given.get("name", DEFAULT_METHOD)
    require(isinstance(name, str), f"method.name: input should be a valid string, got {name!r}")
    require_one_of_each(given_settings)
    method = method_class(name)
    unused = left_over(request) - {field.name for field in dataclasses.fields(method)}
    table = {k: v for k, v in given.items() if k not in unused}
    settings = validated(method, name, {**given_settings, "method": {**table, "name": name}})
    require_in_ranges(method, settings.method, "method.")
    if settings.net is not None and ":" not in settings.net:
        find(settings.net, NETS, "network")  # a user's own is imported when it is built
    device = resolved_device(settings.device)
    if settings.ray is not None:
        require_address(settings.ray)
    chosen = {
        "device": device,
        "precision": resolved_precision(settings.precision, device),
        "compile": resolved_compile(settings, device),
        "threads": settings.threads or max(1, available_cores() // settings.workers),
        "split": resolved_split(settings.split, request),
        "method": MethodSettings(**settings.method.model_dump()),
    }
    return Settings.model_construct(**(dict(settings) | chosen))


def require_one_of_each(settings: Mapping[str, Any]) -> None:
    """Refuses several data sets, networks or methods: method=hassle,fedavg."""
    for key, known in (("data", CATALOGUE), ("net", NETS), ("method", METHODS)):
        value = settings.get(key)
        name = value.get("name") if isinstance(value, dict) else value
        if isinstance(name, str) and "," in name and all(part.strip() in known for part in name.split(",")):
            raise UserError(f"{key}: expected one name, got {brief(name)}{hint_to_vary(key, name)}")


def left_over(request: Request) -> set[str]:
    """The settings of a method that a later layer replaced by another: `run quick method=fedavg`."""
    last = {key: i for i, table in enumerate(request.tables("method")) for key in table}
    return {key for key, i in last.items() if i < last.get("name", -1)}


def resolved_split(split: SplitSettings, request: Request) -> SplitSettings:
    """The split; one in a file replaces the split of lower layers, and excludes other settings beside it."""
    if split.file is None:
        return split
    tables = request.tables("split")
    naming = max(i for i, table in enumerate(tables) if "file" in table)
    beside = {key: None for table in tables[naming:] for key in table if key != "file"}
    default = SplitSettings().model_dump(exclude_none=True)
    if beside and not beside.keys() >= default.keys():  # all of them: a config.toml older than this rule
        keys = some_of(f"split.{key}" for key in beside)
        raise UserError(f"split.file={split.file} defines the whole split: leave out {keys}")
    return SplitSettings(file=split.file)


def validated(method: type[Method], name: str, values: Mapping[str, Any]) -> Settings:
    """The values as settings of a run with this method; one error lists the first things that are wrong."""
    model = settings_model(method, name)  # type: ignore[arg-type] # a class is hashable
    try:
        # By way of JSON: a list is a list in TOML, whether a field calls it a list or a tuple.
        return model.model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        raise UserError(some_lines(error.errors(), lambda one: explain(model, one, name))) from error


@functools.cache
def settings_model(method: type[Method], name: str) -> type[Settings]:
    """`Settings` whose [method] has the fields of a method; cached, since a report checks a thousand runs."""
    return create_model("Settings", __base__=Settings, method=(method_table(method, name), ...))


def method_table(method: type[Method], name: str) -> type[BaseModel]:
    """The table [method] with the fields of a method."""
    try:
        hints = typing.get_type_hints(method)
    except Exception as error:  # a user's annotations may fail in any way
        where = f"{method.__module__}:{method.__name__}"
        raise UserError(f"the fields of {where} have types that cannot be read: {error}") from error
    fields: dict[str, Any] = {
        field.name: (hints[field.name], pydantic_default(field))
        for field in dataclasses.fields(method)
        if field.name != "net"
    }
    if "name" in fields:
        raise UserError(f"method {name!r} has a field called 'name': that setting names the method")
    try:
        return create_model("MethodTable", __config__=STRICT, name=(str, ...), **fields)
    except Exception as error:  # pydantic refuses types that it does not know
        raise UserError(
            f"method {name!r} has a field that cannot be a setting: {first_line(error)}"
        ) from error


def pydantic_default(field: dataclasses.Field[Any]) -> Any:
    """The default of a dataclass field, as pydantic writes it."""
    if field.default_factory is not dataclasses.MISSING:
        return Field(default_factory=field.default_factory)
    return ... if field.default is dataclasses.MISSING else field.default


def method_class(name: str) -> type[Method]:
    """A method by name, or a user's own class."""
    found = find(name, METHODS, "method")
    if not (isinstance(found, type) and issubclass(found, Method) and dataclasses.is_dataclass(found)):
        raise UserError(f"method {name!r} must be a dataclass that inherits fedhassle.Method")
    require_own_fields(name, found)
    lacking = [part for part in REQUIRED if getattr(found, part) is getattr(Method, part)]
    if lacking:
        raise UserError(
            f"method {name!r} does not define {', '.join(lacking)}: a method needs {', '.join(REQUIRED)} "
            "(docs/method.md shows how)"
        )
    if not isinstance(found.modes, Mapping):
        raise UserError(
            f"method {name!r}: modes must be a dict from predictions to descriptions, got {found.modes!r}"
        )
    return found


def require_own_fields(name: str, method: type[Method]) -> None:
    """Refuses class attributes that look like fields of a method but are not: they would have no effect."""
    for parent in method.__mro__:
        bare = "__dataclass_fields__" not in vars(parent) and issubclass(parent, Method)
        if bare and any("ClassVar" not in str(kind) for kind in inspect.get_annotations(parent).values()):
            raise UserError(
                f"method {name!r}: {parent.__name__} has fields of its own: decorate it with "
                "@dataclass(frozen=True)"
            )
    for field in dataclasses.fields(method):
        value = getattr(method, field.name, dataclasses.MISSING)
        if value is not field.default and not inspect.ismemberdescriptor(value):  # as slots are
            raise UserError(
                f"method {name!r}: {field.name} = {value!r} without a type is no setting and has no effect: "
                f"write {field.name}: TYPE = {value!r} in a class under @dataclass(frozen=True)"
            )


def require_finite(value: Any, key: str = "") -> None:
    """Refuses inf and nan anywhere: no setting needs them, and JSON cannot hold them."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{key} must be finite, got {value}")
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in pairs:
        require_finite(part, f"{key}.{name}" if key else str(name))


def resolved_device(device: str) -> str:
    """The device; `auto` is the GPU if this machine has one."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: PyTorch finds no CUDA device here; use device=cpu or device=auto")
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def resolved_precision(precision: str, device: str) -> str:
    """The precision; `auto` is the fastest of the device."""
    if device == "cpu":
        if precision not in ("auto", "fp32"):
            raise UserError(f"precision={precision} is for a GPU: on a CPU it is fp32")
        return "fp32"
    return ("bf16" if torch.cuda.is_bf16_supported() else "tf32") if precision == "auto" else precision


def resolved_compile(settings: Settings, device: str) -> bool:
    """True if kernels are compiled; default: if the run is long enough for the minute it takes to pay."""
    if settings.compile and (device == "cpu" or settings.deterministic):
        reason = "is for a GPU" if device == "cpu" else "tunes kernels by time: not with deterministic=true"
        raise UserError(f"compile=true {reason}")
    pays = device == "cuda" and not settings.deterministic and settings.rounds >= COMPILED_ROUNDS
    return pays if settings.compile is None else settings.compile
