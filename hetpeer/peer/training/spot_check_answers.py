"""A holder's side of spot checks, besides computing: remember inputs, compare bundles, show digests
(docs/trust.md).
"""

from __future__ import annotations

import secrets

from hetpeer.averaging import effects as e
from hetpeer.averaging import messages as m
from hetpeer.averaging.member.given_inputs import GivenInput, GivenInputs
from hetpeer.peer.training.held_place import HeldPlace
from hetpeer.peer.transport.tensor_store import Tensor
from hetpeer.peer.transport.worker_posts import Answer
from hetpeer.stages.block.fingerprint import KEY_BYTES
from hetpeer.stages.ipc.arena import BundleLayout
from hetpeer.stages.ipc.transfer_commands import MarkBundle
from hetpeer.stages.pipeline import effects as p


class SpotCheckAnswers:
    """The worker's side of the spot checks of one place. Without spot checks in the run nothing is
    remembered.
    """

    def __init__(self, place: HeldPlace) -> None:
        self._posts = place.posts
        self._schema = schema = place.schema
        self._me = place.me
        self._perform = place.perform
        self._given = GivenInputs(lambda: secrets.token_bytes(KEY_BYTES), schema.tolerance)

    def forward(self, step: e.StepId, work: p.RunForward) -> Answer | None:
        """`RunForward` computes from a bundle. To be called before it is released."""
        key = work.key
        if not work.train or not isinstance(work.source, Tensor):
            return None
        return self._used(step, key, key.begin, work.source, self._schema.input_layout(key.begin, key.id))

    def backward(self, step: e.StepId, work: p.RunBackward) -> Answer | None:
        """`RunBackward` computes from a gradient. To be called before it is released."""
        if not isinstance(work.gradient, Tensor):
            return None
        layout = self._schema.output_layout(work.end, work.key.id, gradients=True)
        return self._used(step, work.key, work.end, work.gradient, layout, back=True)

    def _used(
        self,
        step: e.StepId,
        key: p.TaskKey,
        border: int,
        tensor: Tensor,
        layout: BundleLayout,
        *,
        back: bool = False,
    ) -> Answer | None:
        if not self._schema.trust.spot_checks:
            return None
        seen = self._given.used(step, key, border, tensor.sender, back=back)
        return self._post(step, tensor, layout, seen)

    def _post(self, step: e.StepId, tensor: Tensor, layout: BundleLayout, seen: GivenInput) -> Answer:
        command = MarkBundle(tensors=layout.tensors(tensor.extent), key=self._given.secret(step))
        posted = self._posts.post(command, [tensor])

        async def answer() -> None:
            done = await posted
            seen.marks, seen.exact, seen.digest = done.marks, done.exact, done.digest

        return answer()

    def compare(self, step: e.StepId, bundle: p.CompareBundle) -> Answer:
        """`CompareBundle` → a message to the coordinator."""
        assert isinstance(bundle.handle, Tensor)
        place = bundle.border, bundle.id
        layout = (
            self._schema.output_layout(*place, gradients=True)
            if bundle.back
            else self._schema.input_layout(*place)
        )
        seen = GivenInput(
            p.TaskKey(bundle.id, bundle.border, bundle.check), bundle.border, bundle.back, bundle.peer
        )
        posted = self._post(step, bundle.handle, layout, seen)

        async def answer() -> None:
            await posted
            self._perform([e.Tell(self._given.compared(step, bundle, seen))])

        return answer()

    def given(self, step: e.StepId, asked: m.Show) -> tuple[m.Given, ...]:
        """Inputs of what is `asked` for; () if the question is about another peer."""
        if asked.peer not in ("", self._me):
            return ()
        return self._given.show(step, 0 if asked.peer else asked.check)

    def end_step(self, step: e.StepId) -> None:
        """Forget `step`: no coordinator asks for it any more."""
        self._given.end_step(step)
