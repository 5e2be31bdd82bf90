"""`hetpeer plan --devices`: files as people write them, and what is said of wrong ones."""

import dataclasses
import json
import math
import re
import resource
from xml.etree import ElementTree as ET

import numpy as np
import pytest
import typer

from hetpeer.bootstrap.run.settings import LinkSettings
from hetpeer.bootstrap.run.step_workload import of_links
from hetpeer.dht.base.errors import LocalError
from hetpeer.peer.cli.swarm.device_plans import GridQuestion, SwarmQuestion, plan_grid, plan_swarm
from hetpeer.peer.cli.swarm.plan_command import Cost, plan
from hetpeer.peer.planning.device_files import read_devices
from hetpeer.peer.planning.model_workload import PRESETS, USUAL, preset, work_of
from hetpeer.stages.block.offload import Offload
from hetpeer.stages.planning.swarms.plan_inputs import Beside
from tests.bootstrap.engine import make_run
from tests.peer.test_cli_main import hetpeer

HOMES = """
latency_ms = 30
[[device]]
name = "attic"
tflops = 8.5
memory_gib = 6
up_mbps = 20
down_mbps = 100
[[device]]
name = "office"
tflops = 12
memory_gib = 8
up_mbps = 100
down_mbps = 50
"""
PRIVATE = HOMES.replace("[[device]]", "[[device]]\nprivate = true")


def written(folder, text, name="devices.toml"):
    path = folder / name
    path.write_text(text)
    return path


def asked(path, model="gpt2", ratio=None) -> SwarmQuestion:
    return SwarmQuestion(
        devices=path, model=model, microbatches=None, ratio=ratio, seconds=0.0, seed=0, choices=USUAL
    )


def test_a_file_of_devices(tmp_path):
    named = read_devices(written(tmp_path, HOMES))
    assert named.names == ("attic", "office")
    assert named.devices.flops.tolist() == [8.5e12, 12e12]
    assert named.devices.uplink.tolist() == [20e6 / 8, 100e6 / 8]
    assert np.allclose(named.devices.bandwidth[[0, 1], [1, 0]], [20e6 / 8, 100e6 / 8])
    assert named.devices.latency.tolist() == [[0.0, 0.03], [0.03, 0.0]]
    as_json = {
        "device": [{"name": n, "tflops": 1, "memory_gib": 1} for n in "ab"],
        "latency_ms": [[0, 1], [2, 0]],
    }
    other = read_devices(written(tmp_path, json.dumps(as_json), "devices.json"))
    assert other.devices.latency[0, 1] == 0.001
    assert other.devices.latency[1, 0] == 0.002


GPUS = """
latency_ms = 5
[[device]]
name = "gpu"
tflops = 10
memory_gib = 3
host_gib = 8
disk_gib = 30
offload = "host"
pcie_gb_s = 3
disk_gb_s = 0.5
[[device]]
name = "processor"
tflops = 1
memory_gib = 4
"""


def test_a_file_of_devices_with_memory_beside_them(tmp_path, capsys):
    path = written(tmp_path, GPUS)
    gpu, processor = read_devices(path).devices.beside
    gib = 2**30
    assert gpu == Beside(host=8 * gib, disk=30 * gib, kinds=(Offload.HOST,), pcie=3e9, disk_rate=0.5e9)
    assert processor == Beside()
    plan_swarm(asked(path, "gpt2"), as_json=True)
    found = json.loads(capsys.readouterr().out)
    (one,) = found["pipelines"]
    kinds = {stage["device"]: stage for stage in one["stages"]}
    assert kinds["gpu"]["offload"] == "host"
    assert 0 < kinds["gpu"]["host_gib"] <= 8
    assert found["total_s"] == pytest.approx(found["pipeline_s"] + found["sync_s"] + found["update_s"])
    assert found["update_s"] > 0
    plan_swarm(asked(path, "gpt2"), as_json=False)
    said = capsys.readouterr().out
    assert "s between GPU, main memory and disk" in said
    assert "GiB of main memory" in said
    assert "; offload host" in said


def test_who_says_nothing_of_departures_leaves_as_often_as_the_others(tmp_path, capsys):
    """In the middle; and where nobody says anything, departures do not count."""
    third = '[[device]]\nname = "shed"\ntflops = 5\nmemory_gib = 8\n'
    text = HOMES.replace('"attic"', '"attic"\nleaves_per_hour = 3').replace(
        '"office"', '"office"\nleaves_per_hour = 0'
    )
    path = written(tmp_path, "away_s = 30\n" + text + third)
    found = read_devices(path).devices.departures
    assert (found.rate * 3600).tolist() == pytest.approx([3.0, 0.0, 1.5])
    assert found.away_s == 30.0
    plan_swarm(asked(path), as_json=True)
    costs = json.loads(capsys.readouterr().out)["departures"]
    assert costs["step_s"] > 0
    plan_swarm(asked(path), as_json=False)
    assert "s with departures" in capsys.readouterr().out
    assert read_devices(written(tmp_path, HOMES + third)).devices.departures is None
    for wrong in ("-1.0", '"often"', "4000"):
        with pytest.raises(LocalError, match=r"attic.*leaves_per_hour"):
            read_devices(written(tmp_path, text.replace("leaves_per_hour = 3", f"leaves_per_hour = {wrong}")))


