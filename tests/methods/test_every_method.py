"""Requirements of every shipped method."""

import dataclasses
import logging
import re
import typing

import numpy as np
import pytest
import small
import torch
from on_devices import CLOSE, SAME, TERMS, relative, second_round
from on_devices import made as made_to_compare
from on_lanes import assert_lanes_train_as_eagerly, clients, pool
from small import TELLING, call, made, metrics_of, resolved, tensors_of

import fedhassle
from fedhassle.data.split.cuts import SPLIT_KINDS
from fedhassle.data.split.draw import split
from fedhassle.data.split.layout import PAPER
from fedhassle.data.split.split import pooled
from fedhassle.engine.client import train
from fedhassle.engine.evaluate import score
from fedhassle.engine.rounds import Plan, federate, takes_part
from fedhassle.engine.simulator import Simulator
from fedhassle.errors import UserError
from fedhassle.method import Client
from fedhassle.methods import METHODS
from fedhassle.methods.fedavg import FedAvg
from fedhassle.runs.resume import reopen
from fedhassle.settings.build import build_method

EVERY = pytest.mark.parametrize("name", METHODS)
TEACHERS = {"rscfed"}  # whose clients keep something between rounds
SPARSE = {"fedmatch"}  # whose messages are sparse, so that it is kept what a client holds


def words_of(name):
    written = {key: str(value).lower() for key, value in TELLING.get(name, {}).items()}
    return [f"method={name}", *(f"method.{key}={value}" for key, value in written.items())]


# Layouts


@pytest.fixture(scope="module")
def data():
    return small.dataset(train=400)


IDLE_UNLABELLED = "fedmatch, unlabelled idle"  # as it is by default


@pytest.mark.parametrize("labels", PAPER)
@pytest.mark.parametrize("name", [*METHODS, IDLE_UNLABELLED])
def test_it_trains_on_every_layout_of_the_paper(name, labels, data):
    """Twenty clients of about twenty samples, eight per round: models change and stay finite.

    The layouts alternate between the kinds of split.
    """
    method = made("fedmatch", unlabelled=False) if name == IDLE_UNLABELLED else made(name)
    kind = list(SPLIT_KINDS)[list(PAPER).index(labels) % len(SPLIT_KINDS)]
    parts = split(data.y_train, labels=labels, kind=kind, seed=1)
    kinds = {"full": 0, "partial": 0, "unlabelled": 0}
    simulator = Simulator(data, pooled(parts, method.pooled) if method.pooled else parts, 0, small.ENGINE)
    for client in simulator.clients:
        kinds[client.kind] += 1
    if not method.pooled:
        assert tuple(kinds.values()) == PAPER[labels][:3]
    start = method.initial(0)
    *_, last = federate(method, simulator, Plan(3, 8, 0), start)
    assert all(torch.isfinite(vector).all() for vector in last.state.values())
    trained = method.model(last.state)
    assert any(k not in start or not torch.equal(v, start[k]) for k, v in trained.items())
    images, y = torch.from_numpy(data.x_test), torch.from_numpy(data.y_test)
    scores = score(method, last.state, images, y, simulator.trainer.views).accuracy
    assert method.headline in scores and all(0 <= share <= 1 for share in scores.values())


IDLE = {  # by hand, from what the methods say of themselves, with the settings that they have by default
    **dict.fromkeys(("fedavg", "fedprox", "mixmatch", "fixmatch", "fedmatch", "local"), ("unlabelled",)),
    **dict.fromkeys(("rscfed", "hassle", "hassle+", "fixmatch-global", "sage"), ()),
    **dict.fromkeys(("central", "central-fixmatch"), ()),
}


@EVERY
def test_the_kinds_of_clients_that_it_does_not_use_are_logged_once(name, caplog):
    short = {"residual_steps": 1} if name == "hassle" else {}
    method = METHODS[name](net=small.net(), batch=32, epochs=1, **short)
    parts = pooled(small.SPLIT, method.pooled) if method.pooled else small.SPLIT
    simulator = Simulator(small.dataset(), parts, 0, small.ENGINE)
    with caplog.at_level(logging.INFO, "fedhassle"):
        rounds = list(federate(method, simulator, Plan(3, 6, 0), method.initial(0)))
    told = [record.getMessage() for record in caplog.records if "do not train" in record.getMessage()]
    assert [line.split()[:3] for line in told] == [["round", "1:", kind] for kind in IDLE[name]]
    asked = {reply.update.client.kind for done in rounds for reply in done.replies}
    there = {client.kind for client in simulator.clients}
    assert asked == there - set(IDLE[name])


