"""Signatures under the keys of a round: a server cannot put its own keys in the place of a site's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedhassle.errors import UserError, require
from fedhassle.federation.messages import to_json
from fedhassle.federation.setup.keys import read_public_key, read_site_key

PEERS = "peers"  # folder beside federation.toml at a site, with the public keys of the other sites
ALGORITHM = ec.ECDSA(hashes.SHA384())


class Signer(NamedTuple):
    """A site's own key, and the public keys of the others, as lines of OpenSSH; {}: nothing is checked."""

    key: ec.EllipticCurvePrivateKey
    peers: Mapping[str, str]

    def signed(self, name: str, context: str, keys: tuple[bytes, bytes]) -> bytes:
        """Signs a site's keys of a round."""
        return self.key.sign(statement(name, context, keys), ALGORITHM)

    def require_signed(self, name: str, context: str, keys: tuple[bytes, bytes], signature: bytes) -> None:
        """Refuses keys that the site of this name has not signed."""
        if not self.peers:
            return
        require(
            name in self.peers,
            f"{name} takes part in this round, but this site's folder {PEERS} has no key of {name}: get its "
            "public key from that site itself",
        )
        public = serialization.load_ssh_public_key(self.peers[name].encode())
        assert isinstance(public, ec.EllipticCurvePublicKey)  # as `read_public_key` has checked
        try:
            public.verify(signature, statement(name, context, keys), ALGORITHM)
        except InvalidSignature as error:
            raise UserError(
                f"the keys of {name} in this round are not signed by the key that this site has of it: the "
                f"server has changed them, or {name} has a new key; ask that site"
            ) from error


def statement(name: str, context: str, keys: tuple[bytes, bytes]) -> bytes:
    """The text that a site signs: its name, the run and round, and its keys for shares and masks."""
    cipher, mask = (key.hex() for key in keys)
    return to_json({"masks of": name, "round": context, "cipher": cipher, "mask": mask}).encode()


def read_signer(key: Path, peers: Path) -> Signer:
    """Reads a site's key, and the public keys in a folder, if there is one: each named after its site."""
    return Signer(
        read_site_key(key), {path.stem: read_public_key(path) for path in sorted(peers.glob("*.pub"))}
    )