def test_the_memory_that_is_missing_is_named(tmp_path):
    alone, _, _ = GPUS.replace("host_gib = 8", "host_gib = 1").rpartition("[[device]]")
    small = written(tmp_path, alone)
    with pytest.raises(LocalError) as refused:
        plan_swarm(asked(small, "gpt2-xl"), as_json=True)
    assert "GiB of main memory more" in refused.value.line()
    missing = re.findall(r"([0-9.]+) GiB of (GPU|main) memory more", refused.value.line())
    more = {what: float(amount) for amount, what in missing}
    enough = small.read_text().replace("memory_gib = 3", f"memory_gib = {3 + more.get('GPU', 0) + 0.1}")
    path = written(tmp_path, enough.replace("host_gib = 1", f"host_gib = {1 + more['main'] + 0.1}"))
    plan_swarm(asked(path, "gpt2-xl"), as_json=True)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("device = 3", "device"),
        ("[[device]]\nname = 'x'\ntflops = -1\nmemory_gib = 1", "device 0 (x), tflops"),
        ("[[device]]\nname = 'x'\ntflops = 1", "device 0 (x), memory_gib: Field required"),
        ("[[device]]\nname = 'x'\ntflops = 1\nmemory_gib = 1\noffload = 'ram'", "device 0 (x), offload"),
        ("[[device]]\nname = 'x'\ntflops = 1\nmemory_gib = 1\nhost_gib = 0", "device 0 (x), host_gib"),
        ("[[device]]\nname = 'x'\ntflops = 1\nmemory_gib = 1\nspeed = 3", "device 0 (x), speed"),
        ("[[device]]\nname = 'x'\ntflops = 1\nmemory_gib = 1\n" * 2, "two devices are called x"),
        ("latency_ms = [[0]]\n" + HOMES.replace("latency_ms = 30", ""), "latency_ms is of 1 devices"),
        ("latency_ms = [[0, -1], [1, 0]]\n" + HOMES.replace("latency_ms = 30", ""), "row 0, column 1"),
        ("[[device", "devices.toml"),
        (HOMES.replace("tflops = 12", "tflops = 1e300"), "device 1 (office), tflops"),
        (HOMES.replace("tflops = 12", "tflops = true"), "device 1 (office), tflops"),
        (HOMES.replace("tflops = 12", "tflops = '8'"), "device 1 (office), tflops"),
        (HOMES.replace("up_mbps = 100", "up_mbps = 1e-308"), "device 1 (office), up_mbps"),
        (HOMES.replace("up_mbps = 100", "private = 'no'"), "device 1 (office), private"),
        (HOMES.replace("latency_ms = 30", "latency_ms = 1" + 400 * "0"), "latency_ms"),
        (f"bandwidth_gbit_s = [[0, 1], [1{400 * '0'}, 0]]\n" + HOMES, "row 1, column 0 of bandwidth_gbit_s"),
        ("bandwidth_gbit_s = [[0, 1], [1e-320, 0]]\n" + HOMES, "row 1, column 0 of bandwidth_gbit_s"),
        (PRIVATE, "row 0, column 1: attic does not reach office"),
        ("bandwidth_gbit_s = [[0, 0], [1, 0]]\n" + HOMES, "attic does not reach office"),
        ("bandwidth_gbit_s = [[0, -1], [1, 0]]\n" + HOMES, "row 0, column 1 of bandwidth_gbit_s is -1"),
        (HOMES + "[[front]]\nname = 'attic'", "two devices are called attic"),
        (HOMES + "[[front]]\nname = 'server'\ntflops = 3", "front, 0, tflops"),
    ],
)
def test_wrong_files_are_refused_by_name(tmp_path, text, why):
    with pytest.raises(LocalError) as refused:
        read_devices(written(tmp_path, text))
    assert refused.value.code == "HP-PLAN-002"
    assert why in refused.value.line()


