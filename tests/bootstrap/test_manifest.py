"""A manifest says what its owner signed, or is refused."""

from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from msgpack import packb

from hetpeer.bootstrap.run.amendment import read_amendment
from hetpeer.bootstrap.run.manifest import (
    Manifest,
    TrainingSettings,
    public_bytes,
    read,
    read_file,
    sign,
    validated,
)
from hetpeer.bootstrap.run.owner_signature import MANIFEST, unpack
from hetpeer.bootstrap.run.settings import AveragingSettings, TrustSettings
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.pipeline.delays import Delays
from tests.amounts import examples

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PEER = "QmPZ9gcCEpqKTo6aq61g2nXGUhM4iCL3ewB6LDXZCtioEB"


def make_fields() -> dict[str, Any]:
    file = {"name": "block-000.graph", "blake3": "ab" * 32, "bytes": 10}
    sizes = (
        "parameter_count",
        "vector_count",
        "parameter_bytes",
        "flops_forward",
        "activation_bytes",
        "output_bytes",
    )
    block = {"graph": file, "state": file, "state_digest": "cd" * 32} | dict.fromkeys(sizes, 4)
    shard = {"name": "a.safetensors", "blake3": "ef" * 32, "bytes": 1000, "samples": 20}
    array = {"dtype": "float32", "shape": [2, 3]}
    return {
        "name": "tiny",
        "seed": 7,
        "owner": public_bytes(KEY),
        "coordinators": [PEER],
        "blocks": [{"index": index, **block} for index in range(3)],
        "data": {"kind": "arrays", "sample": {"x": array}, "train": [shard], "heldout": [shard]},
        "training": {},
        "layouts": [[[0, 1], [1, 3]], [[0, 3]]],
    }


DATA = make_fields()["data"]
SHARD = DATA["train"][0]
TEXT = {"dtype": "int64", "shape": [16]}


def make_file(**changes: Any) -> bytes:
    return sign(validated(Manifest, make_fields() | changes), KEY)


def sign_raw(fields: dict[str, Any]) -> bytes:
    return MANIFEST.seal(fields, KEY)


def raw_fields(data: bytes) -> dict[str, Any]:
    return unpack(unpack(data)["manifest"])


def test_what_was_signed_is_read() -> None:
    signed = read(make_file())
    assert signed.manifest == validated(Manifest, make_fields())
    assert len(signed.run_id) == 32
    assert signed.manifest.training == TrainingSettings()
    assert [signed.manifest.layout(cluster) for cluster in range(3)] == [
        ((0, 1), (1, 3)),
        ((0, 3),),
        ((0, 1), (1, 3)),
    ]


def test_what_a_run_of_text_looks_like() -> None:
    data = DATA | {"kind": "text", "sample": dict.fromkeys(("tokens", "targets"), TEXT)}
    settings = validated(Manifest, make_fields() | {"data": data}).data
    assert (settings.tokens_per_sample, settings.unit) == (16, "tok")
    other = validated(Manifest, make_fields()).data
    assert (other.tokens_per_sample, other.unit, other.sample["x"].nbytes) == (1, "samples", 24)


def test_sizes_of_a_step() -> None:
    even = TrainingSettings(batch_size=32, microbatch_size=8)
    uneven = TrainingSettings(batch_size=35, microbatch_size=8)
    assert (even.microbatches, uneven.microbatches) == (4, 5)
    assert [even.samples_of(number) for number in range(6)] == [8] * 6
    assert [uneven.samples_of(number) for number in range(7)] == [8, 8, 8, 8, 3, 8, 8]


def test_evaluations_of_so_many_samples() -> None:
    settings = TrainingSettings(batch_size=32, microbatch_size=8)
    exact = settings.evaluating(21)
    assert (exact.eval_microbatches, [exact.samples_of(number) for number in range(3, 7)]) == (
        3,
        [8, 8, 8, 5],
    )
    assert "eval_samples" not in settings.model_dump(), "earlier versions read such a run"
    with pytest.raises(ValueError, match="eval_microbatches 4 is not what"):
        TrainingSettings(batch_size=32, microbatch_size=8, eval_samples=21)


def test_the_data_plan_is_the_manifests() -> None:
    plan = validated(Manifest, make_fields()).data_plan
    assert (plan.kind, plan.seed, plan.batch_size, plan.microbatch_size) == ("arrays", 7, 128, 8)
    assert (plan.sample["x"].dtype, plan.sample["x"].shape) == ("float32", (2, 3))
    assert [shard.samples for shard in plan.train] == [20]


