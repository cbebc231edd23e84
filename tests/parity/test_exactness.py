"""Every chat template that renders a tool turn, replayed through the gateway's session and checked by `exactness.py`,
which shares no code with it; and that the checker notices when something is wrong.

Ordinary runs replay a few conversations with a small tokenizer, with and without the templates' marks as its tokens,
and families with a tokenizer of theirs. `make exactness` replays all conversations with all tokenizers.
"""

import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer

from strop.gateway import contexts as served
from strop.gateway import conversation
from strop.gateway.contexts import Contexts
from strop.gateway.conversation import Conversation
from strop.gateway.template import Renderer
from strop.gateway.template_check import Ending, examine
from strop.gateway.transcripts import Transcript
from tests.chatml import TEMPLATE as CHATML
from tests.parity.exactness import Message, Template, Verdict, check
from tests.unit.gateway.test_session import Desk, said, user

DATA = Path(__file__).parents[3] / "shared" / "data"
MATRIX = DATA / "chat_templates" / "render_matrix.json"
MARKS = re.compile(r"</?\|?[A-Za-z_]{2,30}\|?>|<\|[^<>\s{}'\"]{1,40}\|>|<｜[^<>\s{}'\"]{1,40}｜>|\[/?[A-Z_]{3,20}\]")
STOP: tuple[Ending, ...] = ("stop",)
CUT: tuple[Ending, ...] = ("stop", "length")
needs_data = pytest.mark.skipif(not MATRIX.exists(), reason=f"{MATRIX} is not here")

FAMILIES = {
    "llama.cpp/Qwen-Qwen3-0.6B.jinja": "qwen3",
    "llama.cpp/Qwen3-Coder.jinja": "qwen3",
    "llama.cpp/Qwen-QwQ-32B.jinja": "qwen2_5",
    "llama.cpp/deepseek-ai-DeepSeek-V3.1.jinja": "deepseek_v3",
    "vllm/tool_chat_template_deepseekr1.jinja": "deepseek_v3",
}
REFUSED = {"vllm/template_kimi_audio.jinja", "vllm/tool_chat_template_granite_20b_fc.jinja"}
"""One writes nothing for text, the other takes no system's message."""
DEMAND_TOOLS = {
    "llama.cpp/CohereForAI-c4ai-command-r-plus-tool_use.jinja",
    "llama.cpp/NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use.jinja",
    "vllm/tool_chat_template_functiongemma.jinja",
}
"""They cannot render a conversation without tools."""


TORN = {
    "llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja",
    "llama.cpp/google-gemma-4-31B-it.jinja",
    "vllm/tool_chat_template_gemma4.jinja",
}
"""They write words that come with calls behind the calls' end or their results: such an answer cannot be extended."""

BY_EOS = {
    "llama.cpp/Mistral-Small-3.2-24B-Instruct-2506.jinja", "llama.cpp/llama-cpp-rwkv-world.jinja",
    "llama.cpp/mistralai-Mistral-Nemo-Instruct-2407.jinja", "llama.cpp/unsloth-Apriel-1.5.jinja",
    "llama.cpp/unsloth-mistral-Devstral-Small-2507.jinja", "vllm/template_basic.jinja", "vllm/template_blip2.jinja",
    "vllm/template_chatglm.jinja", "vllm/template_chatglm2.jinja", "vllm/template_falcon.jinja",
    "vllm/template_kimi_audio.jinja", "vllm/tool_chat_template_glm4.jinja",
    "vllm/tool_chat_template_granite_20b_fc.jinja", "vllm/tool_chat_template_mistral.jinja",
    "vllm/tool_chat_template_mistral3.jinja", "vllm/tool_chat_template_mistral_parallel.jinja",
}  # fmt: skip
"""These end turns with the tokenizer's eos token, or with no mark at all."""


def _templates() -> list[str]:
    if not MATRIX.exists():
        return []
    found = json.loads(MATRIX.read_text())
    return [name for name, how in found.items() if "ok" in (how.get("tools_dict_args"), how.get("tools_str_args"))]


TEMPLATES = _templates()


# -- what is replayed --------------------------------------------------------------------------------------------------


