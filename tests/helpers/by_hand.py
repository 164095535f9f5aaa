"""Reference implementations in float64, which the code under test must equal.

The networks are linear, f(x; w) = W·x + b with w = (W, b) in one vector, so that f is a matrix product and
its gradient is by hand: with G the gradient of a loss by the logits (B, M), ∂W = Gᵀ·X and ∂b = Σ_i G_i.
Each is padded to a multiple of eight entries: the 36 of W to 40, the 4 of b to 8.

Where BatchNorm matters, each pixel is normalised before that: x̂ = g·(x − m)/√(v + 10⁻⁵) + h. Then W and b are
followed by g and h and, as statistics, by the running m and v, nine entries in a room of 16 each.
"""

import numpy as np
import pytest
import small
import torch
import torch.nn.functional as F

from fedhassle.method import Labelled
from fedhassle.methods.hassle import SUPERVISED, UNSUPERVISED

B, M, D = 6, 4, 9  # batch, classes, pixels of a 3×3 image
NET = small.net(small.Linear, side=3)
NORMED = small.net(small.Normed, side=3)
SIDES = pytest.mark.parametrize("side", [SUPERVISED, UNSUPERVISED], ids=["S", "U"])


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def f(x, w):
    """The logits (B, M) of images (B, 1, 3, 3)."""
    return x.reshape(len(x), D) @ w[:36].reshape(M, D).T + w[40:44]


def flat(W, b):
    """The vector w of a matrix (M, D) and a bias (M,)."""
    return np.concatenate([W.reshape(-1), np.zeros(4), b, np.zeros(4)])


def normed(x, w, statistics=None):
    """The logits of the network with BatchNorm: by the batch's own moments, or by the statistics."""
    x, (g, h) = x.reshape(len(x), D), (w[48:57], w[64:73])
    m, v = (x.mean(0), x.var(0)) if statistics is None else (statistics[:9], statistics[16:25])
    return f((g * (x - m) / np.sqrt(v + 1e-5) + h).reshape(-1, 1, 3, 3), w)


def moved(statistics, x):
    """The statistics after a pass in training: a tenth of the way to the batch's (unbiased) moments."""
    x, now = x.reshape(len(x), D), statistics.copy()
    now[:9] += 0.1 * (x.mean(0) - now[:9])
    now[16:25] += 0.1 * (x.var(0, ddof=1) - now[16:25])
    return now


def normed_vector(rng):
    """Weights and statistics of the network with BatchNorm, drawn at random."""
    room = np.zeros(7)
    weights = [flat(rng.normal(size=(M, D)), rng.normal(size=M)), rng.uniform(0.5, 2, D), room]
    statistics = [rng.normal(size=D), room, rng.uniform(0.5, 2, D), room]
    return np.concatenate([*weights, rng.normal(size=D), room]), np.concatenate(statistics)


def lenet(vector, x, width, classes=small.CLASSES):
    """LeNet of a flat vector: kernels (out, height, width, in), then the bias, layer by layer.

    Each is followed by zeros up to a multiple of eight entries.
    """
    c1, c2, d1, d2 = (-(-n // width) for n in (6, 16, 120, 84))
    flat = c2 * ((x.shape[2] // 2 - 4) // 2) * ((x.shape[3] // 2 - 4) // 2)
    shapes = [(c1, 5, 5, 1), (c1,), (c2, 5, 5, c1), (c2,), (d1, flat), (d1,), (d2, d1), (d2,)]
    shapes += [(classes, d2), (classes,)]
    sizes = [int(np.prod(shape)) for shape in shapes]
    rooms = [size + -size % 8 for size in sizes]
    assert sum(rooms) == vector.numel()
    parts = zip(vector.double().split(rooms), sizes, shapes, strict=True)
    p = [part[:size].reshape(shape) for part, size, shape in parts]
    x = F.max_pool2d(F.conv2d(x, p[0].permute(0, 3, 1, 2), p[1], padding=2).relu(), 2)
    x = F.max_pool2d(F.conv2d(x, p[2].permute(0, 3, 1, 2), p[3]).relu(), 2).flatten(1)
    return F.linear(F.linear(F.linear(x, p[4], p[5]).relu(), p[6], p[7]).relu(), p[8], p[9])


def pull_back(x, G):
    """The gradient by w of a loss whose gradient by the logits is G."""
    return flat(G.T @ x.reshape(len(x), D), G.sum(0))


def ce(z, y):
    """ℓ, a sample with y = −1 counting as zero in the sum and as one in the batch."""
    each = [-np.log(softmax(z)[i, y[i]]) if y[i] >= 0 else 0.0 for i in range(len(y))]
    return sum(each) / len(y)


def ce_gradient(z, y):
    return (softmax(z) - one_hot(y, z.shape[1])) * (y >= 0)[:, None] / len(y)


def one_hot(y, classes=M):
    return np.array([[float(y[i] == m) for m in range(classes)] for i in range(len(y))])


def soft_ce(z, target):
    """−Σ_m target_m·log softmax(z)_m of each sample."""
    p = softmax(z)
    return np.array([-sum(target[i, m] * np.log(p[i, m]) for m in range(p.shape[1])) for i in range(len(p))])


def labels_of(z, confidence):
    """The argmax, −1 where the largest probability is below the confidence."""
    return np.where(softmax(z).max(1) >= confidence, z.argmax(1), -1)


def kl(p, q):
    """KL(p ‖ q) = Σ_m p_m·log(p_m/q_m), mean over the batch."""
    return sum(p[i, m] * np.log(p[i, m] / q[i, m]) for i in range(len(p)) for m in range(M)) / len(p)


def gradient(loss, weights):
    """The value and the gradient by the weights of loss(weights), which may return its labels too."""
    leaf = torch.from_numpy(weights).requires_grad_()
    found = loss(leaf)
    value = found.loss if isinstance(found, Labelled) else found
    return value.item(), torch.autograd.grad(value, leaf)[0].numpy()


def other_way(side):
    """The names of one side and of the other: r_{U−S} adds to w_S what w_U knows."""
    return ("w_S", "w_U", "r_US", "r_SU") if side is SUPERVISED else ("w_U", "w_S", "r_SU", "r_US")


def order_of_epochs(n, batch, epochs, rng):
    """The documented walk, an index at a time: ⌈n/B⌉ full batches, filled up from the shuffle's start."""
    batches = []
    for _ in range(epochs):
        shuffled = rng.permutation(n).tolist()
        count = int(np.ceil(n / batch))
        cycled = [shuffled[i % n] for i in range(count * batch)]
        batches += [cycled[i * batch : (i + 1) * batch] for i in range(count)]
    return batches


def order_end_to_end(n, batch, steps, rng):
    """Shuffled passes end to end, cut into batches."""
    endless = []
    while len(endless) < steps * batch:
        endless += rng.permutation(n).tolist()
    return [endless[i * batch : (i + 1) * batch] for i in range(steps)]
