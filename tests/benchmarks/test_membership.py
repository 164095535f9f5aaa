"""The attack on membership: exact cases, and runs whose claim it does not exceed."""

import math

import numpy as np
import pytest
import small

from benchmarks.membership import attack, attacked, least_epsilon


def test_an_attack_on_a_model_that_knows_nothing_achieves_nothing(rng):
    found = attack(rng.normal(size=4000), rng.normal(size=4000), 1e-5)
    assert abs(found.area - 0.5) < 0.04 and abs(found.advantage) < 0.08
    assert found.epsilon < 0.15


def test_an_attack_on_losses_that_differ_finds_how_much(rng):
    """Losses of N(0, 1) and N(2, 1): the best threshold is 1, with advantage Φ(1) − Φ(−1) = 0.683."""
    found = attack(rng.normal(size=20_000), rng.normal(2, 1, size=20_000), 1e-5)
    assert found.area == pytest.approx(0.921, abs=0.01)  # Φ(2/√2)
    assert found.advantage == pytest.approx(0.683, abs=0.02)
    # At a low threshold hardly any of the others is below it, so that only the intervals bound ε.
    assert 2.5 < found.epsilon < 6


def test_the_least_epsilon_is_the_log_of_the_ratio_within_its_intervals():
    """60 of 100 against 10 of 100, by Wilson's intervals: 0.5020 and 0.1744."""
    members, others = np.repeat([0.0, 1.0], [60, 40]), np.repeat([0.0, 1.0], [10, 90])
    assert least_epsilon(members, others, 0.5, 0.0) == pytest.approx(math.log(0.5020 / 0.1744), abs=0.002)
    assert least_epsilon(others, members, 0.5, 0.0) == 0.0


@pytest.mark.parametrize("privacy", [(), ("privacy.epsilon=4",)])
def test_an_attack_on_a_run_does_not_exceed_its_claim(privacy, without_residuals, images, tmp_path):
    out = tmp_path / "run"
    assert small.call("run", *without_residuals, "method=fedavg", *privacy, "--out", out)[0] == 0
    found, epsilon, delta = attacked(out)
    assert found.members > 0 and found.epsilon <= epsilon and delta == 1e-5
    assert math.isinf(epsilon) != bool(privacy)
