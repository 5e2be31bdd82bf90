"""Plans for devices that differ, against enumeration."""

import itertools
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.stages.links.adaptive_ratio import SLACK
from hetpeer.stages.planning.swarms.current_step_time import as_it_is
from hetpeer.stages.planning.swarms.pipeline_cuts import PipelineCuts, PlannedPipeline, lacking
from hetpeer.stages.planning.swarms.plan_inputs import Averaging, Compression, Devices, StepDemand
from hetpeer.stages.planning.swarms.plan_search import LEAST, MORE, PlanSearch, _cut
from hetpeer.stages.planning.swarms.swarm_plan import adding_up, holders_of, planned, share_out


def some_devices(count: int, seed: int) -> Devices:
    random = np.random.default_rng(seed)
    return Devices(
        flops=random.uniform(1e12, 1e13, count),
        memory=random.uniform(1e9, 6e9, count),
        uplink=random.uniform(1e6, 1e8, count),
        latency=random.uniform(1e-3, 0.1, (count, count)),
        bandwidth=random.uniform(1e6, 1e8, (count, count)),
    )


def some_work(blocks: int, seed: int) -> StepDemand:
    random = np.random.default_rng(seed)
    crossing = random.uniform(1e5, 1e7, blocks + 1)
    crossing[[0, -1]] = 0.0
    return StepDemand(
        flops=random.uniform(1e10, 1e12, blocks),
        constants=random.uniform(1e8, 1e9, blocks),
        kept=random.uniform(1e6, 1e8, blocks),
        crossing=crossing,
        reduced=random.uniform(1e7, 1e8, blocks),
        state=random.uniform(1e8, 1e9, blocks),
        microbatches=16,
    )


def by_hand(devices: Devices, work: StepDemand, order: tuple[int, ...], cuts: tuple[int, ...]) -> float:
    """The period of these cuts; infinite if memory does not allow them."""
    worst = 0.0
    for place, device in enumerate(order):
        begin, end = cuts[place], cuts[place + 1]
        behind = len(order) - 1 - place
        forward = work.crossing[end] / work.compression.forward if behind else 0.0
        back = work.crossing[begin] / work.compression.backward if place else 0.0
        kept = work.kept[begin:end].sum() + 2 * (work.crossing[begin] + work.crossing[end])
        if (
            work.memory[begin:end].sum() + min(2 * behind + 1, work.microbatches) * kept
            > devices.memory[device]
        ):
            return math.inf
        computing = 3 * work.flops[begin:end].sum() / devices.flops[device]
        lines = [forward / devices.bandwidth[device, order[place + 1]]] if behind else []
        lines += [back / devices.bandwidth[device, order[place - 1]]] if place else []
        worst = max(worst, computing, (forward + back) / devices.uplink[device], *lines)
    return worst


RATIOS = st.one_of(st.just(1.0), st.floats(1.0, 100.0))


@given(st.integers(1, 5), st.integers(1, 8), st.integers(0, 10_000), RATIOS, RATIOS)
def test_cuts_are_the_best_there_are(count, blocks, seed, forward, backward):
    devices, work = some_devices(count, seed), some_work(blocks, seed)
    work = replace(work, compression=Compression(forward=forward, backward=backward))
    order = tuple(np.random.default_rng(seed).permutation(count).tolist())
    ways = [(0, *inner, blocks) for inner in itertools.combinations(range(1, blocks), count - 1)]
    best = min((by_hand(devices, work, order, cuts) for cuts in ways), default=math.inf)
    found = PipelineCuts(devices, work).best(order)
    if found is None:
        assert best == math.inf
        return
    assert math.isclose(found.period, best, rel_tol=1e-9)
    assert math.isclose(by_hand(devices, work, order, found.cuts), best, rel_tol=1e-9)


def test_adaptive_lines_compress_until_they_are_half_hidden_and_others_always():
    devices, work, order, cuts = some_devices(3, 0), some_work(4, 0), (2, 0, 1), (0, 1, 3, 4)
    bandwidth = np.full((3, 3), 1e8)
    bandwidth[2, 0] = bandwidth[0, 2] = 1e5
    devices = replace(devices, memory=devices.memory * 100, bandwidth=bandwidth)
    for adaptive in (False, True):
        squeezed = replace(work, compression=Compression(forward=50.0, backward=3.0, adaptive=adaptive))
        found = PipelineCuts(devices, squeezed).at(order, cuts)
        assert found is not None
        fill = sum(
            3 * work.flops[begin:end].sum() / devices.flops[device]
            for device, begin, end in zip(order, cuts, cuts[1:], strict=False)
        )
        ways = set()
        for one, other, border in ((2, 0, 1), (0, 1, 3)):
            for sender, receiver, ratio in ((one, other, 50.0), (other, one, 3.0)):
                dense = work.crossing[border] / min(
                    devices.bandwidth[sender, receiver], devices.uplink[sender]
                )
                aim = SLACK * found.period
                if not adaptive or dense / ratio > aim:
                    seconds, way = dense / ratio, "all"
                else:
                    seconds, way = (aim, "some") if dense > aim else (dense, "none")
                ways.add(way)
                fill += devices.latency[sender, receiver] + seconds
        assert math.isclose(found.fill, fill, rel_tol=1e-9)
        assert ways == ({"all", "some", "none"} if adaptive else {"all"})


