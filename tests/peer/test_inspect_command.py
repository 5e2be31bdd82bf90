"""`hetpeer inspect`: what a run's model costs, and what one would that is no run yet."""

import json
import xml.etree.ElementTree as ET

import networkx as nx
import pytest
import typer
from typer.testing import CliRunner

from hetpeer.bootstrap.authoring.create import create_run
from hetpeer.bootstrap.authoring.model_costs import inspect_run
from hetpeer.bootstrap.run.settings import TrainingSettings
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.examples import gpt
from hetpeer.peer.cli.author import inspect_command
from hetpeer.peer.limits.amounts import bytes_text, count_text, flops_text
from tests.bootstrap.pretrained_models import bert, llama, t5, vit

MODEL = f"{gpt.__file__}:build"
TINY = """
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(256, 8), nn.Linear(8, 256)
    def forward(self, tokens, targets):
        return nn.functional.cross_entropy(self.layer(self.table(tokens)).flatten(0, 1), targets.flatten())
build = Model
"""
SETTINGS = (
    *("training", "rate", "optimizer", "evaluation", "checkpoint"),
    *("data", "links", "mode", "admission", "trust", "reliable"),
)
app = typer.Typer()
app.command()(inspect_command.inspect)


def run_command(*arguments: object, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if isinstance(result.exception, LocalError):
        raise result.exception
    assert result.exit_code == exit_code, result.output
    return result.stdout


@pytest.fixture(scope="module")
def run_path(tmp_path_factory):
    """Blocks with a tied parameter and dropout, and two ways to cut them."""
    folder = tmp_path_factory.mktemp("inspect")
    text = folder / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 200)
    training = TrainingSettings(batch_size=4, microbatch_size=2, slot_size=1)
    model = f"{gpt.__file__}:build_tied"
    create_run(folder / "run", model=model, data=[text], stages=[2, 3], training=training)
    return folder / "run"


def test_a_run_in_json(run_path):
    found = json.loads(run_command(run_path, "--json"))
    manifest = inspect_run(run_path)
    assert (found["schema"], found["name"], found["run"]) == ("hetpeer.inspect/1", "run", manifest.run_id)
    assert found["microbatch_size"] == 2
    assert found["settings"]["training"]["batch_size"] == 4
    assert set(found["settings"]) == {"seed", "training", "links", "averaging", "admission", "trust"}
    assert found["tied"] == {"wte.weight": [0, 5]}
    assert found["parameters"] == sum(p.numel() for p in gpt.build_tied().parameters())
    blocks = found["blocks"]
    assert [block["index"] for block in blocks] == list(range(6))
    for block, spec in zip(blocks, manifest.specs, strict=True):
        assert block["flops_forward"] == spec.flops_forward
        assert block["activation_bytes"] == spec.activation_bytes
        assert (block["parameters"], block["parameter_bytes"]) == (spec.parameter_count, spec.parameter_bytes)
        assert [operator["op"] for operator in block["operators"]] == [node.op for node in spec.nodes]
        assert block["tied"] == (["wte.weight"] if block["index"] in (0, 5) else [])
    hidden = 4 * 2 * 64 * 128
    assert [list(block["leaves"].values()) for block in blocks] == [[hidden]] * 5 + [[4]]
    assert [block["data"] for block in blocks] == [["tokens"], [], [], [], [], ["targets"]]
    layouts = [[(stage["begin"], stage["end"]) for stage in layout] for layout in found["layouts"]]
    assert [len(layout) for layout in layouts] == [2, 3]
    first, last = found["layouts"][0]
    assert (first["memory"]["in_flight"], last["memory"]["in_flight"]) == (
        2,
        1,
    )  # a step has two microbatches
    parts = ("state", "optimizer", "slots", "sums", "waiting", "working")
    assert first["memory"]["total"] == sum(first["memory"][part] for part in parts)
    offload = first["memory"]["offload"]
    numbers = first["memory"]["slots"] // 12
    assert offload["gpu"]["none"]["device"] == first["memory"]["total"] - 8 * numbers, "a slot is in the file"
    assert offload["gpu"]["host"]["device"] == first["memory"]["total"] - 24 * numbers
    assert offload["gpu"]["host"]["host"] == 20 * numbers
    assert offload["processor"]["disk"]["disk"] == (20 + 12) * numbers, "with copies of states"