@pytest.mark.parametrize(
    ("training", "stages"),
    [
        ({}, ()),
        ({"staleness": 2}, ()),
        ({"staleness": 1, "last_staleness": 0}, ((0, 1), (1, 0))),
        ({"staleness": 2, "last_staleness": 1}, ((0, 2), (1, 1))),
    ],
)
def test_each_stage_may_be_one_step_staler_than_the_next(training: dict[str, int], stages: Any) -> None:
    manifest = validated(Manifest, make_fields() | {"training": training})
    assert manifest.delays == Delays(stages=stages)
    assert ("last_staleness" in manifest.training.model_dump()) == bool(stages), (
        "earlier versions read others"
    )


def test_three_stages_may_have_a_bound_in_common() -> None:
    layouts = {"layouts": [[[0, 1], [1, 2], [2, 3]]]}
    training = {"staleness": 1, "last_staleness": 0, "head_start": 1}
    manifest = validated(Manifest, make_fields() | layouts | {"training": training})
    assert manifest.delays == Delays(head_start=1, stages=((0, 1), (1, 1), (2, 0)))


def test_a_model_of_more_blocks_than_links_have_pools_is_refused_staleness_by_stage() -> None:
    fields = make_fields()
    blocks = [{**fields["blocks"][0], "index": index} for index in range(251)]
    many = {"blocks": blocks, "layouts": [[[0, 1], [1, 251]]]}
    assert validated(Manifest, fields | many | {"training": {"staleness": 1}}).delays == Delays()
    with pytest.raises(LocalError, match="goes with up to 250 blocks"):
        validated(Manifest, fields | many | {"training": {"staleness": 1, "last_staleness": 0}})


def test_what_is_clipped_is_not_shared_between_blocks() -> None:
    robust = make_fields() | {"averaging": {"robust": True}}
    assert validated(Manifest, robust).averaging == AveragingSettings(robust=True)
    with pytest.raises(LocalError, match="each block would clip them otherwise"):
        validated(Manifest, robust | {"ties": [{"uses": [[0, 0, 2], [2, 0, 2]]}]})


SPARSE = {"links": {"reduce": "topk2"}, "averaging": {"window_s": "all", "outer": {}}}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"averaging": None}, "only an outer optimizer has movements"),
        ({"averaging": {"window_s": "all"}}, "only an outer optimizer has movements"),
        ({"averaging": {"outer": {}}}, "all clusters must be in every averaging"),
        ({"blocks": [{**make_fields()["blocks"][0], "vector_count": 6}]}, "running statistics .* block 0"),
    ],
)
def test_movements_are_of_runs_in_which_all_clusters_have_one_anchor(
    changes: dict[str, Any], why: str
) -> None:
    fields = make_fields() | SPARSE
    manifest = validated(Manifest, fields)
    assert manifest.optimizer_state[-2:] == ("outer_anchor", "outer_momentum")
    assert not manifest.links.lossy
    if "blocks" in changes:
        changes = {"blocks": [*changes["blocks"], *fields["blocks"][1:]]}
    with pytest.raises(LocalError, match=why):
        validated(Manifest, fields | changes)


def test_run_id_follows_content_and_owner() -> None:
    other = Ed25519PrivateKey.generate()
    ids = {
        read(make_file()).run_id,
        read(make_file(seed=8)).run_id,
        read(sign(validated(Manifest, make_fields() | {"owner": public_bytes(other)}), other)).run_id,
    }
    assert len(ids) == 3
    assert read(make_file()).run_id in ids


def test_every_flipped_byte_is_refused() -> None:
    data = make_file()
    for position in range(len(data)):
        damaged = data[:position] + bytes([data[position] ^ 1 << position % 8]) + data[position + 1 :]
        with pytest.raises(LocalError) as caught:
            read(damaged)
        assert (caught.value.code, caught.value.exit_code) == ("HP-RUN-003", ExitCode.VERSION)


@examples(500)
@given(st.binary(max_size=300))
def test_junk_is_refused(data: bytes) -> None:
    with pytest.raises(LocalError) as caught:
        read(data)
    assert caught.value.code == "HP-RUN-003"


def test_another_owners_signature_is_refused() -> None:
    forged = MANIFEST.seal(raw_fields(make_file()), Ed25519PrivateKey.generate())
    with pytest.raises(LocalError) as caught:
        read(forged)
    assert caught.value.code == "HP-RUN-003"


def test_signing_for_another_owner_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="another owner"):
        sign(validated(Manifest, make_fields()), Ed25519PrivateKey.generate())


def test_fields_of_another_run_than_ones_own_are_not_looked_at() -> None:
    """Anybody can sign some, and make them large."""
    run = read(make_file()).run_id
    assert read(make_file(), run).run_id == run
    for other in (make_file(seed=8), sign_raw(raw_fields(make_file()) | {"steps": [None] * 1000})):
        with pytest.raises(LocalError, match="somebody serves another run") as caught:
            read(other, run, "somebody")
        assert caught.value.code == "HP-RUN-016"


