"""Whole rollouts on a server that runs: every step, an abort that counts, and a server that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from harness.adapt import adapt
from harness.checkers import ROLLOUT_RULE_IDS, Finding, RolloutCase, rollout_checker
from harness.engines import relayed, upstream
from harness.engines.inproc import InprocFront
from harness.history import INCREMENTAL, PLAIN, STREAM, Called, Delivered, Faulted, Raised, Requested, Returned
from harness.inline import Inline
from harness.rollouts import Aborting, Broke, Ended, Left, Restarted, RolloutHistory, Stopped, Stuck
from harness.scenario import STEPS, Scenario, Step
from harness.schedule import Schedule
from harness.server import Server
from harness.stage import Stage
from harness.targets import CannotJudge
from harness.targets.reference_loop import ReferenceLoop
from harness.targets.spec import TargetSpec
from harness.work import ROLLOUT
from tests.engine.upstreams import (
    END,
    FAST,
    HEAD,
    SLOW,
    VOCABULARY,
    Mock,
    Say,
    answer,
    chunk,
    event,
    http,
    mock,
    nobody,
    silence,
    stub,
)
from tests.unit.test_stage import loop, told

BUDGET = 24


@pytest.fixture(scope="module", name="one")
def _one() -> Iterator[Mock]:
    with mock() as made:
        yield made


@pytest.fixture(scope="module", name="stage")
def _stage(one: Mock) -> Iterator[Stage]:
    with closing(Stage(ReferenceLoop(), VOCABULARY, one.url)) as made:
        yield made


def play(stage: Stage, *steps: Step, mode: str = PLAIN, **scenario: Any) -> RolloutHistory:
    return stage.run(Scenario(steps=steps, **{"budget": BUDGET, **scenario}), mode)


def once(url: str, *steps: Step, mode: str = PLAIN, target: ReferenceLoop | None = None, **more: Any) -> RolloutHistory:
    with closing(Stage(target or ReferenceLoop(), VOCABULARY, url)) as made:
        return play(made, *steps, mode=mode, **more)


def broken(history: RolloutHistory) -> dict[str, Any]:
    """What breaks a rule."""
    case = RolloutCase(history.mode, history)
    judged = {rule: rollout_checker(rule)(case) for rule in ROLLOUT_RULE_IDS}
    return {rule: found for rule, found in judged.items() if isinstance(found, Finding)}


PLAYS = {
    "nothing": (),
    "tokens": (Step("tokens", 0, 3), Step("tokens", 1, 9), Step("wait")),
    "abort": (Step("tokens", 0, 3), Step("abort", 0), Step("abort", 9)),
    "kill": (Step("tokens", 0, 3), Step("kill", 0), Step("kill", 0, 2), Step("tokens", 0, 1)),
    "stop": (Step("tokens", 0, 2), Step("stop"), Step("rollout")),
    "restart": (Step("rollout"), Step("restart"), Step("rollout"), Step("end")),
    "budget": (Step("tokens", 0, 4), Step("abort"), Step("rollout"), Step("budget", 0, 8), Step("rollout")),
}


@pytest.mark.parametrize("mode", [PLAIN, STREAM])
@pytest.mark.parametrize("scenario", [{}, {"over": 3, "members": 2}, {"over": 2, "spanning": True}], ids=str)
@pytest.mark.parametrize("steps", PLAYS.values(), ids=PLAYS)
def test_the_reference_keeps_every_rule(
    steps: tuple[Step, ...], scenario: dict[str, Any], mode: str, stage: Stage, one: Mock
) -> None:
    history = play(stage, *steps, mode=mode, **scenario)
    assert not broken(history)
    assert not told(history, Broke, Stuck)
    assert {event.stream for event in told(history, Requested)} == {mode == STREAM}
    last = history.events[-1]
    assert isinstance(last, Stopped) and last.left == Left((), last.left.tasks, last.left.permits)
    assert one.wait(lambda: not one.running)  # and nothing is left on the server


def test_deltas() -> None:
    with mock(replace(FAST, incremental=True)) as two:
        history = once(two.url, Step("tokens", 0, 3), mode=INCREMENTAL, over=2)
        assert not broken(history) and told(history, Ended)


def test_every_step_that_a_server_can_take_is_tried_here() -> None:
    tried = {step.kind for steps in PLAYS.values() for step in steps}
    assert tried == set(STEPS) - {"hold", "pass", "update"}


def test_what_is_told_is_what_the_server_said(stage: Stage, one: Mock) -> None:
    history = play(stage, Step("tokens", 0, 4), mode=STREAM)
    (end,) = told(history, Ended)
    ((member,),) = end.groups
    ids = tuple(i for e in told(history, Delivered) for i in e.ids)
    assert member.views[0].tokens == (97, *ids) and ids
    assert {v for e in told(history, Delivered) for v in e.versions} == {"default"}
    assert {b["rid"] for b in one.seen if b["input_ids"] == [97] and "rid" in b}


def test_as_many_tokens_come_as_are_let_come() -> None:
    """Time stands still for the loop until whoever drives it lets the server go on."""
    with mock(SLOW) as two, closing(Stage(ReferenceLoop(), VOCABULARY, two.url)) as made:
        made.begin(Scenario(budget=200), STREAM)
        made.do(Step("tokens", 0, 5))
        now = sum(len(e.ids) for e in told(made.so_far(), Delivered))
        assert 5 <= now < 200
        made.do(Step("tokens", 0, 5))
        assert now + 5 <= sum(len(e.ids) for e in told(made.so_far(), Delivered)) < 200
        made.do(Step("abort"))
        (call,) = told(made.so_far(), Returned)
        assert call.view.status == "aborted"
        assert told(made.so_far(), Delivered)[-1].finish == "abort"
        made.do(Step("end"))
        made.end()


def test_a_connection_breaks_as_often_as_it_is_told_to() -> None:
    with mock(SLOW) as two:
        for mode, kinds, budget in ((STREAM, ["drop-inside"], 100), (PLAIN, ["drop-before"] * 3, 8)):
            steps = (Step("tokens", 0, 5),) if mode == STREAM else ()
            history = once(two.url, *steps, Step("kill", 0, 3), mode=mode, budget=budget)
            faults = [e.kind for e in told(history, Faulted)]
            assert faults[: len(kinds)] == kinds and len(faults) == 3
            assert not broken(history)


def test_nothing_to_bring_abort_or_kill(stage: Stage) -> None:
    there = relayed.Relayed(stage.upstream, lambda event: None, "u")
    there.bring(0, 1)
    there.abort(0)
    there.kill(0)
    assert there.runs() == () and not there._tasks


# Aborts


def test_what_is_in_flight_is_aborted_before_the_abort_is_answered() -> None:
    short = Schedule(prompt="a", natural=2)  # so that the first group is done long before the others
    with mock(replace(SLOW, schedules=(short,))) as two:
        history = once(two.url, over=3, budget=200)
        assert told(history, Aborting) == [Aborting(2)] and not broken(history)
        assert [e.finish for e in told(history, Delivered)].count("abort") == 2
        assert len(set(two.aborts)) == 2


def test_a_loop_that_does_not_abort_is_found_out() -> None:
    """ABORT-LIVE asks which requests still run; on the server they do."""

    with mock(SLOW) as two:

        async def rollout(made: Any, number: int) -> Any:
            made._task = asyncio.create_task(ReferenceLoop.rollout(made, number))
            with upstream.outside():
                while len(two.running) < 2:  # noqa: ASYNC110 - on another loop
                    await asyncio.sleep(0.002)
            return []

        history = once(two.url, target=loop(rollout), over=2, budget=200)
        (end,) = told(history, Ended)
        assert sorted(end.left.running) == [0, 1]
        assert "ABORT-LIVE" in broken(history)
        assert two.wait(lambda: not two.running)


@pytest.mark.parametrize("mode", [PLAIN, STREAM])
def test_what_a_loop_leaves_running_is_gone_afterwards(mode: str) -> None:
    with mock(SLOW) as two, closing(Stage(ReferenceLoop(), VOCABULARY, two.url)) as made:
        made.begin(Scenario(budget=200, over=2), mode)
        if mode == STREAM:
            made.do(Step("tokens", 0, 2))
        else:  # a plain answer shows nothing until it is whole
            assert made._play is not None
            made._resume(_until_there(made, two))
        assert two.running
        made.close()
        made.close = lambda: None  # type: ignore[method-assign]
        assert two.wait(lambda: not two.running)
        assert two.aborts


async def _until_there(stage: Stage, two: Mock) -> None:
    play = stage._play
    assert play is not None
    play._begin()
    with upstream.outside():
        while len(two.running) < 2:  # noqa: ASYNC110 - another thread's server tells no event of this loop
            await asyncio.sleep(0.002)


# Questions


def test_what_else_a_loop_may_ask(one: Mock) -> None:
    got: list[Any] = []

    async def rollout(made: ReferenceLoop, number: int) -> Any:
        env = made._env
        async with aiohttp.ClientSession() as session:
            url = f"http://{env.host}:{env.port}"
            for path in ("/workers", "/list_workers", "/v1/loads?a=1", "/health", "/nowhere"):
                async with session.get(url + path) as response:
                    got.append((response.status, await response.read()))
            for sent in (b'{"rid": "x"}', b"{}", b""):
                async with session.post(f"{url}/abort_request", data=sent) as response:
                    got.append((response.status, await response.read()))
            async with session.post(f"{url}/generate", data=b"nonsense") as response:
                got.append(response.status)
        return []

    before = one.server._web.requests_count
    history = once(one.url, target=loop(rollout))
    assert [status for status, _ in got[:-1]] == [200, 200, 200, 200, 404, 200, 200, 200] and got[-1] == 400
    assert b'"num_running_reqs": 0' in got[2][1] and b"http://" in got[0][1] and b"http://" in got[1][1]
    assert not told(history, Aborting)
    assert [(e.sample, e.code) for e in told(history, Faulted)] == [(-1, 400)]
    assert one.server._web.requests_count - before == 2 + 4 + 2


def test_a_client_that_leaves(one: Mock) -> None:
    """Both before an answer has begun and in a stream: its request ends."""
    for stream in (False, True):
        with mock(SLOW) as two:

            async def rollout(made: ReferenceLoop, number: int, stream: bool = stream, two: Mock = two) -> Any:
                env = made._env
                sent = {"input_ids": [97], "sampling_params": {"max_new_tokens": 200}, "stream": stream}
                async with aiohttp.ClientSession() as session:

                    async def ask() -> None:
                        async with session.post(f"http://{env.host}:{env.port}/generate", json=sent) as response:
                            await response.read()

                    task = asyncio.create_task(ask())
                    with upstream.outside():
                        while not two.running:  # noqa: ASYNC110 - on another loop
                            await asyncio.sleep(0.002)
                        await asyncio.sleep(0.05)
                    task.cancel()
                    await asyncio.wait([task])
                return []

            history = once(two.url, target=loop(rollout))
            assert told(history, Ended) and not told(history, Stuck)
            assert two.wait(lambda: not two.running)


def test_a_loop_that_asks_without_end(one: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relayed, "MAX_REQUESTS", 3)
    one.seen.clear()
    history = once(one.url, over=5)
    assert len(one.seen) == 3 + 3  # those that time it
    assert {e.kind for e in told(history, Faulted)} == {"drop-before"}


# A server that fails gives no verdict


def cannot(url: str, *steps: Step, mode: str = PLAIN, **scenario: Any) -> str:
    with pytest.raises(CannotJudge) as error:
        once(url, *steps, mode=mode, **scenario)
    said = str(error.value)
    assert "\n" not in said and len(said) <= 300 and not error.value.not_applicable
    return said


@pytest.mark.parametrize("mode", [PLAIN, STREAM])
def test_a_server_that_dies(mode: str) -> None:
    with mock(SLOW) as two, closing(Stage(ReferenceLoop(), VOCABULARY, two.url)) as made:
        made.begin(Scenario(budget=200, over=2), mode)
        made.do(Step("tokens", 0, 1) if mode == STREAM else Step("wait"))
        two.die()
        made.do(Step("tokens", 0, 50))
        with pytest.raises(CannotJudge, match=f"^the server at {two.url} is gone: "):
            made.end()
        with pytest.raises(CannotJudge, match=f"^the server at {two.url} is gone: "):
            play(made, mode=mode)


HALF = HEAD + chunk(event([97], 1))


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (b"", "is gone: Server disconnected"),
        (HALF, "is gone: "),
        (http(answer([97]), length=9999), "is gone: Response payload is not completed"),
        (http(b"<html>"), "answers as no SGLang does: an answer begins with b'<html>'"),
        (HALF + chunk(b'data: {"a": 1}\n\n') + END, "answers as no SGLang does: an answer has a"),
    ],
)
@pytest.mark.parametrize("mode", [PLAIN, STREAM])
def test_a_server_that_fails_in_an_answer(reply: bytes, said: str, mode: str) -> None:
    with stub({"rid": reply}) as two:
        assert cannot(two.url, mode=mode).startswith(f"the server at {two.url} {said}")


@pytest.mark.parametrize("begins", [b"", HALF])
@pytest.mark.parametrize("step", ["tokens", "abort"])
def test_a_server_that_falls_silent(begins: bytes, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for as long as it may take, and not for ever."""

    async def talk(asked: Any, say: Say) -> None:
        await say(begins)
        await silence(asked, say)

    monkeypatch.setattr(upstream, "SILENCE_S", 0.2)
    monkeypatch.setattr(upstream, "SLOWER", 0)
    monkeypatch.setattr(relayed, "GONE_S", 0.2)
    with stub({"rid": talk}) as two:
        with closing(Stage(ReferenceLoop(), VOCABULARY, two.url)) as made:
            made.begin(Scenario(budget=BUDGET, over=2), STREAM)
            made.do(Step(step, 0, 9))
            assert made._play is not None and not made._play.serving.running  # the other one is not waited for
            with pytest.raises(CannotJudge) as error:
                made.end()
        assert str(error.value) == f"the server at {two.url} is gone: it says nothing any more"


