"""A sampler in another process, asked over HTTP and given new weights through a file."""

import asyncio
import contextlib
import http.server
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loop_helpers import flat, fresh, rows_of

from grpolab.arithmetic import generate
from grpolab.chat import prompt_ids
from grpolab.decode.audit import audit
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.rollouts import Rollout
from grpolab.runs.run import Run, repository
from grpolab.serve.http_client import RemoteError
from grpolab.serve.remote import RemoteSampler, RemoteTeacher, following
from grpolab.serve.service import serve_policy
from grpolab.serve.weight_sync import SharedFile
from grpolab.train.distil import DistilConfig, distil, distil_gradient
from grpolab.train.grpo import GRPOConfig, grpo_from
from grpolab.train.sources import Tasks, sampled

PROMPTS = [[5, 6, 7, 8], [9, 10], [5, 6, 7, 8]]


@contextlib.contextmanager
def process(*options):
    """`python -m grpolab serve-policy tiny` in a process of its own, which a signal ends: (its url, the process)."""
    done = subprocess.Popen([sys.executable, "-m", "grpolab", "serve-policy", "tiny", "--port", "0", *options], text=True,
                            stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(repository())})
    try:
        said = next(line for line in done.stdout if line.startswith("serving"))
        yield said.split()[-1], done
    finally:
        done.send_signal(signal.SIGTERM)
        status = done.wait(60)
    assert status == 0


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A server with a token and a weights file, for all tests of this file."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "token").write_text("s3cret\n")
    weights = (Path("/dev/shm") if Path("/dev/shm").is_dir() else folder) / f"grpolab-test-{os.getpid()}.safetensors"
    with process("--token-file", str(folder / "token"), "--weights", str(weights)) as (url, _):
        yield url, weights
    weights.unlink(missing_ok=True)


def moved(policy, by):
    """The policy after an update: other weights, a version more."""
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(by)) * 0.02)
    policy.version += 1


async def test_it_samples_what_the_sampler_here_samples(tiny, elsewhere):
    """Rollout for rollout: ids, both log-probs, seeds, finish reasons, kept mass."""
    url, weights = elsewhere

    async with RemoteSampler(url, tiny, token="s3cret", bridge=SharedFile(weights)) as remote, Sampler(tiny) as here:
        await remote.publish()
        for params in (SamplingParams(seed=0, max_new_tokens=12), SamplingParams(greedy=True, seed=2, max_new_tokens=20),
                       SamplingParams(seed=3, temperature=0.7, top_k=5, max_new_tokens=9),
                       SamplingParams(seed=1, stop_strings=("1",), stop_ids=(12,), max_new_tokens=40, ignore_eos=True)):
            theirs = await remote.sample(PROMPTS, group_size=3, params=params)
            ours = await here.sample(PROMPTS, group_size=3, params=params)
            assert theirs == ours
        assert await remote.sample([]) == []
        params = SamplingParams(greedy=True, seed=2, max_new_tokens=40, ignore_eos=True)  # too many
        (full,), (short,) = await remote.sample([[5] * 500, [5] * 490], params=params)
        ((wanted,),) = await here.sample([[5] * 500], params=params)
        assert full == wanted and full.finish_reason == "context"
        assert (len(full.tokens), len(short.tokens), short.finish_reason) == (12, 12, "length")
        with pytest.raises(RemoteError, match="the context is 512 tokens here, and the request has 512 in its prompt"):
            await remote.sample([[5] * 512])


async def test_published_weights_are_sampled_from_and_carry_their_version(tiny, elsewhere):
    url, weights = elsewhere

    async with RemoteSampler(url, tiny, token="s3cret", bridge=SharedFile(weights), max_staleness=0) as remote:
        await remote.publish()
        for i in range(3):
            moved(tiny, i)
            with pytest.raises(RemoteError, match="publish more often"):
                await remote.sample(PROMPTS[:1], params=SamplingParams(max_new_tokens=2))
            assert await remote.publish() == tiny.version
            (group,) = await remote.sample(PROMPTS[:1], params=SamplingParams(max_new_tokens=8))
            assert group[0].policy_version == tiny.version and audit(tiny, group).max_error < 1e-4


