"""What a run on stored data begins with, and what is said of data that cannot be learnt from."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from strop.config import Config, load, to_json
from strop.errors import ConfigError, PlaceError
from strop.run.data.dataset import DataSample, Header
from strop.run.data.prepare import prepare_data
from tests import chatml
from tests.unit.run.data.made_runs import make_run

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}
ALTERNATE = """{%- for message in messages -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"""


def configure(tmp_path: Path, name: str = "sft", loop: dict[str, Any] | None = None, **settings: Any) -> Config:
    algorithm = {"name": name, "settings": {"batch_size": 2, **settings}}
    return load(agent="a.py:a", tasks="t.jsonl", folder=str(tmp_path / "run"), algorithm=algorithm, loop=loop or {})


async def prepare(config: Config) -> tuple[Config, str, Header, list[DataSample]]:
    told: list[str] = []
    config = await prepare_data(config, told.append)
    head, *lines = (Path(config.folder) / "data.jsonl").read_bytes().splitlines()
    samples = [msgspec.json.decode(line, type=DataSample) for line in lines]
    return config, told[-1], msgspec.json.decode(head, type=Header), samples


async def test_what_is_left_out_is_counted_and_said(tmp_path: Path) -> None:
    run = await make_run(
        tmp_path / "a", [("g0.0", 1.0, [[7], [8]]), ("g0.1", 0.0, [[9]]), ("g1", None, [[9]]), ("g2", 1.0, [[7], [8]])]
    )
    await make_run(run, [("e0", 1.0, [[4]])], mode="eval", split="test")
    config, said, header, samples = await prepare(configure(tmp_path, runs=str(run), min_reward=0.5, epochs=3))
    assert [(sample.rollout, sample.task.id) for sample in samples] == [("g0.0", "task-g0")]
    assert header.items == [(0,)]
    assert config.loop.steps == 2  # three times one, two at a time
    assert said == (
        "learning from 1 of 5 rollouts, 3 epochs in 2 steps of 2; left out: 1 of tasks that this run is evaluated on "
        "(algorithm.settings.splits can name them), 1 with the very tokens of another, 1 below "
        "algorithm.settings.min_reward, 1 without a reward that algorithm.rewards counts"
    )


def write_chats(path: Path, num: int) -> str:
    lines = [{"messages": [USER, ANSWER | {"content": f"{path.name} {n}"}]} for n in range(num)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


async def test_a_mix_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", 4)
    with pytest.raises(ConfigError) as error:
        await prepare_data(configure(tmp_path, transcripts=chats, mix={chats: 0.1}, epochs=3), print)
    assert str(error.value) == (
        "algorithm.settings.mix leaves 0.4 rollouts to an epoch, of 4: it would be empty. Fix: raise it, or leave it "
        "out"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("epochs", "taken", "steps"), [(1, 4, 2), (2, 5, 5), (4, 6, 9)])
async def test_what_no_step_takes_is_counted(tmp_path: Path, epochs: int, taken: int, steps: int) -> None:
    chats, few = write_chats(tmp_path / "chats.jsonl", 4), write_chats(tmp_path / "few.jsonl", 2)
    given = configure(tmp_path, transcripts=[chats, few], mix={few: 0.2}, epochs=epochs)
    config, said, _, _ = await prepare(given)
    assert said.startswith(f"learning from {taken} of 6 rollouts")
    assert config.loop.steps == steps
    left = f"; left out: {6 - taken} that no step takes, with so few epochs"
    assert said.endswith(left if taken < 6 else f"in {steps} steps of 2")


async def test_rewards_of_turns_count(tmp_path: Path) -> None:
    """Of trained agents, weighted as any."""
    run = await make_run(tmp_path / "a", [("g0", 0.0, [[7]]), ("g1", None, [[8]])])
    config = load(
        base=configure(tmp_path, runs=str(run), min_reward=1.0),
        algorithm={"rewards": {"reward": 1.0, "neat": 2.0}},
    )
    _, _, _, samples = await prepare(config)
    assert [sample.rollout for sample in samples] == ["g0"]


async def test_splits_and_modes_choose_rollouts(tmp_path: Path) -> None:
    run = await make_run(tmp_path / "a", [("g0", 1.0, [[7]])])
    await make_run(run, [("e0", 1.0, [[4]])], mode="eval", split="test")
    _, _, _, tested = await prepare(configure(tmp_path / "1", runs=[str(run)], splits=["test"]))
    assert [sample.rollout for sample in tested] == ["e0"]
    _, said, _, trained = await prepare(configure(tmp_path / "2", runs=[str(run)], rollouts=["train"]))
    assert [sample.rollout for sample in trained] == ["g0"]
    assert "1 of modes that algorithm.settings.rollouts leaves out" in said


async def test_pairs_stand_together(tmp_path: Path) -> None:
    run = await make_run(tmp_path / "a", [("g0.0", 0.0, [[7]]), ("g0.1", 1.0, [[8]]), ("g1.0", 1.0, [[9]])])
    _, said, header, samples = await prepare(configure(tmp_path, "dpo", runs=str(run)))
    (pair,) = header.items
    assert [samples[n].rollout for n in pair] == ["g0.1", "g0.0"]
    assert said.startswith("learning from 2 of 3 rollouts in 1 pair, ")


async def test_an_empty_choice_is_refused_with_the_counts(tmp_path: Path) -> None:
    run = await make_run(tmp_path / "a", [("g0", 0.25, [[7]]), ("g1", None, [[8]])])
    with pytest.raises(ConfigError) as error:
        await prepare_data(configure(tmp_path, runs=str(run), min_reward=0.5), print)
    assert str(error.value) == (
        f"there is nothing to learn from: of 2 rollouts in {run} none is left: 1 below algorithm.settings.min_reward, "
        "1 without a reward that algorithm.rewards counts. Fix: name other runs or transcripts, or ask less of them"
    )
    assert not (tmp_path / "run").exists()


async def test_untrained_agents_are_not_learnt_from(tmp_path: Path) -> None:
    run = await make_run(tmp_path / "a", [("g0", 1.0, [[7]])], agent="judge")
    with pytest.raises(ConfigError, match="1 without an answer that carries loss"):
        await prepare_data(configure(tmp_path, runs=str(run)), print)


async def test_what_no_micro_batch_holds_is_left_out(tmp_path: Path) -> None:
    run = await make_run(tmp_path / "a", [("g0", 1.0, [[7] * 200]), ("g1", 1.0, [[7] * 20])])
    config = load(base=configure(tmp_path, runs=str(run)), learner={"token_budget": 128})
    _, said, _, samples = await prepare(config)
    assert [sample.rollout for sample in samples] == ["g1"]
    assert said.endswith("left out: 1 longer than learner.token_budget")


async def test_turns_belong_to_the_policies_of_this_run(tmp_path: Path) -> None:
    """Whatever policy they had where they were sampled; those of frozen ones are kept, and carry no loss."""
    run = await make_run(tmp_path / "a", [("g0", 1.0, [[7], [8]])], agent="writer")
    await make_run(run, [("g1", 1.0, [[9]])], agent="critic")
    config = load(base=configure(tmp_path, runs=str(run)), policies={"writer": {}, "critic": {"frozen": True}})
    _, said, _, samples = await prepare(config)
    assert [turn.policy for sample in samples for turn in sample.turns] == ["writer", "writer"]
    assert said.endswith("left out: 1 without an answer that carries loss")


async def test_preferences_of_a_file_are_pairs(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    other = ANSWER | {"content": "go away"}
    file.write_text(json.dumps({"prompt": [USER], "chosen": [ANSWER], "rejected": [other]}))
    _, _, header, samples = await prepare(configure(tmp_path, "dpo", transcripts=str(file)))
    assert header.items == [(0, 1)]
    assert [sample.turns[0].answer["content"] for sample in samples] == ["hello", "go away"]


async def test_answers_to_different_questions_are_never_compared(tmp_path: Path) -> None:
    """Whatever `id` their lines share: a line's two answers are a pair, and others need the very same prompt."""
    asked = [{"role": "user", "content": f"q{n}"} for n in range(3)]
    said = [[{"role": "assistant", "content": f"{word}{n}"} for n in range(3)] for word in ("good", "bad")]
    lines: list[dict[str, Any]] = [
        {"id": "same", "prompt": [asked[n]], "chosen": [said[0][n]], "rejected": [said[1][n]]} for n in range(2)
    ]
    for reward, question, answer in ((1, 2, said[0][2]), (0, 2, said[1][2]), (0, 0, said[1][1])):
        lines.append({"id": "same", "reward": reward, "messages": [asked[question], answer]})
    file = tmp_path / "chat.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    _, told, header, samples = await prepare(configure(tmp_path, "dpo", transcripts=str(file)))
    pairs = [[samples[n].turns[0].answer["content"] for n in item] for item in header.items]
    assert pairs == [[f"good{n}", f"bad{n}"] for n in range(3)]
    assert told.startswith("learning from 6 of 7 rollouts in 3 pairs")


async def test_a_preference_for_the_same_answer_is_left_out(tmp_path: Path) -> None:
    line = {"prompt": [USER], "chosen": [ANSWER]}
    file = tmp_path / "chat.jsonl"
    lines = [line | {"rejected": [ANSWER]}, line | {"rejected": [ANSWER | {"content": "no"}]}]
    file.write_text("\n".join(map(json.dumps, lines)))
    _, told, _, _ = await prepare(configure(tmp_path, "dpo", transcripts=str(file)))
    assert told.startswith("learning from 2 of 4 rollouts in 1 pair, ")
    assert told.endswith("left out: 2 with the very tokens of the one they are compared with")


@pytest.mark.parametrize(("epochs", "said"), [(1, "1 epoch in 1 step of 4"), (3, "3 epochs in 3 steps of 4")])
async def test_an_epoch_of_little_data_is_a_step(tmp_path: Path, epochs: int, said: str) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", 4)
    config, told, _, _ = await prepare(configure(tmp_path, transcripts=chats, epochs=epochs, batch_size=None))
    assert (config.loop.steps, told) == (epochs, f"learning from 4 of 4 rollouts, {said}")


def make_other_model(folder: Path) -> str:
    """A model with a vocabulary of its own."""
    chatml.make(folder)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return str(folder)


async def test_only_policies_that_are_learnt_from_need_our_vocabulary(tmp_path: Path) -> None:
    run = await make_run(tmp_path / "a", [("g0", 1.0, [[7]])])
    other = make_other_model(tmp_path / "other")
    policies = {"main": {}, "judge": {"model": other, "frozen": True}}
    (run / "config.json").write_bytes(to_json(load(policies=policies)))
    _, _, _, samples = await prepare(configure(tmp_path, runs=str(run)))
    assert [sample.rollout for sample in samples] == ["g0"]
    policies = {"main": {"model": other}, "judge": {"model": "strop/nano", "frozen": True}}
    (run / "config.json").write_bytes(to_json(load(policies=policies)))
    with pytest.raises(ConfigError, match=r"sampled by .*other, whose vocabulary is not that of strop/nano"):
        await prepare_data(configure(tmp_path / "2", runs=str(run)), print)


async def test_a_run_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    other = make_other_model(tmp_path / "other")
    run = await make_run(tmp_path / "a", [("g0", 1.0, [[7]])], model=other)
    with pytest.raises(ConfigError, match=r"whose vocabulary is not that of strop/nano: the same ids are other text"):
        await prepare_data(configure(tmp_path, runs=str(run)), print)


async def test_a_run_whose_tokenizer_is_gone_is_refused(tmp_path: Path) -> None:
    run = await make_run(tmp_path / "a", [("g0", 1.0, [[7]])], model=str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"whose tokenizer cannot be had .* Fix: put that model back, or give"):
        await prepare_data(configure(tmp_path, runs=str(run)), print)


async def test_a_run_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlaceError, match="nowhere"):
        await prepare_data(configure(tmp_path, runs=str(tmp_path / "nowhere")), print)


