"""Settings: their names, types and defaults (the paper's), and how they follow from what was asked for."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from fedhassle.engine.cores import available_cores
from fedhassle.engine.device import LANES
from fedhassle.errors import UserError
from fedhassle.method import Method
from fedhassle.methods import METHODS
from fedhassle.names import find, nearest
from fedhassle.settings.request import DEFAULT_DATA, DEFAULT_METHOD, Requested, overlaid

M = TypeVar("M", bound=BaseModel)

COMPILED_ROUNDS = 100  # from so many on, fusing the kernels of ResNet-8 is won back (docs/speed.md)

DEVICES_OWN = ("device", "threads", "precision", "compile")  # those that go with a device

REQUIRED = ("networks", "initial", "phases", "predict")  # what `Method` leaves to its heirs

Tool = Literal["tensorboard", "mlflow"]  # trackers

STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)


def words_in(value: Any) -> Any:
    """`a,b` as a list of words; anything else as it is."""
    return [word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else value


class DataSettings(BaseModel):
    """Which images, and how training sees them; what is not set comes with the data set."""

    model_config = STRICT
    name: str = DEFAULT_DATA  # a name of `fedhassle data list`, or the path of an .npz
    folder: str | None = None  # where named data sets lie
    holdout: float = Field(
        default=0.0, ge=0, lt=1
    )  # this share of the training images stands in for the test images
    mean: list[float] | None = None
    std: list[float] | None = None
    flip: bool | None = None
    crop: int | None = Field(default=None, ge=0)


class SplitSettings(BaseModel):
    """Who holds which images, and which of them are labelled."""

    model_config = STRICT
    kind: Literal["authors", "balanced", "dirichlet", "iid"] = "authors"
    annotation: Literal["independent", "own"] = "independent"
    alpha: float = 0.1
    clients: int = 20
    labels: Any = "10%"  # a name, {full, partial, unlabelled, share}, or a list of shares
    size: int | None = None  # samples per client
    ratio: float | None = None  # |D_U| / |D_L|
    seed: int | None = Field(default=None, ge=0)  # default: the run's; with kind=authors 0
    file: str | None = None  # a saved split, in place of all the above, which then cannot be set


class MethodSettings(BaseModel):
    """The method's name; its settings are the fields of its class."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = DEFAULT_METHOD

    @property
    def settings(self) -> dict[str, Any]:
        """All but the name."""
        return dict(self.model_extra or {})


class Settings(BaseModel):
    """A run, whole: equal settings and seed give equal results on one machine."""

    model_config = STRICT
    data: DataSettings = DataSettings()
    net: str | None = None  # a name, or the import path of an nn.Module class; else the data set's
    seed: int = Field(default=0, ge=0, lt=2**32)
    rounds: int = Field(default=200, ge=1, lt=1_000_000)  # T
    clients_per_round: int = Field(default=8, ge=1)  # C
    evaluate_every: int = Field(default=2, ge=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = Field(default=0, ge=0, le=1024)  # clients side by side on a CPU; 0: one for each core
    lanes: int = Field(
        default=LANES, ge=1, le=256
    )  # clients side by side on a GPU, as far as its memory goes
    precision: Literal["auto", "bf16", "tf32", "fp32"] = "auto"  # of matrix products on a GPU
    compile: bool | None = None  # fuse kernels on a GPU, which takes a minute; else where it pays
    deterministic: bool = False  # the same bits in every run on one GPU, at some cost
    track: Annotated[list[Tool] | None, BeforeValidator(words_in)] = (
        None  # who else is told of every evaluation
    )
    split: SplitSettings = SplitSettings()
    method: MethodSettings = MethodSettings()

    def as_toml(self) -> dict[str, Any]:
        """What is set, as a file of settings has it; of a split in a file nothing but that."""
        made = self.model_dump(exclude_none=True)
        return made if self.split.file is None else made | {"split": {"file": self.split.file}}


def resolve(requested: Requested) -> Settings:
    """Valid settings, with every default and every choice of this machine filled in."""
    merged: dict[str, Any] = {}
    for layer in requested.layers:
        merged = overlaid(merged, layer)
    require_finite(merged)
    settings = validated(Settings, merged)
    name, given = settings.method.name, settings.method.settings
    model = fields_model(method_class(name), name)  # type: ignore[arg-type] # a class is hashable
    chosen = {k: v for k, v in given.items() if k in model.model_fields or not outgrown(requested, k)}
    values = validated(model, chosen, name).model_dump()
    device = resolved_device(settings.device)
    return settings.model_copy(
        update={
            "device": device,
            "precision": resolved_precision(settings.precision, device),
            "compile": resolved_compile(settings, device),
            "threads": settings.threads or available_cores(),
            "split": resolved_split(settings.split, requested),
            "method": MethodSettings(name=name, **values),
        }
    )


def resolved_split(split: SplitSettings, requested: Requested) -> SplitSettings:
    """A split in a file stands alone: what lower layers say of splits gives way, and none may say more."""
    if split.file is None:
        return split
    tables = [table if isinstance(table := layer.get("split"), dict) else {} for layer in requested.layers]
    naming = max(i for i, table in enumerate(tables) if "file" in table)
    beside = {key: None for table in tables[naming:] for key in table if key != "file"}
    default = SplitSettings().model_dump(exclude_none=True)
    if beside and not beside.keys() >= default.keys():  # all of them: a config.toml from before this rule
        keys = ", ".join(f"split.{key}" for key in beside)
        raise UserError(f"split.file={split.file} says who holds what, whole: leave out {keys}")
    return SplitSettings(file=split.file)


def outgrown(requested: Requested, key: str) -> bool:
    """Whether only layers below the one that names the method set a key: `run quick method=fedavg`."""
    naming = [i for i, layer in enumerate(requested.layers) if "name" in layer.get("method", {})]
    setting = [i for i, layer in enumerate(requested.layers) if key in layer.get("method", {})]
    return bool(naming) and max(setting) < max(naming)


def validated(model: type[M], values: Mapping[str, Any], method: str | None = None) -> M:
    """The values as a model, of all settings or of a method's; all that is wrong with them in one error."""
    try:
        # By way of JSON: a list is a list in TOML, whether a field calls it a list or a tuple.
        return model.model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        raise UserError("\n".join(explain(model, e, method) for e in error.errors())) from error


def explain(model: type[BaseModel], error: Any, method: str | None) -> str:
    """One thing that is wrong with the settings, in a line."""
    *tables, last = [str(part) for part in error["loc"]]
    key = ".".join([*([] if method is None else ["method"]), *tables, last])
    if error["type"] != "extra_forbidden":
        return f"{key}: {error['msg'][0].lower()}{error['msg'][1:]}, got {error['input']!r}"
    for table in tables:
        model = typing.cast(type[BaseModel], model.model_fields[table].annotation)
    known = list(model.model_fields)
    hint = nearest(last, known, key.removesuffix(last)) or f" (known are {', '.join(known)})"
    return f"unknown setting {key!r}{'' if method is None else f' of {method}'}{hint}"


def method_class(name: str) -> type[Method]:
    """A method by name or import path."""
    found = find(name, METHODS, "method")
    if not (isinstance(found, type) and issubclass(found, Method) and dataclasses.is_dataclass(found)):
        raise UserError(f"method {name!r} must be a dataclass that inherits fedhassle.Method")
    require_own_fields(name, found)
    lacking = [part for part in REQUIRED if getattr(found, part) is getattr(Method, part)]
    if lacking:
        raise UserError(
            f"method {name!r} does not define {', '.join(lacking)}: a method has {', '.join(REQUIRED)} "
            "of its own (docs/method.md shows how)"
        )
    if not isinstance(found.modes, Mapping):
        raise UserError(
            f"method {name!r}: modes is a dict of predictions and what each is, got {found.modes!r}"
        )
    return found


def require_own_fields(name: str, method: type[Method]) -> None:
    """Refuses what looks like a field of a method, and is none: without a word it would do nothing."""
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
                f"method {name!r}: {field.name} = {value!r} without a type is no setting, and changes none: "
                f"write {field.name}: TYPE = {value!r} in a class under @dataclass(frozen=True)"
            )


