"""[GROUP] on histories by hand: one that holds, and one for every way to break it."""

from __future__ import annotations

import pytest

from harness.checkers import HOLDS
from harness.history import ABORTED, COMPLETED, FAILED, PENDING, TRUNCATED, Called, Flagged
from harness.rollouts import Aborting, Member, Restarted
from tests.unit.histories import EOS, view
from tests.unit.loop_histories import (
    began,
    broke,
    call,
    ended,
    finding,
    groups,
    judge,
    member,
    problem,
    stopped,
    taken,
)

LOST = "is lost: neither handed to training nor in the buffer"
PART = view((5,), ABORTED)


def waiting(sample: int) -> tuple[tuple[Member, ...], ...]:
    return ((member(sample, PART),),)


def test_GROUP_holds_where_every_sample_is_handed_over_or_waits() -> None:
    first = [began(), taken((0,), (1,)), *call(0), *call(1, ids=(5,), finish="abort"), ended(groups((0,)), waiting(1))]
    again = [
        began(2),
        taken((1,), rollout=2),
        *call(1, 1, before=PART, ids=(6,)),
        ended(groups((1,)), rollout=2),
    ]
    assert judge("GROUP", first, again) is HOLDS


def test_GROUP_is_not_judged_before_a_rollout_has_ended() -> None:
    assert judge("GROUP", began(), taken((0,)), call(0)) is None


# Size


@pytest.mark.parametrize(("group", "sample"), [((3,), 3), ((), -1)])
def test_GROUP_is_broken_by_a_group_that_is_begun_with_another_size(group: tuple[int, ...], sample: int) -> None:
    said = f"a group of {len(group)} is generated, not of 2"
    assert problem("GROUP", began(), taken((0, 1), group), members=2) == (sample, said)


@pytest.mark.parametrize(("group", "sample"), [((3, 4, 5), 3), ((), -1)])
@pytest.mark.parametrize("trained", [True, False])
def test_GROUP_is_broken_by_a_group_that_comes_back_with_another_size(
    group: tuple[int, ...], sample: int, trained: bool
) -> None:
    parts = (groups(group), ()) if trained else ((), groups(group))
    said = f"comes back in a group of {len(group)}, not of 2"
    assert problem("GROUP", began(), ended(*parts), members=2) == (sample, said)


# Finished members


def test_GROUP_is_broken_by_asking_again_for_a_finished_member() -> None:
    found = finding("GROUP", began(), call(3), began(2), call(3, 1, before=view((5,), COMPLETED)))
    assert (found.sample, found.message) == (3, "had finished, and is generated again")
    assert (found.attempt, found.rollout) == (1, 2)


def test_GROUP_holds_where_a_call_on_a_finished_member_asks_nothing() -> None:
    done = view((5,), COMPLETED)
    called, _, _, returned = call(0, 1, before=done, after=done)
    assert judge("GROUP", began(), taken((0,)), call(0), called, returned, ended(groups((0,)))) is HOLDS


@pytest.mark.parametrize("status", [FAILED, ABORTED, PENDING])
def test_GROUP_holds_where_a_member_that_has_not_finished_is_generated_again(status: str) -> None:
    first = call(0, after=view((5,), status))
    assert judge("GROUP", began(), first, call(0, 1, before=view((5,), status)), ended(groups((0,)))) is HOLDS


# Prefixes


def test_GROUP_is_broken_by_a_prefix_that_survives_where_partial_rollout_is_off() -> None:
    said = "goes on from 1 kept tokens, though partial rollout is off"
    assert problem("GROUP", began(), call(2, 1, before=PART), partial=False) == (2, said)


def test_GROUP_holds_where_a_finished_member_is_called_although_partial_rollout_is_off() -> None:
    done = view((5,), COMPLETED)
    called, _, _, returned = call(0, 1, before=done, after=done)
    assert judge("GROUP", began(), call(0), called, returned, ended(groups((0,))), partial=False) is HOLDS


def test_GROUP_holds_where_a_member_begins_again_and_partial_rollout_is_off() -> None:
    assert judge("GROUP", began(), call(0), ended(groups((0,))), partial=False) is HOLDS


# What comes back


@pytest.mark.parametrize("status", [ABORTED, PENDING])
def test_GROUP_is_broken_by_a_reward_for_what_has_not_finished(status: str) -> None:
    scored = member(7, view((5, 6), status), scored=True)
    said = f"has a reward, though it is {status} with 2"
    assert problem("GROUP", began(), ended(buffer=((scored,),))) == (7, said)