def _call(id: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(id: str, name: str, content: str) -> Message:
    return {"role": "tool", "tool_call_id": id, "name": name, "content": content}


CORNERS: list[Message] = [
    {"role": "system", "content": "Sei kurz. 你好 🙂"},
    user("Wie spät ist es in Zürich?\n"),
    {"role": "assistant", "content": "", "tool_calls": [_call("aaaaaaaa1", "now", zone="Zürich “é”", days=[1, 2])]},
    _result("aaaaaaaa1", "now", '{"time": "12:00"}'),
    {"role": "assistant", "content": "Noch einmal.", "tool_calls": [_call("aaaaaaaa2", "now", exact=True, n=3)]},
    _result("aaaaaaaa2", "now", " \n12:01 <|x|>\n\n"),
    {"role": "assistant", "content": "Es ist 12:01."},
    user("👩‍👩‍👧 ok?"),
    {"role": "assistant", "content": "", "tool_calls": [_call("aaaaaaaa3", "note", text="a\n\"b\" \\ c")]},
    _result("aaaaaaaa3", "note", "done"),
    {"role": "assistant", "content": "", "tool_calls": [_call("aaaaaaaa4", "notes")]},
    _result("aaaaaaaa4", "notes", "[]"),
    {"role": "assistant", "content": "Done"},
    user("Bye"),
    {"role": "assistant", "content": "Bye!\n1. a\n2. b"},
]  # fmt: skip
FOLLOWED = sum(message["role"] == "assistant" for message in CORNERS) - 1
"""Answers of that conversation with something behind them."""


def _plain(raw: list[Any]) -> list[Message]:
    """Recorded messages with ids that every template takes, and names on results."""
    ids: dict[str, str] = {}
    names: dict[str, str] = {}
    found: list[Message] = []
    for message in raw:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        plain: Message = {"role": message["role"], "content": content}
        for call in message.get("tool_calls") or ():
            id = ids[call["id"]] = f"call{len(ids):05d}"
            function = call["function"]
            names[id] = function["name"]
            plain.setdefault("tool_calls", []).append(
                _call(id, function["name"]) | {"function": function | {"arguments": json.loads(function["arguments"])}}
            )
        if message["role"] == "tool":
            id = ids[message.get("tool_call_id") or message["tool_call_ids"][0]]
            plain |= {"tool_call_id": id, "name": names[id]}
        found.append(plain)
    return found


def _tools(messages: list[Message]) -> list[dict[str, Any]]:
    """The tools a conversation must have had."""
    found: dict[str, dict[str, Any]] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            found.setdefault(call["function"]["name"], {}).update(call["function"]["arguments"])
    return [
        {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": {
            "type": "object", "properties": {key: {"type": "string", "description": key} for key in keys},
            "required": [*keys],
        }}}
        for name, keys in found.items()
    ]  # fmt: skip


@cache
def _recorded() -> list[list[Message]]:
    folder = DATA / "tool_transcripts"
    lines = (folder / "tau_bench_gpt4o_airline.jsonl").read_text().splitlines()
    files = ("simple", "marshmallow")
    agents = [json.loads((folder / f"sweagent_function_calling_{name}.json").read_text()) for name in files]
    react = json.loads((folder / "fireact_hotpotqa_gpt35_react_dev500.json").read_text())
    raw = [json.loads(line)["traj"] for line in lines] + [agent["history"] for agent in agents]
    return [_plain(one) for one in raw + [one["traj"] for one in list(react.values())[:20]]]


