"""One round of secure aggregation (Bonawitz et al., 2017), with neighbours as in SecAgg+ (Bell et al., 2020).

Four steps, in each of which a site may drop out: keys, shares, masked vectors, and what removes the masks.
Each pair of neighbours agrees on a mask that one adds and the other subtracts, and each site adds one of its
own to each model. Shares of the secrets behind them lie with the neighbours: of a site that stays, the server
gets the own mask, of one that drops out the key of the pairwise masks, and of none both.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fedhassle.errors import UserError, require
from fedhassle.federation.masks.ring import WORD, derived, stream
from fedhassle.federation.masks.shares import SECRET, SHARE, join, split
from fedhassle.federation.masks.signatures import Signer
from fedhassle.federation.messages import to_json

DEGREE = 32  # neighbours of a site; with fewer sites, all others
LEAST_SITES = 3  # of two, each knows the other's vector from the sum
LEAST_SENDERS = 2  # of a model, or its sum is one site's
NONCE = 12  # bytes
OWN_KEY = ""  # name of the key among a site's secrets; those of models have the models' names

Vectors = dict[str, np.ndarray]
"""Numbers of the ring by model."""


class Member(NamedTuple):
    """A site in a round as the others know it: public keys, and the models that it sends, with weights."""

    cipher: bytes  # for the shares that they send it
    mask: bytes  # for pairwise masks
    models: Mapping[str, int]
    signature: bytes = b""  # under both keys, by the key with which the site was admitted


Members = Mapping[str, Member]


class Revealed(NamedTuple):
    """A site's shares of the secrets that remove masks: by owner, then by name of the secret."""

    shares: Mapping[str, Mapping[str, bytes]]


def least_survivors(members: Members) -> int:
    """The fewest sites whose vectors a sum may have: more than a half of those that sent keys."""
    return len(members) // 2 + 1


