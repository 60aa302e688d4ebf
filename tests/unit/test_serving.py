"""The engine while it serves many: what each request is told, and when, without a client or a front."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from json import dumps, loads
from typing import Any

import pytest

from harness import tokenizer
from harness.calls import CURRENT, NOBODY, Call
from harness.engines import serving as module
from harness.engines.serving import ORPHAN_S, Live, Serving
from harness.engines.sglang import Answer, Reply, _spans
from harness.history import Delivered, Faulted, Requested
from harness.loop import VirtualLoop
from harness.rollouts import Aborting, Event, Updated
from harness.scenario import Scenario

VOCABULARY = tokenizer.load()
A, B = (97,), (98,)


class Bench:
    """A serving engine, what it has told, and clients of it."""

    def __init__(self, *, incremental: bool = False, **scenario: Any) -> None:
        self.events: list[Event] = []
        given = Scenario(**scenario)
        self.engine = Serving(given, VOCABULARY, (A, B), self.events.append, "http://e:1", incremental=incremental)

    def ask(
        self, ids: tuple[int, ...] = A, sample: int = 0, *, stream: bool = False, most: int = 3, rid: str = ""
    ) -> asyncio.Task[list[dict[str, Any]]]:
        """A client: gives the bodies it has got when its answer has come to its end."""
        body = {"input_ids": list(ids), "sampling_params": {"max_new_tokens": most}, "stream": stream, "rid": rid}
        return asyncio.ensure_future(self._ask(dumps(body).encode(), sample))

    async def _ask(self, body: bytes, sample: int) -> list[dict[str, Any]]:
        CURRENT.set(Call(0, sample))
        return await self.read(await self.engine.answer("/generate", body))

    async def read(self, reply: Any) -> list[dict[str, Any]]:
        if reply.status is None:
            self.engine.ended(reply)
            return []
        pieces = [piece async for piece in self.engine.send(reply)]
        texts = [piece.decode().removeprefix("data: ").strip() for piece in pieces]
        return [loads(text) for text in texts if text != "[DONE]"]

    async def other(self, path: str, body: Any = None) -> Any:
        reply = await self.engine.answer(path, b"" if body is None else dumps(body).encode())
        (text,) = [part.data async for part in _parts(reply)]
        return reply.status, text.decode()

    def told(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


async def _parts(reply: Reply) -> Any:
    for part in reply.parts:
        yield part


def ids(bodies: list[dict[str, Any]]) -> list[list[int]]:
    return [[entry[1] for entry in body["meta_info"]["output_token_logprobs"]] for body in bodies]


def ends(bodies: list[dict[str, Any]]) -> list[Any]:
    return [(body["meta_info"]["finish_reason"] or {}).get("type") for body in bodies]


def text(bodies: list[dict[str, Any]]) -> list[str]:
    return [body["text"] for body in bodies]


Play = Callable[[Callable[[], Awaitable[None]]], None]


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop()
    yield made
    made.close()


@pytest.fixture
def play(loop: VirtualLoop) -> Play:
    return lambda main: loop.run(main())  # type: ignore[arg-type]


async def quiet() -> float | None:
    """Until nothing is ready any more: the seconds to the next timer."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return await loop.idle()


# Tokens


def test_a_plain_answer_comes_with_its_last_token(play: Play) -> None:
    async def main() -> None:
        bench = Bench()
        one = bench.ask()
        await quiet()
        bench.engine.bring(0, 2)
        await quiet()
        assert not one.done() and bench.engine.runs() == (0,)
        bench.engine.bring(0, 9)
        assert text(await one) == ["Aab"] and bench.engine.runs() == ()
        (told,) = bench.told(Delivered)
        assert (told.ids, told.finish, told.versions) == ((65, 97, 98), "length", ("0", "0", "0"))

    play(main)


