"""The teacher of an algorithm that asks for one (`Algorithm.teacher_source`): who it is, and what it says of a batch.

    find_teachers   which policies they are; whatever would make no sense is refused before anything starts
    refuse_unfit    both must have one tokenizer: the very ids that the student sampled are scored
    Teacher.score   fills the entries' `teacher`: the logprob that the teacher gives each sampled token

The teacher reads the ids that the student saw and sampled, and nothing is tokenised again. With a prompt of its own it
reads them behind another beginning: a turn's context goes back to a prompt that was rendered whole, its root, and only
that is rendered once more, with the teacher's words in the system message.

    student   [root prompt ............................] [answer, tool result, ...] | response
    teacher   [root prompt with the teacher's words .........] [the same ids .........] | the same ids

A turn for which that cannot be shown to line up is left out and counted (`teacher_prompt`), as is one that is too long
for the teacher (`teacher_context`).

Left out: teachers with another tokenizer, and teachers that are trained themselves: whether a step of theirs comes
before or after a student's would be chance.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, cast

from msgspec.structs import replace

from strop import algorithms
from strop.algorithms import Algorithm
from strop.algorithms.filters import skip_turns
from strop.config import MAIN, Config, PolicyConfig
from strop.engines.base import Engine, GivenAnswer
from strop.engines.registry import engine_class, engine_name
from strop.engines.served_policies import ServedModel
from strop.errors import ConfigError
from strop.gateway.jinja import BadTemplate
from strop.gateway.template import Renderer
from strop.models.names import SHIPPED, SMOLLM2
from strop.run.folder import RunFolder
from strop.trajectory import Batch
from strop.types import Turn

SELF, SETTING = "self", "algorithm.settings.teacher"
PROBES = (
    "What is 37 * 52?",
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "37 * 52"}}\n</tool_call>',
    "  def f(x):\n\treturn x ** 2  # naïve, 日本語, 🙂\r\n\n",
)
"""Texts that two tokenizers must make the same ids of."""


# -- before anything starts --------------------------------------------------------------------------------------------


def add_teacher_policies(config: Config) -> Config:
    """The configuration with a frozen policy, which answers nobody, for every teacher that is given as a model or as a
    run. Raises `ConfigError` for a name that is neither of these nor a policy."""
    tables, named = dict(config.policies), dict[str, str]()
    known = {"", SELF, *(config.policies or (MAIN,))}

    def name_policy(algorithm: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        teacher = settings.get("teacher")
        if not isinstance(teacher, str) or "teacher" not in algorithms.setting_names(algorithm):
            return dict(settings)
        if teacher in known:
            return dict(settings)
        model = find_teacher_model(teacher, config.policies or (MAIN,))
        if model not in named:
            free = (name for n in count(1) if (name := "teacher" if n == 1 else f"teacher-{n}") not in tables)
            named[model] = next(free)
            tables[named[model]] = {"model": model, "frozen": True, "agents": []}
        return {**settings, "teacher": named[model]}

    algorithm = replace(config.algorithm, settings=name_policy(config.algorithm.name, config.algorithm.settings))
    for name, table in config.policies.items():
        if settings := (own := table.get("algorithm", {})).get("settings"):
            given = name_policy(own.get("name", config.algorithm.name), cast("dict[str, Any]", settings))
            tables[name] = table | {"algorithm": own | {"settings": given}}
    if not named:
        return config
    first = {} if config.policies else {MAIN: {"agents": list(config.policy.agents)}}
    return replace(config, algorithm=algorithm, policies=first | tables)


def find_teacher_model(teacher: str, policies: Iterable[str]) -> str:
    """The model that a teacher's name stands for: of a run a checkpoint."""
    if (found := RunFolder.parse_name(teacher)) is not None:
        if RunFolder.config(found[0]).algorithm.improves == "prompts":
            raise ConfigError(
                f"{SETTING} is {teacher!r}, a run that improved prompts and trained no weights. Fix: name its model, "
                f"and put the prompt into {SETTING}_prompt"
            )
        return str(RunFolder.choose_part(RunFolder.chosen_checkpoint(*found)).resolve())
    place = Path(teacher).expanduser()
    if place.exists():
        return str(place.resolve())
    if teacher in (*SHIPPED, SMOLLM2) or "/" in teacher:
        return teacher
    raise ConfigError(
        f"{SETTING} is {teacher!r}, which is neither a policy of this run ({', '.join(policies)}) nor a model. Fix: "
        f"name a frozen policy (policies.NAME), {SELF}, a model or a run"
    )


