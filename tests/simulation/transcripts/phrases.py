"""Plain English for what happens in a simulated history: messages, log records, and effects of a volunteer.

A phrase is (key, items): events of one moment with the same key are one line, whose items are listed in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hetpeer.averaging import effects as e
from hetpeer.averaging import messages as m
from hetpeer.stages.pipeline import effects as p

Phrase = tuple[str, tuple[str, ...]]
"""Text with at most one `{}` for the items, and the items."""
UNSAID = frozenset({"heartbeat", "kept", "amended", "event", "paced", "reducing", "shuns"})
"""Messages that a transcript leaves out: signs of life, and what does not change who does what."""


def blocks(begin: int, end: int) -> str:
    """The blocks [begin, end)."""
    return f"block {begin}" if end == begin + 1 else f"blocks {begin}-{end - 1}"


def listed(items: Iterable[object]) -> str:
    """The items, each once, in order."""
    return ", ".join(dict.fromkeys(map(str, items)))


def way(route: Iterable[Any]) -> str:
    """The hops of a route."""
    return " > ".join(hop.peer for hop in route)


def _blocks(numbers: Sequence[int]) -> str:
    return f"block{'s' * (len(numbers) > 1)} {listed(numbers)}"


def _microbatches(ids: Sequence[int]) -> str:
    return f"microbatch{'es' * (len(ids) > 1)} {listed(ids)}"


def _several(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number > 1)}"


class Phrases:
    """Names the bits of sums that were voted on by letters: A, B … `names_steps`: of each microbatch."""

    def __init__(self, *, names_steps: bool) -> None:
        self._names_steps = names_steps
        self._letters: dict[tuple[object, ...], dict[str, str]] = {}

    def _letter(self, where: tuple[object, ...], digest: str) -> str:
        known = self._letters.setdefault(where, {})
        return known.setdefault(digest, chr(ord("A") + len(known)))

    def _bits(self, vote: m.Vote) -> str:
        """Which bits the sums have: blocks by letter."""
        found: dict[str, list[int]] = {}
        for one in vote.blocks:
            letter = self._letter((vote.line, vote.step, one.block), one.digest)
            found.setdefault(letter, []).append(one.block)
        return "; ".join(
            f"{_blocks(own)} {'are' if own[1:] else 'is'} {letter}" for letter, own in found.items()
        )

    # ── the coordinator ─────────────────────────────────────────────────────────────────────────────────────

    def ordered(self, message: m.Message) -> Phrase | None:
        """`message` of the coordinator to a volunteer; None if it is left out."""
        if message.kind in UNSAID:
            return None
        text = self._ordered(message)
        return (f"{message.kind}: {text}" if text else message.kind), ()

    def _ordered(self, message: m.Message) -> str:
        match message:
            case m.Welcome():
                free = [blocks(place.begin, place.end) for place in message.places if place.open]
                known = ", you still hold your place" if message.member else ""
                again = ", and again the commit that you missed" if message.commit else ""
                return f"version {message.version}{known}; free: {listed(free) or 'nothing'}{again}"
            case m.Granted():
                return f"{blocks(message.begin, message.end)} are yours"
            case m.Refused():
                return message.why
            case m.Fetch():
                held = listed(peer for peers in message.sources.values() for peer in peers)
                return f"load version {message.version} from {held or 'the checkpoint'}"
            case m.Begin() if message.group:
                return f"averaging {message.group} of version {message.step}, with {listed(message.roster)}"
            case m.Begin():
                return _begin(message)
            case m.Joined():
                who = listed(f"{one.peer} ({blocks(one.begin, one.end)})" for one in message.entrants)
                return f"{who} came into step {message.step}"
            case m.Reroute():
                again = [f"{task.id} via {way(task.route)}" for task in message.tasks]
                return f"hand out anew microbatch {listed(again)}" if again else "seal what is done"
            case m.Gone():
                return f"{listed(message.peers)} left the roster"
            case m.Settled():
                false = f", but not for {_blocks(message.refused)}" if message.refused else ""
                return f"slot {message.slot} of step {message.step} counts{false}"
            case m.Evict():
                return f"your sums of {_blocks(message.blocks)} do not count any more"
            case m.Check():
                again = [f"{task.id} via {way(task.route)}" for task in message.tasks]
                return f"spot check {message.check}: compute once more microbatch {listed(again)}"
            case m.Show():
                of = f"what {message.peer} sent you" if message.peer else "what you computed once more"
                return f"spot check {message.check}: fingerprints of {of}, please"
            case m.Plan():
                return f"{message.plan} of {_step(message)}: {_covers(message.covers)}"
            case m.Prove():
                return f"plan {message.plan}: fingerprints of your parts and sums, please"
            case m.Testify():
                return f"plan {message.plan}: fingerprints of the parts that you received, please"
            case m.Commit():
                return f"{_step(message)} is decided, apply the sums of plan {message.plan}"
            case m.RolledBack():
                return f"the run goes back to version {message.version}: {message.why}"
            case m.Save():
                return f"give version {message.version} of {_blocks(message.blocks)} for the checkpoint"
            case m.Fenced():
                return f"{message.why}; come back as a new incarnation"
            case m.Finished():
                return message.why
            case _:
                return ""

    def recorded(self, record: Mapping[str, Any]) -> Phrase:
        """One more `record` in the coordinator's log."""
        kind, text = record["kind"], ""
        match kind:
            case "reign":
                text = f"term {record['term']}"
            case "commit":
                counted = "" if record["loss"] is None else f", loss {record['loss']:.2f}"
                behind = f", {record['behind']} behind" if record.get("behind") else ""
                text = f"step {record['step']}{counted}{behind}"
            case "rollback":
                text = f"to version {record['to_version']}"
            case "checkpoint":
                text = f"version {record['version']} is complete"
            case "average" | "installed":
                copies = listed(f"{cluster} at version {at}" for cluster, at in record["clusters"])
                text = f"clusters {copies}"
            case "founded" | "dissolved":
                text = f"cluster {record['cluster']}"
            case _ if "peer" in record:
                why = f": {record['why']}" if record.get("why") else ""
                text = f"{record['peer']}{why}"
            case _:
                pass
        return f"writes to the log: {kind} {text}".rstrip(), ()

    # ── the volunteers ──────────────────────────────────────────────────────────────────────────────────────

    def told(self, message: m.Message) -> Phrase | None:
        """`message` of a volunteer to the coordinator; None if it is left out."""
        if message.kind in UNSAID:
            return None
        text = self._told(message)
        return (f"{message.kind}: {text}" if text else message.kind), ()

    def _told(self, message: m.Message) -> str:
        match message:
            case m.Hello():
                place = f", I hold {blocks(*message.place)}" if message.place else ""
                version = f" at version {message.held[0].version}" if message.held else ""
                return f"incarnation {message.incarnation}{place}{version}"
            case m.Claim():
                return f"I take {blocks(message.begin, message.end)}"
            case m.Prepared():
                return "the graphs are loaded"
            case m.Ready():
                return f"version {message.version} is loaded"
            case m.Sealed():
                held = listed(
                    f"{_microbatches(one.ids)} at {blocks(one.begin, one.end)}" for one in message.contents
                )
                return f"slot {message.slot} of step {message.step} holds {held}"
            case m.Evaluated():
                return f"losses of microbatches {listed(message.losses)}"
            case m.Failed():
                given = f", as {message.given} sent what is wrong" if message.given else ""
                return f"microbatch {message.id}: {message.why}{given}"
            case m.Vote():
                return f"plan {message.plan} of {_step(message)}: {self._bits(message)}"
            case m.Missed():
                sums = f"sums of {listed(message.sums)}" if message.sums else ""
                parts = f"parts of {listed(message.parts)}" if message.parts else ""
                return f"under plan {message.plan} there never came " + " and ".join(
                    filter(None, (sums, parts))
                )
            case m.Objection():
                return f"the part of {message.peer} of block {message.block}: {message.why}"
            case m.Checked():
                return (
                    f"microbatch {message.id} from block {message.begin} on, for spot check {message.check}"
                )
            case m.Compared():
                way_back = "gradient" if message.back else "activation"
                like = f"as {listed(message.alike)} sent it" if message.alike else ""
                unlike = f"not what {listed(message.differ)} sent" if message.differ else ""
                found = " and ".join(filter(None, (like, unlike)))
                return f"the {way_back} of microbatch {message.id} is {found}"
            case m.Shown():
                return f"fingerprints for spot check {message.check}"
            case m.Proved():
                return f"plan {message.plan}: fingerprints of my parts and sums"
            case m.Testimony():
                received = listed(one.peer for one in message.received)
                return f"plan {message.plan}: fingerprints of the parts of {received}"
            case m.Applied():
                at = {held.version for held in message.held}
                return f"step {message.step}, now at version {listed(sorted(at))}"
            case _:
                return ""

    def ended(self, effect: object) -> Phrase | None:
        """An effect that belongs to no step."""
        match effect:
            case e.Prepare(begin, end):
                return f"loads the graphs of {blocks(begin, end)}", ()
            case e.FetchState(version=version):
                return f"fetches version {version}", ()
            case e.SaveState(version=version, digests=digests):
                return f"copies version {version} of blocks {{}} for the checkpoint", tuple(map(str, digests))
            case _:
                return None

    def done(self, me: str, step: e.StepId, effect: e.StepEffect) -> tuple[str | None, Phrase] | None:
        """An effect of `step` at volunteer `me`: (to whom, what). None if it is left out."""
        where = f"averaging {step.group}" if step.group else f"step {step.number}"
        one = f"microbatch {{}} of {where}" if self._names_steps else "microbatch {}"
        match effect:
            case p.RunForward(key, end, train=train):
                kind = "forward" if train else "evaluation"
                return None, (
                    f"computes {_checked(key)}{kind} of {one}, {blocks(key.begin, end)}",
                    (str(key.id),),
                )
            case p.RunBackward(key, end):
                return None, (
                    f"computes {_checked(key)}backward of {one}, {blocks(key.begin, end)}",
                    (str(key.id),),
                )
            case p.SendActivation(number, route, check=check):
                again = f" for spot check {check}" if check else ""
                return route[0].peer, (f"activation of {one}{again}", (str(number),))
            case p.SendGradient(number, to, check=check):
                again = f" for spot check {check}" if check else ""
                return to, (f"gradient of {one}{again}", (str(number),))
            case e.SendPart(shard) if shard.reducer != me:
                what = "parameters" if step.group else "part"
                return shard.reducer, (f"its {what} of blocks {{}}, plan {shard.plan}", (str(shard.block),))
            case e.SumParts(shard, parts):
                return None, (
                    f"adds up {_several(len(parts), 'part')} of blocks {{}}, plan {shard.plan}",
                    (str(shard.block),),
                )
            case e.InspectSlot(plan, block):
                return None, (f"has the sum of blocks {{}}, plan {plan}, in its slot", (str(block),))
            case e.SendResult(shard, to) if to != me:
                return to, (f"sum of blocks {{}}, plan {shard.plan}", (str(shard.block),))
            case e.ApplyUpdate(block):
                return None, (f"applies the update of {where} to blocks {{}}", (str(block),))
            case e.InstallAverage(block):
                return None, ("installs the mean at blocks {}", (str(block),))
            case p.CompareBundle(check, number, peer=peer):
                return None, (
                    f"spot check {check}: compares microbatch {{}} with what {peer} sent",
                    (str(number),),
                )
            case _:
                return None


