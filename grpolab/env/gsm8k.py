"""GSM8K's questions, or any rows of its form, as an environment of Atropos (atroposlib 0.4.0, which is no dependency of ours).

    python -m grpolab.env.gsm8k serve --env.data_path train.jsonl --env.tokenizer_name FOLDER \\
        --openai.base_url http://127.0.0.1:9001/v1 --openai.model_name tiny --openai.server_type vllm \\
        --openai.tokenizer_name FOLDER --env.rollout_server_url http://127.0.0.1:8002

A row is {"question": ..., "answer": "... #### 42"}, a line each. A completion earns 1 where it ended and its final number,
after `####` or else the last one (`\\boxed{42}` too), is the row's; else 0. `grpolab up` starts it with the rest.
"""

from __future__ import annotations

import random
from typing import Any

import aiohttp
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from pydantic import Field

from grpolab.tasks import final_number, gsm8k


class GSM8KConfig(BaseEnvConfig):
    data_path: str = Field("", description="JSONL rows with question and answer, which ends in '#### number'")
    eval_path: str = Field("", description="such rows to evaluate on, every steps_per_eval steps (none: no evaluation)")
    max_new_tokens: int = Field(256, description="tokens that a completion may take")
    temperature: float = Field(1.0, description="that completions are sampled at")
    seed: int = Field(0, description="of the order of the rows")
    use_wandb: bool = False
    wandb_name: str | None = "gsm8k"  # by which it registers, too


class GSM8K(BaseEnv):
    name = "gsm8k"
    env_config_cls = GSM8KConfig

    @classmethod
    def config_init(cls) -> tuple[GSM8KConfig, list[APIServerConfig]]:
        server = APIServerConfig(base_url="http://127.0.0.1:9001/v1", api_key="-", server_type="vllm")
        return GSM8KConfig(), [server]

    async def setup(self) -> None:
        self.rows = gsm8k(self.config.data_path)
        self.evaluated = gsm8k(self.config.eval_path) if self.config.eval_path else []
        self.drawn = 0

    async def get_next_item(self) -> dict:
        """The next row: every pass over them is in an order of its own."""
        epoch, at = divmod(self.drawn, len(self.rows))
        self.drawn += 1
        return random.Random(f"{self.config.seed}/{epoch}").sample(self.rows, len(self.rows))[at]

    async def collect_trajectories(self, item: dict) -> tuple[ScoredDataGroup, list]:
        """A group of completions of a row's question, from a single request."""
        version = await self.policy_version()
        nodes, texts = await self.completed(item, self.config.group_size, self.config.temperature)
        params = {"temperature": self.config.temperature} | ({} if version is None else {"policy_version": version})
        return ScoredDataGroup(
            tokens=[n.tokens for n in nodes], masks=[n.masked_tokens for n in nodes],
            inference_logprobs=[n.logprobs for n in nodes], scores=[self.score(n, text, item) for n, text in zip(nodes, texts)],
            generation_params=params, group_overrides={}, overrides=None), []

    async def completed(self, item: dict, n: int, temperature: float) -> tuple[list, list[str]]:
        """(nodes with tokens, masks and log-probs, texts)."""
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            reply = await managed.chat_completion(messages=[{"role": "user", "content": item["prompt"]}], n=n,
                                                  max_tokens=self.config.max_new_tokens, temperature=temperature)
            return managed.get_state()["nodes"], [choice.message.content for choice in reply.choices]

    def score(self, node: Any, text: str, item: dict) -> float:
        return float(node.metadata["finish_reason"] == "stop" and final_number(text) == final_number(item["answer"]))

    async def evaluate(self, *_, **__) -> None:
        """The share of the rows to evaluate on that is right, greedily."""
        if self.evaluated:
            scores = []
            for item in self.evaluated:
                ((node,), (text,)) = await self.completed(item, 1, 0.0)
                scores.append(self.score(node, text, item))
            await self.evaluate_log({"eval/percent_correct": sum(scores) / len(scores)})

    async def policy_version(self) -> int | None:
        """The version of the weights that the server has before it samples; None of a server that says none."""
        server = self.server.servers[0].config
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {server.api_key}"}) as session:
            async with session.get(f"{server.base_url}/models") as answer:
                return (await answer.json())["data"][0].get("policy_version")


if __name__ == "__main__":
    GSM8K.cli()
