"""What a self-driven maker or trainer returns at its end, and the ledger over all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hocket.errors import HocketError

FAILED, DIED = "it ended with an error: ", "it died: "


def failure(error: BaseException) -> str:
    """Why a loop ended that raised this, for the others: in one line."""
    first = str(error).strip().partition("\n")[0]
    return f"{FAILED}{type(error).__name__}{first and ': '}{first}"


def death(why: str) -> str:
    """Why a loop ended whose process is gone, in one line."""
    return DIED + why.partition("\n")[0]


def with_failed(ended_by: str, others: Mapping[str, str]) -> str:
    """The same, and which of the others, by name, failed or died, and of what."""
    return "; ".join([ended_by, *(f"{name}: {why}" for name, why in others.items() if why.startswith((FAILED, DIED)))])


@dataclass
class MakerReport:
    """Samples of one maker: `made` are trained or left by its trainers (`sent`), refused, or left with the maker.

    `ended_by` says why it ended, and which of its trainers failed or died.
    """

    name: str
    made: int = 0
    batches: int = 0
    sent: Counter[str] = field(default_factory=Counter[str])
    refused: Counter[str] = field(default_factory=Counter[str])
    left: Counter[str] = field(default_factory=Counter[str])
    ended_by: str = "it has made all its samples"


@dataclass
class TrainerReport:
    """Samples of one trainer: `accepted` by maker are `trained`, or `left` by reason.

    `ended_by` says why it ended, and which of its makers failed or died.
    """

    name: str
    steps: int = 0
    version: int = 0
    trained: int = 0
    accepted: Counter[str] = field(default_factory=Counter[str])
    refused: Counter[str] = field(default_factory=Counter[str])
    left: Counter[str] = field(default_factory=Counter[str])
    ended_by: str = "it has made all its steps"
    metrics: list[dict[str, float]] = field(default_factory=list[dict[str, float]])


def balance(reports: Iterable[MakerReport | TrainerReport]) -> dict[str, int]:
    """The ledger of a whole pipeline: made = trained + refused + left, the last two also by reason.

    Raises HocketError when it does not add up: samples were lost, or counted twice.
    """
    reports = list(reports)
    makers = [report for report in reports if isinstance(report, MakerReport)]
    trainers = [report for report in reports if isinstance(report, TrainerReport)]
    refused, left = Counter[str](), Counter[str]()
    for report in reports:
        left += report.left
    for maker in makers:
        refused += maker.refused
    found = {
        "made": sum(maker.made for maker in makers),
        "trained": sum(trainer.trained for trainer in trainers),
        "refused": refused.total(),
        "left": left.total(),
    }
    sent = {trainer.name: sum(maker.sent[trainer.name] for maker in makers) for trainer in trainers}
    accepted = {trainer.name: trainer.accepted.total() for trainer in trainers}
    if found["made"] != found["trained"] + found["refused"] + found["left"] or sent != accepted:
        raise HocketError(f"the ledger does not balance: {found}; sent {sent}, accepted {accepted}")
    reasons = {f"{kind}: {why}": n for kind, by in (("refused", refused), ("left", left)) for why, n in by.items()}
    return found | reasons
