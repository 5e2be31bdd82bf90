"""Links shrink as little as keeps the pipeline fed; FusionLLM's Eq. 7 is what is left when computing is
free.
"""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.run.settings import LinkSettings
from hetpeer.peer.transport.link_book import EASE, LEAST, RECENT, LinkBook, PaceClaim
from hetpeer.peer.transport.uplink import ARRIVALS, KNOWN, SEEN, SEVERAL, WINDOW_S, WINDOWS
from hetpeer.stages.links.adaptive_ratio import (
    GENTLE,
    SLACK,
    STEADY,
    coding_for,
    ratio_of,
    share_for,
    steadied,
    warmed_up,
)
from hetpeer.stages.links.codec import Codec
from tests.stages.aims import target_of

SPARSE = Codec.of("topk-int8")
MIB = 1 << 20


@pytest.mark.parametrize(
    ("limit", "ratio", "chosen"),
    [
        ("topk-int8", 1.0, "none"),
        ("topk-int8", 1.5, "bf16"),
        ("topk-int8", 2.0, "bf16"),
        ("topk-int8", 3.9, "int8"),
        ("topk-int8", 4.1, "topk-int8"),
        ("topk-int4", 3.9, "int8"),
        ("topk-int4", 4.1, "int4"),
        ("topk-int4", 7.6, "topk-int4"),
        ("topk-bf16", 2.1, "topk-bf16"),
        ("int8", 100.0, "int8"),
        ("bf16", 100.0, "bf16"),
        ("fp16", 1.5, "fp16"),
        ("none", 100.0, "none"),
    ],
)
def test_the_gentlest_codec_that_does(limit, ratio, chosen):
    assert str(coding_for(Codec.of(limit), ratio).codec) == chosen


@given(st.floats(4.0, 1000.0), st.sampled_from(["topk-int8", "topk-bf16"]), st.sampled_from([2.0, 4.0]))
def test_a_share_has_the_ratio_that_was_asked_for(ratio, name, width):
    codec = Codec.of(name)
    assert width / codec.cost(share_for(codec, ratio, width)) == pytest.approx(ratio, rel=1e-6)


@pytest.mark.parametrize(
    ("limit", "ratio", "rounded", "chosen"),
    [
        ("topk-int8", 0.9, 1.8, "bf16"),
        ("topk-int8", 2.5, 5.0, "int8"),
        ("topk-int8", 5.0, 10.0, "topk-int8"),
        ("topk-int4", 5.0, 10.0, "int4"),
        ("topk-int4", 8.0, 16.0, "topk-int4"),
        ("bf16", 5.0, 10.0, "bf16"),
        ("none", 5.0, 10.0, "none"),
    ],
)
def test_rounding_goes_further_than_leaving_out(limit, ratio, rounded, chosen):
    found = coding_for(Codec.of(limit), ratio, rounded=rounded)
    assert str(found.codec) == chosen
    if found.codec.sparse:
        assert 4.0 / found.codec.cost(found.share) == pytest.approx(ratio)


def test_halves_of_halves_are_no_gain():
    assert str(coding_for(SPARSE, 1.9, width=2.0).codec) == "int8"
    assert coding_for(SPARSE, 8.0, width=2.0).share == pytest.approx(coding_for(SPARSE, 16.0).share)


@given(st.lists(st.floats(1e-3, 10.0), min_size=1, max_size=8), st.floats(1.0, 200.0))
def test_eq_7_where_computing_costs_nothing(links, most):
    """r_e = max(1, r R_e / max R): the slowest link is shrunk by the author's ratio, the others in
    proportion.
    """
    target = target_of(links, [0.0], most)
    for seconds in links:
        assert ratio_of(seconds, target, most) == pytest.approx(max(1.0, most * seconds / max(links)))


def test_precision_that_buys_no_time_is_not_given_up():
    target = target_of([2.0, 0.5, 0.1], [0.25, 0.4], 100.0)
    assert target == 0.4
    assert [ratio_of(seconds, target, 100.0) for seconds in (2.0, 0.5, 0.1)] == pytest.approx(
        [5.0, 1.25, 1.0]
    )


