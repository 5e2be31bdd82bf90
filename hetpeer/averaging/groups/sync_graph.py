"""SDPipe's sync graph: which workers have shared parameters in the last groups, and whether it stays
connected.

Pure. The last P groups count, with P = `span` · members, so that more members do not make all wait for the
slowest more often. Of the edges of the last P - 1 groups only the spanning forest of the newest ones is kept:
an edge that newer ones make redundant is not missed when it expires (a maximum spanning forest by age,
Kruskal's algorithm). Docs: averaging.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from typing import NamedTuple


class _Edge(NamedTuple):
    number: int
    """Number of the group that it comes from."""
    one: str
    other: str


class SyncGraph:
    """The graph of `members`: any P = `span` · members consecutive groups must connect them.

    That is SDPipe's Assumption 1, with P per worker as in its artifact. `span` None: no group is checked.
    Edges of a member that has left connect nobody any more. A group that is too old stays too old when there
    are more members.
    """

    def __init__(self, span: int | None, members: Iterable[str]) -> None:
        if span is not None and span < 1:
            raise ValueError(f"a span of {span} groups")
        self._span = span
        self._formed, self._expired = 0, -1
        """Groups up to this number do not count for the next one any more."""
        self._groups: deque[tuple[int, frozenset[str]]] = deque()
        """(number, members) of the last P - 1 groups, and of members that have joined since; oldest first."""
        self._forest: list[_Edge] = []
        """Newest first."""
        self._root = {member: member for member in members}
        self.parts = len(self._root)
        """Into how many parts the last P - 1 groups leave the members."""

    @property
    def members(self) -> Collection[str]:
        """The members, joined and not left."""
        return self._root.keys()

    @property
    def binding(self) -> bool:
        """Whether the next group is the last of P."""
        return self._span is not None and self._formed >= self._span * len(self._root) - 1

    def part(self, member: str) -> str:
        """The representative of `member`'s connected component: the same for all of it."""
        root = self._root
        while root[member] != member:
            root[member] = member = root[root[member]]
        return member

    def add(self, group: Collection[str]) -> None:
        """`group` has shared. O(members), if few of its edges are superfluous less."""
        self._formed += 1
        if self._span is None:
            return
        self._groups.append((self._formed, frozenset(group)))
        self._expire()
        self._grow([*_star(self._formed, group), *self._forest])

    def join(self, member: str, like: str | None) -> None:
        """`member` is new and starts from the state of `like`; None: from the same as everybody."""
        if member in self._root:
            return
        self._root[member] = member
        if like is not None and like in self._root and self._span is not None:
            self._groups.append((self._formed, frozenset((member, like))))
        self._rebuild()

    def leave(self, member: str) -> None:
        """`member` has left. O(all edges of P groups)."""
        if self._root.pop(member, None) is not None:
            self._expire()
            self._rebuild()

    def forget(self) -> None:
        """Drop all edges."""
        self._formed, self._expired = 0, -1
        self._groups.clear()
        self._grow(())

    def _expire(self) -> None:
        if self._span is not None:
            self._expired = max(self._expired, self._formed - (self._span * len(self._root) - 1))
        while self._groups and self._groups[0][0] <= self._expired:
            self._groups.popleft()

    def _rebuild(self) -> None:
        present = self._root.keys()
        self._grow([e for number, group in reversed(self._groups) for e in _star(number, group & present)])

    def _grow(self, edges: Iterable[_Edge]) -> None:
        """Kruskal: of `edges`, newest first, those that still count and connect what was not connected."""
        root = self._root = {member: member for member in self._root}
        part = self.part
        forest = []
        for edge in edges:
            if edge.number <= self._expired:
                break
            one, other = part(edge.one), part(edge.other)
            if one != other:
                root[one] = other
                forest.append(edge)
        self._forest = forest
        self.parts = len(root) - len(forest)


def _star(number: int, group: Collection[str]) -> list[_Edge]:
    hub, *others = sorted(group) or [""]
    return [_Edge(number, hub, other) for other in others]
