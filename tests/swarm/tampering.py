"""What is wrong with a process or its machine in a test; called in the child before the command line
starts.
"""

import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.swarm import pacing

_libc = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWUSER = 0x00020000, 0x10000000
_PRIVATE = 1 << 18 | 1 << 14
LITTLE = 512 << 10


def install(name: str) -> None:
    """Change this process as a function of this file or of pacing.py says, which may have an argument:
    "begins_with:3".
    """
    function, _, argument = name.partition(":")
    change = getattr(pacing, function, None) or globals()[function]
    change(*filter(None, [argument]))


def clock_behind() -> None:
    """The machine's clock is ten minutes late."""
    right = time.time
    time.time = lambda: right() - 600.0


def newer_wire() -> None:
    """A later version of hetpeer that does not work with this one any more."""
    from hetpeer.averaging import messages

    _speaks(messages.WIRE_VERSION + 1, oldest=messages.WIRE_VERSION + 1)


def next_version() -> None:
    """The next version of hetpeer, which works with this one: its messages have a field that we do not
    know, and there are some that we do not know at all.
    """
    import msgpack

    from hetpeer.averaging import messages
    from hetpeer.dht.channels.channel import Channel, Parcel

    _speaks(messages.WIRE_VERSION + 1, oldest=messages.WIRE_VERSION)
    encode, send = messages.encode, Channel.send

    def newer(message):
        fields = msgpack.unpackb(encode(message), strict_map_key=False)
        return msgpack.packb(fields | {"novelty": [1, 2, 3]})

    def with_news(self, parcel):
        send(self, parcel)
        if not parcel.header:  # a session begins with a Hello in every version
            send(self, Parcel({}, (encode(messages.Unknown(kind="news")),)))

    messages.encode, Channel.send = newer, with_news


def previous_version() -> None:
    """The version before this one: it does not say in which order gradients were added."""
    from hetpeer.averaging import messages
    from hetpeer.bootstrap.state.membership import Membership
    from hetpeer.stages.pipeline.gradient_slots import GradientSlots

    _speaks(messages.WIRE_VERSION - 1, oldest=0)
    seal, speak = GradientSlots.seal, Membership.speak

    def in_no_order(self):
        number, ids = seal(self)
        return number, {block: tuple(sorted(held)) for block, held in ids.items()}

    def as_before(self, version, peers):
        return version < messages.SAYS_ORDER and speak(self, version, peers)

    GradientSlots.seal, Membership.speak = in_no_order, as_before


def _speaks(version: int, oldest: int) -> None:
    from hetpeer.averaging import messages
    from hetpeer.averaging.messages import from_volunteer

    messages.WIRE_VERSION = from_volunteer.WIRE_VERSION = version
    messages.OLDEST_VERSION = from_volunteer.OLDEST_VERSION = oldest or version
    messages.Hello.model_fields["wire_version"].default = version
    messages.Hello.model_rebuild(force=True)


