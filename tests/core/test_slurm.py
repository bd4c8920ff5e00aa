"""srun of a real Slurm, on emulated hosts: one controller and a daemon per host, started for the test, and munge, which
vouches for who is who.

Needs the programs of both on the path (Debian: slurm-wlm, munge; `make test-launchers` installs them), and hosts.
RINGLET_TEST_SLURM_PLUGINS: the folder of Slurm's plugins, where it is not the one that they were built for (packages
unpacked, not installed).
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from hosts import hosts

ROOT = pathlib.Path(__file__).resolve().parents[2]
SBIN = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
WANTED = ("slurmctld", "slurmd", "slurmstepd", "srun", "scontrol", "munged")
PROGRAMS = {name: shutil.which(name, path=SBIN) for name in WANTED}

# No accounting, no control groups: a cluster for a minute.
CONFIGURATION = """
ClusterName=emulated
SlurmctldHost=host0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/linear
MpiDefault=none
MailProg=/bin/true
{plugins}
NodeName=host[0-1] CPUs={cores} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=YES
"""
SUM_HERE = """
import pathlib, sys
import ringlet, torch
group = ringlet.init(timeout=60)
x = ringlet.all_reduce(torch.full((3,), group.rank + 1.0))
pathlib.Path(sys.argv[1], f"result-{group.rank}").write_text(f"{group.world} {x[0].item()}")
"""
SUM_ACROSS = """
import os, pathlib, socket, sys
import ringlet, torch, torch.distributed as dist
place = ringlet.environment.export()
dist.init_process_group("ringlet")
x = torch.full((3,), dist.get_rank() + 1.0)
dist.all_reduce(x)
told = f"{socket.gethostname()} {place.local_rank} {place.local_world} {x[0].item()}"
pathlib.Path(sys.argv[1], f"result-{place.rank}").write_text(told)
dist.destroy_process_group()
"""


def munged(state: pathlib.Path) -> list[str]:
    """The daemon that signs who a request is from, with a key of this cluster's own. One serves all hosts, which share
    this machine's files."""
    files = {name: state / f"munge.{name}" for name in ("socket", "pid", "log", "seed", "key")}
    files["key"].touch(0o600)
    files["key"].write_bytes(os.urandom(128))
    where = [f"--{name}{'' if name == 'socket' else '-file'}={path}" for name, path in files.items()]
    return [PROGRAMS["munged"], "--foreground", "--force", *where]  # force: it would not trust a folder in /tmp


def results(folder: pathlib.Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("result-*"))]


@pytest.fixture
def srun(tmp_path):
    """Runs Python as a step of a job on two hosts: srun(options, its arguments)."""
    missing = [name for name, path in PROGRAMS.items() if path is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} (Debian: slurm-wlm, munge)")
    state = tmp_path / "slurm"
    for name in ("host0", "host1"):
        (state / name).mkdir(parents=True)
    plugins = os.environ.get("RINGLET_TEST_SLURM_PLUGINS", "")
    told = {"folder": state, "cores": os.cpu_count(), "plugins": f"PluginDir={plugins}" if plugins else ""}
    (state / "slurm.conf").write_text(CONFIGURATION.format(**told))
    path = os.pathsep.join([str(ROOT / "python"), *sys.path])
    environ = os.environ | {"SLURM_CONF": str(state / "slurm.conf"), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with hosts(2, ranks_per_host=2) as made:
        quiet = {"env": environ, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        made.start(0, munged(state), **quiet)
        made.start(0, [PROGRAMS["slurmctld"], "-D"], **quiet)
        for host in range(2):
            daemon = [PROGRAMS["slurmd"], "-D", "-N", f"host{host}", "-d", PROGRAMS["slurmstepd"]]
            made.start(host, daemon, **quiet)

        def run(options: list[str], *arguments: str) -> None:
            command = [PROGRAMS["srun"], *options, sys.executable, *arguments]
            done = made.run(0, command, env=environ, capture_output=True, text=True, timeout=150)
            logs = "".join(file.read_text()[-1500:] for file in state.glob("*.log"))
            assert done.returncode == 0, done.stderr[-2000:] + logs

        yield run


def test_a_step_on_one_host(srun, tmp_path):
    srun(["-N1", "-n2"], "-c", SUM_HERE, str(tmp_path))
    assert results(tmp_path) == ["2 3.0"] * 2


@pytest.mark.parametrize("distribution", ["block", "cyclic"])
def test_a_step_on_two_hosts(srun, distribution, tmp_path):
    srun(["-N2", "-n4", f"--distribution={distribution}"], "-c", SUM_ACROSS, str(tmp_path))
    block = [f"host{host} {local} 2 10.0" for host in range(2) for local in range(2)]
    cyclic = [f"host{host} {local} 2 10.0" for local in range(2) for host in range(2)]
    assert results(tmp_path) == (block if distribution == "block" else cyclic)


def test_torchrun_in_a_step(srun, tmp_path):
    """torchrun's ranks count, not Slurm's tasks, of which there is one a host."""
    file = tmp_path / "program.py"
    file.write_text(SUM_ACROSS)
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29400", "--rdzv-id", "7"]
    agent = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", *where]
    srun(["-N2", "--ntasks-per-node=1"], *agent, str(file), str(tmp_path))
    assert results(tmp_path) == [f"host{host} {local} 2 10.0" for host in range(2) for local in range(2)]