async def test_a_cancelled_request_ends_at_the_server(tiny):
    async with serve_policy(tiny) as service, RemoteSampler(service.url, tiny) as remote:
        await remote.sample(PROMPTS[:1], params=SamplingParams(max_new_tokens=2))
        long = SamplingParams(max_new_tokens=500, ignore_eos=True)
        requests = service.counts["requests"]
        for i in range(30):  # also before it has a connection
            asking = asyncio.ensure_future(remote.sample(PROMPTS, params=long))
            while i == 0 and service.rows < 3:
                await asyncio.sleep(0.005)
            await asyncio.sleep(i / 10_000)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        async with asyncio.timeout(5):
            while service.rows or service.sampler.busy:
                await asyncio.sleep(0.005)
        assert service.counts["cancelled"] == service.counts["requests"] - requests > 0


def test_training_with_a_sampler_elsewhere(tiny, elsewhere):
    """The policy here, its sampler in the other process: the weights follow, and both agree on the log-probs."""
    url, weights = elsewhere
    rows, _ = generate(8, 0, seed=1)
    config = GRPOConfig(prompts_per_step=2, group_size=4, steps=4, max_new_tokens=8, lr=1e-3, sampler_cap=2.0)

    async def main(every):
        async with RemoteSampler(url, tiny, token="s3cret", bridge=SharedFile(weights)) as remote:
            source = sampled(tiny, remote, Tasks(rows, config, None), lambda row: prompt_ids(tiny.tokenizer, row.question),
                             config, lambda text, row, rollout: text.count("1") / 8)
            return [row async for row in grpo_from(tiny, None, following(remote, source, every), config, longest=64)]

    near = asyncio.run(main(1))
    assert [r["staleness"] for r in near] == [0] * 4 and max(r["diff_max"] for r in near) < 1e-3
    assert all(r["sync_s"] > 0 for r in near) and tiny.version == 4
    far = asyncio.run(main(2))
    assert [r["staleness"] for r in far] == [0, 1, 0, 1] and far[1]["diff_max"] > 1e-3
    for row in (*near, far[0]):  # how far the policy is from who sampled: nowhere, and with a step in between somewhere
        assert [row[f"ratio_{which}"] for which in ("low", "median", "high")] == pytest.approx([1] * 3, abs=1e-3)
        assert row["ess"] == pytest.approx(1, abs=1e-6)
    assert far[1]["ratio_low"] < far[1]["ratio_median"] < far[1]["ratio_high"] and far[1]["ess"] < 1 - 1e-6


# --- a teacher elsewhere ----------------------------------------------------------------------------------------------

DISTIL = DistilConfig(steps=4, prompts_per_step=2, group_size=3, max_new_tokens=8, lr=1e-3, vocabulary="sampled", seed=4)
TAUGHT, _ = generate(8, 0, seed=1)


@pytest.fixture
def teacher(tiny):
    other = fresh(tiny)
    moved(other, 5)
    return other


async def test_a_teacher_elsewhere_teaches_as_one_here(tiny, teacher):
    """Loss and gradient, behind prompts of its own; other callers sample from it meanwhile."""
    async with serve_policy(teacher) as service, Sampler(tiny) as sampler, RemoteSampler(service.url, teacher) as other:
        busy = asyncio.ensure_future(other.sample(PROMPTS, group_size=4, params=SamplingParams(max_new_tokens=60)))
        groups = await sampler.sample(PROMPTS, group_size=3, params=SamplingParams(seed=1, max_new_tokens=9))
        rollouts = [r for g in groups for r in g]
        theirs = [replace(r, prompt=(7, 7, *r.prompt)) for r in rollouts]
        scores = await RemoteTeacher(service.url, tiny)(theirs)
        await busy
    found = []
    for source in (scores, teacher):
        row = distil_gradient(tiny, source, rollouts, theirs, DISTIL)
        found.append((row["loss"], torch.cat([p.grad.flatten() for p in tiny.model.parameters()])))
        tiny.model.zero_grad()
    (loss, there), (wanted, here) = found
    assert loss == pytest.approx(wanted, rel=1e-4) and (there - here).norm() < 1e-4 * here.norm() and here.norm() > 0.01


