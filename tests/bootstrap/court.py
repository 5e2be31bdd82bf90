"""A coordinator driven by hand: two blocks in one place, two microbatches a step, volunteers that do as they
are told.
"""

import numpy as np

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.coordinator import Coordinator
from hetpeer.bootstrap.log.history import History
from hetpeer.bootstrap.state.context import whole_run
from hetpeer.bootstrap.state.effects import (
    CollectCheckpoint,
    CoordinatorConfig,
    CoordinatorState,
    Record,
    Send,
    TryMicrobatch,
)
from hetpeer.bootstrap.state.membership import BlockDemand
from hetpeer.stages.block.fingerprint import KEY_BYTES, PLACES, pack
from hetpeer.stages.pipeline.place_memory import PlaceDemand

BLOCKS = 2
CONFIG = {
    "run": "run",
    "steps": 4,
    "sizes": (1, 1),
    "evaluation_microbatches": 0,
    "evaluate_every": 1,
    "checkpoint_every": 2,
    "clip_norm": 1.0,
    "layouts": (((0, BLOCKS),),),
    "costs": [BlockDemand(elements=10, memory=PlaceDemand(activations=1), flops=1.0)] * BLOCKS,
}


def note(effects, records, sent):
    """Add the records of `effects` to `records`, and note in `sent` the last message of each kind to each
    volunteer.
    """
    for effect in effects:
        match effect:
            case Record(record):
                records.append(dict(record))
            case Send(to, message):
                sent[to, message.kind] = message
            case _:
                pass


class Court:
    """One term and its clock.

    `sent`: (peer, kind) → last message; `order`: the last checkpoint that was asked for.
    """

    def __init__(self, records=(), **changes):
        self.now = 100.0
        self.records = list(records)
        config = CoordinatorConfig(**(CONFIG | changes))
        self.proven = config.checks is not None and config.checks.proves
        self.core = Coordinator(whole_run(config, History.of(records)), self.now)
        self.sent = {}
        self.order = None
        self.trials = []
        """Microbatches that the coordinator is computing itself."""
        self.finds_nothing = True
        """Whether that is over at once, and nothing is found."""
        self.do(self.core.start())

    def do(self, effects):
        """Note the effects and return them."""
        effects = list(effects)
        note(effects, self.records, self.sent)
        self.trials += [effect for effect in effects if isinstance(effect, TryMicrobatch)]
        while self.trials and self.finds_nothing:
            effects += self.do(self.core.tried(self.trials.pop(), None, self.now))
        self.order = next((e for e in reversed(effects) if isinstance(e, CollectCheckpoint)), self.order)
        return effects

    def tell(self, peer, message):
        return self.do(self.core.receive(peer, message, self.now))

    def tick(self, seconds=0.2):
        """Let time pass in small steps, as the daemon ticks."""
        effects = []
        until = self.now + seconds
        while self.now < until - 1e-9:
            self.now += min(0.2, until - self.now)
            effects += self.do(self.core.tick(self.now))
        return effects

    def told(self, peer, effects):
        """Kinds of the messages to `peer` among `effects`."""
        return [x.message.kind for x in effects if isinstance(x, Send) and x.to == peer]

    @property
    def line(self):
        return self.core.line

    # ── what volunteers say ─────────────────────────────────────────────────────────────────────────────────

    def hello(self, peer, incarnation=1, **changes):
        return self.tell(peer, m.Hello(run="run", incarnation=incarnation, **changes))

    def prepare(self, peer, flops_per_second=0.0):
        """Let `peer` join up to Prepared."""
        self.hello(peer)
        place = next(place for place in self.sent[peer, "welcome"].places if place.open)
        self.tell(peer, m.Claim(cluster=place.cluster, begin=place.begin, end=place.end))
        return self.tell(peer, m.Prepared(flops_per_second=flops_per_second))

    def ready(self, peer, version=None, digest="state"):
        version = self.core.history.version if version is None else version
        begin, end = self.core.members.volunteers[peer].place
        held = tuple(m.Held(block=b, version=version, digest=f"{digest} {b}") for b in range(begin, end))
        return self.tell(peer, m.Ready(line=self.line, version=version, held=held))

    def sealed(self, peer, ids, slot=0, blocks=(0, BLOCKS), step=None):
        contents = (m.Contents(begin=blocks[0], end=blocks[1], ids=tuple(ids)),)
        losses = {i: float(i) for i in ids}
        return self.tell(
            peer,
            m.Sealed(
                line=self.line,
                step=self.core.step if step is None else step,
                slot=slot,
                contents=contents,
                losses=losses,
            ),
        )

    def vote(self, peer, plan=None, digest="gradient", finite=True, norm=1.0):
        """Vote on the latest plan; each part that it must name has this `digest`, too."""
        told = self.sent[peer, "plan"]
        begin, end = self.core.members.volunteers[peer].place
        seen = {"digest": digest, "finite": finite}
        blocks = tuple(m.BlockVote(block=b, squared_norm=norm, **seen) for b in range(begin, end))
        received = tuple(
            m.Received(block=cover.block, of=cover.block, reducer=reducer, **seen)
            for cover in told.covers
            if cover.block in told.closely
            for reducer, _ in cover.reducers
        )
        plan = told.plan if plan is None else plan
        message = m.Vote(line=self.line, step=self.core.step, plan=plan, blocks=blocks, received=received)
        return self.tell(peer, message)

    def prove(self, peer, got=0.0):
        """Prove: it has sent zeros, and its result looks like `got`."""
        told = self.sent[peer, "prove"]
        sent = {c.block for c in self.sent[peer, "plan"].covers if peer in dict(c.slots)}
        parts = _looking(0.0, (mark for mark in told.marks if mark.block in sent))
        sums, key = _looking(got, told.marks), bytes(KEY_BYTES)
        proved = m.Proved(line=self.line, step=told.step, plan=told.plan, parts=parts, sums=sums, key=key)
        return self.tell(peer, proved)

    def applied(self, peer, digest="state"):
        version = self.core.history.version
        blocks = range(*self.core.members.volunteers[peer].place)
        held = tuple(m.Held(block=b, version=version, digest=f"{digest} {b}") for b in blocks)
        return self.tell(peer, m.Applied(line=self.line, step=version - 1, held=held))

    def save(self):
        """Let all holders report their states, and let these arrive."""
        for peer in self.core.working():
            self.applied(peer)
        for block in range(BLOCKS):
            self.do(self.core.saved(self.order, block, f"state {block}", self.now))

    # ── whole phases ────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, *peers):
        """Let `peers` join, and a step begin."""
        for peer in peers:
            self.prepare(peer)
        return self.begin_prepared(*peers)

    def prepare_again(self, *peers):
        """After a roll-back: let everybody prepare, and fetch the state. Returns the effects of Ready."""
        for peer in peers:
            if peer not in self.core.members.volunteers:
                self.prepare(peer)
            else:
                self.tell(peer, m.Prepared())
        return [effect for peer in peers for effect in self.ready(peer)]

    def begin_prepared(self, *peers):
        """Let `peers` fetch the state, and a step begin."""
        for peer in peers:
            self.ready(peer)
        while self.core.state is not CoordinatorState.TRAINING:
            for peer in peers:
                if (peer, "fetch") in self.sent:
                    self.ready(peer)
        return self

    def count(self, *peers, step=None):
        """Count both microbatches of the oldest step, or of `step`, at each place by the first of `peers`
        that has it.
        """
        volunteers = self.core.members.volunteers
        first = {volunteers[peer].place: peer for peer in reversed(peers)}
        return [
            effect
            for place, peer in sorted(first.items())
            for effect in self.sealed(peer, (0, 1), blocks=place, step=step)
        ]

    def commit(self, *peers):
        """Count, vote, prove if there are spot checks, and apply."""
        self.count(*peers)
        effects = [effect for peer in peers for effect in self.vote(peer)]
        if self.proven:
            effects += [effect for peer in peers for effect in self.prove(peer)]
        for peer in peers:
            self.applied(peer)
        return effects


