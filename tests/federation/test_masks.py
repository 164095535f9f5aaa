"""Secure aggregation: plain sums, sites that drop out, and what the server cannot see."""

import itertools

import numpy as np
import pytest

from fedhassle.errors import UserError
from fedhassle.federation.masks.protocol import (
    OWN_KEY,
    Masker,
    connected,
    least_survivors,
    neighbours,
    points,
    summed,
    threshold,
    unmasked,
)
from fedhassle.federation.masks.ring import WORD, decoded, encoded, step_of, stream
from fedhassle.federation.masks.shares import join, split

CONTEXT = "run 1"


# Shamir's shares


def test_any_three_of_five_shares_give_the_secret_and_two_do_not():
    secret = bytes(range(32))
    shares = split(secret, [1, 2, 3, 5, 8], 3)
    for chosen in itertools.combinations(shares, 3):
        assert join({x: shares[x] for x in chosen}, 3) == secret
    with pytest.raises(ValueError, match="3 are needed"):
        join({x: shares[x] for x in (1, 2)}, 3)


def test_too_few_shares_tell_nothing_of_a_secret():
    """Two shares of three lie on a polynomial through every secret: the missing share decides."""
    shares = split(bytes(32), [1, 2, 3], 3)
    for other in (bytes(31) + b"\x07", b"\xff" * 32):
        forged = dict(shares)
        # Lagrange at 0 for points 1, 2, 3: secret = 3·s₁ − 3·s₂ + s₃, so s₃ can be chosen for any secret.
        prime = 2**521 - 1
        s1, s2 = (int.from_bytes(shares[x]) for x in (1, 2))
        forged[3] = ((int.from_bytes(other) - 3 * s1 + 3 * s2) % prime).to_bytes(66)
        assert join(forged, 3) == other


# Numbers


def test_numbers_are_rounded_to_a_step_and_wrap_around(rng):
    values = rng.uniform(-2, 2, 1000)
    step = step_of(2.0, 7)
    back = decoded(encoded(values, 0.3, step, 2.0), step)
    assert np.abs(back - 0.3 * values).max() <= step / 2
    assert encoded(np.array([-step]), 1, step, 2.0)[0] == 2**32 - 1
    with pytest.raises(UserError, match=r"changed by 2\.5, and masks allow 2"):
        encoded(np.array([0.0, -2.5]), 0.1, step, 2.0)  # so that the sum of all shares cannot wrap around
    with pytest.raises(UserError, match="nan"):
        encoded(np.array([np.nan]), 1, step, 2.0)


def test_a_stream_depends_on_its_seed_and_its_model():
    a = stream(b"a" * 32, "w", 1000)
    assert a.dtype == WORD and np.array_equal(a, stream(b"a" * 32, "w", 1000))
    assert not np.array_equal(a, stream(b"b" * 32, "w", 1000))
    assert not np.array_equal(a, stream(b"a" * 32, "v", 1000))


# A whole round


def uniform(numbers):
    """True if χ² over the bytes of numbers is what uniform ones have (255 ± 6 standard deviations)."""
    counts = np.bincount(numbers.view(np.uint8), minlength=256)
    expected = numbers.nbytes / 256
    return abs(((counts - expected) ** 2 / expected).sum() - 255) < 6 * np.sqrt(2 * 255)


class Exchange:
    """A round in one process; the attributes are the server's transcript.

    `lost` names the sites that drop out before each step 2, 3 and 4.
    """

    def __init__(self, vectors, lost=((), (), ())):
        self.sites = {name: Masker(name, CONTEXT) for name in vectors}
        self.members = {n: s.public(dict.fromkeys(vectors[n], 1)) for n, s in self.sites.items()}
        there = set(vectors) - set(lost[0])
        self.blobs = {name: self.sites[name].share(self.members) for name in sorted(there)}
        there -= set(lost[1])
        self.masked = {
            name: self.sites[name].masked(
                {peer: blobs[name] for peer, blobs in self.blobs.items() if name in blobs}, vectors[name]
            )
            for name in sorted(there)
        }
        there -= set(lost[2])
        self.revealed = {name: self.sites[name].reveal(self.masked) for name in sorted(there)}

    def sum(self):
        return unmasked(self.members, list(self.blobs), self.masked, self.revealed, CONTEXT)


def random_vectors(rng, n, models=("w",), size=50):
    return {
        f"site {k:02}": {m: rng.integers(0, 2**32, size, dtype=np.uint32) for m in models} for k in range(n)
    }


def plain_sum(vectors, names, model="w"):
    return sum(vectors[n][model].astype(np.int64) for n in names if model in vectors[n]) % 2**32


