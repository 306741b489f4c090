"""The trainer's end of the experience stream: credits before work is done, then samples, then whole batches."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from hocket.data.proto import DataProto
from hocket.data.schema import EXPERIENCE, check, collate, positions
from hocket.errors import BatchError, ConfigError, WorkerDied

DEFAULT_LIMIT = 4  # batches


@dataclass(frozen=True)
class Grant:
    """The answer to a maker that wants to make samples: how many it may make, and with which weights at least.

    `hungry` says that the trainer waits for samples, `ended` that it takes no more.
    """

    samples: int
    ticket: int = -1
    at_least: int = 0
    hungry: bool = False
    ended: bool = False


@dataclass
class Ack:
    """What became of one message: samples accepted, refused by reason, and left because the trainer has ended."""

    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])
    left: int = 0


@dataclass
class _Parcel:
    """Rows that stay together: a group, or one sample."""

    ticket: int
    maker: str
    rows: DataProto


class Intake:
    """Holds the samples of any number of makers until they are a batch of `batch_size`, first come first served.

    A maker asks (`admit`) before it makes samples, and gets credits for them; a credit comes back when the sample
    goes into a training batch. So at most `limit` batches are outstanding: being made, on the way, or waiting. None
    is no limit. With `max_staleness`, batches are cut in the order of the tickets that came with the credits, and a
    credit waits until its sample cannot be trained more than that many versions after the weights it is made with.
    With `whole_groups`, the samples of one uid stay in one batch. All methods may be called from any thread.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        limit: int | None = DEFAULT_LIMIT,
        max_staleness: int | None = None,
        whole_groups: bool = False,
        name: str = "trainer",
    ) -> None:
        if batch_size < 1 or (limit is not None and limit < 1) or (max_staleness is not None and max_staleness < 0):
            raise ConfigError(
                f"train_batch_size={batch_size}, buffer_limit={limit}, max_staleness={max_staleness}: wanted a batch "
                "of 1 or more, a limit of 1 batch or more (None: no limit), and a staleness of 0 or more (None: any)"
            )
        self.name = name
        self.batch_size = batch_size
        self._limit = None if limit is None else limit * batch_size
        self._max_staleness = max_staleness
        self._whole_groups = whole_groups
        self._changed = threading.Condition()
        self._parcels: list[_Parcel] = []
        self._outstanding: dict[int, str] = {}  # tickets granted, not yet arrived: who has them
        self._next_ticket = 0
        self._in_use = 0  # samples whose credit is out
        self._version = 0
        self._first_version = 0
        self._per_version: int | None = None
        self._waiting = False
        self.ended: dict[str, str] = {}  # makers that send no more: why
        self._acks: dict[tuple[str, int], Ack] = {}
        self.feeders: set[str] = set()
        self.closed: str | None = None
        self.accepted: Counter[str] = Counter()
        self.trained = 0
        self.refused: Counter[str] = Counter()

    # --- the makers' calls ---------------------------------------------------------------------------------

    def join(self, maker: str) -> None:
        """`maker` will send samples, until it says `end`."""
        with self._changed:
            self.feeders.add(maker)
            self.ended.pop(maker, None)
            self._acks = {key: ack for key, ack in self._acks.items() if key[0] != maker}  # its numbers begin anew
            self._changed.notify_all()

    def admit(self, maker: str, samples: int, *, multiple: int = 1) -> Grant:
        """Credits for up to `samples` samples, or none yet. Fewer than asked for are a multiple of `multiple`.

        Raises ConfigError when a version trains on a number of samples that is no multiple.
        """
        with self._changed:
            hungry = self._waiting and self._held() < self.batch_size
            if self.closed:
                return Grant(0, ended=True)
            granted = self._admissible(samples, multiple)
            if not granted:
                return Grant(0, hungry=hungry)
            first = self._next_ticket
            self._next_ticket += granted
            self._in_use += granted
            self._outstanding |= dict.fromkeys(range(first, first + granted), maker)
            return Grant(granted, first, self._oldest(first + granted), hungry=hungry)

    def release(self, maker: str, ticket: int, samples: int) -> None:
        """Give back credits for samples that will not be made."""
        with self._changed:
            given = [t for t in range(ticket, ticket + samples) if self._outstanding.get(t) == maker]
            for one in given:
                del self._outstanding[one]
            self._in_use -= len(given)
            self._changed.notify_all()

    def put(self, maker: str, seq: int, items: DataProto, *, ticket: int | None = None) -> Ack:
        """Take in message number `seq` of `maker`; its rows have the tickets from `ticket` on, in order.

        The same message again gets the same answer and changes nothing. A row that is no valid experience is refused
        alone, by reason. Rows without a ticket (of a caller that asked for no credit) get one here.
        """
        with self._changed:
            if (known := self._acks.get((maker, seq))) is not None:
                return known
            if self.closed:
                return Ack(left=len(items))
            ack = self._acks[maker, seq] = Ack()
            self._acks.pop((maker, seq - 16), None)  # nobody repeats a message that old
            if ticket is None:
                ticket, self._next_ticket = self._next_ticket, self._next_ticket + len(items)
                self._in_use += len(items)
            reasons = faults(items)
            for row, reason in enumerate(reasons):
                self._outstanding.pop(ticket + row, None)
                if reason is not None:
                    ack.refused[reason] += 1
                    self._in_use -= 1
            ack.accepted = reasons.count(None)
            self._parcels += self._cut(items, reasons, ticket, maker)
            self._parcels.sort(key=lambda parcel: parcel.ticket)
            self.accepted[maker] += ack.accepted
            self.refused += ack.refused
            self._changed.notify_all()
            return ack

    def end(self, maker: str, why: str = "it has made all its samples") -> None:
        """`maker` sends no more; credits that it still holds are void."""
        with self._changed:
            self.feeders.add(maker)
            self.ended[maker] = why
            lost = [ticket for ticket, holder in self._outstanding.items() if holder == maker]
            for ticket in lost:
                del self._outstanding[ticket]
            self._in_use -= len(lost)
            self._changed.notify_all()

    # --- the trainer's calls -------------------------------------------------------------------------------

    def expect(self, makers: Sequence[str]) -> None:
        """These makers will come: the stream has not ended before they have."""
        with self._changed:
            self.feeders |= set(makers)

    def plan(self, samples_per_version: int, *, version: int = 0) -> None:
        """From `version` on, so many samples are trained between two versions.

        Until it is known, bounded staleness admits none.
        """
        with self._changed:
            self._per_version = samples_per_version
            self._first_version = self._version = version
            self._changed.notify_all()

    def advance(self, version: int) -> None:
        """Weights of `version` are on their way to the makers."""
        with self._changed:
            self._version = version
            self._changed.notify_all()

    def take(self, *, timeout: float, stop: Callable[[], None] = lambda: None) -> DataProto | None:
        """The next batch, waiting for it; at the end of all streams what is left, then None.

        `stop` is asked several times a second and may raise. Raises WorkerDied, saying who was waited for, when no
        batch is there after `timeout` seconds.
        """
        began = time.monotonic()
        with self._changed:
            self._waiting = True
            try:
                while True:
                    if (batch := self._next_batch()) is not None:
                        return batch
                    if self.over and not self._parcels:
                        return None
                    stop()
                    if (waited := time.monotonic() - began) > timeout:
                        raise WorkerDied(f"{self.name} waited {waited:.0f} s for experience: {self.state()}")
                    self._changed.wait(0.2)
            finally:
                self._waiting = False

    def close(self, why: str) -> int:
        """Take no more; returns how many samples were left untrained."""
        with self._changed:
            self.closed = why
            left = sum(len(parcel.rows) for parcel in self._parcels)
            self._parcels.clear()
            self._in_use = 0
            self._outstanding.clear()
            self._changed.notify_all()
            return left

    def fresh(self) -> Intake:
        """An empty one with the same settings."""
        limit = None if self._limit is None else self._limit // self.batch_size
        return Intake(
            batch_size=self.batch_size,
            limit=limit,
            max_staleness=self._max_staleness,
            whole_groups=self._whole_groups,
            name=self.name,
        )

    def clear(self) -> int:
        """Drop the samples that wait; returns how many. Their credits come back."""
        with self._changed:
            dropped = sum(len(parcel.rows) for parcel in self._parcels)
            self._parcels.clear()
            self._in_use -= dropped
            self._changed.notify_all()
            return dropped

    def unfinished(self) -> list[str]:
        """The makers that have not ended."""
        with self._changed:
            return sorted(self.feeders - set(self.ended))

    @property
    def over(self) -> bool:
        """Whether every maker that feeds this trainer has ended, and there was one."""
        return bool(self.feeders) and self.feeders <= set(self.ended)

    @property
    def outstanding(self) -> int:
        """Samples whose credit is out: being made, on the way, or waiting."""
        return self._in_use

    def __len__(self) -> int:
        """Batches that are ready."""
        with self._changed:
            return self._held() // self.batch_size

    def state(self) -> str:
        """What is there and who is waited for, in words."""
        late = sorted(self.feeders - set(self.ended))
        makers = ", ".join(late) if late else "no maker has joined" if not self.feeders else "all makers have ended"
        return f"{self._held()} of {self.batch_size} samples are there; still to send: {makers}"

    # --- under the lock ------------------------------------------------------------------------------------

    def _held(self) -> int:
        return sum(len(parcel.rows) for parcel in self._parcels)

    def _admissible(self, samples: int, multiple: int) -> int:
        """How many of so many samples may be made now."""
        room = self._limit is None or self._in_use + samples <= self._limit or self._in_use < self.batch_size
        if not room:
            return 0
        if self._max_staleness is None:
            return samples
        if self._per_version is None:
            return 0
        if self._per_version % multiple:
            raise ConfigError(
                f"max_staleness={self._max_staleness} on {self.name}: a version trains on {self._per_version} samples, "
                f"which is no multiple of the {multiple} samples of one prompt; change train_batch_size or the group"
            )
        # cancelled tickets make their successors train earlier than planned, which is only fresher
        versions = self._version - self._first_version + self._max_staleness + 1
        allowed = versions * self._per_version - self._planned()
        return samples if samples <= allowed else allowed // multiple * multiple

    def _planned(self) -> int:
        """Samples trained, waiting, or out."""
        return self.trained + self._in_use

    def _oldest(self, end: int) -> int:
        """The oldest version that the last of the granted samples may be made with."""
        if self._max_staleness is None or self._per_version is None:
            return 0
        trained_at = self._first_version + (self._planned() - 1) // self._per_version
        return max(0, trained_at - self._max_staleness)

    def _cut(self, items: DataProto, reasons: Sequence[str | None], ticket: int, maker: str) -> list[_Parcel]:
        parcels: list[list[int]] = []
        for row in (row for row, reason in enumerate(reasons) if reason is None):
            last = parcels[-1][-1] if parcels else None
            if self._whole_groups and last is not None and _uid(items, last) == _uid(items, row):
                parcels[-1].append(row)
            else:
                parcels.append([row])
        return [_Parcel(ticket + rows[0], maker, items[rows]) for rows in parcels]

    def _next_batch(self) -> DataProto | None:
        """Parcels in order of their tickets, up to a batch; less only at the end of all streams."""
        first_out = min(self._outstanding, default=None) if self._max_staleness is not None else None
        chosen: list[_Parcel] = []
        size = 0
        for parcel in self._parcels:
            if first_out is not None and parcel.ticket > first_out:
                break
            if chosen and size + len(parcel.rows) > self.batch_size:
                size = self.batch_size  # a group that does not fit waits for the next batch
                break
            chosen.append(parcel)
            size += len(parcel.rows)
            if size >= self.batch_size:
                break
        if not chosen or (size < self.batch_size and not self.over):
            return None
        del self._parcels[: len(chosen)]
        rows = sum(len(parcel.rows) for parcel in chosen)
        self._in_use -= rows
        self.trained += rows
        self._changed.notify_all()
        return collate([parcel.rows for parcel in chosen])


def faults(items: DataProto) -> list[str | None]:
    """For each row, why it is no valid experience, or None. What is wrong with all rows is each one's reason."""
    try:
        check(items, EXPERIENCE, "experience")
    except BatchError as error:
        return [error.message] * len(items)
    start, length, width = items.tensor("prompt_length"), items.tensor("length"), items.tensor("input_ids").shape[1]
    mask, response = items.tensor("response_mask"), positions(length, width) & ~positions(start, width)
    found = {
        "its lengths are not 0 < prompt_length <= length <= width": (start < 1) | (length < start) | (length > width),
        "its response_mask reaches outside the response": (mask & ~response).any(-1),
        "its score is not finite": ~torch.isfinite(items.tensor("score")),
        "its rollout_logprobs are not finite": ~torch.isfinite(items.tensor("rollout_logprobs")).all(-1),
        "it holds negative token ids": (items.tensor("input_ids") < 0).any(-1),
    }
    return [next((reason for reason, bad in found.items() if bad[row]), None) for row in range(len(items))]


def _uid(items: DataProto, row: int) -> str:
    return str(items.non_tensor_batch["uid"][row])
