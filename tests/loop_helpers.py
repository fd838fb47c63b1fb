"""What the tests of training loops share."""

import asyncio
import copy
import importlib.util
import os

import pytest
import torch

from grpolab.models.load import Policy
from grpolab.train.optimisers import OPTIMISERS

DEVICE = os.environ.get("TEST_DEVICE", "cpu")  # where the tests that can choose compute (docs/scaling.md)
NAMES = [  # of optimisers; all but the first in the full suite alone
    pytest.param(name, marks=[pytest.mark.skipif(name == "adamw_8bit" and not importlib.util.find_spec("bitsandbytes"),
                                                 reason="needs bitsandbytes"), *[pytest.mark.full] * (name != "adamw")])
    for name in OPTIMISERS
]


def rows_of(loop, n=None):
    """The rows of a training loop, or its first n, after which it is left and closed."""
    async def collect():
        rows = []
        async for row in loop:
            rows.append(row)
            if len(rows) == n:
                break
        await loop.aclose()
        return rows

    return asyncio.run(collect())


def flat(policy):
    """All parameters as one vector."""
    return torch.cat([p.detach().flatten() for p in policy.model.parameters()])


def fresh(policy):
    """A copy of its own of a policy."""
    return Policy(copy.deepcopy(policy.model), policy.tokenizer, policy.name, policy.eos_ids)


def untimed(rows, without=frozenset()):
    """The rows without their times, and without NaN, which equals nothing."""
    return [{k: v for k, v in row.items() if not k.endswith(("_s", "seconds")) and k not in without and v == v} for row in rows]


def digits(text, row, rollout):
    """A reward that any policy gets some of."""
    return float(sum(c.isdigit() for c in text))
