"""What a run really did, from the files that each of its processes wrote: it trusts no counter of the run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hocket.run.flow import Key
from hocket.run.ledger import REASONS

Fact = Mapping[str, Any]


@dataclass
class Audit:
    """What was found: accounts as recomputed, the steps of the lineage that survived, and what is wrong, in words."""

    accounts: Counter[str] = field(default_factory=Counter[str])
    lineage: list[int] = field(default_factory=list[int])
    violations: list[str] = field(default_factory=list[str])

    def demand(self, holds: bool, what: str) -> None:
        """Note `what` unless it holds."""
        if not holds:
            self.violations.append(what)


def audit(run: Path) -> Audit:
    """Check the history files of a run folder against each other and against the ledger in `summary.json`.

    The conservation of samples (I1), no unit trained twice in the lineage that survived (I2), versions that only grow
    within a timeline (I3), and everything trained was made by somebody.
    """
    found = Audit()
    driver = _facts(run / "history" / "driver.jsonl")
    _account(driver, found)
    _demand_versions_grow(driver, found)
    trainers = sorted((run / "history").glob("trainer-*.jsonl"))
    resumed = [fact for fact in driver if fact["fact"] == "resumed"]
    forked = any(fact["fork_of"] for fact in resumed)
    starts = {fact["step"] for fact in resumed} | (set[int]() if forked else {0})
    lineages = [_lineage(_facts(path), found, path.stem, starts=starts) for path in trainers]
    if lineages:
        found.lineage = [step for step, _ in lineages[0]]
        _demand_once([unit for lineage in lineages for _, units in lineage for unit in units], found)
        _demand_made(run, lineages, found)
    summary = json.loads((run / "summary.json").read_text())
    _compare(summary, found, trained_by_itself=bool(lineages))
    return found


def _account(facts: Iterable[Fact], found: Audit) -> None:
    """Follow each sample through the driver's facts."""
    leased: dict[Key, int] = {}
    buffered: dict[Key, int] = {}
    trained: dict[int, int] = {}
    books = found.accounts

    def end(key: Key, how: str) -> int:
        found.demand(key in leased, f"unit {key} was {how}, and not leased")
        return leased.pop(key, 0)

    for fact in facts:
        key = _key(fact)
        match fact["fact"]:
            case "leased":
                found.demand(key not in leased, f"unit {key} was leased twice at once")
                leased[key] = fact["samples"]
                books["produced"] += fact["samples"]
            case "made" if fact["taken"]:
                buffered[key] = end(key, "made")
            case "lost":
                books["maker_lost"] += end(key, "lost")
            case "dropped":
                books[fact["why"]] += end(key, "dropped")
            case "again":
                for unit in [unit for unit in buffered if unit[0] == fact["step"]]:
                    books["maker_lost"] += buffered.pop(unit)
            case "trained":
                units = [unit for unit in buffered if unit[0] == fact["step"]]
                trained[fact["step"]] = has = sum(buffered.pop(unit) for unit in units)
                words = f"step {fact['step']} counted {fact['samples']} samples, its units have {has}"
                found.demand(has == fact["samples"], words)
            case "rewound":
                gone = [n for step, n in trained.items() if step >= fact["step"]]
                books["rolled_back"] += sum(gone) + sum(buffered.values()) + sum(leased.values())
                trained = {step: n for step, n in trained.items() if step < fact["step"]}
                buffered, leased = {}, {}
            case "resumed":
                trained = _resume(fact, trained, found)
                buffered, leased = {(step, unit): n for step, unit, n in fact["waiting"]}, {}
            case _:
                pass
    books |= {"trained": sum(trained.values()), "buffered": sum(buffered.values()), "in_flight": sum(leased.values())}


