"""Algorithm 1 on the server: selection, merging, and updates that are dropped."""

import logging
from dataclasses import dataclass, replace

import numpy as np
import pytest
import small
import torch

from fedhassle.engine.device import Engine
from fedhassle.engine.evaluate import score
from fedhassle.engine.rounds import Plan, Reply, Required, federate, select
from fedhassle.errors import DivergedError
from fedhassle.method import Client, Descent, Update
from fedhassle.methods import Alone, FedAvg, FedMatch, Hassle, RSCFed
from fedhassle.nets import IMAGES_A_PASS
from fedhassle.runs.record import Evaluation, Tally, final_means, shortened

NET = small.net(small.Linear, side=3)
CLIENTS = tuple(Client(f"client {k}", 10, 5) for k in range(20))


def reply(client, values, samples):
    arrays = {name: torch.tensor(value) for name, value in values.items()}
    return Reply(Update(client, arrays, dict.fromkeys(arrays, samples), {}), bytes_down=3, bytes_up=7)


class Scripted:
    """A federation with scripted answers."""

    def __init__(self, answers, clients=None):
        self.answers, self.asked, self.went_back = answers, [], []
        self.clients = clients or tuple(Client(name, n, 0) for name, (n, _) in answers.items())

    def present(self):
        return self.clients

    def rewind(self, t):
        self.went_back.append(t)

    def train(self, method, messages, t):
        self.asked.append([client.name for client, _ in messages])
        return [reply(client, {"w": self.answers[client.name][1]}, client.labelled) for client, _ in messages]


def one_round(federation, state, method=None):
    return next(federate(method or FedAvg(NET), federation, Plan(1, 9), state))


# Updates that are not finite


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_an_update_that_is_not_finite_is_dropped_and_named(bad, caplog):
    """ann: 1 of weight 3; bob: bad in one entry; cat: 5 of weight 1. (3·1 + 1·5)/4 = 2."""
    federation = Scripted({"ann": (3, [1.0, 1.0]), "bob": (9, [1.0, bad]), "cat": (1, [5.0, 5.0])})
    with caplog.at_level(logging.INFO, logger="fedhassle"):
        done = one_round(federation, {"w": torch.zeros(2)})
    assert done.state["w"].tolist() == [2.0, 2.0]
    assert [r.update.client.name for r in done.replies] == ["ann", "cat"]
    assert [r.update.client.name for r in done.dropped] == ["bob"]
    assert [c.name for c in done.clients] == ["ann", "bob", "cat"]
    (warning,) = (r for r in caplog.records if r.levelno == logging.WARNING)
    assert "bob" in warning.getMessage() and "round 1" in warning.getMessage()
    assert "ann" not in warning.getMessage() and "cat" not in warning.getMessage()


def line_of(method, *rounds):
    """The metrics of some rounds."""
    tally = Tally(method)
    for done in rounds:
        tally.add(done)
    return tally.metrics(rounds[-1].t, Evaluation({"model": 0.5}), 1.0)


def test_the_bytes_of_a_dropped_update_count():
    """Two clients, one of which drops out: 3 bytes to each, 7 bytes from each."""
    federation = Scripted({"ann": (3, [1.0]), "bob": (9, [float("nan")])})
    line = line_of(FedAvg(NET), one_round(federation, {"w": torch.zeros(1)}))
    assert line["bytes_down"] == {"full": 6, "partial": 0, "unlabelled": 0}
    assert line["bytes_up"] == {"full": 14, "partial": 0, "unlabelled": 0}


def with_losses(done, *losses):
    """A round whose replies have these losses."""
    replies = [
        reply._replace(update=reply.update._replace(losses={k: torch.tensor(v) for k, v in loss.items()}))
        for reply, loss in zip(done.replies, losses, strict=True)
    ]
    return done._replace(replies=tuple(replies))


def test_the_mean_loss_of_some_rounds_is_weighted_by_samples():
    """ann: 1 by 3 samples in both rounds; bob: 5 by 9 samples, then nothing: (2·3·1 + 9·5)/15 = 3.4."""
    done = one_round(Scripted({"ann": (3, [1.0]), "bob": (9, [1.0])}), {"w": torch.zeros(1)})
    first, second = with_losses(done, {"w": 1.0}, {"w": 5.0}), with_losses(done, {"w": 1.0}, {})
    assert line_of(FedAvg(NET), first, second)["loss"] == {"w": pytest.approx(3.4)}
    assert line_of(FedAvg(NET), with_losses(done, {}, {}))["loss"] == {"w": None}


