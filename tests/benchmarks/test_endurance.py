"""The hour of faults counts rounds rightly and draws every fault; a run of it takes an hour."""

import itertools
import subprocess
import sys
from random import Random

from benchmarks.endurance import FAULTS, PARTS, Fault, drawn_faults, found_parts, inject, tally


def done(t, *sites):
    return {"event": "round", "round": t, "contributed": list(sites)}


def test_rounds_are_counted_with_those_that_a_resumed_run_repeats():
    events = [done(1, "a", "b"), done(2, "a"), {"event": "resumed", "round": 1}, done(2, "a", "b")]
    assert tally(events, 2) == {
        **{"rounds": 3, "last": 2, "repeated": 1, "with all sites": 2, "with fewer": 1, "resumed": 1}
    }
    assert tally([], 2)["last"] == 0


def test_every_fault_comes_before_any_comes_again():
    first = list(itertools.islice(drawn_faults(0), 2 * len(FAULTS)))
    assert set(first[: len(FAULTS)]) == set(first[len(FAULTS) :]) == set(FAULTS)
    assert {fault.part for fault in FAULTS} == {*PARTS, "the database"}


def test_a_part_is_found_below_its_command_and_can_be_killed(tmp_path):
    word = PARTS["a worker"]
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()', '{word}'])"
    with subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE) as command:
        while not found_parts([command], "a worker"):
            assert command.poll() is None
        fault = Fault("kill", "a worker")
        assert inject(fault, [command], tmp_path / "state.db", Random(0))
        command.wait(600)
    assert not inject(fault, [command], tmp_path / "state.db", Random(0))
