"""The engine in real time, on a virtual clock: what each request is told, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from json import loads
from typing import Any

import pytest

from harness import tokenizer
from harness.engines import live
from harness.engines.live import RANDOM_KINDS, Job, Options, Scheduler, Speaker, words_of
from harness.engines.serving import ORPHAN_S
from harness.engines.sglang import Answer, Place, Reply
from harness.loop import VirtualLoop
from harness.schedule import Attempt, Schedule

VOCABULARY = tokenizer.load()
WORDS = words_of(VOCABULARY)
OPTIONS = Options(rate=10.0)
"""A token every 0.1 s."""
PROMPT = (97, 98)


class Client:
    """A stream's client: the events it has, how it ended, and when each came."""

    def __init__(self) -> None:
        self.data: list[bytes] = []
        self.at_s: list[float] = []
        self.ending: str | None = None
        self.slow = False

    def behind(self) -> bool:
        return self.slow

    def send(self, data: bytes) -> None:
        self.data.append(data)
        self.at_s.append(asyncio.get_running_loop().time())

    def end(self, ending: str) -> None:
        assert self.ending is None
        self.ending = ending

    @property
    def events(self) -> list[dict[str, Any]]:
        texts = [data.decode().removeprefix("data: ").strip() for data in self.data]
        return [loads(text) for text in texts if text != "[DONE]"]

    @property
    def ids(self) -> list[int]:
        said: list[int] = self.events[-1]["output_ids"]
        return said

    @property
    def finish(self) -> dict[str, Any]:
        reason: dict[str, Any] = self.events[-1]["meta_info"]["finish_reason"]
        return reason


class Bench:
    """A scheduler that runs, and clients of it."""

    def __init__(self, options: Options) -> None:
        self.scheduler = Scheduler(options, VOCABULARY)
        self.clock = asyncio.create_task(self.scheduler.run())

    async def stream(self, most: int = 8, rid: str = "", ids: tuple[int, ...] = PROMPT, **body: Any) -> Client:
        client = Client()
        made = await self.scheduler.accept(request(ids, most, rid, stream=True, **body), client)
        if isinstance(made, Reply):
            for part in made.parts:
                client.send(part.data)
            client.end(made.ending)
        else:
            assert isinstance(made, Job)
        return client

    def plain(
        self, most: int = 8, rid: str = "", ids: tuple[int, ...] = PROMPT, **body: Any
    ) -> asyncio.Task[dict[str, Any]]:
        return asyncio.create_task(self._plain(request(ids, most, rid, **body)))

    async def _plain(self, body: dict[str, Any]) -> dict[str, Any]:
        made = await self.scheduler.accept(body, None)
        try:
            reply = made if isinstance(made, Reply) else await made.reply
        except asyncio.CancelledError:
            assert isinstance(made, Job)
            self.scheduler.leave(made)
            raise
        if reply.status is None:
            return {"status": None}
        return {"status": reply.status, "ending": reply.ending, **loads(reply.parts[-1].data)}


def request(ids: tuple[int, ...], most: int, rid: str, **body: Any) -> dict[str, Any]:
    params = {"max_new_tokens": most, "ignore_eos": True, **body.pop("params", {})}
    return {"input_ids": list(ids), "sampling_params": params, "rid": rid, **body}


Play = Callable[..., Any]


@pytest.fixture
def play() -> Iterator[Play]:
    loop = VirtualLoop()

    def run(main: Callable[[Bench], Coroutine[Any, Any, Any]], options: Options = OPTIONS) -> Any:
        async def whole() -> Any:
            bench = Bench(options)
            found = await main(bench)
            assert not bench.clock.done()
            return found

        return loop.run(whole())

    yield run
    loop.close()


def natural(ids: tuple[int, ...], **options: Any) -> tuple[int, ...]:
    """What the server says to an input until it stops."""
    admitted = speaker(**options).admit({"input_ids": list(ids), "sampling_params": {"max_new_tokens": None}}, NOWHERE)
    assert not isinstance(admitted, Reply)
    return admitted[1].ids


def speaker(**options: Any) -> Speaker:
    return Speaker(VOCABULARY, Options(**options), WORDS)


NOWHERE = Place(0, 0, 0)


