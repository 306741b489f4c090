"""Hooks into the loops of makers and trainers. Subclass, and override what you need; every default does nothing.

A maker calls loop_start { batch_start make_start make_end send_start send_end batch_end }* loop_end, a trainer
fit_start { episode_start { epoch_start { batch_start batch_end }* epoch_end }* update_start update_end episode_end }*
fit_end. An exception in a hook ends the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hocket.data.experience import Experience


class MakerCallback:
    """What a maker's `workingloop` calls."""

    def on_loop_start(self) -> None: ...

    def on_loop_end(self) -> None: ...

    def on_batch_start(self) -> None: ...

    def on_batch_end(self) -> None: ...

    def on_make_experience_start(self) -> None: ...

    def on_make_experience_end(self, experience: Experience) -> None: ...

    def on_send_start(self) -> None: ...

    def on_send_end(self) -> None: ...


class TrainerCallback:
    """What a trainer's `fit` calls. Episodes, and epochs in each, count from 0; `on_update_*` is the weight push."""

    def on_fit_start(self) -> None: ...

    def on_fit_end(self) -> None: ...

    def on_episode_start(self, episode: int) -> None: ...

    def on_episode_end(self, episode: int) -> None: ...

    def on_epoch_start(self, epoch: int) -> None: ...

    def on_epoch_end(self, epoch: int) -> None: ...

    def on_batch_start(self) -> None: ...

    def on_batch_end(self, metrics: Mapping[str, float], experience: Experience) -> None: ...

    def on_update_start(self) -> None: ...

    def on_update_end(self) -> None: ...


def notify(callbacks: Iterable[MakerCallback | TrainerCallback], hook: str, *args: Any) -> None:
    """Call that hook of each callback, in order; the first exception ends it and propagates."""
    for callback in callbacks:
        getattr(callback, hook)(*args)