def serve_damaged_manifest() -> None:
    """A bootstrap node whose manifest is sound on the disk and has a flipped byte when it is asked for."""
    from hetpeer.bootstrap.run import run_directory

    read = run_directory.read_file

    def damaged(path):
        signed = read(path)
        data = bytearray(signed.data)
        data[len(data) // 2] ^= 1
        return dataclasses.replace(signed, data=bytes(data))

    run_directory.read_file = damaged


def without_pickle() -> None:
    """Nothing can be unpickled here."""
    import pickle  # noqa: TID251 - to forbid it

    import torch

    def refuse(*_: object, **__: object) -> Any:
        raise AssertionError("somebody unpickles")

    pickle.load = pickle.loads = pickle.Unpickler = torch.load = refuse  # noqa: TID251


def folds_falsely(wrong: str) -> None:
    """A worker whose sums of step 3 are wrong by one microbatch: a flipped bit, a scale of 1.001, one that is
    dropped, or one that is added twice. "slightly": all of its gradients of block 2 are scaled by 1.0001.
    """
    import torch

    from hetpeer.stages.worker.holding.held_block import HeldBlock

    fold, left = HeldBlock.fold, [1]

    def false(self, step, slot, room, gradients, here):
        if wrong == "slightly" and step == 3 and self.spec.index == 2:
            scaled = {name: None if part is None else part * 1.0001 for name, part in gradients.items()}
            fold(self, step, slot, room, scaled, here)
            return
        if step != 3 or not left[0] or wrong == "slightly":
            fold(self, step, slot, room, gradients, here)
            return
        left[0] -= 1
        parts = {name: None if part is None else part.to_dense().clone() for name, part in gradients.items()}
        first = next(part for part in parts.values() if part is not None)
        if wrong == "bit":
            first.view(-1).view(torch.int32)[first.abs().argmax()] ^= 1 << 8
        for part in filter(None.__ne__, parts.values()):
            part.mul_({"scale": 1.001, "drop": 0.0}.get(wrong, 1.0))
        fold(self, step, slot, room, parts, here)
        if wrong == "double":
            fold(self, step, slot, room, parts, here)

    HeldBlock.fold = false


def rounds_otherwise() -> None:
    """An honest worker of another processor: each result is off by one unit in its last place, up or down."""
    import torch
    from torch.utils import _python_dispatch as dispatch

    from hetpeer.stages.block import arithmetic
    from hetpeer.stages.worker import engine, exact_operators, microbatch_tasks

    class OffByOne(dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **kwargs or {})
            fixed = func._schema.is_mutable or any(one.alias_info for one in func._schema.returns)
            if fixed or not isinstance(result, torch.Tensor) or result.dtype != torch.float32:
                return result
            places = torch.arange(result.numel()).reshape(result.shape)
            return result * torch.where(places % 3 == 0, 1 - 2.0**-23, 1 + 2.0**-23).float()

    def otherwise(function):
        def computed(*args, **how):
            modes = dispatch._get_current_dispatch_mode_stack()
            if any(isinstance(mode, exact_operators.RoundedOnce) for mode in modes):
                return function(*args, **how)
            with OffByOne():
                return function(*args, **how)

        return computed

    for name in ("run_blocks", "backpropagate_block"):
        setattr(microbatch_tasks, name, otherwise(getattr(microbatch_tasks, name)))
    own = arithmetic.arithmetic_of
    engine.arithmetic_of = lambda device: own(device).replace("torch", "another processor, torch")


def tells_another_order() -> None:
    """A volunteer that says another order of addition than its own."""
    from hetpeer.stages.pipeline.gradient_slots import GradientSlots

    seal = GradientSlots.seal

    def turned(self):
        number, ids = seal(self)
        return number, {block: tuple(reversed(held)) for block, held in ids.items()}

    GradientSlots.seal = turned


EVERYWHERE = frozenset({"without_pickle", "folds_falsely", "rounds_otherwise", "slow_device"})
"""What is wrong with the compute worker, too."""


def _sends_once(wrong: Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]]) -> None:
    """The first part of a sum that leaves for somebody else is what `wrong` makes of it.

    Of two holders the one with the faster line adds up all: this one says that its own is slow, or its parts
    might never leave.
    """
    from hetpeer.peer.transport.link_book import LinkBook
    from hetpeer.peer.transport.tensor_store import TensorStore

    depart, paced, left = TensorStore.depart, LinkBook.paced, [1]
    LinkBook.paced = lambda self: paced(self).model_copy(update={"uplink": 1e5})

    def damaged(store, tensor, parcel):
        parcel = depart(store, tensor, parcel)
        if parcel is not None and parcel.header["kind"] == "part" and left[0]:
            left[0] -= 1
            header, payload = wrong(parcel.header, bytes(parcel.payload[0]))
            parcel = dataclasses.replace(parcel, header=header, payload=(payload,))
        return parcel

    TensorStore.depart = damaged


def sends_nan_parameters() -> None:
    """A volunteer that sends a NaN to be averaged."""
    _sends_once(lambda header, payload: (header, b"\x00\x00\xc0\x7f" + payload[4:]))


def sends_a_short_part() -> None:
    """A volunteer that cuts its shards otherwise than the plan says."""
    _sends_once(lambda header, payload: (header | {"end": header["end"] - 1}, payload[:-4]))


