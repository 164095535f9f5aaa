"""State of clients between rounds: one file for each client and round that is still needed."""

import errno
import gc
import hashlib
import random
import tempfile
from dataclasses import dataclass, replace

import numpy as np
import pytest
import small
import torch
from small import CPU, ENGINE, kept_by, same

import fedhassle.engine.client_state
from fedhassle.data.split.split import Split
from fedhassle.engine import tensor_files
from fedhassle.engine.client_state import ClientState
from fedhassle.engine.rounds import Plan, federate
from fedhassle.engine.simulator import Simulator
from fedhassle.engine.tensor_files import write_arrays
from fedhassle.errors import UserError
from fedhassle.method import Descent
from fedhassle.methods import METHODS, FedAvg
from fedhassle.runs.checkpoints import KEPT, load_checkpoint
from fedhassle.runs.folder import Folder
from fedhassle.runs.record import Evaluation
from fedhassle.runs.resume import restore
from fedhassle.runs.train import train_rounds
from fedhassle.vectors import all_finite

DATA = small.dataset(side=3)
NET = small.net(small.Linear, side=3)


def value(number):
    return {"m": torch.tensor([float(number)])}


def at(memory, client, t):
    """The number that a client saved last before round t."""
    found = memory.load(client, t, CPU)
    return None if found is None else found["m"].item()


def versions(memory, client):
    """The rounds in the names of a client's files."""
    paths = (memory.folder / hashlib.sha256(client.encode()).hexdigest()[:32]).glob("*")
    return sorted(int(path.name[len("round-") : -len(".safetensors")]) for path in paths)


@pytest.fixture
def memory(tmp_path):
    return ClientState(tmp_path / "memory")


# Versions


def test_loading_returns_the_last_state_before_a_round(memory):
    memory.rewind(9)  # a checkpoint of round 9: nothing up to it may go
    for t in (2, 5, 9):
        memory.save("ann", t, value(t))
    found = [at(memory, "ann", t) for t in range(1, 12)]
    assert found == [None, None, 2, 2, 2, 5, 5, 5, 5, 9, 9]
    assert at(memory, "bob", 11) is None


def test_arrays_come_back_bit_for_bit(memory):
    kept = {"a/b": torch.tensor([0.1, -0.0, 1e-45]), "n": torch.tensor([3]), "none": torch.zeros(0)}
    memory.save("ann", 1, kept)
    found = memory.load("ann", 2, CPU)
    assert same(found, kept) and torch.signbit(found["a/b"][1]) and found["n"].dtype == torch.int64


def test_saving_removes_older_state_since_the_last_checkpoint(memory):
    """Checkpoint after round 4: the run may need round 3 (to go back) and round 8 (to continue)."""
    memory.save("ann", 3, value(3))
    memory.prune([4])
    for t in (5, 6, 8):
        memory.save("ann", t, value(t))
        assert versions(memory, "ann") == [3, t]


def test_without_checkpoints_one_file_is_left(memory):
    memory.rewind(0)
    for t in range(1, 5):
        memory.save("ann", t, value(t))
    assert versions(memory, "ann") == [4]


@pytest.mark.parametrize(
    ("rounds", "left"),
    [
        ([9], [9]),
        ([4, 9], [3, 9]),
        ([3, 6], [3, 6, 9]),
        ([5, 6], [3, 6, 9]),
        ([1, 2], [1, 9]),
        ([7, 8], [6, 9]),
    ],
)
def test_pruning_keeps_the_state_at_each_checkpoint_and_the_newest(rounds, left, memory):
    memory.rewind(9)
    for t in (1, 3, 6, 9):
        memory.save("ann", t, value(t))
    memory.save("bob", 2, value(2))
    memory.prune(rounds)
    assert versions(memory, "ann") == left
    assert versions(memory, "bob") == [2]


def test_pruning_scans_only_clients_with_several_files(memory, monkeypatch):
    """Both have a file before the checkpoint of round 2, ann also one after it; later nobody has two."""
    memory.rewind(2)
    for client, t in (("ann", 1), ("bob", 1), ("ann", 3)):
        memory.save(client, t, value(t))
    looks, look = [], fedhassle.engine.client_state.round_files
    monkeypatch.setattr(
        fedhassle.engine.client_state, "round_files", lambda home: looks.append(home) or look(home)
    )
    counts = []
    for rounds in ([2, 4], [4, 6], [6, 8]):
        memory.prune(rounds)
        counts.append(len(looks))
    assert counts == [1, 2, 2]
    again = ClientState(memory.folder)
    again.rewind(8)
    assert len(looks) == 4  # all clients, once