@pytest.mark.parametrize(
    ("incremental", "texts"), [(False, ["A", "Aab", "Aabc"]), (True, ["A", "ab", "c"])], ids=["stream", "incremental"]
)
def test_a_stream_has_an_event_whenever_tokens_come(play: Play, incremental: bool, texts: list[str]) -> None:
    async def main() -> None:
        bench = Bench(incremental=incremental)
        one = bench.ask(stream=True, most=4)
        await quiet()
        for count in (1, 0, 2, 1):
            bench.engine.bring(0, count)
            await quiet()
        bodies = await one
        assert text(bodies) == texts and ends(bodies) == [None, None, "length"]
        assert [event.ids for event in bench.told(Delivered)] == [(65,), (97, 98), (99,)]

    play(main)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_its_natural_length(play: Play, stream: bool) -> None:
    async def main() -> None:
        bench = Bench(lengths=(1, None, 0))
        asked = [bench.ask(prompt, number, stream=stream) for number, prompt in enumerate((A, B, A))]
        await quiet()
        for _ in range(3):
            bench.engine.bring(0, 9)
        await quiet()
        assert [ends(await one)[-1] for one in asked] == ["stop", "length", "stop"]
        given = {event.sample: event.ids for event in bench.told(Delivered)}
        assert given == {0: (65, 271), 1: (65, 97, 98), 2: (271,)}

    play(main)


def test_who_asks_for_nothing_is_answered_at_once(play: Play) -> None:
    async def main() -> None:
        bench = Bench()
        assert ends(await bench.ask(most=0)) == ["length"]
        assert ends(await bench.ask(most=0, stream=True)) == ["length"]
        assert bench.engine.runs() == ()

    play(main)


def test_which_request_counts_round(play: Play) -> None:
    async def main() -> None:
        bench = Bench()
        asked = [bench.ask(prompt, number) for number, prompt in enumerate((A, B))]
        await quiet()
        bench.engine.bring(3, 9)
        await quiet()
        assert [one.done() for one in asked] == [False, True]

    play(main)


def test_an_answer_goes_on_where_its_tokens_say(play: Play) -> None:
    """Two answers to one prompt differ in their first token."""

    async def main() -> None:
        bench = Bench()
        first = [bench.ask(A, 0), bench.ask(A, 1)]
        await quiet()
        bench.engine.bring(0, 9)
        bench.engine.bring(0, 9)
        assert [text(await one) for one in first] == [["Aab"], ["Bab"]]
        for start, goes_on in (((66, 97), "bcd"), ((65,), "abc"), ((7, 8), "bcd")):
            asked = bench.ask((*A, *start))
            await quiet()
            bench.engine.bring(0, 9)
            if start != (7, 8):
                assert text(await asked) == [goes_on]
            else:  # an answer of nobody: any tokens will do, and the next new one is not taken up by it
                await asked
        again = bench.ask(A)
        await quiet()
        bench.engine.bring(0, 9)
        assert text(await again) == ["Cab"]

    play(main)


def test_a_prompt_that_is_not_of_the_data_set(play: Play) -> None:
    async def main() -> None:
        bench = Bench()
        asked = bench.ask((120, 121))
        await quiet()
        bench.engine.bring(0, 9)
        assert text(await asked) == ["Aab"]

    play(main)


@pytest.mark.parametrize("driven", ["bring", "abort", "kill"])
def test_where_nothing_runs_nothing_happens(play: Play, driven: str) -> None:
    async def main() -> None:
        bench = Bench()
        getattr(bench.engine, driven)(*((0, 1) if driven == "bring" else (0,)))
        assert bench.events == []

    play(main)


# Requests


@pytest.mark.parametrize(
    ("body", "code"), [(b"{", 400), (b"[]", 400), (b'{"input_ids": "x"}', 400), (b'{"input_ids": [1, "x"]}', 400)]
)
def test_a_request_that_is_none_is_refused(play: Play, body: bytes, code: int) -> None:
    async def main() -> None:
        bench = Bench()
        reply = await bench.engine.answer("/generate", body)
        assert (reply.status, bench.engine.runs()) == (code, ())
        (asked,) = bench.told(Requested)
        assert (asked.attempt, asked.sample, asked.number) == (0, NOBODY, 0)

    play(main)