def sends_garbage() -> None:
    """A volunteer one of whose encoded bundles is noise, of the right length."""
    from hetpeer.peer.transport.tensor_store import TensorStore

    depart, left = TensorStore.depart, [1]

    def damaged(store, tensor, parcel):
        parcel = depart(store, tensor, parcel)
        if parcel is not None and parcel.header.get("coded") and left[0]:
            left[0] -= 1
            parcel = dataclasses.replace(parcel, payload=(b"\xff" * len(parcel.payload[0]),))
        return parcel

    TensorStore.depart = damaged


def sends_opposite() -> None:
    """A volunteer that sends the opposite of its sums."""
    from tests.hostile.lies import install

    install(lambda _me: "opposite")


def votes_falsely() -> None:
    """A volunteer whose votes are on other sums than it has got."""
    from hetpeer.averaging.member.step_vote import StepVote

    inspected = StepVote.inspected

    def false(self, plan, vote, gradient, looks):
        return inspected(self, plan, vote.model_copy(update={"digest": "0" * 64}), gradient, looks)

    StepVote.inspected = false


def tears_sums() -> None:
    """A volunteer that adds up something else for others than for itself."""
    import numpy as np

    from hetpeer.peer.transport.tensor_store import TensorStore

    depart = TensorStore.depart

    def torn(store, tensor, parcel):
        parcel = depart(store, tensor, parcel)
        if parcel is not None and parcel.header["kind"] == "result":
            payload = -np.frombuffer(bytes(parcel.payload[0]), np.float32)
            parcel = dataclasses.replace(parcel, payload=(payload.tobytes(),))
        return parcel

    TensorStore.depart = torn


def adds_falsely() -> None:
    """A volunteer that gives everybody the opposite of what it has added up."""
    import numpy as np

    from hetpeer.peer.transport.data_plane import DataPlane

    send, seen = DataPlane.send, set()

    def false(self, peer, head, tensor):
        named = (
            head.kind == "result",
            head.step,
            getattr(head, "plan", 0),
            getattr(head, "block", 0),
            getattr(head, "index", 0),
        )
        if named[0] and named not in seen:
            seen.add(named)
            total = np.frombuffer(self._store.view(tensor), np.float32)
            np.negative(total, out=total)
        send(self, peer, head, tensor)

    DataPlane.send = false


def sends_stale() -> None:
    """A volunteer that sends its sums of the step before."""
    from tests.hostile.lies import install

    install(lambda _me: "stale")


def sends_false_bundles() -> None:
    """A volunteer whose bundles, activations and gradients, are the opposite of what it has computed, from
    the first step with five others on; its sums are right.
    """
    import numpy as np

    from hetpeer.averaging.member.held_step import HeldStep
    from hetpeer.peer.transport.tensor_store import TensorStore

    held, depart = HeldStep.__init__, TensorStore.depart
    watched: set[int] = set()

    def begun(self, me, place, begin, *more):
        if watched or len(begin.roster) > 5:  # in later ones whoever is in question with it may rest
            watched.add(begin.step)
        held(self, me, place, begin, *more)

    def opposite(store, tensor, parcel):
        parcel = depart(store, tensor, parcel)
        head = None if parcel is None else parcel.header
        if (
            head
            and head["kind"] in ("activation", "gradient")
            and head["step"] in watched
            and not head["check"]
        ):
            payload = -np.frombuffer(bytes(parcel.payload[0]), np.float32)
            parcel = dataclasses.replace(parcel, payload=(payload.tobytes(),))
        return parcel

    HeldStep.__init__, TensorStore.depart = begun, opposite


def killed_after_step_4() -> None:
    """A volunteer that dies with an update in its memory, that of the fifth step or of a later one, and
    nobody told.
    """
    from hetpeer.peer.training.evidence_log import EvidenceLog

    applied = EvidenceLog.applied

    def last_words(self, update, *more):
        if update.step.number >= 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return applied(self, update, *more)

    EvidenceLog.applied = last_words


