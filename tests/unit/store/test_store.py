"""What every backend answers, verb by verb."""

import asyncio
import math
import random
import time

import msgspec
import pytest

from strop.errors import BadExclusion, BadReward, Fenced, IllegalTransition, StoreError, TurnTaken, UnknownId
from strop.store.base import Store
from strop.types import Event, Lease, Policy, Retry, Reward, Rollout, Sampling, Step, Task, Turn
from tests.limits import stretch


def rollout(id: str, **fields) -> Rollout:
    given = {"group": id.partition(".")[0], "member": 0, "task": Task(id="t", data={"q": ["é", 1.5]}), "created": 1.0}
    return Rollout(id=id, **(given | fields))


def turn(lease: Lease, k: int, **fields) -> Turn:
    given = {
        "prompt_ids": [1, 2, 3],
        "response_ids": [7, 8],
        "logprobs": [-0.1, -0.7],
        "versions": [(0, "1.0")],
        "finish": "stop",
        "started": float(k),
        "ended": k + 1.0,
    }
    name, number = lease.rollout.id, lease.attempt.number
    return Turn(id=f"{name}/{number}/{k}", rollout=name, attempt=number, **(given | fields))


def reward_event(lease: Lease, **data) -> Event:
    return Event(rollout=lease.rollout.id, attempt=lease.attempt.number, kind="reward", data=data, time=1.0)


async def leased(store: Store, id: str = "g1.0", **fields) -> Lease:
    await store.enqueue([rollout(id, **fields)])
    (lease,) = await store.lease("w", seconds=30)
    assert lease.rollout.id == id
    return lease


def retries(limit: int, *causes: str) -> dict[str, Retry]:
    return {cause: Retry(limit=limit) for cause in causes or ("lost_runner", "engine_error")}


# -- rollouts ----------------------------------------------------------------------------------------------------------


async def test_rollouts_come_back_as_they_were_given(store: Store):
    given = rollout("g1.0", mode="eval", seed=2**63 - 1, retries={"timeout": Retry(limit=5, wait=0.25)}, member=3)
    await store.enqueue([given])
    assert await store.get("g1.0") == given


async def test_rewards_of_a_group_come_afterwards_and_stay(store: Store):
    one, other = await leased(store, "g1.0"), await leased(store, "g1.1")
    await store.add_events([reward_event(one, name="style", value=0.5)])
    given = {"g1.0": [Reward(name="win", value=0.75), Reward(value=0.25)], "g1.1": [Reward(name="win", value=0.25)]}
    with pytest.raises(StoreError, match="is running"):
        await store.add_rewards(given)
    await store.finish("g1.0", 1, rewards=[Reward(value=1.0)])
    with pytest.raises(StoreError, match="is running"):  # and then nobody gets any
        await store.add_rewards(given)
    assert (await store.get("g1.0")).reward("win") is None
    await store.finish("g1.1", other.attempt.number)
    for _ in range(2):  # the answer to the first time was lost
        await store.add_rewards(given)
        found = await store.get("g1.0")
        assert [found.reward(name) for name in ("style", "win", "reward")] == [0.5, 0.75, 0.25]
        assert (await store.get("g1.1")).reward("win") == 0.25
        said = [event.data for event in await store.events("g1.0") if event.kind == "reward"]
        assert [data["name"] for data in said] == ["style", "win", "reward"]
    with pytest.raises(StoreError, match="'win' before"):
        await store.add_rewards({"g1.1": [Reward(name="win", value=0.5)]})
    with pytest.raises(BadReward):
        await store.add_rewards({"g1.1": [Reward(name="new", value=math.nan)]})
    with pytest.raises(BadReward, match="between -1e\\+09 and 1e\\+09"):
        await store.add_rewards({"g1.1": [Reward(name="new", value=1e39)]})
    with pytest.raises(UnknownId):
        await store.add_rewards({"g1.1": [Reward(name="new", value=1.0)], "nobody": []})
    assert (await store.get("g1.1")).reward("new") is None
    await store.add_rewards({})


async def test_rewards_afterwards_are_for_those_that_succeeded(store: Store):
    lease = await leased(store, "g1.0", retries={})
    await store.finish("g1.0", lease.attempt.number, cause="agent_error")
    with pytest.raises(StoreError, match="is failed"):
        await store.add_rewards({"g1.0": [Reward(value=1.0)]})


async def test_enqueueing_again_changes_nothing(store: Store):
    lease = await leased(store)
    assert await store.enqueue([rollout("g1.0", seed=5), rollout("g1.1")]) == 1
    assert await store.enqueue([]) == 0
    assert await store.get("g1.0") == lease.rollout
    assert [r.id for r in await store.list()] == ["g1.0", "g1.1"]


async def test_leases_go_in_order_of_enqueueing_each_with_its_own_key(store: Store):
    ids = ["z.0", "a.0", "m.0"]
    await store.enqueue([rollout(id) for id in ids])
    before = time.time()
    leases = [*await store.lease("w", seconds=30), *await store.lease("w", seconds=30, count=5)]
    assert [lease.rollout.id for lease in leases] == ids
    assert len({lease.attempt.key for lease in leases}) == 3
    assert leases[0].rollout.status == "running"
    assert leases[0].rollout.attempts == leases[0].attempt.number == 1
    assert 29 < leases[0].attempt.lease_until - before < 32
    assert await store.lease("w", seconds=30) == []


