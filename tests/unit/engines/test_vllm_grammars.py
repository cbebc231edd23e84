"""What vLLM is told of grammars, what becomes of answers that do not follow them, and how servers are started."""

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from llguidance import LLMatcher, grammar_from
from llguidance.hf import from_tokenizer
from msgspec.structs import replace
from transformers import AutoTokenizer

from strop.config import VllmConfig
from strop.engines import matchers, remote
from strop.engines.vllm.engine import ENTRY, LAUNCH, SEVERAL, Vllm, command
from strop.engines.vllm.held import HeldAnswer
from strop.engines.vllm.launch import OPEN, SCHEMAS
from strop.errors import EngineError
from strop.models.grammar import UNFORCED, VERSION, TokenMatcher, close_grammar
from strop.types import AnswerGrammar, Sampling
from tests.unit.engines.test_vllm import Stand, until
from tests.unit.models.test_grammar import ENDS, MANY, NANO, USUAL, VOCABULARY, WIDE, grammar_of, read

COUNTING = AnswerGrammar(text=f"{UNFORCED}\nstart: <[6]> <[7]>", ends=(8,), version=VERSION)
"""What the stand-in draws after 5."""


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    stand = Stand(tmp_path)
    (stand.model / "config.json").write_text(
        json.dumps({"vocab_size": VOCABULARY, "max_position_embeddings": 64, "dtype": "float32"})
    )
    shutil.copy(NANO / "tokenizer.json", stand.model)
    stand.engine = Vllm(stand.model, stand.settings, log=stand.folder / "vllm.log")
    return stand


async def ask(stand: Stand, grammar: AnswerGrammar) -> list[int]:
    sampling = Sampling(grammar=grammar, max_tokens=9)
    stream = stand.engine.generate([5], sampling, stop_ids=grammar.ends)
    return [id for chunk in [chunk async for chunk in stream] for id in chunk.ids]


async def test_the_server_is_told_the_text_that_the_learner_reads(stand: Stand) -> None:
    await stand.engine.start()
    try:
        assert await ask(stand, COUNTING) == [6, 7, 8]
        asked = [json.loads(line) for line in (stand.folder / "asked.jsonl").read_text().splitlines()]
        told = [one["generate"] for one in asked if "generate" in one][-1]
        assert told["structured_outputs"] == {"grammar": close_grammar(COUNTING)}
        with pytest.raises(EngineError, match=r"did not hold an answer to its schema: token 6 is not .*Fix: install"):
            await ask(stand, grammar_of({"const": "abc"}))
        with pytest.raises(EngineError, match=r"cannot be held to a schema: .*Fix: ask without one"):
            await ask(stand, AnswerGrammar(text="start: nothing_like_it", ends=(8,), version=VERSION))
        assert await ask(stand, COUNTING) == [6, 7, 8]
    finally:
        await stand.engine.close()


async def test_what_a_server_does_with_grammars_is_found_out_at_each_start(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.05)
    try:
        assert not stand.engine.holds_to_schemas
        await stand.engine.start()
        assert not stand.engine.holds_to_schemas
        (stand.folder / "holds").touch()
        os.kill(stand.pid, signal.SIGKILL)
        await until(lambda: stand.engine.holds_to_schemas)
        elsewhere = replace(stand.settings, url=stand.engine.url)
        other = Vllm(stand.model, elsewhere, log=stand.folder / "unused.log")
        await other.start()
        assert other.holds_to_schemas
        await other.close()
        (stand.model / "tokenizer.json").unlink()
        other = Vllm(stand.model, elsewhere, log=stand.folder / "unused.log")
        await other.start()
        assert not other.holds_to_schemas, "nothing that it says can be checked"
        await other.close()
    finally:
        await stand.engine.close()


async def test_tokens_that_are_allowed_where_no_mask_can_be_found_are_refused() -> None:
    """A server that has come to the limit goes on without a mask."""
    matcher = TokenMatcher(NANO, VOCABULARY, WIDE)
    for token in MANY:
        matcher.take(token)
    held = await HeldAnswer.begin(NANO, VOCABULARY, WIDE, "http://server")
    with pytest.raises(EngineError, match=r"did not hold an answer to its schema: the grammar cannot be followed: "):
        await held.check(MANY)
    again = await HeldAnswer.begin(NANO, VOCABULARY, WIDE, "http://server")
    await again.check(USUAL)


async def test_answers_that_begin_at_once_have_their_grammar_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[AnswerGrammar] = []

    def make(model: Path, vocabulary: int, grammar: AnswerGrammar) -> TokenMatcher:
        made.append(grammar)
        return TokenMatcher(model, vocabulary, grammar)

    monkeypatch.setattr(matchers, "TokenMatcher", make)
    grammar = grammar_of({"const": "asked by many"})
    await asyncio.gather(*(HeldAnswer.begin(NANO, VOCABULARY, grammar, "http://server") for _ in range(32)))
    assert made == [grammar]


