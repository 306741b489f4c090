"""The examples of the detached flow with the older command lines, run as a reader runs them.

Run as a program, this file starts a cluster of two nodes and runs the example of roles as groups on it; in the process
of the tests such a cluster would end the actors of the one that the tests share.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.job_config import JobConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from hocket.data.prompts import read_prompts
from hocket.errors import PlacementError
from hocket.models.load import load_tokenizer
from hocket.run.prepare import RECIPES

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
import detached  # noqa: E402
import older_cli  # noqa: E402
import roles_as_groups  # noqa: E402

HEAD, FAR = "127.0.0.2", "127.0.0.10"
DIGITS = str(RECIPES / "digits_train.csv")
SHORT = ("--max_new_tokens", "4")


def program(*words, timeout=300):
    """What a program prints; its Ray cluster and its HOME are its own."""
    with tempfile.TemporaryDirectory(prefix="hk-", ignore_cleanup_errors=True) as home:  # short, for Ray's sockets
        Path(home, "ray").mkdir()  # where a cluster of several nodes notes its address, and expects the folder
        return subprocess.run(
            [sys.executable, *map(str, words)],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=os.environ | {"HOME": home, "RAY_TMPDIR": home, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )


def run(name, *options, timeout=300):
    ran = program(EXAMPLES / name, *SHORT, *options, timeout=timeout)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout


def ledger(printed):
    """Samples made, trained, refused and left."""
    (found,) = re.findall(r"^ledger: made (\d+) = trained (\d+) \+ refused (\d+) \+ left (\d+)$", printed, re.MULTILINE)
    return tuple(map(int, found))


def steps(printed):
    """Steps that each trainer made, as its line in the table says."""
    return {name: int(made) for name, made in re.findall(r"^(trainer_\d+) +\d+ +(\d+) ", printed, re.MULTILINE)}


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


# --- makers and trainers -----------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.timeout(310)
def test_one_maker_feeds_two_trainers(tmp_path):
    options = ("--num_trainers", 2, "--experience_steps", 3, "--experience_batch_size", 5, "--train_batch_size", 4)
    printed = run("detached.py", *options, "--update_steps", 1, "--save_path", tmp_path / "actor")
    assert "maker_0 feeds trainer_0, trainer_1\nmaker_0 gets weights from trainer_0\n" in printed
    assert "trainer_0 can expect 8 samples\ntrainer_1 can expect 7 samples\ntotal_steps 2: " in printed
    assert ledger(printed) == (15, 15, 0, 0)
    assert steps(printed) == {"trainer_0": 2, "trainer_1": 2}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "actor").config.model_type == "gpt2"
    assert AutoTokenizer.from_pretrained(tmp_path / "actor").decode([5]) == "0"


@pytest.mark.ray
@pytest.mark.timeout(310)
def test_two_makers_share_the_prompts_of_a_file(tmp_path):
    (tmp_path / "prompts.csv").write_text("id,prompt,answer\n" + "".join(f"{i},sort {i}{9 - i}:,0\n" for i in range(5)))
    options = ("--num_makers", 2, "--prompt_path", tmp_path / "prompts.csv", "--reward", "digits", "--debug")
    printed = run("detached.py", *options, "--experience_steps", 2, "--model", "llama", "--train_epochs", 2)
    assert "read prompts.csv as prompt=prompt, answer=answer, rows=5" in printed
    assert ledger(printed) == (32, 32, 0, 0)
    assert steps(printed) == {"trainer_0": 4}
    assert printed.count("policy/loss") == 8, "each of 4 batches was trained twice"


@pytest.mark.ray
@pytest.mark.timeout(310)
@pytest.mark.slow
def test_three_makers_and_two_trainers_with_odd_sizes():
    """Trainer 0 gets twice as many samples as trainer 1, and neither number divides by the batch."""
    options = ("--num_makers", 3, "--num_trainers", 2, "--experience_batch_size", 5, "--train_batch_size", 4)
    printed = run("detached.py", *options, "--experience_steps", 3, "--model", "opt", "--critic_model", "bloom")
    assert "trainer_0 can expect 30 samples\ntrainer_1 can expect 15 samples\ntotal_steps 8: " in printed
    assert ledger(printed) == (45, 45, 0, 0)
    assert steps(printed) == {"trainer_0": 8, "trainer_1": 8}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(310)
@pytest.mark.parametrize(
    ("makers", "trainers", "model"), [(2, 2, "bloom"), (2, 3, "llama"), (5, 3, "gpt2"), (1, 1, "opt")]
)
def test_any_numbers_end_and_balance(makers, trainers, model):
    options = ("--experience_batch_size", 7, "--train_batch_size", 3, "--update_steps", 3, "--model", model)
    printed = run("detached.py", "--num_makers", makers, "--num_trainers", trainers, *options)
    assert ledger(printed) == (makers * 28, makers * 28, 0, 0)
    assert len(set(steps(printed).values())) == 1


def test_the_shares_of_two_makers_have_no_prompt_in_common():
    args = detached.options().parse_args(["--num_makers", "2", "--experience_batch_size", "3"])
    load = detached.prompts(args, read_prompts(DIGITS), load_tokenizer("chars"))
    batches = [list(load(rank, 2)) for rank in range(2)]
    assert [len(batch["prompt"]) for batch in batches[0]] == [3] * args.experience_steps
    seen = [{prompt for batch in of for prompt in batch["prompt"]} for of in batches]
    assert not seen[0] & seen[1]
    first = batches[0][0]
    assert first["input_ids"].shape == first["attention_mask"].shape
    assert first["attention_mask"].sum(1).tolist() == [len(prompt) for prompt in first["prompt"]]


def test_a_share_smaller_than_a_batch_is_gone_through_again(tmp_path):
    (tmp_path / "two.csv").write_text("prompt\none\ntwo\n")
    args = detached.options().parse_args(["--experience_batch_size", "3", "--experience_steps", "5"])
    load = detached.prompts(args, read_prompts(tmp_path / "two.csv"), load_tokenizer("chars"))
    assert [len(batch["prompt"]) for batch in load(0, 1)] == [3] * 5


# --- roles as groups ---------------------------------------------------------------------------------------


def updates(printed):
    """For every update: time step, score, rows of each actor, policy loss."""
    pattern = r"^timestep +(\d+)  score (\S+)  rows \[(.*)\]  policy loss (\S+)  value loss \S+$"
    found = re.findall(pattern, printed, re.MULTILINE)
    return [(int(step), float(score), [*map(int, rows.split(","))], float(loss)) for step, score, rows, loss in found]


ROLES = ("roles_as_groups.py", "--num_episodes", 1, "--max_timesteps", 3, "--update_timesteps", 2)


@pytest.mark.ray
@pytest.mark.timeout(310)
@pytest.mark.slow
def test_roles_as_groups_with_uneven_shares(tmp_path):
    """Two actors share batches of 5 rows, and the last update has one time step only."""
    options = ("--num_actor_nodes", 2, "--experience_batch_size", 3, "--train_batch_size", 5, "--need_optim_ckpt")
    printed = run(*ROLES, *options, "--save_path", tmp_path / "actor")
    assert [(step, rows) for step, _, rows, _ in updates(printed)] == [(2, [5, 7]), (3, [2, 4])]
    saved = weights(tmp_path / "actor")
    assert saved["transformer.wte.weight"].shape == (99, 32)
    assert {"actor_optim.pt", "critic_optim.pt"} <= {path.name for path in (tmp_path / "actor").iterdir()}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(620)
def test_groups_of_other_sizes_learn_the_same_from_a_model_that_is_given(tmp_path):
    run("detached.py", "--model", "llama", "--experience_steps", 1, "--save_path", tmp_path / "start")
    given = ("--model", "llama", "--pretrain", tmp_path / "start", "--reward", "digits", "--train_batch_size", 5)
    one = (*ROLES, *given, "--experience_batch_size", 6, "--strategy", "single", "--save_path", tmp_path / "one")
    two = (*ROLES, *given, "--experience_batch_size", 3, "--num_actor_nodes", 2, "--num_critic_nodes", 2)
    alone, apart = updates(run(*one)), updates(run(*two, "--num_initial_nodes", 4, "--save_path", tmp_path / "two"))
    assert [(step, score) for step, score, _, _ in alone] == [(step, score) for step, score, _, _ in apart]
    assert [loss for *_, loss in alone] == pytest.approx([loss for *_, loss in apart], abs=2e-4)
    left, right = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert max((left[name] - right[name]).abs().max() for name in left) < 1e-4


@pytest.mark.ray
@pytest.mark.timeout(310)
@pytest.mark.slow
def test_the_nodes_of_a_role_are_different_ones():
    ran = program(__file__)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert f"actor: {HEAD}, {FAR}\ncritic: {HEAD}, {FAR}\n" in ran.stdout
    assert re.search(rf"^initial: ({HEAD}|{FAR})\nreward: ({HEAD}|{FAR})$", ran.stdout, re.MULTILINE)
    assert [(step, rows) for step, _, rows, _ in updates(ran.stdout)] == [
        (1, [1, 3])
    ]  # in the last batch, of one row, the first actor has none
    assert "refused: pool [3] asks the cluster for 3 CPU" in ran.stdout
    assert "the strategy is STRICT_SPREAD" in ran.stdout


def two_nodes():
    with tempfile.TemporaryDirectory(prefix="hk", ignore_cleanup_errors=True) as folder:
        head = {"num_cpus": 3, "num_gpus": 0, "include_dashboard": False, "temp_dir": folder, "node_ip_address": HEAD}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(num_cpus=3, num_gpus=0, node_ip_address=FAR)
        place = JobConfig(_py_driver_sys_path=[str(EXAMPLES)])  # where the workers find what the example defines
        ray.init(address=cluster.address, _node_ip_address=HEAD, logging_level="ERROR", job_config=place)
        words = ["--num_episodes=1", "--max_timesteps=1", "--max_new_tokens=4", "--num_actor_nodes=2"]
        words += ["--num_critic_nodes=2", "--experience_batch_size=2", "--train_batch_size=3"]
        roles_as_groups.main(roles_as_groups.options().parse_args(words))
        try:
            roles_as_groups.pool(3, 0)
        except PlacementError as error:
            sys.stdout.write(f"refused: {error}\n")
        ray.shutdown()
        cluster.shutdown()


# --- both --------------------------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(310)
@pytest.mark.parametrize(
    "words",
    [
        "detached.py --num_makers 2 --experience_steps 60 --update_steps 1 --debug",
        "roles_as_groups.py --num_actor_nodes 2 --num_episodes 1 --max_timesteps 60 --update_timesteps 2",
    ],
)
def test_what_is_rewarded_is_learned(tmp_path, words):
    rule = "def reward(completion):\n    return sum(map(str.isdigit, completion)) / max(len(completion), 1)\n"
    (tmp_path / "digit_share.py").write_text(rule)
    name, *options = words.split()
    rates = ("--actor_lr", 3e-3, "--critic_lr", 1e-3, "--kl_coef", 0.01, "--max_new_tokens", 8)
    sizes = ("--experience_batch_size", 16, "--train_batch_size", 32)
    printed = run(name, *options, *rates, *sizes, "--reward", tmp_path / "digit_share.py")
    scores = [*map(float, re.findall(r"(?:reward/mean|score) (\S+)", printed))]
    assert len(scores) in (30, 60)
    assert sum(scores[-3:]) - sum(scores[:3]) >= 3 * 0.4


# --- wrong options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("example", "words", "line"),
    [
        (detached, "--num_makers 0", "argument --num_makers: found '0'; wanted a whole number of 1 or more"),
        (detached, "--num_trainer 2", "unrecognized arguments: --num_trainer 2"),
        (detached, "--model t5", "argument --model: invalid choice: 't5'"),
        (detached, "--lora_rank 4", "argument --lora_rank: invalid choice: 4 (choose from 0)"),
        (detached, "--prompt_path nowhere.csv", "nowhere.csv does not exist"),
        (detached, "--num_trainers 2 --trainer_strategy colossalai_zero2", "2 trainers are one group of"),
        (detached, "--num_makers 2 --maker_strategy tp", "strategy 'tp' of a maker over 2 ranks is not there yet"),
        (detached, "--reward exact", "reward exact needs answers, but none of the columns"),
        (detached, f"--prompt_path {DIGITS} --max_new_tokens 125", "exceed the model's 128 positions"),
        (detached, "--pretrain nowhere/at/all", "model folder 'nowhere/at/all' does not exist"),
        (roles_as_groups, "--num_actor_nodes two", "argument --num_actor_nodes: found 'two'; wanted a whole number"),
        (roles_as_groups, "--num_actor_nodes 2 --strategy single", "--strategy single is for 1 actor and 1 critic"),
        (roles_as_groups, "--experience_batch_size 1 --num_initial_nodes 2", "a time step has 1 prompts, too few for"),
        (roles_as_groups, "--need_optim_ckpt", "--need_optim_ckpt saves beside the actor; give --save_path too"),
    ],
)
def test_what_is_wrong_is_one_line(capsys, example, words, line):
    with pytest.raises(SystemExit) as left:
        older_cli.run(example.main, example.options(), words.split())
    assert left.value.code == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert line in told[0]


@pytest.mark.timeout(110)
def test_a_program_that_is_given_a_wrong_option_leaves_with_a_line():
    ran = program(EXAMPLES / "detached.py", "--learning_rate", "1", timeout=100)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "detached.py: unrecognized arguments: --learning_rate 1\n"


if __name__ == "__main__":
    two_nodes()
