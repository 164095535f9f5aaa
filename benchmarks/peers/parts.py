"""The parts of the comparison: which work, and who does it in which ways."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.peers.clock import How
from benchmarks.peers.work import Work
from fedhassle.engine.device import STACK

ALONE = How()


@dataclass(frozen=True)
class Contender:
    """Who does the work, and how."""

    name: str
    module: str  # run as `python -m`
    needs: tuple[str, ...] = ()  # packages that it imports
    how: How = ALONE


@dataclass(frozen=True)
class Part:
    """A work and its contenders; the first one is ours."""

    about: str
    work: Work
    contenders: tuple[Contender, ...]
    repeats: int = 1  # times that all contenders run, in turn
    published: str = ""  # figures of others, to compare with


def ours(how: How = ALONE) -> Contender:
    """Our rounds; `how.processes`: workers."""
    words = [f"{how.processes} workers"] * (how.processes > 1) + [f"stack={how.stack}"] * (how.stack != STACK)
    needs = () if how.processes == 1 else ("ray",)
    return Contender(", ".join(["fedhassle", *words]), "benchmarks.peers.our_rounds", needs, how)


PLAIN = Contender("plain loop", "benchmarks.peers.plain_rounds")


def pfl(how: How = ALONE) -> Contender:
    """Pfl on some processes, compiled or not."""
    return Contender(named("pfl", how), "benchmarks.peers.pfl_rounds", ("pfl",), how)


def flower(how: How = ALONE) -> Contender:
    """Flower's simulation; on a GPU `how.processes` clients share it, on a CPU as many as there are cores."""
    return Contender(named("Flower", how), "benchmarks.peers.flower_rounds", ("flwr", "ray"), how)


def named(peer: str, how: How) -> str:
    """A peer with how it runs."""
    words = [peer, *([f"{how.processes} processes"] if how.processes > 1 else [])]
    words += ["MPS"] * how.mps + ["compiled"] * (how.compile != "none") + ["bf16"] * (how.precision == "bf16")
    return ", ".join(words)


GREY, COLOUR = (1, 28, 28), (3, 32, 32)
GRAPHS = "reduce-overhead"  # torch.compile with CUDA graphs: pfl's fastest mode
FAST = How(compile="default", precision="bf16")  # ours in a long run on a GPU
UNSTACKED = replace(FAST, stack=1)

# On a GPU the peers' fastest: alone, and as several processes that use it at the same time. One process goes
# first, since the others then find its compiled code in PyTorch's cache.
GRAPHS_ALONE, FOUR, EIGHT = How(compile=GRAPHS), How(4, GRAPHS, mps=True), How(8, GRAPHS, mps=True)
EAGER = How(8, mps=True)

LENET = Work("lenet", GREY, 20, 8, 500, 1, 128, 0.1, 0.9, True, "cpu", warmup=2, rounds=10)
RESNET = Work("resnet8", COLOUR, 20, 8, 2500, 10, 128, 0.1, 0.9, True, "cuda", warmup=2, rounds=3)
# Momentum 0 and images as they are: what both benchmarks have.
PFL = Work("dropout cnn", COLOUR, 1000, 50, 50, 1, 10, 0.1, 0.0, False, "cuda", warmup=2, rounds=10)
BLAZEFL = Work("unpadded lenet", COLOUR, 100, 100, 500, 5, 50, 0.1, 0.0, False, "cuda", warmup=1, rounds=3)


def bf16(how: How) -> How:
    """The same with matrix products in bf16."""
    return replace(how, precision="bf16")


ON_SMALL_NETWORKS = (
    ours(FAST),
    ours(UNSTACKED),
    pfl(GRAPHS_ALONE),
    pfl(EIGHT),
    flower(EAGER),
    pfl(FOUR),
    flower(EIGHT),
    pfl(EAGER),
    PLAIN,
)

PARTS = {
    "cpu": Part(
        "LeNet on a CPU, 8 of 20 clients per round",
        LENET,
        (ours(), ours(How(2)), PLAIN, pfl(), pfl(How(2)), flower()),
        repeats=3,
    ),
    "gpu": Part(
        "ResNet-8 on a GPU, 8 of 20 clients per round, 10 epochs",
        RESNET,
        (
            ours(FAST),
            pfl(bf16(GRAPHS_ALONE)),
            pfl(bf16(EIGHT)),
            flower(bf16(EIGHT)),
            pfl(bf16(FOUR)),
            flower(bf16(EAGER)),
            pfl(bf16(How(4))),
            PLAIN,
        ),
    ),
    "pfl": Part(
        "pfl's CIFAR-10 benchmark: 50 of 1,000 users per round, 50 images each",
        PFL,
        ON_SMALL_NETWORKS,
    ),
    "blazefl": Part(
        "BlazeFL's benchmark: 100 clients, all in each round, 5 epochs",
        BLAZEFL,
        ON_SMALL_NETWORKS,
        published="BlazeFL's paper, 5 rounds on an H100 with 48 cores: BlazeFL about 30 s, Flower about 93 s",
    ),
}


def small(part: Part) -> Part:
    """The same part with little work, on a CPU, to try it."""
    work = part.work
    work = replace(
        work,
        clients=min(work.clients, 6),
        per_round=min(work.per_round, 4),
        images=32,
        batch=16,
        epochs=1,
        device="cpu",
        warmup=1,
        rounds=2,
    )
    return replace(part, work=work, contenders=(ours(), pfl(), pfl(How(2)), flower(), PLAIN), repeats=1)