def with_labels(done, *counts):
    """A round whose replies have these counts of pseudo-labels."""
    replies = [
        reply._replace(update=reply.update._replace(labelling=torch.tensor(count)))
        for reply, count in zip(done.replies, counts, strict=True)
    ]
    return done._replace(replies=tuple(replies))


@pytest.mark.parametrize(
    ("counts", "accuracy", "share"),
    [
        (([3.0, 4.0, 8.0, 4.0], [0.0, 2.0, 2.0, 2.0]), 0.5, 0.6),
        (([3.0, 4.0, 8.0, 4.0], [0.0, 2.0, 2.0, 0.0]), 0.75, 0.6),  # the truth is known at one client alone
        (([1.0, 4.0, 8.0, 2.0], [0.0, 2.0, 2.0, 2.0]), 0.25, 0.6),  # of half the samples of the other one
        (([0.0, 4.0, 8.0, 0.0], [0.0, 0.0, 8.0, 0.0]), None, 0.25),
        (([0.0, 0.0, 8.0, 0.0], [0.0, 0.0, 2.0, 0.0]), None, 0.0),
        (([0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]), None, None),
    ],
)
def test_pseudo_labels_are_counted_over_clients_and_rounds(counts, accuracy, share):
    federation = Scripted({"ann": (3, [1.0]), "bob": (9, [2.0])})
    done = one_round(federation, {"w": torch.zeros(1)})
    none = with_labels(done, [0.0] * 4, [0.0] * 4)
    line = line_of(FedAvg(NET), none, with_labels(done, *counts))
    assert (line["pseudo_label_accuracy"], line["pseudo_label_share"]) == (accuracy, share)


LINEAR = small.net(small.Linear)
QUICK = {"batch": 8, "epochs": 1}


@pytest.mark.parametrize(
    ("method", "down", "up"),
    [
        (FedAvg(LINEAR, **QUICK), (1 + 1, 1 + 1, 0), (1 + 1, 1 + 1, 0)),
        (RSCFed(LINEAR, **QUICK), (1 + 1, 1 + 1, 1 + 1), (1 + 1, 1 + 1, 1 + 1)),
        (Hassle(LINEAR, residual_steps=1, **QUICK), (3 + 3, 4 + 5, 3 + 5), (2 + 2, 4 + 4, 2 + 2)),
        (
            FedMatch(LINEAR, unlabelled=True, helper_rounds=2, least_change=0.0, **QUICK),
            (2 + 2, 2 + 4, 2 + 4),
            (2 + 2, 2 + 2, 1 + 1),
        ),
    ],
    ids=["fedavg", "rscfed", "hassle", "fedmatch"],
)
def test_bytes_are_counted_by_kind_of_client_and_direction(method, down, up):
    """Vectors to and from a full, a partial and an unlabelled client, in round 1 + in round 2.

    RSCFed's teachers are not sent. HASSLE sends the dual that a residual belongs to from round 2 on,
    FedMatch two helpers in round 2 to those who have unlabelled data. A vector has 584 numbers of four
    bytes, and all of the one full client, the three partial and the two unlabelled ones take part.
    """
    line = line_of(method, *small.simulate(method, 2, per_round=6))
    kinds, clients, vector = ("full", "partial", "unlabelled"), (1, 3, 2), 4 * 584
    for way, vectors in (("bytes_down", down), ("bytes_up", up)):
        expected = [vector * n * each for n, each in zip(clients, vectors, strict=True)]
        assert line[way] == dict(zip(kinds, expected, strict=True))
    assert line["clients"] == dict(zip(kinds, (2, 6, 4), strict=True))


def test_when_every_update_is_bad_the_run_ends():
    federation = Scripted({"ann": (3, [float("nan")]), "bob": (9, [float("inf")])})
    with pytest.raises(DivergedError, match=r"round 1: .*ann, bob"):
        one_round(federation, {"w": torch.zeros(1)})


def test_a_side_whose_only_clients_diverged_is_kept(caplog):
    """The labelled client's update is bad: w_S stays, w_U is merged, and the log says both."""

    class Half(Scripted):
        def train(self, method, messages, t):
            values = {"a": {"w_S": [float("nan")], "r_US": [1.0]}, "b": {"w_U": [7.0], "r_SU": [8.0]}}
            return [reply(client, values[client.name], 1) for client, _ in messages]

    state = {name: torch.zeros(1) for name in ("w_S", "w_U", "r_US", "r_SU")}
    federation = Half({}, (Client("a", 5, 0), Client("b", 0, 5)))
    with caplog.at_level(logging.INFO, logger="fedhassle"):
        done = one_round(federation, state, Hassle(NET))
    found = {name: vector.item() for name, vector in done.state.items()}
    assert found == {"w_S": 0, "r_US": 0, "w_U": 7, "r_SU": 8, "w_U_before": 0}
    assert "r_US, w_S" in caplog.text