async def test_the_same_token_gives_the_same_leases_while_they_run(store: Store):
    await store.enqueue([rollout(f"g1.{i}") for i in range(4)])
    first = await store.lease("w", seconds=30, count=2, token="t1")
    assert await store.lease("w", seconds=30, count=2, token="t1") == first
    assert [lease.rollout.id for lease in await store.lease("w", seconds=30, token="t2")] == ["g1.2"]
    await store.finish("g1.0", 1)
    assert await store.lease("w", seconds=30, count=2, token="t1") == first[1:]
    await store.finish("g1.1", 1)
    assert [lease.rollout.id for lease in await store.lease("w", seconds=30, token="t1")] == ["g1.3"]


async def test_an_attempt_is_found_by_its_key_alone(store: Store):
    first, second = await leased(store, "g1.0"), await leased(store, "g1.1")
    for lease in (first, second):
        assert await store.attempt(lease.attempt.key) == lease.attempt
    await store.finish("g1.0", 1, cause="lost_runner", detail="gone")
    over = await store.attempt(first.attempt.key)
    assert (over.cause, over.detail, over.ended is not None) == ("lost_runner", "gone", True)
    (again,) = await store.lease("w", seconds=30)
    assert (await store.attempt(again.attempt.key)).number == 2
    key = first.attempt.key
    for wrong in ("", "nobody", key[:-1], key + "x", key.swapcase(), "k\x00", "\ud800", "é"):
        with pytest.raises(UnknownId, match="opens no attempt"):
            await store.attempt(wrong)


async def test_one_rollout_is_leased_once_however_many_ask(store: Store):
    await store.enqueue([rollout(f"g1.{i}") for i in range(5)])
    leases = await asyncio.gather(*(store.lease(f"w{i}", seconds=30) for i in range(20)))
    assert sorted(lease.rollout.id for (lease,) in filter(None, leases)) == [f"g1.{i}" for i in range(5)]


async def test_a_waiting_lease_wakes_when_something_is_queued(store: Store):
    waiting = asyncio.create_task(store.lease("w", seconds=30, wait=20))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await store.enqueue([rollout("g1.0")])
    assert len(await asyncio.wait_for(waiting, 5)) == 1


async def test_a_waiting_lease_gives_up(store: Store):
    began = time.monotonic()
    assert await store.lease("w", seconds=30, wait=0.1) == []
    assert 0.09 < time.monotonic() - began < stretch(2)


async def test_a_lease_that_nobody_waits_for_any_more_is_not_taken(store: Store):
    waiting = asyncio.create_task(store.lease("w", seconds=30, wait=20))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await store.enqueue([rollout("g1.0")])
    assert (await store.get("g1.0")).status == "queued"


async def test_finish_with_no_cause_succeeds(store: Store):
    lease = await leased(store)
    done = await store.finish("g1.0", 1, rewards=[Reward(value=0.25)], detail="fine")
    assert done == await store.get("g1.0")
    assert (done.status, done.reward(), done.detail, done.cause) == ("succeeded", 0.25, "fine", None)
    assert done.ended is not None
    assert done.ended >= lease.attempt.started
    (attempt,) = await store.attempts("g1.0")
    assert attempt.ended == done.ended


async def test_rewards_of_events_and_of_the_end_are_merged(store: Store):
    lease = await leased(store)
    await store.add_events(
        [
            reward_event(lease, name="format", value=0.1),
            reward_event(lease, name="format", value=0.2),
            reward_event(lease, name="reward", value=0.5),
            reward_event(lease, name="format", value=0.9, turn="g1.0/1/0"),
            reward_event(lease, name="style", value=True),
        ]
    )
    done = await store.finish("g1.0", 1, rewards=[Reward(value=1.0)])
    assert {r.target: r.value for r in done.rewards} == {
        ("format", None, None): 0.2,  # the later event
        ("reward", None, None): 1.0,  # the one given at the end
        ("format", "g1.0/1/0", None): 0.9,  # another target
        ("style", None, None): 1.0,
    }


async def test_a_failed_attempts_rewards_do_not_count(store: Store):
    lease = await leased(store)
    await store.add_events([reward_event(lease, name="reward", value=1.0)])
    await store.finish("g1.0", 1, cause="lost_runner")
    (second,) = await store.lease("w", seconds=30)
    assert second.attempt.number == 2
    done = await store.finish("g1.0", 2, rewards=[Reward(name="other", value=2.0)])
    assert [r.target[0] for r in done.rewards] == ["other"]


def exclude_event(lease: Lease, **data) -> Event:
    return Event(rollout=lease.rollout.id, attempt=lease.attempt.number, kind="exclude", data=data, time=1.0)


