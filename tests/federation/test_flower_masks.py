"""Masks and noise over the real runtime, with a site that is killed in mid-round and comes back."""

import json

import pytest
import small
import test_flower
from test_flower import ROGUE, SITES, Deployment, agreement, simulated

from fedhassle.engine.privacy.account import spent
from fedhassle.federation.agreement import write_agreement
from fedhassle.federation.masks.contribution import LIMIT
from fedhassle.federation.masks.ring import step_of
from fedhassle.federation.masks.signatures import PEERS
from fedhassle.federation.setup.admission import admit_site
from fedhassle.files import write_text

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flower")]

MASKS = {"masks": True}
MASKS_AND_NOISE = {"masks": True, "noise": 2.0, "clip": 0.01}


class Masked(Deployment):
    """Sites that agreed on masks, later on noise too; none has so many labels that a sum shows them."""

    labelled, privacy = {**SITES, "full": 40}, MASKS

    def agree(self):
        """Writes the agreement for the sites; a node reads it when it starts."""
        write_agreement(agreement(self.address, privacy=self.privacy), self.files.agreement)

    def submit(self, name, **rules):
        return super().submit(name, privacy=self.privacy, **rules)


@pytest.fixture
def masked(tmp_path, monkeypatch):
    test_flower.with_rogue(monkeypatch)
    made = Masked(tmp_path)
    with made.stack:
        made.agree()
        for name in SITES:
            key = made.key(name)
            admit_site(made.files.path, name, key)
            write_text(made.files.path / PEERS / f"{name}.pub", key)  # so all keys must be signed
        made.start_link()
        yield made


def test_masked_rounds_are_plain_ones_and_with_noise_survive_a_site_that_is_killed(masked):
    """A round under masks; then, with a new agreement, three with noise, one without a site.

    The masked round adds the rounding of three sites. More rounds are not compared: training enlarges
    differences without a bound.
    """
    masked.submit("masked", rounds=1, every=1, minimum=3)
    masked.finish("masked")
    found, expected = small.tensors_of(masked.folder / "masked" / "model.safetensors"), simulated(masked, 1)
    for name, vector in expected.items():
        assert (found[name] - vector).abs().max() < 3 / 2 * step_of(LIMIT, 3) + 1e-7, name
        assert vector.abs().max() > 1e-3

    for node in masked.nodes.values():
        node.terminate()
        node.wait(test_flower.LIMIT)
    masked.privacy = MASKS_AND_NOISE
    masked.agree()
    masked.orders({"2 vectors": "sleep"})
    masked.submit("noisy", rounds=3, every=3, minimum=2)
    masked.until("noisy", (masked.folder / f"{ROGUE}.asleep").exists, "training in round 2 at the site")
    masked.nodes[ROGUE].kill()
    masked.until("noisy", lambda: len(masked.events("noisy", "round")) > 1, "the end of round 2")
    masked.orders({})
    masked.ensure_nodes()  # two sites are too few for masks: the run waits for the third
    masked.finish("noisy")
    rounds = masked.events("noisy", "round")
    assert [event["contributed"] for event in rounds] == [
        sorted(SITES),
        ["full", "unlabelled"],
        sorted(SITES),
    ]
    summary = json.loads((masked.folder / "noisy" / "summary.json").read_text())
    assert summary["privacy"]["epsilon"] == spent(2.0, 1.0, 3, 1e-5)
    (line,) = small.metrics_of(masked.folder / "noisy")
    assert line["epsilon"] == summary["privacy"]["epsilon"] and not any(line["loss"].values())