def _looking(like, marks):
    """Fingerprints that add up; each element looks like `like`."""
    return tuple(
        mark.model_copy(update={"values": pack(np.full(PLACES, like * (mark.end - mark.begin)))})
        for mark in marks
    )


# ── courts in each state ────────────────────────────────────────────────────────────────────────────────────


def waiting():
    return Court()


def syncing():
    court = Court()
    court.prepare("a")
    return court


def training():
    return Court().begin("a", "b")


def reducing():
    court = training()
    court.count("a")
    return court


def finished():
    court = Court(steps=1, checkpoint_every=1).begin("a", "b")
    court.commit("a", "b")
    court.save()
    return court


def halted_court():
    """Both volunteers have failed a microbatch, and nobody else is there."""
    court = training()
    for peer in ("a", "b", "a", "b"):
        failed(court, peer)
    assert court.core.state is CoordinatorState.FINISHED
    return court


COURTS = {
    CoordinatorState.WAITING: waiting,
    CoordinatorState.SYNCING: syncing,
    CoordinatorState.TRAINING: training,
    CoordinatorState.REDUCING: reducing,
    CoordinatorState.FINISHED: finished,
}


def one_each():
    """Two volunteers with a block each, in a step whose state is stored."""
    commits = [{"kind": "commit", "step": step, "loss": 1.0} for step in range(2)]
    sealed = {"kind": "checkpoint", "version": 2, "blocks": ["state 0", "state 1"]}
    return Court([*commits, sealed], layouts=(((0, 1), (1, 2)),)).begin("a", "b")


def sole_holder(*others, **changes):
    """`b` alone holds the second block; a step has begun."""
    court = Court(layouts=(((0, 1), (1, 2)),), **changes)
    for peer in ("a", "b", *others):
        court.hello(peer)
        places = court.sent[peer, "welcome"].places
        place = next(one for one in places if one.open and one.begin == (peer == "b"))
        court.tell(peer, m.Claim(cluster=place.cluster, begin=place.begin, end=place.end))
        court.tell(peer, m.Prepared())
    return court.begin_prepared("a", "b", *others)


# ── what volunteers complain of, and what is written ────────────────────────────────────────────────────────


def failed(court, peer, microbatch=0):
    return court.tell(peer, m.Failed(line=court.line, step=0, id=microbatch, why="non-finite"))


def objection(court, peer, plan=1):
    return m.Objection(
        line=court.line, step=court.core.step or 0, plan=plan, block=1, peer=peer, why="not finite"
    )


def kinds(effects):
    return [x.record["kind"] for x in effects if isinstance(x, Record)]