@pytest.mark.parametrize(
    ("n", "lost"),
    [
        (3, ((), (), ())),
        (3, ((), ("site 01",), ())),  # killed while it trains
        (3, ((), (), ("site 01",))),  # … after it has sent its vector
        (10, (("site 00",), ("site 03", "site 09"), ("site 05",))),
        (50, ((), tuple(f"site {k:02}" for k in range(7)), ("site 30", "site 44"))),
    ],
)
def test_the_sum_without_masks_is_the_plain_sum_of_those_that_sent_their_vectors(n, lost, rng):
    vectors = random_vectors(rng, n, ("w", "v"))
    done = Exchange(vectors, lost)
    survivors = vectors.keys() - set(lost[0]) - set(lost[1])
    found = done.sum()
    for model in ("w", "v"):
        np.testing.assert_array_equal(found[model], plain_sum(vectors, survivors, model))


def test_sites_may_send_different_models_and_one_that_a_single_site_sent_stays_secret(rng):
    """As in HASSLE: full sites send w, unlabelled ones v, partial ones both; u has one sender."""
    vectors = random_vectors(rng, 4, ("w", "v", "u"))
    kept = {"site 00": "w", "site 01": "wvu", "site 02": "v", "site 03": "w"}
    vectors = {name: {m: vectors[name][m] for m in kept[name]} for name in vectors}
    found = Exchange(vectors).sum()
    assert found.keys() == {"w", "v"}
    for model in found:
        np.testing.assert_array_equal(found[model], plain_sum(vectors, vectors, model))
    # If site 02 drops out, site 01 alone is left of those that sent v.
    done = Exchange(vectors, ((), ("site 02",), ()))
    assert done.sum().keys() == {"w"}
    np.testing.assert_array_equal(done.sum()["w"], plain_sum(vectors, vectors, "w"))
    told = [shares for told in done.revealed.values() for shares in [told.shares["site 01"]]]
    assert all(shares.keys() == {"w"} for shares in told)


def test_neighbours_are_mutual_and_few_among_many():
    members = {n: Masker(n, CONTEXT).public({"w": 1}) for n in map(str, range(60))}
    near = neighbours(members, 12)
    assert all(len(found) == 12 and n not in found for n, found in near.items())
    assert all(n in near[peer] for n, found in near.items() for peer in found)
    few = dict(itertools.islice(members.items(), 5))
    assert all(set(found) == few.keys() - {n} for n, found in neighbours(few).items())
    assert neighbours({n: Masker(n, CONTEXT).public({"w": 1}) for n in members}, 12) != near  # not by name


def sending(models):
    """The members of a round, by the models that each sends."""
    return {name: Masker(name, CONTEXT).public(dict.fromkeys(sent, 1)) for name, sent in models.items()}


def test_the_few_that_send_a_model_are_neighbours_even_among_many():
    """Of 60 sites five send v, and with twelve neighbours each all of them hide what the others sent."""
    few = {"7", "19", "30", "41", "58"}
    near = neighbours(sending({n: "wv" if n in few else "w" for n in map(str, range(60))}), 12)
    for name in few:
        assert few - {name} <= set(near[name])


def test_a_model_stays_under_masks_if_senders_are_left_without_a_common_neighbour():
    """Of 100 sites all neighbours of one drop out: beside the sum of the others it would show its own."""
    members = sending(dict.fromkeys(map(str, range(100)), "w"))
    alone = members.keys() - set(neighbours(members)["7"])
    assert len(alone) >= least_survivors(members)
    assert summed(members, alone) == [] and summed(members, alone - {"7"}) == ["w"]
    near = {"a": ["b"], "b": ["a", "c"], "c": ["b"], "d": []}
    assert connected(["a", "b", "c"], near) and connected(["d"], near)
    assert not connected(["a", "c"], near) and not connected(["a", "b", "d"], near)


# The transcript of the server


def test_a_single_vector_cannot_be_recovered_from_the_transcript(rng):
    """All vectors are zero, so that what the server sees of each is its masks alone.

    With everything that was revealed, it can remove the own masks, and what is left is still uniform; the
    pairwise masks need keys of which it has no share.
    """
    size = 20_000
    vectors = {f"site {k}": {"w": np.zeros(size, WORD)} for k in range(4)}
    done = Exchange(vectors, ((), ("site 3",), ()))
    near, place = neighbours(done.members), points(done.members)
    for name, sent in done.masked.items():
        assert uniform(sent["w"])
        needed = threshold(len(near[name]) + 1)
        shares = {place[peer]: told.shares[name] for peer, told in done.revealed.items()}
        seed = join({x: found["w"] for x, found in shares.items()}, needed)
        assert uniform(sent["w"] - stream(seed, "w", size))
        assert all(OWN_KEY not in found for found in shares.values())
    assert not uniform(np.zeros(size, WORD))
    assert not done.sum()["w"].any()


