"""The model card: one page of Markdown to read before using a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedhassle import blocks
from fedhassle.data.split.layout import KINDS
from fedhassle.names import counted, some_of
from fedhassle.runs.record import (
    BY_CLASS,
    EPSILON,
    LAST,
    TEST_FALLBACK,
    Metrics,
    evaluations_averaged,
    on_test_images,
)

MOST_NAMES = 30  # classes or sites listed

PAGE = """\
# {method} on {data}

A classifier of images into {classes} classes, trained by federated learning with the method `{method}` \
of fedhassle {version}.

| | |
|---|---|
{facts}

## Accuracy

On {test}, which took no part in training, in per cent. The first column is the mean of the \
last {evaluations} of the run (never its best round); `model.safetensors` holds the model of the last round.

{scores}{best}

## Intended use and limits

Made for research, and to assess the method on images like those it was trained on; before you rely on it, \
measure it with `fedhassle evaluate` on your own labelled images. It assigns one of its {classes} classes \
to every image, even to one that shows none of them, its probabilities may not be calibrated, its accuracy \
may be much lower on images from other devices, sites or people, and it is no medical device.

## Use it

```
fedhassle predict {file} IMAGES…
fedhassle evaluate {file} FOLDER
fedhassle export {file} --onnx
```
"""


BEST = """

**Use `best.safetensors`**, the model of round {round}, unless you have a reason for the last round. It is \
the best of the run on the sites' validation images: {headline} {score:.2f} %. These images chose it, so \
expect slightly less on new ones. With the folder of the run, `predict`, `evaluate` and `export` take it \
too; `--which last` takes the last round."""


def model_card(summary: Metrics, about: Mapping[str, Any]) -> str:
    """The card of a finished run, from its summary and the metadata of its model file."""
    facts = "\n".join(f"| {name} | {cell(value)} |" for name, value in facts_of(summary, about).items())
    tables, tested = [table(summary)], on_test_images(summary)
    if tested is not None:
        tables += ["On the coordinator's test images:", table(tested)]
    if summary["history"][-1].get("sites"):
        tables += [about_sites(summary), site_table(summary)]
    if summary.get(BY_CLASS):
        tables += [about_classes(summary), class_table(summary[BY_CLASS])]
    return PAGE.format(
        method=cell(summary["method"]),
        data=cell(summary["data"]),
        classes=len(about["class_names"]),
        test=tested_on(summary),
        evaluations=counted(evaluations_averaged(summary), "evaluation"),
        version=summary["versions"]["fedhassle"],
        facts=facts,
        scores="\n\n".join(tables),
        best=about_best(summary),
        file="best.safetensors" if summary.get("best") else "model.safetensors",
    )


def about_best(summary: Metrics) -> str:
    """The paragraph on the model of the best round, if a federation's validation images chose one."""
    best, headline = summary.get("best"), summary["headline"]
    if best is None:
        return ""
    return BEST.format(round=best["round"], headline=cell(headline), score=100 * best["accuracy"][headline])


def table(summary: Metrics) -> str:
    """The accuracy of each prediction, in per cent."""
    lines = [
        f"| prediction | last {counted(evaluations_averaged(summary), 'evaluation')} | last round |",
        "|---|---|---|",
    ]
    for name, score in summary["accuracy"].items():
        bold = "**" if name == summary["headline"] else ""
        figures = f"{100 * score['mean_of_last']:.2f} | {100 * score['last']:.2f}"
        lines.append(f"| {bold}{cell(name)}{bold} | {figures} |")
    return "\n".join(lines)


def about_classes(summary: Metrics) -> str:
    """The line above the table of classes."""
    classes, by = len(summary[BY_CLASS]), f"with {cell(summary['headline'])}"
    place = " on the coordinator's test images" if is_federation(summary) else ""
    lowest = f" (the {MOST_NAMES} lowest of {classes:,})" if classes > MOST_NAMES else ""
    return f"By class{place}, {by}, mean of the same evaluations{lowest}:"


def class_table(found: Mapping[str, float | None]) -> str:
    """The accuracy on each class, in per cent; of many classes only the lowest."""
    lowest = sorted(found, key=lambda name: math.inf if (share := found[name]) is None else share)
    shown = {name: found[name] for name in found if name in lowest[:MOST_NAMES]}
    rows = [
        f"| {cell(name)} | {'–' if share is None else f'{100 * share:.1f}'} |"
        for name, share in shown.items()
    ]
    return "\n".join(["| class | accuracy |", "|---|---|", *rows])


