"""OpenAI's own client and its legacy completions: raw prompts, as text and as ids."""

import itertools
from typing import Any

import openai
import pytest

from strop.engines.scripted import Breaks
from strop.gateway.template import Renderer
from tests.integration.gateway.stand import Stand, fetch

PROMPT = "What is 3 * 4? 🙂 It is"


async def texts(stream: Any) -> tuple[dict[int, str], dict[int, str], Any]:
    """What a stream adds up to: texts and finish reasons by choice, and usage."""
    said: dict[int, str] = {}
    ended: dict[int, str] = {}
    usage = None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert "\ufffd" not in choice.text
            said[choice.index] = said.get(choice.index, "") + choice.text
            if choice.finish_reason:
                ended[choice.index] = choice.finish_reason
    return said, ended, usage


@pytest.mark.parametrize("stream", [False, True])
async def test_text(stand: Stand, renderer: Renderer, stream: bool) -> None:
    stand.script(" 12 🙂, yes.")
    attempt = await stand.attempt("r1")
    options: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    result: Any = await stand.client(attempt).completions.create(model="any", prompt=PROMPT, **options)
    if stream:
        said, ended, usage = await texts(result)
    else:
        said, ended, usage = {0: result.choices[0].text}, {0: result.choices[0].finish_reason}, result.usage
        assert (result.id, result.object, result.model) == ("r1/1/0", "text_completion", "tiny")
    (turn,) = await stand.turns(attempt)
    assert (said, ended) == ({0: " 12 🙂, yes."}, {0: "stop"})
    assert turn.prompt_ids == renderer.encode(PROMPT), "nothing is put around a raw prompt"
    assert turn.answer == {"role": "assistant", "content": " 12 🙂, yes."}
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(turn.prompt_ids), len(turn.response_ids))
    assert usage.total_tokens == len(turn.ids)
    assert turn.sampling.max_tokens == 200, "the policy's limit, not the API's 16 tokens"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", ["texts", "ids"])
async def test_several_prompts(stand: Stand, renderer: Renderer, form: str, stream: bool) -> None:
    prompts = ["What is 3?", "The weather"]
    ids = [renderer.encode(prompt) for prompt in prompts]
    stand.script(*"abcd")
    attempt = await stand.attempt("r1")
    prompt: Any = prompts if form == "texts" else ids
    result: Any = await stand.client(attempt).completions.create(model="m", prompt=prompt, n=2, stream=stream)
    said = (await texts(result))[0] if stream else {choice.index: choice.text for choice in result.choices}
    turns = await stand.turns(attempt)
    assert said == {turn.choice: turn.answer["content"] for turn in turns}
    assert sorted(said) == [0, 1, 2, 3]
    assert [turn.prompt_ids for turn in turns] == [ids[0], ids[0], ids[1], ids[1]]
    assert [turn.id for turn in turns] == [f"r1/1/{i}" for i in range(4)]
    if not stream:
        assert [choice.index for choice in result.choices] == [0, 1, 2, 3]
        assert result.usage.prompt_tokens == len(ids[0]) + len(ids[1])
        assert result.usage.completion_tokens == sum(len(turn.response_ids) for turn in turns)


async def test_ids(stand: Stand) -> None:
    stand.script("a")
    attempt = await stand.attempt("r1")
    await stand.client(attempt).completions.create(model="m", prompt=[5, 7, 9])
    (turn,) = await stand.turns(attempt)
    assert turn.prompt_ids == [5, 7, 9]
    assert turn.messages == [{"role": "prompt", "content": [5, 7, 9]}]


