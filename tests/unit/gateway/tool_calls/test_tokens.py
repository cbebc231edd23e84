"""The whole way from sampled tokens, with real tokenizers: their special tokens are seen by the parser and by nobody
else."""

from __future__ import annotations

import pytest

from strop.gateway.detokenize import Detokenizer
from strop.gateway.template import Renderer
from strop.gateway.tool_calls.base import ParsedCall, Piece, Thought
from tests.unit.gateway.tool_calls.templates import DATA, TOOLS, Template
from tests.unit.gateway.tool_calls.test_templates import FULL, NOW, WORDS

TOKENIZERS = DATA.parent / "tokenizers"


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("qwen2_5", "llama.cpp/Qwen-QwQ-32B.jinja"),
        ("qwen3", "llama.cpp/Qwen-Qwen3-0.6B.jinja"),
        ("qwen3", "llama.cpp/Qwen3-Coder.jinja"),
        ("deepseek_v3", "vllm/tool_chat_template_deepseekr1.jinja"),
        ("deepseek_v3", "llama.cpp/deepseek-ai-DeepSeek-V3.1.jinja"),
    ],
)
def test_token_by_token(folder: str, name: str) -> None:
    if not (TOKENIZERS / folder).exists() or not (DATA / name).exists():
        pytest.skip(f"{TOKENIZERS / folder} or {DATA / name} is not here")
    renderer = Renderer.from_parts(TOKENIZERS / folder, (DATA / name).read_text("utf-8"))
    said = Template(name).said(WORDS, [FULL, NOW])
    assert said is not None
    think = "<think>\nSo 🙂.\n</think>\n\n" if ("<think>", "</think>") in renderer.format.thoughts else ""
    ids = [*renderer.encode(think + said[1]), renderer.end_of_turn]
    detokenizer = Detokenizer(renderer.decode_answer)
    parser = renderer.format.parser(TOOLS, calls=True, lead="")
    pieces: list[Piece] = []
    for id in ids:
        pieces += parser.feed(detokenizer.feed([id]))
    pieces += parser.feed(detokenizer.close()) + parser.close()
    assert [piece for piece in pieces if isinstance(piece, ParsedCall)] == [FULL, NOW]
    assert "".join(piece for piece in pieces if isinstance(piece, str)) == WORDS
    assert "".join(piece.text for piece in pieces if isinstance(piece, Thought)) == ("So 🙂." if think else "")