def test_what_two_of_many_sent_cannot_be_told_apart(rng):
    """Of 36 sites, two send v: without the masks that were revealed, only their sum is left."""
    size = 20_000
    vectors = {f"site {k:02}": {"w": np.zeros(1, WORD)} for k in range(36)}
    for name in ("site 04", "site 23"):
        vectors[name]["v"] = np.zeros(size, WORD)
    done = Exchange(vectors)
    place, near = points(done.members), neighbours(done.members)
    for name in ("site 04", "site 23"):
        shares = {place[peer]: told.shares.get(name, {}).get("v") for peer, told in done.revealed.items()}
        known = {x: share for x, share in shares.items() if share is not None}
        seed = join(known, threshold(len(near[name]) + 1))
        assert uniform(done.masked[name]["v"] - stream(seed, "v", size))
    assert not done.sum()["v"].any()


def test_the_masks_stay_if_too_few_shares_are_revealed(rng):
    vectors = random_vectors(rng, 5)
    done = Exchange(vectors, ((), ("site 04",), ()))
    while len(done.revealed) >= threshold(5):
        done.revealed.popitem()
    with pytest.raises(ValueError, match="2 shares of a secret, but 3 are needed"):
        done.sum()


def test_a_site_never_reveals_twice_nor_for_too_few(rng):
    vectors = random_vectors(rng, 5)
    done = Exchange(vectors)
    with pytest.raises(UserError, match="already"):
        done.sites["site 00"].reveal(set(vectors) - {"site 01"})
    done = Exchange(vectors, ((), (), tuple(vectors)))
    site, few = done.sites["site 00"], ["site 00", "site 01"]
    assert least_survivors(done.members) == 3
    with pytest.raises(UserError, match="2 sites are left in this round, and 3 are needed"):
        site.reveal(few)
    with pytest.raises(UserError, match="a sum without this site"):
        site.reveal(["site 01", "site 02", "site 03"])
    with pytest.raises(UserError, match="6 sites are left"):
        site.reveal([*vectors, "stranger"])
    assert site.reveal(vectors).shares.keys() == vectors.keys()


def test_a_site_sends_its_vectors_once(rng):
    """Two under the same masks would show their difference: the server could send another model to train."""
    done = Exchange(random_vectors(rng, 3))
    with pytest.raises(UserError, match="has sent its vectors of this round already"):
        done.sites["site 00"].masked({}, {"w": np.zeros(50, WORD)})


@pytest.mark.parametrize("changed", [{"w": 9}, {"w": 1, "v": 1}])
def test_sites_that_were_told_different_tables_notice(changed, rng):
    """A server could tell one site that its weight is large, and the others that it is small."""
    vectors = random_vectors(rng, 3)
    sites = {name: Masker(name, CONTEXT) for name in vectors}
    members = {name: site.public({"w": 1}) for name, site in sites.items()}
    other = {**members, "site 02": members["site 02"]._replace(models=changed)}
    blobs = {name: site.share(other if name == "site 00" else members) for name, site in sites.items()}
    with pytest.raises(UserError, match="the server told it of other sites"):
        sites["site 01"].masked({"site 00": blobs["site 00"]["site 01"]}, vectors["site 01"])


def test_a_site_refuses_a_round_that_protects_nobody_or_that_was_tampered_with(rng):
    vectors = random_vectors(rng, 3)
    sites = {name: Masker(name, CONTEXT) for name in vectors}
    members = {name: site.public({"w": 1}) for name, site in sites.items()}
    first = sites["site 00"]
    with pytest.raises(UserError, match="at least 3 sites in a round, and there are 2"):
        first.share({name: members[name] for name in ("site 00", "site 01")})
    forged = Masker("site 00", CONTEXT).public({"w": 1})
    with pytest.raises(UserError, match="changed this site's keys"):
        first.share({**members, "site 00": forged})
    with pytest.raises(UserError, match="the same key"):
        first.share({**members, "site 02": members["site 01"]})
    blobs = {name: site.share(members) for name, site in sites.items()}
    with pytest.raises(UserError, match="already"):
        first.share(members)
    changed = bytearray(blobs["site 01"]["site 00"])
    changed[20] ^= 1
    with pytest.raises(UserError, match="shares of site 01 were changed"):
        first.masked({"site 01": bytes(changed)}, vectors["site 00"])
    with pytest.raises(UserError, match="other models than it announced"):
        first.masked({}, {"v": vectors["site 00"]["w"]})
    with pytest.raises(UserError, match="only 1 of this site's neighbours"):
        first.masked({}, vectors["site 00"])


def test_models_with_two_senders_are_summed():
    sites = {"a": "wv", "b": "wv", "c": "v"}
    members = {name: Masker(name, CONTEXT).public(dict.fromkeys(m, 1)) for name, m in sites.items()}
    assert summed(members, ["a", "b", "c"]) == ["v", "w"]
    assert summed(members, ["a", "c"]) == ["v"]
    assert summed(members, ["c"]) == []
