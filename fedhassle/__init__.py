"""Federated semi-supervised learning where each site labels any share of its data."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedhassle.api import Result, compare, run, run_several, split
    from fedhassle.data.catalogue import load as dataset
    from fedhassle.data.dataset import Dataset
    from fedhassle.data.split.split import Split
    from fedhassle.engine.metrics import Predictions
    from fedhassle.errors import UserError
    from fedhassle.method import (
        Batch,
        Client,
        Descent,
        Labelled,
        Method,
        Model,
        Models,
        Phase,
        Stream,
        Update,
    )
    from fedhassle.optimiser import SGD, AdamW
    from fedhassle.predict.model import load

# Matplotlib's "is building the font cache" would be the first line that a new user sees.
logging.getLogger("matplotlib.font_manager").addFilter(lambda record: "font cache" not in record.getMessage())

_HOME = {
    "fedhassle.api": ("Result", "compare", "run", "run_several", "split"),
    "fedhassle.data.dataset": ("Dataset",),
    "fedhassle.data.split.split": ("Split",),
    "fedhassle.engine.metrics": ("Predictions",),
    "fedhassle.errors": ("UserError",),
    "fedhassle.method": (
        *("Batch", "Client", "Descent", "Labelled", "Method"),
        *("Model", "Models", "Phase", "Stream", "Update"),
    ),
    "fedhassle.optimiser": ("SGD", "AdamW"),
    "fedhassle.predict.model": ("load",),
}

__all__ = [
    "SGD",
    "AdamW",
    "Batch",
    "Client",
    "Dataset",
    "Descent",
    "Labelled",
    "Method",
    "Model",
    "Models",
    "Phase",
    "Predictions",
    "Result",
    "Split",
    "Stream",
    "Update",
    "UserError",
    "compare",
    "dataset",
    "load",
    "run",
    "run_several",
    "split",
]


def __dir__() -> list[str]:
    """Lists the public names, including those imported on first use."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def __getattr__(name: str) -> Any:
    """Imports on first use: the command line answers before PyTorch is loaded."""
    if name == "dataset":
        return importlib.import_module("fedhassle.data.catalogue").load
    for module, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'fedhassle' has no attribute {name!r}")
