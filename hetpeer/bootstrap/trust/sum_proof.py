"""Proof that the sums of one plan are the sums of the parts sent (docs/trust.md, "Proofs of sums"). Pure.

A key is drawn only after all voted alike. Senders then state the fingerprints of their parts under this key,
and receivers those of the sums. Fingerprints are linear: they add up as the vectors do. Whole blocks are
compared first. For a block that does not add up, each reducer's share is compared under the same key. A
peer's statements on the shares must add up to that on the whole, or it could adapt them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from hetpeer.averaging import messages as m
from hetpeer.averaging.reduce.reduce_shards import shares_of
from hetpeer.bootstrap.conduct.disputed_pairs import Pair
from hetpeer.bootstrap.conduct.reputation import EQUAL, CheckRules
from hetpeer.bootstrap.trust.verdicts import marks_of
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.block.fingerprint import KEY_BYTES, ExpectedSum, is_fingerprint

MOST_ANSWERS = 1 << 13
"""Most fingerprints of each kind in all answers to one question: 16 MiB."""
ROUNDING = 1e-5
"""Largest error of a float32 sum against its parts, relative to the parts' lengths."""


class SumClaim(NamedTuple):
    """`reducer`'s sum of elements [begin, end) of `block` under `plan` or a sender's statement is false."""

    plan: int
    block: int
    begin: int
    end: int
    reducer: str
    slots: Sequence[tuple[str, tuple[int, ...]]]
    """Slots that the sum had to contain."""
    key: bytes
    """Key of the fingerprints that showed the contradiction."""
    secret: bytes
    """Key under which `reducer` fingerprinted what it received."""
    said: Mapping[str, bytes]
    """Sender → its stated fingerprint under `key`."""

    def mark(self, key: bytes) -> m.Mark:
        """The fingerprint request for this place under `key`."""
        return m.Mark(block=self.block, begin=self.begin, end=self.end, key=key)


