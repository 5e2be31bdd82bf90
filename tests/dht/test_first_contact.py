"""Meeting several peers at once: who answers is not kept waiting for the dead."""

from __future__ import annotations

import asyncio

from hetpeer.dht.kademlia.first_contact import MAX_REASONS, JoinAnswer, _somebody, nobody_answers

ANSWER = JoinAnswer(peer_id="Qm", clock_offset_s=0.0, connections=0)
FOREVER_S = 1e6


async def test_one_answer_ends_the_wait_for_those_who_never_answer() -> None:
    loop = asyncio.get_running_loop()
    refused, answered, silent = (loop.create_future() for _ in range(3))
    waiting = asyncio.ensure_future(_somebody([refused, answered, silent], FOREVER_S))
    refused.set_result("connection refused")
    await asyncio.sleep(0)
    assert not waiting.done()
    answered.set_result(ANSWER)
    await asyncio.wait_for(waiting, 30)
    assert not silent.done()


async def test_it_ends_when_everybody_has_said_no_or_the_time_is_up() -> None:
    loop = asyncio.get_running_loop()
    refused, silent = loop.create_future(), loop.create_future()
    refused.set_result("connection refused")
    await asyncio.wait_for(_somebody([refused], FOREVER_S), 30)
    await asyncio.wait_for(_somebody([refused, silent], 0.01), 30)
    assert not silent.cancelled()


def test_the_reasons_of_some_are_enough() -> None:
    assert nobody_answers(["a: refused"]).why == "a: refused"
    error = nobody_answers([f"{number}: refused" for number in range(MAX_REASONS + 2)])
    assert error.why.endswith("4: refused; and 2 more")
    assert str(MAX_REASONS + 2) in error.what
