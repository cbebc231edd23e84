"""The model behind every agent here. It decides by what the prompt says: its answers fit whatever way an agent goes."""

import json
from typing import Any

from strop.engines.scripted import ScriptedRequest

PEOPLE = {"Rome": 2748109, "Oslo": 709037}
TOGETHER = sum(PEOPLE.values())
ANSWERS = [f"Together {TOGETHER} people live there.", "Rome is bigger than Oslo."]

TYPED = "Name the bigger of Rome and Oslo, and say whether you are sure."
VERDICT = {"bigger": "Rome", "sure": True}

NOTE = "seventeen-owls"

THOUGHT = "<think>\nThe tools know more than I do.\n</think>\n\n"


def play(asked: ScriptedRequest, *, quiet: bool = False) -> str:
    """Look up what is missing, all at once; add what the tools said; answer. The numbers are the tools' own: nothing
    is added or answered before a tool has said them. `quiet`: nothing is said beside calls."""
    told, _, begun = asked.prompt.rpartition("<|im_start|>assistant\n")
    in_code, answer = "<code>" in told, ANSWERS["Which of the two is bigger?" in told]
    missing = [city for city, people in PEOPLE.items() if str(people) not in told]
    if missing:
        calls = [("lookup", {"city": city}) for city in missing]
    elif str(TOGETHER) not in told:
        calls = [("add", dict(zip("ab", PEOPLE.values(), strict=True)))]
    elif "final_answer" in told:
        calls = [("final_answer", {_first_property(told, "final_answer"): answer})]
    else:
        return answer
    if in_code:
        lines = "\n".join(in_python(*call) for call in calls)
        return f"Thought: the tools know.\n<code>\n{lines}\n</code>"
    names = [tool["name"] for tool in list_tools(told)]
    calls = [(next((full for full in names if full.endswith(name)), name), given) for name, given in calls]
    lead = ["Let me look it up."] if missing and not quiet else []
    said = "\n".join([*lead, *(in_json(*call) for call in calls)])
    if begun:  # a call is demanded and begun for the model
        said = said[said.index("<tool_call>") :]
        assert said.startswith(begun), begun
    return said.removeprefix(begun)


def in_json(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def in_python(name: str, arguments: dict[str, Any]) -> str:
    call = f"{name}({', '.join(map(repr, arguments.values()))})"
    return call if name == "final_answer" else f"print({call})"


def answer(asked: ScriptedRequest, *, quiet: bool = False, form: str = "%s") -> str | None:
    """The same, and what a client asks for that wants an answer of a type: where a grammar holds the answer to the type
    nothing is said, and the answer is drawn. `form` is what the client wants around it."""
    if TYPED not in asked.prompt:
        return play(asked, quiet=quiet)
    if asked.sampling.grammar is not None and "bigger" in asked.sampling.grammar.text:
        return None
    begun = asked.prompt.rpartition("<|im_start|>assistant\n")[2]
    named = [tool["name"] for tool in list_tools(asked.prompt) if "bigger" in json.dumps(tool.get("parameters"))]
    said = in_json(named[-1], VERDICT) if named else form % json.dumps(VERDICT)
    return said.removeprefix(begun)


def list_tools(prompt: str) -> list[dict[str, Any]]:
    """The functions that the prompt shows, as chatml's template writes them."""
    _, _, rest = prompt.partition("\nTools: ")
    decoder, found = json.JSONDecoder(), list[dict[str, Any]]()
    while rest.startswith("{"):
        tool, end = decoder.raw_decode(rest)
        found.append(tool["function"])
        rest = rest[end:].lstrip(" ")
    return found


def _first_property(prompt: str, name: str) -> str:
    """What a tool's first argument is called."""
    parameters = next((tool["parameters"] for tool in list_tools(prompt) if tool["name"] == name), None)
    return next(iter(parameters["properties"])) if parameters else "answer"


def read_note(asked: ScriptedRequest, name: str, arguments: dict[str, Any]) -> str:
    """A coding agent's model: it reads the note with the one tool, and says what it has read."""
    if NOTE in asked.prompt:
        return f"The note says {NOTE}."
    if f'"name": "{name}"' in asked.prompt:
        return "I will look.\n" + in_json(name, arguments)
    return "A note"


def submit(asked: ScriptedRequest) -> str:
    """mini-swe-agent's model: it reads the note, and ends by a command."""
    end = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && "
    return "I will look.\n" + in_json("bash", {"command": f"{end if NOTE in asked.prompt else ''}cat note.txt"})


def edit(asked: ScriptedRequest) -> str:
    """aider's model: it edits the note by text."""
    return f"note.txt\n```\n<<<<<<< SEARCH\n{NOTE}\n=======\nowls\n>>>>>>> REPLACE\n```\n"
