"""Every field of every training configuration reaches what it is for.

A small model takes a few steps through the real loops, and the same steps are made here by hand in float64: the formulas of
the papers on the model's plain forward of one row at a time. Each field has a case that changes it. The loop must arrive
at the hand's weights, and where a field changes the objective, the hand at the field's base value must arrive elsewhere:
a loop that ignores the field fails. A field without a case fails too.

The optimiser is plain gradient descent, so that a wrong scale shows, which Adam's first step hides.
"""

import asyncio
import importlib
import math
import random
from collections import Counter
from dataclasses import dataclass, field, fields, replace

import pytest
import torch
from loop_helpers import flat
from transformers import LlamaConfig, LlamaForCausalLM

from grpolab.arithmetic import Task, generate
from grpolab.chat import prompt_ids
from grpolab.decode.engines.attention import EXACT
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import fold_seed
from grpolab.models.load import Policy, attention_of
from grpolab.rollouts import Group
from grpolab.runs.run import Run
from grpolab.train import DPOConfig, GRPOConfig, RewardConfig, RewardModel, SFTConfig, demonstrations, dpo, grpo, reward_model
from grpolab.train import sft as train_sft
from grpolab.train.loop import OPTIMISERS
from grpolab.train.preferences import load_preferences

PROBLEMS, _ = generate(12, 0, seed=5, task=Task("+-", max_operand=20))
CLOSE, APART = 1e-4, 5e-3  # of the way that the weights went; both sides round RMSNorm, rewards and old logps to fp32
COMMON = {"steps": 2, "lr": 0.5, "warmup": 1, "max_grad_norm": 1e9, "optimiser": "plain"}
BASE = {
    SFTConfig: {"batch_size": 4},
    DPOConfig: {"batch_size": 4, "beta": 0.3},
    RewardConfig: {"batch_size": 4},
    GRPOConfig: {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 12},
}


@dataclass(frozen=True)
class Case:
    """`change` is what the case is about, on top of the base with `also`. Where `seen` is given, the objective stays as it
    is and the field shows in seen(trial, base's trial); otherwise the base's weights must be others. A `foreign` sampler
    reports log-probs that are not the trainer's."""

    change: dict
    also: dict = field(default_factory=dict)
    seen: object = None
    foreign: bool = False


def case(seen=None, also=None, foreign=False, **change):
    return Case(change, also or {}, seen, foreign)


