"""The picture of a model: blocks in order, every value that flows, the same bytes every time."""

import itertools
import xml.etree.ElementTree as ET

import pytest

from hetpeer.peer.watching.graph_picture import SKIP, picture
from hetpeer.stages.graph.graph_cost import block_cost
from hetpeer.stages.tracing.cut import balanced_ranges, cut_blocks
from hetpeer.stages.tracing.outline import RowKind, operator_label, outline
from tests.stages.zoo import zoo

pytestmark = pytest.mark.xdist_group("zoo")

SVG = "{http://www.w3.org/2000/svg}"
MODELS = ["gpt", "resnet", "skip"]


def blocks_of(name, target=None):
    specs = cut_blocks(zoo(name)[1], target)
    return specs, [block_cost(spec) for spec in specs]


def drawn(name, target=None):
    specs, costs = blocks_of(name, target)
    stages = balanced_ranges(specs, 2)
    svg = picture(specs, costs, title="a <model> & more", stages=stages)
    assert svg == picture(specs, costs, title="a <model> & more", stages=stages)
    return specs, costs, ET.fromstring(svg)


def texts(element):
    return [text.text or "" for text in element.iter(f"{SVG}text")]


@pytest.mark.parametrize("name", MODELS)
def test_blocks_stand_in_order_and_say_what_crosses(name):
    specs, costs, root = drawn(name)
    boxes = [group for group in root.iter(f"{SVG}g") if group.get("class") == "block"]
    assert [texts(box)[0] for box in boxes] == [f"block {spec.index}" for spec in specs]
    tops = [float(box.find(f"{SVG}rect").get("y")) for box in boxes]
    bottoms = [
        top + float(box.find(f"{SVG}rect").get("height")) for top, box in zip(tops, boxes, strict=True)
    ]
    assert all(bottom < top for bottom, top in zip(bottoms, tops[1:], strict=False))
    said = texts(root)
    assert said[0] == "a <model> & more"
    assert {"stage 0", "stage 1"} <= set(said)
    for cost in costs[:-1]:
        for value in cost.leaves:
            assert any(text.startswith(f"{value}  [") for text in said)


@pytest.mark.parametrize("name", MODELS)
def test_everything_is_inside_the_picture_and_no_box_overlaps_another(name):
    *_, root = drawn(name)
    width, height = float(root.get("width")), float(root.get("height"))
    chips = []
    for box in root.iter(f"{SVG}rect"):
        x, y, w, h = (
            (float(box.get(key)) for key in ("x", "y", "width", "height")) if box.get("x") else (0,) * 4
        )
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height
        if h == 18:
            chips.append((y, y + h))
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(sorted(chips)))
    for line in root.iter(f"{SVG}polyline"):
        for point in line.get("points").split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height


def test_a_block_that_does_what_another_does_is_not_drawn_twice():
    *_, root = drawn("gpt")
    boxes = [group for group in root.iter(f"{SVG}g") if group.get("class") == "block"]
    like = [any(text.startswith("does what block 1 does") for text in texts(box)) for box in boxes]
    assert like == [False, False, True, True, False]
    assert [texts(box).count("attention") for box in boxes] == [0, 1, 0, 0, 0]


def test_a_value_that_passes_blocks_is_drawn_past_them():
    specs, _, root = drawn("skip", 6)
    edges = [group for group in root.iter(f"{SVG}g") if group.get("class") == "edge"]
    past = [
        edge
        for edge in edges
        if edge.find(f"{SVG}polyline").get("stroke") == SKIP and edge.find(f"{SVG}title").text == "linear"
    ]
    assert len(past) == 1
    reader = max(spec.index for spec in specs if "linear" in spec.inputs)
    assert reader >= 3
    assert "linear, 128 B" in texts(root)


def test_the_layer_of_a_gpt_has_its_two_skips():
    specs, costs = blocks_of("gpt")
    found = outline(specs[1], costs[1])
    labels = [row.label for row in found.rows if row.kind is RowKind.OPERATOR]
    attention = ["layer_norm", "linear", "attention", "linear", "add"]
    assert labels == [*attention, "layer_norm", "linear", "gelu", "linear", "add"]
    assert found.hidden == len(specs[1].nodes) - len(labels)
    skips = [
        (found.rows[lane.row].label, [found.rows[end].label for end in lane.readers]) for lane in found.lanes
    ]
    assert sorted(skips) == [("add", ["add"]), (next(iter(specs[1].inputs)), ["add"])]
    assert found.rows[1].parameters == ("h.0.ln_1.weight", "h.0.ln_1.bias")


@pytest.mark.parametrize("name", MODELS)
def test_every_value_that_is_read_is_drawn(name):
    """Straight down or in a lane; lanes in one column do not overlap."""
    for spec, cost in zip(*blocks_of(name), strict=True):
        found = outline(spec, cost)
        wanted = {(source, number) for number, row in enumerate(found.rows) for source in row.reads}
        got = {(number - 1, number) for number in found.straight}
        got |= {(lane.row, end) for lane in found.lanes for end in lane.readers}
        assert got == wanted
        for one, other in itertools.combinations(found.lanes, 2):
            apart = one.readers[-1] <= other.row or other.readers[-1] <= one.row
            assert apart or one.column != other.column
        read = {source for source, _ in wanted}
        leaves = {number for number, row in enumerate(found.rows) if row.kind is RowKind.LEAVES}
        assert {number for number in range(len(found.rows)) if number not in read} == leaves


def test_operators_have_short_names():
    names = [
        "aten.layer_norm.default",
        "aten._softmax.default",
        "hetpeer.batch_norm",
        "getitem",
        "aten.add.Tensor",
    ]
    assert list(map(operator_label, names)) == ["layer_norm", "softmax", "batch_norm", "getitem", "add"]
