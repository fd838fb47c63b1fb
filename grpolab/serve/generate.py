"""`/generate` of vLLM's plain API server, in the form that Atropos' environments ask for with `--openai.server_type vllm`.

    {"prompt": {"prompt_token_ids": [...]}, "logprobs": 0, "n": 4, "max_tokens": 64, "temperature": 1.0}
    {"text": [...], "prompt": "...", "finish_reasons": ["stop", ...], "logprobs": [[[{"17": -0.3}], ...], ...],
     "prompt_token_ids": [...], "token_ids": [[...], ...], "system_fingerprint": "version-3"}

The fields are those of `/v1/completions` without a model's name. As there, log-probs are those of the sampled token under the
distribution that it was sampled from. As vLLM does, a completion gets the room that the context has left where `max_tokens` is
more: environments ask for all that a sequence may have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from grpolab.rollouts import Rollout
from grpolab.serve.completions import CompletionResponse
from grpolab.serve.openai_schema import COMPLETION_TOKENS, ENDED, PromptText, TextRequest, fingerprint, one_or_several
from grpolab.tool_calls import ParsedTurn


def _one_prompt(value: Any) -> Any:
    """vLLM's prompts: a text, token ids, or an object that holds either."""
    if isinstance(value, dict):
        if value.keys() not in ({"prompt"}, {"prompt_token_ids"}):
            raise ValueError(f"a prompt has prompt or prompt_token_ids, got {sorted(value)!r:.60}")
        ((name, value),) = value.items()
        if isinstance(value, str) != (name == "prompt"):
            raise ValueError(f"{name} is a {'text' if name == 'prompt' else 'list of token ids'}, got {value!r:.60}")
        return [value]
    return one_or_several(value)


def _of_the_sampled_token(logprobs: Any) -> bool:
    if logprobs is not True and (logprobs is False or logprobs != 0):
        raise ValueError("this service gives the log-prob of the sampled token alone; send logprobs=0")
    return True


class GenerateRequest(TextRequest):
    model: str = ""  # there is one, with the weights that it has now
    prompt: Annotated[list[PromptText], BeforeValidator(_one_prompt)] = Field(min_length=1, max_length=1)
    logprobs: Annotated[bool, BeforeValidator(_of_the_sampled_token)] = True

    @model_validator(mode="after")
    def whole(self) -> GenerateRequest:
        if self.stream or self.echo:
            raise ValueError(f"{'stream' if self.stream else 'echo'}: /generate answers once, with what was sampled; "
                             "/v1/completions has both")
        return self


class GenerateResponse(CompletionResponse):
    def _most_tokens(self) -> int:
        room = self.service.sampler.context - len(self.prompts[0].ids)
        return min(self.request.max_tokens or COMPLETION_TOKENS, room) if room > 0 else super()._most_tokens()

    def _answer(self, rollouts: Sequence[Rollout], read: Sequence[tuple[ParsedTurn, str | None]]) -> dict:
        return {
            "text": [turn.content for turn, _ in read], "prompt": self.policy.tokenizer.decode(self.prompts[0].ids),
            "finish_reasons": ["stop" if r.finish_reason in ENDED else "length" for r in rollouts],
            "logprobs": [[[{token: logp}] for token, logp in zip(r.tokens, r.logps)] for r in rollouts],
            "prompt_token_ids": self.prompts[0].ids, "token_ids": [r.tokens for r in rollouts],
            "system_fingerprint": fingerprint(min(r.policy_version for r in rollouts), self.mark)}