@pytest.mark.parametrize("cause", [None, "agent_error", "late"])
async def test_turns_that_an_attempt_excludes_stand_with_its_rollout(store: Store, cause):
    """However it ends: a failed rollout may be trained too."""
    lease = await leased(store, retries=retries(1, "lost_runner"))
    await store.add_events([exclude_event(lease, turn="g1.0/1/0", reason="title")])
    await store.finish("g1.0", 1, cause="lost_runner")
    (second,) = await store.lease("w", seconds=30)
    assert (await store.get("g1.0")).excluded == {}
    said = [("g1.0/2/1", "title"), ("g1.0/2/0", "probe"), ("g1.0/2/1", "summary")]
    await store.add_events([exclude_event(second, turn=turn, reason=reason) for turn, reason in said])
    if cause == "late":
        await store.cancel(["g1.0"], detail="too late", cause="late")
    else:
        await store.finish("g1.0", 2, cause=cause)
    assert (await store.get("g1.0")).excluded == {"g1.0/2/1": "summary", "g1.0/2/0": "probe"}  # the last word counts


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"turn": "g1.0/1/0"}, "does not fit.*missing required field `reason`.*Fix: write it as"),
        ({"turn": "g1.0/1/0", "reason": 7}, "does not fit"),
        ({"turn": "g1.0/1/0", "reason": "a title"}, "the reason 'a title' is not a word.*Fix: give"),
        ({"turn": "g1.0/1/0", "reason": "a/b"}, "is not a word"),
        ({"turn": "g1.0/1/0", "reason": "x" * 65}, "is not a word"),
        ({"turn": "", "reason": "title"}, "'' is not the id of a turn"),
    ],
)
async def test_exclusions_that_could_not_be_counted_are_refused(store: Store, data, says):
    lease = await leased(store)
    with pytest.raises(BadExclusion, match=says):
        await store.add_events([exclude_event(lease, **data)])
    assert await store.events("g1.0") == []


@pytest.mark.parametrize("cause", ["lost_runner", "agent_error", "timeout"])
async def test_a_cause_is_tried_again_as_often_as_the_rollout_says(store: Store, cause):
    await leased(store, retries=retries(1, cause))
    again = await store.finish("g1.0", 1, cause=cause, detail="first")
    assert (again.status, again.cause, again.ended) == ("queued", None, None)
    assert len(await store.lease("w", seconds=30)) == 1
    last = await store.finish("g1.0", 2, cause=cause, detail="second")
    assert (last.status, last.cause, last.detail) == ("failed", cause, "second")
    assert [(a.number, a.cause, a.detail) for a in await store.attempts("g1.0")] == [
        (1, cause, "first"),
        (2, cause, "second"),
    ]


async def test_each_cause_has_a_limit_of_its_own(store: Store):
    await leased(store, retries={"timeout": Retry(limit=1), "lost_runner": Retry(limit=2)})
    for number, cause in enumerate(["lost_runner", "timeout", "lost_runner"], 1):
        assert (await store.finish("g1.0", number, cause=cause)).status == "queued"
        await store.lease("w", seconds=30)
    assert (await store.finish("g1.0", 4, cause="timeout")).status == "failed"


@pytest.mark.parametrize("cause", ["agent_error", "timeout", "bad_reward"])
async def test_other_causes_fail_at_once(store: Store, cause):
    await leased(store, retries=retries(2))
    assert (await store.finish("g1.0", 1, cause=cause)).status == "failed"


async def test_a_pause_before_a_retry_grows_and_is_kept(store: Store):
    await leased(store, retries={"timeout": Retry(limit=3, wait=0.2)})
    for number, pause in ((1, 0.2), (2, 0.4)):
        before = time.time()
        again = await store.finish("g1.0", number, cause="timeout")
        assert 0 <= again.due - pause - before < 1
        assert await store.lease("w", seconds=30) == []
        (lease,) = await store.lease("w", seconds=30, wait=10)  # wakes when it is due, not at the end of the wait
        assert again.due <= lease.attempt.started < again.due + 3


async def test_being_interrupted_is_not_held_against_a_rollout(store: Store):
    await leased(store, retries={})
    for number in range(1, 5):
        again = await store.finish("g1.0", number, cause="interrupted", detail="told to stop")
        assert (again.status, again.due) == ("queued", 0.0)
        assert len(await store.lease("w", seconds=30)) == 1
    assert [a.cause for a in await store.attempts("g1.0")] == ["interrupted"] * 4 + [None]


async def test_the_same_end_told_twice_is_one_end(store: Store):
    await leased(store, "g1.0")
    done = await store.finish("g1.0", 1, rewards=[Reward(value=0.5)], detail="fine")
    assert await store.finish("g1.0", 1, rewards=[Reward(value=0.5)], detail="fine") == done
    for other in ({"rewards": [Reward(value=0.6)], "detail": "fine"}, {"cause": "timeout"}, {"detail": "other"}):
        with pytest.raises(Fenced):
            await store.finish("g1.0", 1, **other)
    await leased(store, "g1.1", retries=retries(1))
    again = await store.finish("g1.1", 1, cause="lost_runner", detail="x")
    assert await store.finish("g1.1", 1, cause="lost_runner", detail="x") == again
    assert (await store.attempts("g1.1"))[-1].number == 1


async def test_a_rollout_tried_again_comes_before_newer_ones(store: Store):
    await leased(store, "g1.0")
    await store.enqueue([rollout("g2.0")])
    await store.finish("g1.0", 1, cause="lost_runner")
    (lease,) = await store.lease("w", seconds=30)
    assert lease.rollout.id == "g1.0"


