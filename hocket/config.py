"""RunConfig: the typed sections of a run. Each section sits beside what it sets; an unknown key is an error.

`hocket.read_config` makes one of a recipe and of words on the command line.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast, get_args

from omegaconf import OmegaConf
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from hocket.observe.redact import redacted

Bundle = dict[str, float]


def _file_name(name: str) -> str:
    """The name again; ValueError when it cannot be that of one folder."""
    if name in ("", ".", "..") or "/" in name or not name.isprintable() or len(name.encode()) > 200:
        raise ValueError("the name must be that of one folder: no slash, no control characters, 1 to 200 bytes")
    return name


def _path(name: str) -> str:
    """The path again; ValueError when no system could have it."""
    if not name.strip() or "\0" in name or "\n" in name:
        raise ValueError("a path is not empty, and holds neither NUL nor a line break")
    return name


FileName = Annotated[str, AfterValidator(_file_name)]
PathText = Annotated[str, AfterValidator(_path)]
Share = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Frozen, and unknown keys are errors. `run.name=7` is the text "7"."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, given: Any) -> Any:
        """pydantic would read `max_steps: true` as 1."""
        for name, value in cast(dict[str, Any], given).items() if isinstance(given, dict) else ():
            wanted = cls.model_fields[name].annotation if name in cls.model_fields else None
            if isinstance(value, bool) and {int, float} & {wanted, *get_args(wanted)}:
                raise ValueError(f"{name} wants a number, not {str(value).lower()}")
        return given


# --- placement: a value; exactly one `match` in the code (run/programs.py) looks at it -----------------


class Local(Section):
    """Maker and trainer in this process, without Ray: for tests, pdb, and ideas."""

    kind: Literal["local"] = "local"
    threads_per_worker: int = Field(default=1, ge=1, description="torch threads of every computing thread")
    max_staleness: Literal[0] = Field(default=0, description="always 0: one process alternates")

    @property
    def bundles(self) -> list[Bundle]:
        """None: there are no workers."""
        return []


class Colocated(Section):
    """Maker and trainer share one Ray worker process."""

    kind: Literal["colocated"] = "colocated"
    threads_per_worker: int = Field(default=1, ge=1, description="torch threads of every computing thread")
    max_staleness: Literal[0] = Field(default=0, description="always 0: one process alternates")
    cpus_per_worker: float = Field(default=1, ge=0, description="CPUs that Ray reserves for the worker")
    gpus_per_worker: float = Field(default=0, ge=0, description="GPUs that Ray reserves for the worker")

    @property
    def bundles(self) -> list[Bundle]:
        """What Ray is to reserve, a bundle per worker process."""
        return [{"CPU": self.cpus_per_worker, "GPU": self.gpus_per_worker}]


class Detached(Section):
    """M maker processes and N trainer processes, working at the same time."""

    kind: Literal["detached"] = "detached"
    makers: int = Field(default=1, ge=1, description="maker processes")
    trainers: int = Field(default=1, ge=1, description="trainer processes, the ranks of one data-parallel group")
    edges: list[list[int]] | None = Field(
        default=None, description="the trainer ranks that each maker feeds; default: dealt in turn"
    )
    max_staleness: int = Field(default=0, ge=0, description="versions that a sample may be behind when trained")
    threads_per_worker: int = Field(default=1, ge=1, description="torch threads of every computing thread")
    cpus_per_worker: float = Field(default=1, ge=0, description="CPUs that Ray reserves for each worker")
    gpus_per_maker: float = Field(default=0, ge=0, description="GPUs that Ray reserves for each maker")
    gpus_per_trainer: float = Field(default=0, ge=0, description="GPUs that Ray reserves for each trainer")

    @model_validator(mode="after")
    def _everybody_fed(self) -> Detached:
        if self.edges is None:
            return self
        fed = {rank for ranks in self.edges for rank in ranks}
        if len(self.edges) != self.makers or not all(self.edges) or fed != set(range(self.trainers)):
            raise ValueError(
                f"placement.edges={self.edges} must give each of {self.makers} makers the trainer ranks that it feeds, "
                f"and each of the ranks {list(range(self.trainers))} at least one maker"
            )
        return self

    @property
    def bundles(self) -> list[Bundle]:
        """What Ray is to reserve, a bundle per worker process."""
        maker = {"CPU": self.cpus_per_worker, "GPU": self.gpus_per_maker}
        trainer = {"CPU": self.cpus_per_worker, "GPU": self.gpus_per_trainer}
        return [maker] * self.makers + [trainer] * self.trainers


Placement = Annotated[Local | Colocated | Detached, Field(discriminator="kind")]
PLACEMENTS: dict[str, type[Section]] = {"local": Local, "colocated": Colocated, "detached": Detached}


# --- the other sections ----------------------------------------------------------------------------------


class RunSection(Section):
    dir: PathText | None = Field(default=None, description="the run's own folder; default runs/<name>")
    name: FileName | None = Field(default=None, description="default <task>--<model>--<time>")
    overwrite: bool = Field(default=False, description="replace a run folder that exists")
    resume: str | None = Field(
        default=None, description="go on from latest, step:N, or the path of a checkpoint or run"
    )
    grace: float = Field(default=60, ge=0, description="seconds that a step may still take after Ctrl-C or SIGTERM")


class WarmStart(Section):
    steps: int = Field(default=0, ge=0, description="supervised steps on the training answers before RL; 0 = none")
    rows: int = Field(default=64, ge=1, description="rows per supervised step")
    lr: float = Field(default=2e-3, gt=0)


class ModelSection(Section):
    name: PathText | None = Field(default=None, description="model folder or Hugging Face id")
    config: dict[str, Any] = Field(default={}, description="instead of name: model_type and sizes of a fresh model")
    tokenizer: str | None = Field(default=None, description="folder, id, or `chars`; default: the model's own")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="of the makers' copies; the trainer always keeps float32"
    )
    revision: str | None = Field(default=None, description="commit, tag or branch of model.name where that is an id")
    trust_remote_code: bool = Field(
        default=False, description="run the Python files of model.name; of an id only with its commit as revision"
    )
    allow_pickle_weights: bool = Field(
        default=False, description="read weights from .bin and .pt files too, tensors only"
    )
    critic: str | None = Field(default=None, description="folder or id to start the critic from; default: the policy")
    warm_start: WarmStart = WarmStart()

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if (self.name is None) == (not self.config):
            raise ValueError(
                "set model.name (a folder or id) or model.config (model_type and sizes), not both or none; "
                "a recipe's own is taken back with model.name=null or model.config={}"
            )
        if self.config and not isinstance(self.config.get("model_type"), str):
            raise ValueError("model.config has no model_type; set e.g. model.config.model_type=llama")
        return self


class DataSection(Section):
    path: PathText = Field(description="prompt file, .csv .tsv or .jsonl; `recipe:NAME.csv` is a bundled one")
    prompt_key: str | None = Field(default=None, description="column of the prompt; default: detected")
    answer_key: str | None = Field(default=None, description="column of the answer; default: detected")
    on_bad_row: Literal["error", "drop"] = "error"
    max_prompt_tokens: int | None = Field(default=None, ge=1, description="longer prompts are dropped and counted")
    template: Literal["auto", "chat", "plain"] = "auto"
    system: str | None = Field(default=None, description="system message put before chat prompts")
    shuffle: bool = True


class RolloutSection(Section):
    group_size: int = Field(default=8, ge=1, description="samples per prompt")
    max_new_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=1.0, gt=0)
    top_k: int = Field(default=0, ge=0, description="0 = off; anything else biases the importance ratio")
    top_p: float = Field(default=1.0, gt=0, le=1, description="1 = off; anything else biases the importance ratio")
    prompts_per_unit: int | None = Field(default=None, ge=1, description="default: such that a unit has 16 to 32 rows")

    @property
    def unit_prompts(self) -> int:
        """Prompts of one unit of work."""
        return self.prompts_per_unit or max(1, 32 // self.group_size)


class AlgoSection(Section):
    """Settings of the algorithm; null means the preset's own default."""

    name: str = Field(default="grpo", description="ppo, grpo, dr_grpo, or file.py:Class")
    kl_coef: float | None = Field(default=None, ge=0)
    gamma: float | None = Field(default=None, ge=0, le=1)
    lam: float | None = Field(default=None, ge=0, le=1)
    whiten: bool | None = None
    advantage: Literal["gae", "bandit", "grpo", "dr_grpo", "rloo"] | None = None
    clip_low: float | None = Field(default=None, gt=0)
    clip_high: float | None = Field(default=None, gt=0)
    dual_clip: float | None = Field(default=None, gt=1)
    value_clip: float | None = Field(default=None, gt=0)
    bootstrap_truncated: bool | None = None
    entropy_coef: float | None = None
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "const_norm"] | None = None
    correction: (
        Literal["none", "token_tis", "icepop", "seq_tis", "seq_mis", "geo_mask", "opsm", "dppo", "bypass"] | None
    ) = Field(default=None, description="for samples of older weights; default: token_tis")
    correction_cap: float | None = Field(default=None, gt=0, description="largest weight of a token or an answer")
    correction_low: float | None = Field(default=None, gt=0, description="what is below this is dropped")
    correction_high: float | None = Field(default=None, gt=0, description="what is above this is dropped")
    options: dict[str, Any] = Field(default={}, description="further settings of an algorithm from a file")

    def chosen(self) -> dict[str, Any]:
        """The settings that are not left to the preset."""
        own = self.model_dump(exclude={"name", "options"}, exclude_none=True)
        return own | self.options


