"""Launchers: what their variables say, worker groups that restart, the real mpiexecs, Ray."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from benchmarks.peers import mpi

import ringlet
from hosts import hosts
from programs import ended, printed, until
from ranks import free_ports
from refusals import refused
from ringlet import environment

ROOT = pathlib.Path(__file__).resolve().parents[2]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
SLURM = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "node[03-06]", "SLURM_STEP_NUM_NODES": "4",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-a-1@1",
}  # fmt: skip
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TORCH = {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


# ---- variables


@pytest.mark.parametrize(
    "variables, launcher, rank, world, local_rank",
    [
        (TORCH, "torchrun", 5, 6, 1),
        (OPEN_MPI, "Open MPI", 2, 4, 0),
        (HYDRA, "MPICH's or Intel MPI's mpiexec", 1, 2, 1),
        (SLURM, "Slurm", 3, 8, 1),
        ({"PMI_RANK": "1", "PMI_SIZE": "3"}, "a PMI launcher", 1, 3, None),
        # The innermost counts: mpirun in a Slurm job, whose daemons Slurm counts, and torchrun in a Slurm step.
        (SLURM | OPEN_MPI, "Open MPI", 2, 4, 0),
        (SLURM | HYDRA, "MPICH's or Intel MPI's mpiexec", 1, 2, 1),
        (SLURM | TORCH, "torchrun", 5, 6, 1),
        # srun --mpi=pmi2 counts the same ranks twice, and only Slurm's variables say where they are.
        (SLURM | {"PMI_RANK": "3", "PMI_SIZE": "8"}, "Slurm", 3, 8, 1),
    ],
)
def test_a_place(variables, launcher, rank, world, local_rank):
    place = environment.find(variables)
    assert (place.launcher, place.rank, place.world, place.local_rank) == (launcher, rank, world, local_rank)


@pytest.mark.parametrize(
    "variables, said",
    [
        ({}, "rank is not set: pass rank= and world=, or launch with `ringlet run -n 2 program.py`, torchrun, "),
        ({"RANK": "1"}, "WORLD_SIZE is not set, though torchrun sets it"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "four"}, 'OMPI_COMM_WORLD_SIZE="four" is not a number'),
        (SLURM | {"SLURM_PROCID": "-1"}, 'SLURM_PROCID="-1" is not a number'),
        (SLURM | {"SLURM_STEP_NODELIST": ""}, 'SLURM_STEP_NODELIST="" names no host'),
        *(
            (
                SLURM | {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": "1"},
                f'TASKS_PER_NODE="{tasks}" has no number',
            )
            for tasks in ("2", "foo", "2,", "2x", "0,0", "1_0,2")
        ),
        (
            {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
            "not in a step: launch the program with srun",
        ),
    ],
)
def test_no_place(variables, said):
    refused(said, environment.find, variables)


@pytest.mark.parametrize(
    "variables, address",
    [
        (SLURM, "node03"),
        (SLURM | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "node03"}, "127.0.0.1"),
        (SLURM | {"MASTER_ADDR": "node99"}, "node99"),
        (HYDRA, "127.0.0.1"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "127.0.0.1"),
        (OPEN_MPI | {"MASTER_ADDR": "a"}, "a"),
    ],
)
def test_a_master(variables, address):
    found, port = environment.master(variables)
    assert found == address and 20000 <= port < 30000
    assert environment.master(variables | {"MASTER_PORT": "1234"}) == (address, 1234)


def test_a_slurm_step_without_numbers_has_no_name():
    unnumbered = {name: value for name, value in SLURM.items() if name not in ("SLURM_JOB_ID", "SLURM_STEP_ID")}
    assert environment.find(unnumbered).job is None and environment.find(SLURM).job == "77.0"


def test_jobs_have_ports_of_their_own():
    jobs = [SLURM | {"SLURM_JOB_ID": str(job)} for job in range(20)]
    assert len({environment.master(variables)[1] for variables in jobs}) > 15
    ranks = [SLURM | {"SLURM_PROCID": str(rank)} for rank in range(8)]
    assert len({environment.master(variables) for variables in ranks}) == 1


@pytest.mark.parametrize(
    "variables, said",
    [
        (OPEN_MPI, "store is not set: Open MPI does not tell the host of rank 0 \\(of 4\\): set MASTER_ADDR"),
        (TORCH, "store is not set: pass store=, or launch with torchrun, which sets MASTER_ADDR and MASTER_PORT"),
        ({}, "store is not set: pass store=, or launch with"),
        (HYDRA | {"MASTER_PORT": "http"}, 'MASTER_PORT="http" is not a number'),
    ],
)
def test_no_master(variables, said):
    refused(said, environment.master, variables)


@pytest.mark.parametrize(
    "nodelist, first",
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[03-05,9],gpu1", "node03"),
        ("node[7,9-11]", "node7"),
        ("rack[1-2]node[10-12]", "rack1node10"),
        ("a-b[2-3].cluster,c", "a-b2.cluster"),
    ],
)
def test_the_first_host_of_a_node_list(nodelist, first):
    assert environment.first_host(nodelist) == first


def test_ranks_of_a_slurm_node():
    assert environment.tasks_per_node("2(x3),1") == [2, 2, 2, 1] and environment.tasks_per_node("4") == [4]
    told = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3,2(x2),1", "SLURM_NODEID": "1"}
    assert environment.find(told).local_world == 2 and environment.find(SLURM).local_world is None


def slurm_step(rank: int, world: int, job: str) -> int:
    told = SLURM | {"SLURM_JOB_ID": job, "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(world)}
    told["SLURM_STEP_NUM_NODES"] = "1"
    with mock.patch.dict(os.environ, told):
        ringlet.init()
        total = int(ringlet.all_reduce(ringlet.empty(1).fill_(rank + 1.0)))
        ringlet.finalize()
        place = environment.export()
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"], place.rank) == (str(rank), str(world), rank)
        # torch serves its own store there.
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        dist.init_process_group("ringlet")
        dist.destroy_process_group()
        return total


def test_init_in_a_slurm_step(pool):
    assert pool.values(slurm_step, 3, str(os.getpid()), join="nothing") == [6, 6, 6]


# ---- worker groups that restart

TRAIN = """
import os, pathlib, signal, sys
import ringlet, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