def test_a_stream_that_ends_too_early_is_told_as_it_was() -> None:
    """The connection was not broken: the server has ended the answer, without a word of why."""
    replies = iter([HALF + END])

    async def talk(asked: Any, say: Say) -> None:
        count = asked["sampling_params"]["max_new_tokens"]
        whole = HEAD + chunk(event([97] * count, count, "length")) + END
        await say(next(replies, whole))

    with stub({"rid": talk}) as two:
        history = once(two.url, mode=STREAM)
    assert [(e.kind, e.number) for e in told(history, Faulted)] == [("close", 0)]
    assert told(history, Ended) and not broken(history)


def test_there_is_none() -> None:
    with nobody() as url, pytest.raises(CannotJudge, match=f"^nothing answers at {url}: "):
        Stage(ReferenceLoop(), VOCABULARY, url)
    with stub({"/tokenize": http({"tokens": [1]})}) as two:
        with pytest.raises(CannotJudge, match="has another tokenizer"):
            Stage(ReferenceLoop(), VOCABULARY, two.url)
        assert "/generate" not in two.asked
    front = InprocFront()
    before = aiohttp.TCPConnector._create_connection
    asyncio.run(front.start())
    asyncio.run(front.stop())
    assert aiohttp.TCPConnector._create_connection is before  # what failed has put everything back


def test_in_this_process(one: Mock) -> None:
    inline = Inline(TargetSpec("reference"), one.url, None, level=ROLLOUT)
    try:
        made = adapt(Scenario(budget=1, steps=(Step("tokens", 0, 1),)), Server(one.url), VOCABULARY)
        assert isinstance(made, Scenario)
        history = inline.run(made, PLAIN)
        assert isinstance(history, RolloutHistory) and not broken(history)
        assert told(history, Restarted, Called) and not told(history, Raised)
    finally:
        inline.close()