@pytest.mark.parametrize("value", [math.nan, math.inf, 1.7e308, -1e39, 1.1e9])
async def test_rewards_that_cannot_be_trained_on_are_refused(store: Store, value: float):
    lease = await leased(store)
    with pytest.raises(BadReward, match=r"'reward'.*give a"):
        await store.finish("g1.0", 1, rewards=[Reward(value=value)])
    with pytest.raises(BadReward, match="give a"):
        await store.add_events([reward_event(lease, name="reward", value=value)])
    for wrong in ({"name": "reward"}, {"value": "1"}, {"value": 1, "turn": "a", "agent": "b"}):
        with pytest.raises(BadReward):
            await store.add_events([reward_event(lease, **wrong)])
    assert (await store.get("g1.0")).status == "running"
    assert await store.events("g1.0") == []


async def test_cancel_ends_what_has_not_ended(store: Store):
    await leased(store, "g1.0")
    await store.finish("g1.0", 1, rewards=[Reward(value=1.0)])
    await leased(store, "g1.1")
    await store.enqueue([rollout("g1.2")])
    await store.cancel(["g1.0", "g1.1", "g1.2"], detail="late")
    found = {r.id: (r.status, r.cause, r.detail) for r in await store.list()}
    assert found == {
        "g1.0": ("succeeded", None, None),
        "g1.1": ("cancelled", "cancelled", "late"),
        "g1.2": ("cancelled", "cancelled", "late"),
    }
    assert await store.lease("w", seconds=30) == []
    with pytest.raises(UnknownId):
        await store.cancel(["nope"], detail="")


async def test_a_rollout_whose_time_ran_out_is_told_from_one_that_is_not_wanted(store: Store):
    await leased(store)
    await store.cancel(["g1.0"], detail="past the deadline", cause="late")
    done = await store.get("g1.0")
    assert (done.status, done.cause, done.detail) == ("cancelled", "late", "past the deadline")
    with pytest.raises(Fenced):
        await store.finish("g1.0", 1)


async def test_illegal_transitions_are_refused_by_name(store: Store):
    with pytest.raises(IllegalTransition, match=r"g1\.0.*running"):
        await store.enqueue([rollout("g1.0", status="running")])
    assert await store.list() == []


# -- fencing and reclaiming --------------------------------------------------------------------------------------------


async def test_an_attempt_that_is_over_may_not_write(store: Store):
    old = await leased(store)
    await store.finish("g1.0", 1, cause="lost_runner")
    for _ in range(2):  # queued again, then running under a second attempt
        for write in (
            store.add_turns([turn(old, 0)]),
            store.add_events([reward_event(old, name="reward", value=1.0)]),
            store.finish("g1.0", 1),
        ):
            with pytest.raises(Fenced, match=r"attempt 1 of rollout 'g1\.0'"):
                await write
        assert await store.heartbeat([("g1.0", 1)], seconds=30) == [("g1.0", 1)]
        await store.lease("w", seconds=30)
    assert await store.turns("g1.0", attempt=1) == []
    assert await store.events("g1.0", attempt=1) == []
    assert (await store.get("g1.0")).status == "running"


async def test_of_turns_with_one_fenced_none_is_recorded(store: Store):
    old = await leased(store, "g1.0")
    await store.finish("g1.0", 1)
    new = await leased(store, "g1.1")
    with pytest.raises(Fenced):
        await store.add_turns([turn(new, 0), turn(old, 0)])
    assert await store.turns("g1.1") == []


async def test_reclaim_takes_back_leases_that_ran_out(store: Store):
    await store.enqueue([rollout("g1.0"), rollout("g1.1"), rollout("g1.2", retries={})])
    await store.lease("w", seconds=0.01)
    await store.lease("w", seconds=60)
    await store.lease("w", seconds=0.01)
    await asyncio.sleep(0.05)
    assert sorted(await store.reclaim()) == ["g1.0", "g1.2"]
    assert [(r.status, r.cause) for r in await store.list()] == [
        ("queued", None),
        ("running", None),
        ("failed", "lost_runner"),
    ]
    assert await store.reclaim() == []


async def test_a_heartbeat_keeps_a_lease(store: Store):
    await store.enqueue([rollout("g1.0")])
    await store.lease("w", seconds=0.05)
    assert await store.heartbeat([("g1.0", 1), ("g1.0", 2), ("x.0", 1)], seconds=30) == [("g1.0", 2), ("x.0", 1)]
    await asyncio.sleep(0.1)
    assert await store.reclaim() == []


async def test_reclaiming_everything_never_uses_up_attempts(store: Store):
    await store.enqueue([rollout("g1.0", retries={})])
    for number in range(1, 4):
        (lease,) = await store.lease("w", seconds=60)
        assert lease.attempt.number == number
        assert await store.reclaim(everything=True) == ["g1.0"]
        assert (await store.get("g1.0")).status == "queued"
    await store.lease("w", seconds=60)
    assert (await store.finish("g1.0", 4, cause="lost_runner")).status == "failed"


# -- turns and events --------------------------------------------------------------------------------------------------


async def test_turns_come_back_bit_for_bit(store: Store):
    rng = random.Random(3)
    lease = await leased(store)
    logprobs = [rng.uniform(-30, 0) for _ in range(200)] + [-0.0, -5e-324, -1 / 3]
    given = turn(
        lease,
        0,
        prompt_ids=[0, 2**31 - 1, 151_643],
        response_ids=list(range(len(logprobs))),
        logprobs=logprobs,
        versions=[(0, "1.4"), (7, "1.5")],
        sampling=Sampling(temperature=0.7, stop=("\n",), seed=9),
        requested={"temperature": 0.2, "tools": [{"x": None}]},
        parent="g1.0/1/9",
        shared=2,
        branch="edited",
        choice=1,
        choices=2,
        messages=[{"role": "user", "content": "día 日\u2028"}],
        answer={"role": "assistant", "content": None},
        finish="tool_calls",
        agent="planner",
        policy="other",
        started=1e9 + 0.123456789,
    )
    await store.add_turns([given])
    (found,) = await store.turns("g1.0")
    assert found == given
    assert [x.hex() for x in found.logprobs] == [x.hex() for x in logprobs]