def write_package(folder: Path, name: str, files: dict[str, str]) -> None:
    for file, text in {"__init__.py": "", **files}.items():
        (folder / name / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / file).write_text(text)


MAIN = "import sys, json\nprint(json.dumps([__name__, *sys.argv[1:]]))\n"
KNOWN = {"entrypoints/launchers/cli_args.py": "enable_scale_out: bool = False"}
PARTS = {"llguidance": {"_lib.pyi": "class LLMatcher:"}, "xgrammar": {"matcher.py": "def apply_token_bitmask_inplace("}}


def launch(folder: Path, packages: dict[str, dict[str, str]], *arguments: str) -> list[str]:
    for name, files in packages.items():
        write_package(folder, name, files)
    starts = [sys.executable, "-S", "-c", LAUNCH.read_text(), *arguments]
    return json.loads(subprocess.run(starts, cwd=folder, capture_output=True, text=True, check=True).stdout)


def make_vllm(more: dict[str, str]) -> dict[str, dict[str, str]]:
    entries = {f"{one.removeprefix('vllm.').replace('.', '/')}.py": MAIN for one in (ENTRY, SEVERAL)}
    return {"vllm": entries | more}


OURS = ["--return-tokens-as-token-ids", "--structured-outputs-config", SCHEMAS]


@pytest.mark.parametrize(
    ("packages", "added"),
    [
        (make_vllm(KNOWN) | PARTS, [OPEN, *OURS]),
        (make_vllm({}) | PARTS, OURS),  # older ones, whose endpoint is always open
        (make_vllm(KNOWN) | {"llguidance": PARTS["llguidance"]}, ["--tokens-only"]),
        (make_vllm(KNOWN) | PARTS | {"xgrammar": {}}, ["--tokens-only"]),  # a package by that name that does nothing
        (make_vllm(KNOWN) | {"xgrammar": PARTS["xgrammar"]}, ["--tokens-only"]),
    ],
)
def test_a_server_that_lacks_a_part_is_started_for_tokens_only(
    tmp_path: Path, packages: dict[str, dict[str, str]], added: list[str]
) -> None:
    one = [ENTRY, "--model", "/m", "--seed", "3"]
    assert launch(tmp_path, packages, *one) == ["__main__", *added, *one[1:]]
    several = [SEVERAL, "serve", "/m", "--api-server-count", "2"]
    assert launch(tmp_path, packages, *several) == ["__main__", "serve", "/m", *added, *several[3:]]


def test_a_model_without_a_tokenizer_is_served_for_tokens_only(tmp_path: Path) -> None:
    plain = command(tmp_path, VllmConfig(), 512, "bfloat16")
    assert plain[:2] == ["-m", ENTRY]
    assert "--tokens-only" in plain
    (tmp_path / "tokenizer.json").write_text("{}")
    given = command(tmp_path, VllmConfig(args=("--reasoning-parser", "qwen3")), 512, "bfloat16")
    assert given[:3] == ["-c", LAUNCH.read_text(), ENTRY]
    assert "--tokens-only" not in given
    assert given[-2:] == ["--reasoning-parser", "qwen3"]


TEXTS = [
    'start: thought? <[5]> "sum: " NUMBER <[6]>\nthought: /[^<]{0,6}/\nNUMBER: /[0-9]{1,3}/',
    "start: <|im_start|> /(?s:.*)/ <|im_start|> tail?\ntail: /[a-z ]+/",
    'start: (/(?s:.{0,9})/ <[5]> %json {"type": "integer"} <[6]>)*',
    'start: ("ja" | "nein" | "yes ")+',
]


@pytest.mark.parametrize("ends", [ENDS, (2,), (1,), (7, 9)])
@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_masks_over_the_tokenizer_as_vllm_has_it_are_those_over_ours(number: int, ends: tuple[int, ...]) -> None:
    """Thoughts, special tokens, calls in the middle of free text: whatever ends an answer, and whatever vLLM takes for
    the end of a text."""
    grammar = AnswerGrammar(text=f"{UNFORCED}\n{TEXTS[number]}", ends=ends, version=VERSION)
    theirs = from_tokenizer(AutoTokenizer.from_pretrained(NANO), VOCABULARY)
    draw = random.Random(number)
    for _ in range(6):
        ours = TokenMatcher(NANO, VOCABULARY, grammar)
        other = TokenMatcher(NANO, VOCABULARY, grammar)
        other._matcher = LLMatcher(theirs, grammar_from("grammar", close_grammar(grammar)), log_level=0)
        for _ in range(60):
            allowed = read(ours)
            assert allowed == read(other)
            marks = [id for id in (*ends, 5, 6) if id in allowed]
            token = draw.choice(marks if marks and draw.random() < 0.3 else sorted(allowed))
            ours.take(token)
            other.take(token)
            if token in ends:
                break