def test_requests_of_a_call_are_counted(play: Play) -> None:
    async def main() -> None:
        bench = Bench()
        CURRENT.set(Call(2, 7))
        for _ in range(2):
            await bench.engine.answer("/generate", b"[]")
        assert [(r.attempt, r.sample, r.number) for r in bench.told(Requested)] == [(2, 7, 0), (2, 7, 1)]

    play(main)


def test_requests_without_bound_are_answered_no_more(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REQUESTS", 1)

    async def main() -> None:
        bench = Bench()
        bench.ask(most=0)
        assert await bench.ask(most=0) == []
        assert [(f.kind, f.sample) for f in bench.told(Faulted)] == [("drop-before", 0)]

    play(main)


def test_what_else_an_engine_is_asked(play: Play) -> None:
    async def main() -> None:
        bench = Bench()
        bench.ask()
        await quiet()
        bench.engine.update()
        url = "http://e:1"
        assert await bench.other("/workers") == (200, dumps({"workers": [{"url": url}]}))
        assert await bench.other("/list_workers?x=1") == (200, dumps({"urls": [url]}))
        assert await bench.other("/health") == (200, "")
        status, loads_ = await bench.other("/v1/loads?include=core")
        assert loads(loads_)["loads"] == [{"num_running_reqs": 1, "num_waiting_reqs": 0}]
        assert loads((await bench.other("/get_model_info"))[1])["weight_version"] == "1"
        assert await bench.other("/nope") == (404, '{"detail":"Not Found"}')
        assert status == 200

    play(main)


# Aborts


@pytest.mark.parametrize("stream", [False, True])
def test_an_abort_of_all_hits_what_is_there(play: Play, stream: bool) -> None:
    async def main() -> None:
        bench = Bench()
        asked = [bench.ask(prompt, number, stream=stream) for number, prompt in enumerate((A, B))]
        await quiet()
        bench.engine.bring(0, 1)
        await quiet()
        assert await bench.other("/abort_request", {"abort_all": True}) == (200, "")
        later = bench.ask(B, 2)
        await quiet()
        assert [ends(await one)[-1] for one in asked] == ["abort", "abort"]
        messages = [(await one)[-1]["meta_info"]["finish_reason"]["message"] for one in asked]
        assert messages == ["Aborted", "Abort in waiting queue"]
        assert not later.done() and bench.engine.runs() == (2,) and bench.engine.aborts == 1
        assert bench.told(Aborting) == [Aborting(2)]

    play(main)


def test_an_abort_of_one_hits_its_name_s_beginning(play: Play) -> None:
    async def main() -> None:
        bench = Bench()
        asked = [bench.ask(A, 0, rid="group-1"), bench.ask(A, 1, rid="group-2"), bench.ask(B, 2)]
        await quiet()
        for nothing in ({}, {"rid": ""}, {"rid": "x"}, [], "x", {"abort_all": 1}):
            await bench.other("/abort_request", nothing)
        assert bench.engine.runs() == (0, 1, 2)
        await bench.engine.answer("/abort_request", b"{")
        await bench.other("/abort_request", {"rid": "group-2"})
        await bench.other("/abort_request", {"rid": "group"})
        await quiet()
        assert bench.engine.runs() == (2,) and [one.done() for one in asked] == [True, True, False]
        assert bench.engine.aborts == 0 and bench.told(Aborting) == []

    play(main)


def test_a_late_abort_lets_a_token_through(play: Play) -> None:
    async def main() -> None:
        bench = Bench(late=True)
        asked = bench.ask()
        await quiet()
        bench.engine.abort(0)
        bodies = await asked
        assert (text(bodies), ends(bodies)) == (["A"], ["abort"])

    play(main)


def test_an_abort_on_the_last_step_hides_the_end(play: Play) -> None:
    async def main() -> None:
        bench = Bench(late=True, lengths=(0,))
        asked = bench.ask()
        await quiet()
        bench.engine.abort(0)
        bodies = await asked
        assert ends(bodies) == ["abort"] and bench.told(Delivered)[0].ids == (271,)

    play(main)


# Weights


def test_both_weights_of_an_answer_are_told(play: Play) -> None:
    async def main() -> None:
        bench = Bench()
        plain, stream = bench.ask(A, 0), bench.ask(B, 1, stream=True)
        await quiet()
        bench.engine.update()
        for which in (0, 1):
            bench.engine.bring(which, 1)
        bench.engine.update()
        bench.engine.update()
        bench.engine.bring(0, 9)
        bench.engine.bring(0, 9)
        spans = [{"version": "1", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 3}]
        assert (await plain)[0]["meta_info"]["weight_versions"] == spans
        last = (await stream)[-1]["meta_info"]
        assert (last["weight_versions"], last["weight_version"]) == (spans, "3")
        assert bench.told(Updated) == [Updated("1"), Updated("2"), Updated("3")]
        told = {s: tuple(v for e in bench.told(Delivered) if e.sample == s for v in e.versions) for s in (0, 1)}
        assert told == {0: ("1", "3", "3"), 1: ("1", "3", "3")}

    play(main)


def test_an_aborted_answer_tells_the_weights_of_its_tokens(play: Play) -> None:
    async def main() -> None:
        bench = Bench()
        some, none = bench.ask(A, 0), bench.ask(B, 1)
        await quiet()
        bench.engine.bring(0, 2)
        bench.engine.update()
        bench.engine.abort(0)
        bench.engine.abort(0)
        assert (await some)[0]["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 2}]
        assert (await none)[0]["meta_info"]["weight_versions"] == [{"version": "1", "start": 0, "end": 0}]

    play(main)


def test_a_span_without_tokens_is_told_of_an_empty_answer_only() -> None:
    def spans(total: int, *versions: tuple[str, int]) -> list[tuple[Any, ...]]:
        answer = Answer((1,) * total, (0.0,) * total, {}, None, False, versions=versions)
        return [tuple(span.values()) for span in _spans(answer)]

    assert spans(0, ("0", 9)) == [("0", 0, 0)]
    assert spans(2, ("0", 2), ("1", 9)) == [("0", 0, 2)]
    assert spans(3, ("0", 2), ("1", 9)) == [("0", 0, 2), ("1", 2, 3)]


# Connections


@pytest.mark.parametrize(
    ("stream", "tokens", "kind"),
    [(False, 0, "drop-before"), (False, 2, "drop-before"), (True, 0, "drop-before"), (True, 2, "drop-inside")],
)
def test_a_broken_connection_is_told_where_it_broke(play: Play, stream: bool, tokens: int, kind: str) -> None:
    async def main() -> None:
        bench = Bench()
        asked = bench.ask(stream=stream)
        await quiet()
        bench.engine.bring(0, tokens)
        await quiet()
        bench.engine.kill(0)
        bodies = await asked
        assert len(bodies) == (1 if kind == "drop-inside" else 0)
        assert [f.kind for f in bench.told(Faulted)] == [kind] and bench.engine.runs() == ()

    play(main)


def test_a_client_that_leaves_a_stream_ends_its_request(play: Play) -> None:
    async def main() -> None:
        bench = Bench()
        asked = bench.ask(stream=True)
        await quiet()
        bench.engine.left(asked)  # type: ignore[arg-type]
        await quiet()
        assert asked.cancelled() and bench.engine.runs() == ()

    play(main)


def test_a_client_that_leaves_a_plain_request_is_noticed_later(play: Play, loop: VirtualLoop) -> None:
    async def main() -> None:
        bench = Bench()
        asked = bench.ask()
        await quiet()
        asked.cancel()
        assert await quiet() == pytest.approx(ORPHAN_S)
        assert bench.engine.runs() == (0,)
        loop.jump(ORPHAN_S)
        await quiet()
        assert bench.engine.runs() == () and bench.told(Delivered) == []

    play(main)


@pytest.mark.parametrize("how", ["ends", "close"])
def test_an_orphan_may_end_before_it_is_noticed(play: Play, how: str) -> None:
    async def main() -> None:
        bench = Bench()
        asked = bench.ask()
        await quiet()
        asked.cancel()
        await quiet()
        if how == "ends":
            bench.engine.bring(0, 9)
            await asyncio.sleep(ORPHAN_S + 1)
            assert bench.engine.runs() == ()
        else:
            bench.engine.close()
            assert await quiet() is None

    play(main)


def test_a_stream_may_end_while_nobody_reads(play: Play) -> None:
    async def main() -> None:
        live = Live()
        live.arrive((), closed=True)
        live.wake = asyncio.get_running_loop().create_future()
        live.arrive(())
        live.arrive(())
        assert live.wake.done() and live.closed

    play(main)


# Messages on their way


def test_a_message_that_is_held_arrives_when_it_is_let(play: Play) -> None:
    async def main() -> None:
        bench = Bench()
        bench.engine.hold(2)
        one, two, three = (bench.ask(A, sample) for sample in range(3))
        await quiet()
        assert bench.engine.runs() == (2,) and bench.engine.held == 0 and len(bench.engine.on_the_way) == 2
        bench.engine.let(1, 1)
        await quiet()
        assert bench.engine.runs() == (2, 1)
        bench.engine.let(7, 5)
        await quiet()
        assert bench.engine.runs() == (2, 1, 0) and bench.engine.on_the_way == []
        assert not any(asked.done() for asked in (one, two, three))

    play(main)


def test_messages_of_one_connection_keep_their_order(play: Play) -> None:
    async def main() -> None:
        bench = Bench()
        asked = bench.ask(stream=True)
        other = bench.ask(B, 1)
        await quiet()
        bench.engine.hold(1)
        for count in (1, 1):
            bench.engine.bring(0, count)
        bench.engine.bring(1, 9)
        await quiet()
        assert other.done() and len(bench.engine.on_the_way) == 2 and bench.engine.held == 0
        bench.engine.let(1, 1)  # the second of them is meant, and the first arrives
        await quiet()
        assert [event.ids for event in bench.told(Delivered) if event.sample == 0] == [(65,)]
        bench.engine.bring(0, 9)
        bench.engine.let_all()
        assert text(await asked) == ["A", "Aa", "Aab"]

    play(main)


def test_answers_to_other_questions_travel_too(play: Play) -> None:
    async def main() -> None:
        bench = Bench()
        bench.engine.hold(2)
        asked = asyncio.ensure_future(bench.other("/health"))
        for _ in range(2):
            await quiet()
            assert not asked.done()
            bench.engine.let_all()
        assert await asked == (200, "")

    play(main)


def test_a_refusal_travels(play: Play) -> None:
    async def main() -> None:
        bench = Bench()
        asked = asyncio.ensure_future(bench.engine.answer("/generate", b"[]"))
        bench.engine.hold(2)
        for _ in range(2):
            await quiet()
            assert not asked.done()
            bench.engine.let_all()
        assert (await asked).status == 400

    play(main)


def test_what_arrives_for_nobody_is_nothing(play: Play) -> None:
    """Neither a request whose client has left on the way, nor an answer to one that has."""

    async def main() -> None:
        bench = Bench()
        bench.engine.hold(1)
        lost = bench.ask()
        waits = bench.ask(B, 1)
        await quiet()
        lost.cancel()
        bench.engine.hold(1)
        bench.engine.bring(0, 9)
        waits.cancel()
        await quiet()
        bench.engine.let_all()
        await quiet()
        assert bench.engine.runs() == () and bench.told(Delivered) == []

    play(main)
