"""A training's model card, and its upload to a stand-in of the hub's API."""

import base64
import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest

from grpolab.__main__ import main
from grpolab.cli import publish
from grpolab.models.load import load_policy

SHORT = ["--ops", "+", "--max-operand", "9", "--problems", "20", "--steps", "2"]


@pytest.fixture
def hub():
    """(address, the repositories to create, the files that were committed) of an HTTP server that answers as the hub does."""
    created, files = [], {}

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            known = self.headers.get("Authorization") == "Bearer hf_secret"
            self.answer(200 if known else 401, {"name": "me", "type": "user"} if known else {"error": "who are you?"})

        def do_POST(self):
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length) if length else self.chunks()
            address = f"http://{self.headers['Host']}/me/model"
            if self.path.endswith("/create"):
                self.answer(200, {"url": address, "name": "me/model"})
                created.append(json.loads(body))
            elif self.path.endswith("/validate-yaml"):
                self.answer(200, {"errors": [], "warnings": []})
            elif "/preupload/" in self.path:
                self.answer(200, {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                                            for f in json.loads(body)["files"]]})
            elif "/commit/" in self.path:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                self.answer(200, {"commitUrl": f"{address}/commit/1", "commitOid": "1", "success": True})
            else:
                self.answer(404, {"error": self.path})

        def chunks(self):
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            return body

        def answer(self, status, value):
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", created, files
    server.shutdown()


def grpolab(folder, *arguments, **environment):
    environment = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(folder)} | environment
    return subprocess.run([sys.executable, "-m", "grpolab", *arguments], cwd=folder, env=os.environ | environment,
                          capture_output=True, text=True, timeout=300)


@pytest.mark.full
def test_the_policy_is_uploaded_with_its_card(tmp_path, hub):
    address, created, files = hub
    done = grpolab(tmp_path, "sft", "tiny", *SHORT, "--push-to-hub", "me/model", HF_ENDPOINT=address, HF_TOKEN="hf_secret")
    assert done.returncode == 0 and "uploaded to" in done.stdout, done.stderr
    folder = tmp_path / "runs" / "cli_sft" / "tiny" / "policy"
    assert len(created) == 1 and "private" in json.dumps(created[0])
    assert {"model.safetensors", "tokenizer.json", "README.md", "curve.png", "provenance.json"} <= files.keys()
    assert all((folder / name).read_bytes() == content for name, content in files.items())
    assert load_policy(str(folder)).provenance["steps"] == 2


def test_what_the_hub_would_not_take_is_said_before_anything_is_trained(tmp_path, hub, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        patch.setattr(publish, "HfApi", lambda: huggingface_hub.HfApi(hub[0]))
        patch.setenv("HF_TOKEN", "hf_wrong")
        assert main(["sft", "tiny", *SHORT, "--push-to-hub", "me/model"]) == 1
    assert "refuses the token" in capsys.readouterr().err and not hub[2]
    for repo, says in (("model", "name it as owner/model"), ("../model", "name it as owner/model"),
                       ("me/model", "needs a token of the hub")):
        monkeypatch.setattr("huggingface_hub.hf_api.get_token", lambda: None)
        assert main(["sft", "tiny", *SHORT, "--push-to-hub", repo]) == 1 and says in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("call", [lambda: publish.check_hub("me/model"), lambda: publish.push(".", "me/model")])
def test_a_hub_that_never_answers_is_no_hang(monkeypatch, call):
    monkeypatch.setattr(publish, "SILENCE", 0.2)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(publish, "HfApi", lambda: huggingface_hub.HfApi(f"http://127.0.0.1:{silent.getsockname()[1]}"))
        with pytest.raises(ValueError, match="does not answer|was not uploaded"):
            call()


def test_a_card_says_how_what_and_on_what(tmp_path, monkeypatch):
    """Its recipe repeats the training; what a model wrote is no markup."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def odd(text, row, rollout):\n    return float(sum(map(ord, text)) % 2)\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "# not a heading\\n![x](http://x)"}\n' * 4)
    options = ["--prompts-per-step", "2", "--group-size", "4", "--max-new-tokens", "4", "--steps", "2", "--seed", "3"]
    assert main(["grpo", "tiny", "--data", "rows.jsonl", "--reward", "mine.py:odd", "--lora-rank", "2", *options]) == 0
    folder = tmp_path / "runs" / "cli_grpo" / "tiny" / "seed-3" / "policy"
    card = huggingface_hub.ModelCard.load(folder / "README.md")
    assert card.data.library_name == "peft" and card.data.tags == ["grpolab", "grpo"] and (folder / "curve.png").exists()
    recipe = card.text.split("```toml\n")[1].split("```")[0]
    assert "reward = \"mine.py:odd\"" in recipe and "| reward |" in card.text and "| torch |" in card.text
    assert "\n# not" not in card.text and "    {\"prompt\":" in card.text
    (tmp_path / "run.toml").write_text(recipe)
    first = (folder / "adapter_model.safetensors").read_bytes()
    assert main(["train", "run.toml", "--out", "again"]) == 0
    assert (tmp_path / "again" / "cli_grpo" / "tiny" / "seed-3" / "policy" / "adapter_model.safetensors").read_bytes() == first
