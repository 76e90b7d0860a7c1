"""The audit log's chain: each entry carries a hash of itself and of the one before, so that no change goes unseen.

Used by the server that writes it, and by whoever checks it: also without a server, on an exported file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any

from skerry.models import AuditChain, AuditEntry, AuditProblem, AuditVerification

BEGIN = ""
"""What stands for the hash of the entry before the first."""
MOST_PROBLEMS = 100
UNSEALED = frozenset({"id", "hash"})


def seal(entry: AuditEntry) -> str:
    """The hash of an entry, which names that of the one before as ``previous``."""
    return _sealed(entry.model_dump(mode="json", by_alias=True, exclude=set(UNSEALED)))


def seal_fields(fields: Mapping[str, Any]) -> str:
    """The same, made of the fields by those names that Python has for them; times are texts, ``took`` microseconds."""
    took = fields["took"]
    named = {_WIRE[name]: value for name, value in fields.items()}
    return _sealed({**named, "took": None if took is None else took / 1000})


def _sealed(fields: dict[str, Any]) -> str:
    return sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


_WIRE = {name: field.alias or name for name, field in AuditEntry.model_fields.items()}


def beginnings(entries: Iterable[AuditEntry]) -> dict[str, tuple[int, str]]:
    """Anchors for an export, which has none: of each chain, what its first entry follows is taken on trust."""
    found: dict[str, tuple[int, str]] = {}
    for entry in entries:
        if entry.node not in found:
            found[entry.node] = (entry.seq - 1, entry.previous)
    return found


class Verifier:
    """Goes through the entries of all chains, each chain in order, and says what is wrong with them.

    ``anchors`` are, by node, the number and hash of the last entry that was removed because of its age; ``heads`` are
    numbers and hashes known from elsewhere, which must still be there.
    """

    def __init__(
        self,
        anchors: Mapping[str, tuple[int, str]] | None = None,
        heads: Iterable[tuple[str, int, str]] = (),
    ) -> None:
        self._anchors = dict(anchors or {})
        self._heads = {(node, seq): hash for node, seq, hash in heads}
        self._chains: dict[str, AuditChain] = {}
        self._problems: list[AuditProblem] = []
        self._entries = 0

    def add(self, entry: AuditEntry) -> None:
        self._entries += 1
        chain = self._chains.get(entry.node)
        if chain is None:
            seq, hash = self._anchors.get(entry.node, (0, BEGIN))
            chain = self._chains[entry.node] = AuditChain(node=entry.node, first=seq + 1, last=seq, head=hash)
        if entry.seq > chain.last + 1:
            missing = f"{chain.last + 1}" if entry.seq == chain.last + 2 else f"{chain.last + 1} to {entry.seq - 1}"
            self._complain(entry, f"Missing: {missing}.")
        elif entry.seq <= chain.last:
            self._complain(entry, f"Out of order: entry {entry.seq} comes after {chain.last}.")
        elif entry.previous != chain.head:
            self._complain(entry, f"Entry {entry.seq} does not follow the one before it: one of the two was replaced.")
        if entry.hash != seal(entry):
            self._complain(entry, f"Entry {entry.seq} was changed.")
        chain.head = entry.hash
        chain.last = max(chain.last, entry.seq)
        known = self._heads.pop((entry.node, entry.seq), None)
        if known is not None and known != entry.hash:
            self._complain(entry, f"Entry {entry.seq} had another hash when it was noted elsewhere.")

    def result(self) -> AuditVerification:
        for node, seq in sorted(self._heads):
            anchor = self._anchors.get(node, (0, BEGIN))
            if seq > anchor[0]:
                self._add(node, seq, f"Entry {seq} is known from elsewhere and is not there.")
            elif seq == anchor[0] and anchor[1] != self._heads[node, seq]:
                self._add(node, seq, f"Entry {seq} had another hash when it was noted elsewhere.")
        return AuditVerification(
            ok=not self._problems,
            entries=self._entries,
            chains=sorted(self._chains.values(), key=lambda chain: chain.node),
            problems=self._problems[:MOST_PROBLEMS],
        )

    def _complain(self, entry: AuditEntry, message: str) -> None:
        self._add(entry.node, entry.seq, message)

    def _add(self, node: str, seq: int, message: str) -> None:
        if len(self._problems) < MOST_PROBLEMS:
            self._problems.append(AuditProblem(node=node, seq=seq, message=message))