@pytest.mark.parametrize("name", METHODS)
def test_a_client_that_holds_nothing_is_not_asked(name):
    """A split in a file may contain one; no batch can be drawn from it."""
    method = made(name)
    assert not takes_part(method, Client("nobody", 0, 0), 1)
    assert takes_part(method, Client("someone", 1, 1), 1)


CONFIDENT = {"fixmatch", "fedmatch", "hassle", "hassle+", "fixmatch-global", "sage", "central-fixmatch"}


@pytest.mark.parametrize("name", sorted(CONFIDENT))
def test_a_confidence_is_from_0_to_1(name):
    """With 95 it would silently learn from no unlabelled sample."""
    for value in (0.0, 0.95, 1.0):
        assert made(name, confidence=value).confidence == value
    for value in (95.0, 1.001, -0.1, float("nan")):
        with pytest.raises(UserError, match=rf"confidence must be in \[0, 1\], got {value}"):
            made(name, confidence=value)


def test_every_method_calls_its_threshold_confidence():
    having = {name for name in METHODS if hasattr(METHODS[name], "confidence")}
    assert having == CONFIDENT
    assert not any("threshold" in field.name for one in METHODS.values() for field in dataclasses.fields(one))


# Phases

PHASES = """
client      phase                streams                                      walk      lr momentum clip decay

fedavg
full        labelled             labelled 8 weak                              2 epochs  w 0.1 0.9 2 0
partial     labelled             labelled 8 weak                              2 epochs  w 0.1 0.9 2 0

fedprox
full        labelled             labelled 8 weak                              2 epochs  w 0.1 0.9 2 0
partial     labelled             labelled 8 weak                              2 epochs  w 0.1 0.9 2 0

mixmatch
full        labelled             labelled 8 weak                              2 epochs  w 0.1 0.9 2 0
partial     both                 unlabelled 8 weak weak + labelled 8 weak     2 epochs  w 0.1 0.9 2 0

fixmatch
full        labelled             labelled 8 weak                              2 epochs  w 0.1 0.9 2 0
partial     both                 unlabelled 16 weak strong + labelled 8 weak  2 epochs  w 0.1 0.9 2 0

fedmatch
full        labelled             labelled 8 weak                              2 epochs  sigma 0.05 0 20 0
                                                                                        psi 0.05 0 2 0
partial     both                 labelled 8 weak + unlabelled 48 weak strong  2 epochs  sigma 0.05 0 20 0
                                                                                        psi 0.05 0 2 0

fedmatch unlabelled=true
full        labelled             labelled 8 weak                              2 epochs  sigma 0.05 0 20 0
                                                                                        psi 0.05 0 2 0
partial     both                 labelled 8 weak + unlabelled 48 weak strong  2 epochs  sigma 0.05 0 20 0
                                                                                        psi 0.05 0 2 0
unlabelled  unlabelled           unlabelled 8 weak strong                     2 epochs  psi 0.05 0 2 0

rscfed
full        labelled             labelled 8 weak                              2 epochs  w 0.03 0.9 2 0
partial     both                 unlabelled 8 weak weak + labelled 8 weak     2 epochs  w 0.03 0.9 2 0
unlabelled  unlabelled           unlabelled 8 weak weak                       2 epochs  w 0.021 0.9 5 0

rscfed partial=labelled_only
full        labelled             labelled 8 weak                              2 epochs  w 0.03 0.9 2 0
partial     labelled             labelled 8 weak                              2 epochs  w 0.03 0.9 2 0
unlabelled  unlabelled           unlabelled 8 weak weak                       2 epochs  w 0.021 0.9 5 0

hassle residual_steps=13
full        labelled             labelled 8 weak                              2 epochs  w_S 0.1 0.9 2 0
full        labelled residual    labelled 8 weak                              13 steps  r_US 0.1 0.9 2 0.0001
partial     labelled             labelled 8 weak                              2 epochs  w_S 0.1 0.9 2 0
partial     labelled residual    labelled 8 weak                              13 steps  r_US 0.1 0.9 2 0.0001
partial     unlabelled           unlabelled 8 weak                            2 epochs  w_U 0.1 0.9 2 0
partial     unlabelled residual  unlabelled 8 weak                            13 steps  r_SU 0.1 0.9 2 0.0001
unlabelled  unlabelled           unlabelled 8 weak                            2 epochs  w_U 0.1 0.9 2 0
unlabelled  unlabelled residual  unlabelled 8 weak                            13 steps  r_SU 0.1 0.9 2 0.0001

hassle+ unlabelled_epochs=3
full        labelled             labelled 8 strong                            2 epochs  w_S 0.1 0.9 2 0
full        full                 labelled 8 strong                            3 epochs  w_U 0.1 0.9 2 0
partial     labelled             labelled 8 strong                            2 epochs  w_S 0.1 0.9 2 0
partial     partial              unlabelled 16 strong + labelled 8 strong     3 epochs  w_U 0.1 0.9 2 0
unlabelled  unlabelled           unlabelled 16 strong                         3 epochs  w_U 0.1 0.9 2 0

fixmatch-global
full        labelled             labelled 8 weak                              2 epochs  w 0.1 0.9 2 0
partial     both                 unlabelled 16 weak strong + labelled 8 weak  2 epochs  w 0.1 0.9 2 0
unlabelled  unlabelled           unlabelled 16 weak strong                    2 epochs  w 0.1 0.9 2 0

sage
full        labelled             labelled 8 weak                              2 epochs  w 0.1 0.9 2 0
partial     both                 unlabelled 16 weak strong + labelled 8 weak  2 epochs  w 0.1 0.9 2 0
unlabelled  unlabelled           unlabelled 16 weak strong                    2 epochs  w 0.1 0.9 2 0

central steps=7
full        labelled             labelled 8 weak                              7 steps   w 0.1 0.9 2 0
partial     labelled             labelled 8 weak                              7 steps   w 0.1 0.9 2 0

central-fixmatch steps=7
full        labelled             labelled 8 weak                              7 steps   w 0.1 0.9 2 0
partial     both                 unlabelled 16 weak strong + labelled 8 weak  7 steps   w 0.1 0.9 2 0

local
full        labelled             labelled 8 weak                              2 epochs  w 0.1 0.9 2 0
partial     labelled             labelled 8 weak                              2 epochs  w 0.1 0.9 2 0
"""
BLOCKS = dict(block.split("\n", 1) for block in re.sub("\n +", " + ", PHASES.strip()).split("\n\n")[1:])
SGD_COLUMNS = ("lr", "momentum", "clip", "decay")
CLIENTS = {"full": Client("f", 40, 0), "partial": Client("p", 10, 70), "unlabelled": Client("u", 0, 90)}


