"""Hooks do nothing by default, run in order, and may stop the loop."""

import inspect

import pytest

from hocket.workers.callbacks import MakerCallback, TrainerCallback, notify

HOOKS = {
    MakerCallback: {
        **{
            f"on_{what}_{when}": []
            for what in ("loop", "batch", "make_experience", "send")
            for when in ("start", "end")
        },
        "on_make_experience_end": ["experience"],
    },
    TrainerCallback: {
        **{f"on_{what}_{when}": [] for what in ("fit", "batch", "update") for when in ("start", "end")},
        **{f"on_{what}_{when}": [what] for what in ("episode", "epoch") for when in ("start", "end")},
        "on_batch_end": ["metrics", "experience"],
    },
}


@pytest.mark.parametrize("kind", HOOKS)
def test_the_hooks_their_arguments_and_their_defaults(kind):
    hooks = {name: inspect.signature(hook) for name, hook in vars(kind).items() if name.startswith("on_")}
    assert {name: list(signature.parameters)[1:] for name, signature in hooks.items()} == HOOKS[kind]
    for name, arguments in HOOKS[kind].items():
        assert notify([kind()], name, *[None for _ in arguments]) is None


class Noting(TrainerCallback):
    def __init__(self, name, seen, fails=False):
        self.name, self.seen, self.fails = name, seen, fails

    def on_epoch_end(self, epoch):
        self.seen.append((self.name, epoch))
        if self.fails:
            raise ValueError(f"{self.name} has seen enough")


def test_callbacks_are_called_in_order():
    seen = []
    callbacks = [Noting("a", seen), TrainerCallback(), Noting("b", seen)]
    notify(callbacks, "on_epoch_end", 3)
    notify(callbacks, "on_update_end")
    assert seen == [("a", 3), ("b", 3)]


def test_an_exception_in_a_hook_comes_through():
    seen = []
    with pytest.raises(ValueError, match="a has seen enough"):
        notify([Noting("a", seen, fails=True), Noting("b", seen)], "on_epoch_end", 0)
    assert seen == [("a", 0)]
    with pytest.raises(AttributeError, match="on_epoch"):
        notify([TrainerCallback()], "on_epoch")