@pytest.mark.parametrize(
    ("before", "ratio", "codec"),
    [
        ("int8", 4.2, "int8"),
        ("int8", 4.8, "int4"),
        ("int4", 3.7, "int4"),
        ("int4", 3.4, "int8"),
        ("none", 1.1, "none"),
        ("none", 1.2, "bf16"),
        ("bf16", 0.5, "none"),
        ("int4", 8.0, "int4"),
        ("int4", 40.0, "topk-int4"),
        ("topk-int4", 7.0, "topk-int4"),
        ("topk-int4", 4.5, "int4"),
        ("none", 12.0, "topk-int4"),
    ],
)
def test_a_codec_stays_while_noise_may_explain_another_ratio(before: str, ratio: float, codec: str) -> None:
    limit = Codec.of("topk-int4")
    found = steadied(Codec.of(before), limit, ratio, 100.0)
    assert str(found.codec) == codec
    if codec == "topk-int4":
        assert ratio / 1.01 <= 4.0 / found.codec.cost(found.share) <= max(ratio, 7.54) * 1.01


@given(st.lists(st.floats(1 / math.sqrt(STEADY), math.sqrt(STEADY)), min_size=2, max_size=30))
def test_noise_does_not_make_a_codec_flap(noise: list[float]) -> None:
    """At most one change follows, wherever the true ratio lies: that from no codec."""
    limit = Codec.of("topk-int4")
    for ratio in (1.0, 1.98, 3.97, 5.0, 7.53, 20.0):
        chosen = [Codec()]
        for factor in noise:
            chosen.append(steadied(chosen[-1], limit, max(ratio * factor, 1.0), 100.0).codec)
        assert sum(one != other for one, other in pairwise(chosen)) <= 1


def test_noise_is_no_reason_to_go_beyond_the_bound() -> None:
    """The largest ratio has risen no further than to 4 in a warm-up, or the author allows no more."""
    assert str(steadied(Codec.of("topk-int4"), Codec.of("topk-int4"), 3.9, 3.9).codec) == "int8"


def test_nothing_known_nothing_shrunk():
    assert target_of([], [1.0], 100.0) == 0.0
    assert ratio_of(5.0, 0.0, 100.0) == 1.0


# ── the book ────────────────────────────────────────────────────────────────────────────────────────────────


def book(**settings):
    return LinkBook(LinkSettings(codec="topk-int8", **settings))


def test_only_slow_links_are_shrunk():
    links = book()
    links.target = 0.1
    links.measured("near", 100 * MIB, 0.1)
    links.measured("far", MIB, 0.1)
    assert str(links.coding("near", MIB, 4.0, gradient=False).codec) == "none"
    far = links.coding("far", MIB, 4.0, gradient=False)
    assert far == coding_for(SPARSE, 10.0)
    assert links.paced().links == pytest.approx({"near": 0.01, "far": 1.0})


def test_a_rate_that_falls_by_ten_is_answered_at_once_and_noise_is_not() -> None:
    links = book()
    links.target = 0.1
    said = []
    for rate in (5.2, 4.9, 5.2, 4.9, 0.5, 5.2):
        links.measured("far", rate * MIB, 0.1)
        said.append(str(links.coding("far", MIB, 4.0, gradient=False).codec))
    assert said == ["int8", "int8", "int8", "int8", "topk-int8", "int8"]
    assert links.links["far"].codec == "int8"
    assert links.links["far"].aim_s == 0.1


def test_only_rounding_to_bytes_goes_further_than_the_target() -> None:
    """Half bytes cost more tokens than the slack between links and computation is worth."""
    links = LinkBook(LinkSettings(codec="topk-int4"))
    links.target = 0.1
    said = []
    for needed in (0.6, 1.5, 3.0, 3.8, 5.0, 9.0):
        links.measured(str(needed), MIB / (0.1 * needed), 0.1)
        said.append(str(links.coding(str(needed), MIB, 4.0, gradient=False).codec))
    assert said == ["bf16", "int8", "int8", "int8", "int4", "topk-int4"]


