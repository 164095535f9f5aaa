"""The parts of the comparison: which work, and who does it in which ways."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.peers.clock import How
from benchmarks.peers.work import Work

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
    """Our rounds."""
    return Contender("fedhassle", "benchmarks.peers.our_rounds", (), how)


PLAIN = Contender("plain loop", "benchmarks.peers.plain_rounds")


def pfl(processes: int, compile: str = "none", precision: str = "fp32") -> Contender:  # noqa: A002
    """Pfl on some processes, compiled or not."""
    words = ["pfl", *([f"{processes} processes"] if processes > 1 else [])]
    words += ["compiled"] * (compile != "none") + ["bf16"] * (precision == "bf16")
    how = How(processes, compile, precision)
    return Contender(", ".join(words), "benchmarks.peers.pfl_rounds", ("pfl",), how)


def flower(processes: int = 1) -> Contender:
    """Flower's simulation; on a GPU so many clients share it."""
    return Contender("Flower", "benchmarks.peers.flower_rounds", ("flwr", "ray"), How(processes))


GREY, COLOUR = (1, 28, 28), (3, 32, 32)
GRAPHS = "reduce-overhead"  # torch.compile with CUDA graphs: pfl's fastest mode
FAST = How(compile="default", precision="bf16")  # ours in a long run on a GPU

LENET = Work("lenet", GREY, 20, 8, 500, 1, 128, 0.1, 0.9, True, "cpu", warmup=2, rounds=10)
RESNET = Work("resnet8", COLOUR, 20, 8, 2500, 10, 128, 0.1, 0.9, True, "cuda", warmup=2, rounds=5)
# Momentum 0 and images as they are: what both benchmarks have.
PFL = Work("dropout cnn", COLOUR, 1000, 50, 50, 1, 10, 0.1, 0.0, False, "cuda", warmup=2, rounds=10)
BLAZEFL = Work("unpadded lenet", COLOUR, 100, 100, 500, 5, 50, 0.1, 0.0, False, "cuda", warmup=1, rounds=5)

PARTS = {
    "cpu": Part(
        "LeNet on a CPU, 8 of 20 clients per round",
        LENET,
        (ours(), PLAIN, pfl(1), pfl(2), flower()),
        repeats=3,
    ),
    "gpu": Part(
        "ResNet-8 on a GPU, 8 of 20 clients per round, 10 epochs",
        RESNET,
        (
            ours(FAST),
            pfl(4, precision="bf16"),
            pfl(8, GRAPHS, "bf16"),
            pfl(4, GRAPHS, "bf16"),
            pfl(8, precision="bf16"),
            pfl(1, GRAPHS, "bf16"),
            pfl(2, GRAPHS, "bf16"),
            pfl(2, precision="bf16"),
            pfl(1, precision="bf16"),
            PLAIN,
        ),
    ),
    "pfl": Part(
        "pfl's CIFAR-10 benchmark: 50 of 1,000 users per round, 50 images each",
        PFL,
        (ours(replace(FAST, compile="none")), pfl(1), pfl(4), pfl(8), pfl(2), PLAIN),
    ),
    "blazefl": Part(
        "BlazeFL's benchmark: 100 clients, all in each round, 5 epochs",
        BLAZEFL,
        (ours(FAST), pfl(4), pfl(8), pfl(1), PLAIN, flower(8)),
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
    plain = [replace(one, how=replace(one.how, compile="none", precision="fp32")) for one in part.contenders]
    few = [one for one in plain if one.how.processes <= 2 or one.name.startswith("Flower")]
    return replace(part, work=work, contenders=tuple({one.name: one for one in few}.values()), repeats=1)
