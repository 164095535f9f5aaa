"""The metadata of a model file: checked once, before anything is built from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    ValidationError,
    model_validator,
)

from fedhassle.data.npz import LARGEST_SIDE
from fedhassle.data.site.intensities import parsed_intensities
from fedhassle.errors import UserError
from fedhassle.names import class_name
from fedhassle.settings.mistakes import first_mistake
from fedhassle.settings.schema import MethodSettings, method_class, method_table

FORMAT = 1  # of the file

M = TypeVar("M", bound=BaseModel)

Side = Annotated[int, Field(ge=1, le=LARGEST_SIDE)]


def _known_format(number: int) -> int:
    if number > FORMAT:
        raise ValueError(f"it has format {number}, which needs a newer fedhassle: update this one")
    if number < FORMAT:
        raise ValueError(f"expected format {FORMAT}, got {number}")
    return number


def checked_rule(text: str) -> str:
    """Returns the rule for intensities, if there is such a rule."""
    parsed_intensities(text)
    return text


class ModelMetadata(BaseModel):
    """The part of the metadata by `about_model` that prediction needs; the rest is for readers."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)
    format: Annotated[int, AfterValidator(_known_format)]
    method: MethodSettings
    net: str
    shape: tuple[Literal[1, 3], Side, Side]  # channels, height, width
    class_names: tuple[Annotated[str, AfterValidator(class_name)], ...] = Field(min_length=1)
    mean: tuple[float, ...]  # per channel, of pixels in [0, 1]
    std: tuple[PositiveFloat, ...]
    # Of the model of a federation's best round: that round, and the accuracy of each prediction in it.
    round: Annotated[int, Field(ge=0)] | None = None
    validation: dict[str, Annotated[float, Field(ge=0, le=1)]] | None = None
    intensities: Annotated[str, AfterValidator(checked_rule)] | None = None  # of deep grey images

    @model_validator(mode="after")
    def has_numbers_of_every_channel(self) -> ModelMetadata:
        """Refuses a mean or deviation that is not of each channel."""
        if not len(self.mean) == len(self.std) == self.shape[0]:
            raise ValueError(f"mean and std need one number per channel ({self.shape[0]})")
        return self


def checked_metadata(about: Mapping[str, Any]) -> ModelMetadata:
    """Returns the metadata; an error names the first entry that is wrong."""
    return checked(ModelMetadata, about)


def checked_settings(method: MethodSettings) -> dict[str, Any]:
    """Returns the settings of a method by the types of its fields, without its name."""
    table = method_table(method_class(method.name), method.name)
    return {key: value for key, value in checked(table, method.model_dump()) if key != "name"}


def checked(model: type[M], values: Mapping[str, Any]) -> M:
    """Returns the values as a model, by way of JSON, in which a tuple is a list."""
    try:
        return model.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise UserError(first_mistake(error)) from error
