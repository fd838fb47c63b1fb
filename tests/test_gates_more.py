"""The gates of notebooks 08, 09 and 11 to 18 under sabotage; and that every gate has a fault."""

import asyncio
import sys
from dataclasses import replace
from importlib import import_module

import pytest
import test_gates
import torch
from gate_helpers import REPOSITORY, Fault, each, failures_under, run_until
from test_gates import report_logps_of_another_temperature

from grpolab import load_policy
from grpolab.decode.batch import Batch
from grpolab.env.aws import environment
from grpolab.env.aws.backend import Simulator
from grpolab.parity import Parity
from grpolab.serve import sessions
from grpolab.tool_calls import parse_calls
from grpolab.train import GRPOConfig, SFTConfig, ppo
from grpolab.train.grpo import trainer_logps

async_grpo = import_module("grpolab.train.async_grpo")


# --- 08 guess ---------------------------------------------------------------------------------------------------------


def untaught(request, tmp_path, monkeypatch):
    return {"def untrained": {"policy": load_policy("tiny")}}


# --- 09 longer answers ------------------------------------------------------------------------------------------------


def box_the_other_parity(monkeypatch):
    honest = Parity.short.fget
    monkeypatch.setattr(Parity, "short", property(lambda self: honest(Parity(self.bits + "1"))))


# --- 11 agents --------------------------------------------------------------------------------------------------------


SHARED = dict(steps=2, group_size=4, lr=1e-3, warmup=0, schedule="constant", max_new_tokens=3)
SMALL = {
    "commits": 7, "tests": 3, "games_each": 1, "shared": SHARED, "left_out": "", "tasks": [{"culprit": c} for c in range(1, 8)],
    "sft_config": SFTConfig(steps=60, batch_size=16, lr=3e-3, warmup=6),
    "config": GRPOConfig(prompts_per_step=7, **SHARED),
}


@pytest.fixture(scope="module")
def warmed_up(tmp_path_factory):
    """What the cell of the warm-up leaves, once for all tests."""
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        folder = tmp_path_factory.mktemp("warm_up")
        left = run_until("11_agents", "service = await", folder, patch, runner, {}, {"commits, tests": SMALL})
        runner.run(left["stack"].aclose())
    return {name: left[name] for name in ("policy", "started", "rng")}


def warmed_up_and_small(request, tmp_path, monkeypatch):
    return {"commits, tests": SMALL, "policy, rng = load_policy": request.getfixturevalue("warmed_up")}


LOGPS = {"recorded − recomputed logps, nats"}
ANEW = {"rollouts of a session whose turns append", "tokens that the wire did not have",
        "tokens that the wire did not have, under a stop"}
SUMMARY = {"rollouts of a session with rewritten history"}


def tokenise_again(monkeypatch):
    """The recorder knows no turn again: each request is tokenised as a whole, and is a rollout of its own."""
    monkeypatch.setattr(sessions.Session, "_find", lambda self, key: None)


def go_on_in_spite_of_the_summary(monkeypatch):
    """Whatever is asked next is taken to go on from the last turn."""
    honest = sessions.Session.prompt_of_chat

    def joined_anyway(self, tokenizer, messages, *rest):
        prompt = honest(self, tokenizer, messages, *rest)
        if prompt.parent is not None or not self.turns:
            return prompt
        return sessions.Prompt(self.turns[-1].ids + prompt.ids, self.turns[-1], prompt.key)

    monkeypatch.setattr(sessions.Session, "prompt_of_chat", joined_anyway)


# --- 12 aws -----------------------------------------------------------------------------------------------------------


def plain_style_and_few_tasks(request, tmp_path, monkeypatch):
    monkeypatch.setattr("grpolab.lab.plots.use_style", lambda: None)
    return {"TIERS = ": {"TIERS": ("warmup",), "n_eval": 2, "slots": 2, "left_out": ""}}


def one_account_for_all(monkeypatch):
    """Every session gets the first account."""
    first = []

    class Shared(Simulator):
        def __init__(self):
            if not first:
                super().__init__()
                first.append(self)
            self.guard, self.address = first[0].guard, first[0].address

    monkeypatch.setattr(environment, "Simulator", Shared)


def take_them_at_their_word(monkeypatch):
    """A line that is no command earns the reward."""
    honest = environment.AwsEnv._run

    def run(self, command):
        output = honest(self, command)
        if output.call is None and not self._done:  # of an episode, not of its set-up
            self._grade = environment.Grade(True, 1.0, ())
        return output

    monkeypatch.setattr(environment.AwsEnv, "_run", run)


# --- 14 tools ---------------------------------------------------------------------------------------------------------


# What is left out: evaluation, training and what is made of them.
TOOLS_TRAINED = ("columns =", "metrics = run.table", "fig, axes =", "def fault_of", "half =", "seen |=", "told =")


def repair_what_cannot_be_read(monkeypatch):
    """The first call of a turn is made, whatever follows it."""
    def first(text, form):
        turn = parse_calls(text, form)
        return replace(parse_calls(text.partition(")")[0] + ")]", form), unparsed=0) if turn.unparsed else turn

    monkeypatch.setattr("grpolab.train.tools.parse_calls", first)


# --- 15 distillation --------------------------------------------------------------------------------------------------


