"""Our prompts against hand-written renderers of the same families, by somebody else.

`renderers` bridges from one turn to the next for models it knows. It does not where a new user's message makes the
template strip thinking: there is nothing to compare there.
"""

import gzip
from itertools import pairwise
from pathlib import Path

import pytest

from strop.gateway.template import Renderer
from strop.gateway.template_check import examine
from strop.gateway.transcripts import read_transcripts

configs = pytest.importorskip("renderers.configs")
transformers = pytest.importorskip("transformers")
DATA = Path(__file__).parents[3] / "shared" / "data"
TRANSCRIPTS = DATA / "tool_transcripts" / "tau_bench_gpt4o_airline.jsonl"
pytestmark = pytest.mark.skipif(not TRANSCRIPTS.exists(), reason=f"no transcripts at {TRANSCRIPTS}")


def test_the_next_prompt_of_qwen3_is_the_same(tmp_path: Path) -> None:
    from renderers import create_renderer

    tokenizer = DATA / "tokenizers" / "qwen3"
    (tmp_path / "tokenizer.json").write_bytes(gzip.decompress((tokenizer / "tokenizer.json.gz").read_bytes()))
    (tmp_path / "tokenizer_config.json").write_bytes((tokenizer / "tokenizer_config.json").read_bytes())
    theirs = create_renderer(transformers.AutoTokenizer.from_pretrained(tmp_path), configs.Qwen3RendererConfig())
    template = DATA / "chat_templates" / "llama.cpp" / "Qwen-Qwen3-0.6B.jinja"
    ours = Renderer.from_parts(tmp_path, template.read_text())
    compared = 0
    for conversation in read_transcripts(TRANSCRIPTS)[:8]:
        turns = examine(ours, conversation).turns
        for before, now in pairwise(turns):
            new = conversation.messages[before.message + 1 : now.message]
            bridged = theirs.bridge_to_next_turn(before.prompt_ids, before.response_ids, new)
            if bridged is not None:
                assert list(bridged.token_ids) == now.prompt_ids
                compared += 1
    assert compared > 20