def test_a_run_in_plain_lines(run_path):
    lines = run_command(run_path).splitlines()
    labels = [line.split()[0] for line in lines]
    assert labels == [
        "run",
        "size",
        "microbatch",
        "tied",
        *SETTINGS,
        *["block"] * 6,
        *["stage"] * 5,
        *["memory"] * 15,
    ]
    assert lines[1].endswith("6 blocks, 834 k parameters")
    assert lines[3].split(maxsplit=1)[1] == "wte.weight in blocks 0, 5"
    said = dict(line.split(maxsplit=1) for line in lines[4 : 4 + len(SETTINGS)])
    assert said["training"] == "60 steps of 4 samples in microbatches of 2, in float32"
    assert said["rate"] == "0.0005, constant"
    assert said["optimizer"] == "AdamW, betas 0.9 0.95, weight decay 0.1, clip norm 1"
    assert "sends 64 KiB" in lines[5 + len(SETTINGS)]
    operators = run_command(run_path, "--block", 5).splitlines()[4:]
    assert [line.split()[1] for line in operators][-1] == "aten.cross_entropy_loss.default"


def test_a_run_on_a_terminal(run_path, monkeypatch):
    monkeypatch.setattr(inspect_command, "plain", lambda _: False)
    monkeypatch.setenv("COLUMNS", "120")
    text = run_command(run_path)
    assert max(map(len, text.splitlines())) <= 120
    heads = [line.split() for line in text.splitlines() if line.split()[:1] in (["block"], ["stage"])]
    shown = (inspect_command.BLOCK_HEADS, inspect_command.STAGE_HEADS, inspect_command.MEMORY_HEADS)
    assert heads == [" ".join(names).split() for names in shown]


def test_a_model_that_is_no_run(tmp_path):
    picture = tmp_path / "graph.svg"
    sizes = ("--microbatch-size", 3, "--sequence-length", 16, "--stages", 3, "--stages", 1)
    found = json.loads(run_command(MODEL, *sizes, "--json", "--svg", picture))
    assert (found["run"], found["microbatch_size"], found["parameters"]) == (None, 3, 867_072)
    assert [len(layout) for layout in found["layouts"]] == [3, 1]
    (whole,) = found["layouts"][1]
    flops = sum(block["flops_forward"] for block in found["blocks"])
    assert (whole["begin"], whole["end"], whole["flops_forward"]) == (0, 6, flops)
    assert found["layouts"][0][0]["memory"]["in_flight"] == 5
    assert ET.fromstring(picture.read_text()).tag.endswith("svg")


def test_the_operator_graph_for_other_programs(tmp_path):
    file = tmp_path / "graph.graphml"
    found = json.loads(run_command(MODEL, "--json", "--graph", file))
    graph = nx.read_graphml(file)
    assert nx.is_directed_acyclic_graph(graph)
    assert nx.is_weakly_connected(graph)
    calls = {name: node for name, node in graph.nodes(data=True) if node["op"] != "input"}
    inputs = graph.nodes - calls.keys()
    assert inputs == {name for block in found["blocks"] for name in block["data"]}
    for number, block in enumerate(found["blocks"]):
        inside = [node for node in calls.values() if node["block"] == number]
        assert len(inside) == len(block["operators"])
        assert sum(node["flops_forward"] for node in inside) == block["flops_forward"]
        crossing = {
            name: edge["bytes"]
            for name, reader, edge in graph.edges(data=True)
            if name in calls and calls[name]["block"] < number == calls[reader]["block"]
        }
        assert crossing.items() <= block["enters"].items()  # the others only pass


def test_a_model_with_adapters():
    """Only they are parameters; the memory of what is frozen counts once."""
    sizes = ("--microbatch-size", 3, "--sequence-length", 16, "--stages", 1)
    plain, adapted = (
        json.loads(run_command(MODEL, *sizes, "--json", *more)) for more in ([], ["--lora", "r=4"])
    )
    assert adapted["parameters"] == 4 * (4 * (512 + 256 + 640 + 640) + 128 + 256)
    ((before,), (after,)) = (found["layouts"][0] for found in (plain, adapted))
    assert after["memory"]["optimizer"] < 0.05 * before["memory"]["optimizer"]
    assert after["memory"]["state"] >= before["memory"]["state"]