def _resume(fact: Fact, trained: dict[int, int], found: Audit) -> dict[int, int]:
    """Check the books that a run resumed with, and go on from them; returns the samples trained by step."""
    books, accounts = found.accounts, fact["accounts"]
    kept = {step: n for step, n in trained.items() if step < fact["step"]}
    if fact["fork_of"]:
        kept, books["produced"] = {-1: accounts["trained"]}, sum(accounts.values())
    for name, counted, recounted in (
        ("trained", accounts.get("trained", 0), sum(kept.values())),
        ("produced", sum(accounts.values()), books["produced"]),
        ("buffered", accounts.get("buffered", 0), sum(n for _, _, n in fact["waiting"])),
    ):
        found.demand(counted == recounted, f"resumed with {counted} {name}, the histories have {recounted}")
    for account in REASONS:
        books[account] = accounts.get(account, 0)
    return kept


def _demand_versions_grow(facts: Iterable[Fact], found: Audit) -> None:
    newest = (-1, -1)
    for fact in facts:
        if fact["fact"] == "published":
            age = (fact["timeline"], fact["version"])
            found.demand(age > newest, f"version {age} was published after {newest}")
            newest = age


def _lineage(facts: Iterable[Fact], found: Audit, who: str, *, starts: set[int]) -> list[tuple[int, list[Key]]]:
    """Steps of one trainer rank that are in its weights in the end, with their units, from one of `starts` on: what
    was before a resume may have been trained in a placement without that rank."""
    lineage: list[tuple[int, list[Key]]] = []
    pending = lineage
    for fact in facts:
        match fact["fact"]:
            case "started":
                pending, lineage = lineage, []
            case "restored":
                step = int(fact["folder"].removeprefix("step_"))
                lineage = [entry for entry in pending if entry[0] < step]
            case "trained":
                lineage.append((fact["step"], [(step, unit) for step, unit in fact["units"]]))
            case _:
                pass
    steps = [step for step, _ in lineage]
    first = steps[0] if steps else 0
    words = f"the steps of {who} are {steps}, and should be {len(steps)} in order from one of {sorted(starts)}"
    found.demand(not steps or (first in starts and steps == list(range(first, first + len(steps)))), words)
    return lineage


def _demand_once(units: list[Key], found: Audit) -> None:
    twice = [unit for unit, times in Counter(units).items() if times > 1]
    found.demand(not twice, f"units {twice} are trained more than once")


def _demand_made(run: Path, lineages: list[list[tuple[int, list[Key]]]], found: Audit) -> None:
    makers = sorted((run / "history").glob("maker-*.jsonl"))
    made = {_key(fact) for path in makers for fact in _facts(path) if fact["fact"] == "made"}
    units = {unit for lineage in lineages for _, units in lineage for unit in units}
    if made:  # the makers of a colocated run write nothing
        found.demand(units <= made, f"units {sorted(units - made)} were trained, and nobody made them")


def _compare(summary: Mapping[str, Any], found: Audit, *, trained_by_itself: bool) -> None:
    ledger = {name.removeprefix("ledger/"): int(n) for name, n in summary["ledger"].items()}
    for account in ledger.keys() | found.accounts.keys():
        counted, recounted = ledger.get(account, 0), found.accounts[account]
        found.demand(counted == recounted, f"the ledger has {counted} {account}, the histories have {recounted}")
    residual = 2 * ledger["produced"] - sum(ledger.values())
    found.demand(residual == 0, f"the ledger does not add up: {residual} samples are missing")
    if trained_by_itself and found.lineage:
        steps = found.lineage[-1] + 1
        found.demand(steps == summary["steps"], f"{summary['steps']} steps in the summary, {steps} in the trainer")


def _facts(path: Path) -> list[Fact]:
    return list(_parsed(path)) if path.exists() else []


def _parsed(path: Path) -> Iterator[Fact]:
    """Facts of a file; a line that a killed process left torn, in the middle too, is nobody's fact."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def _key(fact: Fact) -> Key:
    step, unit = fact.get("unit", (-1, -1))
    return step, unit
