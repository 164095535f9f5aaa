"""A site that knows its patients: what it keeps for validation, and what it tells of them."""

import csv
import logging
from dataclasses import replace

import federations
import numpy as np
import pytest
from PIL import Image

from fedhassle.federation.agreement import write_agreement
from fedhassle.federation.messages import Hits, Payload, RefusedError, introduction, read_hits
from fedhassle.federation.server.federation import site_entry
from fedhassle.federation.site.configured import SECRET, site_node
from fedhassle.predict.scores import wilson


def site(tmp_path, patients="column", run="", **terms):
    """The configuration of a site with 29 patients of four images each, one of them unlabelled."""
    folder, rng, rows = tmp_path / "images", np.random.default_rng(0), []
    folder.mkdir()
    for k in range(116):
        Image.fromarray(rng.integers(0, 256, (12, 12), np.uint8)).save(folder / f"{k:03}.png")
        rows.append([f"{k:03}.png", "" if k % 4 == 3 else "ab"[k // 4 % 2], f"Patient {k // 4:02} of ours"])
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("file", "label", "patient"), *rows])
    agreement = federations.terms(run=run)
    data = replace(agreement.data, **{"patients": patients, "validation": 0.1} | terms)
    write_agreement(replace(agreement, data=data), tmp_path / "federation.toml")
    words = {"data": "images", "file": "federation.toml", "memory": "node/memory"}
    return {"site": "north", "device": "cpu"} | {key: str(tmp_path / word) for key, word in words.items()}


def rows(node):
    """The rows of the images of a site, by use."""
    return node.images.now.rows


def test_patients_stay_together_after_a_restart_too_and_only_their_number_is_told(tmp_path, caplog):
    config = site(tmp_path)
    with caplog.at_level(logging.DEBUG, "fedhassle"):
        node, again = site_node(config), site_node(config)
        told = node.introduce(Payload({})).words
    uses = [{row // 4 for row in use} for use in rows(node)]  # by patient
    assert not uses[2] & (uses[0] | uses[1]) and len(uses[2]) == 3 and uses[0] == uses[1]
    assert all((one == other).all() for one, other in zip(rows(node), rows(again), strict=True))
    assert (told["patients"], told["validation_patients"], told["validation"]) == (29, 3, 9)
    assert "Patient" not in caplog.text and "Patient" not in str(told)
    secret = tmp_path / "node" / SECRET
    secret.write_text("00" * 32)
    other = site_node(config)
    assert len(rows(other).validation) == 9 and (rows(other).validation != rows(node).validation).any()


def test_a_site_without_an_agreement_on_patients_draws_by_pixels_and_counts_none(tmp_path, caplog):
    config = site(tmp_path, patients=None)
    node = site_node(config)
    assert "patients" not in node.introduce(Payload({})).words and "agree on patients" in caplog.text
    assert not (tmp_path / "node" / SECRET).exists()
    assert len({row // 4 for row in rows(node).validation} & {row // 4 for row in rows(node).labelled}) > 0


def test_numbers_of_patients_are_coarse_if_agreed(tmp_path):
    told = site_node(site(tmp_path, coarse_counts=True)).introduce(Payload({})).words
    assert (told["patients"], told["validation_patients"]) == (32, 4)


def test_sites_that_hide_their_counts_tell_no_numbers_of_patients(tmp_path):
    run = "method.name = 'fedavg'\nprivacy = {masks = true, hide = true}\n"
    told = site_node(site(tmp_path, run=run, validation=0.0)).introduce(Payload({})).words
    assert (told["labelled"], told["unlabelled"], told["validation"]) == (1, 1, 0)
    assert not {"patients", "validation_patients"} & told.keys()


def test_the_server_reads_numbers_of_patients_and_refuses_impossible_ones(tmp_path):
    told = site_node(site(tmp_path)).introduce(Payload({})).words
    assert introduction(told).patients == {"patients": 29, "validation_patients": 3}
    assert introduction({key: told[key] for key in told if "patients" not in key}).patients == {}
    for change in ({"patients": 10**9}, {"validation_patients": 19}, {"patients": -1}, {"patients": "29"}):
        with pytest.raises(RefusedError, match="patients"):
            introduction(told | change)


def test_the_interval_of_a_site_is_by_patient():
    """Twelve images that are worth four: Wilson's interval of 9/12 as if of four images."""
    words = {"right": {"model": 9}, "count": 12}
    assert read_hits(words, 12, ["model"]) == Hits({"model": 9}, 12, None)
    hits = read_hits(words | {"effective": 4}, 12, ["model"])
    method = federations.method_named("fedavg")
    entry = site_entry(method, hits)
    assert entry["effective"] == 4 and entry["accuracy_95"] == pytest.approx(list(wilson(3, 4)))
    assert "effective" not in site_entry(method, Hits({"model": 9}, 12))
    for wrong in (0, 25, -1, 1.5):
        with pytest.raises(RefusedError):
            read_hits(words | {"effective": wrong}, 12, ["model"])
