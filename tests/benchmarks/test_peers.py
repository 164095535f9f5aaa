"""The comparison with other simulators: the same work for all, and figures as computed by hand."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks.peers import our_rounds, plain_rounds
from benchmarks.peers.clock import RESULT, How, command, read
from benchmarks.peers.compare import figures, in_turn, missing, result_of, table
from benchmarks.peers.networks import build, n_parameters
from benchmarks.peers.parts import COLOUR, GREY, PARTS, Contender, small
from benchmarks.peers.work import CROP, MEAN, STD, Seen, Work, images_of
from fedhassle.nets import NETS, Net

TINY = Work("lenet", GREY, 3, 2, 20, 2, 8, 0.1, 0.9, True, "cpu", warmup=1, rounds=2)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("lenet", GREY, 61_706),
        ("unpadded lenet", COLOUR, 62_006),  # BlazeFL's
        ("dropout cnn", COLOUR, 1_626_442),  # pfl's
        ("resnet8", COLOUR, 1_227_594),
    ],
)
def test_the_networks_have_the_published_numbers_of_parameters(name, shape, expected):
    assert n_parameters(build(name, shape, 10)) == expected


@pytest.mark.parametrize(("name", "shape"), [("lenet", GREY), ("resnet8", COLOUR)])
def test_peers_train_the_same_network_as_ours(name, shape):
    module = build(name, shape, 10).eval()
    net, x = Net(NETS[name], shape, 10), torch.rand(4, *shape)
    assert torch.allclose(net.logits(net.flatten(module), x), module(x), atol=1e-4)


def test_peers_see_each_image_once_per_epoch():
    work = replace(TINY, augment=False)
    x, y = images_of(work, 1)
    images, labels = Seen(work, 1, channels_last=False).epoch()
    clean = torch.from_numpy((x / 255 - MEAN) / STD).float().permute(0, 3, 1, 2)
    gaps = (images[:, None] - clean[None]).abs().amax((2, 3, 4))  # (shown, own)
    order = gaps.argmin(1)
    assert gaps.amin(1).max() < 1e-5 and sorted(order.tolist()) == list(range(20))
    assert torch.equal(labels, torch.from_numpy(y)[order])


def test_peers_see_windows_of_reflected_images():
    x, _ = images_of(TINY, 0)
    seen = Seen(TINY, 0, channels_last=True)
    padded = np.pad(x, ((0, 0), (CROP, CROP), (CROP, CROP), (0, 0)), mode="reflect")
    assert np.array_equal(seen.pixels.numpy(), padded)
    images, _ = seen.epoch()
    assert images.shape == (20, 1, 28, 28)
    assert not torch.equal(images, seen.epoch()[0])


@pytest.mark.parametrize(
    ("contender", "how"), [(our_rounds, How()), (our_rounds, How(2)), (plain_rounds, How())]
)
def test_a_contender_reports_its_rounds_and_steps(contender, how, monkeypatch, capsys):
    """2 of 3 clients, 2 epochs of ⌈20/8⌉ batches: 12 steps."""
    monkeypatch.setattr(sys, "argv", command("any", TINY, how)[2:])
    threads = torch.get_num_threads()
    try:
        contender.main()
    finally:
        torch.set_num_threads(threads)
    line = capsys.readouterr().out.splitlines()[-1]
    result = json.loads(line.removeprefix(RESULT))
    assert result["steps"] == TINY.steps == 12 and result["parameters"] == 61_706
    assert [len(result[key]) for key in ("warmup", "rounds")] == [1, 2]
    assert all(one["seconds"] > 0 for one in result["rounds"])


def test_a_work_survives_the_command_line():
    how = How(4, "default", "bf16", mps=True)
    assert read(command("any", TINY, how)[-1]) == (TINY, how)


def printing(text):
    return [sys.executable, "-c", f"print({text!r})"]


def test_a_result_is_read_and_a_failure_is_told():
    assert result_of(printing(f'words\n{RESULT}{{"steps": 3}}'), 60) == {"steps": 3}
    assert result_of(printing("words"), 60) == {"error": "exit code 0", "output": "words\n"}
    failed = result_of([sys.executable, "-c", "raise SystemExit('gone')"], 60)
    assert failed == {"error": "exit code 1", "output": "gone\n"}
    slow = result_of([sys.executable, "-c", "import time; time.sleep(600)"], 0.1)
    assert slow == {"error": "took more than 0 s"}


def test_a_contender_that_failed_is_not_started_again():
    bad, worse = Contender("bad", "no_such_module"), Contender("worse", "no_such_module_either")
    found = [(one.name, result["error"]) for one, result in in_turn([bad, worse], TINY, 3, 60)]
    assert found == [("bad", "exit code 1"), ("worse", "exit code 1")]


def test_a_missing_package_is_named():
    assert missing(Contender("peer", "any", ("torch", "no_such_package"))) == "no_such_package"
    assert missing(Contender("peer", "any", ("torch",))) == ""


def rounds(*pairs):
    return {
        "rounds": [{"seconds": wall, "cpu_seconds": cpu} for wall, cpu in pairs],
        "steps": 5,
        "gpu_memory": None,
    }


def test_figures_are_medians_of_rounds_and_ratios_of_paired_repeats():
    """Ours 2 and 4 s, the peer 6 and 8 s: 3 and 2 times ours."""
    results = {
        "ours": [rounds((1, 1), (2, 1), (9, 1)), rounds((4, 1))],
        "peer": [rounds((6, 2)), rounds((8, 3))],
        "failed": [{"error": "exit code 1"}],
    }
    found = figures(results, "ours")
    assert found["peer"]["seconds"]["values"] == [6, 8]
    assert found["peer"]["seconds_over_ours"] == {"median": 2.5, "min": 2, "max": 3, "values": [3, 2]}
    assert found["peer"]["cpu_seconds_over_ours"]["values"] == [2, 3]
    assert found["ours"]["seconds_over_ours"]["values"] == [1, 1]
    assert found["failed"] == {"error": "exit code 1"}
    assert table({"part": "any", "figures": found}).row_count == 3
    without = figures({"ours": [{"error": "none"}], "peer": results["peer"]}, "ours")
    assert without["peer"]["seconds_over_ours"] is None


@pytest.mark.parametrize("name", PARTS)
def test_each_part_can_be_tried_on_a_cpu(name):
    part = small(PARTS[name])
    assert part.work.device == "cpu" and part.work.steps <= 8
    assert part.contenders[0].name == "fedhassle"
    assert {one.how.compile for one in part.contenders} == {"none"}
    names = [one.name for one in PARTS[name].contenders]
    assert len({*names}) == len(names)


def test_an_unknown_part_and_a_missing_gpu_are_refused(monkeypatch):
    import typer

    from benchmarks.peers.__main__ import main

    app = typer.Typer()
    app.command()(main)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, expected in ((["none"], "there is no part 'none'"), (["gpu"], "needs a GPU")):
        assert expected in str(CliRunner().invoke(app, words).exception)