class SumProof:
    """Proof of plan `plan`'s sums with `covers`; `sizes`: block → elements; `besides`: more fingerprints."""

    def __init__(
        self,
        plan: int,
        covers: Iterable[m.Cover],
        sizes: Mapping[int, int],
        rules: CheckRules,
        besides: Iterable[m.Mark] = (),
    ) -> None:
        self.plan = plan
        self.over = False
        self.claims: list[SumClaim] = []
        self.pairs: dict[int, set[Pair]] = {}
        """Block → contradictions about its sums."""
        self.unproven: set[int] = set()
        """Blocks whose sums could not be proven right or false."""
        self.huge: set[str] = set()
        """Senders of parts so long that others' parts vanish in rounding, or that could hide anything."""
        self.contradict: set[str] = set()
        """Peers whose statements on a block's shares contradict those on the whole."""
        self._covers = {cover.block: cover for cover in covers}
        self._sizes = sizes
        self._rules = rules
        self._besides = tuple(besides)
        self._asked: dict[str, set[m.Where]] = {}
        """Peers with an open answer."""
        self._parts: dict[m.Where, dict[str, bytes]] = {}
        self._sums: dict[m.Where, dict[str, bytes]] = {}
        self._secrets: dict[str, bytes] = {}
        self._key = b""
        """Key of all fingerprints, drawn once all have voted."""
        self._shares: dict[int, dict[m.Where, str]] = {}
        """Block under closer examination → share → its reducer."""

    # ── asked ───────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self) -> dict[str, tuple[m.Mark, ...]]:
        """Requests once all have voted: peer → fingerprints."""
        self._key = self._rules.key()
        whole = [self._mark(self._whole(block)) for block in self._shuffled(self._covers)]
        return self._ask([*self._besides, *whole])

    def _whole(self, block: int) -> m.Where:
        return block, 0, self._sizes[block], self._key

    def _mark(self, place: m.Where) -> m.Mark:
        block, begin, end, key = place
        return m.Mark(block=block, begin=begin, end=end, key=key)

    def _shuffled(self, blocks: Iterable[int]) -> list[int]:
        """`blocks` in an unpredictable order, since not all may fit into one proof."""
        return sorted(blocks, key=lambda _: self._rules.draw())

    def _ask(self, marks: Iterable[m.Mark]) -> dict[str, tuple[m.Mark, ...]]:
        """Requests for each peer's blocks, as far as they fit into a message and the answers into memory."""
        told: dict[str, list[m.Mark]] = {}
        room = MOST_ANSWERS
        for mark in marks:
            receivers = self._covers[mark.block].receivers
            if len(receivers) <= room and all(len(told.get(peer, ())) < m.MOST_MARKS for peer in receivers):
                room -= len(receivers)
                for peer in receivers:
                    told.setdefault(peer, []).append(mark)
        self._asked = {peer: {mark.where for mark in own} for peer, own in told.items()}
        self.over = not told
        return {peer: tuple(own) for peer, own in told.items()}

    @property
    def silent(self) -> set[str]:
        """Peers that have not answered yet."""
        return set(self._asked)

    # ── said ────────────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, peer: str, message: m.Proved) -> dict[str, tuple[m.Mark, ...]]:
        """Take an answer of `peer`; returns further requests. An unrequested answer changes nothing.

        Raises `ProtocolError` if the answer has other fingerprints than requested, or malformed ones.
        """
        asked = self._asked.get(peer)
        if asked is None or message.plan != self.plan:
            return {}
        parts, sums = marks_of(message.parts), marks_of(message.sums)
        sent = {place for place in asked if peer in dict(self._covers[place[0]].slots)}
        if sums.keys() != asked or parts.keys() != sent:
            raise ProtocolError("it was asked for other fingerprints", peer=peer)
        if len(message.key) != KEY_BYTES or not all(map(is_fingerprint, (*parts.values(), *sums.values()))):
            raise ProtocolError("a fingerprint that is none", peer=peer)
        del self._asked[peer]
        self._secrets.setdefault(peer, message.key)
        for known, own in ((self._parts, parts), (self._sums, sums)):
            for place, values in own.items():
                known.setdefault(place, {})[peer] = values
        return {} if self._asked else self._next()

    def _next(self) -> dict[str, tuple[m.Mark, ...]]:
        """Evaluate the answers of all peers; returns further requests."""
        if not self._shares:
            torn = [place[0] for place in self._sums if self._is_whole(place) and self._is_torn(place)]
            self._shares = {block: self._shares_of(block) for block in self._shuffled(torn)}
            places = [place for shares in self._shares.values() for place in shares]
            # of a block with one reducer all is said
            if asked := self._ask(self._mark(place) for place in places if place not in self._sums):
                return asked
        for block, shares in self._shares.items():
            self._judge(block, shares)
        self.over = True
        return {}

    def _shares_of(self, block: int) -> dict[m.Where, str]:
        shares = shares_of(self._covers[block], self._sizes[block])
        return {(block, begin, end, self._key): reducer for reducer, begin, end in shares if begin < end}

    def _is_whole(self, place: m.Where) -> bool:
        return place == self._whole(place[0])

    def _is_torn(self, place: m.Where) -> bool:
        """Whether a false sum at `place` must be traced to its origin.

        Not if parts are so long that this is impossible, or that the difference is their rounding.
        """
        if not self._deniers(place):
            return False
        expected, sums = ExpectedSum(self._parts.get(place, {})), self._sums[place].values()
        if not expected.huge or not all(expected.is_near(total, ROUNDING, capped=False) for total in sums):
            return True
        if len(expected.huge) == 1 and not expected.drowning:
            return False  # models do have such samples; what hides behind it is nothing beside it
        self.huge |= expected.huge
        self.unproven.add(place[0])
        return False

    def _deniers(self, place: m.Where) -> set[str]:
        """Receivers of a sum that contradicts its senders' statements."""
        expected = ExpectedSum(self._parts.get(place, {}))
        sums = self._sums.get(place, {})
        return {peer for peer, total in sums.items() if not expected.is_near(total, ROUNDING)}

    def said(self, peer: str) -> list[m.Mark]:
        """Stated fingerprints of the parts of `peer`, of whole blocks."""
        return [
            m.Mark(block=place[0], begin=place[1], end=place[2], key=place[3], values=said[peer])
            for place, said in self._parts.items()
            if self._is_whole(place) and peer in said
        ]

    def own(self, mark: m.Mark) -> Mapping[str, bytes]:
        """Sender → its stated fingerprint of its part."""
        return self._parts.get(mark.where, {})

    # ── judged ──────────────────────────────────────────────────────────────────────────────────────────────

    def _judge(self, block: int, shares: Mapping[m.Where, str]) -> None:
        """Judge the `shares` of a block that did not add up: claims, disputed pairs, contradictions."""
        cover = self._covers[block]
        if shares.keys() <= self._sums.keys():
            liars = {peer for peer in cover.receivers if not self._adds_up(peer, block, shares)}
            if liars:
                self.contradict |= liars
                self.unproven.add(block)
                return
        for place, reducer in shares.items():
            _, begin, end, key = place
            others = set(cover.receivers) - {reducer}
            deniers = self._deniers(place) & others
            most = 2 * len(deniers) > len(others)
            if most and len(others) > 1:
                claim = SumClaim(
                    plan=self.plan,
                    block=block,
                    begin=begin,
                    end=end,
                    reducer=reducer,
                    slots=cover.slots,
                    key=key,
                    secret=self._secrets[reducer],
                    said=self._parts[place],
                )
                self.claims.append(claim)
            elif deniers:
                self.pairs.setdefault(block, set()).update(frozenset((reducer, peer)) for peer in deniers)
            if place not in self._sums or 2 * len(deniers) >= len(others):
                self.unproven.add(block)

    def _adds_up(self, peer: str, block: int, shares: Iterable[m.Where]) -> bool:
        """Whether `peer`'s statements on the shares of `block` add up to its whole, for part and sum."""
        return all(
            ExpectedSum({str(place): known[place][peer] for place in shares}).is_near(
                whole, EQUAL, capped=False
            )
            for known in (self._parts, self._sums)
            if (whole := known.get(self._whole(block), {}).get(peer)) is not None
        )
