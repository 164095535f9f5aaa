"""The model card."""

import re

import pytest
from small import call, summary_of

import fedhassle
from fedhassle.runs.card import model_card
from fedhassle.runs.record import TEST_FALLBACK


def took_part(least=3, most=3, mean=3.0, **rounds):
    """The entries about sites in a federation's summary, given the rounds that each contributed to."""
    sites = {name: {"labelled": 9, "unlabelled": 1, "rounds": n} for name, n in rounds.items()}
    return {"sites": sites, "sites_per_round": {"least": least, "most": most, "mean": mean}}


@pytest.fixture(scope="module")
def made(finished):
    """The summary of a finished run, and the metadata of its model."""
    return summary_of(finished[0]), fedhassle.load(finished[0]).about


def facts(card):
    """The table of facts."""
    return dict(re.findall(r"^\| ([a-z ]+) \| (.*) \|$", card, re.MULTILINE))


def test_a_run_writes_the_card_of_its_model(finished, made):
    assert (finished[0] / "model.md").read_text("utf-8") == model_card(*made)


def test_the_card_has_the_facts_of_the_training(made):
    summary, about = made
    card = model_card(summary, about)
    assert card.startswith("# hassle on small.npz\n")
    found = facts(card)
    assert found["sites"] == "6 (1 full, 2 partial, 3 unlabelled); 72 images with labels, 168 without"
    assert found["rounds"] == "4, 4 sites in each" and found["seed"] == "0"
    assert found["classes"] == "0, 1, 2, 3" and found["network"] == "lenet"
    assert found["images"].startswith("12×12, grey; normalised with mean 0.")
    assert "residual_steps=2" in found["method"] and "tau=2.0" in found["method"]
    assert "kind=authors" in found["split"] and summary["split_hash"][:12] in found["split"]
    assert summary["hardware"]["cpu"] in found["trained on"]
    assert all(f"{name} {version}" in found["versions"] for name, version in summary["versions"].items())
    assert summary["settings_hash"] in found["settings"]


def test_the_card_has_the_accuracies(made):
    summary, about = made
    rows = re.findall(
        r"^\| \**(\w+)\** \| ([\d.]+) \| ([\d.]+) \|$", model_card(summary, about), re.MULTILINE
    )
    expected = [
        (name, f"{100 * score['mean_of_last']:.2f}", f"{100 * score['last']:.2f}")
        for name, score in summary["accuracy"].items()
    ]
    assert "| prediction | last 2 evaluations | last round |" in model_card(summary, about)
    longer = {**summary, "history": summary["history"] * 6}
    assert "last 10 evaluations" in model_card(longer, about)
    assert rows == expected and "| **EM** |" in model_card(summary, about)


def test_the_card_has_the_accuracy_on_each_class(made):
    summary, about = made
    found = {"cat": 0.5, "d|g": 0.125, "no image": None}
    card = model_card({**summary, "class_accuracy": found}, about)
    table = "| class | accuracy |\n|---|---|\n| cat | 50.0 |\n| d\\|g | 12.5 |\n| no image | – |\n"
    assert f"By class, with EM, mean of the same evaluations:\n\n{table}\n## Intended" in card
    assert all(
        f"\n| {k} | {100 * share:.1f} |" in model_card(*made)
        for k, share in made[0]["class_accuracy"].items()
    )
    federated = model_card({**summary, **took_part(north=4)}, about)
    assert "\nBy class on the coordinator's test images, with EM, mean of" in federated
    old = {key: value for key, value in summary.items() if key != "class_accuracy"}
    assert "By class" not in model_card(old, about) and "By class" not in model_card(
        {**old, "class_accuracy": {}}, about
    )


def test_of_many_classes_the_card_has_the_lowest(made):
    summary, about = made
    found = {f"class {k}": (k * 7 % 40) / 40 for k in range(40)}
    card = model_card({**summary, "class_accuracy": found}, about)
    assert "(the 30 lowest of 40):" in card
    rows = re.findall(r"^\| (class \d+) \| ([\d.]+) \|$", card, re.MULTILINE)
    assert [name for name, _ in rows] == [name for name, share in found.items() if share < 0.75]


def test_the_card_names_the_test_images(made):
    summary, about = made
    assert "the test images of small.npz" in model_card(summary, about)
    data = {**summary["settings"]["data"], "holdout": 0.1}
    held = {**summary, "settings": {**summary["settings"], "data": data}}
    assert "10% of the training images of small.npz" in model_card(held, about)


def test_the_card_of_a_federations_model_knows_its_sites(made):
    """The server does not know the split, and the accuracies are those of the sites."""
    summary, about = made
    card = model_card({**summary, **took_part(north=4, south=4, east=4)}, about)
    found = facts(card)
    assert found["split"].startswith("none")
    assert found["rounds"] == "4, 3 sites in each"
    assert found["trained on"].startswith("the sites' own machines in ")
    assert "the validation images of the sites" in card


def test_the_card_counts_sites_by_what_they_contributed(made):
    summary, about = made
    found = facts(model_card({**summary, **took_part(2, 3, 2.75, north=4, south=4, east=3)}, about))
    assert found["rounds"] == "4, 2 to 3 sites in each (mean 2.8)" and "contribution" not in found["sites"]
    found = facts(model_card({**summary, **took_part(1, 1, 1.0, north=4, south=0, east=0)}, about))
    assert found["rounds"] == "4, 1 site in each"
    assert found["sites"].endswith("without a contribution: south, east")


