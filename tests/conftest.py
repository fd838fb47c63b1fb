import copy

import pytest
import torch

from grpolab.models.load import Policy, load_policy


@pytest.fixture(scope="session")
def _tiny() -> Policy:
    torch.set_num_threads(1)
    return load_policy("tiny", device="cpu")


@pytest.fixture
def tiny(_tiny) -> Policy:
    """The embedded model, a copy of its own for each test."""
    return Policy(copy.deepcopy(_tiny.model), _tiny.tokenizer, _tiny.name, _tiny.eos_ids)