class TrainerSection(Section):
    max_steps: int = Field(default=100, ge=0, description="training steps in all, a total and not a remainder")
    prompts_per_step: int = Field(default=32, ge=1)
    epochs: int = Field(default=1, ge=1, description="passes over each step's batch")
    minibatches: int = Field(default=1, ge=1, description="optimizer steps per pass")
    micro_batch_tokens: int = Field(default=8192, ge=1, description="padded tokens per forward, at most")
    lr: float = Field(default=1e-6, gt=0)
    critic_lr: float | None = Field(default=None, gt=0, description="default: 5 x lr")
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    betas: tuple[Share, Share] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)


class SyncSection(Section):
    chunk_mib: int = Field(default=64, ge=1, description="size of one chunk of weights on the wire")
    in_flight: int | None = Field(
        default=None, ge=1, description="makers take new weights every so many decode steps; null: between units only"
    )


class EvalSection(Section):
    path: PathText | None = Field(
        default=None, description="held-out prompt file; greedy answers before and after the run"
    )
    prompts: int | None = Field(default=None, ge=1, description="only the first so many")


class CheckpointSection(Section):
    every: int | None = Field(default=100, ge=1, description="save every so many steps; the last is always saved")
    keep_last: int | None = Field(default=2, ge=1, description="keep the newest so many; null: all")
    keep_every: int | None = Field(default=None, ge=1, description="and every one whose step is a multiple of this")
    best: str | None = Field(default=None, description="and the one with the best metric of this name; -NAME: lowest")
    on_signal: bool = Field(default=True, description="save when Ctrl-C or SIGTERM ends the run")


