# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads: collectives, errors, placements and experts that move."""
import gc
import os
import signal
import threading
import time

import numpy as np
import pytest

import switchyard as sy


def test_collectives():
    def rank(comm):
        mine = np.full((2, 3), comm.rank + 1, np.float32)
        total = comm.all_reduce(mine)
        assert (mine == comm.rank + 1).all() and (total == 10).all()
        assert (comm.all_reduce(np.int64([comm.rank]), "max") == 3).all()
        assert (comm.all_gather(mine)[:, 0] == [1, 1, 2, 2, 3, 3, 4, 4]).all()
        part = comm.reduce_scatter(np.arange(8, dtype=np.int32))
        assert (part == 4 * np.arange(2 * comm.rank, 2 * comm.rank + 2)).all()
        assert (comm.broadcast(mine, 2) == 3).all()
        rows, counts = comm.all_to_all(np.full((6, 2), comm.rank, np.float32), [0, 1, 2, 3])
        assert counts == [comm.rank] * 4
        assert (rows[:, 0] == np.repeat(np.arange(4), comm.rank)).all()
        halves = comm.all_reduce(sy.bfloat16([1.5]))
        assert halves.dtype == "bfloat16" and halves.float32()[0] == 6
        comm.barrier()
        return comm.rank, comm.size

    assert sy.run_ranks(4, rank) == [(r, 4) for r in range(4)]


def test_groups():
    def rank(comm):
        group = comm.split(comm.rank % 2, -comm.rank)
        assert comm.split(-1) is None
        return group.rank, group.size, int(group.all_reduce(np.int64([comm.rank]))[0])

    assert sy.run_ranks(4, rank) == [(1, 2, 2), (1, 2, 4), (0, 2, 2), (0, 2, 4)]


def test_one_rank():
    comm = sy.connect()
    assert (comm.rank, comm.size) == (0, 1)
    assert comm.all_reduce(np.float32([2.0]))[0] == 2
    with pytest.raises(sy.InvalidArgument, match="backend|carrier"):
        sy.connect("carrier pigeon")


class Mine(Exception):
    pass


@pytest.mark.parametrize("culprit", range(3))
def test_an_exception_ends_the_other_ranks(culprit):
    reasons = {}

    def rank(comm):
        if comm.rank == culprit:
            time.sleep(0.01)
            raise Mine(f"rank {comm.rank}")
        try:
            comm.barrier()
        except sy.CommunicationError as error:
            reasons[comm.rank] = str(error)
            raise

    with pytest.raises(Mine, match=f"rank {culprit}"):
        sy.run_ranks(3, rank)
    assert len(reasons) == 2 and all(f"Mine: rank {culprit}" in r for r in reasons.values())


def test_a_rank_that_returns_early_is_not_waited_for():
    def rank(comm):
        if comm.rank != 1:
            comm.barrier()

    start = time.monotonic()
    with pytest.raises(sy.CommunicationError, match="rank 1"):
        sy.run_ranks(3, rank)
    assert time.monotonic() - start < 5


def test_a_rank_that_does_not_come_is_told_after_the_timeout():
    def rank(comm):
        if comm.rank == 0:
            comm.barrier()
        else:
            time.sleep(0.5)

    with pytest.raises(sy.CommunicationError):
        sy.run_ranks(2, rank, timeout=0.1)


def test_ranks_that_call_different_things_are_told():
    def rank(comm):
        if comm.rank == 0:
            comm.barrier()
        else:
            comm.all_reduce(np.zeros(1, np.float32))

    with pytest.raises(sy.CommunicationError, match="same calls in the same order"):
        sy.run_ranks(2, rank)


def test_an_interrupt_ends_the_ranks():
    def rank(comm):
        if comm.rank == 1:
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        comm.barrier()

    with pytest.raises(KeyboardInterrupt):
        sy.run_ranks(2, rank)