folder, backend, dies = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["RANK"])
torch.manual_seed(0)
dist.init_process_group(backend)
group = ringlet.init()  # a second group on the same store
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
saved, first = folder / "checkpoint", 0
if saved.exists():
    first, state = torch.load(saved)
    model.load_state_dict(state)
for step in range(first, 6):
    if attempt == "0" and dies == "yes" and rank == 1 and step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.full((4, 8), 0.1 * (rank + 1) * (step + 1))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    ringlet.barrier()
    if rank == 0:
        torch.save((step + 1, model.state_dict()), folder / "new")
        os.replace(folder / "new", saved)
    dist.barrier()
weight = model.module.weight.sum().item()
(folder / f"result-{rank}").write_text(f"{attempt} {first} {weight!r}")
dist.destroy_process_group()
"""

DIE_ON_THE_WAY = """
import os, pathlib, signal, sys
import ringlet, torch, torch.distributed as dist

folder, join = pathlib.Path(sys.argv[1]), sys.argv[2]
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["RANK"])
if attempt == "0" and rank == 1:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.wait(["rank 0 comes"])
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 0:
    dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False).set("rank 0 comes", "")
x = torch.ones(10)
if join == "init":
    ringlet.init(timeout=30)
    ringlet.all_reduce(x)
else:
    dist.init_process_group("ringlet")
    dist.all_reduce(x)
(folder / f"result-{rank}").write_text(f"{attempt} {x[0].item()}")
"""


def torchrun(folder: pathlib.Path, program: str, *arguments: str, launch: tuple[str, ...] = ()) -> None:
    folder.mkdir(exist_ok=True)
    file = folder / "program.py"
    file.write_text(program)
    flags = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1"]
    printed(*TORCHRUN, *(launch or flags), file, folder, *arguments, timeout=200, env=limited())


def limited() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), *sys.path])}


def results(folder: pathlib.Path) -> list[list[str]]:
    return [path.read_text().split() for path in sorted(folder.glob("result-*"))]


def test_training_goes_on_after_a_lost_rank(tmp_path):
    torchrun(tmp_path / "straight", TRAIN, "ringlet", "no")
    torchrun(tmp_path / "restarted", TRAIN, "ringlet", "yes")
    straight, restarted = results(tmp_path / "straight"), results(tmp_path / "restarted")
    assert [(attempt, first) for attempt, first, _ in straight] == [("0", "0")] * 2
    assert [(attempt, first) for attempt, first, _ in restarted] == [("1", "3")] * 2
    assert {weight for _, _, weight in straight} == {weight for _, _, weight in restarted} and len(restarted) == 2


@pytest.mark.parametrize("join", ["init", "backend"])
def test_a_rank_lost_while_meeting_leaves_nothing_that_harms(join, tmp_path):
    """The agent's store keeps what the first attempt wrote: one rank's arrival, and not the other's."""
    torchrun(tmp_path, DIE_ON_THE_WAY, join)
    assert results(tmp_path) == [["1", "2.0"]] * 2


GO_ON_WITH_FEWER = """
import os, pathlib, sys, time
import ringlet, torch, torch.distributed as dist

folder, attempt = pathlib.Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("ringlet")
group = ringlet.init()
x, y = torch.ones(10), torch.ones(10)
dist.all_reduce(x)
ringlet.all_reduce(y)
(folder / f"result-{attempt}-{group.rank}").write_text(f"{group.world} {x[0].item()} {y[0].item()}")
while attempt == 0:
    ringlet.barrier()
    time.sleep(0.05)
dist.destroy_process_group()
"""


