"""Rendezvous of the ranks of a group: they agree on a key of their store that no group has used before.

A store can outlive processes: torch elastic's agent keeps one for all restarts of a worker group. A rank must not take
the keys that killed ranks have left there for new ones, however far each of these ranks came. So ranks agree on a key:

    rank r:   writes hello/r := a new random number, and its claim of what the group is; waits for the answer to that
              number; writes that it has the answer
    rank 0:   makes a key of its own number; answers every number that it finds, with the key or with the reason why
              that rank cannot be in its group, until all ranks have written that they have their answer; writes that
              to all
    the last rank that reads this: deletes the entries of the rendezvous

An old number gets an answer that no rank reads. The old processes must be gone, and elastic makes sure of that. So if
another process overwrites a rank's hello, the rank knows that two processes claim the same rank.

Until the group is made, a rank may begin again: a supervisor has restarted it, or it was interrupted and retries. Rank
0 answers its new number, too. If rank 0 itself has another number, ranks that have an answer of the old one begin
again.

Two jobs can use one port. If the launcher does not name the jobs (`Claim.job`, `nameless`), only a rank too many tells.
Rank 0 waits a second for it before the first group is made. Later it is refused (intruders.py).
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from datetime import timedelta

from torch.distributed import Store

from ringlet.claim import Claim, claim_from, error_of, peek, refusal_of
from ringlet.errors import Error, InvalidUsage, Timeout
from ringlet.interruptible import wait_for_key
from ringlet.intruders import APART, LATE_S, too_late
from ringlet.store import SECOND_RANK_0, asked

_LEAST_PAUSE_S, _LARGEST_PAUSE_S = 2e-4, 5e-3
_LOOK_EVERY_S = 0.1  # at whether another process has taken this rank
_REFUSED_S = 2.0  # after a refusal, for the other ranks to come and hear of it
_TOLD_S = 10.0  # for the other ranks to come and hear what is wrong with this one
_REPLACED_S = 0.5  # after a rank has come again, for its old process to object
_SETTLE_S = 1.0  # before the first group of a job that nothing names, for ranks of another job to come
_KEY, _REFUSAL = "=", "!"  # what an answer begins with


def rendezvous_key(
    store: Store, name: str, claim: Claim, timeout: timedelta, wrong: Error | None = None, *, once: bool = False
) -> str:
    """The key of this rank's next rendezvous of that name.

    Raises InvalidUsage for a rank that cannot be, for two processes of one rank and, on all ranks, if they say
    different things; Timeout naming the ranks that did not come; PeerLost if the store is gone.

    wrong: why this rank cannot join. It raises that, and so do the other ranks that come within seconds.
    once: no rank joins by this name again before all have left this group. Then nothing of it stays in the store.
    """
    if not 0 <= claim.rank < claim.world:
        raise InvalidUsage(f"rank {claim.rank} of world {claim.world} does not exist")
    if wrong is not None:
        timeout = min(timeout, timedelta(seconds=_TOLD_S))
        claim = dataclasses.replace(claim, wrong=refusal_of(claim.rank, wrong))
    until = time.monotonic() + timeout.total_seconds()
    try:
        if claim.world == 1:
            key = f"{name}/{claim.number}"
        else:
            with asked():
                lead = claim.rank == 0
                key = _Lead(store, name, claim).key(until, once) if lead else _follow(store, name, claim, until, once)
    except Error:
        if wrong is None:
            raise
        raise wrong from None
    if wrong is not None:
        raise wrong
    return key


class _AnotherLead(Exception):
    """The rank 0 that answered has begun again, or another process is rank 0."""


def _follow(store: Store, name: str, claim: Claim, until: float, once: bool) -> str:
    """The key that rank 0 answers."""
    while True:
        try:
            return _ask(store, name, claim, until, once)
        except _AnotherLead:
            claim = dataclasses.replace(claim, number=secrets.token_hex(16))


def _ask(store: Store, name: str, claim: Claim, until: float, once: bool) -> str:
    store.set(f"{name}/hello/{claim.rank}", claim.text())
    answer = _awaited(store, name, claim, f"{name}/answer/{claim.number}", until)
    if answer is None:
        lead = claim_from(peek(store, f"{name}/hello/0"))
        differs = _difference(lead, claim) if lead is not None else ""
        raise Timeout(_missed(claim, "0") + (f" ({error_of(differs)})" if differs else ""))
    told = answer[1:]
    store.set(f"{name}/ack/{claim.number}", answer)
    if answer[0] == _REFUSAL:
        raise error_of(told)
    refusal = _awaited(store, name, claim, f"{told}/all", until, told)
    if refusal is None:
        absent = store.get(f"{told}/absent").decode().split(", ")
        raise Timeout(_missed(claim, ", ".join(rank for rank in absent if rank != str(claim.rank)) or "0"))
    if refusal := refusal or _taken(store, name, claim):
        raise error_of(refusal)
    hello = f"{name}/hello/{claim.rank}"
    store.delete_key(hello) if once else store.set(hello, "")
    if store.add(f"{told}/heard", 1) == claim.world - 1:
        for used in (f"{told}/all", f"{told}/absent", f"{told}/heard", *([f"{name}/hello/0"] if once else [])):
            store.delete_key(used)
    return told


def _awaited(store: Store, name: str, claim: Claim, key: str, until: float, lead_key: str = "") -> str | None:
    """What is set there in time. Raises _AnotherLead if rank 0 has another key than `lead_key`, if that is given."""
    began = time.monotonic()
    while not wait_for_key(store, key, min(until, time.monotonic() + _LOOK_EVERY_S)):
        if twice := _taken(store, name, claim):
            raise InvalidUsage(twice)
        if refusal := _refused(store, name):
            raise error_of(refusal)
        if time.monotonic() > began + LATE_S and (twice := too_late(store, name, claim)):
            raise InvalidUsage(twice)
        lead = claim_from(peek(store, f"{name}/hello/0")) if lead_key else None
        if lead is not None and lead_key != f"{name}/{lead.number}":
            raise _AnotherLead
        if time.monotonic() > until:
            return None
    return store.get(key).decode()


def _taken(store: Store, name: str, claim: Claim) -> str:
    """An error text if another process says that it is this rank; tells that process and rank 0 too."""
    other = claim_from(peek(store, f"{name}/hello/{claim.rank}"))
    if other is not None and other.number == claim.number:
        return ""
    # If it is gone, the other process has joined the group in place of this one.
    where = f": {claim.process} and {other.process}" if other is not None else f", {claim.process} and another"
    text = f"two processes say that they are rank {claim.rank} of {claim.world}{where}" + APART
    for concerned in (other, claim_from(peek(store, f"{name}/hello/0"))):
        if concerned is not None:
            store.set(f"{name}/answer/{concerned.number}", _REFUSAL + text)
    return text


def _refused(store: Store, name: str) -> str:
    """Why the present rank 0 has refused the group: it answers nobody any more. Empty: it has not."""
    lead = claim_from(peek(store, f"{name}/hello/0"))
    return (peek(store, f"{name}/refused/{lead.number}") or "") if lead is not None else ""


class _Lead:
    """Rank 0's part."""

    def __init__(self, store: Store, name: str, claim: Claim) -> None:
        self._store, self._name, self._claim = store, name, claim
        self._key = f"{name}/{claim.number}"
        self._absent = list(range(1, claim.world))
        self._answered: dict[int, str] = {}
        self._members = {0: claim}
        self._refusal = claim.wrong
        self._open_until = time.monotonic()  # although nobody is absent
        self._look_again_at = self._open_until + _LOOK_EVERY_S  # for ranks that begin again

    def key(self, until: float, once: bool) -> str:
        store = self._store
        # A FileStore has no file, for which a look would wait, before this.
        store.set(f"{self._name}/hello/0", self._claim.text())
        self._gather(until)
        if self._claim.nameless and not self._refusal:
            self._settle()
        while not self._refusal and self._look_for_replaced():
            self._gather(until)
        if self._claim.nameless and not self._refusal:
            members = [self._members[rank].text() for rank in range(self._claim.world)]
            store.set(f"{self._name}/members", json.dumps(members))
        store.set(f"{self._key}/all", self._refusal)
        if self._refusal:
            store.set(f"{self._name}/refused/{self._claim.number}", self._refusal)
            raise error_of(self._refusal)
        if not once:
            store.set(f"{self._name}/hello/0", "")
        return self._key

    def _gather(self, until: float) -> None:
        """Serves ranks until all have their answer, or there is a refusal and nobody more has come to hear it."""
        store, pause, told = self._store, _LEAST_PAUSE_S, ""
        while self._absent or time.monotonic() < self._open_until:
            names = ", ".join(map(str, self._absent))
            if names != told:
                store.set(f"{self._key}/absent", told := names)  # for the others, should time be up
            before = self._refusal
            for rank in list(self._absent):
                self._serve(rank)
            if pause == _LARGEST_PAUSE_S:
                self._look_for_others()
                if time.monotonic() > self._look_again_at:
                    self._look_for_replaced()
            if self._refusal and not before:
                until = min(until, time.monotonic() + _REFUSED_S)
            if self._absent and time.monotonic() > until:
                self._refusal = self._refusal or self._wrong_of_absent()
                if not self._refusal:
                    raise Timeout(_missed(self._claim, told))
                break
            if self._absent or time.monotonic() < self._open_until:
                time.sleep(pause)
            pause = min(2 * pause, _LARGEST_PAUSE_S)

    def _wrong_of_absent(self) -> str:
        """What a rank that has come and gone said was wrong with it."""
        claims = (claim_from(peek(self._store, f"{self._name}/hello/{rank}")) for rank in self._absent)
        return next((claim.wrong for claim in claims if claim is not None and claim.wrong), "")

    def _look_for_replaced(self) -> bool:
        """Whether ranks that have their answer have begun again since. These are absent again."""
        began = time.monotonic()
        for rank in [rank for rank in self._members if rank != 0]:
            now = claim_from(peek(self._store, f"{self._name}/hello/{rank}"))
            if now is not None and now.number != self._members[rank].number:
                del self._members[rank]
                self._absent = sorted([*self._absent, rank])
                self._open_until = time.monotonic() + _REPLACED_S
        ended = time.monotonic()  # in large groups, looks take a tenth of the time
        self._look_again_at = ended + max(_LOOK_EVERY_S, 9 * (ended - began))
        return bool(self._absent)

    def _serve(self, rank: int) -> None:
        """Answers a rank that says who it is, until it says that it has its answer."""
        store, name = self._store, self._name
        text = peek(store, f"{name}/hello/{rank}")
        if text is None:
            return
        theirs = claim_from(text)
        number = text if theirs is None else theirs.number
        if number != self._answered.get(rank):
            differs = self._refusal or _difference(self._claim, theirs)
            store.set(f"{name}/answer/{number}", _REFUSAL + differs if differs else _KEY + self._key)
            self._answered[rank] = number
        answer = peek(store, f"{name}/ack/{number}")
        if answer is None or (answer[0] == _KEY and answer != _KEY + self._key):  # to another rank 0
            return
        refused = answer[1:] if answer[0] == _REFUSAL else ""
        self._absent.remove(rank)
        if theirs is not None:
            self._members[rank] = theirs
        for used in ("answer", "ack"):
            store.delete_key(f"{name}/{used}/{number}")
        if refused and not self._refusal:
            self._refusal = refused
            # Of a larger world there are ranks that wait for this one in vain.
            self._absent += range(self._claim.world, theirs.world if theirs is not None else 0)

    def _settle(self) -> None:
        """Lets other processes that say that they are a rank of this group come, before the first group is made."""
        if self._store.check(["settled"]):
            return
        until = time.monotonic() + _SETTLE_S
        while not self._refusal and time.monotonic() < until:
            time.sleep(_LARGEST_PAUSE_S)
            self._look_for_others()
            if (second := peek(self._store, SECOND_RANK_0)) is not None and not self._refusal:
                self._refusal = f"two processes say that they are rank 0: {self._claim.process} and {second}" + APART
        self._store.set("settled", "")

    def _look_for_others(self) -> None:
        """At whether another process is rank 0, or a rank has found another one in its place."""
        if self._refusal:
            return
        told = peek(self._store, f"{self._name}/answer/{self._claim.number}") or ""
        self._refusal = told[1:] or _taken(self._store, self._name, self._claim)


def _difference(lead: Claim, theirs: Claim | None) -> str:
    """Why two ranks cannot be in one group; empty if they can."""
    if lead.wrong:
        return lead.wrong
    if theirs is None:
        return f"a rank runs another version of ringlet than rank 0, {lead.version}: install the same on all hosts"
    if theirs.wrong:
        return theirs.wrong
    for said, mine, other in (
        ("runs ringlet", lead.version, theirs.version),
        ("says world", lead.world, theirs.world),
        ("says transport", f'"{lead.transport}"', f'"{theirs.transport}"'),
        ("is of job", lead.job, theirs.job),
    ):
        if mine != other and None not in (mine, other):
            return f"rank {lead.rank} {said} {mine}, rank {theirs.rank} {said} {other}; all ranks must agree"
    return ""


def _missed(claim: Claim, absent: str) -> str:
    who = f"rank {claim.rank} of {claim.world}"
    return f"{who} was not joined by rank(s) {absent} in time: they may have failed, or not have started"