async def test_token_ids_by_vllms_name(stand: Stand) -> None:
    """For agents that build prompts of ids: what the engine saw and what it sampled, no token of it made anew."""
    stand.script("a", "b", "c")
    attempt = await stand.attempt("r1")
    client, more = stand.client(attempt), {"return_token_ids": True}
    raw: Any = await client.completions.create(model="m", prompt=[5, 7, 9], n=2, extra_body=more)
    chat: Any = await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "Hi"}], extra_body=more
    )
    turns = await stand.turns(attempt)
    told = [*raw.choices, chat.choices[0]]
    assert [choice.token_ids for choice in told] == [turn.response_ids for turn in turns]
    assert [choice.prompt_token_ids for choice in raw.choices] == [[5, 7, 9]] * 2
    assert chat.prompt_token_ids == turns[2].prompt_ids
    with pytest.raises(openai.BadRequestError, match="leave out stream"):
        await client.completions.create(model="m", prompt="x", stream=True, extra_body=more)


@pytest.mark.parametrize("stream", [False, True])
async def test_echo(stand: Stand, stream: bool) -> None:
    stand.script("a", "b", "c", "d")
    attempt = await stand.attempt("r1")
    result: Any = await stand.client(attempt).completions.create(
        model="m", prompt=["What", "It is"], n=2, echo=True, stream=stream
    )
    said = (await texts(result))[0] if stream else {choice.index: choice.text for choice in result.choices}
    assert {i: text[:-1] for i, text in said.items()} == {0: "What", 1: "What", 2: "It is", 3: "It is"}
    assert sorted(text[-1] for text in said.values()) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [0, 1])
async def test_logprobs(stand: Stand, logprobs: int, stream: bool) -> None:
    stand.script("héllo ☃ fine")
    attempt = await stand.attempt("r1")
    result: Any = await stand.client(attempt).completions.create(
        model="m", prompt=PROMPT, logprobs=logprobs, stream=stream
    )
    parts = [chunk.choices[0] async for chunk in result] if stream else result.choices
    found = [part.logprobs for part in parts if part.logprobs]
    tokens = [token for part in found for token in part.tokens]
    offsets = [offset for part in found for offset in part.text_offset]
    (turn,) = await stand.turns(attempt)
    assert [value for part in found for value in part.token_logprobs] == turn.logprobs
    assert len(tokens) == len(offsets) == len(turn.response_ids)
    if logprobs:
        assert [top for part in found for top in part.top_logprobs] == [{token: -0.5} for token in tokens]
    else:
        assert [part.top_logprobs for part in found] == [None] * len(found)
    text = "héllo ☃ fine"
    assert offsets[-1] == len(text)
    assert "\ufffd" in tokens, "a character of several tokens is among them"
    for token, offset in zip(tokens[:-1], offsets, strict=False):
        assert text.startswith(token.replace("\ufffd", ""), offset)


async def test_stop_and_length(stand: Stand) -> None:
    stand.script("one two three", "one two three", "one two three")
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    completion = await client.completions.create(model="m", prompt=PROMPT, stop=["wo"])
    assert (completion.choices[0].text, completion.choices[0].finish_reason) == ("one t", "stop")
    said, ended, _ = await texts(await client.completions.create(model="m", prompt=PROMPT, stop="wo", stream=True))
    assert (said, ended) == ({0: "one t"}, {0: "stop"})
    completion = await client.completions.create(model="m", prompt=PROMPT, max_tokens=2)
    assert completion.choices[0].finish_reason == "length"
    assert [len(turn.response_ids) for turn in await stand.turns(attempt)][2] == 2


async def test_policy_settings_win(stand: Stand) -> None:
    stand.script("a")
    attempt = await stand.attempt("r1")
    asked: Any = {"temperature": 0.3, "top_p": 0.5, "seed": 9, "max_tokens": 50, "best_of": 1, "n": 1}
    extra = {"top_k": 3, "min_p": 0.1}
    await stand.client(attempt).completions.create(model="gpt", prompt=PROMPT, **asked, extra_body=extra)
    (turn,) = await stand.turns(attempt)
    del asked["best_of"]
    assert turn.requested == asked | extra | {"model": "gpt"}
    assert (turn.sampling.temperature, turn.sampling.top_p, turn.sampling.max_tokens) == (1.0, 1.0, 50)


