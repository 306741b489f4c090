"""The rewards that need no file of the user's own. Each compares one completion with one answer."""

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation

# A sign counts only where no digit stands before it: "10-3" ends in 3. Commas must separate thousands.
_NUMBER = re.compile(r"(?:(?<!\d)-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?:(?<!\d)-)?\.\d+", re.ASCII)


def exact(completion: str, answer: str) -> dict[str, float]:
    """1 when completion and answer are the same text, apart from space around them."""
    same = float(completion.strip() == answer.strip())
    return {"score": same, "accuracy": same}


def digits(completion: str, answer: str) -> dict[str, float]:
    """Half for the share of right characters, place by place over the longer text; half for all of them."""
    given, wanted = completion.strip(), answer.strip()
    if given == wanted:
        return {"score": 1.0, "accuracy": 1.0}
    right = sum(a == b for a, b in zip(given, wanted, strict=False))
    return {"score": 0.5 * right / max(len(given), len(wanted)), "accuracy": 0.0}


def number(completion: str, answer: str) -> dict[str, float]:
    """1 when the last number of the completion has the value of the answer (68, 68.0 and 1,068 are numbers).

    An answer in GSM8K's form, working and then `#### 68`, counts from its last `####`. Raises `ValueError`
    when the answer is not a finite number.
    """
    wanted = _answer_value(answer.rpartition("####")[2])
    found = _NUMBER.findall(completion.replace("\N{MINUS SIGN}", "-"))
    right = float(bool(found) and Decimal(found[-1].replace(",", "")) == wanted)
    return {"score": right, "accuracy": right}


def _answer_value(text: str) -> Decimal:
    try:
        value = Decimal(text.strip().replace(",", ""))
    except InvalidOperation:
        value = Decimal("nan")
    if not value.is_finite():
        raise ValueError(f"the answer {text!r} is not a number; use reward=exact for answers that are text")
    return value


BUILTIN: dict[str, Callable[..., object]] = {"exact": exact, "digits": digits, "number": number}
