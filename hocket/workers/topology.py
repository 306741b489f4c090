"""Who sends experience to whom and who gets weights from whom: the name lists, and their check before the start."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from hocket.errors import ConfigError, PlacementError

Edges = Mapping[str, Sequence[str]]


def get_receivers_per_sender(
    sender_idx: int, num_senders: int, num_receivers: int, allow_idle_sender: bool
) -> list[int]:
    """Numbers of the receivers that sender `sender_idx` of `num_senders` sends to.

    With more senders than receivers there are two ways: `allow_idle_sender` gives each receiver exactly one sender
    and some senders none (weights); otherwise each sender has one receiver, shared with others (experience). With at
    least as many receivers as senders, each receiver has one sender either way. Raises ConfigError for a count below
    1 or a sender that is not there.
    """
    if num_senders < 1 or num_receivers < 1:
        raise ConfigError(
            f"found {num_senders} senders and {num_receivers} receivers; there must be at least 1 of each"
        )
    if not 0 <= sender_idx < num_senders:
        raise ConfigError(f"found sender {sender_idx} of {num_senders}; wanted a number from 0 to {num_senders - 1}")
    if num_senders <= num_receivers or allow_idle_sender:
        return list(range(sender_idx, num_receivers, num_senders))
    return [sender_idx % num_receivers]


def target_trainers(i: int, num_makers: int, num_trainers: int) -> list[int]:
    """Numbers of the trainers that maker `i` sends experience to: no maker without one."""
    return get_receivers_per_sender(i, num_makers, num_trainers, allow_idle_sender=False)


def target_makers(i: int, num_trainers: int, num_makers: int) -> list[int]:
    """Numbers of the makers that trainer `i` sends weights to: each maker has one source, some trainers no maker."""
    return get_receivers_per_sender(i, num_trainers, num_makers, allow_idle_sender=True)


def check_topology(
    makers: Edges,
    trainers: Edges,
    *,
    groups: Mapping[str, str] = {},
    arbitrate: str | None = None,
    samples_per_maker: int | Mapping[str, int] | None = None,
    samples_wanted: int | Mapping[str, int] | None = None,
) -> list[str]:
    """Check the transfer graph before anything starts, and return it in readable lines.

    `makers` maps each maker to the trainers that it sends experience to, `trainers` each trainer to the makers that
    it sends weights to, `groups` a trainer to its data-parallel group (without one it is a group of its own). A maker
    deals its `samples_per_maker` one by one, in turn, over its trainers; a trainer needs `samples_wanted`. A number
    that a mapping does not name is not known, and not checked. A maker without a source keeps its weights.

    Raises PlacementError with all faults: an unknown name, a name twice, a maker without trainer, a trainer that no
    maker feeds or that gets fewer samples than it wants, a maker whose weights come from several groups (unless
    `arbitrate="latest"`: the newest commit wins). ConfigError for another `arbitrate`.
    """
    if arbitrate not in (None, "latest"):
        raise ConfigError(f"found arbitrate={arbitrate!r}; wanted None or 'latest'")
    made, wanted = _per_name(samples_per_maker, makers), _per_name(samples_wanted, trainers)
    expected = {name: _expected(name, makers, made) for name in trainers}
    faults = [
        *(f"{name!r} is a maker and a trainer" for name in makers if name in trainers),
        *_name_faults({**makers, "`groups`": [*groups], "`samples_wanted`": [*wanted]}, "trainer", trainers),
        *_name_faults({**trainers, "`samples_per_maker`": [*made]}, "maker", makers),
        *_feeding_faults(makers, trainers, expected, wanted),
        *([] if arbitrate else _source_faults(makers, trainers, groups)),
    ]
    if faults:
        raise PlacementError("the makers and trainers cannot run like this: " + "; ".join(faults))
    return [
        *(f"{maker} feeds {', '.join(targets)}" for maker, targets in makers.items()),
        *(_source_line(maker, _sources(maker, trainers)) for maker in makers),
        *(f"{name} can expect {number} samples" for name, number in expected.items() if number is not None),
    ]


def _per_name(numbers: int | Mapping[str, int] | None, names: Iterable[str]) -> dict[str, int]:
    return dict.fromkeys(names, numbers) if isinstance(numbers, int) else dict(numbers or {})


def _expected(trainer: str, makers: Edges, made: Mapping[str, int]) -> int | None:
    """Samples that reach the trainer; None when one of its makers' numbers is not known."""
    feeding = [maker for maker, targets in makers.items() if trainer in targets]
    if not feeding or not made.keys() >= set(feeding):
        return None
    return sum(len(range(list(makers[maker]).index(trainer), made[maker], len(makers[maker]))) for maker in feeding)


def _sources(maker: str, trainers: Edges) -> list[str]:
    return [trainer for trainer, targets in trainers.items() if maker in targets]


def _source_line(maker: str, sources: Sequence[str]) -> str:
    if sources:
        return f"{maker} gets weights from {', '.join(sources)}"
    return f"{maker} gets weights from nobody: it keeps the weights it started with"


def _name_faults(lists: Edges, kind: str, known: Collection[str]) -> list[str]:
    """Names in the lists that stand for no maker or trainer, and names that stand there more than once."""
    faults: list[str] = []
    for who, (name, times) in ((who, entry) for who, names in lists.items() for entry in Counter(names).items()):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {sorted(known)}"
            faults.append(f"{who} names {name!r}, but no {kind} is called so: {hint}")
        if times > 1:
            faults.append(f"{who} names {name!r} {times} times; once is enough")
    return faults


def _feeding_faults(
    makers: Edges, trainers: Edges, expected: Mapping[str, int | None], wanted: Mapping[str, int]
) -> list[str]:
    faults = [f"{maker} has no trainer to send its experience to" for maker, targets in makers.items() if not targets]
    for name in trainers:
        feeding = [maker for maker, targets in makers.items() if name in targets]
        got, need = expected[name], wanted.get(name)
        if not feeding:
            faults.append(f"{name} starves: no maker feeds it")
        elif got is not None and need is not None and got < need:
            faults.append(f"{name} starves: it wants {need} samples and gets {got} from {', '.join(feeding)}")
    return faults


def _source_faults(makers: Edges, trainers: Edges, groups: Mapping[str, str]) -> list[str]:
    """Makers whose weights come from trainers that do not train one and the same model."""
    found = {maker: _sources(maker, trainers) for maker in makers}
    return [
        f"{maker} gets weights from {', '.join(sources)}, which are no data-parallel group: "
        "let one of them send, join them, or set arbitrate='latest'"
        for maker, sources in found.items()
        if len({(name in groups, groups.get(name, name)) for name in sources}) > 1
    ]