@pytest.mark.parametrize("status", [TRUNCATED, COMPLETED, FAILED])
def test_GROUP_holds_where_what_has_ended_is_scored(status: str) -> None:
    assert judge("GROUP", began(), ended(((member(0, view((5,), status), scored=True),),))) is HOLDS


def test_GROUP_is_broken_by_a_sample_that_is_there_twice() -> None:
    said = "is there twice when the rollout has ended"
    assert problem("GROUP", began(), ended(groups((0,)), groups((0,)))) == (0, said)


def test_GROUP_is_broken_by_a_sample_that_was_handed_over_and_comes_back() -> None:
    said = "comes back, though rollout 1 handed it over"
    told = began(), ended(groups((4,))), began(2), ended(buffer=groups((4,)), rollout=2)
    assert problem("GROUP", *told) == (4, said)


def test_GROUP_is_broken_by_a_sample_that_was_handed_over_and_is_generated_again() -> None:
    said = "is generated again, though rollout 1 handed it over"
    assert problem("GROUP", began(), ended(groups((4,))), began(2), taken((3,), (4,), rollout=2)) == (4, said)


@pytest.mark.parametrize("status", [ABORTED, PENDING])
def test_GROUP_is_broken_by_training_on_what_has_not_finished(status: str) -> None:
    two = member(1, view((5,), COMPLETED), view((5,), status))
    said = f"is handed to training {status} with 1"
    assert problem("GROUP", began(), ended(((member(0), two),)), members=2) == (1, said)


HALF = [began(), taken((1,)), *call(1, ids=(5,), finish="abort")]


@pytest.mark.parametrize("status", [ABORTED, PENDING])
def test_GROUP_is_broken_by_training_on_what_was_called_completed_after_its_last_call(status: str) -> None:
    half = [began(), taken((1,)), *call(1, ids=(5,), finish="abort", after=view((5,), status))]
    said = f"is handed to training completed, but its last call left it {status}"
    assert problem("GROUP", half, ended(groups((1,)))) == (1, said)


def test_GROUP_holds_where_the_last_call_completed_it_or_the_loop_gave_it_up() -> None:
    done = [*HALF, *call(1, 1, before=PART, ids=(6,))]
    assert judge("GROUP", done, ended(groups((1,)))) is HOLDS
    assert judge("GROUP", HALF, ended(((member(1, view((5,), FAILED)),),))) is HOLDS
    for full, budget in ((view((5,), TRUNCATED), 1), (view((EOS,), COMPLETED), 4)):
        half = [began(budget=budget), *HALF[1:]]
        assert judge("GROUP", half, ended(((member(1, full),),))) is HOLDS


def test_GROUP_is_broken_by_a_half_answer_that_is_called_truncated() -> None:
    said = "is handed to training truncated, but its last call left it aborted"
    assert problem("GROUP", HALF, ended(((member(1, view((5,), TRUNCATED)),),))) == (1, said)


def test_GROUP_lets_a_finished_sample_be_called_where_partial_rollout_is_off() -> None:
    done = view((5,), TRUNCATED)
    told = [began(), taken((0,)), *call(0, finish="abort", after=view((5,), ABORTED)), Called(1, 0, {}, done)]
    assert judge("GROUP", told, ended(groups((0,))), budget=1, partial=False) is not None


def test_GROUP_does_not_know_how_a_call_of_the_process_before_left_a_sample() -> None:
    told = [*HALF, Restarted((), ()), began(2), ended(groups((1,)), rollout=2)]
    assert judge("GROUP", told) is HOLDS


def test_GROUP_holds_where_failed_samples_are_trained_on() -> None:
    assert judge("GROUP", began(), ended(((member(0, view((5,), FAILED)),),))) is HOLDS


def test_GROUP_is_broken_by_a_sample_that_is_nowhere() -> None:
    assert problem("GROUP", began(), taken((0,), (2,), (1,)), ended(groups((0,)))) == (1, LOST)


def test_GROUP_is_broken_by_a_sample_that_is_lost_rollouts_later() -> None:
    told = [began(), taken((0,), (1,)), ended(groups((0,)), groups((1,))), began(2), ended(rollout=2)]
    found = finding("GROUP", told)
    assert (found.sample, found.message, found.rollout) == (1, LOST, 2)


@pytest.mark.parametrize("given", [{"partial": False}, {"spanning": True}])
def test_GROUP_asks_for_no_sample_that_may_be_begun_anew_or_still_runs(given: dict[str, bool]) -> None:
    assert judge("GROUP", began(), taken((0,), (1,)), ended(groups((0,))), **given) is HOLDS


# Checkpoints