@pytest.mark.parametrize(
    ("t", "left"), [(0, []), (1, [1]), (2, [1]), (3, [1, 3]), (8, [1, 3, 6]), (99, [1, 3, 6, 9])]
)
def test_rewinding_removes_later_state(t, left, memory):
    memory.rewind(9)
    for n in (1, 3, 6, 9):
        memory.save("ann", n, value(n))
    again = ClientState(memory.folder)  # as another process has it
    again.rewind(t)
    assert versions(again, "ann") == left
    assert again.folder.exists() == bool(left)  # nothing empty stays


def test_rewinding_removes_unfinished_files_but_not_foreign_ones(memory):
    memory.save("ann", 1, value(1))
    (home,) = memory.folder.iterdir()
    (home / ".writing-abc.safetensors").write_bytes(b"half")
    (home / "notes.txt").touch()
    (memory.folder / "notes.txt").touch()
    memory.rewind(0)
    assert [path.name for path in home.iterdir()] == ["notes.txt"]
    assert (memory.folder / "notes.txt").exists()


def test_a_run_that_starts_over_does_not_see_its_earlier_state(memory):
    """The second run starts at round 1, so rounds 1 to 5 of the first are removed."""
    for t in range(1, 6):
        memory.save("ann", t, value(t))
    memory.rewind(0)
    assert at(memory, "ann", 1) is None
    memory.save("ann", 1, value(10))
    assert at(memory, "ann", 2) == 10 and versions(memory, "ann") == [1]


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_of_a_run_find_the_right_state(seed, tmp_path):
    """Training, checkpoints, crashes and damaged checkpoints, compared with a full history."""
    rng, clients = random.Random(seed), ["ann", "bob", "cat", "dan"]
    memory, history, checkpoints, t, number = ClientState(tmp_path), {c: {} for c in clients}, [], 0, 0
    memory.rewind(0)

    def expected(client, now):
        return next((history[client][n] for n in sorted(history[client], reverse=True) if n < now), None)

    for _ in range(60):
        what = rng.choices(["round", "checkpoint", "crash"], [6, 3, 1])[0]
        if what == "round":
            t += 1
            for client in rng.sample(clients, rng.randint(0, 3)):
                assert at(memory, client, t) == expected(client, t)
                number += 1
                memory.save(client, t, value(number))
                history[client][t] = number
        elif what == "checkpoint" and t not in checkpoints:
            checkpoints = [*checkpoints, t][-KEPT:]
            memory.prune(checkpoints)
        elif what == "crash":
            if rng.random() < 0.5:  # the newest checkpoint is damaged
                checkpoints = checkpoints[:-1]
            t = checkpoints[-1] if checkpoints else 0
            history = {c: {n: v for n, v in kept.items() if n <= t} for c, kept in history.items()}
            memory = ClientState(tmp_path)
            memory.rewind(t)
        for client in clients:
            for end in (*checkpoints, t):
                assert at(memory, client, end + 1) == expected(client, end + 1)
            assert len(versions(memory, client)) <= KEPT + 1


# Names


def test_clients_may_be_called_anything(memory):
    """Each client finds its own state, and all files are inside the store's folder."""
    names = [
        "",
        ".",
        "..",
        "../..",
        "a/b",
        "a",
        "b",
        "/etc/passwd",
        "A",
        "a ",
        "é",
        "e\u0301",
        "\ud800",
        "日本",
    ]
    names += ["x" * 5000, "x" * 5001, "nul\0", "line\nbreak", "*", "round-000001.safetensors", ".writing-x"]
    for number, name in enumerate(names):
        memory.save(name, 1, value(number))
    assert [at(memory, name, 2) for name in names] == list(range(len(names)))
    assert [path.name for path in memory.folder.parent.iterdir()] == ["memory"]
    homes = list(memory.folder.iterdir())
    assert len(homes) == len(names) and all(
        [path.name for path in h.iterdir()] == ["round-000001.safetensors"] for h in homes
    )
    memory.rewind(1)
    assert [at(memory, name, 2) for name in names] == list(range(len(names)))


# Damage


def flipped(content):
    return content[:-2] + bytes([content[-2] ^ 1]) + content[-1:]


