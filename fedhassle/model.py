"""A trained model, loaded from its file without running any code from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fedhassle.arrays import read_arrays
from fedhassle.build import build_method
from fedhassle.data.views import Views, make_views
from fedhassle.errors import UserError
from fedhassle.method import Method
from fedhassle.methods import METHODS
from fedhassle.names import find
from fedhassle.nets import IMAGES_A_PASS, NETS, Net
from fedhassle.vectors import Arrays


class Prediction(NamedTuple):
    """What a model says of N images."""

    classes: np.ndarray  # (N,), numbers into the model's class names
    probabilities: np.ndarray  # (N, M)


@dataclass(frozen=True)
class TrainedModel:
    """A method's final state, and what it needs to know of images."""

    method: Method
    state: Arrays
    views: Views
    class_names: tuple[str, ...]
    about: dict[str, Any]

    @torch.no_grad()
    def predict(self, images: np.ndarray, mode: str | None = None) -> Prediction:
        """Classes and probabilities of images (N, H, W, C) or (N, H, W), uint8; `mode`: SM, UM or EM."""
        pixels = torch.from_numpy(self.checked(images))
        batches = [
            self.method.predict(self.state, self.views.normalise(x))
            for x in torch.split(pixels, IMAGES_A_PASS[pixels.device.type])
        ]
        chosen = self.method.headline if mode is None else mode
        known = {name.lower(): name for name in batches[0]}
        if chosen.lower() not in known:
            raise UserError(f"unknown mode {chosen!r}: this model predicts with {', '.join(known.values())}")
        z = torch.cat([batch[known[chosen.lower()]] for batch in batches])  # (N, M)
        return Prediction(z.argmax(1).numpy(), z.softmax(1).numpy())

    def checked(self, images: np.ndarray) -> np.ndarray:
        """The images as (N, H, W, C), if they are of the model's shape."""
        channels, height, width = self.method.net.shape
        array = images[..., None] if images.ndim == 3 and channels == 1 else images
        expected = (height, width, channels)
        if array.ndim != 4 or array.shape[1:] != expected or array.dtype != np.uint8 or not len(array):
            raise UserError(
                f"expected uint8 images (N, {height}, {width}, {channels}), got {images.dtype} {images.shape}"
            )
        return np.ascontiguousarray(array)


def load(path: str | Path, allow_import: bool = False) -> TrainedModel:
    """The model in a file; a method or network of one's own is imported only if that is allowed."""
    arrays, about = read_arrays(Path(path))
    if not about.keys() >= {"method", "net", "shape", "class_names", "mean", "std"}:
        raise UserError(f"{path} is no trained model: take the model.safetensors of a finished run")
    settings = dict(about["method"])
    name = settings.pop("name")
    for kind, wanted, known in (("method", name, METHODS), ("network", about["net"], NETS)):
        if wanted not in known and not allow_import:
            raise UserError(f"{path} needs the {kind} {wanted!r}: load(path, allow_import=True) imports it")
    net = Net(find(about["net"], NETS, "network"), tuple(about["shape"]), len(about["class_names"]))
    views = make_views(about["mean"], about["std"], False, 0, torch.device("cpu"))
    return TrainedModel(build_method(name, settings, net), arrays, views, tuple(about["class_names"]), about)
