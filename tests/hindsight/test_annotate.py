"""Skills for stage 1 from a service that fails in every way a service can: nothing lost, nothing annotated twice."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from seed_jax import tokenizer as tok
from seed_jax.hindsight import annotate, records
from seed_jax.hindsight.client import KEY_VARIABLE, Answer, Client
from seed_jax.hindsight.prompts import analysis_prompt, fit_analyses
from seed_jax.runtime.logging import append_jsonl, read_jsonl
from tests import tiny, xla
from tests.hindsight.test_client import KEY, Service, answer
from tests.hindsight.test_prompts import played

ROOT = Path(__file__).resolve().parents[2]
GOOD = '{"episode_summary": "It searched.", "episode_skill": "search the shelves before the drawers"}'


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)


def episodes(count: int, steps: int = 2) -> list:
    """`count` episodes that differ in their goal, so that each makes a request of its own."""
    made = []
    for number in range(count):
        episode = played(steps, won=number % 2 == 0)
        episode.task_id, episode.goal = f"task{number // 2}", f"put mug {number} on desk 1"
        made.append(episode)
    return made


def lines(made, ask, **changes) -> list[dict]:
    arguments = {"rules": annotate.Rules(3), "asks": 1, **changes}
    noted = [records.to_record(episode, number) for number, episode in enumerate(made)]
    prompts = fit_analyses(tiny.tokenizer(), made, "compact", 400)
    return list(annotate.annotate(noted, made, prompts, ask, **arguments))


def client(url: str, **changes) -> Client:
    return Client(url, "writer", **({"timeout_s": 5.0, "pause_s": 0.01, "retries": 4} | changes))


# -- the service's troubles --------------------------------------------------------------------------------------------


class Unreliable:
    """Each prompt meets its own trouble first, then an answer. Counts the answers by prompt."""

    def __init__(self):
        self.seen: dict[str, int] = {}
        self.answered: list[str] = []
        self.lock = threading.Lock()

    def __call__(self, body, _):
        prompt = body["messages"][0]["content"]
        with self.lock:
            number = self.seen[prompt] = self.seen.get(prompt, 0) + 1
            kind = int(prompt.split("put mug ")[1].split()[0]) % 7
        if kind == 5:
            return 200, {}, answer("", "content_filter")
        if kind == 6:
            return 400, {}, json.dumps({"error": {"code": "content_filter", "message": "refused"}}).encode()
        if number == 1 and kind == 1:
            return 429, {"Retry-After": "0"}, b"{}"
        if number <= 2 and kind == 2:
            return 500, {}, b"oops"
        if number == 1 and kind == 3:
            return 200, {"Content-Length": "5000"}, answer(GOOD)[:40]
        if number == 1 and kind == 4:
            return 200, {}, b'{"choices": [{"message": '
        with self.lock:
            self.answered.append(prompt)
        content = json.loads(answer(GOOD)) | {"usage": {"prompt_tokens": 100, "completion_tokens": 20}}
        return 200, {}, json.dumps(content).encode()


def test_every_trouble_ends_in_one_line(tmp_path):
    made, reply = episodes(21), Unreliable()
    with Service(reply) as service:
        asking = client(service.url, workers=5, timeout_s=1.0, cache=tmp_path / "cache")
        found = lines(made, annotate.by_service(asking, 64))
        assert sorted(line["episode"] for line in found) == sorted(f"{e.task_id}#{n}" for n, e in enumerate(made))
        reasons = {line["reason"] for line in found}
        assert reasons == {"", "filtered"} and sum(line["reason"] == "filtered" for line in found) == 6
        assert len(reply.answered) == len(set(reply.answered)) == 15, "none was answered twice"
        assert {line["prompt_tokens"] for line in found if line["skill"]} == {100}
        before = len(service.requests)
        again = lines(made, annotate.by_service(asking, 64))
        assert len(service.requests) == before, "the same requests come from the cache"
    assert all(line["cached"] for line in again)
    strip = lambda line: {k: v for k, v in line.items() if k not in ("requests", "cached")}  # noqa: E731
    order = lambda found: sorted(map(strip, found), key=lambda line: line["episode"])  # noqa: E731
    assert order(found) == order(again)
    for path in (tmp_path / "cache").rglob("*.json"):
        assert KEY not in path.read_text()
    report = annotate.report(found, len(made), (1.0, 10.0))
    assert (report["parsed"], report["rejected"], report["without_answer"]) == (15, {"filtered": 6}, 0)
    assert report["usd"] == pytest.approx(15 * (100 * 1.0 + 20 * 10.0) / 1e6)
    assert report["parse_rate"] == pytest.approx(15 / 21) and report["words"]["won"]["mean"] == 6


def test_a_service_that_never_answers_loses_nothing():
    """A time-out is tried again; an episode without an answer gets no line, so that it is asked about later."""
    made, hung = episodes(3), threading.Event()

    def reply(body, number):
        if "mug 1 " in body["messages"][0]["content"]:
            hung.wait(3.0)
        return 200, {}, answer(GOOD)

    with Service(reply) as service:
        found = lines(made, annotate.by_service(client(service.url, timeout_s=0.3, retries=1), 64))
        hung.set()
        assert sorted(line["episode"] for line in found) == ["task0#0", "task1#2"]
        assert sum("mug 1 " in str(body) for _, _, body in service.requests) == 2


def test_a_trickle_is_a_time_out():
    """A body that comes byte by byte keeps a socket's own time-out from ever running out."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip():
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                for _ in range(40):
                    try:
                        connection.sendall(b" ")
                    except OSError:
                        return
                    time.sleep(0.1)

        threading.Thread(target=drip, daemon=True).start()
        start = time.monotonic()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        assert client(url, timeout_s=0.5, retries=0).ask(["a"], 8) == [("", "failed")]
        assert time.monotonic() - start < 3.0