async def test_turns_are_in_the_order_their_requests_began(store: Store):
    lease = await leased(store)
    await store.add_turns([turn(lease, 2)])
    await store.add_turns([turn(lease, 0), turn(lease, 1)])
    assert [t.id for t in await store.turns("g1.0")] == ["g1.0/1/0", "g1.0/1/1", "g1.0/1/2"]


async def test_turns_of_the_last_attempt_are_the_default(store: Store):
    first = await leased(store)
    await store.add_turns([turn(first, 0)])
    await store.finish("g1.0", 1, cause="lost_runner")
    (second,) = await store.lease("w", seconds=30)
    await store.add_turns([turn(second, 0), turn(second, 1)])
    assert [t.id for t in await store.turns("g1.0")] == ["g1.0/2/0", "g1.0/2/1"]
    assert [t.id for t in await store.turns("g1.0", attempt=1)] == ["g1.0/1/0"]
    of_both = await store.turns_of([("g1.0", 2), ("g1.0", 1)])
    assert [[t.id for t in turns] for turns in of_both] == [["g1.0/2/0", "g1.0/2/1"], ["g1.0/1/0"]]
    assert list(of_both) == [await store.turns("g1.0"), await store.turns("g1.0", attempt=1)]


async def test_a_turn_is_recorded_once(store: Store):
    lease = await leased(store)
    await store.add_turns([turn(lease, 0)])
    await store.add_turns([turn(lease, 0)])  # said again, because the answer was lost
    with pytest.raises(StoreError, match=r"g1\.0/1/0"):
        await store.add_turns([turn(lease, 1), turn(lease, 0, response_ids=[7, 9])])
    assert await store.turns("g1.0") == [turn(lease, 0)]


@pytest.mark.parametrize(
    "wrong", [{"logprobs": [-0.1, math.nan]}, {"prompt_ids": [2**31]}, {"logprobs": [-math.inf, 0]}]
)
async def test_turns_that_cannot_be_trained_on_are_refused(store: Store, wrong):
    lease = await leased(store)
    with pytest.raises(StoreError, match=r"logprobs|prompt_ids"):
        await store.add_turns([turn(lease, 0, **wrong)])
    assert await store.turns("g1.0") == []


async def test_events_are_in_the_order_they_were_recorded(store: Store):
    lease = await leased(store)
    given = [Event(rollout="g1.0", attempt=1, kind="message", data={"n": n}, time=9.0 - n) for n in range(5)]
    await store.add_events([given[0]])
    await store.add_events(given[1:])
    await store.add_events(given[2:4])  # said again, because the answer was lost
    assert await store.events("g1.0") == given
    assert lease.rollout.id == "g1.0"
    with pytest.raises(StoreError, match="recorded before"):
        await store.add_events([msgspec.structs.replace(given[0], data={"n": 7})])


async def test_what_was_recorded_may_be_said_again_even_after_the_end(store: Store):
    lease = await leased(store)
    event = reward_event(lease, name="style", value=1.0)
    await store.add_turns([turn(lease, 0)])
    await store.add_events([event])
    twice = [Reward(value=0.25), Reward(value=0.5)]  # of the same target the last one counts
    done = await store.finish("g1.0", 1, rewards=twice)
    await store.add_turns([turn(lease, 0)])
    await store.add_events([event])
    assert await store.finish("g1.0", 1, rewards=twice) == done
    for new in (
        store.add_turns([turn(lease, 0), turn(lease, 1)]),
        store.add_events([event, reward_event(lease, value=2)]),
    ):
        with pytest.raises(Fenced):
            await new
    assert (len(await store.turns("g1.0")), len(await store.events("g1.0"))) == (1, 1)


async def test_an_events_id_belongs_to_its_attempt(store: Store):
    for id in ("g1.0", "g1.1"):
        await leased(store, id)
        await store.add_events([Event(id="1", rollout=id, attempt=1, kind="message", data={"of": id}, time=1.0)])
    assert [(e.id, e.data) for id in ("g1.0", "g1.1") for e in await store.events(id)] == [
        ("1", {"of": "g1.0"}),
        ("1", {"of": "g1.1"}),
    ]


@pytest.mark.parametrize("id", ["", "a/b", "a b", "é", "x" * 201, "a\0"])
async def test_ids_that_cannot_stand_in_an_address_are_refused(store: Store, id: str):
    with pytest.raises(StoreError, match="is called"):
        await store.enqueue([rollout(id, group="g")])


async def test_text_that_no_database_takes_is_kept_readable(store: Store):
    await leased(store, retries={})
    done = await store.finish("g1.0", 1, cause="agent_error", detail="a\0b")
    assert done.detail == "a\\x00b"