def find_teacher(student: str, algorithm: Algorithm, policies: Mapping[str, Config]) -> str | None:
    """The name of the policy that teaches `student`, if its algorithm wants one. Raises `ConfigError` where nobody
    could."""
    if (source := algorithm.teacher_source) is None:
        return None
    own = policies[student]
    name = student if source.policy == SELF else source.policy
    if not name:
        raise ConfigError(f"{SETTING} does not say who teaches. Fix: name a frozen policy, a model, a run, or {SELF}")
    if name not in policies:
        raise ConfigError(
            f"{SETTING} is {name!r}, which is not a policy of this run. Fix: name one of {', '.join(policies)}, or "
            f"{SELF}"
        )
    if name == student and not source.prompt:
        raise ConfigError(
            f"{SETTING} is {source.policy!r}: the student would be compared with itself, and the KL is 0 everywhere. "
            f"Fix: set {SETTING}_prompt, or name another policy or model"
        )
    teacher = policies[name]
    if name != student and not teacher.policy.frozen:
        raise ConfigError(f"{SETTING} is {name!r}, which is trained itself. Fix: set policies.{name}.frozen=true")
    if own.loop.max_groups is not None:
        raise ConfigError(
            "loop.max_groups replaces groups that teach nothing, and a teacher has something to say of every one. Fix: "
            "leave it out"
        )
    try:
        engine_class(teacher.engine).refuse_scoring(own.policy.train.temperature)
    except ConfigError as error:
        raise ConfigError(
            f"{SETTING} is {source.policy!r}, whose engine is {engine_name(teacher.engine)}: {error}"
        ) from None
    return name


def find_teachers(algorithms: Mapping[str, Algorithm], policies: Mapping[str, Config]) -> dict[str, str]:
    """The same for all that have one, by student."""
    found = {student: find_teacher(student, algorithm, policies) for student, algorithm in algorithms.items()}
    return {student: teacher for student, teacher in found.items() if teacher is not None}


def refuse_unfit(
    algorithms: Mapping[str, Algorithm],
    teachers: Mapping[str, str],
    renderers: Mapping[str, Renderer],
    models: Mapping[str, Path],
) -> None:
    """Raises `ConfigError` where a teacher, by student, does not read the student's tokens, would not be shown its
    prompt, or has nothing to say that the student does not know. `models` are the folders of their weights."""
    for student, teacher in teachers.items():
        refuse_same_model(algorithms[student], models[student], models[teacher])
        refuse_other_tokens(renderers[student], renderers[teacher], teacher)
        source = algorithms[student].teacher_source
        if source is not None and source.prompt:
            refuse_ignored_prompt(renderers[student], source.prompt)


def refuse_same_model(algorithm: Algorithm, student: Path, teacher: Path) -> None:
    """Raises `ConfigError` where the teacher has the weights that the student begins with and is shown the same: then
    the KL is 0, and stays so, unless rewards move the student."""
    source = algorithm.teacher_source
    if source is None or source.prompt or algorithm.needs_rewards or student.resolve() != teacher.resolve():
        return
    raise ConfigError(
        f"{SETTING} is the very model that is trained ({teacher}), so the KL is 0 everywhere and nothing is learnt. "
        f"Fix: set {SETTING}_prompt, or name another model"
    )


def make_renderer(policy: PolicyConfig, model: Path) -> Renderer:
    """How a policy's prompts are written, whose model is in the folder `model`."""
    return Renderer.from_folder(model, variables=policy.chat_template_kwargs, tools=policy.tools)


def refuse_other_tokens(student: Renderer, teacher: Renderer, name: str) -> None:
    """Raises `ConfigError` where the two do not have one tokenizer, with the first difference. How many rows an
    embedding has beyond the vocabulary is each model's own business."""
    ours, theirs = student.tokenizer, teacher.tokenizer
    why = find_first_difference(ours.get_vocab(), theirs.get_vocab())
    added = [{token.content: id for id, token in one.get_added_tokens_decoder().items()} for one in (ours, theirs)]
    why = why or find_first_difference(*added, what="added token")
    for text in PROBES:
        with contextlib.suppress(BadTemplate):  # the text as it is will do
            text = student.text([{"role": "user", "content": text}], None, generate=True)
        if not why and student.encode(text) != teacher.encode(text):
            why = f"they encode {text[:60]!r} differently"
    if why:
        raise ConfigError(
            f"the teacher (policies.{name}) has another tokenizer than the student: {why}. Fix: use "
            "one of the same family"
        )


def find_first_difference(ours: Mapping[str, int], theirs: Mapping[str, int], *, what: str = "token") -> str:
    """The first token that two vocabularies do not agree on; nothing where they do.

    >>> find_first_difference({"a": 0, "b": 1}, {"a": 0, "b": 2})
    "token 'b' is 1 in the student and 2 in the teacher"
    """
    for token in sorted({*ours, *theirs}, key=lambda token: (ours.get(token, len(ours)), token)):
        if (here := ours.get(token)) != (there := theirs.get(token)):
            said = ["missing" if one is None else str(one) for one in (here, there)]
            return f"{what} {token!r} is {said[0]} in the student and {said[1]} in the teacher"
    return ""