def about_sites(summary: Metrics) -> str:
    """The lines above the table of sites."""
    more = "AUROC: mean over classes, each against the rest; ECE: calibration error; recall by class. "
    found = summary["history"][-1]["sites"].values()
    known, by_patient = (any(key in site for site in found) for key in ("recall", "effective"))
    worth = ", by patient where a site knows them" if by_patient else ""
    agreed = agreed_sites(summary)
    hidden = any(name not in agreed for name in summary["history"][-1]["sites"])
    dash = "Images: – where nobody has verified a site's count. " if hidden else ""
    return (
        f"Each site's own figures with {cell(summary['headline'])} at the last evaluation, as the sites "
        f"report them ((…): 95 % interval{worth}). {more if known else ''}{dash}Few validation images tell "
        "little."
    )


def site_table(summary: Metrics) -> str:
    """The figures of each site; of many sites those of the least accuracy."""
    found, headline, agreed = summary["history"][-1]["sites"], summary["headline"], agreed_sites(summary)
    worst = sorted(found, key=lambda name: found[name]["accuracy"][headline])[:MOST_NAMES]
    shown = {name: found[name] for name in found if name in worst}
    known = any("recall" in site for site in shown.values())
    heading = ["site", "images", "accuracy %", *(["AUROC", "ECE", "recall %"] if known else [])]
    rows = [site_row(name, site, headline, name in agreed)[: len(heading)] for name, site in shown.items()]
    return blocks.table([heading, *rows])


def site_row(name: str, site: Mapping[str, Any], headline: str, agreed: bool) -> list[str]:
    """A row of the table of sites; – for what a site does not report, and for a count that is not agreed."""
    interval, area = site.get("accuracy_95"), site.get("auroc")
    low_high = f" ({100 * interval[0]:.0f} – {100 * interval[1]:.0f})" if interval else ""
    recall = [f"{cell(label)} {100 * share:.0f}" for label, share in site.get("recall", {}).items()]
    return [
        *(
            cell(name),
            f"{site['count']:,}" if agreed else "–",
            f"{100 * site['accuracy'][headline]:.1f}{low_high}",
        ),
        *("–" if area is None else f"{area:.2f}", f"{site['ece']:.2f}" if "ece" in site else "–"),
        some_of(recall, MOST_NAMES) or "–",
    ]


def is_federation(summary: Mapping[str, Any]) -> bool:
    """True for the summary of a real federation, which names its sites."""
    return "sites" in summary


def tested_on(summary: Mapping[str, Any]) -> str:
    """The images of the accuracies in the card."""
    if not is_federation(summary):
        data = summary["settings"]["data"]
        holdout, of_whom = data.get("holdout"), "patients" if data.get("patients") else "training images"
        kind = f"{holdout:.0%} of the {of_whom}" if holdout else "the test images"
        return f"{kind} of {cell(summary['data'])}"
    sites, coordinator = validation_images(summary), "the test images of the coordinator"
    shown = summary["history"][-LAST:]
    fallbacks = sum(TEST_FALLBACK in metrics for metrics in shown)
    if fallbacks in (0, len(shown)):
        return coordinator if fallbacks else sites
    return f"{sites} (at {fallbacks} of {len(shown)} evaluations no site could evaluate: on {coordinator})"


def validation_images(summary: Mapping[str, Any]) -> str:
    """The validation images of a federation's sites, and the number of patients that they show."""
    known = [site[key] for site in agreed_sites(summary).values() if (key := "validation_patients") in site]
    people = f", of {counted(sum(known), 'patient')}" if known else ""
    of_some = f" at {len(known)} of them" if 0 < len(known) < len(summary["sites"]) else ""
    return f"the validation images of the sites{people}{of_some}"


def facts_of(summary: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, str]:
    """The table of facts about the training, by name."""
    channels, height, width = about["shape"]
    settings, machine = summary["settings"], summary["hardware"]
    place = "the sites' own machines" if is_federation(summary) else machine["gpu"] or machine["cpu"]
    return {
        "classes": some_of(about["class_names"], MOST_NAMES),
        "images": f"{height}×{width}, {'grey' if channels == 1 else 'colour'}; normalised with mean "
        f"{numbers(about['mean'])}, std {numbers(about['std'])} of pixels in 0 … 1{deep_images(about)}",
        "network": str(about["net"]),
        "method": ", ".join(f"{key}={value}" for key, value in settings["method"].items() if key != "name"),
        "sites": all_sites(summary, about["sites"]),
        "split": split(summary),
        "rounds": f"{summary['rounds']}, {sites_per_round(summary)}",
        **privacy(summary),
        "seed": str(summary["seed"]),
        "precision": str(settings["precision"]),
        "trained on": f"{place} in {summary['seconds'] / 60:.1f} minutes",
        "versions": ", ".join(f"{name} {version}" for name, version in summary["versions"].items()),
        "settings": f"hash {summary['settings_hash']}; see `config.toml`",
    }