async def test_unknown_ids_are_named(store: Store):
    for look in (store.get("x.1"), store.attempts("x.1"), store.turns("x.1"), store.events("x.1")):
        with pytest.raises(UnknownId, match=r"'x\.1'"):
            await look
    with pytest.raises(UnknownId, match=r"'x\.1'"):
        await store.finish("x.1", 1)


async def test_one_failing_write_does_not_fail_its_neighbours(store: Store):
    lease = await leased(store)
    same, other = turn(lease, 0), turn(lease, 0, finish="length")
    writes = [store.add_turns([turn(lease, k)]) for k in range(1, 40)]
    writes[20:20] = [store.add_turns([same]), store.add_turns([other]), store.finish("nope", 1)]
    results = await asyncio.gather(*writes, return_exceptions=True)
    assert [type(r) for r in results if r is not None] == [TurnTaken, UnknownId]
    assert len(await store.turns("g1.0")) == 40


async def test_a_rollout_of_ones_own_is_nobody_elses(store: Store):
    """Begun and leased in one step; said twice it is the same lease."""
    mine = rollout("mine")
    lease = await store.begin(mine, "me", seconds=60)
    assert (lease.rollout.status, lease.attempt.number, lease.attempt.runner) == ("running", 1, "me")
    assert await store.begin(mine, "me", seconds=60) == lease
    assert await store.lease("another", seconds=60) == []
    assert (await store.attempt(lease.attempt.key)).rollout == "mine"
    await store.finish("mine", 1)
    with pytest.raises(StoreError, match="'mine' already"):
        await store.begin(mine, "me", seconds=60)
    await store.enqueue([rollout("queued")])
    with pytest.raises(StoreError, match="'queued' already"):
        await store.begin(rollout("queued"), "me", seconds=60)


async def test_a_lease_of_one_that_is_named(store: Store):
    await store.enqueue([rollout("first"), rollout("second")])
    (lease,) = await store.lease("w", seconds=60, rollout="second")
    assert (lease.rollout.id, lease.attempt.number) == ("second", 1)
    assert await store.lease("w", seconds=60, rollout="second") == []
    assert await store.lease("w", seconds=60, rollout="nowhere") == []
    assert [lease.rollout.id for lease in await store.lease("w", seconds=60, count=9)] == ["first"]


# -- looking -----------------------------------------------------------------------------------------------------------


async def test_a_page_of_json_is_as_new_as_the_last_change(store: Store):
    """One that is kept must not outlive what it tells, whichever verb changed it."""
    pages: list[bytes] = []

    async def look(changed: bool) -> list[str]:
        page, queued = [await store.list_json(**which) for which in ({}, {"status": "queued"})]
        assert page == await store.list_json()
        found = msgspec.json.decode(page, type=list[Rollout])
        assert found == [await store.get(one.id) for one in found]
        assert msgspec.json.decode(queued, type=list[Rollout]) == [one for one in found if one.status == "queued"]
        assert (page not in pages) == changed
        pages.append(page)
        return [one.status for one in found]

    assert await look(True) == []
    await store.enqueue([rollout("g1.0"), rollout("g1.1", retries=retries(1))])
    assert await look(True) == ["queued", "queued"]
    one, other = await store.lease("w", seconds=30, count=2)
    assert await look(True) == ["running", "running"]
    await store.add_turns([turn(one, 1)])
    await store.add_events([reward_event(one, name="style", value=0.5)])
    await store.heartbeat([("g1.0", 1), ("g1.1", 1)], seconds=60)
    await look(False)
    await store.finish("g1.0", one.attempt.number, rewards=[Reward(value=1.0)])
    assert await look(True) == ["succeeded", "running"]
    await store.add_rewards({"g1.0": [Reward(name="win", value=0.75)]})
    assert await look(True) == ["succeeded", "running"]
    await store.finish("g1.1", other.attempt.number, cause="lost_runner")
    assert await look(True) == ["succeeded", "queued"]
    await store.begin(rollout("g1.2"), "w", seconds=30)
    assert await look(True) == ["succeeded", "queued", "running"]
    await store.cancel(["g1.1"], detail="enough")
    assert await look(True) == ["succeeded", "cancelled", "running"]
    await store.reclaim(everything=True)
    assert await look(True) == ["succeeded", "cancelled", "queued"]


async def test_list_filters_and_pages(store: Store):
    await store.enqueue([rollout(f"g{i}.{m}", mode="eval" if i == 2 else "train") for i in range(3) for m in range(2)])
    await store.lease("w", seconds=30)
    assert [r.id for r in await store.list(group="g1")] == ["g1.0", "g1.1"]
    assert [r.id for r in await store.list(mode="eval")] == ["g2.0", "g2.1"]
    assert [r.id for r in await store.list(status="running")] == ["g0.0"]
    assert [r.id for r in await store.list(status="queued", mode="train", group="g0")] == ["g0.1"]
    assert [r.id for r in await store.list(mode="eval", newest=True)] == ["g2.1", "g2.0"]
    newest = await store.list(limit=4, newest=True)
    assert [*newest, *await store.list(after=newest[-1].id, newest=True)] == (await store.list())[::-1]
    first = await store.list(limit=4)
    rest = await store.list(limit=4, after=first[-1].id)
    assert [r.id for r in first + rest] == ["g0.0", "g0.1", "g1.0", "g1.1", "g2.0", "g2.1"]


