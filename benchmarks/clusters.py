"""A cluster to emulate on one machine, as a small TOML file describes it (the folder clusters/)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from ringlet.bench.jobs import BenchError
from ringlet.schedule.machine_file import read_toml

NUMBERINGS = ("block", "cyclic")
MAX_HOSTS = 64  # processes, interfaces and bridge ports of one machine


@dataclass(frozen=True)
class Cluster:
    """Hosts that one switch joins. Rates are in Mbit/s (10^6), each way; None: as fast as the machine is.

    uplink_mbit: between a host and the switch. link_mbit: inside a host, of its loopback interface, through which
    ranks of one host talk when they use TCP. numbering: block gives a host consecutive ranks; cyclic deals them out.
    """

    hosts: int
    ranks_per_host: int = 1
    numbering: str = "block"
    link_mbit: float | None = None
    uplink_mbit: float | None = None
    name: str = ""

    def __post_init__(self) -> None:
        for what in ("hosts", "ranks_per_host"):
            value = getattr(self, what)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BenchError(f"cluster: {what} = {value!r} is not a whole number of at least 1")
        if self.hosts > MAX_HOSTS:
            raise BenchError(f"cluster: hosts = {self.hosts} is more than {MAX_HOSTS}")
        if self.numbering not in NUMBERINGS:
            raise BenchError(f"cluster: numbering = {self.numbering!r} is not one of {', '.join(NUMBERINGS)}")
        for what in ("link_mbit", "uplink_mbit"):
            rate = getattr(self, what)
            number = isinstance(rate, int | float) and not isinstance(rate, bool)
            if rate is not None and not (number and 1 <= rate <= 1e9):
                raise BenchError(f"cluster: {what} = {rate!r} is not a rate of at least 1 Mbit/s")

    @property
    def world(self) -> int:
        return self.hosts * self.ranks_per_host

    def host_of(self, rank: int) -> int:
        return rank // self.ranks_per_host if self.numbering == "block" else rank % self.hosts

    def local_rank(self, rank: int) -> int:
        return rank % self.ranks_per_host if self.numbering == "block" else rank // self.hosts

    def __str__(self) -> str:
        def rate(mbit: float | None) -> str:
            return "unshaped" if mbit is None else f"{mbit:g} Mbit/s"

        ranks = f"{self.ranks_per_host} rank{'s' if self.ranks_per_host > 1 else ''}"
        numbering = f", {self.numbering} numbering" if self.hosts > 1 and self.ranks_per_host > 1 else ""
        inside = f", {rate(self.link_mbit)} inside" if self.link_mbit is not None else ""
        return f"{self.hosts} hosts x {ranks}{numbering}, uplinks {rate(self.uplink_mbit)}{inside}"


def read_cluster(path: Path) -> Cluster:
    """The cluster that a file describes: the fields of `Cluster`, of which `hosts` must be there."""
    settings = read_toml(path)
    known = [field.name for field in dataclasses.fields(Cluster) if field.name != "name"]
    unknown = sorted(settings.keys() - set(known))
    if unknown or "hosts" not in settings:
        wrong = f"{', '.join(unknown)} is not one of {', '.join(known)}" if unknown else "hosts is missing"
        raise BenchError(f"{path}: {wrong}")
    try:
        return Cluster(**settings, name=path.stem)
    except BenchError as error:
        raise BenchError(f"{path}: {error}") from error
