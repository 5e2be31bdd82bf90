"""The ranking by credit, as it is made, served and read."""

import msgpack
import pytest

from hetpeer.bootstrap.log.credit_ranking import FIRST, MAX_BYTES, decode, encode, ranking
from hetpeer.bootstrap.run.membership_config import MembershipConfig
from hetpeer.bootstrap.storage.file_service import ServedRunFiles
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.file_pieces import read
from hetpeer.peer.daemon.presence import no_state

NAMES = [f"Qm{'x' * 40}{number:04}".replace("0", "o") for number in range(1, 151)]
CREDIT = {name: 10 * (place // 2) for place, name in enumerate(NAMES, 2)}


def test_who_has_most_comes_first_and_equals_share_a_rank():
    found = ranking(CREDIT, NAMES[0])
    assert (found.contributors, found.total, len(found.first)) == (150, sum(CREDIT.values()), FIRST)
    assert [one.rank for one in found.first[:4]] == [1, 1, 3, 3]
    assert (found.yours.credit, found.yours.rank) == (10, 149)
    assert ranking(CREDIT, "Qmnobodyknows").yours.rank == 0
    assert ranking(CREDIT).yours is None
    assert ranking({}).first == ()


def test_the_longest_has_room():
    longest = ranking({name * 2: 2**52 // 150 for name in NAMES}, "y" * 100)
    assert len(encode(longest)) < MAX_BYTES
    assert decode(encode(longest), "peer") == longest


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xc1",
        msgpack.packb([]),
        msgpack.packb({"total": -1, "contributors": 0, "first": []}),
        msgpack.packb({"total": 2**60, "contributors": 0, "first": []}),
        msgpack.packb({"total": 1, "contributors": 1, "first": [["Qmx", 1, 1]]}),
        msgpack.packb({"total": 1, "contributors": 1, "first": [{"peer": "<b>", "credit": 1, "rank": 1}]}),
        encode(ranking(CREDIT))[:-1],
    ],
)
def test_an_answer_that_is_none_is_refused(answer):
    with pytest.raises(ProtocolError):
        decode(answer, "peer")


async def test_the_shelf_has_it_where_the_log_is(fresh, tmp_path):
    membership = MembershipConfig(fresh.signed, tmp_path)
    volunteers = ServedRunFiles(fresh, membership, no_state)
    reliable = ServedRunFiles(
        fresh, membership, no_state, {"credit": lambda peer: encode(ranking(CREDIT, peer))}
    )
    async with volunteers.find("credit") as served:
        assert served is None
    async with reliable.find("credit/a/b") as served:
        assert served is None
    async with reliable.find("credit") as served:
        assert decode(bytes(read(served.data, 0, served.data.nbytes)), "peer") == ranking(CREDIT)
    async with reliable.find(f"credit/{NAMES[3]}") as served:
        assert decode(bytes(read(served.data, 0, served.data.nbytes)), "peer") == ranking(CREDIT, NAMES[3])
    for junk in ("<b>", "a" * 101):
        with pytest.raises(ProtocolError):
            async with reliable.find(f"credit/{junk}"):
                pass