def _step(message: m.OfPlan) -> str:
    return f"averaging {message.group}" if message.group else f"step {message.step}"


def _checked(key: p.TaskKey) -> str:
    return f"once more, for spot check {key.check}, the " if key.check else ""


def _begin(message: m.Begin) -> str:
    holders: dict[str, list[str]] = {}
    for peer, place in message.roster.items():
        holders.setdefault(blocks(*place), []).append(peer)
    held = "; ".join(f"{own} at {listed(peers)}" for own, peers in holders.items())
    behind = f", with parameters {message.behind} version behind" if message.behind else ""
    entry = " while it runs" if message.entry else ""
    own = [task.id for task in message.tasks]
    start = f"; {_microbatches(own)} start at you" if own else ""
    return f"step {message.step}{entry}{behind}: {held}{start}"


def _covers(covers: Iterable[m.Cover]) -> str:
    """Blocks with the same holders and reducers together."""
    found: dict[str, list[int]] = {}
    for cover in covers:
        slots = " + ".join(f"{peer}({','.join(map(str, ids))})" for peer, ids in cover.slots)
        adds = listed(peer for peer, _ in cover.reducers)
        found.setdefault(f"{slots}, added up by {adds}", []).append(cover.block)
    return "; ".join(f"{_blocks(own)} = {text}" for text, own in found.items())
