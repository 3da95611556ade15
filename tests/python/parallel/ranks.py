# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes, for tests.

A test hands `Workers` a function of its module, which each rank calls as function(group, *args)
with the process group of the ranks that take part. What they return comes back by rank. Importing
torch and transformers takes seconds, so a server does it once, and processes are forked from it.
"""
import datetime
import importlib
import multiprocessing
import pathlib
import socket
import sys
import traceback

TIMEOUT = 120.0
_FOLDER = pathlib.Path(__file__).parent
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "switchyard.torch"])


class RankError(AssertionError):
    """A rank raised; the text is its traceback."""


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(connection, rank, size, port):
    sys.path[:0] = [str(_FOLDER), str(_FOLDER.parent)]
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size,
                            timeout=datetime.timedelta(seconds=TIMEOUT))
    groups = {count: dist.new_group(range(count)) for count in range(1, size)}
    groups[size] = dist.group.WORLD
    while True:
        task = connection.recv()
        if task is None:
            break
        module, function, count, args = task
        try:
            result = getattr(importlib.import_module(module), function)(groups[count], *args)
            connection.send((True, result))
        except BaseException:  # the test that asked wants to know
            connection.send((False, traceback.format_exc()))
        _end_links()
    if dist.is_initialized():
        dist.destroy_process_group()


def _end_links():
    """So that a test finds none that failed in another."""
    from switchyard.torch import _process_group
    for link in list(_process_group._links.values()):
        link._num_users = 1
        _process_group.release(link)


class Workers:
    """Processes that are ranks of torch.distributed over gloo."""

    def __init__(self, size=4):
        self.size = size
        port = _free_port()
        self._connections, self._processes = [], []
        for rank in range(size):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_serve, daemon=True,
                                       args=(theirs, rank, size, port))
            process.start()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, count, function, *args):
        """function(group, *args) on ranks 0 to count - 1; what they return, by rank."""
        results = self.try_run(count, function, *args)
        for rank, (ok, result) in enumerate(results):
            if not ok:
                raise RankError(f"rank {rank}:\n{result}")
        return [result for _, result in results]

    def try_run(self, count, function, *args):
        """The same with (True, result) or (False, traceback) of every rank."""
        self.start(count, function, *args)
        return self.answers(range(count))

    def start(self, count, function, *args):
        """Does not wait for what they return."""
        for connection in self._connections[:count]:
            connection.send((function.__module__, function.__name__, count, args))

    def answers(self, ranks, timeout=TIMEOUT + 60):
        """(True, result) or (False, traceback) of each of these ranks."""
        answers = []
        for rank in ranks:
            if not self._connections[rank].poll(timeout):
                self.kill()
                raise RankError(f"rank {rank} does not answer within {timeout:g} s")
            answers.append(self._connections[rank].recv())
        return answers

    @property
    def processes(self):
        return self._processes

    def close(self):
        for connection in self._connections:
            try:
                connection.send(None)
            except OSError:
                pass
        for process in self._processes:
            process.join(20)
        self.kill()

    def kill(self, *ranks):
        """Ends all of them, or those that are named, at once."""
        for rank in ranks or range(self.size):
            self._processes[rank].kill()
        for rank in ranks or range(self.size):
            self._processes[rank].join()