async def test_wait_tells_every_change_once(store: Store):
    await store.enqueue([rollout("g1.0"), rollout("g1.1")])
    cursor, found = await store.wait(0, timeout=0)
    assert [(r.id, r.status) for r in found] == [("g1.0", "queued"), ("g1.1", "queued")]
    same, nothing = await store.wait(cursor, timeout=0.05)
    assert (same, nothing) == (cursor, [])
    await store.lease("w", seconds=30)
    await store.finish("g1.0", 1)
    later, found = await store.wait(cursor, timeout=0)
    assert later > cursor
    assert [(r.id, r.status) for r in found] == [("g1.0", "succeeded")]


async def test_wait_wakes_at_the_first_change(store: Store):
    await store.enqueue([rollout("g1.0")])
    cursor, _ = await store.wait(0, timeout=0)
    waiting = [asyncio.create_task(store.wait(cursor, timeout=20)) for _ in range(3)]
    await asyncio.sleep(0.05)
    began = time.monotonic()
    await store.lease("w", seconds=30)
    for _, found in await asyncio.gather(*waiting):
        assert [r.status for r in found] == ["running"]
    assert time.monotonic() - began < stretch(2)


async def test_wait_misses_nothing_under_load(store: Store):
    num, seen, cursor = 200, set(), 0

    async def work() -> None:
        while leases := await store.lease("w", seconds=30, count=3, wait=0.3):
            for lease in leases:
                await store.finish(lease.rollout.id, lease.attempt.number)

    workers = [asyncio.create_task(work()) for _ in range(8)]
    for i in range(0, num, 20):
        await store.enqueue([rollout(f"g{k}.0") for k in range(i, i + 20)])
    while len(seen) < num:
        cursor, found = await store.wait(cursor, timeout=5)
        assert found, f"only {len(seen)} of {num} were told"
        seen |= {r.id for r in found if r.status == "succeeded"}
    await asyncio.gather(*workers)


async def test_stats_count(store: Store):
    lease = await leased(store)
    await store.enqueue([rollout("g1.1")])
    await store.add_turns([turn(lease, 0), turn(lease, 1)])
    await store.add_events([reward_event(lease, name="reward", value=1)])
    assert await store.stats() == {
        "queued": 1,
        "running": 1,
        "succeeded": 0,
        "failed": 0,
        "cancelled": 0,
        "turns": 2,
        "events": 1,
        "steps": 0,
    }


# -- policies and steps ------------------------------------------------------------------------------------------------


def step(number: int, rollouts: list[str], lineage: int = 1, **fields) -> Step:
    return Step(lineage=lineage, number=number, rollouts=rollouts, **({"metrics": {"loss": 0.5}, "time": 1.0} | fields))


async def prepared(store: Store) -> None:
    await store.put_policy(Policy(name="main", version="1.0", model="strop/nano"))
    await store.enqueue([rollout(f"g{i}.0") for i in range(8)])
    assert await store.open_lineage(after=0) == 1


async def version(store: Store) -> str:
    (policy,) = await store.policies()
    return policy.version


async def test_policies_are_replaced_by_name(store: Store):
    await store.put_policy(Policy(name="main", version="1.0", model="a"))
    await store.put_policy(Policy(name="main", version="1.1", model="b", kind="prompt"))
    await store.put_policy(Policy(name="judge", version="1.0", model="c"))
    assert await store.policies() == [
        Policy(name="judge", version="1.0", model="c"),
        Policy(name="main", version="1.1", model="b", kind="prompt"),
    ]


async def test_a_step_comes_back_as_it_was_committed(store: Store):
    await prepared(store)
    given = step(
        1,
        ["g3.0", "g0.0", "g2.0"],
        dropped={"g0.0": "zero_std", "g5.0": "late"},
        metrics={"reward": 1 / 3, "loss": -2.0},
        checkpoint="checkpoints/1",
        digest="abc",
    )
    await store.commit_step(given)
    await store.commit_step(given)  # said again, because the answer was lost
    assert await store.steps() == [given]
    assert await version(store) == "1.1"


async def test_a_step_says_what_became_of_its_rollouts_tokens(store: Store):
    await prepared(store)
    tokens = {"g0.0": {"g0.0/1/0": {"trained": 75}, "g0.0/1/1": {"trained": 3, "no_loss": 2}}}
    await store.commit_step(step(1, ["g0.0", "g1.0"]), tokens)
    await store.commit_step(step(1, ["g0.0", "g1.0"]), tokens)  # said again, because the answer was lost
    assert [(await store.get(id)).tokens for id in ("g0.0", "g1.0", "g2.0")] == [tokens["g0.0"], {}, {}]
    await store.open_lineage(after=0)
    again = {"g0.0": {"g0.0/1/0": {"zero_variance": 75}}}
    await store.commit_step(step(1, ["g0.0"], lineage=2), again)  # another line made something else of it
    assert (await store.get("g0.0")).tokens == again["g0.0"]


