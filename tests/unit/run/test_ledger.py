"""Every sample is in exactly one account."""

import pytest

from hocket.errors import HocketError
from hocket.run.ledger import ACCOUNTS, Ledger


def test_the_life_of_samples():
    ledger = Ledger()
    ledger.started(16)
    ledger.move("in_flight", "buffered", 8)
    ledger.move("buffered", "trained", 8)
    ledger.move("in_flight", "maker_lost", 3)
    expected = dict.fromkeys(ACCOUNTS, 0) | {"trained": 8, "in_flight": 5, "maker_lost": 3, "produced": 16}
    assert ledger.balance() == {f"ledger/{name}": float(n) for name, n in expected.items()}


def test_an_empty_ledger_balances():
    assert sum(Ledger().balance().values()) == 0


def test_it_goes_on_from_accounts():
    ledger = Ledger({"trained": 8, "rolled_back": 2})
    assert ledger.produced == 10
    assert ledger.balance()["ledger/rolled_back"] == 2


@pytest.mark.parametrize(("source", "samples"), [("buffered", 1), ("in_flight", 9)])
def test_more_than_there_was_does_not_balance(source, samples):
    ledger = Ledger()
    ledger.started(8)
    ledger.move(source, "trained", samples)
    with pytest.raises(HocketError, match=r"the ledger does not balance: produced 8, accounts .*-1"):
        ledger.balance()


def test_samples_out_of_nowhere_do_not_balance():
    ledger = Ledger()
    ledger.accounts["trained"] += 1
    with pytest.raises(HocketError, match="does not balance: produced 0"):
        ledger.balance()


@pytest.mark.parametrize(
    "act",
    [
        lambda ledger: ledger.move("in_flight", "forgotten", 1),
        lambda ledger: ledger.move("forgotten", "trained", 1),
        lambda ledger: Ledger({"forgotten": 1}),
    ],
)
def test_the_list_of_reasons_is_closed(act):
    with pytest.raises(HocketError, match=r"has no account 'forgotten'; it has trained, buffered, .*rolled_back"):
        act(Ledger())
