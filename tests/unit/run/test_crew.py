"""Who takes the place of whom, with processes that are plain objects."""

import pytest

from hocket.config import SuperviseSection
from hocket.errors import StartFailed, WorkerDied
from hocket.run.crew import Crew
from hocket.run.supervise import Supervisor


class Process:
    def __init__(self, name, number, log):
        self.name, self.number, self.log, self.parts = name, number, log, [self]

    def kill(self):
        self.log.append(f"process {self.number} killed")


class Shop:
    """A workshop whose processes become ready, or not, as `fate` says: nothing, or an error, for each in turn."""

    def __init__(self):
        self.log, self.fate, self.number = [], [], 0

    def maker(self, index, *, late=False):
        self.number += 1
        return Process(f"maker-{index}", self.number, self.log)

    def trainer(self):
        self.number += 1
        return Process("trainer-0", self.number, self.log)

    def ready(self, *roles, check=lambda: None):
        check()
        if self.fate and (error := self.fate.pop(0)) is not None:
            raise error
        self.log.append(f"process {roles[0].number} ready")


@pytest.fixture
def shop():
    return Shop()


@pytest.fixture
def crew(shop):
    settings = SuperviseSection(maker_restarts=3, trainer_restarts=2, backoff=0)
    crew = Crew(shop, settings, Supervisor(), makers=1, say=shop.log.append)
    shop.log.clear()
    return crew


DIED = WorkerDied("maker-0 died")


def test_one_that_dies_before_it_is_ready_costs_another_of_the_budget(crew, shop):
    shop.fate = [WorkerDied("once more"), None]
    assert crew.replace_maker(crew.makers[0], DIED)
    assert shop.log == [
        "process 1 killed",
        "maker-0 died; a new maker takes its place",
        "process 3 killed",
        "once more; a new maker takes its place",
        "process 4 ready",
    ]
    assert crew.restarts["maker"] == 2
    assert crew.makers[0].now.number == 4


@pytest.mark.parametrize("who", ["maker", "trainer"])
def test_a_spent_budget_ends_it_with_the_last_error(crew, shop, who):
    shop.fate = [WorkerDied("again")] * 5
    with pytest.raises(WorkerDied, match="again") as raised:
        crew.replace_maker(crew.makers[0], DIED) if who == "maker" else crew.replace_trainer(DIED)
    assert f"supervise.{who}_restarts" in raised.value.__notes__[0]
    assert crew.restarts[who] == {"maker": 3, "trainer": 2}[who]


@pytest.mark.parametrize("who", ["maker", "trainer"])
def test_one_that_cannot_be_made_is_not_tried_again(crew, shop, who):
    shop.fate = [StartFailed("no model")]
    with pytest.raises(StartFailed, match="no model"):
        crew.replace_maker(crew.makers[0], DIED) if who == "maker" else crew.replace_trainer(DIED)
    assert crew.restarts[who] == 1


def test_one_that_is_not_wanted_any_more_is_not_waited_for(crew, shop):
    assert not crew.replace_maker(crew.makers[0], DIED, wanted=lambda: False)
    assert shop.log[-1] == "process 3 killed"
    assert crew.makers[0].now.number == 1


def test_the_watchdog_knows_better_why(crew, shop):
    crew.makers[0].gone = "maker-0 made no progress"
    crew.replace_maker(crew.makers[0], DIED)
    assert "maker-0 made no progress; a new maker takes its place" in shop.log
    assert crew.makers[0].gone is None