def test_GROUP_holds_where_a_buffer_is_loaded_as_it_was_saved() -> None:
    told = [began(), taken((0,), (1,)), ended(groups((0,)), waiting(1)), Restarted(waiting(1), waiting(1))]
    again = [began(2), taken((1,), rollout=2), *call(1, 1, before=PART), ended(groups((1,)), rollout=2)]
    assert judge("GROUP", told, again) is HOLDS


def test_GROUP_is_broken_by_a_buffer_that_is_not_loaded() -> None:
    said = "was in the buffer when it was saved, and is not when it is loaded"
    assert problem("GROUP", began(), Restarted(groups((0,), (1,)), groups((0,)))) == (1, said)


def test_GROUP_is_broken_by_other_tokens_than_were_saved() -> None:
    said = "was saved with other tokens than are loaded"
    fewer = ((member(1, view((), ABORTED)),),)
    assert problem("GROUP", began(), Restarted(waiting(1), fewer)) == (1, said)


def test_GROUP_holds_where_a_new_process_does_not_know_what_it_has_not_loaded() -> None:
    """Samples that were in no buffer may be made again."""
    told = [began(), taken((0,), (1,)), *call(1), Restarted((), ()), began(2), taken((1,), rollout=2), *call(1, 1)]
    assert judge("GROUP", told, ended(groups((1,)), rollout=2)) is HOLDS


def test_GROUP_knows_what_had_finished_in_the_process_before() -> None:
    told = [began(), Restarted(groups((1,)), groups((1,))), began(2)]
    assert problem("GROUP", told, call(1)) == (1, "had finished, and is generated again")


def test_GROUP_knows_what_had_not_finished_in_the_process_before() -> None:
    half = ((member(1, view((5,), COMPLETED), PART),),)
    assert judge("GROUP", began(), Restarted(half, half), began(2), call(1), ended(groups((1,)))) is HOLDS


def test_GROUP_knows_what_was_handed_over_in_the_process_before() -> None:
    told = [began(), ended(groups((0,))), Restarted((), ()), began(2), taken((0,), rollout=2)]
    assert problem("GROUP", told) == (0, "is generated again, though rollout 1 handed it over")


def test_GROUP_asks_after_what_was_loaded() -> None:
    told = [began(), taken((0,)), ended(buffer=waiting(0)), Restarted(waiting(0), waiting(0)), began(2)]
    assert problem("GROUP", told, ended(rollout=2)) == (0, LOST)


# Samples on which a call has failed


def test_GROUP_is_broken_by_a_sample_whose_call_raised_and_that_nobody_tries_again() -> None:
    told = [began(), taken((0,), (3,), (2,)), *call(3, raises="OSError"), *call(2, raises="ValueError"), *call(0)]
    said = "is lost: its call raised ValueError, and nobody tries again"
    assert problem("GROUP", told, stopped(groups((0,), (3,))), spanning=True) == (2, said)


RAISED = [began(), taken((0,)), *call(0, raises="OSError")]


@pytest.mark.parametrize(
    ("told", "given"),
    [
        ([*RAISED, stopped(waiting(0))], {}),
        ([*RAISED, ended(groups((0,))), stopped()], {}),
        ([*RAISED, *call(0, 1, finish="abort"), stopped()], {}),
        ([*RAISED, *call(0, 1, raises="CancelledError"), stopped()], {}),
        ([*RAISED, stopped()], {"partial": False}),
        ([*RAISED, Restarted((), ()), began(2), stopped()], {}),
    ],
    ids=["waits", "trained on", "tried again", "cancelled", "partial rollout is off", "another process"],
)
def test_GROUP_takes_no_other_sample_for_lost(told: list[object], given: dict[str, bool]) -> None:
    rest = [began(9), ended(rollout=9)]  # where it is judged
    assert judge("GROUP", told, rest, **{"spanning": True, **given}) is HOLDS  # type: ignore[arg-type]


# Rollouts that raise


def test_GROUP_is_broken_by_samples_that_are_lost_where_the_loop_raises() -> None:
    told = [began(), taken((2,), (1,), (0,)), broke(buffer=groups((0,)))]
    assert problem("GROUP", told) == (1, "is lost: rollout 1 raises KeyError: 'x'")


@pytest.mark.parametrize(
    "told",
    [
        [broke(passed_on=True)],
        [Aborting(1), broke()],
        [Flagged(0, 0, None), broke()],
        [broke(buffer=groups((1,)))],
    ],
    ids=["generate raised it", "engines aborted", "flag", "all in the buffer"],
)
def test_GROUP_does_not_ask_after_samples_elsewhere(told: list[object]) -> None:
    start = [began(), taken((0,), (1,)), ended(groups((0,)), groups((1,))), began(2), taken((1,), rollout=2)]
    assert judge("GROUP", start, told) is HOLDS  # type: ignore[arg-type]
