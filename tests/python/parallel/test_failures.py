# SPDX-License-Identifier: Apache-2.0
"""Ranks that die, stop, fail or differ: the others are told who it was, and none waits for ever."""
import gc
import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from ranks import Workers

import switchyard.torch as st
from switchyard import CommunicationError, InvalidArgument, Unsupported

E, K, H, I = 6, 2, 16, 8


def step(experts, num_tokens=5, hidden=H, dtype=torch.float32):
    random = torch.Generator().manual_seed(1)
    ids = torch.rand(num_tokens, E, generator=random).topk(K, 1).indices
    own = len(experts.placement.experts_of(experts.rank))
    weights = (torch.randn(own, 2 * I, hidden).requires_grad_(), torch.randn(own, hidden, I))
    x = torch.randn(num_tokens, hidden, dtype=dtype).requires_grad_()
    y = experts.moe(experts.plan(ids), x, torch.rand(num_tokens, K), *weights)
    y.sum().backward()


def run_until_it_fails(group, timeout):
    experts = st.ExpertParallel(group, E, timeout=timeout)
    begin = time.monotonic()
    with pytest.raises(CommunicationError) as error:
        while time.monotonic() < begin + 60:
            step(experts)
    experts.close()
    return str(error.value)


def end_rank_2(three, how, timeout):
    """Returns the errors of ranks 0 and 1 when rank 2 gets a signal in the middle of its steps."""
    three.run(3, leave_open)  # so that what is imported and set up once is there
    three.start(3, run_until_it_fails, timeout)
    time.sleep(1.5)
    os.kill(three.processes[2].pid, how)
    begin = time.monotonic()
    answers = three.answers((0, 1), 60)
    assert all(ok for ok, _ in answers), answers
    return [error for _, error in answers], time.monotonic() - begin


def test_a_rank_that_stops_is_named_at_the_deadline(three):
    errors, seconds = end_rank_2(three, signal.SIGSTOP, 5.0)
    os.kill(three.processes[2].pid, signal.SIGCONT)
    three.answers((2,))
    assert all(re.search(r"rank 2\b", error) for error in errors), errors
    assert seconds > 2


def test_a_rank_that_dies_is_named_long_before_the_deadline(three):
    errors, seconds = end_rank_2(three, signal.SIGKILL, 40.0)
    assert all(re.search(r"rank 2\b", error) for error in errors), errors
    assert not any(re.search(r"rank [01]\b.*(ended|missing)", error) for error in errors), errors
    assert seconds < 20


def setting_up(group, how):
    """Rank 1 leaves, or does not come, before there is memory that ranks share."""
    experts = st.ExpertParallel(group, E, timeout=3 if how == "sleeps" else 30)
    if group.rank() == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(8)
        experts.close()
        return "late", 0
    begin = time.monotonic()
    with pytest.raises(CommunicationError) as error:
        step(experts)
    experts.close()
    return str(error.value), time.monotonic() - begin


@pytest.mark.parametrize("how, text, most", [("sleeps", "rank 1 did not arrive within 3 s", 15.0),
                                             ("dies", r"rank 1 has ended \(process \d+\)", 15.0)])
def test_a_rank_that_is_missing_when_things_are_set_up_is_named(three, how, text, most):
    three.start(3, setting_up, how)
    for ok, result in three.answers((0, 2), 40):
        assert ok, result
        assert re.search(text, result[0]), result
        assert result[1] < most
    if how == "sleeps":
        three.answers((1,))


def disagree(group, kind):
    experts = st.ExpertParallel(group, E, timeout=10)
    step(experts)
    dist.barrier(group)  # so that nobody is still in the step when another fails
    odd = group.rank() == 1
    with pytest.raises((CommunicationError, InvalidArgument, Unsupported, ValueError)) as error:
        if kind == "dtype":
            step(experts, dtype=torch.float64 if odd else torch.float32)
        elif kind == "hidden":
            step(experts, hidden=2 * H if odd else H)
        elif kind == "capacity":
            experts.set_capacity(40 if odd else 48)
            plan = experts.plan(torch.zeros(3, K, dtype=torch.int64))
            plan.check()
        elif kind == "ids":
            experts.plan(torch.tensor([[0, E if odd else 1]]))
        elif kind == "shape":
            experts.plan(torch.zeros(3 if odd else (3, K), dtype=torch.int64))
            step(experts)
        else:
            plan = experts.plan(torch.zeros(0, K, dtype=torch.int64))
            own = experts.num_local_experts
            experts.moe(plan, torch.ones(0, H), torch.ones(0, K), torch.ones(own, 2 * I, H),
                        torch.ones(own, H, I), constants=("a" if odd else 7, 1, 1))
    experts.close()
    return type(error.value).__name__, str(error.value)