async def test_roles_that_the_template_refuses_are_said_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(ALTERNATE)
    lines = [{"messages": [USER, ANSWER]}, {"messages": [USER, USER, ANSWER]}]
    file = tmp_path / "chat.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    config = configure(tmp_path, transcripts=str(file))
    config = load(base=config, policy={"template": str(tmp_path / "t.jinja")})
    with pytest.raises(ConfigError) as error:
        await prepare_data(config, print)
    assert str(error.value).startswith(f"{file}, line 2: ")
    assert "roles must alternate. Fix: write the conversation as the model's chat template takes it" in str(error.value)


@pytest.mark.parametrize(
    ("settings", "loop", "says"),
    [
        ({}, {}, "sft learns from stored data, and none is named. Fix: set algorithm.settings.runs"),
        ({"runs": ["a", "a"]}, {}, "a is named twice. Fix: name it once"),
        ({"runs": "a", "mix": {"b": 2}}, {}, "algorithm.settings.mix names b, which is not among a. Fix: name one"),
        ({"runs": "a"}, {"staleness": 2}, "loop.staleness is 2, and sft learns from stored data"),
        ({"runs": "a"}, {"max_groups": 20}, "loop.max_groups is 20, and sft learns from stored data"),
    ],
)
async def test_contradictions_are_refused(
    tmp_path: Path, settings: dict[str, Any], loop: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as error:
        await prepare_data(configure(tmp_path, loop=loop, **settings), print)
    assert says in str(error.value)


async def test_epochs_and_steps_may_not_contradict_each_other(tmp_path: Path) -> None:
    run = await make_run(tmp_path / "a", [("g0", 1.0, [[7]]), ("g1", 1.0, [[8]])])
    said = r"algorithm\.settings\.epochs are 2 steps of 2, and loop\.steps is 7\. Fix: leave one of them out"
    with pytest.raises(ConfigError, match=said):
        await prepare_data(configure(tmp_path / "1", runs=str(run), epochs=2, loop={"steps": 7}), print)
    for steps in (0, 2, 100):
        given = configure(tmp_path / str(steps), runs=str(run), epochs=2, loop={"steps": steps})
        assert (await prepare_data(given, print)).loop.steps == 2
    given = configure(tmp_path / "none", runs=str(run), loop={"steps": 7})
    assert (await prepare_data(given, print)).loop.steps == 7


async def test_several_trained_policies_are_refused(tmp_path: Path) -> None:
    config = load(base=configure(tmp_path, runs="a"), policies={"writer": {}, "critic": {}})
    with pytest.raises(
        ConfigError, match=r"policies\.writer learns from stored data \(sft\), and then no other policy"
    ):
        await prepare_data(config, print)


async def test_a_run_with_agents_at_work_stays_as_it_is(tmp_path: Path) -> None:
    config = load(agent="a.py:a", tasks="t.jsonl", folder=str(tmp_path / "run"))
    assert await prepare_data(config, print) is config