@pytest.mark.parametrize(
    "damage", [flipped, lambda content: content[:-3], lambda content: b"", lambda content: b"something else"]
)
def test_a_damaged_file_is_an_error_that_names_it(damage, memory):
    """Using the file before it would silently change the results."""
    memory.rewind(9)
    for t in (2, 4):
        memory.save("ann", t, value(t))
    newest = sorted(memory.folder.rglob("round-*"))[-1]
    newest.write_bytes(damage(newest.read_bytes()))
    with pytest.raises(
        UserError, match=r"round-000004\.safetensors .*checkpoints of round 4 and later"
    ) as caught:
        memory.load("ann", 9, CPU)
    assert str(newest) in str(caught.value)
    assert at(memory, "ann", 4) == 2


def test_an_unreadable_file_does_not_advise_to_remove_checkpoints(memory, monkeypatch):
    """It may be intact and readable later."""
    memory.save("ann", 4, value(4))

    def fails(*args, **options):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(tensor_files, "safe_open", fails)
    with pytest.raises(UserError, match="Input/output error") as caught:
        memory.load("ann", 9, CPU)
    assert "remove" not in str(caught.value)


def test_the_kept_rounds_follow_what_is_saved_and_removed(memory):
    memory.rewind(0)
    for t, clients in ((1, ("ann", "bob", "cat")), (2, ("ann",)), (3, ("bob",))):
        for client in clients:
            memory.save(client, t, value(t))
        memory.prune(list(range(1, t + 1)))
    assert memory.kept() == {"ann": 2, "bob": 3, "cat": 1}
    memory.rewind(2)
    assert memory.kept() == {"ann": 2, "bob": 1, "cat": 1}
    memory.forget("cat")
    assert memory.kept() == {"ann": 2, "bob": 1}
    memory.rewind(0)
    assert memory.kept() == {}


def test_a_state_that_a_checkpoint_needs_is_missed(memory):
    """An older one of the same client does not stand in for it."""
    memory.rewind(9)
    for t in (2, 4):
        memory.save("ann", t, value(t))
    memory.require({"ann": 4})
    sorted(memory.folder.rglob("round-*"))[-1].unlink()
    with pytest.raises(
        UserError, match=r"round-000004\.safetensors, the state of 'ann' after round 4, is missing"
    ):
        memory.require({"ann": 4})
    again = ClientState(memory.folder)
    again.require({"ann": 2})
    assert again.kept() == {"ann": 2}


@pytest.mark.parametrize("about", [{"client": "bob", "round": 4}, {"client": "ann", "round": 3}, {}])
def test_a_file_of_another_client_or_round_is_an_error(about, memory):
    memory.save("ann", 4, value(4))
    (path,) = memory.folder.rglob("round-*")
    write_arrays(path, value(5), about)
    with pytest.raises(UserError, match="is not the state of 'ann' after round 4") as caught:
        memory.load("ann", 9, CPU)
    assert str(path) in str(caught.value)


# Without a folder


def test_a_store_without_a_folder_leaves_nothing_behind(tmp_path, monkeypatch, recwarn):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    memory = ClientState()
    memory.save("ann", 1, value(1))
    assert at(memory, "ann", 2) == 1 and memory.folder.is_relative_to(tmp_path)
    del memory
    gc.collect()
    assert list(tmp_path.iterdir()) == [] and not recwarn.list


# Runs


@dataclass(frozen=True)
class Pulled(FedAvg):
    """FedAvg whose clients are pulled towards the mean of their earlier models."""

    def networks(self):
        return {**super().networks(), "mean": self.net}

    def memory(self, client, message):
        return {"mean": message["w"], "steps": torch.zeros(1)}

    def phases(self, client, t):
        descents = (Descent("w", self.pull, self.local_optimiser()),)
        return tuple(replace(p, descents=descents, then=self.follow) for p in super().phases(client, t))

    def pull(self, local, received, batch):
        gap = local["w"].weights - local["mean"].weights
        return self.loss(local, received, batch) + 0.1 * gap.square().sum()

    def follow(self, local, received):
        return {"mean": local["mean"].lerp(local["w"], 0.3), "steps": local["steps"] + 1}


PULLED = Pulled(NET, batch=8, epochs=1)


def run(folder, rounds=8, every=2, method=PULLED, split=small.SPLIT, data=DATA, per_round=3):
    """A new or resumed run in a folder, step by step."""
    federation = Simulator(data, split, 0, ENGINE, 1, ClientState(Folder(folder).memory))
    plan = Plan(rounds, per_round, 0)
    start = restore(Folder(folder), method, plan.seed, CPU)
    found = Evaluation({method.headline: 0.5})
    return train_rounds(Folder(folder), method, federation, plan, lambda state, t: found, every, start)