def test_training_goes_on_with_fewer_hosts(tmp_path):
    """An agent and its ranks are gone; the other agent starts its own again, as a smaller world."""
    file, logs = tmp_path / "program.py", [tmp_path / "agent-0", tmp_path / "agent-1"]
    file.write_text(GO_ON_WITH_FEWER)
    flags = ["--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "2", "--monitor-interval", "0.1"]
    flags += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}", "--rdzv-id", "fewer"]
    waits = "last_call_timeout=15,keep_alive_interval=1,keep_alive_max_attempt=12"
    agents = []
    try:
        for number, log in enumerate(logs):
            conf = ["--rdzv-conf", f"is_host={1 - number},{waits}"]
            with log.open("w") as told:
                command = [*TORCHRUN, *flags, *conf, str(file), str(tmp_path)]
                agents.append(subprocess.Popen(command, stdout=told, stderr=told, env=limited()))
        until(lambda: len(results(tmp_path)) == 4, 200)
        _kill(agents.pop())
        assert agents[0].wait(200) == 0, logs[0].read_text()[-4000:]
    finally:
        for agent in agents:
            _kill(agent)
    assert results(tmp_path) == [["4", "4.0", "4.0"]] * 4 + [["2", "2.0", "2.0"]] * 2


def _kill(agent):
    """With its ranks, which would go on without it."""
    if agent.poll() is None:
        children = pathlib.Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        agent.kill()
        for child in children:
            os.kill(int(child), signal.SIGKILL)
    agent.wait()


# ---- MPI's launchers

SUM = """
import pathlib, sys
import ringlet, torch
group = ringlet.init()
x = ringlet.all_reduce(torch.full((3,), group.rank + 1.0))
pathlib.Path(sys.argv[1], f"result-{group.rank}").write_text(f"{group.world} {x[0].item()}")
"""


NO_PEERS = [pytest.param("", marks=pytest.mark.skip("run `make peers`"))]


@pytest.mark.parametrize("peer", mpi.installed() or NO_PEERS)
def test_under_an_mpis_launcher(peer, tmp_path):
    environ = {name: value for name, value in limited().items() if name not in TORCH} | mpi.environment(peer, 2)
    mpiexec = mpi.command(peer, 2, "", "")[0]
    extra = ["--map-by", ":OVERSUBSCRIBE"] if peer == "openmpi" else []
    printed(mpiexec, *extra, "-n", 2, sys.executable, "-c", SUM, tmp_path, env=environ)
    assert results(tmp_path) == [["2", "3.0"]] * 2


# ---- several hosts

WHERE = """
import os, pathlib, socket, sys
import ringlet, torch, torch.distributed as dist
dist.init_process_group("ringlet")
x = torch.ones(1000)
dist.all_reduce(x)
told = f"{socket.gethostname()} {os.environ['LOCAL_RANK']} {x.unique().tolist()}"
pathlib.Path(sys.argv[1], f"result-{dist.get_rank()}").write_text(told)
dist.destroy_process_group()
"""


def test_torchrun_on_two_hosts(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(WHERE)
    with hosts(2, ranks_per_host=2) as made:
        agents: list[Any] = []
        for host in range(2):
            where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29400", "--local-addr", made.addresses[host]]
            command = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-id", "7", *where, str(file)]
            told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            agents.append(made.start(host, [*command, str(tmp_path)], env=limited(), **told))
        for agent in agents:
            said, _ = agent.communicate(timeout=120)
            assert agent.returncode == 0, said[-4000:]
    assert [line[1:] for line in results(tmp_path)] == [["0", "[4.0]"], ["1", "[4.0]"]] * 2
    assert {line[0] for line in results(tmp_path)} == {"host0", "host1"}


@pytest.mark.parametrize("peer", [peer for peer in mpi.installed() if peer != "intelmpi"])
def test_an_mpis_launcher_on_two_hosts(peer, tmp_path):
    with hosts(2, ranks_per_host=2) as made:
        command = mpi.command(peer, 4, "", "", made)
        start = command[: command.index("-n")] + (["-x", "MASTER_ADDR"] if peer == "openmpi" else [])
        environ = {name: value for name, value in limited().items() if name not in TORCH}
        environ |= mpi.environment(peer, 4, made) | {"MASTER_ADDR": "host0"}
        program = [sys.executable, "-c", f"import ringlet; ringlet.environment.export(){WHERE}", str(tmp_path)]
        printed(*start, "-n", 4, *program, env=environ)
    places = [[f"host{host}", str(local), "[4.0]"] for host in range(2) for local in range(2)]
    assert results(tmp_path) == places


# ---- Ray


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no ray: pip install 'ray[train]'")
def test_ray_train(tmp_path):
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # short: Ray's sockets lie in it
        environ = limited() | {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
        program = [sys.executable, ROOT / "examples" / "ray_train.py", "--storage", tmp_path]
        done = ended(*program, timeout=300, env=environ)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "backend ringlet, 2 workers, same weights: True" in done.stdout + done.stderr