OPTIMISATION = {
    "steps": [case(steps=3)],
    "lr": [case(lr=0.3)],
    "warmup": [case(warmup=3)],
    "schedule": [case(schedule="cosine", also={"steps": 3})],
    "weight_decay": [case(weight_decay=0.1)],
    "max_grad_norm": [case(max_grad_norm=0.02)],
    "optimiser": [case(optimiser="adamw", also={"lr": 1e-3})],
    "token_budget": [case(lambda new, base: new.passes > base.passes, token_budget=1)],
    "checkpoint_activations": [case(lambda new, base: torch.equal(flat(new.policy), flat(base.policy)),
                                    checkpoint_activations=True)],  # what it saves: test_loop
    "autocast": [case(lambda new, base: new.distance(base.end) > 1e-4, autocast="bfloat16")],
    "save_every": [case(lambda new, base: new.saved == [1] and base.saved == [], save_every=1),
                   case(lambda new, base: new.saved == [2], save_every=2, also={"steps": 3})],
    "seed": [case(seed=1)],
}
MOVED = {"inner_epochs": 3, "lr": 4.0}  # so that ratios leave 1
CASES = {
    SFTConfig: OPTIMISATION | {
        "batch_size": [case(batch_size=3)],
        "held_out_every": [case(lambda new, base: (new.held, base.held) == ([0, 2, 3], [0, 3]), held_out_every=2,
                                also={"steps": 4})],
    },
    DPOConfig: OPTIMISATION | {
        "batch_size": [case(batch_size=3)],
        "beta": [case(beta=0.6), case(beta=0.6, also={"kind": "ipo", "lr": 0.01})],
        "kind": [case(kind="ipo", also={"lr": 0.01}), case(kind="hinge", also={"beta": 0.02})],
        "label_smoothing": [case(label_smoothing=0.2)],
        "length_normalised": [case(length_normalised=True), case(length_normalised=True, also={"kind": "ipo", "lr": 0.01})],
        "share_prompts": [case(lambda new, base: new.tokens > base.tokens, share_prompts=False)],
    },
    RewardConfig: OPTIMISATION | {
        "batch_size": [case(batch_size=3)],
        "margin": [case(margin=0.7)],
        "centering": [case(centering=0.2)],
    },
    GRPOConfig: OPTIMISATION | {
        "seed": [case(lambda new, base: not {r.seed for _, r in new.rollouts} & {r.seed for _, r in base.rollouts}, seed=1),
                 case(seed=1, also={"minibatches": 2})],
        "prompts_per_step": [case(lambda new, base: new.asked == 3 and base.asked == 4, prompts_per_step=3)],
        "group_size": [case(lambda new, base: new.group == 3 and base.group == 4, group_size=3)],
        "inner_epochs": [case(inner_epochs=2)],
        "minibatches": [case(minibatches=2), case(minibatches=3)],
        "temperature": [case(temperature=0.7), case(temperature=0.7, also={"kl_coef": 0.5}),
                        case(lambda new, base: new.greedy > 0.99 > 0.9 > base.greedy, temperature=0.01)],
        "max_new_tokens": [case(lambda new, base: (new.longest, base.longest) == (7, 12), max_new_tokens=7),
                           case(max_new_tokens=7, also={"aggregation": "constant"})],
        "advantage_kind": [case(advantage_kind=k) for k in ("standardised", "leave_one_out", "batch_standardised")],
        "aggregation": [case(aggregation=k, also=also) for k in ("sequence", "constant") for also in ({}, {"kl_coef": 0.5})],
        "clip_eps": [case(clip_eps=(0.01, 0.2), also=MOVED), case(clip_eps=(0.2, 0.01), also=MOVED)],
        "objective": [case(objective="cispo", also=MOVED)],
        "ratio": [case(ratio="sequence", also=MOVED)],
        "dual_clip": [case(dual_clip=1.01, also=MOVED)],
        "max_logp_diff": [case(lambda new, base: "disagree" in new.error and not base.error, max_logp_diff=bounds, foreign=True)
                          for bounds in ((0.03, 5.0), (0.2, 0.08))],
        "sampler_cap": [case(sampler_cap=1.05, foreign=True), case(sampler_cap=1.05, foreign=True, also=MOVED)],
        "refills": [case(refills=2, also={"steps": 1})],
        "kl_coef": [case(kl_coef=0.5)],
        "kl_to": [case(kl_to="sampler", also=MOVED | {"kl_coef": 0.5, "kl_kind": k, "lr": 0.5}) for k in ("unbiased", "k3")]
                 + [case(kl_to="sampler", foreign=True, also={"kl_coef": 0.5, "sampler_cap": 1.05})],
        "kl_kind": [case(kl_kind=k, also={"kl_coef": 0.5}) for k in ("k1", "k3")]
                   + [case(kl_kind=k, also=MOVED | {"kl_coef": 0.5, "lr": 0.5}) for k in ("k2", "k3")],
        "share_prompts": [case(lambda new, base: new.tokens > base.tokens, share_prompts=False)],
        "exact": [case(lambda new, base: new.attention == EXACT != base.attention, exact=True)],
    },
}
LONG = (GRPOConfig, DPOConfig)  # their fields in the full suite alone
ALL = [pytest.param(config, c, id=f"{config.__name__}-{name}-{i}", marks=[pytest.mark.full] if config in LONG else [])
       for config, cases in CASES.items() for name, some in cases.items() for i, c in enumerate(some)]