def test_the_command_says_who_does_what(tmp_path, capsys):
    path = written(tmp_path, HOMES)
    plan_swarm(asked(path), as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed["total_s"] == printed["pipeline_s"] + printed["sync_s"]
    assert sum(one["microbatches"] for one in printed["pipelines"]) == printed["microbatches"] == 64
    for one in printed["pipelines"]:
        blocks = [block for stage in one["stages"] for block in range(*stage["blocks"])]
        assert blocks == list(range(12))
    there = {stage["device"] for one in printed["pipelines"] for stage in one["stages"]}
    assert there | set(printed["spared"]) == {"attic", "office"}
    assert printed["bottleneck"]["device"] in there
    plan_swarm(asked(path), as_json=False)
    assert "slowest " in capsys.readouterr().out


def test_a_front_passes_on_what_two_do_not_send_each_other(tmp_path, capsys):
    fronts = (
        "[[front]]\nname = 'slow'\nup_mbps = 10\n[[front]]\nname = 'fast'\nup_mbps = 60\ndown_mbps = 80\n"
    )
    named = read_devices(written(tmp_path, PRIVATE + fronts))
    assert named.names == ("attic", "office")
    assert named.through == {(0, 1): "fast", (1, 0): "fast"}
    assert named.devices.latency.tolist() == [[0.0, 0.06], [0.06, 0.0]]
    # the way there is attic's 20 Mbit/s, the way back half of the front's 60: two may need it
    assert np.allclose(named.devices.bandwidth[[0, 1], [1, 0]], [20e6 / 8, 30e6 / 8])
    small = PRIVATE.replace("gib = 6", "gib = 3").replace("gib = 8", "gib = 3")  # neither has room for all
    path = written(tmp_path, small + fronts)
    plan_swarm(asked(path), as_json=True)
    pairs = {(one["from"], one["to"]) for one in json.loads(capsys.readouterr().out)["fronts"]}
    assert pairs == {("attic", "office"), ("office", "attic")}
    plan_swarm(asked(path), as_json=False)
    assert "fast relays from" in capsys.readouterr().out


def test_where_only_pairs_are_known_they_alone_are_limits(tmp_path):
    pairs = "bandwidth_gbit_s = [[0, 10], [10, 0]]\n" + HOMES.replace("up_mbps", "# up_mbps")
    assert read_devices(written(tmp_path, pairs)).devices.uplink.tolist() == [np.inf, np.inf]


def test_the_plan_is_drawn(tmp_path, capsys):
    """Every device is in the picture once, whatever it is called, and the bars are those of the figures."""
    path = written(tmp_path, HOMES.replace('"attic"', '"a <b> & c"'))
    drawing = dataclasses.replace(asked(path), svg=tmp_path / "plan.svg")
    plan_swarm(drawing, as_json=True)
    printed = json.loads(capsys.readouterr().out)
    drawn = (tmp_path / "plan.svg").read_bytes()
    said = [element.text or "" for element in ET.fromstring(drawn).iter() if element.text]
    for name in ("a <b> & c", "office"):
        assert sum(words in {name, f"spared: {name}"} for words in said) == 1
    for one in printed["pipelines"]:
        busy = [max(stage["computing_s"], stage["sending_s"]) for stage in one["stages"]]
        assert max(busy) == pytest.approx(one["period_s"])
        assert all(stage["memory_gib"] <= 8 for stage in one["stages"])
    plan_swarm(drawing, as_json=True)
    assert (tmp_path / "plan.svg").read_bytes() == drawn


def test_what_does_not_fit_is_told_with_what_is_missing(tmp_path):
    with pytest.raises(LocalError) as refused:
        plan_swarm(asked(written(tmp_path, HOMES), "gpt2-xl"), as_json=True)
    missing = float(refused.value.line().split("it needs ")[1].split(" GiB")[0])
    enough = HOMES.replace("memory_gib = 8", f"memory_gib = {8 + missing + 0.1}")
    plan_swarm(asked(written(tmp_path, enough), "gpt2-xl"), as_json=True)
    with pytest.raises(LocalError):
        plan_swarm(asked(written(tmp_path, enough.replace("= 6\n", "= 1\n")), "gpt2-xl"), as_json=True)


def test_one_thing_is_asked_at_a_time(tmp_path):
    with pytest.raises(typer.BadParameter, match="either --devices or --matrices"):
        plan(devices=tmp_path / "a", matrices=tmp_path / "b")
    with pytest.raises(typer.BadParameter, match="--svg needs"):
        plan(svg=tmp_path / "a")


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("devices", {"stages": 3}),
        ("devices", {"replicas": 3}),
        ("devices", {"cost": Cost.DT_FM}),
        ("devices", {"activation_gb": 0.0}),
        ("devices", {"gradient_gb": 0.5}),
        ("devices", {"watch": True}),
        ("devices", {"bootstrap": ["/ip4/127.0.0.1"]}),
        ("matrices", {"model": "gpt2"}),
        ("matrices", {"microbatches": 3}),
        ("matrices", {"watch": True}),
        ("matrices", {"ratio": 2.0}),
        (None, {"model": "gpt2"}),
        (None, {"stages": 8}),
        (None, {"seconds": 0.0}),
        (None, {"seed": 0}),
    ],
)
def test_options_of_something_else_are_refused_by_name(tmp_path, what, options):
    (option,) = options
    with pytest.raises(typer.BadParameter, match=f"--{option.replace('_', '-')} "):
        plan(**options, **({} if what is None else {what: tmp_path / "file"}))


