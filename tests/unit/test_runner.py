"""The runner plays the caller, and every misdeed of a client ends the run with a history, in no real time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from harness.engines import MAX_REQUESTS
from harness.history import (
    ABORTED,
    INCREMENTAL,
    MODES,
    PENDING,
    PLAIN,
    STREAM,
    TERMINAL,
    TRUNCATED,
    Called,
    Delivered,
    Flagged,
    Halted,
    History,
    Raised,
    Requested,
    Returned,
)
from harness.runner import EXTRA_CALLS, Runner
from harness.schedule import Attempt, Schedule
from harness.targets import CannotJudge, Start
from harness.targets.function import FunctionTarget, Generate, reference
from harness.tokenizer import SmallTokenizer
from reference_impl.generate import generate as reference_generate
from reference_impl.sample import Sample

SOON_S = 30.0
"""Real seconds that no misdeed may cost, on a busy machine too."""
ABORT = Attempt("abort", after=1)


@pytest.fixture(autouse=True)
def _no_real_time() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < SOON_S


def run(generate: Generate | FunctionTarget, schedule: Schedule | None = None, mode: str = PLAIN) -> History:
    target = generate if isinstance(generate, FunctionTarget) else FunctionTarget("client", generate, generate)
    runner = Runner(target)
    try:
        return runner.run(schedule or Schedule(budget=3, attempts=(ABORT,)), mode)
    finally:
        runner.close()


def of(kind: type[Any], history: History) -> list[Any]:
    return [e for e in history.events if isinstance(e, kind)]


class Spy:
    """The reference, and what it was given at each call."""

    def __init__(self) -> None:
        self.params: list[dict[str, Any]] = []
        self.samples: list[Any] = []
        self.flags: list[bool] = []

    async def __call__(self, args: Any, sample: Any, params: dict[str, Any]) -> Any:
        self.params.append(params)
        self.samples.append(sample)
        self.flags.append(args.rollout_abort.is_set())
        return await reference_generate(args, sample, params)


class TestTheCaller:
    def test_params_are_fresh_at_every_call(self) -> None:
        """slime's caller copies its dict for every call; B is whole in each."""
        spy = Spy()
        run(spy, Schedule(budget=3, attempts=(ABORT, ABORT)))
        assert len(spy.params) == 4
        assert len({id(p) for p in spy.params}) == 4
        assert [p["max_new_tokens"] for p in spy.params] == [3, 3, 3, 3]

    def test_siblings_share_one_dict_and_it_stays(self) -> None:
        spy = Spy()
        history = run(spy, Schedule(budget=3, samples=2, attempts=(ABORT,)))
        assert len({id(p) for p in spy.params}) == 1
        assert {e.sample for e in of(Called, history)} == {0, 1}
        assert all(len(e.others) == 1 for e in of(Returned, history))

    def test_a_change_to_the_shared_dict_reaches_the_sibling(self) -> None:
        """What NO-ALIAS is about: the runner does not protect the client from itself."""

        async def lowers(args: Any, sample: Any, params: dict[str, Any]) -> Any:
            params["max_new_tokens"] -= 1
            return await reference_generate(args, sample, params)

        history = run(lowers, Schedule(budget=5, samples=2))
        first, second = of(Called, history)[:2]
        assert (first.params["max_new_tokens"], second.params["max_new_tokens"]) == (5, 4)
        assert of(Returned, history)[0].params["max_new_tokens"] == 4

    def test_the_parameters_are_those_slime_passes(self) -> None:
        spy = Spy()
        run(spy, Schedule(budget=3, min_new_tokens=2, seed=7, stop=("x",), skip_special_tokens=True))
        assert spy.params[0] == {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": 3,
            "stop": ["x"],
            "stop_token_ids": None,
            "skip_special_tokens": True,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
            "min_new_tokens": 2,
            "sampling_seed": 7,
        }

    def test_a_round_trip_gives_the_client_another_object(self) -> None:
        spy = Spy()
        history = run(spy, Schedule(budget=3, attempts=(ABORT, Attempt("run", round_trip=True))))
        first, second = spy.samples[:2]
        assert first is not second
        views = [e.view for e in of(Called, history)]
        assert views[1] == of(Returned, history)[0].view

    def test_without_one_it_is_the_same_object(self) -> None:
        spy = Spy()
        run(spy, Schedule(budget=3, attempts=(ABORT, ABORT)))
        assert len({id(s) for s in spy.samples}) == 1

    def test_the_flag_before_the_call(self) -> None:
        spy = Spy()
        history = run(spy, Schedule(budget=3, attempts=(Attempt("flag"), Attempt("run"))))
        assert spy.flags[:2] == [True, False]
        assert of(Flagged, history) == [Flagged(0, 0, None)]
        assert [e.attempt for e in of(Requested, history)] == [1]

    def test_the_flag_in_mid_stream(self) -> None:
        history = run(reference(), Schedule(budget=4, attempts=(Attempt("flag", after=2),)), STREAM)
        assert of(Flagged, history) == [Flagged(0, 0, 0)]
        view = of(Returned, history)[0].view
        assert view.status == ABORTED
        assert 1 <= view.response_length <= 2  # the event that came with the flag may still be in a buffer

    def test_the_flag_that_the_sample_never_reaches_is_never_raised(self) -> None:
        history = run(reference(), Schedule(budget=2, attempts=(Attempt("flag", after=5),)), STREAM)
        assert of(Flagged, history) == []

    def test_calls_after_the_schedule_finish_the_sample(self) -> None:
        """A client that answers an error first gets another chance."""
        history = run(reference(), Schedule(budget=3, attempts=(ABORT,)))
        assert [e.attempt for e in of(Called, history)] == [0, 1, 2]
        assert of(Returned, history)[1].view.status == TRUNCATED

    def test_one_call_probes_a_finished_sample(self) -> None:
        history = run(reference(), Schedule(budget=1))
        called = of(Called, history)
        assert [e.view.status for e in called] == [PENDING, TRUNCATED]
        assert [e.attempt for e in of(Requested, history)] == [0]

    def test_an_attempt_on_a_finished_sample_is_the_probe(self) -> None:
        history = run(reference(), Schedule(budget=1, attempts=(Attempt(), Attempt(), Attempt("http", code=500))))
        assert sum(e.view.status in TERMINAL for e in of(Called, history)) == 1

    def test_extra_calls_are_bounded(self) -> None:
        """A sample that never ends is called a bounded number of times."""

        async def one_at_a_time(args: Any, sample: Any, params: dict[str, Any]) -> Any:
            sample = await reference_generate(args, sample, {**params, "max_new_tokens": sample.response_length + 1})
            sample.status = Sample.Status.ABORTED
            return sample

        history = run(one_at_a_time, Schedule(budget=99, attempts=(ABORT,)))
        assert len(of(Called, history)) <= 1 + EXTRA_CALLS + 1

    def test_a_preloaded_sample(self) -> None:
        history = run(reference(), Schedule(prompt="ab", budget=4, preload=2, script=(65, 66)))
        view = of(Called, history)[0].view
        assert (view.tokens, view.response_length, view.response, view.status) == ((256, 65, 66), 2, "AB", ABORTED)
        assert len(view.logprobs) == len(view.loss_mask) == 2

    @pytest.mark.parametrize("mode", MODES)
    def test_the_mode_is_the_target_s_and_the_engine_s(self, mode: str) -> None:
        history = run(reference(), Schedule(budget=3), mode)
        assert history.mode == mode
        assert [e.stream for e in of(Requested, history)] == [mode != PLAIN]
        assert len(of(Delivered, history)) == (1 if mode == PLAIN else 3)

    def test_a_tokenizer_that_needs_context_gives_both_texts(self) -> None:
        """As SentencePiece, which drops the space of a first word: what stands after the prompt has it."""

        class Spaced(SmallTokenizer):
            concatenative = False

            def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
                return super().decode(token_ids, skip_special_tokens).removeprefix(" ")

        runner = Runner(reference(), tokenizer=Spaced())
        try:
            history = runner.run(Schedule(prompt="a", budget=2, script=(258,)), PLAIN)
        finally:
            runner.close()
        assert of(Returned, history)[0].decoded == ("a a", " a a")

    def test_a_front_says_what_it_can_carry(self) -> None:
        for name, carries in (("inproc", True), ("aioresponses", False)):
            runner = Runner(reference(), name)
            try:
                assert runner.can_run(Schedule(attempts=(ABORT, Attempt("flag", after=1))), STREAM) is carries
                assert runner.can_run(Schedule(attempts=(ABORT,)), STREAM)
            finally:
                runner.close()

    def test_runs_do_not_share_state(self) -> None:
        runner = Runner(reference())
        try:
            for mode in (PLAIN, STREAM, INCREMENTAL):
                one = runner.run(Schedule(budget=3, attempts=(Attempt("flag"),)), mode)
                two = runner.run(Schedule(budget=3, attempts=(Attempt("flag"),)), mode)
                assert one == two
        finally:
            runner.close()