def test_an_unknown_line_and_tensors_without_floats_are_left_as_they_are() -> None:
    links = book()
    links.target = 0.1
    assert str(links.coding("far", MIB, 4.0, gradient=False).codec) == "none"
    links.measured("far", MIB / 10, 0.1)
    assert str(links.coding("far", MIB, 0.0, gradient=False).codec) == "none"
    assert links.links["far"].codec == "none", "integers are no sign of a fast line"


def test_before_a_link_is_measured_the_uplink_counts_that_the_volunteer_offers() -> None:
    """Otherwise the first bundles of a run go uncompressed over the slowest lines."""
    links = LinkBook(LinkSettings(codec="topk-int8"), MIB / 10)
    assert str(links.coding("far", MIB, 4.0, gradient=False).codec) == "none", "nothing was computed yet"
    links.computed("forward", 0.5)
    assert links.coding("far", MIB, 4.0, gradient=False) == coding_for(SPARSE, 10.0 / 1.5)
    links.computed("backward", 2.0)
    assert links.coding("far", MIB, 4.0, gradient=False) == coding_for(SPARSE, 10.0 / 2.5, rounded=8.0)
    links.coding("before", MIB, 4.0, gradient=True)
    assert links.coding("far", MIB, 4.0, gradient=False) == coding_for(SPARSE, 20.0 / 2.5)
    assert links.paced().links == {}, "the coordinator hears of measured links only"
    links.measured("far", MIB, 0.1)
    assert str(links.coding("far", MIB, 4.0, gradient=False).codec) == "none"


def full_uplink(links: LinkBook, rate: float) -> None:
    """Let two links be busy until their common rate, in bytes/s, is known."""
    for window in range(KNOWN):
        for arrival in range(ARRIVALS + 1):
            now = WINDOW_S * (window + arrival / ARRIVALS)
            links.outflow.look(now, SEVERAL, round(rate * now), 2 * MIB, 0.01)


def test_a_place_in_the_middle_sends_both_ways_over_one_line() -> None:
    """Each link alone has all of the line; a microbatch takes an activation and a gradient up."""
    links = book()
    links.target = 0.5
    for peer in ("next", "before"):
        links.measured(peer, MIB, 0.1)
    first = links.coding("next", 2 * MIB, 4.0, gradient=False)
    assert first == coding_for(SPARSE, 4.0, rounded=8.0)
    full_uplink(links, MIB)
    assert links.coding("next", 2 * MIB, 4.0, gradient=False) == first, "nothing goes back yet"
    links.coding("before", 2 * MIB, 4.0, gradient=True)
    both = [
        links.coding("next", 2 * MIB, 4.0, gradient=False),
        links.coding("before", 2 * MIB, 4.0, gradient=True),
    ]
    assert [4.0 / one.codec.cost(one.share) for one in both] == pytest.approx([8.0, 8.0], rel=0.05)
    assert links.paced().links == pytest.approx({"next": 4.0, "before": 4.0}, rel=0.05)


def test_an_uplink_is_no_slower_than_a_link_that_it_carries() -> None:
    """Bundles that are small by now leave it half empty.

    It seemed slower and slower, and they shrank on.
    """
    links = book()
    links.target = 0.5
    for peer in ("next", "before"):
        links.measured(peer, MIB, 0.1)
    full_uplink(links, MIB / 2)
    for peer in ("next", "before"):
        links.coding(peer, 2 * MIB, 4.0, gradient=peer == "before")
    assert links.paced().links == pytest.approx({"next": 4.0, "before": 4.0})