@pytest.mark.parametrize("option", ["seconds", "ratio", "activation_gb", "gradient_gb"])
@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_numbers_that_are_not_finite_are_refused_by_name(tmp_path, option, number):
    """The search would end before it begins, or every plan be as good as any other."""
    what = "devices" if option in ("seconds", "ratio") else "matrices"
    with pytest.raises(typer.BadParameter, match=f"--{option.replace('_', '-')} must be a finite number"):
        plan(**{what: tmp_path / "file", option: number})


def test_the_whole_command_keeps_its_processor_time(tmp_path):
    """Of all its threads, from the first import to the end."""
    path, seconds = written(tmp_path, HOMES), 3.0
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    made = hetpeer("plan", "--devices", str(path), "--seconds", str(seconds), "--json")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    taken = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert json.loads(made.stdout)["cpu_seconds"] <= seconds
    assert 0.5 * seconds < taken <= seconds


def test_a_grid_of_another_size_is_refused(tmp_path):
    lines = {"latency_ms": [[0, 1], [1, 0]], "bandwidth_gbit_s": [[0, 1], [1, 0]]}
    path = written(tmp_path, json.dumps(lines), "lines.json")
    question = GridQuestion(
        matrices=path, stages=3, replicas=1, activation_gb=1.0, gradient_gb=1.0, seconds=0.0, seed=0
    )
    with pytest.raises(LocalError) as refused:
        plan_grid(question, as_json=True)
    assert refused.value.line().startswith(
        "HP-PLAN-003: 2 devices do not fill a grid of 3 stages and 1 pipelines; why: "
    )


def test_unknown_models_are_refused(tmp_path):
    with pytest.raises(LocalError, match="neither a run directory nor a model") as refused:
        plan_swarm(asked(written(tmp_path, HOMES), str(tmp_path / "nothing")), as_json=True)
    assert refused.value.code == "HP-PLAN-004"


def test_a_run_directory_says_what_its_blocks_ask(tmp_path):
    run = make_run(tmp_path)
    work = work_of(str(run.path), None)
    assert len(work) == len(run.manifest.blocks)
    assert work.microbatches == run.manifest.training.microbatches
    assert work.crossing[0] == work.crossing[-1] == 0.0
    assert (work.crossing[1:-1] > 0).all()
    assert work_of(str(run.path), 7).microbatches == 7


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (LinkSettings(), (1.0, 1.0, 1.0)),
        (LinkSettings(codec="bf16", reduce="int8"), (2.0, 2.0, 3.97)),
        (LinkSettings(codec="int8", backward="none"), (3.97, 1.0, 1.0)),
        (LinkSettings(codec="topk-int8", ratio=50.0, adaptive=False), (50.0, 50.0, 1.0)),
        (LinkSettings(codec="topk-bf16", ratio=1.5), (2.0, 2.0, 1.0)),
    ],
)
def test_lines_compress_as_far_as_the_runs_codecs_go(settings, expected):
    found = of_links(settings)
    assert np.allclose((found.forward, found.backward, found.reduce), expected, rtol=0.01)
    assert found.adaptive == settings.adaptive


def test_slow_lines_that_may_compress_make_a_shorter_step(tmp_path, capsys):
    small = HOMES.replace("gib = 6", "gib = 3").replace("gib = 8", "gib = 3")  # neither has room for all
    seconds = []
    for ratio in (None, 10.0, 100.0):
        plan_swarm(asked(written(tmp_path, small), ratio=ratio), as_json=True)
        seconds.append(json.loads(capsys.readouterr().out)["total_s"])
    assert seconds[0] > 2 * seconds[1] >= 2 * seconds[2]


def test_presets_have_the_sizes_that_are_known():
    """Parameters of GPT-2's and GPT-3's sizes, in millions; our first block has the embedding, tied to the
    head.
    """
    known = {
        "gpt2": 124,
        "gpt2-medium": 355,
        "gpt2-large": 774,
        "gpt2-xl": 1558,
        "gpt3-1.3b": 1300,
        "gpt3-6.7b": 6700,
    }
    for name, gpt in PRESETS.items():
        assert abs(preset(gpt, 1).reduced.sum() / 4e6 / known[name] - 1) < 0.02
