"""What a rollout may draw next under a grammar, by llguidance (the extra `constrained`): JSON of a schema, and tool calls.

    grammars = Grammars(policy)
    params = SamplingParams(constraint=grammars.compile(f"start: %json {json.dumps(schema)}"))

Tokens that the grammar forbids get probability 0, as those that top-k cuts: `logps` are under what is left, and each rollout
records its `kept_mass`. A grammar is in llguidance's form of Lark.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import numpy as np

CPU_SECONDS, MEMORY = 1, 2**30  # that a grammar may take to compile; the seconds are of a processor
# As llguidance counts: of a step in which a token is drawn, some 10 ms at most; then a rollout ends with an error.
LIMITS = dict(max_items_in_row=2000, initial_lexer_fuel=100_000, step_lexer_fuel=20_000, step_max_items=20_000,
              max_lexer_states=10_000, max_grammar_size=50_000, precompute_large_lexemes=False, verbose_errors=False)
compiling = ThreadPoolExecutor(1, "grpolab-grammar")  # one: whoever sends many grammars waits for them

# Compiles a grammar of stdin where that can be ended: an intersection of patterns may take all memory, and no limit of
# llguidance counts it.
TRIAL = """
import json, sys
sys.path.append(sys.argv[1])
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[2]),) * 2)
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[3]),) * 2)
except ImportError:
    pass  # not on Windows
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
matcher = LLMatcher(LLTokenizer("byte"), sys.stdin.read(), log_level=0, limits=LLParserLimits(**json.loads(sys.argv[4])))
if not matcher.is_error():
    matcher.compute_bitmask()
sys.stdout.write(matcher.get_error())
"""


class Constraint:
    """A compiled grammar. `start()` gives what one rollout may draw, a function of its newest token (None at its start): a
    mask (V,) bool. It raises ValueError where a limit is reached."""

    def __init__(self, matcher, vocab: int):
        self._matcher, self.vocab = matcher, vocab

    def start(self) -> Callable[[int | None], np.ndarray]:
        matcher, vocab = self._matcher.deep_copy(), self.vocab

        def allowed(newest: int | None) -> np.ndarray:
            if newest is not None:
                matcher.consume_token(newest)
            mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), count=vocab, bitorder="little")
            if matcher.is_error() or not mask.any():
                raise ValueError(f"the grammar is too complex to constrain what is sampled: {matcher.get_error()[:200]}")
            return mask.astype(bool)

        return allowed


class Grammars:
    """Grammars over a policy's tokens. ImportError without the extra; ValueError for a tokenizer whose tokens have no bytes of
    their own."""

    def __init__(self, policy):
        try:
            import llguidance
        except ImportError as error:
            raise ImportError("constrained decoding needs llguidance: pip install 'grpolab[constrained]'") from error
        self._library, self._vocab = llguidance, len(policy.model.get_input_embeddings().weight)
        self._tokenizer = llguidance.LLTokenizer(_tokens_of(policy.tokenizer), self._vocab, list(policy.eos_ids))
        self._limits = llguidance.LLParserLimits(**LIMITS)
        self.compile = lru_cache(64)(self._compile)

    def _compile(self, grammar: str) -> Constraint:
        """ValueError for a grammar that is none or takes too long to compile."""
        grammar = self._library.LLMatcher.grammar_from_lark(grammar)
        home = str(Path(self._library.__file__).parents[1])
        trial = [sys.executable, "-S", "-c", TRIAL, home, str(CPU_SECONDS), str(MEMORY), json.dumps(LIMITS)]
        try:
            done = subprocess.run(trial, input=grammar, capture_output=True, text=True, timeout=20 * CPU_SECONDS)
        except subprocess.TimeoutExpired:
            done = None
        if done is None or done.returncode:
            raise ValueError(f"it takes more than {CPU_SECONDS} s or {MEMORY >> 20} MB to constrain what is sampled to this: "
                             "take a simpler schema")
        if done.stdout:
            why = done.stdout.splitlines()[0].partition("failed to compile JSON schema: ")
            why = "nothing satisfies it" if "NoExtension" in why[0] else why[2] or why[0]
            raise ValueError(f"what is sampled cannot be constrained to this: {why[:200]}")
        return Constraint(self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits), self._vocab)


def _tokens_of(tokenizer):
    """A tokenizer as llguidance takes it: its JSON, or each token's text where these make up a text as they are (`Fuse`)."""
    from llguidance import TokenizerWrapper
    from tokenizers.decoders import Fuse

    if not isinstance(tokenizer.backend_tokenizer.decoder, Fuse):
        return tokenizer.backend_tokenizer.to_str()

    class Tokens:
        eos_token_id, bos_token_id, special_token_ids = tokenizer.eos_token_id, None, tokenizer.all_special_ids
        tokens = [tokenizer.decode([i]).encode() for i in range(len(tokenizer))]

        def __call__(self, text: bytes | str) -> list[int]:
            return tokenizer.encode(text.decode() if isinstance(text, bytes) else text, add_special_tokens=False)

    return TokenizerWrapper(Tokens())
