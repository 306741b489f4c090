"""How fast makers and trainers are: callbacks that time the stages and count floating-point operations.

A forward of n parameters over one token counts 2 n flop, a backward twice that; attention scores are left out, and
padding counts, because it is computed. Shapes: B rows, S positions, A of them for actions, P = S - A for prompts.
W is `world_size`: how many processes work like this one. The throughput is that of all of them, the tflops are of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from hocket.data.experience import Experience
from hocket.workers.callbacks import MakerCallback, TrainerCallback


class Timer:
    """Cumulative seconds between `start` and `end`; work that was queued on a GPU counts with who queued it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Back to 0, and not running."""
        self._started: float | None = None
        self.duration = 0.0

    def start(self) -> None:
        """Start, anew when it is running."""
        self._started = _now()

    def end(self) -> None:
        """Add the seconds since `start` to `duration`; nothing when it is not running."""
        if self._started is not None:
            self.duration += _now() - self._started
        self._started = None


class _Evaluator:
    """Sums of one loop: `samples`, `flop`, and the times of the whole, of what computes, and of what sends."""

    def __init__(
        self, sizes: Mapping[str, int], computing: str, sending: str, *, world_size: int, say: Callable[[str], object]
    ) -> None:
        self.sizes, self.world_size, self.say = dict(sizes), world_size, say
        self.timers = {"overall": Timer(), computing: Timer(), sending: Timer()}
        self.overall, self.computing, self.sending = self.timers.values()
        self.reset()
        say("parameters: " + ", ".join(f"{name} {number / 1e9:.3f} B" for name, number in sizes.items()))

    def reset(self) -> None:
        """All sums back to 0."""
        self.samples = self.flop = 0
        for timer in self.timers.values():
            timer.reset()

    def report(self) -> dict[str, float]:
        """samples, flop, throughput (samples/s), tflops, seconds per sample, and each stage's seconds and share.

        All 0 when there were no samples. Stages may overlap: the shares need not add up to 1.
        """
        everyone, overall = self.samples * self.world_size, self.overall.duration
        times = {name: timer.duration for name, timer in self.timers.items()}
        return {
            "samples": float(self.samples),
            "flop": float(self.flop),
            "throughput": _ratio(everyone, overall),
            "tflops": _ratio(self.flop / 1e12, self.computing.duration),
            **{f"{name}_seconds_per_sample": _ratio(seconds, everyone) for name, seconds in times.items()},
            **{f"{name}_share": _ratio(seconds, overall) for name, seconds in times.items() if name != "overall"},
        }

    def say_report(self, who: str) -> None:
        """The report in two lines; one that says so when there were no samples."""
        report, (_, *stages) = self.report(), self.timers
        if not self.samples:
            self.say(f"{who}: no samples that count, so there is no performance to report")
            return
        each = [
            f"{name} {report[f'{name}_seconds_per_sample']:.3g} s ({report[f'{name}_share']:.0%})" for name in stages
        ]
        self.say(f"{who}: {report['throughput']:.3g} samples/s, {report['tflops']:.3g} TFLOPS per process")
        self.say(f"{who}: a sample takes {report['overall_seconds_per_sample']:.3g} s: {', '.join(each)}")


class ExperienceMakerPerformanceEvaluator(_Evaluator, MakerCallback):
    """Times a maker's batches ("overall"), the making of experience ("make") and the sending ("send").

    Per experience, with the numbers of parameters of the four models:
      generation: each of A steps is a forward over all before it: 2 B actor (P + S - 1) A / 2,
      or, with `kv_cache`, over the prompt once and then over one token per further step: 2 B actor (P + A - 1);
      scoring: one forward of all four: 2 B S (actor + critic + initial + reward).
    throughput = samples W / overall time; tflops = flop / 1e12 / make time; seconds per sample = time / (samples W).
    """

    def __init__(
        self,
        actor_num_params: int,
        critic_num_params: int,
        initial_model_num_params: int,
        reward_model_num_params: int,
        *,
        kv_cache: bool = False,
        world_size: int = 1,
        say: Callable[[str], object] = print,
    ) -> None:
        sizes = {"actor": actor_num_params, "critic": critic_num_params}
        sizes |= {"initial": initial_model_num_params, "reward": reward_model_num_params}
        super().__init__(sizes, "make", "send", world_size=world_size, say=say)
        self.kv_cache = kv_cache

    def on_loop_start(self) -> None:
        self.reset()

    def on_loop_end(self) -> None:
        self.say_report("maker")

    def on_batch_start(self) -> None:
        self.overall.start()

    def on_batch_end(self) -> None:
        self.overall.end()

    def on_make_experience_start(self) -> None:
        self.computing.start()

    def on_make_experience_end(self, experience: Experience) -> None:
        self.computing.end()
        rows, width = experience.sequences.shape
        generated = self._generated_over(width, experience.action_mask.shape[1])
        self.samples += rows
        self.flop += 2 * rows * (self.sizes["actor"] * generated + sum(self.sizes.values()) * width)

    def on_send_start(self) -> None:
        self.sending.start()

    def on_send_end(self) -> None:
        self.sending.end()

    def _generated_over(self, width: int, actions: int) -> int:
        """Positions of one row that the forwards of its generation run over."""
        if self.kv_cache:
            return width - 1 if actions else 0
        return (width - actions + width - 1) * actions // 2  # P + (P + 1) + ... + (S - 1)


class TrainerPerformanceEvaluator(_Evaluator, TrainerCallback):
    """Times a trainer's episodes ("overall"), the batches in them ("train") and the weight pushes ("update").

    Per batch: 2 B S (actor + critic) 3 flop, a forward and a backward; 4 with `enable_grad_checkpoint`. Samples count
    again in each epoch. The episodes before number `ignore_first_episodes` warm up and do not count. What is overall,
    but neither train nor update, is waiting for experience.
    throughput = samples W / overall time; tflops = flop / 1e12 / train time; seconds per sample = time / (samples W).
    """

    def __init__(
        self,
        actor_num_params: int,
        critic_num_params: int,
        enable_grad_checkpoint: bool = False,
        ignore_first_episodes: int = 1,
        *,
        world_size: int = 1,
        say: Callable[[str], object] = print,
    ) -> None:
        sizes = {"actor": actor_num_params, "critic": critic_num_params}
        super().__init__(sizes, "train", "update", world_size=world_size, say=say)
        self.forwards = 4 if enable_grad_checkpoint else 3
        self.ignore_first_episodes = ignore_first_episodes

    def on_fit_start(self) -> None:
        self.reset()

    def on_fit_end(self) -> None:
        self.say_report("trainer")

    def on_episode_start(self, episode: int) -> None:
        self.overall.start()

    def on_episode_end(self, episode: int) -> None:
        self.overall.end()
        if episode < self.ignore_first_episodes:
            self.reset()

    def on_batch_start(self) -> None:
        self.computing.start()

    def on_batch_end(self, metrics: Mapping[str, float], experience: Experience) -> None:
        self.computing.end()
        rows, width = experience.sequences.shape
        self.samples += rows
        self.flop += 2 * rows * width * sum(self.sizes.values()) * self.forwards

    def on_update_start(self) -> None:
        self.sending.start()

    def on_update_end(self) -> None:
        self.sending.end()


def _now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()  # of this thread only: copies on other streams go on
    return time.perf_counter()


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
