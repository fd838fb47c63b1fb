"""The page of a run's rollouts: whole by itself, below its size, safe from what a model writes, and it opens."""

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from loop_helpers import digits, rows_of

from grpolab.arithmetic import Task, generate
from grpolab.lab import rollout_viewer
from grpolab.lab.restore import restore
from grpolab.lab.rollout_viewer import browse, in_script, pieces
from grpolab.models.load import load_policy
from grpolab.rollouts import Group, RecordedGroup, Rollout
from grpolab.runs.run import Run
from grpolab.train.grpo import GRPOConfig, grpo, trainer_logps
from tests.test_rollout_log import a_group, length

PROBLEMS, _ = generate(24, 0, seed=3, task=Task("+-", max_operand=20))
CONFIG = GRPOConfig(steps=3, prompts_per_step=6, group_size=4, max_new_tokens=8, lr=1e-3)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    run = Run("x", root=tmp_path_factory.mktemp("runs"), replay_every=3)
    rows_of(grpo(load_policy("tiny", device="cpu"), None, PROBLEMS, CONFIG, reward=digits, watch={"length": length}, run=run))
    return run


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page.html).group(1))


def test_the_page_holds_what_the_record_holds(left, tmp_path):
    page = browse(left, tmp_path / "a.html")
    data, table = data_of(page), left.rollouts()
    assert page.path.read_text() == page.html and len(page.html) < 5e6 and page.note == "72 rollouts"
    assert [r["t"] for r in data["rows"]] == table["tokens"].tolist() and [r["o"]["length"] for r in data["rows"]]
    assert [r["w"] for r in data["rows"]] == table["reward"].tolist() and "now" not in data["rows"][0]
    spelt = ["".join(data["vocabulary"][str(i)] for i in r["t"]) for r in data["rows"]]
    assert all(text.startswith(done) for text, done in zip(spelt, table["completion"]))  # an end token may follow
    assert data["prompts"][data["rows"][30]["p"]] == table["prompt"][30]
    assert page.path.name in page._repr_html_().split("<iframe")[0]  # all that is left in a notebook that is not trusted
    assert "box-sizing:border-box" in page._repr_html_()  # else its border makes the cell scroll sideways
    assert html.unescape(re.search("srcdoc='(.*?)'", page._repr_html_(), re.DOTALL).group(1)) == page.html
    assert len(data_of(browse(left, tmp_path / "b.html", steps=[1]))["rows"]) == 24
    with pytest.raises(ValueError, match="no recorded rollouts of these steps"):
        browse(left, steps=[7])


def test_nothing_is_asked_of_a_network(left, tmp_path):
    page = browse(left, tmp_path / "a.html").html
    outside = page.replace(re.search(r'id="data">(.*?)</script>', page).group(1), "")
    assert "default-src 'none'" in page and not re.search(r"https?:|src=|href=|@import|fetch\(|url\(|innerHTML", outside)


def test_a_page_stays_below_its_size_and_says_what_it_leaves_out(left, tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_viewer, "BIGGEST", 22_000)
    page = browse(left, tmp_path / "a.html")
    rows = data_of(page)["rows"]
    assert len(page.html) < 22_000 and 0 < len(rows) < 72
    assert page.note == f"{len(rows)} rollouts of 72, evenly spaced over the steps: the file stays below 0.022 MB"
    assert {r["s"] for r in rows} == {0, 1, 2}


def test_numbers_under_a_later_policy_and_the_answers_of_two(left, tmp_path):
    data, end = data_of(browse(left, tmp_path / "a.html", now=3, compare=(0, 3))), restore(left, 3).policy
    rollouts = [r for step in range(3) for g in left.recorder.groups(step) for r in g.group]
    expected = trainer_logps(end, rollouts, CONFIG)
    assert [r["now"] for r in data["rows"]] == [pytest.approx(row, abs=2e-3) for row in expected]
    assert data["diff_names"] == ["after 0 steps", "after 3 steps"] and len(data["diff"]) > 4
    assert any(how != "=" for d in data["diff"] for how, _ in d["pieces"])


