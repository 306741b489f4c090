"""What the controller of a run costs: units a second that it can handle, and its CPU time for one of them.

usage: python benchmarks/controller.py [--steps 30] [--makers 4,64]

First the protocol alone: flow, ledger and history files, without a process. Then the real program, session and crew of
`hocket train` on Ray, with makers and a trainer that only sleep: as many units a second are on offer whatever the
number of makers, and then more than two cores can handle. The floor, in the same run, is one thread that sends the same
bytes to the same makers in bare Ray calls. Exits with 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import io
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import ray

from hocket.config import Detached, RunConfig
from hocket.data.proto import DataProto
from hocket.observe.history import History
from hocket.read_config import load_config
from hocket.run.cluster import cluster
from hocket.run.crew import Crew
from hocket.run.flow import Flow, Lease
from hocket.run.programs import detached
from hocket.run.remote import Ranks, Remote
from hocket.run.session import Session
from hocket.run.supervise import Supervisor
from hocket.run.train import begin
from hocket.waiting import Waiter

UNITS = 128  # of a step
OFFERED = 500.0  # units a second, in the runs whose CPU time is compared
GROUPS = {"compute": 1, "experience_io": 1, "model_io": 1}
ANSWERS = {"train": {"tokens": 1.0, "reward/mean": 0.0}, "publish": ("manifest", ["chunk"]), "progress": ["wait"]}
ANSWERS |= {"report": SimpleNamespace(spans=[], samples=[])}
ANSWERS |= {"save": {"weights_sha256": "", "optimizer_sha256": ""}}


class Measured(NamedTuple):
    """Units, and what it took this process to have them made."""

    who: str
    units: int
    wall: float
    cpu: float

    @property
    def rate(self) -> float:
        """Units a second."""
        return self.units / self.wall

    @property
    def cost(self) -> float:
        """CPU time of this process for a unit, in microseconds."""
        return self.cpu / self.units * 1e6

    def row(self) -> str:
        """Of the table."""
        return f"| {self.who} | {self.units} | {self.rate:.0f} | {self.cost:.0f} |"


def measured(who: str, units: int, act: Callable[[], object]) -> Measured:
    """`act` makes so many units."""
    wall, cpu = time.perf_counter(), time.process_time()
    act()
    return Measured(who, units, time.perf_counter() - wall, time.process_time() - cpu)


def protocol(config: RunConfig, makers: int, folder: Path) -> Measured:
    """The flow by itself, with as many units out as there are makers; every fact goes into a history file."""
    steps = 10 * config.trainer.max_steps
    drawn = [DataProto.from_dict({}, {"uid": ["f.csv:0:0"]}, {"step": 0, "unit": i}) for i in range(UNITS)]

    def units(step: int) -> list[DataProto]:
        for unit in drawn:
            unit.meta_info = {"step": step, "unit": unit.meta_info["unit"]}
        return [unit[:] for unit in drawn]

    history = History(folder / "protocol.jsonl")
    flow = Flow(units, steps=steps, samples=lambda unit: 4, max_staleness=0, note=history.add)

    def act() -> None:
        out: list[Lease] = []
        while flow.step < steps:
            while len(out) < makers and (lease := flow.offer(f"maker-{len(out)}", lambda unit: True)) is not None:
                out.append(lease)
            lease = out.pop(0)
            flow.made(lease, lease.key, lease.samples)
            if flow.ready(flow.step) is not None:
                flow.trained(flow.step)
                flow.advance(flow.step)

    return measured(f"protocol without Ray, {makers} makers", steps * UNITS, act)


class Sleeper:
    """A maker or trainer that does nothing, for so many seconds. It needs no torch, and never opens what it gets."""

    def __init__(self, seconds: float, answers: dict[str, Any]) -> None:
        self.seconds, self.answers = seconds, answers

    def make(self, unit: bytes) -> tuple[bytes, Any]:
        """Experience, and facts about it."""
        time.sleep(self.seconds)
        return unit, SimpleNamespace(rows=4, versions=[(0, 0)], report=self.answers["report"])

    def answer(self, method: str) -> Any:
        """To anything else."""
        return self.answers.get(method)

    def set(self, seconds: float) -> None:
        """So long from now on."""
        self.seconds = seconds


class SleepingRemote(Remote):
    """Sends units as bytes, so that those who get them need not import what opens them."""

    def send(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """See Remote."""
        if method == "make_unit":
            return self._actor.make.options(num_returns=2).remote(pickle.dumps(args[0]))
        group = {"receive": "model_io", "progress": "experience_io", "report": "experience_io"}.get(method, "compute")
        return self._actor.answer.options(concurrency_group=group).remote(method)


class Dormitory:
    """A workshop of sleepers; those that were started are handed out again."""

    def __init__(self, makers: int) -> None:
        actor = cast(Any, ray.remote)(concurrency_groups=GROUPS, num_cpus=0)(Sleeper)
        self.actors = [actor.remote(0.0, ANSWERS) for _ in range(makers + 1)]
        ray.get([actor.answer.remote("ping") for actor in self.actors])
        self.waiter = Waiter(timeout=120)

    def sleep(self, seconds: float) -> None:
        """So long is the making of each unit from now on."""
        ray.get([actor.set.remote(seconds) for actor in self.actors[1:]])

    def maker(self, index: int, *, late: bool = False) -> Remote:
        """See Workshop."""
        return SleepingRemote(self.actors[1 + index], name=f"maker-{index}", waiter=self.waiter)

    def trainer(self) -> Ranks:
        """See Workshop."""
        return Ranks([SleepingRemote(self.actors[0], name="trainer-0", waiter=self.waiter)], waiter=self.waiter)

    def ready(self, *roles: Remote) -> None:
        """See Workshop."""


def program(config: RunConfig, dormitory: Dormitory, makers: int, seconds: float) -> Measured:
    """The detached program from its first unit to its last."""
    placement = Detached(makers=makers, max_staleness=1)
    with tempfile.TemporaryDirectory() as folder:
        run = config.run.model_copy(update={"dir": f"{folder}/run"})
        with begin(config.model_copy(update={"placement": placement, "run": run}), stream=io.StringIO()) as session:
            return of_session(session, placement, dormitory, seconds)


def of_session(session: Session, placement: Detached, dormitory: Dormitory, seconds: float) -> Measured:
    """See `program`."""
    makers, supervisor = placement.makers, Supervisor()
    dormitory.sleep(seconds)
    crew = Crew(dormitory, session.config.supervise, supervisor, makers=makers, say=print)
    who = f"`hocket train`, {makers} makers of {seconds * 1000:.0f} ms"
    units = UNITS * session.config.trainer.max_steps
    return measured(who, units, lambda: detached(session, placement, crew, supervisor))


def bare(dormitory: Dormitory, makers: int, units: int, seconds: float) -> Measured:
    """The floor: no program can do less than send a unit and look at a small answer."""
    dormitory.sleep(seconds)
    unit = DataProto.from_dict({}, {"uid": ["f.csv:0:0"]}, {"step": 0, "unit": 0})

    def start(index: int) -> tuple[Any, int]:
        return dormitory.actors[1 + index].make.options(num_returns=2).remote(pickle.dumps(unit))[1], index

    def act() -> None:
        out = dict(start(index) for index in range(makers))
        for _ in range(units):
            done = ray.wait(list(out), num_returns=1)[0][0]
            ray.get(done)
            ref, index = start(out.pop(done))
            out[ref] = index
        ray.get(list(out))

    return measured(f"bare Ray calls, {makers} makers of {seconds * 1000:.0f} ms", units, act)


def missed(alone: Measured, even: Sequence[Measured], fast: Measured) -> list[str]:
    """The goals that are missed, in words."""
    growth = even[-1].cost / even[0].cost
    goals = (
        (alone.rate >= 2000, f"{alone.rate:.0f} units/s without Ray, wanted 2000"),
        (fast.rate >= 400, f"{fast.rate:.0f} units/s on Ray, wanted 400"),
        (growth <= 1.2, f"CPU time per unit grows {growth:.2f} x with the makers, wanted at most 1.2"),
    )
    return [what for holds, what in goals if not holds]


def main(options: argparse.Namespace) -> None:
    """Measure and print a table."""
    settings = [f"trainer.max_steps={options.steps}", f"trainer.prompts_per_step={UNITS}", "eval.path=null"]
    settings += ["rollout.prompts_per_unit=1", "checkpoint.every=null", "model.warm_start.steps=0", "reward=digits"]
    config = load_config(Path(__file__).parent.parent / "hocket" / "recipes" / "digits.yaml", settings)
    print("| what | units | units/s | CPU time of the controller per unit, µs |\n| --- | --- | --- | --- |")

    def show(one: Measured) -> Measured:
        print(one.row(), flush=True)
        return one

    most, units = options.makers[-1], UNITS * options.steps
    with tempfile.TemporaryDirectory() as folder:
        alone = show(protocol(config, most, Path(folder)))
    with cluster(None, [{"CPU": 2.0, "GPU": 0.0}]):
        dormitory = Dormitory(most)
        for makers in options.makers:
            show(bare(dormitory, makers, units, makers / OFFERED))
        show(bare(dormitory, most, units, 0.02))
        even = [show(program(config, dormitory, makers, makers / OFFERED)) for makers in options.makers]
        fast = show(program(config, dormitory, most, 0.02))
    print(f"CPU time per unit from {options.makers[0]} to {most} makers: {even[-1].cost / even[0].cost:.2f} x")
    if faults := missed(alone, even, fast):
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--makers", type=lambda text: [int(n) for n in text.split(",")], default=[4, 64])
    main(parser.parse_args())
