"""Recipes, overrides, placements, and what is said about each mistake."""

import json
import pickle

import pytest
from omegaconf import OmegaConf
from pydantic import ValidationError

from hocket.algorithms.correction import CORRECTIONS
from hocket.config import Colocated, Detached, Local, RunConfig
from hocket.errors import ConfigError
from hocket.read_config import known_keys, load_config, parse_config

BASE = {"model": {"name": "some/model"}, "data": {"path": "prompts.csv"}, "reward": "exact"}


@pytest.fixture
def load(tmp_path):
    def load(*overrides, settings=BASE):
        path = tmp_path / "recipe.yaml"
        path.write_text(settings if isinstance(settings, str) else json.dumps(settings))
        return load_config(path, overrides)

    return load


def get(config, key):
    for name in key.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["trainer.max_steps=7"], "trainer.max_steps", 7),
        (["--trainer.max_steps", "7"], "trainer.max_steps", 7),
        (["--trainer.max_steps=7"], "trainer.max_steps", 7),
        (["--trainer.max-steps=7"], "trainer.max_steps", 7),
        (["trainer.lr=1e-5"], "trainer.lr", 1e-5),
        (["trainer.betas=[0.8, 0.99]"], "trainer.betas", (0.8, 0.99)),
        (["--run.overwrite", "--seed", "3"], "run.overwrite", True),
        (["--run.overwrite", "--seed", "3"], "seed", 3),
        (["data.shuffle=false"], "data.shuffle", False),
        (["trainer.max_steps=7", "trainer.max_steps=8"], "trainer.max_steps", 8),
        (["data.system=a=b, c"], "data.system", "a=b, c"),
        (["data.system='Be brief: one word'"], "data.system", "Be brief: one word"),
        (["run.name=7"], "run.name", "7"),
        (["reward=my.py:score"], "reward", "my.py:score"),
        (["algo.options={depth: 2}"], "algo.options", {"depth": 2}),
        (["algo.options.depth=2"], "algo.options", {"depth": 2}),
        (["model.name=null", 'model.config={"model_type": "gpt2", "n_layer": 2}'], "model.config.n_layer", 2),
        (["model.name=none", "model.config.model_type=gpt2"], "model.config.model_type", "gpt2"),
        (["data.max_prompt_tokens=5", "data.max_prompt_tokens=none"], "data.max_prompt_tokens", None),
        (["data.max_prompt_tokens=5", "data.max_prompt_tokens=null"], "data.max_prompt_tokens", None),
    ],
)
def test_overrides(load, words, key, value):
    config = load(*words)
    found = config.model.config[key.rpartition(".")[2]] if key.startswith("model.config.") else get(config, key)
    assert found == value


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["trainer.max_stepz=5"], "unknown key trainer.max_stepz; did you mean trainer.max_steps?"),
        (["max_steps=5"], "unknown key max_steps; did you mean trainer.max_steps?"),
        (["trainr.lr=1"], "unknown key trainr.lr; did you mean trainer.lr?"),
        (["trainr={}"], "unknown key trainr"),
        (["qqqq=1"], "unknown key qqqq; see `hocket config` for all keys"),
        (["model.warm_start.step=1"], "did you mean model.warm_start.steps?"),
        (["trainer.lr=0"], "trainer.lr=0: Input should be greater than 0"),
        (["trainer.lr=fast"], "trainer.lr='fast': Input should be a valid number"),
        (["trainer.max_steps=1.5"], "trainer.max_steps=1.5: Input should be a valid integer"),
        (["rollout.top_p=1.5"], "rollout.top_p=1.5: Input should be less than or equal to 1"),
        (["algo.aggregation=mean"], "'token_mean', 'seq_mean_token_mean'"),
        (["data.shuffle=maybe"], "data.shuffle='maybe': Input should be a valid boolean"),
        (["--seed", "-1"], "seed=-1: Input should be greater than or equal to 0"),
        (["seed=18446744073709551616"], "seed=18446744073709551616: Input should be less than"),
        (["seed.x=1"], "seed={'x': 1}"),
        (["trainer=5"], "trainer=5: Input should be a valid dictionary"),
        (["trainer=5", "trainer.lr=1"], "cannot set trainer.lr: trainer is 5, not a section"),
        (["steps"], "cannot read 'steps'; write key=value"),
        (["data.system=[a"], "cannot read the value of data.system=[a as YAML"),
        (["data.system=${nothing}"], "'nothing' not found"),
        (["data.path=null"], "data.path=None"),
        (["model.name=null"], "set model.name (a folder or id) or model.config"),
        (["model.config.model_type=gpt2"], "taken back with model.name=null"),
        (["model.name=null", "model.config.n_layer=2"], "model.config has no model_type"),
        (["sync.in_flight=8"], "sync.in_flight=8 swaps weights inside a unit, but placement.max_staleness=0 fixes"),
        (["sync.in_flight=8", "placement=local"], "max_staleness to 1 or more (detached only), or sync.in_flight=null"),
        (
            ["sync.in_flight=0", "placement.max_staleness=1"],
            "sync.in_flight=0: Input should be greater than or equal to 1",
        ),
        (["algo.correction=tis"], "'token_tis', 'icepop'"),
        (["trainer.prompts_per_step=10", "trainer.minibatches=3"], "legal values of minibatches are [1, 2, 5, 10]"),
        (["placement=detatched"], "placement 'detatched' is not known; use local, colocated or detached(makers=2)"),
        (["placement=none"], "placement 'None' is not known"),
        (["placement=detached(makers=2"], "cannot read placement 'detached(makers=2'"),
        (["placement=detached(makers=0)"], "placement.makers=0: Input should be greater than or equal to 1"),
        (["placement=detached(maker=2)"], "unknown key placement.maker; did you mean placement.makers?"),
        (["placement=detached(trainers=0)"], "placement.trainers=0: Input should be greater than or equal to 1"),
        (["placement=detached(trainers=2)", "placement.edges=[[0]]"], "each of the ranks [0, 1] at least one maker"),
        (["placement=local(max_staleness=1)"], "placement.max_staleness=1: Input should be 0"),
        (["placement=local", "placement.makers=2"], "placement.makers is no setting of placement 'local'"),
        (["placement=colocated(gpus_per_maker=1)"], "it has ['threads_per_worker', 'max_staleness', 'cpus_per_worker'"),
    ],
)
def test_mistakes(load, words, text):
    with pytest.raises(ConfigError) as caught:
        load(*words)
    assert text in caught.value.message
    assert caught.value.exit_code == 2