def test_options_for_the_way_to_compute(tmp_path):
    module = tmp_path / "tiny.py"
    module.write_text(TINY)
    plain, again, half = (
        json.loads(run_command(f"{module}:build", "--json", *more))["blocks"]
        for more in ([], ["--recompute"], ["--dtype", "bf16"])
    )
    kept = [sum(block["activation_bytes"] for block in blocks) for blocks in (plain, again)]
    assert kept[1] < 0.5 * kept[0]
    assert [sum(blocks[0]["leaves"].values()) for blocks in (plain, half)] == [4 * 8 * 64 * 8, 2 * 8 * 64 * 8]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["nowhere"], "HP-RUN-004"),
        (["."], "HP-RUN-004"),
        (["nowhere.py:build"], "HP-MODEL-006"),
        ([gpt.__file__], "HP-MODEL-006"),
        ([f"{gpt.__file__}:nothing"], "HP-MODEL-006"),
        ([f"{gpt.__file__}:GPT"], "HP-MODEL-006"),
        ([f"{gpt.__file__}:math"], "HP-MODEL-006"),
        (["tiny.py:build", "--loss", "tiny.py:nothing"], "HP-MODEL-008"),
        ([MODEL, "--dtype", "int8"], "HP-RUN-001"),
        (["tiny.py:build", "--stages", "100"], "HP-MODEL-005"),
        (["tiny.py:build", "--stages", "0"], "HP-MODEL-005"),
        ([MODEL, "--lora", "rank=4"], "HP-RUN-001"),
        (["tiny.py:build", "--svg", "/nowhere/graph.svg"], "HP-DISK-001"),
        (["tiny.py:build", "--graph", "/nowhere/graph.graphml"], "HP-DISK-001"),
        (["tiny.py:build", "--graph", "."], "HP-DISK-001"),
    ],
)
def test_bad_input_is_one_line(arguments, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(TINY)
    with pytest.raises(LocalError) as caught:
        run_command(*arguments)
    assert caught.value.code == code
    assert caught.value.exit_code == ExitCode.CONFIG
    assert "\n" not in caught.value.line()


def test_a_damaged_run_and_a_block_that_is_not_there(run_path, tmp_path):
    graph = next((run_path / "graph").iterdir())
    data = graph.read_bytes()
    graph.write_bytes(data[:-1] + b"?")
    try:
        with pytest.raises(LocalError, match="HP-RUN-005"):
            run_command(run_path)
    finally:
        graph.write_bytes(data)
    run_command(run_path, "--block", 6, exit_code=ExitCode.USAGE)


def test_a_model_needs_no_weights(tmp_path):
    """Its parameters would take 4 TB."""
    module = tmp_path / "huge.py"
    module.write_text(
        "from torch import nn\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.table = nn.Embedding(1000, 1_000_000)\n"
        "        self.layer = nn.Linear(1_000_000, 1_000_000, bias=False)\n"
        "    def forward(self, tokens, targets):\n"
        "        return self.layer(self.table(tokens)).mean()\n"
        "build = Model\n"
    )
    found = json.loads(
        run_command(f"{module}:build", "--microbatch-size", 1, "--sequence-length", 2, "--json")
    )
    assert found["parameters"] == 10**12 + 10**9


def test_numbers_as_people_read_them():
    assert [bytes_text(n) for n in (0, 1023, 1024, 1536, 1023 * 1024, 2**20 - 1, 5 * 2**40)] == [
        *("0 B", "1023 B", "1 KiB", "1.5 KiB", "1023 KiB", "1 MiB", "5 TiB"),
    ]
    assert [flops_text(n) for n in (1, 999, 1000, 12_345, 999_999, 3e15)] == [
        *("1 FLOP", "999 FLOP", "1 kFLOP", "12.3 kFLOP", "1 MFLOP", "3 PFLOP"),
    ]
    assert [count_text(n) for n in (0, 72, 867_072, 1_315_723_264)] == ["0", "72", "867 k", "1.32 B"]


READ = """
from transformers import AutoModelForCausalLM

def build():
    return AutoModelForCausalLM.from_pretrained("{folder}")
"""


def test_a_model_of_transformers_by_name_and_from_a_function_that_reads_it(tmp_path):
    folder = llama(tmp_path / "model", tokenizer=False)
    sizes = ("--microbatch-size", 2, "--sequence-length", 16)
    named = json.loads(run_command(f"hf:{folder}", "--json", *sizes))
    assert named["blocks"][0]["data"] == ["input_ids"]
    assert len(named["blocks"]) > 2
    (tmp_path / "read.py").write_text(READ.replace("{folder}", str(folder)))
    read = json.loads(run_command(f"{tmp_path / 'read.py'}:build", "--json", *sizes))
    assert (read["blocks"], read["layouts"]) == (named["blocks"], named["layouts"])


@pytest.mark.parametrize(("build", "task"), [(vit, None), (bert, "sequence-classification"), (t5, None)])
def test_models_of_other_tasks_are_planned(tmp_path, build, task):
    more = ("--task", task) if task else ()
    found = json.loads(run_command(f"hf:{build(tmp_path / 'model')}", "--json", *more))
    assert len(found["blocks"]) > 1
    assert found["parameters"] > 0