@pytest.mark.parametrize("kind, own, others", [
    ("dtype", "x is torch.float64, but must be float32 or bfloat16", "rank 1"),
    ("hidden", "rank 1", "rank 1"),
    ("capacity", "capacity", "capacity"),
    ("ids", "rank 1: expert_ids.0,1. is 6, which is neither -1 nor an expert of 6",
     "rank 1: expert_ids.0,1. is 6, which is neither -1 nor an expert of 6"),
    ("shape", r"expert_ids is torch.int64 \[3\], but must be int32 or int64 \[T,K\]", "rank 1"),
    ("constants", "could not convert string to float", "rank 1"),
])
def test_what_one_rank_does_wrong_all_ranks_are_told(workers, kind, own, others):
    results = workers.run(3, disagree, kind)
    for rank, (_, text) in enumerate(results):
        assert re.search(own if rank == 1 else others, text, re.S), results


def go_on_after_bad_ids(group):
    experts = st.ExpertParallel(group, E, timeout=10)
    with pytest.raises(InvalidArgument):
        experts.plan(torch.tensor([[0, E + group.rank() - 1]]))
    step(experts)


def test_ranks_go_on_after_bad_ids(workers):
    workers.run(2, go_on_after_bad_ids)


def overflow(group):
    experts = st.ExpertParallel(group, E, row_capacity=4, timeout=10)
    plan = experts.plan(torch.zeros(3, K, dtype=torch.int64) + torch.arange(K))
    with pytest.raises(InvalidArgument, match="overflow: rank 0 needs 12 rows, but the capacity is "
                       "4 on every rank"):
        plan.check()
    assert plan.needed.tolist() == [1, 12, 0, 6, 0]
    experts.set_capacity(12)
    experts.plan(torch.zeros(3, K, dtype=torch.int64) + torch.arange(K)).check()


def test_rows_that_find_no_room_are_an_error_on_every_rank(workers):
    workers.run(2, overflow)


def use_after_destroying(group):
    experts = st.ExpertParallel(group, E, timeout=10)
    step(experts)
    dist.destroy_process_group()
    with pytest.raises(CommunicationError, match="the process group was destroyed: "
                       r"call destroy_process_group\(\) after the last use"):
        step(experts)
    experts.close()




def abort_others(group):
    experts = st.ExpertParallel(group, E, timeout=20)
    if group.rank() == 2:
        step(experts)
        experts.abort("the data ran out")
        experts.close()
        return None
    with pytest.raises(CommunicationError) as error:
        for _ in range(1000):
            step(experts)
    experts.close()
    return str(error.value)


def test_a_rank_can_give_up(workers):
    for text in workers.run(3, abort_others)[:2]:
        assert re.search("rank 2.*the data ran out", text, re.S), text


def leave_open(group):
    """Its objects are left for the interpreter to end, and a child is forked with them."""
    experts = st.ExpertParallel(group, E, timeout=10)
    step(experts)
    closed = st.ExpertParallel(group, E, timeout=11)
    step(closed)
    closed.close()
    with pytest.raises(InvalidArgument, match="this ExpertParallel is closed"):
        step(closed)
    child = os.fork()
    if child == 0:
        del experts, closed
        gc.collect()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_processes_end_with_objects_that_are_open_and_groups_that_were_destroyed():
    ranks = Workers(2)
    ranks.run(2, leave_open)
    ranks.run(2, use_after_destroying)
    ranks.close()
    assert [process.exitcode for process in ranks.processes] == [0, 0]


def wait_for_rank_0(group):
    if group.rank() == 0:
        time.sleep(30)
        return None
    with pytest.raises(CommunicationError) as error:
        st.ExpertParallel(group, E, timeout=4)
    return str(error.value)


def test_a_store_that_does_not_answer_is_named(three):
    three.run(3, leave_open)
    three.start(3, wait_for_rank_0)
    os.kill(three.processes[0].pid, signal.SIGSTOP)
    for ok, text in three.answers((1, 2), 30):
        assert ok and re.search("torch's store does not answer|rank 0 did not come", text), text
    three.kill()
