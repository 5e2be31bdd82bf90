"""The door of a run: who is let in, in what order it is asked, and what a log makes of it."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.admission.admission import Admission, Admitted
from hetpeer.bootstrap.admission.proof_of_work import find_proof, is_proof
from hetpeer.bootstrap.run.amendment import Amendment
from hetpeer.bootstrap.run.manifest import public_bytes
from hetpeer.bootstrap.run.settings import AdmissionSettings
from hetpeer.bootstrap.run.vouchers import (
    VOUCHER,
    Voucher,
    as_text,
    new_voucher,
    of_text,
    read_voucher,
    sign_voucher,
)

RUN, OTHER_RUN = "3f" * 16, "a0" * 16
OWNER, STRANGER = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
NOW = 1_800_000_000.0
ANNA, BEN, CLEO = (f"Qm{letter * 44}" for letter in "ABC")
PLAIN = m.Hello(run=RUN, incarnation=1)


def voucher(uses=2, expires=int(NOW) + 60, run=RUN, key=OWNER):
    return sign_voucher(new_voucher(run, uses, expires), key)


def serial(data):
    return read_voucher(data, public_bytes(OWNER), RUN).serial


def with_voucher(data):
    return PLAIN.model_copy(update={"voucher": data})


def door(policy="open", records=(), **settings):
    return Admission(RUN, public_bytes(OWNER), AdmissionSettings(policy=policy, **settings), records)


def amendment(sequence=1, **lists):
    return Amendment(run_id=RUN, sequence=sequence, coordinators=(CLEO,), **lists)


def found(peer=ANNA):
    return {"kind": "banned", "peer": peer, "why": "false sums", "step": 3}


def recorded(sequence):
    return {"kind": "amendment", "sequence": sequence, "data": ""}


def judged(keeper, peer=ANNA, hello=PLAIN, now=NOW, network="", others=()):
    return keeper.judge(peer, hello, now, network, others)


def reason(verdict):
    assert isinstance(verdict, m.Rejected), verdict
    return verdict.reason


def test_an_open_door_takes_everybody_but_whom_the_author_bans():
    keeper = door()
    assert judged(keeper) == Admitted()
    keeper.amended(amendment(banned=(ANNA,)))
    assert reason(judged(keeper)) == "banned"
    assert keeper.bans(ANNA)
    assert judged(keeper, BEN) == Admitted()
    keeper.amended(amendment())
    assert judged(keeper) == Admitted()


def test_who_is_banned_by_what_others_have_found_may_come_once_the_author_says_so():
    keeper = door(records=[recorded(1), found(), found(BEN)])
    assert "false sums" in judged(keeper).why
    keeper.amended(amendment(2, pardoned={ANNA: 2}))
    assert not keeper.bans(ANNA)
    assert judged(keeper) == Admitted()
    assert keeper.bans(BEN), "nobody else"


@pytest.mark.parametrize("rebuilt", [False, True], ids=["seen", "from the log"])
def test_a_pardon_is_for_what_was_before_it(rebuilt):
    """And one amendment more, about something else, does not pardon again."""
    log = [recorded(1), found(), recorded(2), found(BEN)]
    keeper = door(records=log if rebuilt else log[:2])
    keeper.amended(amendment(2, pardoned={ANNA: 2, BEN: 2}))
    if not rebuilt:
        keeper.recorded(found(BEN))
    assert (keeper.bans(ANNA), keeper.bans(BEN)) == (False, True)
    keeper.recorded(found())
    keeper.amended(amendment(3, pardoned={ANNA: 2, BEN: 2}))
    assert keeper.bans(ANNA)
    keeper.amended(amendment(4, pardoned={ANNA: 4}))
    assert not keeper.bans(ANNA)


def test_who_is_pardoned_is_still_banned_by_the_author():
    keeper = door(records=[found()])
    keeper.amended(amendment(2, pardoned={ANNA: 2}, banned=(ANNA,)))
    assert "author" in judged(keeper).why


def test_a_list_is_who_may_come():
    keeper = door("listed")
    assert reason(judged(keeper)) == "uninvited"
    keeper.amended(amendment(listed=(ANNA, BEN), banned=(BEN,)))
    assert judged(keeper) == Admitted()
    assert reason(judged(keeper, BEN)) == "banned"
    keeper.amended(amendment())
    assert keeper.bans(ANNA), "who is not listed any more leaves"


def test_a_voucher_admits_as_many_as_it_says_and_each_for_good():
    keeper, paper = door("invited"), with_voucher(voucher(uses=2))
    assert reason(judged(keeper)) == "uninvited"
    records = [judged(keeper, peer, paper).record for peer in (ANNA, BEN)]
    assert records[0] == {"kind": "admitted", "peer": ANNA, "serial": serial(paper.voucher)}
    assert judged(keeper) == Admitted(), "it needs no voucher any more, and there is nothing to record"
    assert judged(keeper, ANNA, paper) == Admitted()
    verdict = judged(keeper, CLEO, paper)
    assert reason(verdict) == "uninvited"
    assert "for 2 peers" in verdict.why
    keeper.amended(amendment(listed=(CLEO,)))
    assert judged(keeper, CLEO) == Admitted(), "the author's word will do"
    again = door("invited", [{"kind": "reign", "term": 3}, *records, records[0]])
    assert judged(again, BEN) == Admitted()
    assert reason(judged(again, CLEO, paper)) == "uninvited", "the log has its uses, each once"


@pytest.mark.parametrize(
    ("paper", "why"),
    [
        (voucher(expires=int(NOW) - 1), "expired"),
        (voucher(run=OTHER_RUN), "another run"),
        (voucher(key=STRANGER), "not signed"),
        (b"nothing of the kind", "damaged"),
        (VOUCHER.seal({"uses": 10**9}, OWNER), "damaged"),
    ],
    ids=["past", "elsewhere", "forged", "rubbish", "unsound"],
)
def test_a_voucher_that_is_not_good(paper, why):
    keeper = door("invited")
    verdict = judged(keeper, hello=with_voucher(paper))
    assert reason(verdict) == "uninvited"
    assert why in verdict.why


def test_a_voucher_that_was_revoked_admits_nobody_new():
    keeper, paper = door("invited"), with_voucher(voucher(uses=5))
    assert judged(keeper, ANNA, paper).record is not None
    keeper.amended(amendment(revoked=(serial(paper.voucher),)))
    assert judged(keeper) == Admitted()
    assert "revoked" in judged(keeper, BEN, paper).why


@given(st.integers(0, 400), st.integers(1, 255))
def test_every_byte_of_a_voucher_counts(place, change):
    data = bytearray(voucher())
    data[place % len(data)] ^= change
    with pytest.raises(ValueError, match=r"damaged|not signed|another run"):
        read_voucher(bytes(data), public_bytes(OWNER), RUN)


@given(st.binary(max_size=512))
def test_a_voucher_as_text(data):
    assert of_text(as_text(data)) == data
    assert as_text(data).isalnum() or not data


@pytest.mark.parametrize("text", ["a", "A7", "a=", "ö", "ab", "a" * 2000])
def test_a_text_that_is_no_voucher(text):
    with pytest.raises(ValueError):
        of_text(text)


def test_a_voucher_fits_where_it_goes():
    largest = Voucher(run_id=RUN, serial="f" * 16, expires=2**40 - 1, uses=2**31 - 1)
    assert len(sign_voucher(largest, OWNER)) < VOUCHER.max_bytes
    assert with_voucher(sign_voucher(largest, OWNER))


def test_a_proof_of_work_is_one_peers_in_one_run():
    nonce = find_proof(RUN, ANNA, 12)
    keeper = door(work_bits=12)
    assert judged(keeper, hello=PLAIN.model_copy(update={"work": nonce})) == Admitted()
    assert reason(judged(keeper)) == "work"
    assert reason(judged(keeper, BEN, PLAIN.model_copy(update={"work": nonce}))) == "work"
    assert not is_proof(nonce, OTHER_RUN, ANNA, 12)
    assert not is_proof(nonce + b"\0", RUN, ANNA, 0), "it has a length"
    assert is_proof(b"", RUN, ANNA, 0)
    fewer = sum(is_proof(number.to_bytes(2, "big"), RUN, ANNA, 4) for number in range(4096))
    assert 150 < fewer < 370, "one in 2**4"


def test_a_network_has_its_number():
    keeper, paper = door("invited", per_network=2), with_voucher(voucher())
    here = "192.0.2.0/24"
    assert judged(keeper, ANNA, paper, network=here, others=[here, "198.51.100.0/24"]).record
    verdict = judged(keeper, BEN, paper, network=here, others=[here, here])
    assert reason(verdict) == "crowded"
    assert judged(keeper, CLEO, paper, network="", others=["", "", ""]).record, "nobody knows where it is"
    assert reason(judged(keeper, BEN, paper)) == "uninvited", (
        "the two uses are used, none by who was turned away"
    )
