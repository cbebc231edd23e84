"""Rendering: against Qwen's real templates and tokenizers where they are at hand, and what goes wrong in words."""

import gzip
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from strop.errors import ModelError
from strop.gateway.render import BadTemplate, Renderer
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
    assert renderer.spoken(renderer.encode(text)) == "user\nhi\nassistant\n"
    assert renderer.decode([renderer.end_of_turn]) == "<|im_end|>"
    assert renderer.stop_ids == (renderer.end_of_turn,)
    tools = renderer.text(CHAT[:2], TOOLS, generate=False)
    assert '"<b>é</b>"' in tools, "JSON in prompts is escaped neither for HTML nor for ASCII"


@pytest.mark.parametrize("served", [3, 5])
def test_continuation_is_what_the_whole_has(renderer: Renderer, served: int) -> None:
    whole = renderer.prompt(CHAT, TOOLS)
    new = renderer.continuation(CHAT, TOOLS, served)
    assert new is not None
    assert new[0] == renderer.end_of_turn
    assert whole[-len(new) :] == new


def test_rewritten_history_is_noticed(renderer: Renderer) -> None:
    rewriting = TEMPLATE.replace("{{ message.content }}", "{{ message.content if loop.last else 'gone' }}")
    assert Renderer(renderer.tokenizer, rewriting).continuation(CHAT, None, 5) is None


def test_refusals(renderer: Renderer, tmp_path: Path) -> None:
    strict = Renderer(renderer.tokenizer, "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}",
                      specials={"eos_token": "<|im_end|>"})  # fmt: skip
    with pytest.raises(BadTemplate, match="no tools"):
        strict.prompt(CHAT, None)
    with pytest.raises(ModelError, match="cannot be read"):
        Renderer(renderer.tokenizer, "{% if %}")
    with pytest.raises(ModelError, match="eos_token"):
        Renderer(renderer.tokenizer, "{{ messages[-1].content }}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Renderer.from_folder(tmp_path)
    renderer.tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match=r"chat_template\.jinja"):
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
    whole = renderer.prompt(CHAT, TOOLS)
    found = {served: renderer.continuation(CHAT, TOOLS, served) for served in (3, 5)}
    for new in found.values():
        assert new is None or whole[-len(new) :] == new
    if family == "qwen2_5":
        assert all(found.values())
    else:  # Qwen3 writes an empty thought before the last answer only
        assert found[5] is None
