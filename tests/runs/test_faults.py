"""Every file operation of a command may fail: the next command repairs it, and ends in the same bits."""

import os
import shutil
import sys
import traceback
from dataclasses import dataclass

import ledgers
import pytest
import small
from faults import KINDS, Commands, Fault
from small import but_seconds, checkpoints

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL"),
    pytest.mark.xdist_group("faults"),  # one process that forks for all of them
]

METHODS = {
    "hassle": ["method.residual_steps=1"],
    "fedmatch": ["method.confidence=0.3", "method.helper_rounds=2", "method.least_change=0.001"],
    "rscfed": ["method.subsets=2", "method.subset_size=2"],
}
CURVES = "could not be drawn"  # in the output of a run without its picture
QUICK = 10  # faults of each quick test


def settings(images, method):
    """Settings of a run of three rounds on a network of one layer."""
    return [
        f"data={images}",
        *("net=small:Linear", "rounds=3", "evaluate_every=1", "clients_per_round=3"),
        *("threads=1", "device=cpu", "split.clients=4", f"method={method}"),
        "split.labels={full=1,partial=1,unlabelled=2,share=0.3}",
        *("method.epochs=1", "method.batch=16"),
        *METHODS[method],
    ]


@dataclass(frozen=True)
class Running:
    """A new run."""

    words: list[str]

    def begin(self, folder, commands):
        """Prepares the folder."""

    def command(self, folder):
        """The command in which an operation fails."""
        return ["run", *self.words, "--out", folder / "run"]

    def repair(self, folder):
        """The command after it: the same again if the run was cut before it was recorded."""
        recorded = any((folder / "run" / name).exists() for name in ("request.json", "config.toml"))
        return ["resume", folder / "run"] if recorded else self.command(folder)

    def check(self, folder, whole):
        """Compares the result with that of a run without a fault."""
        small.assert_same_result(folder / "run", whole / "run")


class Resuming(Running):
    """A run that was killed in its third round, and whose newest checkpoint is damaged."""

    def begin(self, folder, commands):
        shutil.copytree(self.cut(folder.parent, commands), folder / "run")

    def cut(self, parent, commands):
        """The folder of the run, which is made once."""
        made = parent / "cut"
        if not made.exists():
            words = ["run", *self.words, "--out", made]
            operations = commands(*words, folder=made).operations
            shutil.rmtree(made)
            last = max(n for n, (what, _) in enumerate(operations) if what == "rename")
            third = [n for n, one in enumerate(operations) if one == ("rename", "round-000003.safetensors")]
            commands(*words, folder=made, fault=Fault("kill", third[-1] if third else last))
            newest = checkpoints(made)[-1]
            assert newest.stem == "round-000002"
            newest.write_bytes(newest.read_bytes()[:-5])
            assert (made / ".lock").exists() and list(made.rglob(".writing-*"))
        return made

    def command(self, folder):
        return ["resume", folder / "run"]


@dataclass(frozen=True)
class Reproducing:
    """An experiment of two runs."""

    words: list[str]

    def begin(self, folder, commands):
        folder.mkdir()
        tables = "\n".join(word.replace("=", " = ", 1) for word in map(quoted, self.words))
        axis = '[[axis]]\nname = "alpha"\nchoices = [{ id = "5", set = { split.alpha = 5.0 } }]\n'
        text = f'title = "x"\nsource = "x"\nrows = ["alpha"]\nseeds = 2\n[settings]\n{tables}\n{axis}'
        ledgers.experiment(folder.parent, text, "")

    def command(self, folder):
        places = ["--results", folder / "results", "--runs", folder / "runs"]
        return ["reproduce", folder.parent / "tiny.toml", *places]

    def repair(self, folder):
        return self.command(folder)

    def check(self, folder, whole):
        assert small.paths_in(folder) == small.paths_in(whole)
        for path in sorted((whole / "results").rglob("*.json")):
            mine, other = (essence(path_in) for path_in in (folder / path.relative_to(whole), path))
            assert mine == other
        for path in sorted((whole / "runs").rglob("model.safetensors")):
            mine, other = (small.tensors_of(file) for file in (folder / path.relative_to(whole), path))
            assert small.same(mine, other)


