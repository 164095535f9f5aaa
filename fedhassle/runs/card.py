"""The model card: what a person should know of a model before using it, in one page of Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedhassle.data.split.layout import KINDS
from fedhassle.names import counted, some_of
from fedhassle.runs.record import LAST, STANDS_IN, Metrics, averaged, on_test_images

MOST_NAMES = 30  # classes that are listed

PAGE = """\
# {method} on {data}

A classifier of images into {classes} classes, trained by federated learning with the method `{method}` \
of fedhassle {version}.

| | |
|---|---|
{facts}

## Accuracy

On {test}, which took no part in training, in per cent. The first column is the mean of the \
last {evaluations} of the run (never its best round); the file holds the model of the last round.

{scores}

## Intended use and limits

Made for research and for judging the method on images like those it was trained on; before you rely on it, \
measure it with `fedhassle evaluate` on labelled images of your own. It names one of its {classes} classes \
for any image, also for one of none of them, its probabilities need not be calibrated, its accuracy may be \
much lower on images from other devices, sites or people, and it is no medical device.

## Use it

```
fedhassle predict {file} IMAGES…
fedhassle evaluate {file} FOLDER
fedhassle export {file} --onnx
```
"""


def model_card(summary: Metrics, about: Mapping[str, Any], file: str = "model.safetensors") -> str:
    """The card of a finished run, from its summary and from what its model file says of itself."""
    facts = "\n".join(f"| {what} | {cell(value)} |" for what, value in facts_of(summary, about).items())
    tables, tested = [table(summary)], on_test_images(summary)
    if tested is not None:
        tables += ["And on the images that the coordinator keeps for a test:", table(tested)]
    return PAGE.format(
        method=cell(summary["method"]),
        data=cell(summary["data"]),
        classes=len(about["class_names"]),
        test=tested_on(summary),
        evaluations=counted(averaged(summary), "evaluation"),
        version=summary["versions"]["fedhassle"],
        facts=facts,
        scores="\n\n".join(tables),
        file=file,
    )


def table(summary: Metrics) -> str:
    """The accuracy of each prediction, in per cent."""
    lines = [
        f"| prediction | last {counted(averaged(summary), 'evaluation')} | last round |",
        "|---|---|---|",
    ]
    for name, score in summary["accuracy"].items():
        bold = "**" if name == summary["headline"] else ""
        figures = f"{100 * score['mean_of_last']:.2f} | {100 * score['last']:.2f}"
        lines.append(f"| {bold}{cell(name)}{bold} | {figures} |")
    return "\n".join(lines)


def is_federations(summary: Mapping[str, Any]) -> bool:
    """Whether a summary is that of a real federation: it alone names its sites."""
    return "sites" in summary


def tested_on(summary: Mapping[str, Any]) -> str:
    """The images that accuracies were measured on."""
    if is_federations(summary):
        return tested_at(summary)
    held = summary["settings"]["data"].get("holdout")
    kind = f"{held:.0%} of the training images" if held else "the test images"
    return f"{kind} of {cell(summary['data'])}"


def tested_at(summary: Mapping[str, Any]) -> str:
    """Whose images a federation's accuracies, those that the card shows, were measured on."""
    sites, coordinator = "the validation images that the sites keep", "the images that the coordinator keeps"
    shown = summary["history"][-LAST:]
    stood_in = sum(STANDS_IN in metrics for metrics in shown)
    if stood_in in (0, len(shown)):
        return coordinator if stood_in else sites
    return f"{sites} (at {stood_in} of {len(shown)} evaluations no site could tell: on {coordinator})"


def facts_of(summary: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, str]:
    """What trained the model, a line each."""
    channels, height, width = about["shape"]
    settings, machine = summary["settings"], summary["hardware"]
    place = "the sites' own machines" if is_federations(summary) else machine["gpu"] or machine["cpu"]
    return {
        "classes": some_of(about["class_names"], MOST_NAMES),
        "images": f"{height}×{width}, {'grey' if channels == 1 else 'colour'}; normalised with mean "
        f"{numbers(about['mean'])}, std {numbers(about['std'])} of pixels in 0 … 1",
        "network": str(about["net"]),
        "method": ", ".join(f"{key}={value}" for key, value in settings["method"].items() if key != "name"),
        "sites": sites(about["sites"]) + silent(summary),
        "split": split(summary),
        "rounds": f"{summary['rounds']}, {drawn(summary)}",
        "seed": str(summary["seed"]),
        "precision": str(settings["precision"]),
        "trained on": f"{place} in {summary['seconds'] / 60:.1f} minutes",
        "versions": ", ".join(f"{name} {version}" for name, version in summary["versions"].items()),
        "settings": f"hash {summary['settings_hash']}; all of them in `config.toml`",
    }


def sites(counts: Mapping[str, int]) -> str:
    """How many took part, and what they held."""
    kinds = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)
    samples = f"{counts['labelled_images']:,} images with labels, {counts['unlabelled_images']:,} without"
    return f"{sum(counts[kind] for kind in KINDS)} ({kinds}); {samples}"


def silent(summary: Mapping[str, Any]) -> str:
    """The sites of a federation that were there and contributed to no round, by name."""
    names = [name for name, site in summary.get("sites", {}).items() if not site["rounds"]]
    return f"; without a contribution: {some_of(names, MOST_NAMES)}" if names else ""


def drawn(summary: Mapping[str, Any]) -> str:
    """How many sites take part in a round: in a federation, how many have."""
    if not is_federations(summary):
        return f"{counted(summary['settings']['clients_per_round'], 'site')} in each"
    found = summary["sites_per_round"]
    least, most = found["least"], found["most"]
    if least == most:
        return f"{counted(most, 'site')} in each"
    return f"{least} to {most} sites in each (mean {found['mean']:.1f})"


def split(summary: Mapping[str, Any]) -> str:
    """How the images were divided."""
    if is_federations(summary):
        return "none: each site has its own images"
    settings = summary["settings"]["split"]
    keys = ("kind", "annotation", "labels", "alpha")
    made = "from a file" if settings.get("file") else ", ".join(f"{key}={settings[key]}" for key in keys)
    return f"{made}; sha256 {summary['split_hash'][:12]}…"


def numbers(values: Sequence[float]) -> str:
    """One number, or several in brackets."""
    shown = [f"{value:.4g}" for value in values]
    return shown[0] if len(shown) == 1 else f"({', '.join(shown)})"


def cell(text: str) -> str:
    """Text that cannot break a table, whatever a class or a file is called."""
    return " ".join(str(text).split()).replace("\\", "\\\\").replace("|", "\\|")
