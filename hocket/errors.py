"""The one tree of errors. Each message says what was found, what was wanted, and what to do.

HocketError
├── ConfigError       a setting is unknown, malformed, or contradicts another (exit code 2)
├── DataError         a prompt file or model folder is missing or cannot be read as asked (exit code 2)
├── RewardError       a reward function raised, or returned something that is no score
├── BatchError        tensors of one batch do not have the names, types or shapes of their stage
│   ├── BatchConflict what should fit together does not (also an AssertionError and a ValueError)
│   └── BatchLookup   a name or row that the batch does not have (also a KeyError and an IndexError)
├── GroupError        a worker group, pool or dispatch mode was used in a way that cannot work
├── PlacementError    the machine or cluster cannot host what the placement asks for (exit code 2)
├── WeightSyncError   a weight version was refused: incomplete, unknown, older, or damaged
│   └── WeightsGone   its chunks went with the trainer that sent it
├── CheckpointError   a checkpoint could not be written or read
└── WorkerDied        a process of the run ended or stopped answering (exit code 3)
    ├── DataLost      what a process had made is gone, because its machine is
    └── StartFailed   it could not be made: its own code raised

Every error carries one string, so that it pickles across processes unchanged.
"""


class HocketError(Exception):
    """Base of all errors that hocket raises on purpose."""

    exit_code = 1

    @property
    def message(self) -> str:
        """The text without the class name."""
        return str(self.args[0]) if self.args else ""


class ConfigError(HocketError):
    """A setting is unknown, malformed, or contradicts another one."""

    exit_code = 2


class DataError(HocketError):
    """A prompt file, tokenizer or model folder is missing or cannot be read as asked."""

    exit_code = 2


class RewardError(HocketError):
    """A reward function raised, or returned something that is not one finite number per completion."""


class BatchError(HocketError):
    """The tensors of a batch do not have the names, dtypes or shapes of their stage."""


class GroupError(HocketError, ValueError, AssertionError):
    """A worker group, pool or dispatch mode was used in a way that cannot work.

    It is a ValueError and an AssertionError too: code written for veRL catches those.
    """


class BatchConflict(BatchError, AssertionError, ValueError):
    """Batches, rows or values that should fit together do not; code written for veRL catches the other two."""


class BatchLookup(BatchError, AssertionError, KeyError, IndexError):
    """The batch has no such tensor, column or row; code written for veRL catches the other three."""

    def __str__(self) -> str:
        return self.message  # a KeyError would print it in quotes


class PlacementError(HocketError):
    """The machine or cluster cannot host what the placement asks for."""

    exit_code = 2


class WeightSyncError(HocketError):
    """A weight version was refused: incomplete, unknown, older, damaged, or with other names."""


class WeightsGone(WeightSyncError):
    """The chunks of a weight version went with the trainer that sent it."""


class CheckpointError(HocketError):
    """A checkpoint could not be written or read."""


class WorkerDied(HocketError):
    """A process of the run ended, or did not answer within its deadline."""

    exit_code = 3


class DataLost(WorkerDied):
    """What a process had made is gone from the object store, because the machine that held it is."""


class StartFailed(WorkerDied):
    """The code that makes a worker raised: a replacement would fare no better."""