def last_of(folder):
    return load_checkpoint(folder / "checkpoints", CPU)


@pytest.fixture(scope="module")
def pulled(tmp_path_factory):
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("pulled")
    assert [step.t for step in run(folder)] == list(range(1, 9))
    return folder


def assert_as_uninterrupted(folder, whole):
    assert same(last_of(folder).state, last_of(whole).state)
    mine, other = kept_by(folder), kept_by(whole)
    assert mine.keys() == other.keys() and all(same(mine[k], other[k]) for k in mine)
    assert {p.relative_to(folder) for p in folder.rglob("*")} == {
        p.relative_to(whole) for p in whole.rglob("*")
    }


def test_the_kept_state_matters(pulled, tmp_path):
    """Without their state clients end with other weights; otherwise the tests below would prove nothing."""
    steps = run(tmp_path)
    for _ in range(4):
        next(steps)
    steps.close()
    for path in (tmp_path / "memory").rglob("round-*"):
        path.unlink()
    list(run(tmp_path))
    assert not same(last_of(tmp_path).state, last_of(pulled).state)


@pytest.mark.parametrize("rounds", range(9))
def test_a_run_interrupted_between_checkpoints_ends_in_the_same_bits(rounds, pulled, tmp_path):
    """Odd rounds have no checkpoint. Their state is overwritten with garbage, which nothing may read."""
    steps = run(tmp_path)
    for _ in range(rounds):
        next(steps)
    steps.close()
    for client, t in kept_by(tmp_path):
        if t > rounds // 2 * 2:
            ClientState(tmp_path / "memory").save(client, t, {"spoilt": torch.zeros(1)})
    list(run(tmp_path))
    assert_as_uninterrupted(tmp_path, pulled)


@pytest.mark.parametrize("saves", [1, 2, 5, 9, 14])
def test_a_run_that_dies_among_its_clients_ends_in_the_same_bits(saves, pulled, tmp_path, monkeypatch):
    """Only some clients of a round have saved their state, and an unfinished file is left."""
    count, save = iter(range(1, 100)), ClientState.save

    def dying(self, client, t, arrays):
        if next(count) >= saves:
            home = next(self.folder.glob("*"), self.folder / "home")
            home.mkdir(parents=True, exist_ok=True)
            (home / ".writing-abc.safetensors").write_bytes(b"half")
            raise KeyboardInterrupt
        save(self, client, t, arrays)

    with monkeypatch.context() as patched:
        patched.setattr(ClientState, "save", dying)
        with pytest.raises(KeyboardInterrupt):
            list(run(tmp_path))
    list(run(tmp_path))
    assert_as_uninterrupted(tmp_path, pulled)


@pytest.mark.parametrize("rounds", [4, 5, 6])
def test_a_run_goes_back_with_its_clients_when_its_checkpoint_is_damaged(rounds, pulled, tmp_path):
    steps = run(tmp_path)
    for _ in range(rounds):
        next(steps)
    steps.close()
    newest = small.checkpoints(tmp_path)[-1]
    newest.write_bytes(newest.read_bytes()[:-5])
    list(run(tmp_path))
    assert_as_uninterrupted(tmp_path, pulled)


