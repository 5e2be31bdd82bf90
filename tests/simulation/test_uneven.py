"""Clusters of three and of five that cut a net with a tied weight differently: bit for bit what one process
gets that adds in the same order.
"""

from dataclasses import replace

import pytest
import torch

from hetpeer.bootstrap.log.history import History
from tests.amounts import mostly_proof
from tests.simulation.checked_swarm import CheckedSwarm
from tests.simulation.config import HistoryConfig
from tests.simulation.coverage import Coverage
from tests.simulation.invariants import Checks
from tests.simulation.sim_grouped import GroupedChecks, GroupedSwarm
from tests.simulation.toy_net import ToyNet, _digest

BLOCKS, STEPS, MICROBATCHES = 8, 12, 6
THREE = ((0, 2), (2, 4), (4, 8))
FIVE = ((0, 1), (1, 2), (2, 5), (5, 7), (7, 8))
CONFIG = HistoryConfig(
    volunteers=8,
    layouts=(THREE, FIVE),
    steps=STEPS,
    microbatches=MICROBATCHES,
    slot_capacity=2,
    checkpoint_every=4,
    clip_norm=0.5,
    uplinks=(1.0, 5.0, 2.0, 20.0),
    shard_length=20,
)


class Recorder(ToyNet):
    """Remembers the states that it gave the digest of, and in which order it added what."""

    def __init__(self):
        super().__init__(BLOCKS)
        self.known = {}
        self._trees = {}
        """Digest of a sum → its terms: digests, or such sums themselves."""
        self.orders = {}
        """The set of all that is in a sum → how it was added up."""

    def digest(self, state):
        found = super().digest(state)
        self.known[found] = state
        return found

    def add(self, gradients):
        terms = list(gradients)
        total = super().add(terms)
        tree = tuple(self._trees.get(one, one) for one in map(_digest, terms))
        self._trees[_digest(total)] = tree
        self.orders[frozenset(leaves(tree))] = tree
        return total


def leaves(tree):
    return [tree] if isinstance(tree, str) else [leaf for part in tree for leaf in leaves(part)]


class Witness:
    """Updates that volunteers report, by step and block; holders of one block report the same
    (invariants.py).
    """

    def __init__(self, checks, monkeypatch):
        self.updates = {}

        def applied(swarm_checks, volunteer, record, before, original=checks.applied):
            original(swarm_checks, volunteer, record, before)
            for cover in record.covers:
                key = (record.step.line.cluster, record.step.number, cover.block)
                self.updates[key] = (cover.slots, before[cover.block], record.states[cover.block])

        monkeypatch.setattr(checks, "applied", applied)

    def members(self, cluster, step):
        """Before and after of each block."""
        found = [self.updates[cluster, step, block] for block in range(BLOCKS)]
        return [before for _, before, _ in found], [after for _, _, after in found]


def gradients_of(net, states, batch):
    """Gradients of each microbatch, per block, computed in one piece."""
    found = []
    for number in range(MICROBATCHES):
        kept, _ = net.forward(states, 0, (batch, number), None)
        found.append(net.backward(kept, None)[1])
    return found


def slot_of(net, gradients, order):
    """The sum of one holder's `gradients` (digest → gradient), added in the order in which it did."""

    def value(tree):
        return gradients[tree] if isinstance(tree, str) else ToyNet.add(net, map(value, tree))

    return value(order)


def trained(net, states, batch, slots, coefficient):
    """Every block after one update; holders are added as the plan of the block says."""
    each = gradients_of(net, states, batch)
    sums = []
    for block in range(BLOCKS):
        parts = []
        for _, ids in slots[block]:
            own = {_digest(each[number][block]): each[number][block] for number in ids}
            assert frozenset(own) in net.orders, "a gradient differs from that of one piece"
            parts.append(slot_of(net, own, net.orders[frozenset(own)]))
        sums.append(ToyNet.add(net, parts))
    ends = {block: (0, sums[block]) for block in (0, BLOCKS - 1)}
    for block in ends:
        others = {other: part for other, part in ends.items() if other != block}
        sums[block] = net.tie(block, ends[block][1], others)
    return [net.apply(state, total, coefficient) for state, total in zip(states, sums, strict=True)]


def check_commit(net, witness, commit):
    key = commit.get("cluster", 0), commit["step"]
    before, after = witness.members(*key)
    slots = [witness.updates[*key, block][0] for block in range(BLOCKS)]
    states = trained(
        net, [net.known[digest] for digest in before], commit["batch"], slots, commit["coefficient"]
    )
    assert [ToyNet.digest(net, state) for state in states] == after


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_both_share_a_step(monkeypatch):
    net = Recorder()
    witness = Witness(Checks, monkeypatch)
    swarm = CheckedSwarm(5, replace(CONFIG, ties=net.ties), net, Coverage())
    swarm.run(900.0)
    commits = History.of(swarm.log).commits
    assert sorted(commits) == list(range(STEPS))
    together = 0
    for step, commit in commits.items():
        check_commit(net, witness, commit)
        together += len({holder for holder, _ in witness.updates[0, step, 0][0]}) > 1
    assert together >= STEPS // 2


@pytest.mark.parametrize("delayed", mostly_proof([False, True], [True]))
def test_each_trains_batches_of_its_own_and_they_average(monkeypatch, delayed):
    net = Recorder()
    witness = Witness(GroupedChecks, monkeypatch)
    config = replace(CONFIG, ties=net.ties, part_s=(0.0, 3.0 if delayed else 0.0))
    swarm = GroupedSwarm(5, config, net, Coverage(), delayed=delayed)
    swarm.run(900.0)
    averages = [record for record in swarm.log if record["kind"] in ("average", "installed")]
    assert sum(len(record["clusters"]) == 2 for record in averages) >= 2
    assert any(record["kind"] == "installed" for record in averages) == delayed
    for record in swarm.log:
        if record["kind"] == "commit":
            check_commit(net, witness, record)
    later = 0
    for record in averages:
        copies = {cluster: witness.members(cluster, at)[0] for cluster, at in record["clusters"]}
        for cluster, step in record["installed"]:
            before, after = witness.members(cluster, step)
            later += step > dict(record["clusters"])[cluster]
            for block in range(BLOCKS):
                states = [net.known[copy[block]] for copy in copies.values()]
                total = net.add(state.parameters for state in states)
                copy = net.known[copies[cluster][block]]
                state = net.install(net.known[before[block]], total, 1.0 / len(copies), copy)
                assert ToyNet.digest(net, state) == after[block]
    assert (later > 0) == delayed
    last = averages[-1]["clusters"]
    assert {len(swarm.coordinator.clusters[cluster].members.roster()) for cluster, _ in last} == {3, 5}