def test_an_unusable_answer_is_sent_back_with_the_reason():
    replies = {0: "I cannot say.", 1: GOOD}
    with Service(lambda _, number: (200, {}, answer(replies[number]))) as service:
        (line,) = lines(episodes(1), annotate.by_service(client(service.url), 64), asks=2)
        first, second = (body["messages"][0]["content"] for _, _, body in service.requests)
    assert line["skill"] == "search the shelves before the drawers" and line["requests"] == 2
    assert second.startswith(first) and "holds no JSON object" in second and "I cannot say." in second
    assert line["prompt"] == first, "the policy learns to answer the plain prompt"


def test_rejected_skills_keep_their_answer_and_reason():
    said = {
        "mug 0 ": ('{"episode_skill": "string"}', "stop", "template"),
        "mug 1 ": ('{"episode_skill": null}', "stop", "not_text"),
        "mug 2 ": ('{"episode_skill": "too short"}', "stop", "too_short"),
        "mug 3 ": ("nothing", "stop", "no_json"),
        "mug 4 ": (GOOD, "length", "unfinished"),
    }
    ask = lambda prompts, images: ((i, Answer(*_said(said, prompt)[:2])) for i, prompt in enumerate(prompts))  # noqa: E731
    found = lines(episodes(5), ask)
    assert [line["reason"] for line in found] == [reason for _, _, reason in said.values()]
    assert [line["answer"] for line in found] == [text for text, _, _ in said.values()]
    assert annotate.report(found, 5)["rejected"] == dict.fromkeys(
        ("no_json", "not_text", "template", "too_short", "unfinished"), 1
    )


def test_skills_that_the_policy_has_no_room_for_are_rejected():
    rules = annotate.Rules(3, too_long=lambda skill: len(skill.text.split()) > 5)
    long = json.dumps({"episode_summary": "", "episode_skill": "one two three four five six"})
    replies = {0: long, 1: long.replace(" six", "")}
    with Service(lambda _, number: (200, {}, answer(replies[number]))) as service:
        (line,) = lines(episodes(1), annotate.by_service(client(service.url), 64), rules=rules, asks=2)
        assert "is too long" in service.requests[1][2]["messages"][0]["content"]
    assert line["skill"] == "one two three four five" and line["reason"] == ""


def _said(said: dict, prompt: str):
    return next(value for mark, value in said.items() if mark in prompt)


def test_skills_that_name_instances_can_be_rejected():
    (episode,) = episodes(1)
    place = episode.turns[0].command.removeprefix("go to ")
    text = json.dumps({"episode_summary": "", "episode_skill": f"look at {place.upper()} before you leave"})
    ask = lambda prompts, images: iter([(0, Answer(text, "stop"))])  # noqa: E731
    assert lines([episode], ask, rules=annotate.Rules(3, "reject"))[0]["reason"] == "leak"
    assert lines([episode], ask)[0]["skill"].endswith("before you leave")
    other = json.dumps({"episode_summary": "", "episode_skill": "take route 66 to the kitchen"})
    unseen = lambda prompts, images: iter([(0, Answer(other, "stop"))])  # noqa: E731
    assert lines([episode], unseen, rules=annotate.Rules(3, "reject"))[0]["reason"] == ""