# Misdeeds


def raising(error: BaseException) -> Generate:
    async def generate(args: Any, sample: Any, params: dict[str, Any]) -> Any:
        raise error

    return generate


class TestMisdeeds:
    @pytest.mark.parametrize(
        "error",
        [ValueError("mine\nis long" * 100), SystemExit(3), asyncio.CancelledError(), GeneratorExit(), KeyError()],
    )
    def test_what_it_raises_is_recorded(self, error: BaseException) -> None:
        """sys.exit and CancelledError too: a target is other people's code."""
        history = run(raising(error))
        raised = of(Raised, history)
        assert raised
        assert raised[0].error == type(error).__name__
        assert len(raised[0].message) <= 300
        assert raised[0].view.status == PENDING
        assert not of(Returned, history)

    def test_the_user_s_interrupt_ends_everything(self) -> None:
        with pytest.raises(KeyboardInterrupt):
            run(raising(KeyboardInterrupt()))

    def test_cannot_judge_passes_through(self) -> None:
        with pytest.raises(CannotJudge, match="mine"):
            run(raising(CannotJudge("mine")))

    def test_a_mode_that_is_not_there(self) -> None:
        with pytest.raises(CannotJudge) as caught:
            run(FunctionTarget("plain only", reference_generate, None), Schedule(), STREAM)
        assert caught.value.not_applicable

    @pytest.mark.parametrize("result", [None, 3, "sample", {}])
    def test_what_is_no_sample(self, result: Any) -> None:
        async def generate(args: Any, sample: Any, params: dict[str, Any]) -> Any:
            return result

        with pytest.raises(CannotJudge, match=type(result).__name__):
            run(generate)

    def test_another_object_than_it_was_given(self) -> None:
        async def generate(args: Any, sample: Any, params: dict[str, Any]) -> Any:
            return await reference_generate(args, Sample.from_dict(sample.to_dict()), params)

        history = run(generate)
        assert of(Returned, history)[-1].view.status == TRUNCATED

    @pytest.mark.parametrize(
        "broken", [{"tokens": None}, {"status": "odd"}, {"loss_mask": 3}, {"rollout_log_probs": 1.5}]
    )
    def test_a_sample_that_cannot_be_read(self, broken: dict[str, Any]) -> None:
        async def generate(args: Any, sample: Any, params: dict[str, Any]) -> Any:
            vars(sample).update(broken)
            return sample

        halted = run(generate).events[-1]
        assert isinstance(halted, Halted)
        assert halted.kind == "view"
        assert "\n" not in halted.message

    def test_a_hang(self) -> None:
        async def generate(args: Any, sample: Any, params: dict[str, Any]) -> Any:
            await asyncio.get_running_loop().create_future()

        halted = run(generate).events[-1]
        assert isinstance(halted, Halted)
        assert (halted.kind, halted.message) == ("hang", "it waits for something that can never happen")

    def test_a_hang_ends_the_run_where_it_is(self) -> None:
        async def generate(args: Any, sample: Any, params: dict[str, Any]) -> Any:
            await asyncio.get_running_loop().create_future()

        history = run(generate)
        assert history.events[-1] == Halted(0, 0, "hang", "it waits for something that can never happen")

    def test_a_hang_at_a_later_call(self) -> None:
        calls: list[int] = []

        async def generate(args: Any, sample: Any, params: dict[str, Any]) -> Any:
            calls.append(1)
            if len(calls) > 1:
                await asyncio.Event().wait()
            return await reference_generate(args, sample, params)

        history = run(generate)
        halted = history.events[-1]
        assert isinstance(halted, Halted)
        assert halted.attempt == 1

    def test_an_endless_loop_that_yields(self) -> None:
        async def generate(args: Any, sample: Any, params: dict[str, Any]) -> Any:
            while True:  # noqa: ASYNC110
                await asyncio.sleep(1)

        assert of(Halted, run(generate))[0].kind == "hang"

    def test_an_endless_loop_that_swallows_everything(self) -> None:
        """CancelledError and every Exception: the run ends, and so does the next one on the same runner."""

        async def generate(args: Any, sample: Any, params: dict[str, Any]) -> Any:
            while True:
                try:
                    await asyncio.sleep(100)
                except (asyncio.CancelledError, Exception):
                    continue

        runner = Runner(FunctionTarget("stubborn", generate, generate))
        try:
            for _ in range(2):
                assert of(Halted, runner.run(Schedule(), PLAIN))[0].kind == "hang"
        finally:
            runner.close()

    def test_a_hang_that_swallows_cancellation(self) -> None:
        async def generate(args: Any, sample: Any, params: dict[str, Any]) -> Any:
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    continue

        assert of(Halted, run(generate))[0].kind == "hang"

    def test_cancelling_oneself(self) -> None:
        async def generate(args: Any, sample: Any, params: dict[str, Any]) -> Any:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(1)

        history = run(generate)
        assert of(Raised, history)[0].error == "CancelledError"

    @pytest.mark.parametrize("mode", [PLAIN, STREAM])
    @pytest.mark.parametrize("swallow", [False, True])
    def test_a_storm(self, mode: str, swallow: bool) -> None:
        """More requests than any bound: the engine answers no more and the call is cancelled."""

        async def generate(args: Any, sample: Any, params: dict[str, Any]) -> Any:
            url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
            async with aiohttp.ClientSession() as session:
                for _ in range(5 * MAX_REQUESTS):
                    try:
                        async with session.post(url, json={"input_ids": [1], "sampling_params": {}}) as reply:
                            await reply.read()
                    except aiohttp.ClientError:
                        continue
                    except asyncio.CancelledError:
                        if not swallow:
                            raise
            return sample

        history = run(generate, Schedule(budget=1), mode)
        halted = history.events[-1]
        assert isinstance(halted, Halted)
        assert halted.kind == "storm"
        assert MAX_REQUESTS < len(of(Requested, history)) <= 5 * MAX_REQUESTS

    def test_a_thread(self) -> None:
        async def generate(args: Any, sample: Any, params: dict[str, Any]) -> Any:
            await asyncio.to_thread(sum, [1, 2])
            return await reference_generate(args, sample, params)

        assert of(Returned, run(generate))[-1].view.status == TRUNCATED

    def test_params_that_no_json_knows(self) -> None:
        async def generate(args: Any, sample: Any, params: dict[str, Any]) -> Any:
            sample = await reference_generate(args, sample, dict(params))
            params["mine"] = {1, 2}
            return sample

        assert of(Returned, run(generate))[0].params["mine"] == "{1, 2}"

    def test_writes_to_args_are_seen(self) -> None:
        async def generate(args: Any, sample: Any, params: dict[str, Any]) -> Any:
            args.rollout_max_response_len = 1
            return await reference_generate(args, sample, params)

        assert of(Returned, run(generate))[0].writes == ("rollout_max_response_len",)

    def test_a_sample_that_cannot_be_made(self) -> None:
        class Picky(FunctionTarget):
            def new_sample(self, start: Start) -> Any:
                raise self.error

            error: Exception = ValueError("no such prompt")

        target = Picky("picky", reference_generate, None)
        with pytest.raises(CannotJudge, match=r"^picky: a sample cannot be made: ValueError: no such prompt$"):
            run(target)
        target.error = CannotJudge("picky has its own words", not_applicable=True)
        with pytest.raises(CannotJudge, match=r"^picky has its own words$") as caught:
            run(target)
        assert caught.value.not_applicable

    @pytest.mark.parametrize("tokens", [["a"], [True], [1.0], [None]])
    def test_tokens_that_are_no_integers(self, tokens: list[Any]) -> None:
        async def generate(args: Any, sample: Any, params: dict[str, Any]) -> Any:
            sample.tokens = tokens
            return sample

        message = "the sample cannot be read: TypeError: a token is no int"
        assert run(generate).events[-1] == Halted(0, 0, "view", message)

    def test_a_sample_that_no_json_knows(self) -> None:
        """The buffer needs JSON. A client whose sample does not survive it cannot be judged."""

        async def generate(args: Any, sample: Any, params: dict[str, Any]) -> Any:
            sample = await reference_generate(args, sample, params)
            sample.metadata["mine"] = {1, 2}
            return sample

        with pytest.raises((CannotJudge, TypeError)):
            run(generate, Schedule(budget=3, attempts=(ABORT, Attempt("run", round_trip=True))))
