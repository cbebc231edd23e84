"""Who teaches, what the teacher is shown, and what is left out."""

import json
import shutil

import pytest
from msgspec.structs import replace

from strop import config as configs
from strop.algorithms import make
from strop.config import Config, resolve_policies
from strop.engines.base import Engine
from strop.engines.scripted import Scripted
from strop.errors import ConfigError
from strop.gateway.contexts import Contexts
from strop.gateway.template import Renderer
from strop.models.names import resolve
from strop.run.teacher import (
    Teacher,
    add_teacher_policies,
    find_roots,
    find_teacher,
    refuse_ignored_prompt,
    refuse_other_tokens,
    refuse_same_model,
)
from strop.trajectory import Sample, assemble
from strop.types import AnswerGrammar, Rollout, Task, Turn

NANO = resolve("strop/nano")
HINT = "Use the calculator."
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"properties": {"expression": {}}}}}]
ASK = {"role": "user", "content": "What is 3 * 4?"}


@pytest.fixture(scope="module")
def renderer():
    return Renderer.from_folder(NANO)


class Session:
    """Turns as a gateway makes them."""

    def __init__(self, renderer, history="sampled"):
        self.renderer, self.history, self.contexts, self.turns = renderer, history, Contexts(b""), []

    def ask(self, messages, answer, tools=None, lead=""):
        conversation = self.contexts.read(messages, tools, variables={}, lead=lead)
        prompt = self.contexts.prompt(self.renderer, conversation, self.history)
        ids = [*self.renderer.encode(answer), self.renderer.end_of_turn]
        recorded = tools and not (prompt.parent is not None and prompt.branch is None)
        asked = ({"tools": tools} if recorded else {}) | ({"lead": lead} if lead else {})
        turn = Turn(
            id=f"g1.0/1/{len(self.turns)}", rollout="g1.0", attempt=1, prompt_ids=prompt.ids, response_ids=ids,
            logprobs=[-0.5] * len(ids), versions=[(0, "1.0")], finish="stop", parent=prompt.parent,
            shared=prompt.shared, branch=prompt.branch, requested=asked, messages=list(messages),
            answer={"role": "assistant", "content": answer}, started=len(self.turns), ended=len(self.turns) + 0.5,
        )  # fmt: skip
        self.contexts.add(turn, conversation)
        self.turns.append(turn)
        return turn

    def batch(self):
        rollout = Rollout(id="g1.0", group="g1", member=0, task=Task(id="t"), created=0.0, status="succeeded")
        return assemble([Sample(rollout, self.turns)], agents=["main"], budget=10_000)


def make_teacher(renderer, **given):
    engine = Scripted([], renderer, logprob=-2.0)
    return Teacher(**{"engine": engine, "most": 512, "num_ids": renderer.num_ids, "renderer": renderer} | given)


def said(answer):
    return {"role": "assistant", "content": answer}


async def score(session, teacher):
    batch = session.batch()
    await teacher.score(batch)
    return batch


# -- what it is shown --------------------------------------------------------------------------------------------------


def test_without_a_prompt_it_reads_what_the_student_saw(renderer):
    session = Session(renderer)
    session.ask([ASK], "12", TOOLS)
    turn = session.ask([ASK, said("12"), {"role": "user", "content": "Sure?"}], "yes", TOOLS)
    asked = make_teacher(renderer).read_turns(session.batch(), [0, 1])
    assert (asked[1].prompt_ids, asked[1].response_ids) == (turn.prompt_ids, turn.response_ids)


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_the_prompt_is_put_into_the_root_and_the_rest_stays_as_it_is(renderer, tools):
    session = Session(renderer)
    first = session.ask([ASK], "12", tools)
    second = session.ask([ASK, said("12"), {"role": "user", "content": "Sure?"}], "yes", tools)
    asked = make_teacher(renderer, prompt=HINT).read_turns(session.batch(), [0, 1])
    root = renderer.prompt([{"role": "system", "content": HINT}, ASK], tools)
    assert asked[0].prompt_ids == root != first.prompt_ids
    assert asked[1].prompt_ids == root + second.prompt_ids[len(first.prompt_ids) :]
    assert second.prompt_ids[len(first.prompt_ids) :][: len(first.response_ids)] == first.response_ids
    assert [one.response_ids for one in asked.values()] == [first.response_ids, second.response_ids]