def test_a_closed_communicator_is_an_error():
    comm, = sy.run_ranks(1, lambda comm: comm)
    with pytest.raises(sy.InvalidArgument, match="this communicator is closed"):
        comm.barrier()
    with sy.connect() as alone:
        pass
    alone.close()
    with pytest.raises(sy.InvalidArgument, match="closed"):
        alone.all_reduce(np.zeros(1, np.float32))
    with pytest.raises(sy.InvalidArgument, match="closed"):
        sy.MoeLayer(alone, hidden=4, intermediate=4, num_experts=2, top_k=1)


def test_misuse_is_told():
    comm = sy.connect()
    with pytest.raises(sy.InvalidArgument, match="op is 'mean'"):
        comm.all_reduce(np.zeros(1, np.float32), "mean")
    with pytest.raises(sy.InvalidArgument, match="send_rows has 2 entries"):
        comm.all_to_all(np.zeros((2, 1), np.float32), [1, 1])
    with pytest.raises(sy.Error, match="need more rows than the tensor"):
        comm.all_to_all(np.zeros((2, 1), np.float32), [3])
    for num_ranks in (0, -1):
        with pytest.raises(sy.InvalidArgument, match=r"num_ranks \("):
            sy.run_ranks(num_ranks, lambda comm: None)
    with pytest.raises(sy.InvalidArgument, match="timeout"):
        sy.connect(timeout=0)


def test_library_calls_release_the_interpreter():
    """A rank that waits in the library would stop the other one, which has yet to arrive."""
    def rank(comm):
        if comm.rank == 1:
            time.sleep(0.05)
        comm.barrier()
        return threading.current_thread().name

    assert sy.run_ranks(2, rank) == ["switchyard rank 0", "switchyard rank 1"]


def test_placements():
    placement = sy.ExpertPlacement.contiguous(5, 2)
    assert placement.owners == (0, 0, 0, 1, 1) and placement.experts_of(1) == [3, 4]
    assert placement == sy.ExpertPlacement.from_lists(5, [[2, 0, 1], [4, 3]])
    assert placement != sy.ExpertPlacement([0, 0, 0, 1, 1], 3)
    with pytest.raises(sy.InvalidArgument, match="2"):
        sy.ExpertPlacement([0, 2], 2)
    with pytest.raises(sy.InvalidArgument, match="lists expert 1"):
        sy.ExpertPlacement.from_lists(2, [[0, 1], [1]])
    with pytest.raises(sy.InvalidArgument):
        sy.ExpertPlacement.from_lists(3, [[0, 1]])
    with pytest.raises(sy.InvalidArgument):
        sy.ExpertPlacement.contiguous(0, 1)


def test_experts_move_between_placements():
    before = sy.ExpertPlacement.contiguous(6, 4)
    after = sy.ExpertPlacement([1, 0, 1, 0, 1, 0], 2)  # two of the ranks own nothing
    whole = np.arange(6 * 4, dtype=np.float32).reshape(6, 2, 2)
    counts = np.arange(6, dtype=np.int64)

    def rank(comm):
        old, new = before.experts_of(comm.rank), after.experts_of(comm.rank)
        moved, also = sy.reshard([whole[old], counts[old]], before, after, comm)
        assert np.array_equal(moved, whole[new]) and np.array_equal(also, counts[new])
        back, = sy.reshard([moved], after, before, comm)
        assert np.array_equal(back, whole[old])

    sy.run_ranks(4, rank)
    with pytest.raises(sy.InvalidArgument, match="6|3"):
        sy.run_ranks(4, lambda comm: sy.reshard([whole[:3]], before, after, comm))


def test_nothing_is_left_of_objects_that_other_threads_free():
    """The collector may free a rank's objects on any thread, while the rank waits for it."""
    def rank(comm):
        for _ in range(5):
            layer = sy.MoeLayer(comm, hidden=4, intermediate=4, num_experts=2, top_k=1)
            ring = [layer, layer.forward_training(layer.zeros(), np.zeros((2, 4), np.float32))]
            ring.append(ring)
            del layer, ring
            if comm.rank == 0:
                gc.collect()
            comm.barrier()

    sy.run_ranks(3, rank)