class TestWhatItSays:
    def test_an_answer_ends_with_the_stop_token_and_goes_on_wherever_it_is_resumed(self) -> None:
        whole = natural(PROMPT)
        assert whole.count(VOCABULARY.eos_token_id) == 1 and whole[-1] == VOCABULARY.eos_token_id
        assert len(whole) > 20
        for cut in range(0, len(whole), 7):
            assert natural(PROMPT + whole[:cut]) == whole[cut:]

    def test_another_seed_or_prompt_is_answered_otherwise(self) -> None:
        answers = {natural(PROMPT), natural(PROMPT, seed=1), natural((97,)), natural((98, 97))}
        assert len({answer[:8] for answer in answers}) == 4

    def test_the_mean_length_is_as_asked(self) -> None:
        lengths = [len(natural((97, token), length=20)) for token in range(32, 127)]
        assert 12 < sum(lengths) / len(lengths) < 30 and len(set(lengths)) > 20

    def answer(self, **params: Any) -> Answer:
        body = {"input_ids": [*PROMPT], "sampling_params": {"max_new_tokens": 300, **params}}
        admitted = speaker(length=20).admit(body, NOWHERE)
        assert not isinstance(admitted, Reply)
        return admitted[1]

    def test_a_stop_id_of_the_request_ends_it_too(self) -> None:
        third = self.answer().ids[2]
        answer = self.answer(stop_token_ids=[third])
        assert answer.ids == self.answer().ids[: self.answer().ids.index(third) + 1]
        assert answer.finish == {"type": "stop", "matched": third} and answer.matched == third

    def test_the_end_can_be_ignored(self) -> None:
        third, eos = self.answer().ids[2], VOCABULARY.eos_token_id
        answer = self.answer(ignore_eos=True, stop_token_ids=[third])
        assert answer.finish == {"type": "length", "length": 300} and len(answer.ids) == 300
        assert eos in answer.ids[:-1] and third in answer.ids

    def test_stop_ids_are_masked_until_the_minimum(self) -> None:
        first = self.answer().ids[0]
        answer = self.answer(stop_token_ids=[first], min_new_tokens=250)
        assert {first, VOCABULARY.eos_token_id}.isdisjoint(answer.ids[:250]) and len(answer.ids) >= 250

    def test_where_every_word_stops_the_minimum_holds_all_the_same(self) -> None:
        everything = [*WORDS, VOCABULARY.eos_token_id]
        assert len(self.answer(stop_token_ids=everything, min_new_tokens=5).ids) == 6

    def test_more_than_was_asked_is_what_would_have_come(self) -> None:
        body = {"input_ids": [*PROMPT], "sampling_params": {"max_new_tokens": 3}}
        admitted = speaker().admit(body, NOWHERE, Attempt("over-deliver", after=2))
        assert not isinstance(admitted, Reply)
        assert admitted[1].ids == natural(PROMPT)[:5]

    def test_words_are_text(self) -> None:
        texts = [VOCABULARY.decode([word]) for word in WORDS]
        assert {"a", "ab", " the", "日"} <= set(texts) and "<|im_end|>" not in texts
        assert all(text.isprintable() and text for text in texts)

    def test_the_pool_caps_what_is_asked(self, play: Play) -> None:
        """0.5.23p `pool_clip_single`, `pool_input_420`."""

        async def main(bench: Bench) -> Any:
            ten, many = tuple(range(97, 107)), (97,) * 420
            return await bench.plain(500, ids=ten), await bench.plain(5, ids=many), await bench.plain(5, ids=many[:390])

        clipped, refused, fits = play(main, replace(OPTIONS, pool=400))
        assert clipped["meta_info"]["finish_reason"] == {"type": "length", "length": 388}
        assert "(420 tokens) exceeds the maximum allowed length (394 tokens)" in refused["error"]["message"]
        assert len(fits["output_ids"]) == 5


