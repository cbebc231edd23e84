"""A model that searches until it can answer.

    question    Where was the director of The Silent Harbour born?
    model       search(query="director of The Silent Harbour")
    tool        Doc 1 (Title: The Silent Harbour) The Silent Harbour is a 1967 film directed by Nils Falk.
    model       search(query="Nils Falk born")
    tool        Doc 1 (Title: Nils Falk) Nils Falk is a film director who was born in Calder.
    model       Calder

`agent` is for models that know how to call tools; `small` shows a model that hardly does two examples, and less of each
passage. Both search where the task says: on a server (`search`) or among the question's own paragraphs. The variable
SEARCH_URL, a server's address, wins over both: with it `strop chat RUN --agent` searches whatever corpus is served.
"""

import json
import os
from collections.abc import Callable
from typing import Any

from paragraphs import Paragraphs

import strop
from strop.tools.search import Search


def tools(*, topk: int, longest: int) -> Callable[[strop.Task], Any]:
    """`search` and `access` for one question. They say the same in both places."""

    def made(task: strop.Task) -> Any:
        url = os.environ.get("SEARCH_URL") or task.data.get("search")
        if not url:
            return Paragraphs(task.data["paragraphs"], topk=topk, longest=longest)
        server = Search(url, topk=topk, longest=longest)
        return [server.search, server.access]

    return made


agent = strop.ToolAgent(
    tools=tools(topk=3, longest=4000),
    system=(
        "Answer the question with what you find. Search for one thing at a time, as often as you need, and access a "
        "page where a passage is not enough. When you know, reply with nothing but the answer: a name, a date, a "
        "number, yes or no."
    ),
    max_turns=8,
    seconds=600,
)


# -- for small models --------------------------------------------------------------------------------------------------


def example(number: int, question: str, found: str, answer: str) -> list[dict[str, Any]]:
    """A question, the search for it, what was found, and the answer."""
    call = {"name": "search", "arguments": json.dumps({"query": question})}
    return [
        {"role": "user", "content": f"Search: {question}"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": f"e{number}", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": f"e{number}", "content": found},
        {"role": "assistant", "content": answer},
    ]


EXAMPLES = [
    *example(
        1,
        "Who wrote the novel that Blade Runner is based on?",
        "Doc 1 (Title: Blade Runner) Blade Runner is a 1982 film by Ridley Scott, based on a novel by Philip K. Dick.",
        "Philip K. Dick",
    ),
    *example(
        2,
        "Which river is longer, the Rhine or the Elbe?",
        "Doc 1 (Title: Rhine) The Rhine is a river of 1,230 km.\nDoc 2 (Title: Elbe) The Elbe is a river of 1,094 km.",
        "Rhine",
    ),
]


def shown(task: strop.Task) -> list[dict[str, Any]]:
    return [*EXAMPLES, {"role": "user", "content": f"Search: {task.data['question']}"}]


small = strop.ToolAgent(
    tools=tools(topk=2, longest=300),
    system="Search for each question, then answer it in a few words.",
    prompt=shown,
    max_turns=3,
    seconds=600,
)