@pytest.mark.parametrize("stream", [False, True])
async def test_react_agent_is_one_exact_line(stand: Stand, stream: bool) -> None:
    """Its prompt grows by its own answers and by what it observed."""
    stand.script("Thought: I compute.\nAction: 3 * 4\n", "Thought: 🙂 once more.\nAction: 12 * 2\n", "Answer: 24")
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    prompt = "Question: what is 3 * 4 * 2?\n"
    for observed in ("12", "24", ""):
        result: Any = await client.completions.create(model="m", prompt=prompt, stream=stream)
        answer = (await texts(result))[0][0] if stream else result.choices[0].text
        prompt += f"{answer}Observation: {observed}\n"
    turns = await stand.turns(attempt)
    for before, after in itertools.pairwise(turns):
        assert (after.parent, after.branch) == (before.id, None)
        said = before.ids[:-1]  # the end of the turn has no meaning within a text
        assert after.shared == len(said)
        assert after.prompt_ids[: after.shared] == said


@pytest.mark.parametrize(
    ("stop", "written"),
    [
        ("Observation:", "Observation: 12\n"),
        ("\nObservation:", "\nObservation: 12\n"),
        ("\nObs", "\nObservation: 12\n"),
        ("\nObs", " or not?\n"),
    ],
)
async def test_stop_strings_are_not_said_twice(stand: Stand, renderer: Renderer, stop: str, written: str) -> None:
    """A stop string was sampled, but not shown to the agent: the prompt has what the agent wrote, and nothing more."""
    stand.script("Thought: I compute.\nAction: 3 * 4\nObservation: 13\n", "Answer: 12")
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    prompt = "Question: what is 3 * 4?\n"
    first = await client.completions.create(model="m", prompt=prompt, stop=[stop])
    prompt += first.choices[0].text + written
    await client.completions.create(model="m", prompt=prompt, stop=[stop])
    before, after = await stand.turns(attempt)
    assert renderer.decode(after.prompt_ids) == prompt
    assert (after.parent, after.branch) == (before.id, None)
    assert renderer.decode(after.prompt_ids[: after.shared]).startswith("Question: what is 3 * 4?\nThought: I compute.")
    assert after.prompt_ids[: after.shared] == before.ids[: after.shared]


async def test_prompt_that_ends_like_an_answer(stand: Stand, renderer: Renderer) -> None:
    stand.script("", "b")
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    await client.completions.create(model="m", prompt="a<|im_end|>")
    await client.completions.create(model="m", prompt="a<|im_end|>c")
    _, after = await stand.turns(attempt)
    assert renderer.decode(after.prompt_ids) == "a<|im_end|>c"


async def test_nothing_is_taken_out_of_a_raw_answer(stand: Stand) -> None:
    said = '<think>hm</think> so\n<tool_call>{"name": "now", "arguments": {}}</tool_call> '
    stand.script(said)
    attempt = await stand.attempt("r1")
    completion = await stand.client(attempt).completions.create(model="m", prompt=PROMPT)
    assert completion.choices[0].text == said
    (turn,) = await stand.turns(attempt)
    assert turn.answer == {"role": "assistant", "content": said}


async def test_ids_that_go_on_from_an_answer(stand: Stand) -> None:
    stand.script("a b c", "d", "e")
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    await client.completions.create(model="m", prompt=[5, 7, 9])
    (first,) = await stand.turns(attempt)
    await client.completions.create(model="m", prompt=[*first.ids[:-1], 5])
    await client.completions.create(model="m", prompt=[5, 7, 8])
    _, second, third = await stand.turns(attempt)
    assert (second.parent, second.branch, second.shared) == (first.id, None, len(first.ids) - 1)
    assert (third.branch, third.shared) == ("new_conversation", 2)


