"""A task in segments: what each part gets, and what their answers make together."""

from types import SimpleNamespace

from hetpeer.peer.training.task_segments import backward_in_segments, forward_in_segments
from hetpeer.stages.block.rounding import UNMEASURED, Rounding
from hetpeer.stages.ipc.arena import Extent
from hetpeer.stages.ipc.block_commands import Backward, Forward
from hetpeer.stages.ipc.worker_messages import Backpropagated, Forwarded
from hetpeer.stages.operators.random_draws import Draw

SEGMENTS = ((2, 4), (4, 5))
IN, BETWEEN, OUT, TOKENS, TARGETS = ({"x": Extent(64 * at, 64)} for at in range(5))
SPECS = {2: {"tokens": 0}, 3: {}, 4: {"targets": 0}}


def test_a_forward_hands_its_bundle_on_and_each_part_has_its_own_data():
    data = {"tokens": TOKENS["x"], "targets": TARGETS["x"]}
    whole = Forward(
        step=1,
        versions=(7, 8, 9),
        task="a",
        begin=2,
        end=5,
        batch=4,
        draw=Draw(0, 0, 0, 1),
        inputs=IN,
        data=data,
        outputs=OUT,
        sparse=True,
    )
    specs = {block: SimpleNamespace(data=names) for block, names in SPECS.items()}
    work = forward_in_segments(whole, SEGMENTS, [BETWEEN], specs)
    first, last = (part.command for part in work.parts)
    assert [part.block for part in work.parts] == [2, 4]
    assert (first.begin, first.end, first.inputs, first.outputs) == (2, 4, IN, BETWEEN)
    assert (first.versions, last.versions) == ((7, 8), (9,))
    assert (last.begin, last.end, last.inputs, last.outputs) == (4, 5, BETWEEN, OUT)
    assert (first.data.keys(), last.data.keys()) == ({"tokens"}, {"targets"})
    assert (first.sparse, last.sparse) == (True, False), "nothing is left out between devices"
    joined = work.join([Forwarded(loss=None, seconds=3.0), Forwarded(loss=0.5, seconds=1.0, hits=(1, 2))])
    assert joined == Forwarded(loss=0.5, seconds=3.0, hits=(1, 2))


def test_a_backward_goes_from_the_last_device_to_the_first():
    whole = Backward(
        step=1, task="a", output_gradients=OUT, input_gradients=IN, slot=7, fold=(2, 4), weigh=True
    )
    work = backward_in_segments(whole, SEGMENTS, [BETWEEN])
    last, first = (part.command for part in work.parts)
    assert [part.block for part in work.parts] == [4, 2]
    assert (last.output_gradients, last.input_gradients, last.fold) == (OUT, BETWEEN, (4,))
    assert (first.output_gradients, first.input_gradients, first.fold) == (BETWEEN, IN, (2,))
    measured = (
        Rounding(output=1.0, gradient=2.0, sums=(3.0,), relative=0.1),
        Rounding(output=4.0, gradient=5.0, sums=(6.0, 7.0), relative=0.2),
    )
    parts = [Backpropagated(seconds=1.0, rounding=one) for one in measured]
    expected = Rounding(output=1.0, gradient=5.0, sums=(6.0, 7.0, 3.0), relative=0.2)
    assert work.join(parts) == Backpropagated(seconds=1.0, rounding=expected)
    parts[0] = Backpropagated(seconds=1.0)
    assert work.join(parts).rounding == UNMEASURED