def test_the_card_repeats_only_counts_that_are_agreed_at_admission(made):
    summary, about = made
    sites = took_part(north=4, south=3, east=2, west=0)
    lines = [{**summary["history"][-1], "sites": {}}]
    for name in ("north", "south"):
        lines[0]["sites"][name] = {"accuracy": {"EM": 0.5}, "count": 77, "accuracy_95": [0.4, 0.6]}
    federation = {**summary, **sites, "history": lines}
    card = model_card(federation, about)
    kinds, without = "6 (1 full, 2 partial, 3 unlabelled)", "; without a contribution: west"
    assert (
        facts(card)["sites"]
        == f"{kinds}; without the images of 3 sites, whose number nobody has verified{without}"
    )
    assert "77" not in card and "| north | – | 50.0 (40 – 60) |" in card
    hidden = {**federation, "settings": {**summary["settings"], "privacy": {"hide": True}}}
    assert (
        facts(model_card(hidden, about))["sites"]
        == f"6, which hide how many images and labels they have{without}"
    )
    north = {"agreed_images": 5000, "labelled": 1234, "patients": 50, "validation_patients": 6}
    sites["sites"]["north"] |= north
    card = model_card({**federation, **sites}, about)
    assert (
        facts(card)["sites"]
        == f"{kinds}; 1,234 images with labels, 1 without, of 50 patients, of at most 5,000 images agreed "
        f"at admission at 1 site; without the images of 2 sites, whose number nobody has verified{without}"
    )
    assert "| north | 77 |" in card and "| south | – |" in card
    assert "On the validation images of the sites, of 6 patients at 1 of them, " in card
    for name in ("south", "east"):
        sites["sites"][name]["agreed_images"] = 100
    found = facts(model_card({**federation, **sites}, about))["sites"]
    assert found == (
        f"{kinds}; 1,252 images with labels, 3 without, of 50 patients (known at 1 of 3 sites), of at most "
        f"5,200 images agreed at admission{without}"
    )


def test_the_card_of_a_federations_model_names_the_images_it_was_evaluated_on(made):
    summary, about = made
    lines = summary["history"]
    fallbacks = [{**metrics, TEST_FALLBACK: True} for metrics in lines]
    for history, expected in (
        (lines, "On the validation images of the sites, "),
        (fallbacks, "On the test images of the coordinator, "),
        (fallbacks + 5 * lines, "On the validation images of the sites, "),
        (lines + fallbacks[:1], "On the validation images of the sites (at 1 of 3 evaluations "),
    ):
        assert expected in model_card({**summary, **took_part(north=4), "history": history}, about)


def test_the_card_has_the_accuracies_on_test_images_beside_validation(made):
    """Means of the last ten evaluations with a test; only if the last evaluation has one."""
    summary, about = made
    lines = [{**summary["history"][-1], "test": {"EM": k / 20, "SM": 0.5}} for k in range(12)]
    federation = {**summary, **took_part(north=4), "class_accuracy": {}}
    card = model_card({**federation, "history": summary["history"] + lines}, about)
    _, beside = card.split("On the coordinator's test images:\n\n")
    assert beside.startswith("| prediction | last 10 evaluations | last round |\n|---|---|---|\n")
    assert "| SM | 50.00 | 50.00 |\n| **EM** | 32.50 | 55.00 |\n\n## Intended" in beside  # as above it
    alone = [{**line, TEST_FALLBACK: True} for line in lines]
    for history in (summary["history"], lines + summary["history"], alone):
        assert "coordinator's test" not in model_card({**federation, "history": history}, about)


def test_the_limits_are_two_sentences(made):
    text = model_card(*made)
    limits = text[text.index("## Intended use and limits") :].split("\n\n")[1]
    assert limits.count(". ") == 1 and limits.endswith(".")
    assert "fedhassle evaluate" in limits and "no medical device" in limits


def test_no_name_breaks_the_card(made):
    summary, about = made
    odd = {
        **about,
        "class_names": ["a|b", "new\nline", *(f"class {k}" for k in range(60))],
        "mean": [0, 0, 0],
    }
    card = model_card({**summary, "data": "x|y.npz"}, {**odd, "shape": [3, 8, 9]})
    found = facts(card)
    assert found["classes"].startswith(r"a\|b, new line, class 0") and found["classes"].endswith(
        "and 32 more"
    )
    assert found["images"].startswith("8×9, colour; normalised with mean (0, 0, 0)")


def test_runs_with_a_split_file_and_with_pooled_data_have_cards(without_residuals, finished, tmp_path):
    words = [word for word in without_residuals if not word.startswith("split.")]
    words += [f"split.file={finished[0] / 'split.npz'}", "method=central", "rounds=1"]
    assert call("run", *words, "--out", tmp_path / "run")[0] == 0
    found = facts((tmp_path / "run" / "model.md").read_text("utf-8"))
    assert found["split"].startswith("from a file; sha256")
    assert found["sites"].startswith("6 (1 full")


def test_the_card_counts_patients_and_names_the_rule_for_deep_images(made):
    summary, about = made
    sites = took_part(north=4, south=4)
    for name, patients in (("north", 29), ("south", 8)):
        known = {"patients": patients, "validation_patients": patients // 8, "agreed_images": 10}
        sites["sites"][name] |= known
    card = model_card(summary | sites, about | {"intensities": "12 bits"})
    assert "On the validation images of the sites, of 4 patients, which took no part" in card
    assert ", of 37 patients, of at most 20 images" in facts(card)["sites"]
    assert facts(card)["images"].endswith("; grey of more than 8 bits by '12 bits'")
    del sites["sites"]["north"]["validation_patients"]
    assert "the sites, of 1 patient at 1 of them, which" in model_card(summary | sites, about)
