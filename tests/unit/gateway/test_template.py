"""Rendering: against Qwen's real templates and tokenizers where they are at hand, and what goes wrong in words."""

import gzip
import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import strop
from strop.errors import ModelError
from strop.gateway.jinja import BadTemplate, Template
from strop.gateway.template import Renderer
from strop.gateway.template_style import find_style
from tests.chatml import TEMPLATE

DATA = Path(__file__).parents[4] / "shared" / "data"
TOOLS = [{"type": "function", "function": {"name": "now", "description": "<b>é</b>", "parameters": {}}}]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Wie spät?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "now", "arguments": {"zone": "“é”"}}}],
    },
    {"role": "tool", "content": "12:00", "tool_call_id": "a"},
    {"role": "assistant", "content": "Noon."},
    {"role": "user", "content": "Thanks."},
]


def test_text_and_ids(renderer: Renderer) -> None:
    text = renderer.text([{"role": "user", "content": "hi"}], None, generate=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert renderer.decode(renderer.encode(text)) == text
    assert renderer.decode_answer(renderer.encode(text)) == "user\nhi\nassistant\n"
    assert renderer.decode([renderer.end_of_turn]) == "<|im_end|>"
    assert renderer.stop_ids == (renderer.end_of_turn,)
    tools = renderer.text(CHAT[:2], TOOLS, generate=False)
    assert '"<b>é</b>"' in tools, "JSON in prompts is escaped neither for HTML nor for ASCII"


@pytest.mark.parametrize("served", [3, 5])
@pytest.mark.parametrize("ended", [True, False])
def test_continuation_is_what_the_whole_has(renderer: Renderer, served: int, ended: bool) -> None:
    whole = renderer.text(CHAT, TOOLS, generate=True)
    rest = renderer.after(CHAT, TOOLS, served)
    assert rest is not None
    assert rest.startswith("<|im_end|>\n<|im_start|>")
    assert whole.endswith(rest)
    path = renderer.encode(whole.removesuffix(rest) + ("<|im_end|>" if ended else ""))
    new = renderer.continuation(CHAT, TOOLS, served, path, 4)
    assert new is not None
    assert path + new == renderer.encode(whole), "the end of the turn stands once"


def test_rewritten_history_is_noticed(renderer: Renderer) -> None:
    rewriting = TEMPLATE.replace("{{ message.content }}", "{{ message.content if loop.last else 'gone' }}")
    assert Renderer(renderer.tokenizer, rewriting).continuation(CHAT, None, 5, [1], 1) is None


CHANGED = TEMPLATE.replace("<|im_end|>", "</s>")


@pytest.mark.parametrize("beyond", ["", "\n", "\n\n"])
def test_ends_that_are_no_tokens(renderer: Renderer, beyond: str) -> None:
    """The token that completes an end may reach beyond it; the end stands once, and what was said is not said again."""
    other = Renderer(renderer.tokenizer, CHANGED, specials={"eos_token": "<|endoftext|>"})
    assert other.stop_texts == ("</s>",)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    prompt = other.prompt(chat[:1], None)
    # A tokenizer in which one token has the end's last letter and what comes after it.
    bigger = Tokenizer.from_str(renderer.tokenizer.to_str())
    bigger.add_tokens([f">{beyond}"])
    wide = Renderer(bigger, CHANGED, specials={"eos_token": "<|endoftext|>"})
    said = [*wide.encode("b</s"), *wide.encode(f">{beyond}")]
    assert wide.decode(said) == f"b</s>{beyond}"
    assert wide.find_end(said) == ("</s>", beyond)
    new = wide.continuation(chat, None, 2, prompt + said, len(said))
    assert new is not None
    left = "\n<|im_start|>user\nc</s>\n<|im_start|>assistant\n"
    assert wide.decode(new) == (left[1:] if beyond else left)
    said = wide.encode("b</s>!")
    assert wide.continuation(chat, None, 2, prompt + said, len(said)) == wide.encode("</s>" + left)


def test_another_end_than_the_template_writes(renderer: Renderer) -> None:
    """An answer may be ended in one way and written in another once the conversation goes on."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{{ '<return>' if loop.last and m.role == 'assistant' else '<end>' }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    found = Renderer(renderer.tokenizer, template, specials={"eos_token": "<|endoftext|>"})
    assert found.stop_texts == ("<end>", "<return>")
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    path = found.encode("<user>a<end><assistant>b<return>")
    new = found.continuation(chat, None, 2, path, len(path))
    assert new is not None
    assert found.decode(path + new) == "<user>a<end><assistant>b<return><user>c<end><assistant>"


def test_long_conversations_are_rendered_whole_where_it_matters(renderer: Renderer) -> None:
    """A template that looks at another message than it means to, if there is a system's."""
    template = (
        "{% set all = messages %}{% if messages[0].role == 'system' %}S{% set messages = messages[1:] %}{% endif %}"
        "{% for m in messages %}{% if all[loop.index0 - 1].role != 'tool' %}[{{ m.role }}]{% endif %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    found = Renderer(renderer.tokenizer, template)
    chat = [CHAT[0], CHAT[1], *[CHAT[2], CHAT[3]] * 6, CHAT[4], CHAT[5]]
    for served in range(3, len(chat), 2):
        for end in (served + 1, len(chat)):
            rest = found.after(chat[:end], None, served)
            assert rest is not None
            assert found.text(chat[:end], None, generate=True).endswith(rest)


def test_refusals(renderer: Renderer, tmp_path: Path) -> None:
    strict = Renderer(renderer.tokenizer, "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}",
                      specials={"eos_token": "<|im_end|>"})  # fmt: skip
    with pytest.raises(BadTemplate, match="no tools"):
        strict.prompt(CHAT, None)
    with pytest.raises(ModelError, match="cannot be read"):
        Renderer(renderer.tokenizer, "{% if %}")
    with pytest.raises(ModelError, match="eos_token"):
        Renderer(renderer.tokenizer, "{{ messages[-1].content }}")
    with pytest.raises(ModelError, match=r"chat_template\.jinja"):
        Renderer.from_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Renderer.from_folder(tmp_path)


def test_folder_with_the_template_in_its_config(renderer: Renderer, tmp_path: Path) -> None:
    renderer.tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": {"content": "<|endoftext|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    found = Renderer.from_folder(tmp_path)
    assert found.end_of_turn == renderer.end_of_turn
    assert found.stop_ids == (renderer.end_of_turn, renderer.encode("<|endoftext|>")[0], 7)


def test_generation_tags_change_nothing(renderer: Renderer) -> None:
    tagged = TEMPLATE.replace("{{ message.content }}", "{% generation %}{{ message.content }}{% endgeneration %}")
    assert Renderer(renderer.tokenizer, tagged).prompt(CHAT, TOOLS) == renderer.prompt(CHAT, TOOLS)


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3"])
def test_real_templates(family: str) -> None:
    folder = DATA / "tokenizers" / family
    if not folder.exists():
        pytest.skip(f"{folder} is not here")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer = Tokenizer.from_str(gzip.decompress((folder / "tokenizer.json.gz").read_bytes()).decode())
    renderer = Renderer(tokenizer, config["chat_template"], specials={"eos_token": config["eos_token"]})
    assert renderer.decode([renderer.end_of_turn]) == "<|im_end|>"
    text = renderer.text(CHAT, TOOLS, generate=True)
    for served in (3, 5):
        rest = renderer.after(CHAT, TOOLS, served)
        assert rest is not None
        assert text.endswith(rest)
        assert rest.startswith("<|im_end|>\n<|im_start|>user\n")


@pytest.mark.parametrize("ids", ["call_0123456789", "abc123XYZ"])
def test_mistral_takes_any_id(ids: str) -> None:
    path = DATA / "chat_templates" / "vllm" / "tool_chat_template_mistral.jinja"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    renderer = Renderer.from_parts(DATA / "tokenizers" / "gpt2", path.read_text())
    call = CHAT[2]["tool_calls"][0] | {"id": ids}
    chat = [CHAT[1], CHAT[2] | {"tool_calls": [call]}, CHAT[3] | {"tool_call_id": ids}]
    text = renderer.text(chat, None, generate=True)
    shown = set(re.findall(r'"(?:call_)?id": "(\w+)"', text))
    assert len(shown) == 1, "the call and its result have one id"
    assert ids in shown or len(ids) != 9


def test_templates_that_demand_tools(renderer: Renderer) -> None:
    """How they end a turn is found out with a tool."""
    demanding = "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}" + TEMPLATE
    found = Renderer(renderer.tokenizer, demanding, specials={"eos_token": "<|endoftext|>"})
    assert found.end_of_turn == renderer.end_of_turn
    assert found.generation_prompt == renderer.generation_prompt
    for served in (3, 5):
        assert found.after(CHAT, TOOLS, served) == renderer.after(CHAT, TOOLS, served)


def test_templates_that_drop_tools_are_known() -> None:
    """Also where tools are demanded, and where they are written into the system's message only."""
    deaf = TEMPLATE.replace("{%- if tools %}", "{%- if false %}")
    within = deaf.replace(
        "{{ messages[0].content }}<|im_end|>", "{{ messages[0].content }}{{ tools | tojson }}<|im_end|>"
    )
    demanded = "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}" + TEMPLATE
    found = [find_style(Template(source, {}), (), frozenset()) for source in (TEMPLATE, deaf, within, demanded)]
    assert [traits.tools for traits in found] == [True, False, True, True]


def test_the_last_few_tokens_tell_as_much_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short look at what was said last finds whatever a long one does: marks that the template would write again,
    and where an answer begins."""
    renderer = Renderer.from_folder(Path(strop.__file__).parent / "models" / "nano")
    mark, end = "<|im_start|>tool\n", "<|im_end|>"
    rest, ab = f"\n{mark}12{end}\n<|im_start|>assistant\n", "ab " * 30
    said = ["", "It is 12. " * 20, f"{ab}<|im_start|>", f"{ab}{mark}", f"{rest}{rest}", "ü€" * 40, " " * 50]
    for text in said:
        ids = renderer.encode(text)
        for ended in ("", end):
            last = (ids + renderer.encode(ended))[-64:]
            if renderer._would_repeat(renderer.decode(last).removesuffix(ended), rest):
                assert renderer._may_repeat(last, ended, rest), text
    assert renderer._would_repeat(f"{ab}<|im_start|>", rest)
    assert not renderer._may_repeat(renderer.encode("It is 12. " * 20 + end), end, rest)
    prompt = renderer.prompt([{"role": "user", "content": "hi " * 100}], None)
    assert renderer.opening([], None, prompt) == renderer.generation_prompt
    decoded: list[int] = []
    decode = renderer.decode
    monkeypatch.setattr(renderer, "decode", lambda ids: decoded.append(len(ids)) or decode(ids))
    renderer.opening([], None, prompt)
    assert max(decoded) <= 16