async def test_a_checkpoint_is_named_once_it_is_whole(store: Store):
    """After its step was committed, and maybe after others were."""
    await prepared(store)
    given = [step(1, ["g0.0"]), step(2, ["g1.0"])]
    for one in given:
        await store.commit_step(one)
    for _ in range(2):  # said again, because the answer was lost
        await store.name_checkpoint(1, 1, "step-000001-1")
    await store.commit_step(given[0])  # and so may the step be
    assert await store.steps() == [msgspec.structs.replace(given[0], checkpoint="step-000001-1"), given[1]]
    with pytest.raises(StoreError, match=r"the checkpoint of step 1\.1 is 'step-000001-1'"):
        await store.name_checkpoint(1, 1, "another")
    with pytest.raises(UnknownId, match=r"no step 1\.3"):
        await store.name_checkpoint(1, 3, "step-000003-1")
    await store.open_lineage(after=1)
    with pytest.raises(StoreError, match=r"step 1\.2 was superseded"):  # by whoever still holds the old line
        await store.name_checkpoint(1, 2, "step-000002-1")
    assert [s.checkpoint for s in await store.steps(superseded=True)] == ["step-000001-1", None]


async def test_metrics_may_be_nan(store: Store):
    await prepared(store)
    await store.commit_step(step(1, [], metrics={"kl": math.nan}))
    (found,) = await store.steps()
    assert math.isnan(found.metrics["kl"])


async def test_nothing_is_committed_or_consumed_twice(store: Store):
    await prepared(store)
    await store.commit_step(step(1, ["g0.0"], dropped={"g1.0": "late"}))
    for again, says in (
        (step(1, ["g2.0"]), "step 1 was committed"),
        (step(2, ["g2.0", "g0.0"]), r"'g0\.0' was consumed by step 1"),
        (step(2, ["g1.0"]), r"'g1\.0' was consumed by step 1"),
        (step(2, ["g2.0", "g2.0"]), "twice"),
        (step(2, ["nope.0"]), r"no rollout 'nope\.0'"),
    ):
        with pytest.raises(StoreError, match=says):
            await store.commit_step(again)
    assert [s.number for s in await store.steps()] == [1]
    assert await version(store) == "1.1"
    await store.commit_step(step(2, ["g2.0"]))  # a refused step left nothing behind


async def test_a_new_line_supersedes_later_steps_and_may_consume_their_rollouts_again(store: Store):
    await prepared(store)
    for number in (1, 2, 3):
        await store.commit_step(step(number, [f"g{number}.0"]))
    assert await store.open_lineage(after=2) == 2
    assert await version(store) == "1.2"
    assert [s.version for s in await store.steps()] == ["1.1", "1.2"]
    with pytest.raises(StoreError, match="replaced"):
        await store.commit_step(step(3, ["g4.0"], lineage=1))  # whoever still holds the old line
    with pytest.raises(StoreError, match="consumed by step 2"):
        await store.commit_step(step(3, ["g2.0"], lineage=2))
    await store.commit_step(step(3, ["g3.0"], lineage=2))
    assert [(s.version, s.superseded) for s in await store.steps(superseded=True)] == [
        ("1.1", False),
        ("1.2", False),
        ("1.3", True),
        ("2.3", False),
    ]
    assert await version(store) == "2.3"
    assert (await store.stats())["steps"] == 3
    assert await store.open_lineage(after=3) == 3
    assert await version(store) == "2.3"
    assert await store.open_lineage(after=0) == 4
    assert await version(store) == "1.0"
    assert await store.steps() == []


async def test_a_step_raises_every_policy_and_a_new_line_takes_all_back(store: Store):
    await prepared(store)
    await store.put_policy(Policy(name="critic", version="1.0", model="other"))

    async def versions() -> dict[str, str]:
        return {policy.name: policy.version for policy in await store.policies()}

    await store.commit_step(step(1, ["g1.0"]))
    assert await versions() == {"main": "1.1", "critic": "1.1"}
    await store.commit_step(step(2, ["g2.0"]))
    await store.open_lineage(after=1)
    assert await versions() == {"main": "1.1", "critic": "1.1"}
    await store.open_lineage(after=0)
    assert await versions() == {"main": "1.0", "critic": "1.0"}


async def test_without_a_policy_there_is_nothing_to_raise(store: Store):
    with pytest.raises(UnknownId, match="no policy"):
        await store.commit_step(step(1, []))
    with pytest.raises(UnknownId, match="no policy"):
        await store.open_lineage(after=0)
    assert await store.steps() == []


async def test_a_line_begins_only_where_there_is_something(store: Store):
    await prepared(store)
    with pytest.raises(UnknownId, match="no step 5"):
        await store.open_lineage(after=5)
    assert await store.open_lineage(after=0) == 2  # those that were refused used up no number


async def test_what_failed_is_tried_again_only_while_no_step_was_made(store):
    """A run that is opened again may have had its agent mended; what was trained on stays as it was."""
    await store.put_policy(Policy(name="main", version="1.0", model="m"))
    await store.enqueue([Rollout(id="g.0", group="g", member=0, created=0.0, task=Task(id="t"))])
    for _ in range(2):
        (lease,) = await store.lease("w", seconds=30)
        await store.finish("g.0", lease.attempt.number, cause="agent_error", detail="broken")
        assert await store.reclaim() == []
        assert await store.reclaim(everything=True) == ["g.0"]
        assert (await store.get("g.0")).status == "queued"
    (lease,) = await store.lease("w", seconds=30)
    await store.finish("g.0", lease.attempt.number, cause="agent_error", detail="broken")
    await store.commit_step(Step(lineage=1, number=1, rollouts=["g.0"], metrics={}, time=0.0))
    assert await store.reclaim(everything=True) == []
    assert (await store.get("g.0")).status == "failed"