def neighbours(members: Members, degree: int = DEGREE) -> dict[str, tuple[str, ...]]:
    """The sites that each shares masks and secrets with: in a ring of all, and in one of a model's senders.

    The order of a ring is one that no one site can choose. Without the rings of senders, the few that send a
    model might be no neighbours, and nothing but a mask that is revealed would hide what each sent.
    """
    everyone = b"".join(member.mask for _, member in sorted(members.items()))
    order = sorted(members, key=lambda name: hashlib.sha256(everyone + name.encode()).digest())
    groups = {frozenset(members), *map(frozenset, senders(members, members).values())}
    near = {name: set[str]() for name in order}
    for group in groups:
        ring = [name for name in order if name in group]
        half = min(degree // 2, len(ring) // 2)
        for i, name in enumerate(ring):
            near[name] |= {ring[(i + d) % len(ring)] for d in range(-half, half + 1)}
    return {name: tuple(sorted(found - {name})) for name, found in near.items()}


def senders(members: Members, survivors: Iterable[str]) -> dict[str, list[str]]:
    """By model, the survivors that sent it."""
    there = sorted(survivors)
    models = sorted({model for name in there for model in members[name].models})
    return {model: [name for name in there if model in members[name].models] for model in models}


def threshold(holders: int) -> int:
    """The number of shares that give a secret back: those of more than half of their holders."""
    return holders // 2 + 1


def points(members: Members) -> dict[str, int]:
    """The place of each site's shares on a polynomial."""
    return {name: i for i, name in enumerate(sorted(members), 1)}


def bound(members: Members, context: str) -> str:
    """A context that the whole table of a round is part of: sites that were told different ones share no key.

    Otherwise a server could tell one site that others hide its model, and these that they do not send it.
    """
    table = {
        name: [member.cipher.hex(), member.mask.hex(), dict(member.models)]
        for name, member in members.items()
    }
    return f"{context} {hashlib.sha256(to_json(table).encode()).hexdigest()}"


class Masker:
    """A site's side of one round. Its secrets live in memory only, and are used once."""

    def __init__(self, name: str, context: str, signer: Signer | None = None) -> None:
        self.name, self.context = name, context  # the context binds keys to a run and a round
        self._cipher, self._mask = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self._signer = signer
        self.members: dict[str, Member] = {}
        self._near: dict[str, tuple[str, ...]] = {}
        self._seeds: dict[str, bytes] = {}  # own masks, by model
        self._held: dict[str, dict[str, bytes]] = {}  # others' shares, by owner
        self._bound = ""  # the context, and the table of the round
        self._sent = self._revealed = False

    def public(self, models: Mapping[str, int]) -> Member:
        """Step 1: its public keys, and the models that it will send."""
        keys = self._public_keys()
        signature = b"" if self._signer is None else self._signer.signed(self.name, self.context, keys)
        return Member(*keys, dict(models), signature)

    def _public_keys(self) -> tuple[bytes, bytes]:
        return self._cipher.public_key().public_bytes_raw(), self._mask.public_key().public_bytes_raw()

    def share(self, members: Members) -> dict[str, bytes]:
        """Step 2: encrypted shares of its secrets for each neighbour; refuses a round without protection."""
        require(not self.members, "this site has shared its secrets in this round already")
        require(
            len(members) >= LEAST_SITES,
            f"masks need at least {LEAST_SITES} sites in a round, and there are {len(members)}",
        )
        mine = members.get(self.name)
        if mine is None or mine[:2] != self._public_keys():
            raise UserError("the server changed this site's keys")
        for peer, member in members.items():
            if self._signer is not None and peer != self.name:
                self._signer.require_signed(peer, self.context, member[:2], member.signature)
        keys = [key for member in members.values() for key in (member.cipher, member.mask)]
        require(len(set(keys)) == len(keys), "two sites of this round have the same key")
        self.members, self._near = dict(members), neighbours(members)
        self._bound = bound(members, self.context)
        self._seeds = {model: secrets.token_bytes(SECRET) for model in mine.models}
        place, holders = points(members), self._holders(self.name)
        named = {OWN_KEY: self._mask.private_bytes_raw(), **self._seeds}
        parts = {
            name: split(secret, [place[h] for h in holders], threshold(len(holders)))
            for name, secret in named.items()
        }
        packed = {h: b"".join(parts[name][place[h]] for name in sorted(parts)) for h in holders}
        self._held[self.name] = self._unpacked(self.name, packed.pop(self.name))
        return {peer: self._encrypted(peer, blob) for peer, blob in packed.items()}

    def masked(self, received: Mapping[str, bytes], vectors: Vectors) -> Vectors:
        """Step 3: its vectors under masks, after it has read the shares that its neighbours sent; once.

        The difference of two vectors under the same masks would show itself.
        """
        require(bool(self.members), "the round began without this site")
        require(not self._sent, "this site has sent its vectors of this round already")
        mine = self.members[self.name]
        require(vectors.keys() == mine.models.keys(), "this site sends other models than it announced")
        for peer, blob in received.items():
            require(peer in self._holders(self.name), f"{peer} is no neighbour of this site in this round")
            self._held[peer] = self._unpacked(peer, self._decrypted(peer, blob))
        holders = len(self._held)
        require(
            holders >= threshold(len(self._holders(self.name))),
            f"only {holders} of this site's neighbours are left, too few for masks",
        )
        self._sent = True
        found = {}
        for model, vector in vectors.items():
            total = vector + stream(self._seeds[model], model, len(vector))
            for peer in self._held.keys() - {self.name}:
                if model in self.members[peer].models:
                    seed = pair_seed(self._mask, self.members[peer].mask, self._bound)
                    total = add(total, stream(seed, model, len(vector)), self.name < peer)
            found[model] = total.astype(WORD)
        return found

    def reveal(self, survivors: Iterable[str]) -> Revealed:
        """Step 4: for each neighbour the share of its own masks if it survived, else of its key; once.

        A model whose sum would show what one site sent keeps its masks (`summed`).
        """
        there = set(survivors)
        require(not self._revealed, "this site has revealed its shares of this round already")
        require(self.name in there, "the server asks for a sum without this site")
        require(
            there <= self.members.keys() and len(there) >= least_survivors(self.members),
            f"{len(there)} sites are left in this round, and {least_survivors(self.members)} are needed",
        )
        self._revealed = True
        open_models = summed(self.members, there)
        return Revealed(
            {
                owner: {m: shares[m] for m in open_models if m in shares}
                if owner in there
                else {OWN_KEY: shares[OWN_KEY]}
                for owner, shares in self._held.items()
            }
        )

    def _holders(self, name: str) -> list[str]:
        """The sites that hold shares of a site's secrets: its neighbours and itself."""
        return [name, *self._near[name]]

    def _unpacked(self, owner: str, blob: bytes) -> dict[str, bytes]:
        """The shares of a site's secrets, by name."""
        names = sorted([OWN_KEY, *self.members[owner].models])
        require(len(blob) == SHARE * len(names), f"{owner} sent shares of another length")
        return {name: blob[SHARE * i : SHARE * (i + 1)] for i, name in enumerate(names)}

    def _encrypted(self, peer: str, blob: bytes) -> bytes:
        nonce = secrets.token_bytes(NONCE)
        return nonce + self._box(peer).encrypt(nonce, blob, f"{self.name}\0{peer}".encode())

    def _decrypted(self, peer: str, blob: bytes) -> bytes:
        try:
            return self._box(peer).decrypt(blob[:NONCE], blob[NONCE:], f"{peer}\0{self.name}".encode())
        except InvalidTag as error:
            raise UserError(
                f"the shares of {peer} were changed on their way, or the server told it of other sites"
            ) from error

    def _box(self, peer: str) -> ChaCha20Poly1305:
        agreed = self._cipher.exchange(X25519PublicKey.from_public_bytes(self.members[peer].cipher))
        return ChaCha20Poly1305(derived(agreed, f"shares {self._bound}"))


def pair_seed(key: X25519PrivateKey, peer: bytes, context: str) -> bytes:
    """The seed of the mask that two sites share."""
    return derived(key.exchange(X25519PublicKey.from_public_bytes(peer)), f"pair {context}")


def add(total: np.ndarray, mask: np.ndarray, positive: bool) -> np.ndarray:
    """The numbers with a mask added or subtracted, modulo 2³²."""
    found: np.ndarray = total + mask if positive else total - mask
    return found


def summed(members: Members, survivors: Iterable[str]) -> list[str]:
    """The models whose sum is revealed: that at least two survivors sent, and whose masks tie all of these.

    Senders that others have left without a common neighbour would show the sum of each part by itself.
    """
    near = neighbours(members)
    return [
        model
        for model, there in senders(members, survivors).items()
        if len(there) >= LEAST_SENDERS and connected(there, near)
    ]


def connected(names: Sequence[str], near: Mapping[str, Sequence[str]]) -> bool:
    """True if each of some sites is reached from any other over neighbours among them."""
    left, reached = set(names[1:]), list(names[:1])
    while reached:
        found = left.intersection(near[reached.pop()])
        left -= found
        reached += found
    return not left


def unmasked(
    members: Members,
    sharing: Sequence[str],
    masked: Mapping[str, Vectors],
    revealed: Mapping[str, Revealed],
    context: str,
) -> Vectors:
    """The sum of the survivors' vectors, by model; raises ValueError if too few shares were revealed.

    `sharing`: the sites that sent shares in step 2; `masked`: the vectors of those that survived step 3;
    `context`: of the run and the round.
    """
    place, near, context = points(members), neighbours(members), bound(members, context)

    def secret(owner: str, name: str) -> bytes:
        given = {
            place[holder]: told.shares[owner][name]
            for holder, told in revealed.items()
            if name in told.shares.get(owner, {})
        }
        return join(given, threshold(len(near[owner]) + 1))

    dropped = [name for name in sharing if name not in masked]
    keys = {name: X25519PrivateKey.from_private_bytes(secret(name, OWN_KEY)) for name in dropped}
    sums = {}
    for model in summed(members, masked):
        there = [name for name in masked if model in masked[name]]
        total = np.zeros_like(masked[there[0]][model])
        for name in there:
            total = total + masked[name][model]
            total = total - stream(secret(name, model), model, len(total))
            for gone in dropped:
                if gone in near[name] and model in members[gone].models:
                    seed = pair_seed(keys[gone], members[name].mask, context)
                    total = add(total, stream(seed, model, len(total)), name > gone)
        sums[model] = total
    return sums
