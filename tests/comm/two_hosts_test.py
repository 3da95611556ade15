#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs MPI jobs over two hosts that are namespaces of this one, and cuts the link between them.
  two_hosts_test.py MPIRUN RANK_FAILURE     exits with 77, and says why, where that cannot be done
Each host has its own network, processes and name, and two of the four ranks."""
import contextlib
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time

SKIPPED = 77
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def skip(why):
    print(f"skipped: {why}")
    sys.exit(SKIPPED)


def command(text, check=True):
    return subprocess.run(text, shell=True, check=check, capture_output=True, text=True)


class OtherHost:
    """A host that lives as long as this object, linked to this one by a pair of devices."""

    def __init__(self):
        self.process = subprocess.Popen(
            ["unshare", "-n", "-p", "-u", "-f", "--mount-proc", "--kill-child",
             "sh", "-c", "hostname other && ip link set lo up && echo here && exec sleep 600"],
            stdout=subprocess.PIPE, text=True)
        if self.process.stdout.readline() != "here\n":
            skip("no namespace for the other host")
        children = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        self.pid = int(pathlib.Path(children).read_text().split()[0])
        command("ip link set lo up")
        command(f"ip link add name here type veth peer name there netns {self.pid}")
        command(f"ip address add {ADDRESSES[0]}/24 dev here && ip link set here up")
        self.run(f"ip address add {ADDRESSES[1]}/24 dev there && ip link set there up")

    def enter(self):
        return f"nsenter -t {self.pid} -n -p -u -m --"

    def run(self, text):
        return command(f"{self.enter()} sh -c {shlex.quote(text)}")

    def set_link(self, state):
        command(f"ip link set here {state}")


class Job:
    def __init__(self, host, mpirun, program, scenario, seconds):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="switchyard-hosts-"))
        agent = self.folder / "agent"
        agent.write_text(f'#!/bin/sh\nshift\nexec {host.enter()} sh -c "$*"\n')
        agent.chmod(0o755)
        network = ADDRESSES[0].rsplit(".", 1)[0] + ".0/24"
        options = ["-n", "4", "--host", ",".join(f"{a}:2" for a in ADDRESSES), "--enable-recovery",
                   "--mca", "plm_rsh_agent", str(agent), "--mca", "btl", "tcp,self,vader",
                   "--mca", "pml", "ob1", "--mca", "btl_tcp_if_include", network,
                   "--mca", "oob_tcp_if_include", network]
        self.log = open(self.folder / "log", "w")
        self.process = subprocess.Popen(
            shlex.split(mpirun) + options + [program, str(self.folder), scenario,
                                             str(int(seconds * 1000))],
            stdout=self.log, stderr=self.log, start_new_session=True)

    def wait_for(self, name, seconds=60):
        end = time.monotonic() + seconds
        while not (self.folder / name).exists():
            if time.monotonic() > end:
                raise AssertionError(f"no {name} after {seconds} s: {self.words()}")
            time.sleep(0.02)
        return (self.folder / name).read_text()

    def outcomes(self, ranks=range(4)):
        return {rank: self.wait_for(f"rank{rank}") for rank in ranks}

    def words(self):
        return (self.folder / "log").read_text()

    def end(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.folder)


def named_in(outcome):
    line = next((x for x in outcome.splitlines() if x.startswith("ranks:")), None)
    assert line is not None, outcome
    return [int(word) for word in line.split()[1:]]


def expect_nobody_here_is_blamed(outcomes):
    """The ranks of a host are well, and those of the other cannot be seen."""
    for rank, outcome in outcomes.items():
        assert outcome.startswith("CommunicationError"), outcome
        others = {2, 3} if rank < 2 else {0, 1}
        assert set(named_in(outcome)) <= others, f"rank {rank}: {outcome}"
        assert "cannot be seen from here" in outcome, f"rank {rank}: {outcome}"


def cut(host, start):
    job = start("until-stop", 4)
    job.wait_for("ready")
    host.set_link("down")
    expect_nobody_here_is_blamed(job.outcomes())


def flapping(host, start):
    job = start("until-stop", 60)
    job.wait_for("ready")
    for _ in range(3):
        host.set_link("down")
        time.sleep(0.3)
        host.set_link("up")
        time.sleep(0.3)
    (job.folder / "stop").touch()
    for outcome in job.outcomes().values():
        assert outcome.startswith("no error"), outcome


def delayed(host, start):
    if command("tc qdisc add dev here root netem delay 20ms 5ms", check=False).returncode != 0:
        return "this kernel delays no packets"
    job = start("until-stop", 60)
    job.wait_for("ready")
    (job.folder / "stop").touch()
    for outcome in job.outcomes().values():
        assert outcome.startswith("no error"), outcome
    return None


def killed(_, start):
    job = start("kill", 4)
    outcomes = job.outcomes([0, 1, 3])
    assert named_in(outcomes[3]) == [2] and "rank 2 died" in outcomes[3], outcomes[3]
    expect_nobody_here_is_blamed({rank: outcomes[rank] for rank in (0, 1)})


def stopped(_, start):
    job = start("stop", 4)
    outcomes = job.outcomes([0, 1, 3])
    assert named_in(outcomes[3]) == [2], outcomes[3]
    expect_nobody_here_is_blamed({rank: outcomes[rank] for rank in (0, 1)})


def main():
    mpirun, program = sys.argv[1:3]
    if "--inside" not in sys.argv:
        probe = command("unshare -n -p -u -f --mount-proc ip link add name here type veth peer name there",
                        check=False)
        if probe.returncode != 0:
            skip(f"namespaces with a network of their own need privileges: {probe.stderr.strip()}")
        os.execvp("unshare", ["unshare", "-n", "-p", "-u", "-f", "--mount-proc", "--kill-child",
                              sys.executable, *sys.argv, "--inside"])
    command("hostname this")
    host = OtherHost()
    for scenario in (cut, flapping, delayed, killed, stopped):
        jobs = []

        def start(name, seconds):
            jobs.append(Job(host, mpirun, program, name, seconds))
            return jobs[-1]

        begin = time.monotonic()
        try:
            why = scenario(host, start)
            print(f"{scenario.__name__}: {why or 'ok'}, {time.monotonic() - begin:.1f} s", flush=True)
        finally:
            host.set_link("up")
            command("tc qdisc del dev here root", check=False)
            for job in jobs:
                job.end()


if __name__ == "__main__":
    main()