@pytest.fixture(autouse=True)
def gradient_descent(monkeypatch):
    monkeypatch.setitem(OPTIMISERS, "plain", lambda p, lr, weight_decay: torch.optim.SGD(p, lr=lr, weight_decay=weight_decay))


BASES = {}  # the trial of a base configuration, which several cases look at


def base_of(config, c):
    return config(**COMMON | BASE[config] | c.also)


@pytest.mark.parametrize("config", CASES)
def test_every_field_has_a_case_that_changes_it(config):
    assert set(CASES[config]) == {f.name for f in fields(config)}
    for name, some in CASES[config].items():
        assert some and all(c.change[name] != getattr(base_of(config, c), name) for c in some)


@pytest.mark.parametrize(("config", "c"), ALL)
def test_the_loop_does_what_the_field_says(tiny, tmp_path, monkeypatch, config, c):
    base = base_of(config, c)
    changed = replace(base, **c.change)
    new = Trial(tiny, changed, tmp_path, monkeypatch, c.foreign)
    if new.error:
        assert all(torch.equal(a, b) for a, b in zip(new.end, new.start))
    elif "autocast" not in c.change:  # at eight bits the hand's numbers are others
        assert new.distance(new.hand(changed)) < CLOSE
    if c.seen:
        key = repr(base), c.foreign
        if key not in BASES:
            BASES[key] = Trial(tiny, base, tmp_path, monkeypatch, c.foreign)
        assert c.seen(new, BASES[key])
    else:
        assert new.distance(new.hand(base)) > APART


# --- the loop, watched ------------------------------------------------------------------------------------------------


def small(tiny, seed, dtype) -> Policy:
    """A Llama of one layer with decided opinions."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=tiny.model.config.vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, initializer_range=0.3, max_position_embeddings=512, pad_token_id=tiny.pad_id,
        eos_token_id=tiny.eos_ids[0],
    )
    return Policy(LlamaForCausalLM(config).to(dtype).eval(), tiny.tokenizer, "small", tiny.eos_ids)


class Foreign(Sampler):
    """Its log-probs are up to 0.1 nats beside the model's."""

    async def sample(self, *args, **options):
        skewed = lambda r: replace(r, logps=tuple(x + ((3 * i) % 5 - 2) / 20 for i, x in enumerate(r.logps)))  # noqa: E731
        return [Group(tuple(map(skewed, g))) for g in await super().sample(*args, **options)]

    async def stream(self, *args, **options):
        async for i, g, r in super().stream(*args, **options):
            yield i, g, replace(r, logps=tuple(x + ((3 * k) % 5 - 2) / 20 for k, x in enumerate(r.logps)))