def written(phase):
    """A phase as a line of the table."""
    streams = [" ".join([stream.part, str(stream.batch), *stream.views]) for stream in phase.streams]
    descents = [
        (d.train, *(f"{d.optimiser._asdict()[key]:g}" for key in SGD_COLUMNS)) for d in phase.descents
    ]
    walk = [f"{value} {word}" for value, word in ((phase.epochs, "epochs"), (phase.steps, "steps")) if value]
    return phase.name, " + ".join(streams), *walk, " + ".join(map(" ".join, descents))


@pytest.mark.parametrize("words", BLOCKS)
def test_what_each_kind_of_client_trains_on_and_how(words):
    """With batches of 8, two epochs and clip=2; rates and ratios are each method's own."""
    name, *changes = words.split()
    changes = ["batch=8", "epochs=2", "clip=2", *changes]
    chosen = resolved(f"method={name}", *(f"method.{change}" for change in changes)).method
    method = build_method(chosen.name, chosen.settings, small.net())
    found = [
        (kind, *written(phase)) for kind, client in CLIENTS.items() for phase in method.phases(client, 1)
    ]
    assert found == [tuple(re.split(" {2,}", line)) for line in BLOCKS[words].splitlines()]


def test_the_phases_of_every_method_are_written_down():
    assert {words.split()[0] for words in BLOCKS} == METHODS.keys()


# Engines


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("fedavg", "fedprox", "hassle")])
def test_its_steps_on_lanes_are_those_one_by_one(name, count, global_randomness):
    """Bit for bit, three rounds with client state; the other methods are in `test_gpu_lanes`."""
    method = made(name, epochs=2)
    state = assert_lanes_train_as_eagerly(pool(count), method, clients()[:3], rounds=3)
    assert not small.same(method.model(state), method.model(method.initial(0)))