@pytest.mark.parametrize("first", [1, 4])
def test_a_run_rewinds_to_the_round_before_its_first(first):
    """Once, before training, since later client state belongs to another run."""
    federation = Scripted({"ann": (3, [1.0])})
    rounds = federate(FedAvg(NET), federation, Plan(5, 1), {"w": torch.zeros(1)}, first)
    assert federation.went_back == []
    assert [done.t for done in rounds] == list(range(first, 6))
    assert federation.went_back == [first - 1]


# Rounds that train nothing


def test_when_nobody_can_train_the_state_is_kept_and_the_log_says_so(caplog):
    federation = Scripted({}, (Client("u", 0, 5), Client("v", 0, 6)))
    state = {"w": torch.ones(2)}
    with caplog.at_level(logging.INFO, logger="fedhassle"):
        done = one_round(federation, state)
    assert torch.equal(done.state["w"], state["w"])
    assert done.replies == () and len(done.clients) == 2
    assert federation.asked == [[]]  # an idle client is sent nothing
    assert "round 1" in caplog.text and "w" in caplog.text and "kept" in caplog.text


def test_a_method_that_trains_nobody_is_a_warning_once(caplog):
    """Not if no client holds data, nor if those that it trains were not drawn in this round."""
    federation = Scripted({}, (Client("u", 0, 5), Client("v", 0, 6), Client("w", 0, 0)))
    list(federate(FedAvg(NET, average=0.5), federation, Plan(3, 9), {"w": torch.zeros(1)}))
    (warning,) = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    assert warning.startswith("round 1: nobody trains: the phases of FedAvg are () for all 3 clients")
    assert warning.endswith("though 2 hold data")
    caplog.clear()
    one_round(Scripted({}, (Client("w", 0, 0),)), {"w": torch.zeros(1)})
    idle = (Client("u", 0, 5), Client("v", 0, 6), Client("w", 0, 7), Client("x", 4, 0))
    assert [client.name for client in select(idle, Plan(1, 1), 1)] != ["x"]
    list(federate(FedAvg(NET), Scripted({}, idle), Plan(1, 1), {"w": torch.zeros(1)}))
    assert all(record.levelno < logging.WARNING for record in caplog.records)


def test_a_round_that_trains_all_logs_nothing(caplog):
    with caplog.at_level(logging.INFO, logger="fedhassle"):
        one_round(Scripted({"ann": (3, [1.0])}), {"w": torch.zeros(1)})
    assert caplog.records == []


# Selection


def test_selection_depends_on_seed_and_round_alone():
    drawn = [select(CLIENTS, Plan(seed=3), t) for t in range(1, 40)]
    assert drawn == [select(CLIENTS, Plan(seed=3), t) for t in range(1, 40)]
    assert drawn != [select(CLIENTS, Plan(seed=4), t) for t in range(1, 40)]
    assert len({tuple(c.name for c in some) for some in drawn}) > 35  # rounds differ


def test_selection_is_sorted_and_without_repeats():
    for t in range(1, 100):
        numbers = [CLIENTS.index(client) for client in select(CLIENTS, Plan(), t)]
        assert len(numbers) == 8
        assert numbers == sorted(set(numbers))
    assert select(CLIENTS[:3], Plan(clients_per_round=8), 1) == CLIENTS[:3]


def test_selection_is_uniform():
    """8 of 20 in 1,000 rounds: a client is drawn 400 times ± √(1000·0.4·0.6) = 15.5.

    Any two clients meet with probability 8·7/(20·19) = 0.147: 147 times ± 11.
    """
    together = np.zeros((20, 20))
    for t in range(1000):
        drawn = [CLIENTS.index(client) for client in select(CLIENTS, Plan(seed=1), t)]
        together[np.ix_(drawn, drawn)] += 1
    assert np.abs(np.diag(together) - 400).max() < 4 * 15.5
    pairs = together[~np.eye(20, dtype=bool)]
    assert np.abs(pairs - 1000 * 56 / 380).max() < 4.5 * 11.2


