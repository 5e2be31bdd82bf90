"""Judgement of a machine's figures. Pure: a function returns a text (well) or an error (warning), or raises
(failure).

The bounds come from measured volunteers: daemon, worker and p2pd take 0.8 GiB without any part of a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetpeer.dht.base.errors import ExitCode, HetpeerError, LocalError, RemoteError
from hetpeer.dht.reach.reachability import ReachEstimate, ReachKind
from hetpeer.peer.control.control_messages import SettingInForce
from hetpeer.peer.limits.amounts import bytes_text, count_text
from hetpeer.peer.limits.nvml import Gpus
from hetpeer.peer.limits.sensors import idle_unknown
from hetpeer.peer.limits.setting_layers import DEFAULT
from hetpeer.peer.training.volunteer_figures import MainMemory, memory_text, offload_text
from hetpeer.stages.block.offload import Offload
from hetpeer.stages.pipeline.place_memory import Offered, Upkeep, capacity

Verdict = str | HetpeerError
"""A text if all is well, or an error as a warning; a failure is raised."""
GIB, MIB = 1 << 30, 1 << 20
LEAST_MEMORY, GOOD_MEMORY = 800 * MIB, 2 * GIB
LEAST_DISK, GOOD_DISK = 200 * MIB, 5 * GIB
LEAST_FILES, GOOD_FILES = 128, 1024
PYTHON = (3, 11)
PLATFORM = "Linux x86_64"
HIVEMIND = "1.1.12"
PORTS = ("network.port", "network.direct_port")


def software(python: Sequence[int], platform: str, packages: Mapping[str, str]) -> Verdict:
    """`packages`: name → version, empty where it is not installed. Raises `LocalError` HP-SYS-001."""
    missing = [name for name, version in packages.items() if not version]
    if tuple(python[:2]) < PYTHON or platform != PLATFORM:
        here = f"this is Python {'.'.join(map(str, python[:3]))} on {platform}"
        raise _unfit(
            here, f"hetpeer runs on Python 3.11 or newer, on {PLATFORM}", "install it on such a machine"
        )
    if missing:
        raise _unfit(
            f"{', '.join(missing)} is not installed",
            "the installation is incomplete",
            "install hetpeer again, in an environment of its own",
        )
    versions = ", ".join(f"{name} {version}" for name, version in packages.items())
    if packages.get("hivemind") not in (None, HIVEMIND):
        return _unfit(
            f"hivemind is {packages['hivemind']}",
            f"hetpeer was made for {HIVEMIND}, and another package has replaced it",
            f"pip install hivemind=={HIVEMIND}",
        )
    return f"Python {'.'.join(map(str, python[:3]))}, {versions}"


def memory(free: int, total: int, cores: int) -> Verdict:
    """Bytes, and processor cores that this process may use. Raises `LocalError` HP-MEM-003."""
    said = f"{bytes_text(free)} of {bytes_text(total)} are free"
    if free >= GOOD_MEMORY:
        return f"{said}; {cores} processor cores"
    little = LocalError(
        "HP-MEM-003",
        "little memory is free",
        why=f"{said}, and a volunteer needs {bytes_text(LEAST_MEMORY)} besides its part of the model",
        fix="close other programs, or give this machine (or its container) more memory",
        exit_code=ExitCode.TOO_SMALL,
    )
    if free < LEAST_MEMORY:
        raise little
    return little


def disk(free: int, where: str) -> Verdict:
    """Free bytes of the disk that has the folder `where`. Raises `LocalError` HP-DISK-004."""
    if free >= GOOD_DISK:
        return f"{where} has room for {bytes_text(free)}"
    little = LocalError(
        "HP-DISK-004",
        f"only {bytes_text(free)} are free in {where}",
        why="the model, its data and whatever does not fit into memory are kept there",
        fix="free some space, or choose a folder on another disk with --home",
        exit_code=ExitCode.TOO_SMALL,
    )
    if free < LEAST_DISK:
        raise little
    return little


def open_files(soft: int, hard: int) -> Verdict:
    """The process's limits; -1: none. Raises `LocalError` HP-SYS-002."""
    if soft == -1 or soft >= GOOD_FILES:
        return (
            f"up to {soft:,} files and connections may be open"
            if soft != -1
            else "no limit on open files and connections"
        )
    few = LocalError(
        "HP-SYS-002",
        f"only {soft} files and connections may be open at a time",
        why="a volunteer needs some for each peer it works with",
        fix=f"ulimit -n {GOOD_FILES}"
        if hard == -1 or hard >= GOOD_FILES
        else "raise the limit in /etc/security/limits.conf",
        exit_code=ExitCode.CONFIG,
    )
    if soft < LEAST_FILES:
        raise few
    return few