def quoted(word):
    """KEY=VALUE as TOML."""
    key, _, value = word.partition("=")
    bare = value[0] not in "{0123456789" and value not in ("true", "false")
    key = f"{key}.name" if key in ("method", "data") else key
    return f'{key}="{value}"' if bare else f"{key}={value.replace('full=', 'full = ')}"


def essence(path):
    """A summary without its seconds."""
    summary = small.strict(path.read_text("utf-8"))
    history = but_seconds(summary["history"])
    return {key: value for key, value in summary.items() if key != "seconds"} | {"history": history}


SCENARIOS = {"run": Running, "resume": Resuming, "reproduce": Reproducing}


@pytest.fixture(scope="module")
def few_images(tmp_path_factory):
    path = tmp_path_factory.mktemp("images") / "small.npz"
    small.save_images(path, small.dataset(train=60))
    return path


@pytest.fixture(scope="module")
def commands(few_images, tmp_path_factory):
    """Runs commands in fresh processes."""
    warm = tmp_path_factory.mktemp("warm") / "run"
    made = Commands("run", *settings(few_images, "hassle"), "--out", warm)
    yield made
    made.close()


def possible(operations):
    """Every fault of these operations."""
    pairs = [(kind, n) for n, (what, _) in enumerate(operations) for kind in KINDS if what in KINDS[kind]]
    return [Fault(*pair) for pair in pairs]


def survey(scenario, commands, home, choose):
    """Lets each of the chosen operations fail; returns the number of faults, and the failures in words."""
    whole, failures = home / "whole", []
    scenario.begin(whole, commands)
    done = commands(*scenario.command(whole), folder=whole)
    assert done.code == 0, done.output
    chosen = choose(possible(done.operations))
    for fault in chosen:
        folder = home / f"{fault.kind}-{fault.n}"
        scenario.begin(folder, commands)
        try:
            attempt(scenario, commands, folder, whole, fault)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            failures.append(f"{fault.kind} at {fault.n} {done.operations[fault.n]}: {where.line} {error}")
        else:
            shutil.rmtree(folder)
    return len(chosen), failures


def attempt(scenario, commands, folder, whole, fault):
    """Runs a command with a fault, then the command that repairs its work, and compares the result."""
    broken = commands(*scenario.command(folder), folder=folder, fault=fault)
    if fault.kind in ("kill", "half"):
        assert broken.code == -9
    else:
        assert broken.code in (0, 1, 2) and "Traceback" not in broken.output, broken
    make_old(folder.rglob("results/**/.writing-*"))
    again = commands(*scenario.repair(folder), folder=folder)
    assert again.code == 0, again.output
    if broken.code == 0 and CURVES in broken.output:
        draw_missing_curves(folder, whole)
    scenario.check(folder, whole)


def make_old(paths):
    """Makes files older than an hour: in a ledger, which processes share, newer ones may have a writer."""
    for path in paths:
        os.utime(path, (0, 0))


def draw_missing_curves(folder, whole):
    """Adds the picture that a finished run may lack: no reason to lose a result."""
    for path in whole.rglob("curves.png"):
        (folder / path.relative_to(whole)).touch()


@pytest.mark.parametrize(
    ("name", "method"), [("run", "hassle"), ("resume", "rscfed"), ("reproduce", "hassle")]
)
def test_a_command_repairs_the_work_of_one_in_which_an_operation_failed(
    name, method, commands, few_images, tmp_path
):
    """A sample: every n-th of all faults, so that each kind and each part of a run has some."""
    scenario = SCENARIOS[name](settings(few_images, method))
    count, failures = survey(scenario, commands, tmp_path, lambda all_: all_[:: len(all_) // QUICK])
    assert not failures, "\n".join(failures)
    assert count >= QUICK


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_fault_is_repaired(name, method, commands, few_images, tmp_path):
    """`make test-faults`: every operation with every kind of fault."""
    scenario = SCENARIOS[name](settings(few_images, method))
    count, failures = survey(scenario, commands, tmp_path, lambda all_: all_)
    assert not failures, f"{len(failures)} of {count} faults:\n" + "\n".join(failures)
