"""What the server reads from the network: little from strangers, from sites no more than the models weigh."""

import asyncio
from base64 import b64encode
from datetime import timedelta
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from fastapi import HTTPException
from federations import terms
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from starlette.datastructures import Headers

from fedhassle.federation.build import agreed_method, empty_dataset, largest_answer, run_settings
from fedhassle.federation.server import limits

KEY = ec.generate_private_key(ec.SECP384R1())
PUBLIC = public_key_to_bytes(KEY.public_key())


def signed(key=KEY, age=0.0, forged=False):
    """The headers of a node's request, signed some seconds ago."""
    time = (now() - timedelta(seconds=age)).isoformat()
    signature = sign_message(key, b"other" if forged else time.encode())
    return {
        limits.FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public_key_to_bytes(key.public_key())).decode(),
        limits.FLEET_HTTP_SIGNATURE_HEADER: b64encode(signature).decode(),
        limits.TIMESTAMP_HEADER: time,
    }


def status_of(path, length, headers=None, largest=5_000_000):
    """The status of an answer; 200 if the request is passed on. A body that is read is an error."""
    seen = []

    async def app(scope, receive, send):
        seen.append(200)

    async def send(message):
        seen.append(message.get("status"))

    async def receive():
        raise AssertionError("it must not be read")

    words = headers or {}
    words = words if length is None else {**words, "content-length": str(length)}
    scope = {"type": "http", "path": path, "headers": Headers(words).raw}
    limit = limits.BodyLimit(app, lambda: largest, lambda key: key == PUBLIC)
    asyncio.run(limit(scope, receive, send))
    return seen[0]


def test_a_stranger_may_send_little():
    for path in (limits.UPLOAD, "/v1/fleet/activate-node", "/v1/fleet/anything"):
        assert status_of(path, limits.SMALL) == 200
        assert status_of(path, limits.SMALL + 1) == 413
        assert status_of(path, None) == 411
        assert status_of(path, 10, {"transfer-encoding": "chunked"}) == 411  # the length would not count
    assert status_of("/v1/control/list-nodes", 10**10) == 200  # from this machine only


def test_an_admitted_site_may_send_its_models():
    assert status_of(limits.UPLOAD, 5_000_000, signed()) == 200
    assert status_of(limits.UPLOAD, 5_000_001, signed()) == 413
    assert status_of("/v1/fleet/push-messages", 5_000_000, signed()) == 413  # has no models
    other = ec.generate_private_key(ec.SECP384R1())
    for headers in (signed(other), signed(forged=True), signed(age=600), signed(age=-600)):
        assert status_of(limits.UPLOAD, 5_000_000, headers) == 413
    broken = signed() | {limits.FLEET_HTTP_SIGNATURE_HEADER: "no base64 ü"}
    assert status_of(limits.UPLOAD, 5_000_000, broken) == 413


def test_the_parts_of_an_answer_are_limited_together():
    stored = []
    push = limits.few_bytes(lambda request: stored.append(request.session_id), lambda: 2_000_000)

    def part(session, size):
        return SimpleNamespace(session_id=session, object_content=bytes(size))

    push(part("a", 1_500_000))
    push(part("b", 1_500_000))
    with pytest.raises(HTTPException):
        push(part("a", 600_000))
    push(part("a", 400_000))
    assert stored == ["a", "b", "a"]


def test_an_answer_has_few_parts():
    push = limits.few_parts(lambda request: "stored")
    tree = ObjectTree(object_id="m", children=[ObjectTree(object_id=str(k)) for k in range(5)])
    assert push(SimpleNamespace(message_object_trees=[tree], messages_list=["one"])) == "stored"
    parts = [ObjectTree(object_id=str(k)) for k in range(limits.MOST_PARTS)]
    many = ObjectTree(object_id="m", children=parts)
    for trees, messages in (([many], ["one"]), ([tree, tree], ["one", "two"])):
        with pytest.raises(HTTPException):
            push(SimpleNamespace(message_object_trees=trees, messages_list=messages))


def test_the_limit_is_read_from_a_file_that_may_change(tmp_path):
    largest = limits.Largest(tmp_path / "limit")
    assert largest() == limits.SMALL
    (tmp_path / "limit").write_text("7000000")
    assert largest() == 7_000_000


@pytest.mark.parametrize("name", ["hassle", "fedavg", "fedmatch", "local"])
def test_an_answer_of_every_agreed_model_fits(name):
    """The limit exceeds the bytes of all vectors that the method has, by less than fivefold and a margin."""
    agreed = terms(run=f'method = "{name}"')
    method = agreed_method(run_settings(agreed), empty_dataset(agreed))
    whole = 4 * sum(len(vector) for vector in method.initial(0).values())
    trained = 4 * sum(net.n_weights + net.n_statistics for net in method.networks().values())
    found = largest_answer(agreed) - 1_000_000
    assert max(whole, trained) < found <= 4 * max(whole, trained)