def test_long_episodes_lose_as_little_of_their_middle_as_fits():
    episode = played(12)
    texts = [analysis_prompt(episode, "compact", elide) for elide in range(11)]
    sizes = [len(ids) for ids in tok.encode_prompts(tiny.tokenizer(), texts)]
    for limit in (sizes[0], sizes[0] - 1, sizes[0] // 2):
        [prompt] = fit_analyses(tiny.tokenizer(), [episode], "compact", limit)
        assert prompt.elided == next(elide for elide, size in enumerate(sizes) if size <= limit)
        steps = [line for line in prompt.text.splitlines() if "=>" in line]
        assert steps[0].startswith(episode.turns[0].command) and steps[-1].startswith(episode.turns[-1].command)
        assert (f"({prompt.elided} steps left out)" in prompt.text) == (prompt.elided > 0)
    with pytest.raises(ValueError, match=r"hindsight\.max_analysis_tokens=10; raise it"):
        fit_analyses(tiny.tokenizer(), [episode], "compact", 10)


# -- files -------------------------------------------------------------------------------------------------------------


def test_records_hold_all_that_the_analysis_reads(tmp_path):
    episode = played(3, "released", won=True)
    append_jsonl(tmp_path / "r.jsonl", records.to_record(episode, 0))
    (record,) = records.read_records(tmp_path / "r.jsonl")
    assert analysis_prompt(records.to_episode(record), "released") == analysis_prompt(episode, "released")


@pytest.mark.parametrize(
    ("left", "kept"),
    [(b'{"a": 1}\n{"a"', b'{"a": 1}\n'), (b'{"a": 1}\n{"a": 2}', b'{"a": 1}\n{"a": 2}\n'), (b'{"a', b""), (b"", b"")],
)
def test_a_cut_off_line_is_mended_before_more_is_appended(tmp_path, left, kept):
    path = tmp_path / "r.jsonl"
    path.write_bytes(left)
    records.mend(path)
    assert path.read_bytes() == kept


def test_files_of_other_settings_are_not_mixed(tmp_path):
    records.check_settings(tmp_path, "rollouts", {"temperature": 0.4, "model": "a"})
    records.check_settings(tmp_path, "skills", {"model": "b"})
    records.check_settings(tmp_path, "rollouts", {"temperature": 0.4, "model": "a"})
    with pytest.raises(records.RecordError, match=r"temperature: 0\.4 -> 1\.0"):
        records.check_settings(tmp_path, "rollouts", {"temperature": 1.0, "model": "a"})


def test_two_processes_do_not_write_at_once(tmp_path):
    with (
        records.alone_in(tmp_path),
        pytest.raises(records.RecordError, match="another process"),
        records.alone_in(tmp_path),
    ):
        pass
    with records.alone_in(tmp_path):
        pass


# -- a kill in the middle ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_collection_goes_on(tmp_path):
    """The launcher is killed while requests are under way; the same command then completes the file."""
    out, home = tmp_path / "out", tmp_path / "home"
    out.mkdir()
    tiny.save_model(home / "model")
    made = episodes(24)
    for number, episode in enumerate(made):
        append_jsonl(out / "rollouts.jsonl", records.to_record(episode, number))
    answered: list[str] = []

    def reply(body, number):
        time.sleep(0.15)
        answered.append(body["messages"][0]["content"])
        return 200, {}, answer(GOOD)

    with Service(reply) as service:
        command = [
            sys.executable, "-m", "launch.annotate", "--config=configs/quickstart.py", "--stage=skills", f"--out={out}",
            f"--config.model.init={home / 'model'}", "--config.annotate.writer=openai",
            f"--config.hindsight.api_url={service.url}", "--config.hindsight.api_model=writer",
            "--config.hindsight.api_workers=2", "--config.hindsight.max_analysis_tokens=400",
        ]  # fmt: skip
        variables = os.environ | {"HOME": str(home), "PYTHONPATH": str(ROOT), KEY_VARIABLE: KEY}
        variables["XLA_FLAGS"] = xla.flags(2)
        first = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        deadline = time.monotonic() + 60
        while len(answered) < 8 and time.monotonic() < deadline:
            time.sleep(0.05)
        first.send_signal(signal.SIGKILL)
        printed = first.communicate()[0]
        kept = read_jsonl(out / "skills.jsonl")
        assert 0 < len(kept) < 24, printed
        with (out / "skills.jsonl").open("a") as file:
            file.write('{"episode": "task0#')  # as if the crash had come inside a line
        second = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120)
        assert second.returncode == 0, second.stderr
    found = read_jsonl(out / "skills.jsonl")
    assert found[: len(kept)] == kept, "what was there stays as it was"
    assert sorted(line["episode"] for line in found) == sorted(f"{e.task_id}#{n}" for n, e in enumerate(made))
    assert len(answered) <= 24 + 2, "at most what was under way is asked again"
    assert json.loads((out / "report_skills.json").read_text())["parse_rate"] == 1.0
    everything = printed + second.stdout + second.stderr
    everything += "".join(path.read_text() for path in out.rglob("*") if path.is_file())
    assert KEY not in everything