def method_fields(method: type[Method]) -> dict[str, Any]:
    """The settings of a method: each field's type and default."""
    try:
        hints = typing.get_type_hints(method)
    except Exception as error:  # a user's annotations may fail in any way
        where = f"{method.__module__}:{method.__name__}"
        raise UserError(f"the fields of {where} have types that cannot be read: {error}") from error
    fields = [field for field in dataclasses.fields(method) if field.name != "net"]
    return {field.name: (hints[field.name], default_of(field)) for field in fields}


def default_of(field: dataclasses.Field[Any]) -> Any:
    """A field's default as pydantic has it."""
    if field.default_factory is not dataclasses.MISSING:
        return Field(default_factory=field.default_factory)
    return ... if field.default is dataclasses.MISSING else field.default


@functools.cache
def fields_model(method: type[Method], name: str) -> type[BaseModel]:
    """A model that checks the settings of a method, made once: a report checks those of a thousand runs."""
    fields = method_fields(method)
    if "name" in fields:
        raise UserError(
            f"method {name!r} has a field called 'name', which is the setting that names the method"
        )
    try:
        return create_model("MethodFields", __config__=STRICT, **fields)
    except Exception as error:  # pydantic refuses types that it does not know
        first = str(error).partition("\n")[0]
        raise UserError(f"method {name!r} has a field that cannot be a setting: {first}") from error


def require_finite(value: Any, key: str = "") -> None:
    """Refuses inf and nan anywhere: no setting has a use for them, and JSON has no word for them."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{key} must be finite, got {value}")
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in pairs:
        require_finite(part, f"{key}.{name}" if key else str(name))


def resolved_device(device: str) -> str:
    """`auto` as the device that this machine has."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: PyTorch finds no CUDA device here; use device=cpu or device=auto")
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def resolved_precision(precision: str, device: str) -> str:
    """`auto` as the fastest that the device has."""
    if device == "cpu":
        if precision not in ("auto", "fp32"):
            raise UserError(f"precision={precision} is for a GPU: on a CPU it is fp32")
        return "fp32"
    return ("bf16" if torch.cuda.is_bf16_supported() else "tf32") if precision == "auto" else precision


def resolved_compile(settings: Settings, device: str) -> bool:
    """Whether kernels are fused: where the minute that it takes is won back."""
    if settings.compile and (device == "cpu" or settings.deterministic):
        reason = "is for a GPU" if device == "cpu" else "tunes kernels by time: not with deterministic=true"
        raise UserError(f"compile=true {reason}")
    pays = device == "cuda" and not settings.deterministic and settings.rounds >= COMPILED_ROUNDS
    return pays if settings.compile is None else settings.compile