def test_a_run_outlives_its_teacher(tiny, teacher, tmp_path):
    """The teacher ends in mid-run: so does the run, before the step; it goes on where another answers, to the same weights."""
    whole, half, again = (fresh(tiny) for _ in range(3))
    rows_of(distil(whole, teacher, TAUGHT, DISTIL))

    async def interrupted():
        async with serve_policy(teacher) as service:
            steps = distil(half, RemoteTeacher(service.url, half), TAUGHT, DISTIL, run=Run("distil", root=tmp_path))
            rows = [await anext(steps), await anext(steps)]
        with pytest.raises(RemoteError, match="is it running"):
            await anext(steps)
        return rows

    async def resumed():
        async with serve_policy(teacher) as service:
            steps = distil(again, RemoteTeacher(service.url, again), TAUGHT, DISTIL, run=Run("distil", root=tmp_path))
            return [row async for row in steps]

    assert len(asyncio.run(interrupted())) == half.version == 2
    assert [row["step"] for row in asyncio.run(resumed())] == [2, 3]
    assert torch.allclose(flat(again), flat(whole), atol=1e-4) and not torch.allclose(flat(again), flat(half), atol=1e-4)


@pytest.mark.parametrize(("changes", "said"), [
    (dict(probe=[1, 2, 3]), "another vocabulary"),
    (dict(choice={"logprobs": None}), "did not give each of 13 tokens a log-prob: a teacher must score prompts"),
    (dict(), "each of 13 tokens"),  # those of what it sampled: it does not know echo
    (dict(most=2), "each of 13 tokens"),
    (dict(choice={"logprobs": {"token_logprobs": [-1.0] * 4}, "index": 0}), "each of 13 tokens"),
])
def test_a_server_that_cannot_teach(tiny, changes, said):
    rollouts = [Rollout(tuple(prompt), (5, 1), (1, 1), (0.0,) * 2, (0.0,) * 2, "eos") for prompt in ([9, 9], [9], [9, 8, 7, 6])]
    with imitation(of_vllm(tiny.tokenizer, **changes)) as url, pytest.raises(RemoteError, match=said):
        asyncio.run(RemoteTeacher(url, tiny)(rollouts))


@pytest.mark.parametrize(("change", "said"), [
    (lambda choices: [], "it scored 0 prompts of 3"),
    (lambda choices: choices + [choices[0] | {"index": 3}], "it scored 4 prompts of 3"),
    (lambda choices: [*choices[:2], choices[1]], "KeyError: 2"),
    (lambda choices: [*choices[:2], choices[1] | {"index": 2}], "3 lines of 5 log-probs.*have 6 tokens"),
    (lambda choices: scored_as(choices, 0.5), "gave 0.5 as the log-prob of a token: one is finite and not above 0"),
    (lambda choices: scored_as(choices, math.nan), "gave nan as the log-prob"),
    (lambda choices: scored_as(choices, None), "not log-probs for each rollout"),
])
def test_a_teacher_whose_answer_is_no_log_prob_for_each_token(tiny, change, said):
    """Choices in another order are as good; all else is an error that names the server and what is wrong."""
    rollouts = [Rollout((9,) * n, (5, 1), (1, 1), (0.0,) * 2, (0.0,) * 2, "eos") for n in (4, 2, 3)]
    answers = of_vllm(tiny.tokenizer)
    choices = [{"index": i, "logprobs": {"token_logprobs": [None, *[-1.0] * (len(r.prompt) - 1), -0.5, -0.25]}}
               for i, r in enumerate(rollouts)]

    def teach(answered):
        recognise = answers["/v1/completions"]
        completions = {"/v1/completions": lambda body: {"choices": answered} if body.get("echo") else recognise(body)}
        with imitation(answers | completions) as url:
            return asyncio.run(RemoteTeacher(url, tiny)(rollouts))

    assert teach(choices[::-1]) == [[-0.5, -0.25]] * 3
    with pytest.raises(RemoteError, match=f"http://127.0.0.1:.* did not give each of 15 tokens a log-prob: .*{said}"):
        teach(change(choices))