@pytest.mark.parametrize(("name", "weight", "kinds"), TERMS)
def test_the_gpu_tests_would_notice_a_missing_term(name, weight, kinds):
    """Without the term a step of these clients, and no others, differs by more than the GPU tests allow."""
    method = made_to_compare(name, small.ConvNet)
    without = dataclasses.replace(method, **{weight: 0.0})
    seen = set()
    for _, *one in second_round(method, small.CPU):
        found, other = train(method, *one)[0].arrays, train(without, *one)[0].arrays
        if any(not torch.allclose(found[k], other[k], **CLOSE) for k in other):
            assert max(relative(found[k], other[k]) for k in other) > 10 * SAME
            seen.add(one[0].client.kind)
        else:
            assert small.same(found, other)
    assert seen == {*kinds}


def test_the_gpu_tests_would_notice_missing_helpers():
    fedmatch = made_to_compare("fedmatch", small.ConvNet)
    for method, site, message, *rest in second_round(fedmatch, small.CPU):
        alone = {k: v for k, v in message.items() if not k.startswith("helper")}
        assert (len(alone) < len(message)) == (site.client.kind != "full")
        if len(alone) < len(message):
            found, other = (train(method, site, sent, *rest)[0].arrays["psi"] for sent in (message, alone))
            assert not torch.allclose(found, other, **CLOSE)
            assert relative(found, other) > 10 * SAME


# Runs


@pytest.fixture(scope="module", params=METHODS)
def run(request, without_residuals, tmp_path_factory):
    """The name of a method, the words of a run of four rounds, and its folder."""
    name = request.param
    words = [*without_residuals, *words_of(name)]
    folder = tmp_path_factory.mktemp("runs") / name
    code, _, err = call("run", *words, "--out", folder)
    assert (code, err) == (0, "")
    return name, words, folder


@pytest.mark.parametrize("rounds", [1, 3])
def test_an_interrupted_run_ends_in_the_same_bits(rounds, run, tmp_path):
    name, words, whole = run
    small.cut(words, tmp_path / "run", rounds)
    assert call("resume", tmp_path / "run")[0] == 0
    small.assert_same_result(tmp_path / "run", whole)
    assert bool(small.kept_by(whole)) == (name in TEACHERS | SPARSE)


def test_its_saved_model_has_the_reported_accuracy(run, images):
    """For `local` it is the mean of the accuracies of the clients."""
    name, _, folder = run
    with np.load(images) as file:
        x, y = file["x_test"], file["y_test"]
    model = fedhassle.load(folder / "model.safetensors")
    said = metrics_of(folder)[-1]["accuracy"]
    assert model.state.keys() == tensors_of(folder / "model.safetensors").keys()

    def right(mode):
        return float((model.predict(x, mode=mode).classes == y).mean())

    if name == "local":
        own = [name for name in model.state if name != "w"]
        assert said == {"mean": pytest.approx(sum(map(right, own)) / len(own))} and len(own) > 1
    else:
        assert said == {mode: right(mode) for mode in said}
    probabilities = model.predict(x).probabilities
    np.testing.assert_allclose(probabilities.sum(1), 1, rtol=1e-5)


def test_its_saved_model_contains_only_what_prediction_needs(run):
    """No arrays of single clients and of earlier rounds, except HASSLE's duals."""
    name, _, folder = run
    expected = {
        "fedmatch": {"sigma", "psi"},
        "hassle": {"w_S", "w_U", "r_US", "r_SU", "w_S_before", "w_U_before"},
        "hassle+": {"w_S", "w_U", "m_S", "m_U"},
        "local": {"w", *(f"w of client {k}" for k in (1, 2, 3))},
    }
    assert tensors_of(folder / "model.safetensors").keys() <= expected.get(name, {"w"})


