"""A grouped run without a network: its coordinator, and what it says and records."""

from hetpeer.averaging import messages as m
from hetpeer.averaging.groups.group_scheduler import GroupPipelines
from hetpeer.averaging.groups.wait_window import Adaptive
from hetpeer.averaging.member.position import choose_place
from hetpeer.bootstrap.grouped.formation import Formation
from hetpeer.bootstrap.grouped.grouped_run import GroupedRun
from hetpeer.bootstrap.state.effects import CoordinatorConfig
from hetpeer.bootstrap.state.membership import BlockDemand
from hetpeer.stages.pipeline.place_memory import Offered, PlaceDemand
from tests.bootstrap.court import BLOCKS, CONFIG, note

FIRST, LAST, WHOLE = (0, 1), (1, BLOCKS), (0, BLOCKS)
AMPLE = 1 << 40


class Waiting:
    """A run with a place for each of two blocks, which take `memory` bytes."""

    def __init__(self, records=(), layout=(FIRST, LAST), memory=(), steps=50, **changes):
        self.records = list(records)
        self.now = 1.0
        memory = memory or [1] * layout[-1][1]
        costs = [BlockDemand(elements=10, memory=PlaceDemand(activations=each), flops=1.0) for each in memory]
        changes |= {"layouts": (layout,), "costs": costs, "steps": steps}
        config = CoordinatorConfig(**(CONFIG | changes))
        self.core = GroupedRun(config, records, GroupPipelines(1, (), 2, Adaptive(2)), 0.0)
        self.sent = {}
        self.do(self.core.start())

    def do(self, effects):
        note(effects, self.records, self.sent)

    def tell(self, peer, message):
        self.do(self.core.receive(peer, message, self.now))

    def comes(self, *peers):
        for peer in peers:
            self.hello(peer)
            self.claims(peer)
            self.tell(peer, m.Prepared())
        return self

    def hello(self, peer, **said):
        self.tell(peer, m.Hello(run="run", incarnation=1, **said))

    def claims(self, peer, memory=AMPLE):
        """Claim a place as a volunteer does that offers this much memory.

        Returns cluster, first block, end. Raises `LocalError` HP-FIT-001.
        """
        while self.core.clusters.of(peer) is None:  # another volunteer may have been offered the same place
            place = choose_place(self.sent[peer, "welcome"].places, Offered(device=memory))
            self.tell(peer, m.Claim(cluster=place.cluster, begin=place.begin, end=place.end))
        return place.cluster, place.begin, place.end

    def again(self, *peers):
        """Let `peers` choose again: their cluster is gone, or another volunteer has their place."""
        for peer in peers:
            self.claims(peer)
            self.tell(peer, m.Prepared())

    def fetched(self, cluster, version=0, **peers):
        """Let these peers report the version to begin with, of the blocks (begin, end)."""
        line = self.core.clusters[cluster].line
        for peer, blocks in peers.items():
            held = tuple(m.Held(block=b, version=version, digest=f"state {b}") for b in range(*blocks))
            self.tell(peer, m.Ready(line=line, version=version, held=held))

    def until_dissolved(self, *alive, within_s=5000.0):
        """Seconds until a cluster falls apart."""
        before, since = len(self.of("dissolved")), self.now
        while len(self.of("dissolved")) == before:
            assert self.now < since + within_s
            self.passes(1.0, *alive)
        return self.now - since

    def passes(self, seconds, *alive):
        """Let time pass while `alive` are heard."""
        until = self.now + seconds
        while self.now < until:
            self.now += 1.0
            for peer in alive:
                self.do(self.core.resumed(peer, self.now))
            self.do(self.core.tick(self.now))

    def form(self, *clusters, spared=()):
        """Propose clusters, each of (peer, blocks), for all that wait."""
        self.do(self.core.form(Formation(clusters=clusters, spared=frozenset(spared)), self.now))

    def of(self, kind):
        """The records of a kind."""
        return [record for record in self.records if record["kind"] == kind]

    @property
    def founded(self):
        return self.of("founded")