@cache
def _folder(name: str) -> tuple[str, dict[str, str]]:
    """A tokenizer's JSON and its special tokens by name."""
    folder = DATA / "tokenizers" / name
    config = json.loads((folder / "tokenizer_config.json").read_text())
    specials = {key: config.get(key) for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
    texts = {key: text["content"] if isinstance(text, dict) else text for key, text in specials.items() if text}
    return gzip.decompress((folder / "tokenizer.json.gz").read_bytes()).decode(), texts


@cache
def _tokenizer(name: str) -> Tokenizer:
    return Tokenizer.from_str(_folder(name)[0])


def _with_marks(name: str, source: str) -> Tokenizer:
    """The tokenizer with a token for every mark of a template, as the template's own has."""
    tokenizer = Tokenizer.from_str(_folder(name)[0])
    marks = dict.fromkeys(MARKS.findall(source))
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return tokenizer


class Stage:
    """A template and a tokenizer, for the gateway's renderer and for the checker."""

    def __init__(self, source: str, tokenizer: Tokenizer, specials: dict[str, str]) -> None:
        self.tokenizer, self.specials = tokenizer, specials
        # The checker knows what the template writes, and nothing of what is written for it.
        self.renderer = Renderer(tokenizer, source, specials=specials, tools="template")
        self.template = Template(source, specials)
        self.ends = [*map(self.renderer.decode, ([id] for id in self.renderer.stop_ids)), *self.renderer.stop_texts]

    @classmethod
    def of(cls, name: str, tokenizer: str) -> "Stage":
        source, base = (DATA / "chat_templates" / name).read_text(), tokenizer.removesuffix("+")
        found = _with_marks(base, source) if tokenizer.endswith("+") else _tokenizer(base)
        return cls(source, found, _folder(base)[1])

    def check(self, messages: list[Message], endings: tuple[Ending, ...] = STOP) -> Verdict:
        tools = _tools(messages)
        found = examine(self.renderer, Transcript(id="", messages=messages, tools=tools), endings=endings)
        report = {"error": found.error, "turn_reports": msgspec.to_builtins(found.turns)}
        cut = [ending == "length" for ending in endings]
        return check(self.template, self.tokenizer, messages, tools, report, ends=self.ends, cut=cut)

    def check_turns(self, messages: list[Message], turns: list[Any], *, cut: list[bool]) -> Verdict:
        """The same for turns that a gateway has recorded."""
        spans: list[list[int]] = []
        reports: list[dict[str, Any]] = []
        for turn in turns:
            known = {"message": len(turn.messages), "prompt_ids": turn.prompt_ids, "response_ids": turn.response_ids}
            reports.append(known | {"sampled": [*spans], "exact": turn.branch is None, "branch": turn.branch})
            spans.append([len(turn.prompt_ids), len(turn.ids)])
        report = {"error": None, "turn_reports": reports}
        return check(self.template, self.tokenizer, messages, None, report, ends=self.ends, cut=cut, shown=False)


def _passes(verdict: Verdict, *, refused: bool = False) -> None:
    assert verdict.faults == [], "\n".join(verdict.faults)
    assert bool(verdict.refused) == refused, verdict.refused


# -- every template ----------------------------------------------------------------------------------------------------


@needs_data
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates(name: str) -> None:
    messages = _apart(CORNERS) if name in TORN else CORNERS
    for tokenizer, endings in [("gpt2", STOP), ("gpt2+", CUT)]:
        stage = Stage.of(name, tokenizer)
        _passes(stage.check(messages, endings), refused=name in REFUSED)
        assert (stage.ends == ["<|endoftext|>"]) == (name in BY_EOS), "a mark of its own ends a turn, and is known"
    _passes(stage.check(messages[1:]), refused="kimi_audio" in name)


def _apart(messages: list[Message]) -> list[Message]:
    """The same without words that come with calls."""
    return [message | {"content": ""} if message.get("tool_calls") else message for message in messages]


@needs_data
@pytest.mark.parametrize("name", sorted(TORN))
def test_answers_that_a_template_tears_apart_branch(name: str) -> None:
    """One answer of the conversation has words and a call: the prompt behind it is rendered whole, once."""
    stage = Stage.of(name, "gpt2+")
    found = examine(stage.renderer, Transcript(id="", messages=CORNERS, tools=_tools(CORNERS)))
    assert found.branches == {"template_rewrote": 1}
    assert found.wrong == []


@needs_data
@pytest.mark.parametrize(("name", "tokenizer"), FAMILIES.items())
def test_families(name: str, tokenizer: str) -> None:
    """With a tokenizer of the template's own family, all ids are those of the template's text."""
    stage = Stage.of(name, tokenizer)
    for messages in (CORNERS, _recorded()[0]):
        for endings in (STOP, CUT):
            verdict = stage.check(messages, endings)
            _passes(verdict)
            assert verdict.whole == (verdict.turns if verdict.stable else 1)


@needs_data
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TEMPLATES)
def test_all_conversations(name: str) -> None:
    """Recorded conversations, with the tokenizers in turns: every 40th, or every one as `make exactness` does, and then
    the first of them with every tokenizer."""
    every = int(os.environ.get("STROP_TEST_EVERY", "40"))
    stages = [Stage.of(name, tokenizer) for tokenizer in ("qwen2_5", "qwen3", "deepseek_v3", "gpt2", "qwen2_5+")]
    for number, messages in enumerate(_recorded()):
        if number % every:
            continue
        messages = _apart(messages) if name in TORN else messages
        first = number in (0, 100) and every == 1
        refused = "kimi_audio" in name or (name in REFUSED and messages[0]["role"] == "system")
        for stage in stages if first else [stages[number % len(stages)]]:
            no_bos = "functionary" in name and "bos_token" not in stage.specials
            no_tools = name in DEMAND_TOOLS and not _tools(messages)
            for endings in (STOP, CUT) if first else (CUT if number // len(stages) % 2 else STOP,):
                verdict = stage.check(messages, endings)
                assert verdict.faults == [], (number, verdict.faults[:3])
                assert bool(verdict.refused) == (refused or no_bos or no_tools), (number, verdict.refused)


@needs_data
def test_doctor_prints_what_is_checked(tmp_path: Path) -> None:
    conversations = [CORNERS, _recorded()[1], _recorded()[100]]
    lines = [{"messages": _as_sent(messages), "tools": _tools(messages)} for messages in conversations]
    transcripts = tmp_path / "conversation.jsonl"
    transcripts.write_text("\n".join(map(json.dumps, lines)))
    template, tokenizer = DATA / "chat_templates/llama.cpp/Qwen3-Coder.jinja", DATA / "tokenizers/qwen3"
    command = [sys.executable, "-m", "strop.cli", "doctor", "--json", "--transcripts", str(transcripts)]
    command += ["--template", str(template), "--tokenizer", str(tokenizer)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    ends = [*printed["stop_texts"], *(_tokenizer("qwen3").decode([id], False) for id in printed["stop_ids"])]
    for messages, report in zip(conversations, printed["conversations"], strict=True):
        mine = Template(template.read_text(), _folder("qwen3")[1])
        verdict = check(mine, _tokenizer("qwen3"), messages, _tools(messages), report, ends=ends)
        _passes(verdict)
        assert verdict.stable == report["prefix_stable"]
        assert verdict.whole == verdict.turns > 2


def _as_sent(messages: list[Message]) -> list[Message]:
    """Arguments as text, as OpenAI's API has them."""
    sent = json.loads(json.dumps(messages))
    for message in sent:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return sent


# -- stop strings, through the gateway's own call ----------------------------------------------------------------------

STOPPED = ["llama.cpp/Qwen-Qwen3-0.6B.jinja", "llama.cpp/GLM-4.6.jinja", "llama.cpp/openai-gpt-oss-120b.jinja",
           "llama.cpp/meta-llama-Llama-3.1-8B-Instruct.jinja", "vllm/tool_chat_template_mistral3.jinja",
           "vllm/template_chatml.jinja", "llama.cpp/google-gemma-4-31B-it.jinja"]  # fmt: skip


@needs_data
@pytest.mark.parametrize("tokenizer", ["gpt2", "gpt2+"])
@pytest.mark.parametrize("name", STOPPED)
def test_stop_strings(name: str, tokenizer: str) -> None:
    stage = Stage.of(name, tokenizer)
    desk = Desk(stage.renderer)
    end = "".join(stage.renderer.stop_texts[:1])
    texts = [("one two three", ["two"]), ("four five", None), ("six se-ven", ["-"]), ("eight", ["x"])]
    messages: list[Message] = [user("a")]
    turns: list[Any] = []
    for text, stop in texts:
        answer = stage.renderer.encode(text + end) if end else text
        turns.append(desk.ask(messages, answer, **({"stop": stop} if stop else {})))
        messages = [*messages, said(turns[-1]), user("b")]
    assert [turn.answer["content"] for turn in turns] == ["one ", "four five", "six se", "eight"]
    verdict = stage.check_turns(messages[:-1], turns, cut=[True, False, True, False])
    _passes(verdict)
    assert verdict.turns == len(texts)
    assert verdict.hidden == 0


# -- the checker is no rubber stamp ------------------------------------------------------------------------------------


@pytest.fixture
def chatml(tmp_path: Path) -> Stage:
    from tests import chatml

    tokenizer = Tokenizer.from_file(str(chatml.make(tmp_path) / "tokenizer.json"))
    return Stage(CHATML, tokenizer, {"eos_token": "<|im_end|>"})


def _without_newline(after: Callable[..., str]) -> Callable[..., str]:
    return lambda *given: after(*given).replace("<|im_end|>\n", "<|im_end|>", 1)


def _other_result(after: Callable[..., str]) -> Callable[..., str]:
    return lambda *given: after(*given).replace("12:0", "12:1")


def _other_role(after: Callable[..., str]) -> Callable[..., str]:
    return lambda *given: after(*given).replace("<|im_start|>tool", "<|im_start|>user")


def _no_generation_prompt(after: Callable[..., str]) -> Callable[..., str]:
    return lambda *given: after(*given).removesuffix("<|im_start|>assistant\n")


@pytest.mark.parametrize("change", [_without_newline, _other_result, _other_role, _no_generation_prompt])
def test_wrong_text_is_noticed(chatml: Stage, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    _passes(chatml.check(CORNERS))
    monkeypatch.setattr(Renderer, "after", change(Renderer.after))
    for endings in (STOP, CUT):
        assert chatml.check(CORNERS, endings).faults


def test_a_doubled_end_is_noticed(chatml: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Renderer, "find_end", lambda self, path: ("", ""))
    monkeypatch.setattr(Renderer, "_find_unsaid", lambda self, closing, rest, said, answer: rest)
    monkeypatch.setattr(Renderer, "_would_repeat", lambda self, said, rest: False)
    faults = chatml.check(CORNERS).faults
    assert len(faults) == FOLLOWED
    assert "<|im_end|><|im_end|>" in faults[0].replace("' stands '", "")


def test_a_missing_end_is_noticed(chatml: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Renderer, "find_end", lambda self, path: ("<|im_end|>", ""))
    _passes(chatml.check(CORNERS))
    assert len(chatml.check(CORNERS, ("length",)).faults) == FOLLOWED


def test_other_tokens_are_noticed(chatml: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The right text in other tokens, letter by letter."""
    encode = Renderer.encode

    def letters(self: Renderer, path: list[int], text: str) -> list[int]:
        return [id for letter in re.findall(r"<\|\w+\|>|.", text, re.DOTALL) for id in encode(self, letter)]

    monkeypatch.setattr(Renderer, "encode_after", letters)
    assert chatml.check(CORNERS).faults


def test_retokenised_answers_are_noticed(chatml: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    said = examine(chatml.renderer, Transcript(id="", messages=CORNERS)).turns[0].response_ids
    monkeypatch.setattr(served.KnownTurn, "ids", property(lambda self: [*self.prompt_ids, *said]))
    assert any("begin with the previous prompt" in fault for fault in chatml.check(CORNERS).faults)


def test_branches_are_noticed(chatml: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Renderer, "continuation", lambda self, *given: None)
    assert any("template_rewrote" in fault for fault in chatml.check(CORNERS).faults)


def _edited(stage: Stage) -> bool:
    """Whether an edited history gets the prompt that the template writes for it."""
    contexts, asked = Contexts(b""), Conversation.of(CORNERS[:2], None)
    first = examine(stage.renderer, Transcript(id="", messages=CORNERS[:3])).turns[0]
    assert contexts.prompt(stage.renderer, asked).ids == first.prompt_ids
    turn = {"id": "r/1/0", "rollout": "r", "attempt": 1, "logprobs": [], "versions": [], "finish": "stop"}
    turn |= {"prompt_ids": first.prompt_ids, "response_ids": first.response_ids, "started": 0.0, "ended": 0.0}
    contexts.add(msgspec.convert(turn | {"answer": CORNERS[2], "messages": CORNERS[:2]}, served.Turn), asked)
    edited = [CORNERS[0], user("Something else?"), *CORNERS[2:4]]
    prompt = contexts.prompt(stage.renderer, Conversation.of(edited, None))
    return stage.renderer.decode(prompt.ids) == stage.template.render(edited, None, generate=True)


def test_histories_compared_by_length_are_noticed(chatml: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _edited(chatml)
    monkeypatch.setattr(conversation, "canonicalize", lambda message: message["role"].encode())
    monkeypatch.setattr(conversation, "_known", {})
    assert not _edited(chatml)