@pytest.mark.parametrize("id", [398, 2**31, 2**40, 2**70])
async def test_ids_that_are_no_tokens(stand: Stand, id: int) -> None:
    attempt = await stand.attempt("r1")
    for prompt in ([5, id], [[5], [5, id]]):
        body = {"model": "m", "prompt": prompt}
        status, answer = await fetch(f"{stand.url(attempt)}/completions", body, key=attempt.key)
        assert (status, answer["error"]["param"]) == (400, "prompt")
        assert f"{id} is not a token of this model. Fix: use ids from 0 to 397" in answer["error"]["message"]
    assert await stand.store.turns("r1") == []
    assert len(await stand.store.events("r1")) == 2


async def test_a_grown_prompt_survives_a_restart(stand: Stand) -> None:
    stand.script("Action: 3\n", "Answer: 4")
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    first = await client.completions.create(model="m", prompt=PROMPT)
    stand.gateway.forget("r1")
    await client.completions.create(model="m", prompt=f"{PROMPT}{first.choices[0].text}so")
    before, after = await stand.turns(attempt)
    assert (after.parent, after.branch, after.shared) == (before.id, None, len(before.ids) - 1)


@pytest.mark.parametrize(
    ("change", "param", "sentence"),
    [
        ({"suffix": "x"}, "suffix", "suffix"),
        ({"best_of": 3}, "best_of", "ask for them with n"),
        ({"logprobs": 2}, "logprobs", "use 0 or 1"),
        ({"logprobs": 0, "echo": True}, "echo", "not with logprobs"),
        ({"prompt": [5, 7], "echo": True}, "echo", "send its text"),
        ({"logit_bias": {"7": 1}}, "logit_bias", "only {} is served"),
        ({"presence_penalty": -3}, "presence_penalty", ">= -2"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "is served"),
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"n": 129}, "n", "<= 128"),
        ({"n": 65, "prompt": ["a", "b"]}, "prompt", "130 answers"),
        ({"prompt": ""}, "prompt", "never empty"),
        ({"prompt": []}, "prompt", "never empty"),
        ({"prompt": [[]]}, "prompt", "never empty"),
        ({"prompt": [3, -1]}, "prompt", ">= 0"),
        ({"prompt": [3, "a"]}, "prompt", "Fix: give text"),
        ({"prompt": [2.5]}, "prompt", "Fix: give text"),
        ({"prompt": {"a": 1}}, "prompt", "Fix: give text"),
        ({"prompt": None}, "prompt", "required"),
        ({"stop": ""}, "stop", "empty"),
        ({"stream_options": {"include_x": 1}}, "stream_options.include_x", "not served"),
        ({"use_beam_search": True}, "use_beam_search", "not served"),
        ({"messages": []}, "messages", "not served"),
    ],
)
async def test_refusals(stand: Stand, change: dict[str, Any], param: str, sentence: str) -> None:
    attempt = await stand.attempt("r1")
    body = {"model": "m", "prompt": PROMPT} | change
    status, answer = await fetch(f"{stand.url(attempt)}/completions", body, key=attempt.key)
    assert status == 400
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert (answer["error"]["type"], answer["error"]["param"]) == ("invalid_request_error", param)
    assert sentence in answer["error"]["message"]
    (event,) = await stand.store.events("r1")
    assert (event.kind, event.data["param"]) == ("error", param)
    assert await stand.store.turns("r1") == []


async def test_errors_through_the_client(stand: Stand) -> None:
    stand.script(Breaks("one two"))
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    with pytest.raises(openai.BadRequestError, match="only the sampled token's logprob is known") as caught:
        await client.completions.create(model="m", prompt=PROMPT, logprobs=5)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "logprobs")
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        await client.completions.create(model="m", prompt="ab" * 2000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIError, match="broke off"):
        await texts(await client.completions.create(model="m", prompt=PROMPT, stream=True))
    (turn,) = await stand.turns(attempt)
    assert turn.finish == "error"
    assert len(await stand.store.events("r1")) == 3