class Trial:
    """One run of a loop: where its weights went, what was sampled, and what could be seen on the way."""

    def __init__(self, tiny, config, tmp_path, monkeypatch, foreign):
        dtype = torch.float32 if config.autocast else torch.float64  # which autocast leaves alone
        self.config, self.policy, self.reference = config, small(tiny, 0, dtype), small(tiny, 1, dtype)
        self.rollouts, self.saved = [], []
        self.passes = self.tokens = 0
        self.pairs = load_preferences(
            [{"prompt": p.question, "chosen": p.target, "rejected": f"{p.answer + k}" * (1 + k % 3), "margin": 0.5 + k}
             for k, p in enumerate(PROBLEMS)], tiny.tokenizer)
        self.examples = demonstrations(self.policy, PROBLEMS)
        if isinstance(config, RewardConfig):
            self.policy = RewardModel.from_policy(self.policy)
            torch.nn.init.normal_(self.policy.model.score.weight, std=0.3)
        self.start = [p.detach().clone() for p in self.policy.model.parameters()]
        self.foreign, self.error = foreign, ""
        with monkeypatch.context() as patch:
            if foreign:
                patch.setattr(importlib.import_module("grpolab.train.grpo"), "Sampler", Foreign)
            self.watch(patch)
            try:
                asyncio.run(self.walk(tmp_path))
            except RuntimeError as error:
                self.error = str(error)
        self.policy.model.base_model.embed_tokens.__class__ = torch.nn.Embedding
        self.end = [p.detach().clone() for p in self.policy.model.parameters()]

    def watch(self, patch):
        trial, begin = self, Run.begin

        class Counted(torch.nn.Embedding):  # no hook: a model with hooks or classes not torch's takes another path
            __module__ = torch.nn.Embedding.__module__

            def forward(self, ids):
                if torch.is_grad_enabled():
                    trial.passes, trial.tokens = trial.passes + 1, trial.tokens + ids.numel()
                return super().forward(ids)

        def counting_from_here(*args):  # the proof of the forward before has passes of its own; the sampler is open now
            self.passes = self.tokens = 0
            self.attention = attention_of(self.policy.model)
            return begin(*args)

        patch.setattr(Run, "begin", counting_from_here)
        patch.setattr(Run, "save_checkpoint", lambda run, step, *_: self.saved.append(step))
        self.policy.model.base_model.embed_tokens.__class__ = Counted

    def reward(self, text, problem, rollout):
        """Distinct within a group, and unlike from step to step; where there are refills, some questions have none."""
        self.rollouts.append((problem, rollout))
        if self.config.refills and PROBLEMS.index(problem) % 2:
            return 0.5
        return self.value(rollout)

    @staticmethod
    def value(rollout):
        return (rollout.seed >> 5) % 1024 / 1024

    async def walk(self, tmp_path):
        config, run = self.config, Run(f"{len(list(tmp_path.iterdir()))}", root=tmp_path)
        if isinstance(config, SFTConfig):
            rows = train_sft(self.policy, self.examples, config, held_out=self.examples[:2], run=run)
        elif isinstance(config, DPOConfig):
            rows = dpo(self.policy, self.reference, self.pairs, config, run=run)
        elif isinstance(config, RewardConfig):
            rows = reward_model(self.policy, self.pairs, config, run=run)
        else:
            rows = grpo(self.policy, self.reference, PROBLEMS, config, reward=self.reward, run=run)
        taken = [row async for row in rows]
        self.rates, self.held = [row["lr"] for row in taken], [row["step"] for row in taken if "held_out_loss" in row]

    @property
    def asked(self):
        return len({p for p, _ in self.rollouts[: len(self.rollouts) // self.config.steps]})

    @property
    def group(self):
        return Counter(p for p, _ in self.rollouts[: len(self.rollouts) // self.config.steps]).most_common(1)[0][1]

    @property
    def longest(self):
        return max(len(r.tokens) for _, r in self.rollouts if r.finish_reason == "length")

    @property
    def greedy(self):
        """The share of the sampled tokens that the model, as it was at the start, held for the likeliest or as good."""
        first = self.rollouts[: len(self.rollouts) // self.config.steps]
        self.put(self.start)
        with torch.no_grad():
            logits = [(self.logits(self.policy, r.prompt + r.tokens)[len(r.prompt) - 1 : -1], r.tokens) for _, r in first]
        self.put(self.end)
        right = [x[range(len(t)), list(t)] >= x.amax(1) - 0.1 for x, t in logits]
        return torch.cat(right).double().mean().item()

    def put(self, weights):
        with torch.no_grad():
            for p, w in zip(self.policy.model.parameters(), weights):
                p.copy_(w)

    def distance(self, weights):
        """From where the loop went to `weights`, relative to the way from the start."""
        way = torch.cat([(a - b).flatten() for a, b in zip(self.end, self.start)])
        off = torch.cat([(a - b).flatten() for a, b in zip(self.end, weights)])
        return (off.norm() / way.norm()).item()

    # -- the same steps by hand ----------------------------------------------------------------------------------------

    def hand(self, config) -> list[torch.Tensor]:
        """The weights after config.steps steps from the start, on what the loop was given and sampled."""
        self.put(self.start)
        parameters = list(self.policy.model.parameters())
        moments, t = [[torch.zeros_like(p), torch.zeros_like(p)] for p in parameters], 0
        for step in range(config.steps):
            for loss in self.losses(config, step):
                t += 1
                gradient = torch.autograd.grad(loss, parameters, allow_unused=True)
                gradient = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradient)]
                norm = math.sqrt(sum((g**2).sum().item() for g in gradient))
                warm = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
                lr = config.lr * warm * (math.cos(math.pi / 2 * step / config.steps) ** 2 if config.schedule == "cosine" else 1)
                with torch.no_grad():
                    for p, g, m in zip(parameters, gradient, moments):
                        g = g * min(1.0, config.max_grad_norm / norm)
                        if config.optimiser == "adamw":  # arXiv 1711.05101
                            m[0], m[1] = 0.9 * m[0] + 0.1 * g, 0.99 * m[1] + 0.01 * g**2
                            g = m[0] / (1 - 0.9**t) / ((m[1] / (1 - 0.99**t)).sqrt() + 1e-8)
                        p -= lr * (g + config.weight_decay * p)
        found = [p.detach().clone() for p in parameters]
        self.put(self.end)
        return found

    def losses(self, config, step):
        if isinstance(config, SFTConfig):
            yield self.sft_loss([self.examples[i] for i in batch(len(self.examples), config.batch_size, step, config.seed)])
        elif isinstance(config, DPOConfig):
            pairs = [self.pairs[i] for i in batch(len(self.pairs), config.batch_size, step, config.seed)]
            yield sum(self.dpo_loss(pair, config) for pair in pairs) / len(pairs)
        elif isinstance(config, RewardConfig):
            pairs = [self.pairs[i] for i in batch(len(self.pairs), config.batch_size, step, config.seed)]
            yield sum(self.reward_loss(pair, config) for pair in pairs) / len(pairs)
        else:
            yield from self.grpo_losses(config, step)

    def logits(self, policy, ids):
        return policy.model(torch.tensor([ids])).logits[0].double()

    def logps(self, policy, prompt, tokens, temperature=1.0):
        """log p of each of `tokens` after `prompt`."""
        logps = (self.logits(policy, prompt + tokens) / temperature).log_softmax(-1)
        return logps[range(len(prompt) - 1, len(prompt) + len(tokens) - 1), list(tokens)]

    def sft_loss(self, examples):
        """The mean over the assistant's tokens of the whole batch."""
        terms = []
        for e in examples:
            mask = torch.tensor(e.mask[1:], dtype=torch.bool)
            terms.append(-self.logps(self.policy, e.ids[:1], e.ids[1:])[mask])
        return torch.cat(terms).mean()

    def dpo_loss(self, pair, config):
        """arXiv 2305.18290, eq. 7; IPO 2310.12036, eq. 17; hinge 2309.06657; cDPO."""
        sums = {}
        for name, side in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            for policy in (self.policy, self.reference):
                mask = torch.tensor(side.mask, dtype=torch.bool)
                logps = self.logps(policy, pair.prompt, side.ids)[mask]
                sums[name, policy is self.policy] = logps.mean() if config.length_normalised else logps.sum()
        delta = sums["chosen", True] - sums["chosen", False] - (sums["rejected", True] - sums["rejected", False])
        if config.kind == "ipo":
            return (delta - 1 / (2 * config.beta)) ** 2
        if config.kind == "hinge":
            return torch.relu(1 - config.beta * delta)
        right, e = torch.sigmoid(config.beta * delta), config.label_smoothing
        return -(1 - e) * right.log() - e * (1 - right).log()

    def reward_loss(self, pair, config):
        """arXiv 2203.02155, eq. 1, with the margin of 2307.09288, eq. 2; each side read with its prompt."""
        chosen, rejected = (self.policy.model(torch.tensor([pair.prompt + side.ids])).logits[0, 0].double()
                            for side in (pair.chosen, pair.rejected))
        margin = config.margin * pair.meta["margin"]
        return -torch.sigmoid(chosen - rejected - margin).log() + config.centering * (chosen + rejected) ** 2

    def grpo_losses(self, config, step):
        """arXiv 2402.03300 with its variants, one loss an optimiser step."""
        n = len(self.rollouts) // self.config.steps
        own, size = self.in_order(self.rollouts[step * n : (step + 1) * n], step), self.group
        groups = [own[i : i + size] for i in range(0, n, size)]
        self.check_sampled(groups, step)  # by the configuration that sampled
        if config.refills or self.config.refills:
            first, more = groups[: config.prompts_per_step], groups[config.prompts_per_step :]
            groups = [g for g in first + (more if config.refills else []) if PROBLEMS.index(g[0][0]) % 2 == 0]
        rewards = torch.tensor([[self.value(r) for _, r in g] for g in groups], dtype=torch.float64)
        advantages = rewards - rewards.mean(1, keepdim=True)
        if config.advantage_kind == "standardised":
            advantages = advantages / (rewards.std(1, keepdim=True) + 1e-4)
        elif config.advantage_kind == "batch_standardised":
            advantages = advantages / (rewards.std() + 1e-4)
        elif config.advantage_kind == "leave_one_out":
            advantages = torch.stack([rewards[:, i] - rewards[:, [j for j in range(size) if j != i]].mean(1)
                                      for i in range(size)], 1)
        own = {}
        if config.sampler_cap:
            with torch.no_grad():
                own = {r: self.logps(self.policy, r.prompt, r.tokens, config.temperature) for g in groups for _, r in g}
        for epoch in range(config.inner_epochs):
            order = random.Random(f"{config.seed}/{step}/{epoch}").sample(range(len(groups)), len(groups))
            ends = [len(order) * k // config.minibatches for k in range(config.minibatches + 1)]
            for a, b in zip(ends, ends[1:]):
                pairs = [(r, advantages[i, j]) for i in order[a:b] for j, (_, r) in enumerate(groups[i])]
                yield self.grpo_loss(pairs, config, own)

    def in_order(self, own, step):
        """As asked: rewards are asked as rollouts finish, and a rollout's seed says which one it is."""
        rounds = [self.config.seed * 1_000_003 + step]
        rounds += [fold_seed(self.config.seed, step, extra) for extra in range(self.config.refills)]
        places = [fold_seed(r, i, g) for r in rounds for i in range(self.config.prompts_per_step) for g in range(self.group)]
        return sorted(own, key=lambda asked: places.index(asked[1].seed))

    def check_sampled(self, groups, step):
        """What the loop asked is what (seed, step) says, and each token has the log-prob of the model that drew it."""
        config = self.config
        asked = [PROBLEMS[i] for i in batch(len(PROBLEMS), config.prompts_per_step, step, config.seed)]
        for i, (problem, group) in enumerate(zip(asked, groups)):
            assert {p for p, _ in group} == {problem}
            assert all(r.prompt == tuple(prompt_ids(self.policy.tokenizer, problem.question)) for _, r in group)
            assert [r.seed for _, r in group] == [fold_seed(config.seed * 1_000_003 + step, i, g) for g in range(len(group))]
        if step == 0 and not self.foreign:
            with torch.no_grad():
                for _, r in groups[0]:
                    logps = self.logps(self.policy, r.prompt, r.tokens, config.temperature)
                    assert torch.allclose(logps, torch.tensor(r.logps, dtype=torch.float64), atol=1e-4)

    def grpo_loss(self, pairs, config, own):
        total, counts = 0.0, [len(r.tokens) for r, _ in pairs]
        for r, a in pairs:
            logps = self.logps(self.policy, r.prompt, r.tokens, config.temperature)
            sampled = torch.tensor(r.logps, dtype=torch.float64)
            old = own.get(r, sampled)
            ratio = (logps - old).exp()
            if config.ratio == "sequence":  # arXiv 2507.18071, eq. 7
                ratio = (logps - old).mean().exp().expand(len(logps))
            clipped = ratio.clamp(1 - config.clip_eps[0], 1 + config.clip_eps[1])
            gain = torch.minimum(ratio * a, clipped * a)  # arXiv 1707.06347, eq. 7
            if config.objective == "cispo":  # arXiv 2506.13585, eq. 4
                gain = clipped.detach() * a * logps
            elif config.dual_clip and a < 0:  # arXiv 1912.09729
                gain = torch.maximum(gain, config.dual_clip * a)
            terms = -gain
            if config.sampler_cap:  # truncated importance weights of another sampler's tokens
                terms = terms * (old - sampled).exp().clamp(max=config.sampler_cap)
            if config.kl_coef:
                with torch.no_grad():
                    ref = self.logps(self.reference, r.prompt, r.tokens, config.temperature)
                if config.kl_to == "sampler":  # arXiv 1707.06347, eq. 8
                    ref = old = sampled
                k3 = (ref - logps).exp() - 1 - (ref - logps)  # joschu.net/blog/kl-approx.html
                kl = {"k1": logps - ref, "k2": (logps - ref) ** 2 / 2, "k3": k3, "unbiased": (logps - old).exp() * k3}
                terms = terms + config.kl_coef * kl[config.kl_kind]
            total = total + (terms.mean() if config.aggregation == "sequence" else terms.sum())
        return total / {"token": sum(counts), "sequence": len(counts),
                        "constant": len(counts) * config.max_new_tokens}[config.aggregation]


def batch(n, size, step, seed):
    """The places of a step: a fresh permutation every epoch, one after another."""
    def order(epoch):
        return random.Random(f"{seed}/{epoch}").sample(range(n), n)

    return [order(k // n)[k % n] for k in range(step * size, (step + 1) * size)]


# --- what a configuration refuses before anything is sampled -----------------------------------------------------------


WRONG = {
    SFTConfig: [{"lr": 0}, {"lr": math.inf}, {"schedule": "linear"}, {"optimiser": "sgd"}, {"autocast": "float16"},
                {"warmup": -1}, {"max_grad_norm": -1.0}, {"max_grad_norm": math.nan}, {"weight_decay": -1}, {"batch_size": 0}],
    DPOConfig: [{"beta": 0}, {"kind": "dpo"}, {"label_smoothing": 0.9}, {"label_smoothing": 0.1, "kind": "ipo"}],
    RewardConfig: [{"centering": -1}],
    GRPOConfig: [{"aggregation": "tokens"}, {"advantage_kind": "std"}, {"kl_kind": "foo"}, {"clip_eps": 0.2},
                 {"clip_eps": (-0.1, 0.2)}, {"clip_eps": (0.2, math.nan)},
                 {"kl_coef": math.inf}, {"temperature": math.inf}, {"max_new_tokens": 0},
                 {"ratio": "tokens"}, {"dual_clip": 3.0, "objective": "cispo"}, {"dual_clip": 0.5}, {"group_size": 0},
                 {"group_size": 1}, {"minibatches": 65}, {"refills": -1}, {"sampler_cap": 0.5}, {"max_logp_diff": (0.0, 1.0)},
                 {"max_logp_diff": (0.1, math.nan)}, {"max_logp_diff": 0.1}, {"max_logp_diff": (0.1,)}, {"steps": 1e3},
                 {"prompts_per_step": 2.0}, {"seed": 0.5}, {"steps": "10"}],
}


@pytest.mark.parametrize(("config", "options"), [(config, options) for config, some in WRONG.items() for options in some])
def test_a_configuration_that_cannot_be_trained_is_refused_by_the_name_of_the_field(config, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        config(**options)
    assert GRPOConfig(group_size=1, kl_coef=0.1).group_size == 1
