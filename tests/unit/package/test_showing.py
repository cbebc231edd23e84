"""`strop rollouts RUN ID`: the tools a turn had, and its prompt as the model saw it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from strop.cli import main
from strop.config import Config
from strop.demo import TOOLS
from strop.gateway.template import Renderer
from strop.models.names import resolve
from strop.run.folder import RunFolder
from strop.store import open_store
from strop.tasks.sampling import group
from strop.types import Policy, Step, Task, Turn

ASKED = [{"role": "user", "content": "3 * 4?"}]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rollout of two turns, of which the second goes on from the first, and a third without tools."""
    folder = tmp_path_factory.mktemp("showing") / "run"
    place = RunFolder.create(folder)
    place.keep(Config())
    place.close()
    asyncio.run(_fill(folder))
    return folder


async def _fill(folder: Path) -> None:
    renderer = Renderer.from_folder(resolve("strop/nano"))
    store = await open_store(folder)
    try:
        await store.put_policy(Policy(name="main", version="1.0", model="strop/nano"))
        (rollout,) = group([Task(id="t0")], seed=0, n=0, members=1)
        await store.enqueue([rollout])
        await store.lease("r", seconds=60)
        said = [*renderer.encode("12."), renderer.end_of_turn]
        first = renderer.prompt(ASKED, TOOLS)
        chat = [*ASKED, {"role": "assistant", "content": "12."}, {"role": "user", "content": "And 5 * 6?"}]
        second = first + said + renderer.encode("\n<|im_start|>user\nAnd 5 * 6?<|im_end|>\n<|im_start|>assistant\n")
        given = {"rollout": rollout.id, "attempt": 1, "response_ids": said, "logprobs": [0.0] * len(said)}
        given |= {"versions": [(0, "1.0")], "finish": "stop", "answer": chat[1], "ended": 0.0}
        parent = f"{rollout.id}/1/0"
        await store.add_turns([
            Turn(id=parent, prompt_ids=first, messages=ASKED, requested={"tools": TOOLS}, started=1.0, **given),
            Turn(id=f"{rollout.id}/1/1", prompt_ids=second, messages=chat, parent=parent,
                 shared=len(first + said), started=2.0, **given),
            Turn(id=f"{rollout.id}/1/2", prompt_ids=renderer.prompt(ASKED, None), messages=ASKED,
                 branch="changed_tools", started=3.0, **given),
        ])  # type: ignore[arg-type] # fmt: skip
        await store.finish(rollout.id, 1)
        tokens = {parent: {"trained": len(said)}, f"{rollout.id}/1/1": {"trained": 1, "excluded:title": len(said) - 1}}
        step = Step(lineage=1, number=1, rollouts=[rollout.id], metrics={}, time=0.0)
        await store.commit_step(step, {rollout.id: tokens})
    finally:
        await store.close()


def rollout(run: Path) -> str:
    async def first() -> str:
        store = await open_store(run)
        (found,) = await store.list(limit=1)
        await store.close()
        return found.id

    return asyncio.run(first())


def test_tools_are_shown_where_they_change(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", str(run), rollout(run)]) == 0
    told = capsys.readouterr().out
    (line,) = [line for line in told.splitlines() if line.strip().startswith("tools")]
    assert line.startswith("    tools  calculator(expression)"), "once: the second turn has its parent's"
    assert "<|im_start|>" not in told


def test_what_became_of_the_tokens_is_shown_by_turn_and_in_all(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", str(run), rollout(run)]) == 0
    told = capsys.readouterr().out.splitlines()
    (whole,) = [line.strip() for line in told if line.startswith("  ") and "sampled" in line]
    first, second, third = [line.split(" · ")[3] for line in told if line.startswith("── turn")]
    count = int(first.split()[0])
    assert whole == f"{2 * count} tokens sampled, {count + 1} trained, {count - 1} excluded:title"
    assert first == f"{count} tokens sampled, {count} trained"
    assert second == f"{count} tokens sampled, 1 trained, {count - 1} excluded:title"
    assert third == f"{count} tokens"  # of which the step said nothing


def test_prompts_are_shown_as_the_model_saw_them(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", str(run), rollout(run), "--prompt"]) == 0
    told = capsys.readouterr().out
    id = rollout(run)
    first, _, rest = told.partition(f"── turn {id}/1/1")
    second, _, third = rest.partition(f"── turn {id}/1/2")
    assert "calculator" in first.partition("prompt")[2], "the model was shown the tools"
    assert f"tokens of turn {id}/1/0, then:" in second
    assert "And 5 * 6?<|im_end|>" in second
    assert second.count("<|im_start|>user") == 1, "what the parent has is not shown again"
    assert "<|im_start|>user" in third
    assert "calculator" not in third


def test_prompts_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", str(run), rollout(run), "--prompt", "--json"]) == 0
    prompts = json.loads(capsys.readouterr().out)["prompts"]
    assert [text.count("<|im_start|>user") for text in prompts.values()] == [1, 2, 1]


def test_no_key_is_printed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", str(run), rollout(run), "--json"]) == 0
    (attempt,) = json.loads(capsys.readouterr().out)["attempts"]
    assert attempt["runner"] == "r"
    assert "key" not in attempt


def test_prompts_of_no_rollout(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", str(run), "--prompt"]) != 0
    assert "add its id after the run" in capsys.readouterr().err