@given(st.integers(2, 6), st.integers(0, 10_000), st.booleans())
def test_sums_take_no_less_than_the_best_shares_and_as_long_where_uplinks_decide(count, seed, wide):
    """Against the linear program over all shares."""
    devices, work = some_devices(count, seed), some_work(1, seed)
    lines = devices.bandwidth * (1e6 if wide else 1.0)
    devices = replace(devices, latency=np.zeros((count, count)), bandwidth=lines)
    rates = np.minimum(devices.uplink, lines.sum(axis=1) - np.diag(lines))
    pairs = list(itertools.permutations(range(count), 2))
    rows = np.zeros((count + len(pairs), count + 1))
    limits = np.zeros(count + len(pairs))
    for n in range(count):
        rows[n, n], rows[n, -1], limits[n] = count - 2, -rates[n], -1.0
    for row, (one, other) in enumerate(pairs, count):
        rows[row, [one, other]], rows[row, -1] = 1.0, -lines[one, other]
    from scipy.optimize import linprog

    least = linprog([0.0] * count + [1.0], rows, limits, [[1.0] * count + [0.0]], [1.0]).fun
    found = adding_up(devices, work, [list(range(count))]).max() / work.reduced[0]
    assert found >= least * (1 - 1e-6)
    if wide:
        assert math.isclose(found, least, rel_tol=1e-6)


def test_one_slow_line_is_waited_for():
    """Two homes of two, a thousand times faster inside: sums do not cross faster than the lines between."""
    between, inside = 1e6, 1e9
    home = np.array([0, 0, 1, 1])
    lines = np.where(home[:, None] == home[None, :], inside, between)
    devices = replace(
        some_devices(4, 0), bandwidth=lines, uplink=np.full(4, inside), latency=np.zeros((4, 4))
    )
    work = some_work(1, 0)
    each = adding_up(devices, work, [[0, 1, 2, 3]]).max() / work.reduced[0]
    assert math.isclose(each, 0.5 / between, rel_tol=1e-9)


def test_sums_are_sent_as_their_codec_writes_them():
    devices, work = some_devices(2, 0), some_work(2, 0)
    devices = replace(devices, latency=np.zeros((2, 2)))
    squeezed = replace(work, compression=Compression(reduce=4.0))
    dense, quarter = (adding_up(devices, one, [[0, 1]] * 2) for one in (work, squeezed))
    assert np.allclose(dense, 4 * quarter)


def pipeline(period: float, fill: float) -> PlannedPipeline:
    return PlannedPipeline(devices=(0,), cuts=(0, 1), period=period, fill=fill, slowest=("computing", 0))


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 50)), min_size=1, max_size=4), st.integers(1, 12)
)
def test_microbatches_are_shared_as_well_as_can_be(several, microbatches):
    pipelines = [pipeline(*one) for one in several]
    shares = share_out(pipelines, microbatches)
    ways = itertools.product(range(microbatches + 1), repeat=len(pipelines))
    best = min(
        max(one.seconds(n) for one, n in zip(pipelines, way, strict=True))
        for way in ways
        if sum(way) == microbatches
    )
    assert sum(shares) == microbatches
    done = max(one.seconds(n) for one, n in zip(pipelines, shares, strict=True))
    assert math.isclose(done, best, rel_tol=1e-9)


def test_sums_take_what_the_slowest_uplink_or_all_together_need():
    devices, work = some_devices(2, 0), some_work(2, 0)
    alone = [
        PlannedPipeline(devices=(n,), cuts=(0, 2), period=1.0, fill=1.0, slowest=("computing", n))
        for n in (0, 1)
    ]
    rates = [min(devices.uplink[a], devices.bandwidth[a, b]) for a, b in ((0, 1), (1, 0))]
    latency = 2 * max(devices.latency[0, 1], devices.latency[1, 0])
    expected = work.reduced.sum() * max(1 / min(rates), 2 / sum(rates)) + latency
    assert np.allclose(adding_up(devices, work, holders_of(alone)), expected, rtol=1e-12)
    assert not adding_up(devices, work, holders_of(alone[:1])).any()