def test_required_clients_are_drawn_in_every_round():
    """Others make room for them, the number stays; all others are drawn about as often."""
    kinds = [Client(f"client {k}", 10, 5) for k in range(16)]
    clients = (*kinds, *(Client(f"bare {k}", 0, 5) for k in range(3)), Client("whole", 10, 0))
    plan = Plan(clients_per_round=4, required=Required(("client 3",), ("unlabelled", "full", "partial")))
    drawn = [[client.name for client in select(clients, plan, t)] for t in range(1, 400)]
    for names in drawn:
        assert len(names) == len(set(names)) == 4 and {"client 3", "whole"} <= set(names)
        assert any(name.startswith("bare") for name in names)
        assert names == sorted(names, key=[client.name for client in clients].index)
    counts = [sum(f"bare {k}" in names for names in drawn) for k in range(3)]
    assert min(counts) > 90  # of 399 / 3 = 133 ± 9.4
    few = Plan(clients_per_round=1, required=Required(("client 3", "client 5")))
    assert [client.name for client in select(clients, few, 1)] == ["client 3", "client 5"]
    absent = Plan(clients_per_round=4, required=Required(("elsewhere",)))
    assert select(clients, absent, 1) == select(clients, Plan(clients_per_round=4), 1)


def test_what_is_lacking_is_said_in_words():
    required = Required(("ann", "bob"), ("full", "partial"))
    assert required.lacking([Client("ann", 5, 0)]) == ["bob", "a site of the kind 'partial'"]
    assert required.lacking([Client("ann", 5, 0), Client("bob", 5, 5)]) == []


# Client memory in the simulator


@dataclass(frozen=True)
class Counting(FedAvg):
    """FedAvg whose clients count their steps, and whose second round gives NaN to those named `bad`."""

    bad: str = ""

    def memory(self, client, message):
        return {"steps": torch.zeros(1)}

    def phases(self, client, t):
        loss = self.poisoned if t == 2 and client.name == self.bad else self.loss
        descents = (Descent("w", loss, self.local_optimiser()),)
        phases = super().phases(client, t)
        return tuple(replace(phase, descents=descents, then=self.count) for phase in phases)

    def count(self, local, received):
        return {"steps": local["steps"] + 1}

    def poisoned(self, local, received, batch):
        return self.loss(local, received, batch) * float("nan")


def test_a_client_that_drops_out_keeps_its_memory_as_it_was():
    """Two epochs of ⌈n/8⌉ steps per round: client 1 (20 labels) 6, client 2 (6 labels) 2."""
    method = Counting(small.net(), batch=8, epochs=2, bad="client 1")
    federation = small.simulator(only={"client 1", "client 2"})
    steps = []
    for done in federate(method, federation, Plan(3, 2), method.initial(0)):
        kept = [
            federation.client_state.load(name, done.t + 1, small.CPU) for name in ("client 1", "client 2")
        ]
        steps.append([arrays["steps"].item() for arrays in kept])
        assert len(done.replies) == (1 if done.t == 2 else 2)
        assert torch.isfinite(done.state["w"]).all()
    assert steps == [[6, 2], [6, 4], [12, 6]]


def test_a_bad_client_leaves_the_round_as_if_it_had_not_been_drawn():
    """FedAvg over the others: the state after round 2 is that of a round without client 1."""
    method = Counting(small.net(), batch=8, epochs=2, bad="client 1")
    first = small.simulate(method, 1, only={"client 1", "client 2"})[-1].state
    with_bad = small.simulate(method, 2, state=first, first=2, only={"client 1", "client 2"})[-1].state
    without = small.simulate(method, 2, state=first, first=2, only={"client 2"})[-1].state
    assert torch.equal(with_bad["w"], without["w"])


# Whole runs


METHODS = [FedAvg(small.net(), batch=8, epochs=1), Hassle(small.net(), batch=8, epochs=1, residual_steps=2)]


@pytest.mark.parametrize("method", METHODS, ids=["fedavg", "hassle"])
def test_two_runs_with_one_seed_are_equal_and_another_seed_differs(method, global_randomness):
    first, again, other = (small.simulate(method, 3, seed=seed) for seed in (5, 5, 6))
    for a, b in zip(first, again, strict=True):
        assert small.same(a.state, b.state)
        assert a.clients == b.clients
    assert not small.same(first[-1].state, other[-1].state)


@pytest.mark.parametrize("method", METHODS, ids=["fedavg", "hassle"])
def test_an_interrupted_run_equals_an_uninterrupted_one(method):
    whole = small.simulate(method, 4)
    half = small.simulate(method, 2)[-1].state
    assert small.same(small.simulate(method, 4, state=half, first=3)[-1].state, whole[-1].state)