def clock(kept: bool | None) -> Verdict:
    """Whether the kernel says that something keeps its clock right; None: it does not say."""
    if kept:
        return "synchronised by a time server"
    return LocalError(
        "HP-SYS-003",
        "this machine's clock is not known to be synchronised",
        why="the kernel says that no time server keeps it right"
        if kept is False
        else "the kernel does not say",
        fix="timedatectl set-ntp true; in a container or virtual machine the host does that: compare clocks "
        "with hetpeer"
        " doctor INVITE",
    )


def settings(told: Mapping[str, SettingInForce], *, running: bool) -> Verdict:
    """Settings in force and their sources; `running`: of the running volunteer, not of the next one."""
    changed = [f"{key} {one.value} ({one.source})" for key, one in told.items() if one.source != DEFAULT]
    whose = "of the running volunteer: " if running else ""
    return f"{whose}{', '.join(changed) or 'none is changed'}; hetpeer config show lists them all"


def idle(told: Mapping[str, float], mode: str) -> Verdict:
    """Idle seconds by source in `told`; `mode` is the setting `when.mode`. Raises `LocalError` HP-SYS-007."""
    if told:
        said = ", ".join(f"{who} says {seconds:.0f} s" for who, seconds in told.items())
        return f"known: {said} without a key or a pointer moved"
    if mode == "idle":
        raise idle_unknown()
    return f"not known on this machine; only when.mode = idle needs it, and it is {mode}"


def battery(on_battery: bool | None, setting: str) -> Verdict:
    """Whether the machine runs on its battery, as far as that is known; `setting` is `when.on_battery`."""
    if on_battery is None:
        return "no battery is known: a volunteer does not pause for it"
    does = "a volunteer pauses" if setting == "pause" else "a volunteer works on"
    return f"on battery now: {does}" if on_battery else f"on mains; on battery {does}"


def port(told: Mapping[str, SettingInForce], listening: Sequence[str] | None) -> Verdict:
    """The ports that are named are free, or a volunteer that runs is `listening` at these addresses."""
    if listening is not None:
        return f"the running volunteer listens at {', '.join(listening[:2]) or 'none yet'}"
    named = {key: told[key].value for key in PORTS if told[key].value != "0"}
    if "network.port" not in named:
        return "any free port (network.port = 0); set one if your router is to forward it"
    return f"{', '.join(f'{key} {number}' for key, number in named.items())}: free"


def reach(standing: ReachEstimate) -> Verdict:
    """Reachability as found by peers that dialled back."""
    tried = f"{standing.peers} {'peer' if standing.peers == 1 else 'peers'} tried"
    match standing.reach:
        case ReachKind.PUBLIC:
            whence = "" if standing.outside else ", from its own network at least"
            return f"others reach this machine at {standing.ip}{whence} ({tried})"
        case ReachKind.PRIVATE:
            return LocalError(
                "HP-NET-015",
                f"no connection from outside reaches this machine ({tried})",
                why="a router or firewall blocks it; relays help, and cost some speed",
                fix="forward a TCP port of your router to this machine and give it to join --port; or do "
                "nothing",
            )
        case _:
            return RemoteError(
                "HP-NET-014",
                "it is not known whether others can reach this machine",
                why="no peer has tried so far",
                fix="nothing: a running volunteer asks again",
            )


def device(name: str, *, on_cpu: bool, speed: str, torch: str, gpus: Gpus) -> Verdict:
    """Device of the compute worker, `name`, and its `speed`. `torch`: its version."""
    if not on_cpu:
        return f"{name}, {speed} in float32, driver {gpus.driver or 'unknown'}"
    return gpus.unused(torch) or f"no NVIDIA GPU; a processor core computes {speed} in float32"


def place(main: MainMemory, offered: Offered) -> Verdict:
    """The offer to a place, and the most parameters of one, by where the optimizer is (AdamW)."""
    kinds = [kind for kind in offered.kinds if offered.apart or kind is not Offload.HOST] or [Offload.NONE]
    most = {kind: capacity(replace(offered, kinds=(kind,)), Upkeep()) for kind in kinds}
    sizes = " or ".join(
        f"{count_text(count)} parameters ({offload_text(kind, apart=offered.apart)})"
        for kind, count in most.items()
    )
    offer = f"offers {memory_text(offered)} ({main}), and {bytes_text(offered.disk)} of disk"
    return f"{offer}: for at most {sizes}"


def _unfit(what: str, why: str, fix: str) -> LocalError:
    return LocalError("HP-SYS-001", what, why=why, fix=fix, exit_code=ExitCode.CONFIG)