def test_a_system_message_that_is_there_keeps_its_words(renderer):
    session = Session(renderer)
    session.ask([{"role": "system", "content": "Be brief."}, ASK], "12")
    asked = make_teacher(renderer, prompt=HINT).read_turns(session.batch(), [0])
    assert f"Be brief.\n\n{HINT}<|im_end|>" in renderer.decode(asked[0].prompt_ids)


def test_a_branch_goes_back_to_a_root_of_its_own(renderer):
    session = Session(renderer)
    session.ask([ASK], "12")
    other = [{"role": "user", "content": "What is 5 + 6?"}]
    branch = session.ask(other, "11")
    then = session.ask([*other, said("11"), ASK], "12")
    edited = session.ask([ASK, said("no"), ASK], "12")
    roots = find_roots(session.turns)
    assert [roots[turn.id].id[-1] for turn in session.turns] == ["0", "1", "1", "3"]
    asked = make_teacher(renderer, prompt=HINT).read_turns(session.batch(), range(4))
    root = renderer.prompt([{"role": "system", "content": HINT}, *other], None)
    assert asked[2].prompt_ids == root + then.prompt_ids[len(branch.prompt_ids) :]
    assert asked[3].prompt_ids == renderer.prompt([{"role": "system", "content": HINT}, *edited.messages], None)


def test_history_as_the_template_writes_it_lines_up_as_well(renderer):
    session = Session(renderer, history="template")
    session.ask([ASK], "12")
    session.ask([ASK, said("12"), {"role": "user", "content": "Sure?"}], "yes")
    asked = make_teacher(renderer, prompt=HINT).read_turns(session.batch(), [0, 1])
    whole = [{"role": "system", "content": HINT}, *session.turns[1].messages]
    assert asked[1].prompt_ids == renderer.prompt(whole, None)


def test_an_answer_that_was_begun_is_begun_for_the_teacher_too(renderer):
    session = Session(renderer)
    turn = session.ask([ASK], "2", lead="It is 1")
    asked = make_teacher(renderer, prompt=HINT).read_turns(session.batch(), [0])
    lead = renderer.encode("It is 1")
    assert turn.prompt_ids[-len(lead) :] == asked[0].prompt_ids[-len(lead) :] == lead
    assert len(asked[0].prompt_ids) > len(turn.prompt_ids)


# -- what is left out --------------------------------------------------------------------------------------------------


async def test_a_prompt_that_cannot_be_shown_to_line_up_is_left_out_and_counted(renderer):
    session = Session(renderer)
    kept = session.ask([ASK], "12")
    for changed in (
        {"messages": []},
        {"messages": [{"role": "prompt", "content": "3 * 4 ="}]},
        {"messages": [said("x")]},
    ):
        session.turns.append(replace(kept, id=f"g1.0/1/{len(session.turns)}", started=9.0, **changed))
    batch = await score(session, make_teacher(renderer, prompt=HINT))
    assert batch.skipped == [None, "teacher_prompt", "teacher_prompt", "teacher_prompt"]
    assert batch.counts() == {"filter_tokens/teacher_prompt": 3.0 * len(kept.response_ids)}
    assert (batch.entries.teacher[: len(kept.response_ids)] == -2.0).all()
    session.turns = session.turns[1:]
    batch = await score(session, make_teacher(renderer, prompt=HINT))
    assert batch.dropped == {"g1.0": "teacher_prompt"}


