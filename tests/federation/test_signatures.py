"""Signed keys under masks: a server that puts other keys in the place of a site's is noticed."""

from functools import partial

import federations
import pytest
import small

from fedhassle.engine.rounds import Plan, federate
from fedhassle.errors import UserError
from fedhassle.federation.masks.contribution import MaskTerms
from fedhassle.federation.masks.protocol import Masker
from fedhassle.federation.masks.signatures import PEERS, Signer, read_signer
from fedhassle.federation.masks.words import member_words
from fedhassle.federation.messages import Payload
from fedhassle.federation.setup.keys import make_site_key, read_public_key, read_site_key
from fedhassle.federation.site.masked import MaskedRounds

NAMES = ("north", "south", "east")


@pytest.fixture
def signers(tmp_path):
    """By site, its own key and the public keys of all."""
    for name in NAMES:
        make_site_key(tmp_path / f"{name}.key", tmp_path / PEERS / f"{name}.pub", name)
    return {name: read_signer(tmp_path / f"{name}.key", tmp_path / PEERS) for name in NAMES}


def members_of(maskers):
    return {name: masker.public({"w": 1}) for name, masker in maskers.items()}


def test_sites_that_know_each_others_keys_share(signers):
    maskers = {name: Masker(name, "run 1", signer) for name, signer in signers.items()}
    members = members_of(maskers)
    for name, masker in maskers.items():
        assert masker.share(members).keys() == set(NAMES) - {name}


def test_a_server_that_poses_as_a_site_is_noticed(signers):
    """With keys of its own: unsigned, or with a signature of another key, round or site."""
    maskers = {name: Masker(name, "run 1", signer) for name, signer in signers.items()}
    members, forged = members_of(maskers), Masker("east", "run 1").public({"w": 1})
    earlier = Masker("east", "run 0", signers["east"]).public({"w": 1})
    other = Masker("east", "run 1", signers["south"]).public({"w": 1})
    mixed = forged._replace(signature=members["east"].signature)
    for false in (forged, earlier, other, mixed, members["south"]._replace(mask=forged.mask)):
        masker = Masker("north", "run 1", signers["north"])
        told = {**members, "north": masker.public({"w": 1}), "east": false}
        with pytest.raises(UserError, match="the keys of east in this round are not signed"):
            masker.share(told)


def test_a_server_that_invents_a_site_is_noticed(signers):
    masker = Masker("north", "run 1", signers["north"])
    told = {
        "north": masker.public({"w": 1}),
        "south": Masker("south", "run 1", signers["south"]).public({"w": 1}),
    }
    with pytest.raises(UserError, match="folder peers has no key of west"):
        masker.share({**told, "west": Masker("west", "run 1").public({"w": 1})})


def test_without_keys_of_others_nothing_is_checked(signers):
    masker = Masker("north", "run 1", Signer(signers["north"].key, {}))
    members = {name: Masker(name, "run 1").public({"w": 1}) for name in NAMES}
    assert masker.share({**members, "north": masker.public({"w": 1})})


def test_a_key_of_an_earlier_round_is_refused(signers):
    """Its secret may be known to the server, which removed the masks of a site that dropped out."""
    others = {name: Masker(name, "run 1", signers[name]).public({"w": 1}) for name in ("south", "east")}
    site = MaskedRounds("north", MaskTerms(), signers["north"])
    round_one = {"run": "run", "round": 1}

    def share():
        mine = site.answer(Payload({**round_one, "step": "keys"}), lambda: None).words
        told = {name: member_words(member) for name, member in others.items()}
        members = {**told, "north": {**mine, "models": {"w": 1}}}
        return site.answer(Payload({**round_one, "step": "shares", "members": members}), lambda: None)

    assert share().words["shares"].keys() == {"south", "east"}
    with pytest.raises(UserError, match="repeats a key of an earlier round"):
        share()


def test_rounds_with_signed_keys(tmp_path):
    """Through the server's own code, three sites of six with labels; and one whose key is another's."""
    agreed = federations.terms(run="method.name = 'fedavg'\nprivacy.masks = true\n")
    names = small.SPLIT.names
    for name in names:
        make_site_key(
            tmp_path / "keys" / f"{name}.key", tmp_path / PEERS / f"{name}.pub", name.replace(" ", "-")
        )
    peers = {name: read_public_key(tmp_path / PEERS / f"{name}.pub") for name in names}
    for false in (False, True):
        method, federation, transport = federations.federation(tmp_path / str(false), "fedavg", agreed)
        for name, answer in transport.sites.items():
            key = names[1] if false and name == names[0] else name
            signer = Signer(read_site_key(tmp_path / "keys" / f"{key}.key"), peers)
            site = answer.__self__
            site.masks = MaskedRounds(name, site.masks.terms, signer)
        train = partial(federate, method, federation, Plan(1, 9, 0), method.initial(0))
        if not false:
            assert not small.same(next(train()).state, method.initial(0))
            continue
        with pytest.raises(
            UserError, match=r"no site sent its vectors .* the keys of client 1 .* not signed"
        ):
            next(train())