def scored_as(choices, last):
    """The same with another log-prob at the end of the first."""
    line = choices[0]["logprobs"]["token_logprobs"]
    return [choices[0] | {"logprobs": {"token_logprobs": [*line[:-1], last]}}, *choices[1:]]


# --- servers that are not what they should be -------------------------------------------------------------------------


@contextlib.contextmanager
def imitation(answers):
    """A server that gives fixed answers: path -> JSON, or a function of the request; None is an error."""
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.do_POST()

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
            answer = answers[self.path]
            answer = answer(body) if callable(answer) else answer
            content = json.dumps(answer).encode()
            self.send_response(200 if answer is not None else 500)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def of_vllm(tokenizer, **changes):
    """What vLLM's server answers to the same fields: ids and log-probs of a choice, nothing of ours."""
    def complete(body):
        prompts = [tokenizer.encode(body["prompt"])] if isinstance(body["prompt"], str) else body["prompt"]
        ids = changes.get("probe", prompts[0]) if isinstance(body["prompt"], str) else prompts[0]
        choices = [{"index": i, "text": "..", "finish_reason": "stop", "token_ids": [5, 1], "prompt_token_ids": ids,
                    "logprobs": {"token_logprobs": [-0.5, -0.25]}} | changes.get("choice", {})
                   for i in range(len(prompts) * body.get("n", 1))]
        return {"choices": choices[: changes.get("most", 99)]}

    return {"/v1/models": {"data": [{"id": "m", "max_model_len": 512}]}, "/v1/completions": complete}


def test_a_server_of_another_make(tiny):
    with imitation(of_vllm(tiny.tokenizer)) as url:
        groups = asyncio.run(RemoteSampler(url, tiny).sample(PROMPTS, group_size=2))
    assert [len(g) for g in groups] == [2, 2, 2] and groups[1][0].prompt == (9, 10)
    assert groups[0][0].tokens == (5, 1) and groups[0][0].logps == (-0.5, -0.25) and groups[0][0].finish_reason == "eos"


STRANGE = [
    (dict(probe=[1, 2, 3]), "another vocabulary"),
    (dict(choice={"logprobs": None}), "0 log-probs for 2 token ids"),
    (dict(choice={"logprobs": {"token_logprobs": [-0.5]}}), "1 log-probs for 2 token ids"),
    (dict(choice={"logprobs": {"token_logprobs": [-0.5, None]}}), "a rollout needs one for each"),
    (dict(choice={"token_ids": None}), "for 0 token ids"),
    (dict(choice={"token_ids": [5, 99999]}), "outside the vocabulary"),
    (dict(most=3), "gave 3 completions, not 3 groups of 2"),
    (dict(probe=None), "returns no token ids"),
]


@pytest.mark.parametrize(("changes", "said"), STRANGE)
def test_a_server_that_cannot_be_trained_from(tiny, changes, said):
    with imitation(of_vllm(tiny.tokenizer, **changes)) as url:
        with pytest.raises(RemoteError, match=said):
            asyncio.run(RemoteSampler(url, tiny).sample(PROMPTS, group_size=2))


def test_servers_that_are_not_there(tiny):
    with socket.create_server(("127.0.0.1", 0)) as quiet:
        port = quiet.getsockname()[1]
        with pytest.raises(RemoteError, match="did not answer within 0.5 s") as slow:
            asyncio.run(RemoteSampler(f"http://127.0.0.1:{port}", tiny, timeout=0.5).sample(PROMPTS))
        assert "is it running" not in str(slow.value)
    with pytest.raises(RemoteError, match=f"{port}.*is it running"):
        asyncio.run(RemoteSampler(f"http://127.0.0.1:{port}", tiny).sample(PROMPTS))
    for url in ("127.0.0.1:80", "ftp://x", "http://", "http://127.0.0.1:port", "http://127.0.0.1:99999", "http://[::1"):
        with pytest.raises(ValueError, match="no address"):
            RemoteSampler(url, tiny)
    with imitation({"/v1/models": {"data": [{"id": "m"}]}}) as url, pytest.raises(RemoteError, match="not 'other'"):
        asyncio.run(RemoteSampler(url, tiny, model="other").sample(PROMPTS))