async def test_what_is_too_long_or_unknown_to_the_teacher_is_left_out(renderer):
    session = Session(renderer)
    turn = session.ask([ASK], "12")
    fits = len(renderer.prompt([{"role": "system", "content": HINT}, ASK], None)) + len(turn.response_ids)
    for most, dropped in ((fits, {}), (fits - 1, {"g1.0": "teacher_context"})):
        assert (await score(session, make_teacher(renderer, prompt=HINT, most=most))).dropped == dropped
    batch = await score(session, make_teacher(renderer, num_ids=max(turn.ids)))
    assert batch.dropped == {"g1.0": "teacher_vocabulary"}
    held = AnswerGrammar(text="", ends=(2,), version="")
    session.turns = [replace(turn, sampling=replace(turn.sampling, grammar=held))]
    assert (await score(session, make_teacher(renderer))).dropped == {"g1.0": "teacher_schema"}


def test_a_template_that_shows_no_system_message_is_refused(renderer):
    chat = "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}assistant:"
    with pytest.raises(ConfigError, match=r"teacher_prompt would reach nobody: .* leaves system messages out"):
        refuse_ignored_prompt(Renderer.from_parts(NANO, chat), HINT)
    with pytest.raises(ConfigError, match="refuses a system message"):
        refuse_ignored_prompt(
            Renderer.from_parts(NANO, "{{ raise_exception('no system') if messages[0].role == 'system' }}" + chat), HINT
        )
    refuse_ignored_prompt(renderer, HINT)


# -- one tokenizer -----------------------------------------------------------------------------------------------------


def change_tokenizer(folder, change):
    shutil.copytree(NANO, folder)
    file = folder / "tokenizer.json"
    about = json.loads(file.read_text())
    change(about)
    file.write_text(json.dumps(about))
    return Renderer.from_folder(folder)


def test_the_same_tokenizer_will_do(renderer):
    refuse_other_tokens(renderer, Renderer.from_folder(NANO), "teacher")


def test_another_vocabulary_is_refused_with_the_first_difference(renderer, tmp_path):
    def swap(about):
        vocabulary = about["model"]["vocab"]
        one, other = sorted(vocabulary, key=vocabulary.get)[20:22]
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]

    changed = change_tokenizer(tmp_path / "changed", swap)
    with pytest.raises(ConfigError, match=r"token '.+' is 20 in the student and 21 in the teacher\. Fix: "):
        refuse_other_tokens(renderer, changed, "teacher")


def test_another_added_token_is_refused(renderer, tmp_path):
    def add(about):
        about["added_tokens"].append(about["added_tokens"][-1] | {"id": renderer.num_ids, "content": "<|new|>"})

    changed = change_tokenizer(tmp_path / "changed", add)
    with pytest.raises(ConfigError, match=r"token '<\|new\|>' is missing in the student"):
        refuse_other_tokens(renderer, changed, "teacher")


def test_the_same_words_joined_in_another_way_are_refused(renderer, tmp_path):
    def reverse(about):
        about["model"]["merges"] = about["model"]["merges"][:1]

    changed = change_tokenizer(tmp_path / "changed", reverse)
    with pytest.raises(ConfigError, match=r"they encode .* differently"):
        refuse_other_tokens(renderer, changed, "teacher")


# -- who it is ---------------------------------------------------------------------------------------------------------


def teach(config):
    found = resolve_policies(config)
    (student, own), *_ = [one for one in found.items() if not one[1].policy.frozen]
    return find_teacher(student, make(own.algorithm, own.learner, own.policy), found)


def distilled(policies=None, **settings) -> Config:
    return configs.load(algorithm={"name": "distill", "settings": settings}, policies=policies or {})


TWO = {"main": {}, "big": {"frozen": True, "agents": []}}


def test_a_policy_by_its_name_or_oneself_with_a_prompt():
    assert teach(distilled(TWO, teacher="big")) == "big"
    assert teach(distilled(teacher="self", teacher_prompt=HINT)) == "main"
    assert teach(distilled(teacher="main", teacher_prompt=HINT)) == "main"
    assert teach(configs.load()) is None


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (distilled(), "does not say who teaches"),
        (
            distilled(TWO, teacher="small"),
            "'small', which is not a policy of this run. Fix: name one of main, big, or self",
        ),
        (distilled(teacher="self"), "'self': the student would be compared with itself, and the KL is 0 everywhere"),
        (distilled(teacher="main"), "'main': the student would be compared with itself"),
        (
            distilled({"main": {}, "big": {}}, teacher="big"),
            "'big', which is trained itself. Fix: set policies.big.frozen",
        ),
    ],
)
def test_who_cannot_teach_is_refused(config, says):
    with pytest.raises(ConfigError, match=says):
        teach(config)