def test_the_advice_about_a_damaged_file_works(pulled, tmp_path):
    """Removing the checkpoints of its round and later repeats the round."""
    steps = run(tmp_path)
    for _ in range(6):
        next(steps)
    steps.close()
    drawn = {client for client, _ in kept_by(tmp_path)}
    newest = {client: max(t for c, t in kept_by(tmp_path) if c == client) for client in drawn}
    damaged = max(newest.values())
    for path in (tmp_path / "memory").rglob(f"round-{damaged:06d}.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match=f"checkpoints of round {damaged} and later"):
        list(run(tmp_path))
    for path in small.checkpoints(tmp_path):
        if int(path.stem[-6:]) >= damaged:
            path.unlink()
    list(run(tmp_path))
    assert_as_uninterrupted(tmp_path, pulled)


@pytest.mark.parametrize("every", [1, 3, 100])
def test_after_every_round_only_the_needed_files_exist(every, tmp_path):
    """Per client: its newest state, and its state at each of the last two checkpoints."""
    trained, checkpoints, sizes = {}, [], set()
    for step in run(tmp_path, rounds=12, every=every):
        for client in step.clients:
            if client.labelled:
                trained.setdefault(client.name, []).append(step.t)
        if step.metrics is not None:
            checkpoints = [*checkpoints, step.t][-2:]
        needed = {
            (client, max(n for n in rounds if n <= t))
            for client, rounds in trained.items()
            for t in (*checkpoints, step.t)
            if min(rounds) <= t
        }
        assert kept_by(tmp_path).keys() == needed
        sizes |= {path.stat().st_size for path in small.checkpoints(tmp_path)}
    assert len(trained) == 4 and max(map(len, trained.values())) > 5
    assert max(sizes) < 12_000  # the model and twelve lines of metrics


@pytest.mark.parametrize("name", METHODS)
def test_methods_without_client_state_create_no_folder(name, tmp_path):
    """RSCFed's unlabelled clients keep a teacher; FedMatch stores the arrays that clients hold."""
    short = {"residual_steps": 1} if name == "hassle" else {}
    method = METHODS[name](net=NET, batch=8, epochs=1, **short)
    list(run(tmp_path, rounds=2, method=method, per_round=6))
    assert Folder(tmp_path).memory.exists() == (name in ("rscfed", "fedmatch"))
    assert small.checkpoints(tmp_path)


@dataclass(frozen=True)
class Poisoned(Pulled):
    """In its second round the state of a client is not finite, but its update is."""

    def follow(self, local, received):
        kept = super().follow(local, received)
        return kept | {"steps": torch.where(kept["steps"] == 2, float("inf"), kept["steps"])}


def test_a_client_whose_memory_is_not_finite_keeps_what_it_had():
    """One step per round for client 2 (6 labels, batches of 8): 1, then infinity, so 1 again."""
    federation = small.simulator(DATA, only={"client 2"})
    method = Poisoned(NET, batch=8, epochs=1)
    for done in federate(method, federation, Plan(3, 1), method.initial(0)):
        assert len(done.replies) == 1  # its update is finite, and counts
        assert federation.client_state.load("client 2", done.t + 1, CPU)["steps"].tolist() == [1]


def test_groups_of_tensors_are_checked_together():
    good, bad, worse = torch.ones(3), torch.tensor([1.0, float("nan")]), torch.tensor([-float("inf")])
    groups = [[good], [bad, good], [], [good, good, worse], [good], [torch.zeros(0), torch.tensor([1])]]
    assert all_finite(groups) == [True, False, True, False, True, True]
    assert all_finite([]) == [] and all_finite([[]]) == [True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_huge_entries_are_finite_though_their_sum_is_not(dtype):
    huge = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    bad = huge.clone()
    bad[-1] = -float("inf")
    assert not huge.sum().isfinite()
    assert all_finite([[huge], [-huge, huge], [huge, bad]]) == [True, True, False]


# Many clients


def test_ten_thousand_clients_cost_no_more_than_the_hundred_that_train(tmp_path, monkeypatch):
    """Files, folder scans and tensors only grow with the clients that were drawn."""
    n, none = 10_000, np.arange(0)
    data = small.dataset(side=3, train=n)
    split = Split(tuple(np.arange(k, k + 1) for k in range(n)), (none,) * n)
    tensors = count_tensors()
    simulator = Simulator(data, split, 0, ENGINE, 1, ClientState(tmp_path / "memory"))
    assert count_tensors() - tensors < 10
    assert len(simulator.clients) == n
    looks, look = [], fedhassle.engine.client_state.round_files
    monkeypatch.setattr(
        fedhassle.engine.client_state, "round_files", lambda home: looks.append(home) or look(home)
    )
    drawn = set()
    evaluate = lambda state, t: Evaluation({"model": 0.5})  # noqa: E731
    start = restore(Folder(tmp_path), PULLED, 0, CPU)
    for step in train_rounds(Folder(tmp_path), PULLED, simulator, Plan(4, 100, 0), evaluate, 1, start):
        drawn |= {client.name for client in step.clients}
        assert len(step.clients) == 100 and len(looks) < 250
        looks.clear()
        assert len(list((tmp_path / "memory").iterdir())) == len(drawn)
    assert 300 < len(drawn) <= 400
    assert {client for client, _ in kept_by(tmp_path)} == drawn
    # The model and the metrics; of each client its name and a number.
    assert max(path.stat().st_size for path in small.checkpoints(tmp_path)) < 5_000 + 25 * len(drawn)
    assert count_tensors() - tensors < 30


def count_tensors():
    gc.collect()
    return sum(type(thing) is torch.Tensor for thing in gc.get_objects())