class SuperviseSection(Section):
    """What becomes of workers that die or hang."""

    maker_restarts: int = Field(default=10, ge=0, description="makers that may be replaced within `window` seconds")
    trainer_restarts: int = Field(default=3, ge=0, description="trainers that may be replaced within `window` seconds")
    window: float = Field(default=3600, gt=0, description="seconds")
    backoff: float = Field(default=0.5, ge=0, description="seconds before a replacement; doubles up to 30")
    heartbeat: float = Field(default=1, gt=0, description="seconds between two looks at what each worker is at")
    stall_timeout: float = Field(default=1800, gt=0, description="seconds that one phase of a worker may take")
    deadlines: dict[str, float] = Field(default={}, description="other limits by phase: generate, reward, train, ...")
    unit_attempts: int = Field(default=3, ge=1, description="makers that one unit may cost before the run ends")
    failed_units: int = Field(default=0, ge=0, description="units that may fail in the reward before the run ends")


class LoggingSection(Section):
    samples_every: int = Field(default=10, ge=1, description="steps between written samples; first and last always are")
    samples: int = Field(default=10, ge=0, description="samples per written step")


class RaySection(Section):
    address: str | None = Field(default=None, description="null: a private local cluster; auto or host:port: attach")
    allow_insecure_cluster: bool = Field(
        default=False, description="attach to another machine's cluster without a token; see SECURITY.md"
    )
    worker_env: list[str] = Field(
        default=[], description="names of further environment variables that workers of a private cluster get"
    )
    call_timeout: float = Field(default=3600, gt=0, description="seconds that one call on a worker may take")
    start_timeout: float = Field(default=300, gt=0, description="seconds that workers may take to start")


class RunConfig(Section):
    """Everything a run needs to know."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    run: RunSection = RunSection()
    model: ModelSection
    data: DataSection
    reward: str = Field(description="built-in name, file.py[:function], module:function, or a reward-model folder")
    rollout: RolloutSection = RolloutSection()
    algo: AlgoSection = AlgoSection()
    trainer: TrainerSection = TrainerSection()
    placement: Placement = Detached()
    sync: SyncSection = SyncSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    supervise: SuperviseSection = SuperviseSection()
    logging: LoggingSection = LoggingSection()
    ray: RaySection = RaySection()

    @model_validator(mode="after")
    def _whole_groups(self) -> RunConfig:
        if self.trainer.prompts_per_step % self.trainer.minibatches:
            legal = [n for n in range(1, self.trainer.prompts_per_step + 1) if not self.trainer.prompts_per_step % n]
            raise ValueError(
                f"trainer.prompts_per_step={self.trainer.prompts_per_step} does not divide into "
                f"trainer.minibatches={self.trainer.minibatches}; legal values of minibatches are {legal}"
            )
        return self

    @model_validator(mode="after")
    def _version_may_change(self) -> RunConfig:
        if self.sync.in_flight is not None and self.placement.max_staleness == 0:
            raise ValueError(
                f"sync.in_flight={self.sync.in_flight} swaps weights inside a unit, but placement.max_staleness=0 "
                "fixes the version of each; set placement.max_staleness to 1 or more (detached only), or "
                "sync.in_flight=null"
            )
        return self

    def to_yaml(self) -> str:
        """The config as YAML, every key written out; what is named like a secret is not shown."""
        return OmegaConf.to_yaml(OmegaConf.create(redacted(self.model_dump(mode="json"))))

    def arithmetic(self) -> str:
        """One line that shows how prompts become optimizer steps."""
        prompts, group = self.trainer.prompts_per_step, self.rollout.group_size
        samples, parts = prompts * group, self.trainer.minibatches
        units = -(-prompts // self.rollout.unit_prompts)
        return (
            f"{prompts} prompts x {group} samples = {samples} samples a step, made in {units} units -> "
            f"{parts} minibatch(es) x {samples // parts}, {self.trainer.epochs} pass(es) = "
            f"{parts * self.trainer.epochs} optimizer steps"
        )