def test_two_far_lines_that_are_full_together_are_no_slower_for_it() -> None:
    links = book()
    links.target = 0.5
    for peer in ("next", "before"):
        links.measured(peer, MIB, 0.1)
    full_uplink(links, 2 * MIB)
    for peer in ("next", "before"):
        links.coding(peer, 2 * MIB, 4.0, gradient=peer == "before")
    assert links.paced().links == pytest.approx({"next": 2.0, "before": 2.0}, rel=0.05)


def test_an_evaluation_is_no_sign_of_what_a_link_takes() -> None:
    links = book()
    links.sent("far", MIB, MIB // 8, gradient=False)
    links.sent("far", MIB, MIB, gradient=False, evaluated=True)
    far = links.links["far"]
    assert (far.ratio, far.activation_bytes, far.raw_bytes) == (8.0, MIB // 8, 2 * MIB)


def test_the_ratio_of_a_link_is_that_of_its_last_bundles():
    links = book()
    for written in [MIB] * 100 + [MIB // 8] * RECENT:
        links.sent("far", MIB, written, gradient=False)
    far = links.links["far"]
    assert far.ratio == 8.0
    assert far.raw_bytes - far.sent_bytes == RECENT * (MIB - MIB // 8)


def test_before_the_coordinator_says_anything_the_own_pace_is_the_aim():
    links = book()
    links.measured("far", MIB, 0.1)
    assert str(links.coding("far", MIB, 4.0, gradient=False).codec) == "none"
    for what in ("forward", "backward"):
        links.computed(what, 0.25 / SLACK)
    links.computed("encode", 1.0)  # another lane's
    assert links.computing == 0.5 / SLACK
    assert str(links.coding("far", MIB, 4.0, gradient=False).codec) == "bf16"


def test_how_much_times_differ():
    links = book()
    assert links.varies == 0
    for seconds in (0.1, 0.3):
        links.computed("forward", seconds)
        links.computed("backward", 0.4)
    assert links.varies == pytest.approx((0.5 + 0.0) / 2)
    links.begin_anew()
    assert links.varies == 0


def test_what_takes_a_few_milliseconds_is_left_alone():
    links = book()
    links.target = 1e-6
    links.measured("next door", 200 * MIB, 0.001)
    assert str(links.coding("next door", MIB, 4.0, gradient=False).codec) == "none"


def test_the_author_bounds_the_ratio_and_may_ask_for_it_everywhere():
    links = book(ratio=8.0)
    links.target = 1e-6
    links.measured("far", MIB, 0.1)
    assert links.coding("far", MIB, 4.0, gradient=False) == coding_for(SPARSE, 8.0)
    everywhere = book(ratio=8.0, adaptive=False)
    assert everywhere.coding("unknown", MIB, 4.0, gradient=True) == coding_for(SPARSE, 8.0)


def test_the_ratio_rises_by_an_equal_factor_with_each_step_of_the_warm_up():
    assert [warmed_up(64.0, batch, 4) for batch in range(6)] == pytest.approx([4, 8, 16, 32, 64, 64])
    assert warmed_up(64.0, 0, 0) == 64.0
    assert warmed_up(2.0, 0, 10) == 2.0  # it is below what the warm-up would begin with


def test_a_link_is_compressed_more_and_more_while_the_ratio_rises():
    for adaptive in (True, False):
        links = book(ratio=64.0, ratio_warmup=10, adaptive=adaptive)
        links.target = 1e-6
        links.measured("far", MIB, 0.1)
        found = [links.coding("far", MIB, 4.0, gradient=False, batch=batch) for batch in (0, 5, 10, 20)]
        assert found == [coding_for(SPARSE, most) for most in (GENTLE, 16.0, 64.0, 64.0)]


def test_gradients_may_have_a_codec_of_their_own():
    links = book(backward="bf16", adaptive=False)
    assert str(links.coding("x", MIB, 4.0, gradient=True).codec) == "bf16"
    allowed = {
        name: tuple(links.allows(Codec.of(name), kind) for kind in ("activation", "gradient"))
        for name in ("bf16", "fp16", "int8", "topk-bf16", "topk-int8")
    }
    assert allowed == {
        "bf16": (True, True),
        "fp16": (False, False),
        "int8": (True, False),
        "topk-bf16": (False, False),
        "topk-int8": (True, False),
    }


def test_shards_of_a_reduce_have_the_codec_of_reduces():
    plain, rounded = book(), book(reduce="int8")
    for kind in ("part", "result"):
        assert not plain.allows(Codec.of("int8"), kind)
        assert rounded.allows(Codec.of("int8"), kind)
        assert not rounded.allows(Codec.of("int4"), kind)
        assert not rounded.allows(Codec.of("topk-int8"), kind)


def test_who_left_is_forgotten():
    links = book()
    links.measured("gone", MIB, 0.1)
    links.sent("gone", 100, 10, gradient=False)
    assert links.links["gone"].ratio == 10.0
    links.keep_only(frozenset({"here"}))
    assert not links.links


def test_who_was_slow_once_is_tried_again_and_less_often_if_it_still_is():
    """It would be given nothing for ever by what it took in a bad moment.

    Steps without a microbatch until it claims to be as fast as the others: a tenth of that.
    """
    links = book()

    def compute(seconds):
        for what in ("forward", "backward"):
            links.computed(what, seconds / 2)
        return links.paced().computing

    def idle_steps():
        count = 1
        while links.paced().computing > 0.1:
            count += 1
        return count

    assert [compute(1.0) for _ in range(40)] == [1.0] * 40
    tries = []
    for took in (1.0, 1.0, 0.7, 0.7):
        tries.append(idle_steps())
        assert compute(took) == pytest.approx(took), "one that is new says more than thirty old ones"
    assert tries == [22, 44, 88, 19]
    assert idle_steps() == 37
    for _ in range(40):
        idle_steps()
        compute(0.7)
    assert idle_steps() == 1183, "but not never"


def test_who_was_given_nothing_for_another_reason_does_not_claim_to_do_everything_at_once():
    claim = PaceClaim(done=10)
    assert claim.say(12, 1.0) == 1.0
    said = [claim.say(12, 1.0) for _ in range(200)]
    assert said[0] == EASE
    assert said == sorted(said, reverse=True)
    assert said[-1] == LEAST
    moved = PaceClaim(done=10)
    assert moved.say(10, 0.0) == 0.0
    assert moved.say(12, 5.0) == 5.0, "nothing was measured before"
    assert moved.say(12, 5.0) == 5.0 * EASE, "so it is no sign of being slow"


def test_what_is_told_is_a_message():
    links = book()
    links.computed("forward", 1.0)
    links.measured("far", MIB, 0.1)
    links.coding("far", MIB, 4.0, gradient=False)
    assert m.decode(m.encode(links.paced())) == m.Paced(computing=1.0, links={"far": 1.0})
    for flow in (links.outflow, links.reducing):
        for arrived in (0, 1):  # it begins to flow
            flow.look(0.0, SEVERAL, arrived, 2 * MIB, 0.1)
    for window in range(WINDOWS):
        for arrival in range(ARRIVALS + 1):
            now = WINDOW_S * (window + arrival / ARRIVALS)
            for flow in (links.outflow, links.reducing):
                flow.look(now, SEVERAL, round(2 * MIB * now), 2 * MIB, 0.1)
        known = links.outflow.rate, links.outflow.seen
        assert [bool(rate) for rate in known] == [window + 1 >= KNOWN, window + 1 >= SEEN]
    assert links.outflow.seen == links.outflow.rate
    assert links.paced().uplink == pytest.approx(2 * MIB, rel=0.1), "of several links, not the fastest one"
    with pytest.raises(ValueError, match="finite"):
        m.Paced(computing=math.inf, links={})


def test_what_a_link_takes_is_a_number_however_slow_it_is_said_to_be():
    links = book()
    links.measured("far", 5e-324, 0.1)
    links.coding("far", MIB, 4.0, gradient=False)
    assert links.paced().links == {"far": m.FASTEST}