def orders_of(devices: frozenset[int]):
    """All sets of pipelines over any of the devices."""
    if not devices:
        yield ()
        return
    first = min(devices)
    rest = devices - {first}
    yield from orders_of(rest)  # spared
    for size in range(len(rest) + 1):
        for others in itertools.combinations(sorted(rest), size):
            for order in itertools.permutations((first, *others)):
                for more in orders_of(rest - set(others)):
                    yield (order, *more)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_fits_is_found(seed):
    """Memory is short, and blocks at both ends are large: few orders do."""
    devices, work = some_devices(4, seed), some_work(5, seed)
    memory = work.memory * np.array([8.0, 1.0, 1.0, 1.0, 8.0])
    work = replace(work, constants=memory, kept=work.kept * 0.0, crossing=work.crossing * 1e-9)
    devices = replace(devices, memory=devices.memory * memory.sum() / devices.memory.sum() * 1.3)
    pipelines = PipelineCuts(devices, work)
    orders = (order for size in range(1, 5) for order in itertools.permutations(range(4), size))
    fits = any(pipelines.best(order) is not None for order in orders)
    assert (PlanSearch(devices, work, seed).run(lambda: False) is not None) == fits


def test_equal_devices_are_cut_into_equal_pipelines():
    assert _cut(list(range(16)), 4, np.ones(16)) == tuple(tuple(range(n, n + 4)) for n in range(0, 16, 4))
    assert _cut([0, 1, 2], 2, np.array([1.0, 1.0, 2.0])) == ((0, 1), (2,))


@pytest.mark.parametrize("seed", range(3))
def test_the_search_finds_the_best_plan(seed):
    devices, work = some_devices(4, seed), some_work(5, seed)
    pipelines = PipelineCuts(devices, work)
    best = math.inf
    for orders in orders_of(frozenset(range(4))):
        made = [pipelines.best(order) for order in orders]
        if made and all(made):
            best = min(best, planned(devices, work, made).total_s)
    left = iter(range(6000))
    found = PlanSearch(devices, work, seed).run(lambda: next(left, None) is not None)
    assert (found is None) == (best == math.inf)
    if found is not None:
        assert math.isclose(found.best.total_s, best, rel_tol=1e-9)


def short_of_memory(count: int, part: float) -> tuple[Devices, StepDemand]:
    """Together they have `part` of what the blocks take with one microbatch each."""
    devices, work = some_devices(count, 0), some_work(48, 0)
    needed = (work.memory + work.kept).sum()
    return replace(devices, memory=devices.memory * part * needed / devices.memory.sum()), work


@pytest.mark.parametrize("part", [0.5, 0.99, 1.01, 1.1])
def test_what_does_not_fit_is_given_up_in_time(part):
    """Whatever is looked for: no more than is looked at in any case once time is over."""
    devices, work = short_of_memory(24, part)
    search, looks = PlanSearch(devices, work, 0), 0

    def on() -> bool:
        nonlocal looks
        looks += 1
        return False

    assert search.run(on) is None
    assert search._pipelines.looked_at <= LEAST + 2 * 24 + 48
    assert looks <= 1 + MORE


@pytest.mark.parametrize("count", [1, 3, 24])
@pytest.mark.parametrize("part", [0.3, 0.99, 1.01])
def test_what_is_said_to_be_missing_is_enough_and_of_one_device_exact(count, part):
    devices, work = short_of_memory(count, part)
    if PlanSearch(devices, work, 0).run(lambda: False) is not None:
        pytest.skip("it fits")
    device, missing = lacking(devices, work)
    more = missing.device
    assert device == devices.memory.argmax()
    assert more > 0
    memory = devices.memory.copy()
    memory[device] += more * (1 + 1e-9)
    assert PlanSearch(replace(devices, memory=memory), work, 1).run(lambda: False) is not None
    memory[device] = devices.memory[device] + more * (1 - 1e-6)
    if count == 1:
        assert PlanSearch(replace(devices, memory=memory), work, 1).run(lambda: False) is None


def some_pipelines(devices: Devices, work: StepDemand) -> list[PlannedPipeline]:
    """Two of two and three devices, whose memory is no limit."""
    found = [PipelineCuts(devices, work).best(order) for order in ((0, 1), (2, 3, 4))]
    assert found[0] is not None
    assert found[1] is not None
    return [one for one in found if one is not None]