def leaves_after_step_12() -> None:
    """A volunteer whose terminal goes away once it has applied the thirteenth step or a later one: kernel
    and shell say so.
    """
    from hetpeer.peer.training.evidence_log import EvidenceLog

    applied = EvidenceLog.applied

    def told_to_leave(self, update, *more):
        if update.step.number >= 12:
            EvidenceLog.applied = applied
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGHUP)
        return applied(self, update, *more)

    EvidenceLog.applied = told_to_leave


def second_worker_is_mute() -> None:
    """A volunteer whose second compute worker never answers, and so is checked for as long as one likes."""
    from hetpeer.dht.base.runtime import dying_with_us
    from hetpeer.stages.ipc import worker_process

    first = worker_process.spawn

    def mute(options, worker):
        line = [sys.executable, "-S", "-c", "import signal; signal.pause()", worker]
        tie = dying_with_us()
        return subprocess.Popen(line, stdout=worker_process.STDERR, process_group=0, preexec_fn=tie)  # noqa: PLW1509 - it takes no lock

    def spawn(options, worker):
        started = first(options, worker)
        worker_process.spawn = mute
        return started

    worker_process.spawn = spawn


def small_disk() -> None:
    """The home lies on a disk of 8 KiB, which vanishes with the process."""
    if os.geteuid():
        _require(_libc.unshare(_NEWUSER | _NEWNS))
    else:
        _require(_libc.unshare(_NEWNS))
        _require(_libc.mount(b"none", b"/", None, _PRIVATE, None))
    home = os.environ["HETPEER_HOME"]
    Path(home).mkdir()
    _require(_libc.mount(b"tmpfs", home.encode(), b"tmpfs", 0, b"size=8k"))


def on_the_disk_of(keeper: str) -> None:
    """The process is where the process `keeper` is: among its mounts, as its user."""
    for kind in ("user", "mnt") if os.geteuid() else ("mnt",):
        with Path(f"/proc/{keeper}/ns/{kind}").open() as namespace:
            _require(_libc.setns(namespace.fileno(), 0))


def _require(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def little_memory() -> None:
    """A volunteer whose arena has room for a reduce of the tiny model and a few bundles, not for all that
    a step keeps.
    """
    from hetpeer.peer.daemon import worker_start

    config = worker_start.ComputeConfig
    worker_start.ComputeConfig = lambda **known: config(**(known | {"arena_bytes": LITTLE}))


def no_room_for_kept() -> None:
    """A volunteer whose owner's limit leaves nothing beside the worker's part of a place."""
    from hetpeer.peer.training import place_loading

    place_loading.bundles_beside = lambda *_, **__: 1  # none would be: no place, and no grants


def room_for_a_model(nbytes: str) -> None:
    """A volunteer whose owner leaves exactly so many bytes beside the program itself, whatever it takes."""
    from hetpeer.peer.daemon import worker_start
    from hetpeer.peer.training.volunteer_figures import MainMemory

    worker_start.main_memory = lambda *_: MainMemory(limit=int(nbytes))


def sleepy() -> None:
    """A machine that has slept for an hour once there is a file `slept` in the home."""
    from hetpeer.dht.base.runtime import SystemClock

    awake, slept = SystemClock.boottime, Path(os.environ["HETPEER_HOME"]) / "slept"
    SystemClock.boottime = lambda self: awake(self) + 3600.0 * slept.exists()


def as_a_service(path: str) -> None:
    """systemd has started it, and listens at `path`, where it wants to hear of it once a second."""
    os.environ |= {"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "1000000"}


def an_hour_passes() -> None:
    """A volunteer whose owner's clock is an hour later once there is a file `late` in the home; the
    machine has not slept.
    """
    from hetpeer.peer.daemon import join_run

    late = Path(os.environ["HETPEER_HOME"]) / "late"

    class Clock(join_run.SystemClock):
        def boottime(self) -> float:
            return super().boottime() + 3600.0 * late.exists()

    join_run.SystemClock = Clock


def sends_nan_for_ever() -> None:
    """A volunteer whose every bundle carries a NaN."""
    from tests.hostile.behaviour import install

    install(lambda: "nan")


def keeps_to_libp2p() -> None:
    """A volunteer that looks for no way past libp2p."""
    from hetpeer.dht.direct.direct_streams import DirectStreams

    DirectStreams.seek_direct_way = lambda self, stream: None