def ask_the_teacher_at_another_temperature(monkeypatch):
    monkeypatch.setattr(sys.modules["grpolab.train.distil"], "trainer_logps",
                        lambda policy, rollouts, config: trainer_logps(policy, rollouts, replace(config, temperature=1.3)))


def two_policies(request, tmp_path, monkeypatch):
    student, teacher = load_policy("tiny"), load_policy("tiny")
    with torch.no_grad():
        for p in teacher.model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.02)
    return {"async def imitate": {"student": student, "teacher": teacher}}


# --- 16 async grpo ----------------------------------------------------------------------------------------------------


def publish_nothing(monkeypatch):
    """The sampler keeps the weights that it started with, and says that they are the newest."""
    def take(self):
        self.copy.version = self.policy.version

    monkeypatch.setattr(async_grpo.Actor, "_take", take)


def forget_what_was_drawn_ahead(monkeypatch):
    monkeypatch.setattr(async_grpo.Draws, "_keep", lambda *rest: None)


def one_version_a_rollout(monkeypatch):
    """A token is said to be of the version with which its rollout began."""
    extend = Batch.extend

    def of_the_first(self, rows, *columns):
        extend(self, rows, *columns)
        self.versions[rows] = self.versions[rows, :1]

    monkeypatch.setattr(Batch, "extend", of_the_first)


# --- 17 critic --------------------------------------------------------------------------------------------------------


# The cells between the critic by hand and the appendix, which train and read the record.
CRITIC_TRAINED = ("async def examined", "explained = ", "fig, axes = plt.subplots(1, 2, figsize=(9.6, 3.2))\nplots.curves",
                  "learner, critic", "fig, ax = plt.subplots(figsize=(6.4, 3))", "record = ", "best_reward = ", "def mean")


def wait_for_the_whole_return(monkeypatch):
    honest = ppo.gae
    monkeypatch.setattr(ppo, "gae", lambda *args, lam=1.0, **kw: honest(*args, lam=1.0, **kw))


FAULTS = [
    Fault("08_guess", report_logps_of_another_temperature, {"recorded − recomputed logps, nats"}, "grpo_run = run.child",
          parameters={"warm_up_steps": 1, "steps": 1}, prepare=untaught),
    Fault("09_longer_answers", box_the_other_parity, {"demonstrations that the checker calls wrong"}, "tables = {}",
          without=("@cache\ndef demonstration", "before = {"), parameters={"steps": 1}),
    Fault("11_agents", report_logps_of_another_temperature, LOGPS, "async def examine", prepare=warmed_up_and_small),
    Fault("11_agents", tokenise_again, ANEW, "async def examine", prepare=warmed_up_and_small, full=True),
    Fault("11_agents", go_on_in_spite_of_the_summary, SUMMARY, "async def examine", prepare=warmed_up_and_small, full=True),
    Fault("12_aws", one_account_for_all, None, "held_out = ", prepare=plain_style_and_few_tasks),
    Fault("12_aws", take_them_at_their_word, None, "held_out = ", prepare=plain_style_and_few_tasks, full=True),
    Fault("13_rejection_sampling", report_logps_of_another_temperature,
          {"gradient of imitation − policy gradient with rewards, of its length"}, "policy = load_policy(str(saved))",
          without=("policy, own", "first_groups"), parameters={"quick": True}),
    Fault("14_tools", repair_what_cannot_be_read, {"calls made of turns that cannot be read"}, "print(run.shown",
          without=TOOLS_TRAINED, parameters={"quick": True, "warm_up_steps": 1, "n_eval": 2}),
    Fault("15_distillation", ask_the_teacher_at_another_temperature,
          {"package − plain code, sampled tokens, of the gradient's length"}, "async def share_right",
          without=("questions = practice", "grouped = load_policy"), parameters={"quick": True}, prepare=two_policies),
    *(Fault("16_async_grpo", breaks, fails, "record = ", without=("S, R, U =", "colors ="), parameters={"quick": True},
            by_the_clock=frozenset(by_the_clock), full=True)
      for breaks, fails, *by_the_clock in (
          (publish_nothing, {"staleness 0, weights with other bits than by grpo", "staleness 0, rewards as by grpo",
                             "stopped and resumed, weights with other bits",
                             "in flight, recorded − recomputed logps, nats"}, "in flight, the same by the first version alone"),
          (forget_what_was_drawn_ahead, {"stopped and resumed, weights with other bits"}),
          (one_version_a_rollout, {"in flight, rollouts of several versions",
                                   "in flight, the same by the first version alone",
                                   "in flight, the same with the prefix anew"}))),
    Fault("17_critic", wait_for_the_whole_return,
          {"GAE by hand − of the package", "critic by hand − of the package after five steps"}, "with gate(",
          without=CRITIC_TRAINED, parameters={"quick": True}),
    Fault("18_aws_commands", take_them_at_their_word, {"recorded answers that earn another reward when they are played again"},
          "measures = "),
]


@pytest.mark.filterwarnings("ignore:.*holds no rollouts of steps")
@each(FAULTS)
def test_the_gate_sees_what_is_broken(fault, request, tmp_path, monkeypatch):
    assert failures_under(fault, request, tmp_path, monkeypatch) == fault.fails


def test_every_gate_has_a_fault():
    assert {f.notebook for f in [*test_gates.FAULTS, *FAULTS]} == {p.stem for p in (REPOSITORY / "notebooks").glob("*.ipynb")}