def test_all_mistakes_are_said_at_once(load):
    with pytest.raises(ConfigError) as caught:
        load("trainer.lr=0", "trainr.lr=1", settings={"model": {"name": "m"}, "reward": "exact"})
    lines = caught.value.message.splitlines()
    assert len(lines) == 3
    assert any(line.startswith("data is not set; give it in the recipe or as data=") for line in lines)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1", "is not valid YAML"),
        ("seed: 1\nseed: 2", "is not valid YAML"),
        ("- seed", "must hold `section: settings` pairs"),
        ("seed: ${nowhere}", "cannot resolve the recipe"),
    ],
)
def test_broken_recipes(load, text, said):
    with pytest.raises(ConfigError, match="recipe") as caught:
        load(settings=text)
    assert said in caught.value.message


def test_a_missing_recipe_names_its_nearest_neighbour(tmp_path):
    (tmp_path / "digits.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"does not exist; did you mean '.*digits\.yaml'"):
        load_config(tmp_path / "digit.yaml")


def test_an_empty_section_in_the_recipe_takes_overrides(load):
    assert load("trainer.lr=0.5", settings=json.dumps(BASE) + "\n").trainer.lr == 0.5
    text = "model: {name: m}\ndata: {path: p.csv}\nreward: exact\ntrainer:\n"
    assert load("trainer.lr=0.5", settings=text).trainer.lr == 0.5


@pytest.mark.parametrize(
    ("words", "placement"),
    [
        ([], Detached()),
        (["placement=local"], Local()),
        (["placement=colocated(cpus_per_worker=2)"], Colocated(cpus_per_worker=2)),
        (["placement=detached(makers=2, max_staleness=1)"], Detached(makers=2, max_staleness=1)),
        (["placement= detached ( makers=2 max_staleness=1 ) "], Detached(makers=2, max_staleness=1)),
        (["--placement", "detached(makers=2)"], Detached(makers=2)),
        (["placement=detached(trainers=2, edges=[[0, 1]], makers=1)"], Detached(trainers=2, edges=[[0, 1]])),
        (["placement={kind: detached, makers: 2}"], Detached(makers=2)),
        (["placement={makers: 2}"], Detached(makers=2)),
        (["placement.makers=2"], Detached(makers=2)),
        (
            ["placement=detached", "placement.makers=3", "placement.max_staleness=2"],
            Detached(makers=3, max_staleness=2),
        ),
        (["placement.makers=2", "placement=local"], Local()),
        (["placement=local", "placement=detached", "placement.makers=2"], Detached(makers=2)),
        (["placement.kind=local"], Local()),
    ],
)
def test_placement_is_a_value_and_the_last_word_counts(load, words, placement):
    assert load(*words).placement == placement


def test_the_recipes_placement_may_be_written_short(load):
    settings = BASE | {"placement": "detached(makers=2)"}
    assert load("placement.max_staleness=1", settings=settings).placement == Detached(makers=2, max_staleness=1)


def test_known_keys_are_all_settable(load):
    plain = {**RunConfig(**BASE).model_dump(), "placement": "local"}
    for key in known_keys():
        section, _, name = key.rpartition(".")
        if section == "placement":
            kinds = [k for k in (Local, Colocated, Detached) if name in k.model_fields]
            assert name == "kind" or kinds, key
        else:
            node = plain
            for part in key.split("."):
                assert part in node, key
                node = node[part]
    assert len(known_keys()) <= 100
    assert {"seed", "placement.makers", "model.warm_start.steps", "ray.address"} <= set(known_keys())


def test_a_config_is_frozen_and_pickles(load):
    config = load()
    with pytest.raises(ValidationError):
        config.trainer.lr = 1.0
    with pytest.raises(ValidationError):
        config.seed = 1
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("placement", ["local", "colocated(gpus_per_worker=0.5)", "detached(makers=2,max_staleness=3)"])
def test_yaml_round_trip(load, placement, tmp_path):
    config = load(f"placement={placement}", "trainer.lr=3e-7", "data.system='a: b'", "run.name=007x")
    path = tmp_path / "again.yaml"
    path.write_text(config.to_yaml())
    assert load_config(path) == config
    assert OmegaConf.load(path).trainer.critic_lr is None  # every key is written out


def test_arithmetic_and_derived_values(load):
    config = load("trainer.prompts_per_step=12", "trainer.minibatches=2", "trainer.epochs=3", "rollout.group_size=8")
    assert config.rollout.unit_prompts == 4
    assert config.arithmetic() == (
        "12 prompts x 8 samples = 96 samples a step, made in 3 units -> 2 minibatch(es) x 48, 3 pass(es) = "
        "6 optimizer steps"
    )
    assert load("rollout.group_size=100").rollout.unit_prompts == 1
    assert load("rollout.prompts_per_unit=5").rollout.unit_prompts == 5


def test_algorithm_settings_left_alone_are_the_presets(load):
    assert load().algo.chosen() == {}
    config = load("algo.kl_coef=0", "algo.whiten=false", "algo.options.depth=2")
    assert config.algo.chosen() == {"kl_coef": 0.0, "whiten": False, "depth": 2}


def test_weights_may_be_swapped_in_flight_where_the_version_is_not_fixed(load):
    assert load("sync.in_flight=8", "placement=detached(max_staleness=2)").sync.in_flight == 8


def test_every_correction_can_be_named(load):
    for name in CORRECTIONS:
        assert load(f"algo.correction={name}").algo.correction == name


def test_parse_config_leaves_its_argument_alone():
    settings = {**BASE, "placement": "local"}
    assert parse_config(settings).placement == Local()
    assert settings["placement"] == "local"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--resume"], "latest"),
        (["--resume", "seed=3"], "latest"),
        (["--resume", "--seed", "3"], "latest"),
        (["--resume", "step:7"], "step:7"),
        (["--resume=runs/other"], "runs/other"),
        (["run.resume=latest"], "latest"),
        ([], None),
    ],
)
def test_resume_alone_is_the_newest_checkpoint(load, words, found):
    assert load(*words).run.resume == found