class TestTime:
    def test_tokens_come_one_by_one_at_the_rate(self, play: Play) -> None:
        async def main(bench: Bench) -> Client:
            client = await bench.stream(5)
            await asyncio.sleep(1)
            return client

        client = play(main)
        assert [len(event["output_ids"]) for event in client.events] == [1, 2, 3, 4, 5]
        assert client.data[-1] == b"data: [DONE]\n\n" and client.ending == "end"
        assert all(0 <= at - (i + 1) / 10 < 0.006 for i, at in enumerate(client.at_s[:5]))

    def test_a_plain_answer_comes_with_its_last_token(self, play: Play) -> None:
        async def main(bench: Bench) -> Any:
            reply = await bench.plain(5, return_logprob=True)
            return reply, asyncio.get_running_loop().time()

        reply, at_s = play(main)
        assert reply["output_ids"] == list(natural(PROMPT)[:5]) and 0.5 <= at_s < 0.51
        assert [entry[1] for entry in reply["meta_info"]["output_token_logprobs"]] == reply["output_ids"]

    def test_events_of_one_tick_are_merged(self, play: Play) -> None:
        async def main(bench: Bench) -> Client:
            client = await bench.stream(100)
            await asyncio.sleep(1)
            return client

        client = play(main, replace(OPTIONS, rate=5000.0))
        assert len(client.ids) == 100 and 10 < len(client.events) < 30

    @pytest.mark.parametrize("incremental", [False, True])
    def test_a_client_that_is_behind_gets_merged_events(self, play: Play, incremental: bool) -> None:
        async def main(bench: Bench) -> Client:
            client = await bench.stream(9)
            await asyncio.sleep(0.25)
            client.slow = True
            await asyncio.sleep(0.3)
            client.slow = False
            await asyncio.sleep(1)
            return client

        client = play(main, replace(OPTIONS, incremental=incremental))
        counts = [event["meta_info"]["completion_tokens"] for event in client.events]
        assert counts == [1, 2, 6, 7, 8, 9]
        sizes = [len(event["output_ids"]) for event in client.events]
        assert sizes == ([1, 1, 4, 1, 1, 1] if incremental else counts)

    def test_an_answer_without_tokens(self, play: Play) -> None:
        async def main(bench: Bench) -> Any:
            client, reply = await bench.stream(0), await bench.plain(0)
            await asyncio.sleep(1)
            return client, reply

        client, reply = play(main)
        assert [event["output_ids"] for event in client.events] == [reply["output_ids"]] == [[]]
        assert client.finish == {"type": "length", "length": 0}

    def test_others_have_their_turn_between_many(self, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(live, "AT_ONCE", 2)

        async def main(bench: Bench) -> list[int]:
            clients = [await bench.stream(1) for _ in range(4)]
            turns: list[int] = []
            clients[1].send = lambda data: asyncio.get_running_loop().call_soon(  # type: ignore[method-assign]
                lambda: turns.append(sum(bool(client.data) for client in clients))
            )
            await asyncio.sleep(1)
            return turns

        assert play(main)[0] == 1

    def test_a_tokenizer_whose_texts_cannot_be_joined(self, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
        async def main(bench: Bench) -> Client:
            client = await bench.stream(6)
            await asyncio.sleep(1)
            return client

        joined = play(main).data
        monkeypatch.setattr(VOCABULARY, "concatenative", False)
        assert play(main).data == joined


class TestAborts:
    def test_a_running_request_has_one_more_step(self, play: Play) -> None:
        """0.5.23p `stream_abort_running`."""

        async def main(bench: Bench) -> Any:
            client, task = await bench.stream(9, "s"), bench.plain(9, "p")
            await asyncio.sleep(0.35)
            bench.scheduler.abort_all()
            assert client.ending is None
            return client, await task

        client, reply = play(main)
        assert len(client.ids) == len(reply["output_ids"]) == 4
        assert client.finish == reply["meta_info"]["finish_reason"]
        assert client.finish == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}

    def test_one_that_waits_ends_at_once(self, play: Play) -> None:
        """0.5.23 `abort_all`, waiting requests."""

        async def main(bench: Bench) -> Any:
            first, second = await bench.stream(9), await bench.stream(9)
            bench.scheduler.abort_all()
            await asyncio.sleep(1)
            return first, second

        first, second = play(main, replace(OPTIONS, max_running=1))
        assert len(first.ids) == 1 and second.ids == [] and second.at_s[0] == 0
        assert second.finish == {"type": "abort", "message": "Abort in waiting queue"}
        assert "prompt_tokens" not in second.events[-1]["meta_info"]

    @pytest.mark.parametrize(
        ("rid", "hit"), [("xx-1", {"xx-1", "xx-12"}), ("xx", set()), ("", set()), ("xx-12", {"xx-12"})]
    )
    def test_an_id_hits_those_that_begin_with_it(self, play: Play, rid: str, hit: set[str]) -> None:
        """0.5.23 `abort_rid_prefix`, `abort_noop`; that a prefix of live ids alone does nothing was seen by hand."""

        async def main(bench: Bench) -> set[str]:
            clients = {name: await bench.stream(9, name) for name in ("xx-1", "xx-12", "xx-2")}
            bench.scheduler.abort(rid)
            await asyncio.sleep(2)
            return {name for name, client in clients.items() if client.finish["type"] == "abort"}

        assert play(main) == hit

    def test_an_abort_on_the_last_step_hides_the_end(self, play: Play) -> None:
        async def main(bench: Bench) -> Client:
            client = await bench.stream(3)
            await asyncio.sleep(0.25)
            bench.scheduler.abort_all()
            await asyncio.sleep(1)
            return client

        assert play(main).finish["type"] == "abort"


class TestTheQueue:
    def test_those_that_wait_run_in_their_order(self, play: Play) -> None:
        async def main(bench: Bench) -> Any:
            clients = [await bench.stream(2) for _ in range(3)]
            waiting = len(bench.scheduler.waiting)
            await asyncio.sleep(1)
            return waiting, [client.at_s[-1] for client in clients]

        waiting, ends = play(main, replace(OPTIONS, max_running=1))
        assert waiting == 2 and ends == pytest.approx([0.2, 0.4, 0.6], abs=0.02)

    def test_a_full_queue(self, play: Play) -> None:
        """0.5.23p `queue_full`."""

        async def main(bench: Bench) -> Any:
            kept = [await bench.stream(2), await bench.stream(2)]
            refused = await bench.stream(2), await bench.plain(2)
            await asyncio.sleep(1)
            return kept, refused, await bench.plain(2)

        kept, (stream, plain), later = play(main, replace(OPTIONS, max_running=1, max_queued=1))
        assert [len(client.ids) for client in kept] == [2, 2] and later["status"] == 200
        assert stream.finish == {"type": "abort", "status_code": 503, "message": "The request queue is full."}
        assert (plain["status"], plain["code"]) == (503, 503)

    def test_a_live_id_may_not_be_used_again(self, play: Play) -> None:
        """0.5.23 `dup_rid`."""

        async def main(bench: Bench) -> Any:
            first = await bench.stream(2, "dup")
            seconds = await bench.plain(2, "dup"), await bench.stream(2, "dup")
            await asyncio.sleep(1)
            return first, seconds, await bench.plain(2, "dup")

        first, (plain, stream), later = play(main)
        message = "Duplicate request ID detected: dup"
        assert (plain["status"], plain["error"]) == (400, {"message": message})
        assert stream.events[0]["error"]["message"] == message
        assert first.finish["type"] == later["meta_info"]["finish_reason"]["type"] == "length"

    def test_a_refused_request_leaves_its_id(self, play: Play) -> None:
        async def main(bench: Bench) -> Any:
            return await bench.plain(-1, "x"), await bench.plain(5000, "x"), await bench.plain(1, "x")

        assert [reply["status"] for reply in play(main)] == [400, 400, 200]

    def test_what_is_no_request(self, play: Play) -> None:
        async def main(bench: Bench) -> Any:
            return await bench.scheduler.accept(None, None), await bench.scheduler.accept([1], None)

        assert [reply.status for reply in play(main)] == [400, 400]

    def test_an_id_that_is_half_a_character(self, play: Play) -> None:
        async def main(bench: Bench) -> Any:
            return (await bench.plain(1, "a\ud800"))["meta_info"]["id"], (await bench.plain(1))["meta_info"]["id"]

        assert play(main) == ("a?", f"{1:032x}")

    def test_the_pool_makes_the_one_with_fewest_tokens_wait(self, play: Play) -> None:
        async def main(bench: Bench) -> Any:
            first = await bench.stream(16, ids=(97,))
            await asyncio.sleep(0.35)
            second = await bench.stream(16, ids=(98,))
            waits = await bench.stream(2, ids=(99,) * 15)
            used = []
            for _ in range(60):
                await asyncio.sleep(0.1)
                used.append(sum(job.size for job in bench.scheduler.running))
            return first, second, waits, used

        first, second, waits, used = play(main, replace(OPTIONS, pool=24))
        assert max(used) <= 24 and used[-1] == 0
        last = [client.events[-1]["meta_info"] for client in (first, second, waits)]
        assert [meta["completion_tokens"] for meta in last] == [16, 16, 2]
        assert [meta["num_retractions"] for meta in last] == [0, 1, 0]
        assert second.at_s[-1] > first.at_s[-1]
        assert [event["meta_info"]["completion_tokens"] for event in second.events] == list(range(1, 17))


class TestClientsThatLeave:
    def test_a_stream_ends_at_once(self, play: Play) -> None:
        """0.5.23 `disconnect_stream`."""

        async def main(bench: Bench) -> Any:
            made = await bench.scheduler.accept(request(PROMPT, 50, "", stream=True), client := Client())
            waits = await bench.scheduler.accept(request(PROMPT, 50, "", stream=True), Client())
            assert isinstance(made, Job) and isinstance(waits, Job)
            await asyncio.sleep(0.35)
            bench.scheduler.leave(waits)
            bench.scheduler.leave(made)
            assert not bench.scheduler.running and not bench.scheduler.waiting
            await asyncio.sleep(1)
            return client

        assert len(play(main, replace(OPTIONS, max_running=1)).ids) == 3

    def test_a_plain_request_goes_on_for_a_while(self, play: Play) -> None:
        """0.5.23 `disconnect_plain`."""

        async def main(bench: Bench) -> list[int]:
            task = bench.plain(100)
            await asyncio.sleep(0.1)
            task.cancel()
            running = []
            for _ in range(2):
                await asyncio.sleep(ORPHAN_S - 0.1)
                running.append(len(bench.scheduler.running))
            return running

        assert play(main) == [1, 0]

    def test_one_that_left_may_be_done_before(self, play: Play) -> None:
        async def main(bench: Bench) -> int:
            task = bench.plain(5)
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.sleep(2 * ORPHAN_S)
            return len(bench.scheduler.running)

        assert play(main) == 0

    def test_one_that_left_takes_no_others_id_with_it(self, play: Play) -> None:
        async def main(bench: Bench) -> Any:
            task = bench.plain(5, "x")
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.sleep(ORPHAN_S - 0.5)
            await bench.stream(50, "x")
            await asyncio.sleep(1)
            return await bench.plain(1, "x")

        assert play(main)["status"] == 400

    def test_one_that_leaves_while_it_waits_outside_leaves_its_id(self, play: Play) -> None:
        async def main(bench: Bench) -> Any:
            await bench.scheduler.pause("in_place")
            task = asyncio.create_task(bench.scheduler.accept(request(PROMPT, 1, "x"), None))
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.sleep(0.1)
            bench.scheduler.resume()
            return await bench.plain(1, "x")

        assert play(main)["status"] == 200


class TestPauses:
    def test_abort_comes_back_when_nothing_is_left_and_the_late_wait(self, play: Play) -> None:
        """0.5.23 `pause_abort`."""

        async def main(bench: Bench) -> Any:
            client = await bench.stream(9)
            await asyncio.sleep(0.35)
            await bench.scheduler.pause("abort")
            assert client.finish["type"] == "abort" and asyncio.get_running_loop().time() > 0.36
            late = bench.plain(3)
            await asyncio.sleep(1)
            assert not late.done() and not bench.scheduler.running and await bench.scheduler.flush(0)
            bench.scheduler.resume()
            return await late

        assert len(play(main)["output_ids"]) == 3

    def test_in_place_all_stand_still(self, play: Play) -> None:
        """0.5.23 `pause_in_place`."""

        async def main(bench: Bench) -> Any:
            client = await bench.stream(6)
            await asyncio.sleep(0.35)
            await bench.scheduler.pause("in_place")
            await asyncio.sleep(5)
            assert len(client.ids) == 3 and not await bench.scheduler.flush(0)
            bench.scheduler.resume()
            await asyncio.sleep(1)
            return client

        client = play(main)
        assert client.ids == list(natural(PROMPT)[:6])
        assert [b - a for a, b in zip(client.at_s[3:5], client.at_s[4:6], strict=True)] == pytest.approx(
            [0.1, 0.1], abs=0.01
        )

    def test_an_abort_in_place_takes_effect_when_they_go_on(self, play: Play) -> None:
        """0.5.23 `pause_in_place_then_abort_all`."""

        async def main(bench: Bench) -> Any:
            client = await bench.stream(9)
            await asyncio.sleep(0.35)
            await bench.scheduler.pause("in_place")
            bench.scheduler.abort_all()
            await asyncio.sleep(1)
            assert client.ending is None
            bench.scheduler.resume()
            await asyncio.sleep(1)
            return client

        client = play(main)
        assert len(client.ids) == 4 and client.finish["message"] == "Aborted"

    def test_retracted_they_go_on_without_loss(self, play: Play) -> None:
        """0.5.23 `pause_retract`: the cache can be flushed meanwhile."""

        async def main(bench: Bench) -> Any:
            clients = [await bench.stream(6), await bench.stream(6)]
            await asyncio.sleep(0.35)
            await bench.scheduler.pause("retract")
            assert not bench.scheduler.running and await bench.scheduler.flush(0)
            await asyncio.sleep(1)
            bench.scheduler.resume()
            order = [job.stream for job in bench.scheduler.running]
            await asyncio.sleep(1)
            return clients, order

        clients, order = play(main)
        assert order == clients
        for client in clients:
            assert [event["output_ids"] for event in client.events] == [
                list(natural(PROMPT)[: i + 1]) for i in range(6)
            ]
            assert [event["meta_info"]["num_retractions"] for event in client.events] == [0, 0, 0, 1, 1, 1]

    @pytest.mark.parametrize(("every", "kept"), [(1, 3), (2, 2), (live.TOLD_EVERY, 0)])
    def test_retracted_then_aborted_the_tokens_are_kept(
        self, play: Play, every: int, kept: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """0.5.23 `pause_retract_then_abort_all`: of a plain request, as far as the scheduler told them."""
        monkeypatch.setattr(live, "TOLD_EVERY", every)

        async def main(bench: Bench) -> Any:
            client, task = await bench.stream(9), bench.plain(9)
            await asyncio.sleep(0.35)
            await bench.scheduler.pause("retract")
            bench.scheduler.abort_all()
            assert client.ending == "end"
            return client, await task

        client, reply = play(main)
        assert client.ids == list(natural(PROMPT)[:3])
        assert reply["output_ids"] == client.ids[:kept]
        assert (
            client.finish
            == reply["meta_info"]["finish_reason"]
            == {"type": "abort", "message": "Abort in waiting queue"}
        )
        assert "prompt_tokens" not in reply["meta_info"] and "prompt_tokens" in client.events[-2]["meta_info"]

    def test_0_5_9_says_the_last_id_once_more(self, play: Play) -> None:
        """0.5.9 `pause_retract_then_abort_all`."""

        async def main(bench: Bench) -> Client:
            client = await bench.stream(9)
            await asyncio.sleep(0.35)
            await bench.scheduler.pause("retract")
            bench.scheduler.abort_all()
            return client

        client = play(main, replace(OPTIONS, sglang="0.5.9", incremental=True))
        assert [event["output_ids"] for event in client.events] == [
            [i] for i in (*natural(PROMPT)[:3], natural(PROMPT)[2])
        ]

    def test_a_flush_waits_as_long_as_it_is_told(self, play: Play) -> None:
        """0.5.23 `flush_busy`."""

        async def main(bench: Bench) -> Any:
            await bench.stream(5)
            return await bench.scheduler.flush(0), await bench.scheduler.flush(0.2), await bench.scheduler.flush(20)

        assert play(main) == (False, False, True)


class TestWeights:
    def test_a_new_name_in_mid_request_gives_two_spans(self, play: Play) -> None:
        """0.5.23p `weight_version_mid`; `weight_version_abort`: the last step's token is of the new ones."""

        async def main(bench: Bench) -> Any:
            client, waits = await bench.stream(5), await bench.stream(1)
            await asyncio.sleep(0.35)
            bench.scheduler.rename("2")
            await asyncio.sleep(1)
            return client, waits

        client, waits = play(main, replace(OPTIONS, max_running=1))
        metas = [event["meta_info"] for event in client.events]
        assert [meta["weight_version"] for meta in metas] == ["default"] * 3 + ["2"] * 2
        spans = [{"version": "default", "start": 0, "end": 3}, {"version": "2", "start": 3, "end": 5}]
        assert metas[-1]["weight_versions"] == spans
        assert waits.events[-1]["meta_info"]["weight_versions"] == [{"version": "2", "start": 0, "end": 1}]

    def test_weights_from_a_disk_wait_for_what_runs_and_new_requests_for_them(self, play: Play) -> None:
        async def main(bench: Bench) -> Any:
            first = bench.plain(5)
            await asyncio.sleep(0.1)
            update = asyncio.create_task(bench.scheduler.update("7"))
            await asyncio.sleep(0.1)
            second = bench.plain(1)
            await asyncio.sleep(0.1)
            assert len(bench.scheduler.running) == 1
            await update
            return await first, await second

        first, second = play(main)
        assert (first["meta_info"]["weight_version"], second["meta_info"]["weight_version"]) == ("default", "7")

    def test_paused_they_do_not_wait(self, play: Play) -> None:
        async def main(bench: Bench) -> Client:
            client = await bench.stream(5)
            await asyncio.sleep(0.25)
            await bench.scheduler.pause("in_place")
            await bench.scheduler.update("7")
            await bench.scheduler.update(None)
            bench.scheduler.resume()
            await asyncio.sleep(1)
            return client

        spans = [{"version": "default", "start": 0, "end": 2}, {"version": "7", "start": 2, "end": 5}]
        assert play(main).events[-1]["meta_info"]["weight_versions"] == spans


SCHEDULE = Schedule(prompt="ab?", budget=6, script=(65, 66, 67), natural=5)
ASKED = tuple(VOCABULARY.encode("ab?", add_special_tokens=False))
SCRIPTED = [65, 66, 67, 65, 66, VOCABULARY.eos_token_id]


def with_attempts(*attempts: Attempt, **fields: Any) -> Options:
    return replace(OPTIONS, schedules=(replace(SCHEDULE, attempts=attempts, **fields),))


class TestScripts:
    def both(self, play: Play, options: Options, **body: Any) -> tuple[Client, dict[str, Any]]:
        """What the first stream and, of another server, the first plain request for the prompt get."""

        async def stream(bench: Bench) -> Client:
            client = await bench.stream(6, ids=ASKED, params={"ignore_eos": False}, **body)
            await asyncio.sleep(2)
            return client

        async def plain(bench: Bench) -> dict[str, Any]:
            return await bench.plain(6, ids=ASKED, params={"ignore_eos": False}, **body)

        return play(stream, options), play(plain, options)

    def test_the_prompt_has_its_answer_and_others_theirs(self, play: Play) -> None:
        client, reply = self.both(play, with_attempts())
        assert client.ids == reply["output_ids"] == SCRIPTED and client.finish["type"] == "stop"

        async def main(bench: Bench) -> Any:
            resumed = await bench.plain(6, ids=(*ASKED, 65, 66), params={"ignore_eos": False})
            text = await bench.scheduler.accept({"text": "ab?", "sampling_params": {"max_new_tokens": 2}}, None)
            assert isinstance(text, Job)
            return resumed, await text.reply, await bench.plain(6)

        resumed, text, other = play(main, with_attempts())
        assert resumed["output_ids"] == SCRIPTED[2:] and loads(text.parts[0].data)["output_ids"] == [65, 66]
        assert other["output_ids"] == list(natural(PROMPT)[:6])

    def test_the_longest_prompt_counts(self, play: Play) -> None:
        async def main(bench: Bench) -> Any:
            return await bench.plain(2, ids=ASKED), await bench.plain(2, ids=ASKED[:1])

        shorter = Schedule(prompt="ab", budget=6, script=(90,))
        longer, short = play(main, replace(OPTIONS, schedules=(shorter, SCHEDULE)))
        assert longer["output_ids"] == [65, 66] and short["output_ids"] == [90, 90]

    def test_attempts_strike_in_their_order(self, play: Play) -> None:
        async def main(bench: Bench) -> Any:
            return [await bench.plain(6, ids=ASKED) for _ in range(5)]

        attempts = (Attempt("abort", after=2), Attempt("http", code=503, times=2), Attempt("flag", after=1))
        replies = play(main, with_attempts(*attempts))
        assert [reply["status"] for reply in replies] == [200, 503, 503, 200, 200]
        assert [len(replies[i]["output_ids"]) for i in (0, 3, 4)] == [2, 6, 6]

    @pytest.mark.parametrize(
        ("kind", "tokens"), [("abort", 2), ("abort-late", 3), ("abort-retracted", 2), ("abort-queued", 0)]
    )
    def test_aborts(self, play: Play, kind: str, tokens: int) -> None:
        client, reply = self.both(play, with_attempts(Attempt(kind, after=2)))
        assert client.ids == reply["output_ids"] == SCRIPTED[:tokens]
        assert client.finish == reply["meta_info"]["finish_reason"] and client.finish["type"] == "abort"
        assert client.ending == "end"

    @pytest.mark.parametrize("after", [0, 2])
    def test_close(self, play: Play, after: int) -> None:
        client, reply = self.both(play, with_attempts(Attempt("close", after=after)))
        assert [len(event["output_ids"]) for event in client.events] == list(range(1, after + 1))
        assert client.ending == "end" and b"data: [DONE]\n\n" not in client.data and reply["status"] is None

    def test_drop_before(self, play: Play) -> None:
        client, reply = self.both(play, with_attempts(Attempt("drop-before")))
        assert (client.data, client.ending, reply["status"]) == ([], "drop", None)

    def test_drop_inside(self, play: Play) -> None:
        options = with_attempts(Attempt("drop-inside", after=2, at=20))

        async def plain(bench: Bench) -> Any:
            made = await bench.scheduler.accept(request(ASKED, 6, ""), None)
            assert isinstance(made, Job)
            return await made.reply

        async def stream(bench: Bench) -> Client:
            client = await bench.stream(6, ids=ASKED)
            await asyncio.sleep(2)
            return client

        client, reply = play(stream, options), play(plain, options)
        assert [len(data) > 20 for data in client.data] == [True, True, False] and client.ending == "drop"
        assert len(reply.parts[0].data) == 20 and reply.ending == "drop"

    def test_drop_after(self, play: Play) -> None:
        client, reply = self.both(play, with_attempts(Attempt("drop-after")))
        assert client.ids == reply["output_ids"] == SCRIPTED and client.data[-1] == b"data: [DONE]\n\n"
        assert client.ending == reply["ending"] == "drop"

    @pytest.mark.parametrize("code", [None, 503])
    def test_error_event(self, play: Play, code: int | None) -> None:
        options = with_attempts(Attempt("error-event", after=2, code=code or 503))
        client, reply = self.both(play, options)
        assert "error" in client.events[2] and len(client.events) == 3 and client.data[-1] == b"data: [DONE]\n\n"
        assert reply["status"] == 503 and client.ending == "end"

    def test_http_and_queue_full(self, play: Play) -> None:
        client, reply = self.both(play, with_attempts(Attempt("queue-full")))
        assert client.finish["status_code"] == 503 and reply["status"] == 503
        client, reply = self.both(play, with_attempts(Attempt("http", code=429)))
        assert client.events[0]["code"] == 429 and reply["status"] == 429

    def test_retract(self, play: Play) -> None:
        client, reply = self.both(play, with_attempts(Attempt("retract", after=3)))
        counts = [event["meta_info"]["num_retractions"] for event in client.events]
        assert counts == [0, 0, 1, 1, 1, 1] and client.ids == SCRIPTED and reply["meta_info"]["num_retractions"] == 1

    def test_an_engine_that_breaks_its_contract(self, play: Play) -> None:
        client, reply = self.both(play, with_attempts(Attempt("over-deliver", after=2), natural=None))
        assert len(client.ids) == len(reply["output_ids"]) == 8
        client, reply = self.both(play, with_attempts(Attempt("missing", field="output_ids")))
        assert all("output_ids" not in event for event in (*client.events, reply))
        client, reply = self.both(play, with_attempts(Attempt("lost-ids")), return_logprob=True)
        for event in (client.events[-1], reply):
            assert len(event["meta_info"]["output_token_logprobs"]) == len(event["output_ids"]) + 1

    def test_events_have_the_sizes_of_the_schedule(self, play: Play) -> None:
        client, _ = self.both(play, with_attempts(chunks=(2, 1)))
        assert [len(event["output_ids"]) for event in client.events] == [2, 3, 5, 6]

    def test_a_schedule_has_its_own_limit_and_version(self, play: Play) -> None:
        client, reply = self.both(play, with_attempts(context=7))
        assert "maximum context length of 7 tokens" in client.events[0]["error"]["message"]
        assert client.events[0]["error"]["code"] == 400 and reply["status"] == 400
        client, _ = self.both(play, with_attempts(context=7, sglang="0.5.9"))
        assert list(client.events[0]["error"]) == ["message"]

    def test_an_abort_comes_in_between(self, play: Play) -> None:
        async def main(bench: Bench) -> Client:
            client = await bench.stream(6, ids=ASKED)
            await asyncio.sleep(0.15)
            bench.scheduler.abort_all()
            await asyncio.sleep(1)
            return client

        client = play(main, with_attempts(Attempt("abort", after=5)))
        assert client.ids == SCRIPTED[:2] and client.finish["type"] == "abort"


class TestRandomFaults:
    def outcomes(self, play: Play, options: Options) -> list[Any]:
        async def main(bench: Bench) -> list[Any]:
            clients = [await bench.stream(6, ids=(97, number)) for number in range(32, 112)]
            clients.append(await bench.stream(99_999))
            await asyncio.sleep(2)
            return [(client.data, client.ending) for client in clients]

        found: list[Any] = play(main, options)
        return found

    def test_each_request_meets_one_and_the_same_each_time(self, play: Play) -> None:
        options = replace(OPTIONS, faults=1.0)
        first = self.outcomes(play, options)
        assert first == self.outcomes(play, options) != self.outcomes(play, replace(options, seed=1))
        clean = self.outcomes(play, OPTIONS)
        hit = sum(one != other for one, other in zip(first, clean, strict=True))
        assert hit > 70 and {ending for _, ending in first} == {"end", "drop"}
        assert all(ending == "end" for _, ending in clean)

    def test_a_share_of_them(self, play: Play) -> None:
        some, clean = self.outcomes(play, replace(OPTIONS, faults=0.3)), self.outcomes(play, OPTIONS)
        assert 10 < sum(one != other for one, other in zip(some, clean, strict=True)) < 40

    def test_the_kinds_are_those_of_a_conforming_engine(self) -> None:
        assert "abort" in RANDOM_KINDS and "queue-full" in RANDOM_KINDS
        assert {"run", "flag", "missing", "lost-ids", "over-deliver"}.isdisjoint(RANDOM_KINDS)