def privacy(summary: Mapping[str, Any]) -> dict[str, str]:
    """The guarantee of differential privacy, if there is one."""
    found = summary.get("privacy")
    if found is None:
        return {}
    simulated = "" if is_federation(summary) else "; simulated: whoever knows the seed can remove the noise"
    return {
        "privacy": f"(ε = {found[EPSILON]:.2f}, δ = {found['delta']:g})-differentially private, by "
        f"{found['unit']}: noise {found['noise']:.3g}, clip {found['clip']:g}{simulated}; the weights alone, "
        "not the figures on this card"
    }


def sites(counts: Mapping[str, int]) -> str:
    """The number of sites of each kind."""
    kinds = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)
    return f"{sum(counts[kind] for kind in KINDS)} ({kinds})"


def all_sites(summary: Mapping[str, Any], counts: Mapping[str, int]) -> str:
    """The sites and what they hold; only their number if they hide the rest, and report counts of 1."""
    if summary["settings"].get("privacy", {}).get("hide"):
        everyone = sum(counts[kind] for kind in KINDS)
        return f"{everyone}, which hide how many images and labels they have{idle_sites(summary)}"
    return sites(counts) + (site_counts(summary) if is_federation(summary) else images(counts))


def images(counts: Mapping[str, int]) -> str:
    """The number of images of all sites, and of their patients if these are known."""
    people = f", of {counted(counts['patients'], 'patient')}" if "patients" in counts else ""
    labelled, unlabelled = counts["labelled_images"], counts["unlabelled_images"]
    return f"; {labelled:,} images with labels, {unlabelled:,} without{people}"


def agreed_sites(summary: Mapping[str, Any]) -> dict[str, Mapping[str, int]]:
    """The sites of a federation that were admitted with a number of images, which bounds what they count."""
    return {name: site for name, site in summary.get("sites", {}).items() if "agreed_images" in site}


def site_counts(summary: Mapping[str, Any]) -> str:
    """The images of a federation's sites, as far as they are agreed, and the sites that are not counted."""
    there = {name: site for name, site in summary["sites"].items() if site["rounds"]}
    agreed = [site for name, site in agreed_sites(summary).items() if name in there]
    words = idle_sites(summary)
    if len(agreed) < len(there):
        others = counted(len(there) - len(agreed), "site")
        words = f"; without the images of {others}, whose number nobody has verified{words}"
    if not agreed:
        return words
    known = [site["patients"] for site in agreed if "patients" in site]
    people = f", of {counted(sum(known), 'patient')}" if known else ""
    of_some = f" (known at {len(known)} of {len(agreed)} sites)" if 0 < len(known) < len(agreed) else ""
    totals = {key: sum(site[key] for site in agreed) for key in ("labelled", "unlabelled")}
    found = images({f"{key}_images": count for key, count in totals.items()})
    where = "" if len(agreed) == len(there) else f" at {counted(len(agreed), 'site')}"
    most = sum(site["agreed_images"] for site in agreed)
    return f"{found}{people}{of_some}, of at most {most:,} images agreed at admission{where}{words}"


def deep_images(about: Mapping[str, Any]) -> str:
    """The rule for grey images of more than 8 bits, if one is agreed."""
    rule = about.get("intensities")
    return f"; grey of more than 8 bits by {rule!r}" if rule else ""


def idle_sites(summary: Mapping[str, Any]) -> str:
    """The names of the sites of a federation that joined but contributed to no round."""
    names = [name for name, site in summary.get("sites", {}).items() if not site["rounds"]]
    return f"; without a contribution: {some_of(names, MOST_NAMES)}" if names else ""


def sites_per_round(summary: Mapping[str, Any]) -> str:
    """The number of sites in a round, drawn by a simulation or counted by a federation."""
    if not is_federation(summary):
        return f"{counted(summary['settings']['clients_per_round'], 'site')} in each"
    found = summary["sites_per_round"]
    least, most = found["least"], found["most"]
    if least == most:
        return f"{counted(most, 'site')} in each"
    return f"{least} to {most} sites in each (mean {found['mean']:.1f})"


def split(summary: Mapping[str, Any]) -> str:
    """The division of the images."""
    if is_federation(summary) or summary["data"].endswith("/"):  # or a folder of sites
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
    """Text escaped for a table of Markdown."""
    return " ".join(str(text).split()).replace("\\", "\\\\").replace("|", "\\|")