def test_engines_that_cannot_say_what_is_asked_are_refused(monkeypatch):
    big = {"frozen": True, "agents": [], "engine": {"name": "vllm"}}
    assert teach(distilled({"main": {}, "big": big}, teacher="big")) == "big"
    warm = {"main": {"train": {"temperature": 0.7}}, "big": big}
    with pytest.raises(ConfigError, match=r"'big', whose engine is vllm: vLLM gives .* at temperature 1 only"):
        teach(distilled(warm, teacher="big"))
    monkeypatch.setattr("strop.run.teacher.engine_class", lambda _: Engine)
    with pytest.raises(ConfigError, match=r"'big', whose engine is embedded: Engine cannot score given tokens. Fix: "):
        teach(distilled(TWO, teacher="big"))


def test_groups_are_not_replaced():
    config = distilled(TWO, teacher="big")
    with pytest.raises(ConfigError, match="a teacher has something to say of every one"):
        teach(replace(config, loop=replace(config.loop, max_groups=32)))


def test_a_model_becomes_a_frozen_policy_that_answers_nobody():
    config = add_teacher_policies(distilled(teacher="strop/nano"))
    assert config.policies == {
        "main": {"agents": ["main"]},
        "teacher": {"model": "strop/nano", "frozen": True, "agents": []},
    }
    assert config.algorithm.settings["teacher"] == "teacher"
    assert teach(config) == "teacher"
    assert add_teacher_policies(config) is config


def test_several_students_may_share_a_model_or_have_one_each():
    def student(teacher):
        return {"algorithm": {"name": "distill", "settings": {"teacher": teacher}}}

    tables = {"a": student("strop/nano"), "b": student("smollm2-135m"), "c": student("strop/nano"), "teacher": {}}
    config = add_teacher_policies(configs.load(policies=tables))
    made = {name: table["algorithm"]["settings"]["teacher"] for name, table in config.policies.items() if name in "abc"}
    assert made == {"a": "teacher-2", "b": "teacher-3", "c": "teacher-2"}
    assert config.policies["teacher-3"]["model"] == "smollm2-135m"


def test_a_name_that_is_nothing_is_refused():
    with pytest.raises(
        ConfigError, match=r"'techer', which is neither a policy of this run \(main\) nor a model. Fix: "
    ):
        add_teacher_policies(distilled(teacher="techer"))


def test_the_very_same_model_is_refused_unless_something_moves_the_student(tmp_path):
    def refuse(teacher, **settings):
        own = distilled(TWO, teacher="big", **settings)
        refuse_same_model(make(own.algorithm, own.learner, own.policy), NANO, teacher)

    (tmp_path / "link").symlink_to(NANO)
    for same in (NANO, tmp_path / "link"):
        with pytest.raises(ConfigError, match=r"is the very model that is trained .* Fix: set .*teacher_prompt"):
            refuse(same)
    refuse(NANO, teacher_prompt=HINT)
    refuse(NANO, reward_coef=0.5)
    refuse(tmp_path)


def test_a_run_that_improved_prompts_has_no_weights(tmp_path):
    (tmp_path / "checkpoints" / "step-000001-1").mkdir(parents=True)
    config = configs.load(algorithm={"name": "gepa"})
    config = replace(config, algorithm=replace(config.algorithm, improves="prompts"))
    (tmp_path / "config.json").write_bytes(configs.to_json(config))
    with pytest.raises(ConfigError, match=r"improved prompts and trained no weights\. Fix: name its model"):
        add_teacher_policies(distilled(teacher=str(tmp_path)))