def put(fields: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """`fields` with another value at `path`, such as `training.optimizer.rho`."""
    *parts, last = path.split(".")
    place: Any = fields
    for part in parts:
        place = place[int(part) if part.isdecimal() else part]
    place[last] = value
    return fields


@pytest.mark.parametrize(
    "path",
    [
        "training.privacy",
        "training.optimizer.rho",
        "links.masked",
        "admission.quorum",
        "trust.audits",
        "averaging.outer.rho",
        "data.sample.x.scale",
        "data.train.0.key",
        "blocks.1.graph.format",
        "ties.0.mode",
    ],
)
def test_a_setting_that_only_a_newer_version_knows_is_refused_by_name(path: str) -> None:
    uses = {"uses": [[0, 0, 2], [2, 0, 2]]}
    fields = raw_fields(make_file(averaging={"outer": {}}, ties=[uses]))
    assert read(sign_raw(fields)).manifest.name == "tiny"
    with pytest.raises(LocalError, match=f"too old for this run: it does not know {path}") as caught:
        read(sign_raw(put(fields, path, 1)))
    assert (caught.value.code, caught.value.exit_code) == ("HP-RUN-026", ExitCode.VERSION)


def test_a_manifest_says_which_of_its_own_fields_must_be_known() -> None:
    """Others are for people or for newer versions alone."""
    fields = raw_fields(make_file()) | {"license": "MIT", "privacy": {"noise": 0.1}}
    assert read(sign_raw(fields)).manifest.name == "tiny"
    assert read(sign_raw(fields | {"needs": ["training", "trust"]})).manifest.name == "tiny"
    with pytest.raises(LocalError, match="it does not know privacy") as caught:
        read(sign_raw(fields | {"needs": ["training", "privacy"]}))
    assert caught.value.code == "HP-RUN-026"


class LaterTrust(TrustSettings):
    """Those of a version that can do more."""

    LATER = frozenset({"audits"})
    audits: int = 0


class LaterManifest(Manifest):
    trust: LaterTrust = LaterTrust()


@pytest.mark.parametrize("audits", [0, 3])
def test_what_a_newer_version_does_not_use_keeps_no_older_one_away(audits: int) -> None:
    newer = validated(LaterManifest, make_fields() | {"trust": {"spot_checks": 0.05, "audits": audits}})
    file = sign(newer, KEY)
    assert LaterManifest.model_validate(raw_fields(file)) == newer
    if audits:
        with pytest.raises(LocalError, match=r"it does not know trust\.audits"):
            read(file)
    else:
        assert read(file).manifest.trust == TrustSettings(spot_checks=0.05)


def test_an_unknown_version_is_refused_by_name() -> None:
    fields = raw_fields(make_file())
    with pytest.raises(LocalError, match="wire version 99") as caught:
        read(sign_raw(fields | {"wire_version": 99}))
    assert caught.value.code == "HP-RUN-002"


DEEP = b"\x91" * 1000 + b"\xc0"
"""A list in a list, and so on: deeper than Python goes."""


@pytest.mark.parametrize("signature", [DEEP, packb([1]), packb("text"), packb({"a": DEEP})])
def test_a_signature_that_is_none_is_refused_whatever_it_is(signature: bytes) -> None:
    envelope = b"\x82" + packb("manifest") + packb(b"\x80") + packb("signature") + signature
    with pytest.raises(LocalError, match="HP-RUN-003"):
        read(envelope)
    with pytest.raises(LocalError, match="HP-RUN-013"):
        read_amendment(envelope.replace(packb("manifest"), packb("amendment")), public_bytes(KEY), "3f" * 16)


@pytest.mark.parametrize("owner", [2**62, 32, [0] * 32, "x" * 32, None])
def test_an_owner_that_is_no_key_is_refused_and_nothing_is_allocated(owner: object) -> None:
    with pytest.raises(LocalError, match="HP-RUN-003"):
        read(sign_raw({"owner": owner}))


def test_a_version_that_is_none_is_refused() -> None:
    body = b"\x82" + packb("owner") + packb(public_bytes(KEY)) + packb("wire_version") + DEEP
    signature = KEY.sign(b"hetpeer manifest\0" + body)
    with pytest.raises(LocalError, match="wire version of a list") as caught:
        read(packb({"manifest": body, "signature": signature}))
    assert caught.value.code == "HP-RUN-002"


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("name", "../evil", "name"),
        ("seed", -1, "seed"),
        ("coordinators", [], "coordinators"),
        ("coordinators", [PEER, PEER[:-1] + "z"], "coordinators"),
        ("coordinators", [PEER] * 3, "coordinators"),
        ("coordinators", ["no peer"], "coordinators.0"),
        ("layouts", [], "layouts"),
        ("layouts", [[[0, 1], [2, 3]]], r"layouts\[0\]"),
        ("layouts", [[[0, 3]], [[0, 2]]], r"layouts\[1\]"),
        ("layouts", [[[0, 0], [0, 3]]], r"layouts\[0\]"),
        ("blocks", [], "blocks"),
        ("blocks", make_fields()["blocks"][1:], "blocks"),
        ("training", {"learning_rate": 0}, "training.learning_rate"),
        ("training", {"learning_rate": float("nan")}, "training.learning_rate"),
        ("training", {"optimizer": {"name": "AdamW", "betas": [0.9, 1.0]}}, "training.optimizer.betas"),
        ("training", {"optimizer": {"name": "Adam"}}, "training.optimizer"),
        ("training", {"schedule": [[5, 1.0], [5, 0.5]]}, "schedule"),
        ("training", {"fresh_steps": 2}, "training.fresh_steps"),
        ("training", {"staleness": 1, "steps": 9, "fresh_steps": 9}, "leaves none of 9 steps"),
        ("training", {"staleness": 1, "last_staleness": 1}, "training.last_staleness 1 is not below"),
        ("training", {"last_staleness": 0}, "training.last_staleness 0 is not below"),
        (
            "training",
            {"staleness": 1, "last_staleness": 0, "compensation": 0.5},
            "training.compensation is for steps whose blocks are all as old",
        ),
        ("training", {"staleness": 5, "last_staleness": 0}, "training.staleness 5 is more than"),
        ("training", {"batch_size": 8, "microbatch_size": 5, "slot_size": 3}, "training.slot_size"),
        ("training", {"batch_size": 7, "microbatch_size": 8, "slot_size": 1}, "training.microbatch_size"),
        ("data", DATA | {"heldout": []}, "data.heldout"),
        ("data", DATA | {"kind": "pickle"}, "data.kind"),
        ("data", DATA | {"kind": "text"}, "data.sample"),
        (
            "data",
            DATA | {"kind": "text", "sample": {"tokens": TEXT, "targets": TEXT | {"shape": [17]}}},
            "data.sample",
        ),
        (
            "data",
            DATA | {"kind": "text", "sample": dict.fromkeys(("tokens", "targets"), TEXT | {"shape": [51]})},
            "train.0",
        ),
        ("data", DATA | {"sample": {}}, "data.sample"),
        ("data", DATA | {"sample": {"a b": TEXT}}, "data.sample"),
        ("data", DATA | {"sample": {"x": TEXT | {"dtype": "bfloat16"}}}, "data.sample.x.dtype"),
        ("data", DATA | {"sample": {"x": TEXT | {"shape": [0]}}}, "data.sample.x.shape"),
        ("data", DATA | {"sample": {"x": TEXT | {"shape": [2**30, 2**30]}}}, "data.train.0"),
        ("data", DATA | {"train": [SHARD | {"samples": 42}]}, "data.train.0"),
        ("data", DATA | {"heldout": [SHARD | {"samples": 0}]}, "data.heldout.0.samples"),
    ],
)
def test_bad_values_are_named(field: str, value: Any, named: str) -> None:
    with pytest.raises(LocalError, match=named) as caught:
        validated(Manifest, make_fields() | {field: value})
    assert (caught.value.code, caught.value.exit_code) == ("HP-RUN-001", ExitCode.CONFIG)
    with pytest.raises(LocalError):
        read(sign_raw(raw_fields(make_file()) | {field: value}))


def test_a_name_of_any_length_is_named_by_its_beginning() -> None:
    with pytest.raises(LocalError, match=r"state_dict\.xxx") as caught:
        validated(Manifest, make_fields() | {"state_dict": {"x" * 10**6: 5}})
    assert len(caught.value.line()) < 500


@pytest.mark.parametrize(
    "name", ["../manifest", "a/b", "/etc/passwd", ".hidden", "", "A", "a" * 65, "a\n", "a\0b"]
)
def test_file_names_stay_inside_their_folder(name: str) -> None:
    fields = make_fields()
    fields["data"]["train"][0]["name"] = name
    with pytest.raises(LocalError, match=r"data\.train\.0\.name"):
        validated(Manifest, fields)


def test_folder_without_manifest_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(LocalError) as caught:
        read_file(tmp_path / "manifest.hetpeer")
    assert caught.value.code == "HP-RUN-004"
    assert caught.value.why == "manifest.hetpeer in it cannot be read: No such file or directory"
    with pytest.raises(LocalError) as caught:
        read_file(tmp_path / "no-run" / "manifest.hetpeer")
    assert caught.value.why == "there is no such folder"