# -- while it runs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """`engine` scores what the student sampled, in contexts of `most` tokens at most, of ids below `num_ids`.
    `renderer` is the student's, which wrote what the teacher's `prompt` is put into."""

    engine: Engine
    most: int
    num_ids: int
    renderer: Renderer
    prompt: str = ""

    @classmethod
    def of(
        cls, prompt: str, student: Renderer, teacher: Renderer, engine: Engine, config: Config, model: Path
    ) -> Teacher:
        """`config` and `model` are the teacher's."""
        # Weights that are held here are read without a cache: as far as the model goes. A server also draws a token.
        here = engine_class(config.engine).shares_weights
        most = ServedModel.of(model, None).context if here else engine.context - 1
        return cls(engine=engine, most=most, num_ids=teacher.num_ids, renderer=student, prompt=prompt)

    async def score(self, batch: Batch) -> dict[str, float]:
        """Fill `teacher` of what may be trained; what cannot be scored is left out. Returns how long that took."""
        began, alive = time.monotonic(), batch.alive()
        answers, reasons = dict[int, GivenAnswer](), defaultdict[str, list[int]](list)
        for t, answer in self.read_turns(
            batch, [t for t in range(len(batch.turns)) if alive[batch.rows(t)[0]]]
        ).items():
            if isinstance(answer, str):
                reasons[answer].append(t)
            else:
                answers[t] = answer
        for reason, turns in reasons.items():
            skip_turns(batch, turns, reason)
        found = await self.engine.score([*answers.values()]) if answers else []
        for t, logprobs in zip(answers, found, strict=True):
            batch.entries.teacher[batch.rows(t)] = logprobs
        return {"timing_s/teacher": time.monotonic() - began}

    def read_turns(self, batch: Batch, turns: Sequence[int]) -> dict[int, GivenAnswer | str]:
        """What the teacher is asked of each turn, or why it cannot be."""
        prompts, found = dict[str, list[int] | None](), dict[int, GivenAnswer | str]()
        roots = dict[str, Turn]()
        for sample in batch.samples if self.prompt else ():
            roots |= find_roots(sample.turns)
        for t in turns:
            turn = batch.turns[t]
            prompt_ids: list[int] | None = turn.prompt_ids
            if self.prompt:
                root = roots[turn.id]
                if root.id not in prompts:
                    prompts[root.id] = self.render(root)
                begun = prompts[root.id]
                prompt_ids = None if begun is None else begun + turn.prompt_ids[len(root.prompt_ids) :]
            if prompt_ids is None:
                found[t] = "teacher_prompt"
            elif len(prompt_ids) + len(turn.response_ids) > self.most:
                found[t] = "teacher_context"
            elif max(*prompt_ids, *turn.response_ids) >= self.num_ids:
                found[t] = "teacher_vocabulary"
            elif turn.sampling.grammar is not None:
                found[t] = "teacher_schema"
            else:
                temperature = turn.sampling.temperature
                found[t] = GivenAnswer(prompt_ids=prompt_ids, response_ids=turn.response_ids, temperature=temperature)
        return found

    def render(self, root: Turn) -> list[int] | None:
        """A root's prompt with the teacher's words in it; None where the prompt is not what its messages are rendered
        to, or the answer would not begin in the same way."""
        asked, messages = root.requested, root.messages
        if not messages or messages[0]["role"] == "prompt":
            return None
        told, tools, lead = put_into_system(messages, self.prompt), asked.get("tools"), asked.get("lead", "")
        try:
            renderer = self.renderer.with_variables(asked.get("chat_template_kwargs", {}))
            ours, theirs = renderer.prompt(messages, tools), renderer.prompt(told, tools)
            if renderer.opening(messages, tools) != renderer.opening(told, tools):
                return None
        except BadTemplate:
            return None
        if lead:
            ours, begun = ours + renderer.encode_after(ours, lead), renderer.encode_after(theirs, lead)
            theirs = theirs + begun
            if ours[-len(begun) :] != begun:
                return None
        return theirs if ours == root.prompt_ids else None


def find_roots(turns: Sequence[Turn]) -> dict[str, Turn]:
    """By turn, the one whose prompt was rendered whole and which it goes back to, through parents that it extends."""
    by_id, roots = {turn.id: turn for turn in turns}, dict[str, Turn]()
    for turn in sorted(turns, key=lambda turn: len(turn.prompt_ids)):  # what is extended is shorter
        parent = by_id.get(turn.parent or "")
        extends = parent is not None and turn.prompt_ids[: len(parent.ids)] == parent.ids
        roots[turn.id] = roots.get(parent.id, parent) if parent is not None and extends else turn
    return roots


def put_into_system(messages: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The messages with a text at the end of the system message, or as one where there is none.

    >>> put_into_system([{"role": "user", "content": "hi"}], "Think.")[0]
    {'role': 'system', 'content': 'Think.'}
    """
    first, *rest = messages
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    said = first.get("content") or ""
    return [first | {"content": f"{said}\n\n{text}" if said else text}, *rest]


def refuse_ignored_prompt(renderer: Renderer, prompt: str) -> None:
    """Raises `ConfigError` where the chat template leaves a system message out, or refuses one."""
    messages = [{"role": "user", "content": "hi"}]
    try:
        seen = renderer.text(put_into_system(messages, prompt), None, generate=True)
        why = "leaves system messages out" if seen == renderer.text(messages, None, generate=True) else ""
    except BadTemplate as error:
        why = f"refuses a system message ({error})"
    if why:
        raise ConfigError(
            f"{SETTING}_prompt would reach nobody: the model's chat template {why}. Fix: use another policy.template"
        )
