"""What the crew knows of a maker without asking it: reports come with units, and who makes units is alive."""

import pytest

from hocket.config import SuperviseSection
from hocket.data.proto import DataProto
from hocket.errors import WeightsGone, WeightSyncError
from hocket.observe.trace import Span
from hocket.roles.maker import Report
from hocket.run.crew import Member
from hocket.run.flow import Lease
from hocket.workers.maker_worker import UnitFacts


class Instant:
    """A Remote whose answers are there at once; an answer that is an error is raised."""

    name = "maker-0"

    def __init__(self):
        self.looks = 0
        self.delivery = None

    @property
    def parts(self):
        return [self]

    def send(self, method, *args, **kwargs):
        if method == "make_unit":
            span = Span("maker-0", "generate", 0, 1)
            return "experience", UnitFacts(4, [(0, 0)], Report([span]))
        return self.delivery if method == "receive" else None

    def get(self, ref, **about):
        if isinstance(ref, Exception):
            raise ref
        return ref

    def done(self, ref, timeout=0):
        return True

    def look(self):
        self.looks += 1
        return ["wait"], None


def lease(index=0):
    unit = DataProto.from_dict({}, {"uid": ["a"]}, {"step": 0, "unit": index})
    return Lease(unit, 4, 0, 0, "maker-0")


def member():
    remote = Instant()
    return remote, Member("maker-0", remote)


def test_what_a_maker_reports_comes_with_its_units_and_once():
    _, maker = member()
    assert maker.told() == []
    for index in range(2):
        maker.make(lease(index))
    assert [report.spans[0].name for report in maker.told()] == ["generate", "generate"]
    assert maker.told() == []


def test_who_has_just_made_a_unit_is_not_asked_whether_it_lives():
    remote, maker = member()
    maker.make(lease())
    maker.watch(SuperviseSection())
    assert remote.looks == 0
    maker.watch(SuperviseSection())
    assert remote.looks == 1


def test_short_units_leave_no_deliveries_behind():
    remote, maker = member()
    for _ in range(100):
        maker.receive(("manifest", []))
        maker.make(lease())
    assert maker._receiving == []
    remote.delivery = WeightsGone("its trainer died")
    maker.receive(("manifest", []))
    maker.make(lease())


def test_a_delivery_that_was_refused_is_raised_after_the_unit():
    remote, maker = member()
    remote.delivery = WeightSyncError("version 3: 1 weight did not arrive")
    maker.receive(("manifest", []))
    with pytest.raises(WeightSyncError, match="1 weight did not arrive"):
        maker.make(lease())
