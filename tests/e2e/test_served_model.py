"""A model served beside a store, as a user types it: serve --model, enqueue, runner, with agents that really ask it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.cli.serve import _example
from strop.config import Config
from strop.errors import ConfigError, PlaceError
from strop.net import addresses as address
from strop.run import serve
from strop.store.sqlite import SqliteStore
from strop.types import Policy
from tests import runs
from tests.limits import stretch

AGENT = """
def agent(task, llm):
    said = llm.client().chat.completions.create(
        model=llm.model, messages=[{"role": "user", "content": task.data["question"]}], max_tokens=8
    )
    llm.reward("turn", 0.5, turn=said.id)
    return float(len(said.choices[0].message.content) > 0)
"""

SERVICE = '''
"""A service that was there first. It learns the model's address from a file, and has one client for all tasks."""
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import openai
from strop.net import addresses as address

class Service(BaseHTTPRequestHandler):
    def do_POST(self):
        told = json.loads(self.rfile.read(int(self.headers["content-length"])))
        where = address.read(sys.argv[2])
        client = openai.OpenAI(base_url=where.base_url, api_key="-")
        for name in ("main", "critic"):
            client.chat.completions.create(
                model=where.model, max_tokens=4,
                messages=[{"role": "user", "content": told["task"]["data"]["question"]}],
                extra_headers={"trace_id": told["trace_id"], "x-strop-agent": name},
            )
        self.send_response(200)
        self.send_header("content-length", "3")
        self.end_headers()
        self.wfile.write(b"0.5")

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Service).serve_forever()
'''


class Place:
    def __init__(self, folder: Path, num_workers: int) -> None:
        self.folder = folder
        (folder / "agents.py").write_text(AGENT)
        (folder / "service.py").write_text(SERVICE)
        tasks = [{"id": f"t{n}", "question": f"What is {n} + 1?"} for n in range(3)]
        (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
        workers = ["--set", f"gateway.workers={num_workers}"]
        command = runs.strop("serve", "--model", "strop/nano", "--folder", "served", "--port", 0, "--json", *workers)
        self.server = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self._environment({})
        )
        assert self.server.stdout is not None
        self.said = json.loads(self.server.stdout.readline())

    def _environment(self, more: dict[str, str]) -> dict[str, str]:
        return os.environ | {"OMP_NUM_THREADS": "2"} | more

    def run(self, *arguments: object) -> str:
        keys = {"STROP_URL": self.said["url"], "STROP_KEY": self.said["key"]}
        done = subprocess.run(
            runs.strop(*arguments),
            cwd=self.folder,
            env=self._environment(keys),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, (done.stdout, done.stderr)
        return done.stdout

    def turns(self, rollout: str) -> list[dict]:
        return json.loads(self.run("rollouts", self.said["url"], rollout, "--json"))["turns"]


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two workers"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    place = Place(tmp_path_factory.mktemp("served"), request.param)
    yield place
    place.server.terminate()
    _, stderr = place.server.communicate(timeout=30)
    assert (place.server.returncode, stderr) == (0, "")
    assert not (place.folder / "served" / "address.json").exists()


def test_a_function_asks_the_served_model(place: Place):
    assert place.said["model"] == "strop/nano"
    place.run("enqueue", "--tasks", "tasks.jsonl", "--members", 2, "--mode", "train", "--name", "a")
    done = place.run("runner", "--agent", "agents.py:agent", "--workers", 3, "--until-empty", "--json")
    assert json.loads(done) == {"leased": 6, "succeeded": 6}
    for n in range(3):
        (turn,) = place.turns(f"a-{n:06d}.0")
        assert (turn["policy"], turn["agent"], turn["versions"]) == ("main", "main", [[0, "1.0"]])
        assert len(turn["response_ids"]) == len(turn["logprobs"]) > 0
        assert turn["requested"]["model"] == "strop/nano"  # the runner was told by the store


def test_a_service_that_was_there_first(place: Place):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    service = subprocess.Popen([sys.executable, place.folder / "service.py", str(port), place.folder / "served"])
    try:
        place.run("enqueue", "--tasks", "tasks.jsonl", "--name", "b")
        place.run("runner", "--agent", f"http://127.0.0.1:{port}/", "--workers", 3, "--until-empty")
    finally:
        service.kill()
        service.wait()
    for n in range(3):
        turns = place.turns(f"b-{n:06d}.0")
        assert [turn["agent"] for turn in turns] == ["main", "critic"]
        assert f"What is {n} + 1?" in json.dumps(turns[0]["messages"])


def test_the_address_is_told_to_whoever_asks(place: Place):
    by_folder = address.read(place.folder / "served", timeout=5)
    by_url = address.read(place.said["url"] + "/", timeout=5)
    assert by_folder == by_url
    assert (by_folder.url, by_folder.model, by_folder.pid) == (place.said["url"], "strop/nano", place.said["pid"])
    assert by_folder.base_url == place.said["url"] + "/v1"


def asked(
    place: Place, path: str, body: dict | None = None, key: str | None = None, **headers: str
) -> tuple[int, dict]:
    """A request as curl makes it, with the server's key unless another is given."""
    sent = headers or {"Authorization": f"Bearer {place.said['key'] if key is None else key}"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(place.said["url"] + path, data=data, headers=sent)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


HELLO = {"messages": [{"role": "user", "content": "What is 1 + 2?"}], "max_tokens": 8}


def calls(place: Place) -> list[dict]:
    listed = map(json.loads, place.run("rollouts", "--mode", "all", "--json").splitlines())
    return [rollout for rollout in listed if rollout["id"].startswith("call-")]


def test_the_servers_own_key_asks_its_model(place: Place):
    """Every request is a rollout of its own, recorded like any other."""
    status, answer = asked(place, "/v1/chat/completions", HELLO)
    assert (status, answer["choices"][0]["message"]["role"]) == (200, "assistant")
    (call,) = calls(place)
    assert (call["status"], call["mode"], call["task"]["id"]) == ("succeeded", "eval", "chat/completions")
    (turn,) = place.turns(call["id"])
    assert (turn["id"], len(turn["response_ids"]) > 0) == (answer["id"], True)
    status, answer = asked(
        place, "/v1/messages", HELLO, **{"x-api-key": place.said["key"]}
    )  # as Anthropic's clients do
    assert (status, answer["type"], len(calls(place))) == (200, "message", 2)
    assert asked(place, "/v1/models")[1]["data"][0]["id"] == "strop/nano"
    assert len(calls(place)) == 2  # a question for the models is no rollout


def test_the_request_to_begin_with_calls_the_calculator(place: Place):
    """The guide's, which is also what the server prints."""
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "store.md").read_text()
    (line,) = [block for block in guide.split("```")[1::2] if block.strip().startswith("curl ")]
    body = json.loads(line.partition("-d '")[2].rpartition("'")[0])
    assert body == _example("strop/nano")
    for _ in range(4):  # drawn at temperature 1, a third of the answers are another
        status, answer = asked(place, "/v1/chat/completions", body)
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert (status, json.loads(call["function"]["arguments"])) == (200, {"expression": "12 + 30"})


def test_a_request_with_the_servers_key_says_how_it_is_sampled(place: Place):
    """An agent in a rollout does not: the policy's settings hold for it."""
    drawn = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "presence_penalty": 0.25}
    _, answer = asked(place, "/v1/chat/completions", HELLO | drawn)
    (turn,) = place.turns(answer["id"].partition("/")[0])
    assert {name: turn["sampling"][name] for name in drawn} == drawn
    (place.folder / "one.jsonl").write_text('{"id": "one"}\n')
    place.run("enqueue", "--tasks", "one.jsonl", "--name", "drawn", "--mode", "eval")
    (lease,) = asked(place, "/v1/lease", {"runner": "me", "seconds": 60, "count": 1})[1]
    rollout, key = lease["rollout"]["id"], lease["attempt"]["key"]
    asked(place, f"/r/{rollout}/1/agents/main/v1/chat/completions", HELLO | drawn, key=key)
    (turn,) = place.turns(rollout)
    assert (turn["sampling"].get("temperature", 1.0), turn["requested"]["temperature"]) == (1.0, 0.5)
    asked(place, f"/v1/rollouts/{rollout}/attempts/1/finish", {})


def test_a_wrong_key_is_told_which_would_do(place: Place):
    """And nothing that is secret."""
    for key, why in (("wrong", "no attempt has this key"), ("", "a key is needed")):
        status, answer = asked(place, "/v1/chat/completions", HELLO, key=key)
        said = answer["error"]["message"]
        assert (status, why in said, "the server's key" in said, "the file `key`" in said) == (401, True, True, True)
        assert place.said["key"] not in said
        assert str(place.folder) not in said
    status, answer = asked(place, "/v1/stats", key="wrong")
    assert (status, "the file `key`" in answer["error"]["message"]) == (401, True)


def test_what_the_servers_key_asks_wrongly(place: Place):
    before = len(calls(place))
    status, answer = asked(place, "/v1/chat/completions", {"messages": "no list"})
    assert (status, "messages" in answer["error"]["message"]) == (400, True)
    newest, *others = calls(place)
    assert (newest["status"], newest["cause"], len(others)) == ("failed", "agent_error", before)
    assert asked(place, "/v1/chat/completions", HELLO, key="wrong")[0] == 401
    assert asked(place, "/v1/chat/nothing", HELLO)[0] == 404
    assert len(calls(place)) == before + 1


def test_an_address_that_leads_nowhere_tells_whom_it_may(place: Place):
    place.run("enqueue", "--tasks", "tasks.jsonl", "--name", "z", "--mode", "train")
    store_key, url = place.said["key"], "/r/z-000000.0/1"
    lease = {"runner": "me", "seconds": 60, "count": 3}
    _, leases = asked(place, "/v1/lease", lease)
    mine = next(one["attempt"]["key"] for one in leases if one["rollout"]["id"] == "z-000000.0")
    model = "/agents/main/v1/chat/completions"
    for key in ("", "wrong", next(one["attempt"]["key"] for one in leases if one["rollout"]["id"] == "z-000001.0")):
        for path in (
            url,
            url + model,
            url + "/nothing",
            "/r/nobody/1",
            "/r/nobody/1" + model,
            "/r/z-000000.0/7/nothing",
        ):
            status, answer = asked(place, path, HELLO if model in path else None, key=key)
            assert (status, "does not open this attempt" in answer["error"]["message"]) == (401, True), path
    told = [
        ("/r/nobody/1", None, store_key, 404, "nobody"),
        ("/r/nobody/1" + model, HELLO, store_key, 404, "nobody"),
        ("/r/nobody/1/nothing", None, store_key, 404, "nobody"),
        ("/r/z-000000.0/7", None, store_key, 404, "has had 1 attempt, so there is no attempt 7"),
        ("/r/z-000000.0/7" + model, HELLO, store_key, 404, "there is no attempt 7"),
        (url + model, HELLO, store_key, 403, "the attempt's own"),
        (url + "/agents/main", None, mine, 404, "/agents/NAME/v1 with the model APIs"),
        (url + "/nothing", None, store_key, 404, "/events"),
        ("/r/z-000000.0", None, store_key, 404, "names no attempt"),
    ]
    for path, body, key, code, says in told:
        status, answer = asked(place, path, body, key=key)
        assert (status, says in answer["error"]["message"]) == (code, True), (path, answer)
    asked(place, "/v1/rollouts/z-000000.0/attempts/1/finish", {})
    status, answer = asked(place, url + model, HELLO, key=store_key)
    assert (status, "is over" in answer["error"]["message"]) == (409, True)


def test_a_killed_server_leaves_no_address_and_says_why(tmp_path: Path):
    command = runs.strop("serve", "--folder", tmp_path / "s", "--port", 0, "--json")
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = json.loads(server.stdout.readline())["url"]
    assert address.read(tmp_path / "s", timeout=5).base_url == ""  # there is no model
    for path in ("/v1/chat/completions", "/r/a/1/agents/main/v1/chat/completions"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(url + path, data=b"{}")
        with refused.value as said:
            assert said.code == 404
            assert "no model is served here" in said.read().decode()
    server.send_signal(signal.SIGKILL)
    server.communicate()
    assert (tmp_path / "s" / "address.json").exists()
    began = time.monotonic()
    with pytest.raises(PlaceError, match=r"address.json is there, but nobody answers .* start `strop train`"):
        address.read(tmp_path / "s", timeout=0.5)
    with pytest.raises(PlaceError, match="no gateway answered at http://"):
        address.read(url, timeout=0.2)
    with pytest.raises(PlaceError, match=r"there is no address.json in it"):
        address.read(tmp_path, timeout=0.2)
    assert time.monotonic() - began < stretch(5)


async def test_a_store_with_another_policy_is_left_alone(tmp_path: Path):
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    trained = Policy(name="main", version="1.3", model="strop/nano")
    await store.put_policy(trained)
    await store.close()
    with pytest.raises(ConfigError, match=r"policy is strop/nano at version 1\.3, and --model strop/nano is not that"):
        await serve.main(tmp_path, model=Config(), on_ready=lambda url, key: None)
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    assert await store.policies() == [trained]
    await store.close()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "no/such"], "there is no model 'no/such'"),
        (["--set", "engine.max_sequences=4"], "say which with --model"),
        (["--model", "strop/nano", "--set", "engine.max_sequence=4"], "Fix: write engine.max_sequences"),
        (["--model", "strop/nano", "--config", "outside.toml"], "gateway.outside.judge: the environment has no NO_KEY"),
    ],
)
def test_what_users_get_wrong_is_one_sentence(tmp_path: Path, arguments: list[str], says: str):
    (tmp_path / "outside.toml").write_text('[gateway.outside.judge]\nurl = "http://x/v1"\nkey_env = "NO_KEY"\n')
    command = runs.strop("serve", "--folder", "s", "--port", 0, *arguments)
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False, env=offline)
    assert done.returncode == 2
    *doing, said = done.stderr.splitlines()
    assert says in said
    assert all(line.startswith("loading ") for line in doing)