def test_settings_that_a_method_leaves_open_come_from_the_run():
    """`central` takes its steps from the run, `mixmatch` its rounds, `hassle+` its start, unless given.

    With batches of 128 and ten epochs the clients pass over their labels in 10·(8 + 1) = 90 steps, over what
    FixMatch-global has them walk in 10·(8 + 4 + 1) = 130; two of three are drawn.
    """
    clients = [Client("full", 1000, 0), Client("partial", 100, 1000), Client("unlabelled", 0, 200)]

    def made(*words):
        chosen = resolved(*words).method
        return build_method(chosen.name, chosen.settings, small.net())

    for name in METHODS:
        alone = made(f"method={name}")
        taken = {
            "central": {"steps": 60},
            "central-fixmatch": {"steps": 87},
            "mixmatch": {"rounds": 30},
            "hassle+": {"start": 9},
        }.get(name, {})
        assert all(getattr(alone, key) is None for key in taken)
        assert alone.for_run(30, clients, 2) == dataclasses.replace(alone, **taken)
    assert made("method=mixmatch", "method.rounds=7").for_run(30, clients, 2).rounds == 7
    assert made("method=central", "method.steps=3").for_run(30, clients, 2).steps == 3
    assert made("method=hassle+", "method.start=0").for_run(30, clients, 2).start == 0
    assert made("method=central").for_run(30).steps is None


def test_a_field_with_the_name_of_a_run_setting_is_not_filled_in():
    @dataclasses.dataclass(frozen=True)
    class Limited(FedAvg):
        steps: int | None = None  # no limit

    limited = Limited(small.net())
    assert limited.for_run(30, [Client("any", 9, 0)], 1) is limited


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [("mixmatch", "rounds", 4), ("central", "steps", 3), ("central-fixmatch", "steps", 7)],
)
def test_a_run_fills_in_open_settings(name, field, value, without_residuals, tmp_path):
    """Four rounds, four of six clients per round; 3 + 1 + 1 batches of labels, 4/6 of which are 3.

    FixMatch-global walks 3 of labels and 1 + 1 + 2 + 2 + 2 of twice the size, 4/6 of which are 7.
    """
    small.cut([*without_residuals, f"method={name}"], tmp_path / "run", 1)
    assert getattr(reopen(tmp_path / "run").method, field) == value


# Settings


def numeric(name):
    """The fields of a method that are numbers."""
    hints = typing.get_type_hints(METHODS[name])
    fields = [f.name for f in dataclasses.fields(METHODS[name])]
    plain = {field: set(typing.get_args(hints[field])) or {hints[field]} for field in fields}
    return [field for field, kinds in plain.items() if kinds & {int, float} and bool not in kinds]


POSITIVE = {  # of these 0 is refused as well; of the others it means that something is left out
    *("batch", "epochs", "lr", "ratio", "temperature", "alpha", "rounds", "helper_rounds", "unlabelled_lr"),
    *("subsets", "subset_size", "boost", "tau", "residual_steps", "residual_width", "halving", "steps"),
    *("unlabelled_epochs", "horizon", "trim"),
}


@pytest.mark.parametrize(("name", "field"), [(name, field) for name in METHODS for field in numeric(name)])
def test_a_wrong_number_is_an_error_that_names_the_setting(name, field):
    def build(value):
        settings = resolved(f"method={name}", f"method.{field}={value}").method
        return build_method(settings.name, settings.settings, small.net())

    for value in ("many", "nan", "inf", "-1", *(("0",) if field in POSITIVE else ())):
        with pytest.raises(UserError, match=rf"^method\.{field}\b"):
            build(value)
    if field not in POSITIVE:
        assert getattr(build("0"), field) == 0


@EVERY
def test_a_typo_in_its_name_suggests_the_right_one(name):
    for slip in {name[:-1], name.upper()} - METHODS.keys():  # hassle is a method too
        with pytest.raises(UserError, match=re.escape(f"unknown method '{slip}', did you mean '{name}'")):
            resolved(f"method={slip}")


REFERENCES = ("central", "central-fixmatch", "local")


@pytest.mark.parametrize("name", [name for name in METHODS if name not in REFERENCES])
def test_its_first_line_mentions_unlabelled_clients(name):
    """`fedhassle methods` prints it."""
    first = METHODS[name].__doc__.splitlines()[0]
    assert "unlabelled" in first
    assert first.endswith(".") and len(first) <= 110 and first in call("methods")[1]


@pytest.mark.parametrize("name", REFERENCES)
def test_a_reference_says_that_it_is_one(name):
    first = METHODS[name].__doc__.splitlines()[0]
    assert first.startswith("A reference: ") and "label" in first and first in call("methods")[1]