@pytest.mark.parametrize("staleness", [1, 2, 8])
@pytest.mark.parametrize("seed", range(6))
def test_steps_that_overlap_fill_no_pipeline_and_wait_for_no_sums(seed, staleness):
    devices = replace(some_devices(5, seed), memory=np.full(5, 1e12))
    exact = some_work(7, seed)
    work = replace(exact, staleness=staleness)
    pipelines = some_pipelines(devices, work)
    plan, one_by_one = planned(devices, work, pipelines), planned(devices, exact, pipelines)
    shared = [(n, work.microbatches - n) for n in range(work.microbatches + 1)]
    steady = min(max(n * one.period for n, one in zip(way, pipelines, strict=True)) for way in shared)
    used = [(n, one) for n, one in zip(plan.shares, pipelines, strict=False) if n]
    assert len(plan.pipelines) == 2
    alone = max(one.fill + (n - 1) * one.period for n, one in used)
    sums = adding_up(devices, work, holders_of(pipelines)).max()
    assert math.isclose(plan.total_s, max(steady, sums, (alone + sums) / (staleness + 1)), rel_tol=1e-9)
    assert one_by_one.total_s / (staleness + 1) <= plan.total_s * (1 + 1e-9)
    assert plan.total_s < one_by_one.total_s


def test_steps_that_overlap_keep_microbatches_of_several():
    """Of two microbatches a step, at the first of four stages."""
    devices, work = some_devices(4, 0), replace(some_work(4, 0), microbatches=2)
    kept = work.kept[0] + 2 * (work.crossing[0] + work.crossing[1])
    for staleness, under_way in ((0, 2), (1, 4), (8, 7)):
        pipelines = PipelineCuts(devices, replace(work, staleness=staleness))
        first = pipelines.stages((0, 1, 2, 3), (0, 1, 2, 3, 4))[0]
        assert math.isclose(first.memory, work.memory[0] + under_way * kept)


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("interval", [1, 5])
def test_pipelines_with_batches_of_their_own_average_after_some_of_them(interval, delayed):
    devices = replace(some_devices(5, 1), memory=np.full(5, 1e12))
    work = replace(some_work(7, 1), averaging=Averaging(interval=interval, delayed=delayed))
    pipelines = some_pipelines(devices, work)
    plan = planned(devices, work, pipelines)
    average = adding_up(devices, work, holders_of(pipelines)).max() / interval
    batches = [one.fill + (work.microbatches - 1) * one.period for one in pipelines]
    each = [max(one, average) if delayed else one + average for one in batches]
    assert plan.shares == (work.microbatches,) * 2
    assert math.isclose(1 / plan.total_s, sum(1 / one for one in each), rel_tol=1e-12)


def test_the_mode_decides_which_plan_is_best():
    """Sums over slow lines: one pipeline where each step waits for them, four where averagings are rare."""
    devices = Devices(
        flops=np.full(4, 1e13),
        memory=np.full(4, 1e12),
        uplink=np.full(4, 1e7),
        latency=np.full((4, 4), 1e-2),
        bandwidth=np.full((4, 4), 1e7),
    )
    work = replace(
        some_work(8, 0), flops=np.full(8, 1e12), reduced=np.full(8, 1.5e7), crossing=np.full(9, 1e3)
    )

    def best(**mode) -> int:
        left = iter(range(800))
        found = PlanSearch(devices, replace(work, **mode), 0).run(lambda: next(left, None) is not None)
        assert found is not None
        return len(found.best.pipelines)

    assert best() == 1
    assert best(averaging=Averaging(interval=50)) == 4


@pytest.mark.parametrize("staleness", [0, 2])
def test_what_lies_between_two_steps_is_in_each(staleness: int) -> None:
    """Of steps that overlap a part of it hides behind the others' work, but the update of one follows that
    of another.
    """
    devices = replace(some_devices(4, 3), memory=np.full(4, 1e12))
    work = replace(some_work(6, 3), staleness=staleness, reduced=np.full(6, 1e3))
    pipelines = [one for order in ((0, 1), (2, 3)) if (one := PipelineCuts(devices, work).best(order))]
    held = [place for one in pipelines for place in pairwise(one.cuts)]

    def prices(between_s: float) -> tuple[float, float]:
        asks = replace(work, between_s=between_s)
        return planned(devices, asks, pipelines).total_s, as_it_is(devices, asks, held)

    for without, little, much in zip(prices(0.0), prices(0.1), prices(1e4), strict=True):
        assert little - without <= 0.1 / (staleness + 1) + 1e-9
        assert much > 1e4 if staleness else much == pytest.approx(without + 1e4)