def test_a_small_federation_learns(data):
    """Class centres plus noise: far above chance (1/4) after a few rounds."""
    method = FedAvg(small.net(channels=data.shape[0]), batch=8, epochs=5, lr=0.1)
    state = small.simulate(method, 6, per_round=6, data=data)[-1].state
    images, y = torch.from_numpy(data.x_test), torch.from_numpy(data.y_test)
    views = small.simulator(data).trainer.views
    found = score(method, state, images, y, views).accuracy["model"]
    z = method.net.logits(state["w"], views.normalise(images))
    assert found == np.mean(z.argmax(1).numpy() == data.y_test)
    assert found > 0.6


@pytest.mark.parametrize(("at_once", "small_is"), [(16, 144), (32, 72)])
def test_accuracy_is_the_share_over_all_batches(at_once, small_is, monkeypatch):
    """Batches of 16, 16 and 8: a mean of batch means would weigh the last one too much."""
    monkeypatch.setitem(IMAGES_A_PASS, "cpu", at_once)
    monkeypatch.setattr("fedhassle.nets.SMALL", small_is)  # images here have 144 pixels
    data = small.dataset()
    method = FedAvg(small.net(small.Linear))
    images, views = torch.from_numpy(data.x_test), small.simulator(data).trainer.views
    state = method.initial(0)
    truth = method.net.logits(state["w"], views.normalise(images)).argmax(1)
    truth[32:36] = (truth[32:36] + 1) % 4
    truth[0] = (truth[0] + 1) % 4
    seen, predict = [], FedAvg.predict
    monkeypatch.setattr(FedAvg, "predict", lambda self, w, x: seen.append(len(x)) or predict(self, w, x))
    found = score(method, state, images, truth, views)
    assert found.accuracy == {"model": 35 / 40} and seen == [16, 16, 8]
    sizes = truth.bincount(minlength=4).tolist()
    right = sum(share * n for share, n in zip(found.by_class, sizes, strict=True) if n)
    assert right == pytest.approx(35)


def test_the_accuracy_on_each_class_is_that_of_the_headline(monkeypatch):
    """In passes of 16 images. `local` reports the mean over its clients' models, on each class as overall."""
    monkeypatch.setitem(IMAGES_A_PASS, "cpu", 16)
    data = small.dataset()
    images, views = torch.from_numpy(data.x_test), small.simulator(data).trainer.views
    y = torch.from_numpy(data.y_test % 3)  # none of the last class
    method = Hassle(small.net(small.Linear))
    z = method.predict(method.initial(0), views.normalise(images))["EM"].argmax(1)
    expected = [np.mean(z[y == k].numpy() == k) for k in range(3)]
    found = score(method, method.initial(0), images, y, views)
    assert found.by_class == [*expected, None] and len(set(expected)) > 1
    assert found.accuracy.keys() == {"SM", "UM", "EM", "w_S", "w_U"}
    alone, net = Alone(small.net(small.Linear)), small.net(small.Linear)
    vectors = [net.initial(seed) for seed in (1, 2)]
    state = {"w": net.initial(0), "w of a": vectors[0], "w of b": vectors[1]}
    each = [net.logits(w, views.normalise(images)).argmax(1) for w in vectors]
    means = [np.mean([np.mean(z[y == k].numpy() == k) for z in each]) for k in range(3)]
    found = score(alone, state, images, y, views)
    assert found.by_class[:3] == pytest.approx(means) and found.by_class[3] is None


def test_final_accuracies_by_class_are_means_of_the_last_ten_evaluations():
    """Lines of older versions, as in a run that was begun with one, do not count."""
    assert final_means([{"round": 1}], "class_accuracy") == {}
    early = {"class_accuracy": {"cat": 0.0, "dog": None}}
    lines = [{"class_accuracy": {"cat": k / 10, "dog": None}} for k in range(1, 9)]
    history = [*[early] * 5, {"round": 6}, *lines, {"round": 15}]
    assert final_means(history, "class_accuracy") == {"cat": pytest.approx(0.45), "dog": None}
    assert shortened({"round": 3, **early}) == {"round": 3}


def test_accuracy_is_measured_in_float32_whatever_training_is_in(monkeypatch):
    data, method, seen = small.dataset(), FedAvg(small.net()), []
    images, y, views = (
        torch.from_numpy(data.x_test),
        torch.from_numpy(data.y_test),
        small.simulator().trainer.views,
    )
    state, predict = method.initial(0), FedAvg.predict
    expected = method.net.logits(state["w"], views.normalise(images))
    monkeypatch.setattr(FedAvg, "predict", lambda *words: seen.append(predict(*words)) or seen[-1])
    with Engine(small.CPU, "bf16").lowered():
        assert not torch.equal(method.net.logits(state["w"], views.normalise(images)), expected)
        score(method, state, images, y, views)
    assert torch.equal(seen[0]["model"], expected)