def test_the_pieces_of_two_texts():
    assert pieces("1 + 2 = 3", "1 + 2 = 4!") == [["=", "1 + 2 = "], ["-", "3"], ["+", "4!"]]
    assert pieces("", "x") == [["+", "x"]] and pieces("ab", "b") == [["-", "a"], ["=", "b"]]


EVIL = "</script><img src=x onerror=document.title='hit'><!--<script>&amp;\u2028"


def evil_run(folder):
    """A run whose model writes HTML, and whose environment does."""
    run = Run("evil", root=folder)
    (run.folder / "run.json").write_text(json.dumps({"config": json.loads(json.dumps(vars(CONFIG)))}))
    g = a_group()
    masked = Group(tuple(replace(r, mask=(1, 0, 1)) for r in g.group))
    run.recorder.add(0, [replace(g, group=masked, problem=EVIL)], lambda ids: EVIL, {})
    return run


def test_what_a_model_writes_stays_text(tmp_path):
    page = browse(evil_run(tmp_path))
    assert "<img" not in page.html and page.html.count("</script>") == 2
    assert data_of(page)["rows"][0]["c"] == EVIL == json.loads(in_script(EVIL)) and data_of(page)["rows"][0]["m"] == [1, 0, 1]


def dom(page, folder, script=""):
    """What a browser makes of a page, after a script of a user's."""
    path = folder / "used.html"
    path.write_text(page.html.replace("</body>", f"<script>{script}</script></body>"))
    done = subprocess.run([CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000",
                           f"--user-data-dir={folder / 'profile'}", "--dump-dom", f"file://{path.resolve()}"],
                          capture_output=True, text=True, timeout=120)
    assert "<main" in done.stdout, done.stderr[-500:]
    return done.stdout.split("<main")[1].split("</main>")[0], done.stdout


browser = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium")


@browser
def test_it_opens_in_a_browser(left, tmp_path):
    assert dom(browse(left, tmp_path / "a.html"), tmp_path)[0].count("<article>") == 60
    shown, whole = dom(browse(evil_run(tmp_path)), tmp_path)
    assert shown.count("<article>") == 4 and "<title>hit" not in whole and "<img" not in whole
    assert shown.count('class="env"') == 4 and "onerror=document.title" in shown  # there, as text


def hostile_run(folder, texts):
    """Completions of any text, a token a character."""
    run = evil_run(folder)
    run.recorder.rewind(0)
    for step, text in enumerate(texts):
        tokens = tuple(map(ord, text))
        ones = (0.0,) * len(tokens)
        r = Rollout((1, 2), tokens, (1,) * len(tokens), ones, ones, "eos", reward=1.0)
        run.recorder.add(step, [RecordedGroup(Group((r,)), (0.0,))], lambda ids: "".join(map(chr, ids)), {})
    return run


LONG = "<script>document.title='hit'</script>" * 30_000  # 1.1 MB


def test_a_text_of_a_megabyte_does_not_make_the_page_large(tmp_path):
    run = hostile_run(tmp_path, [LONG, "short", LONG, "\u202egnihtemos \U0001f600 \u2028 é\x00\ud800"])
    page = browse(run)
    data = data_of(page)
    assert len(page.html) < 5e5 and [r["n"] for r in data["rows"]] == [len(LONG), 5, len(LONG), 18]
    assert len(data["rows"][0]["t"]) == 4000 and data["rows"][1]["c"] == "short"


@browser
def test_a_hostile_text_is_shown_as_text(tmp_path):
    page = browse(hostile_run(tmp_path, [LONG, "\u202e \U0001f600 </main></script><b>x</b>"]))
    more = "[...document.querySelectorAll('button')].find(b => b.textContent.includes('all 4000')).click()"
    shown, whole = dom(page, tmp_path, more)
    assert "<title>hit" not in whole and "<b>x" not in whole and "\U0001f600" in shown
    assert "and 1106000 more tokens" in shown and shown.count("<span") > 4000
