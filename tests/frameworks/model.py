"""The model behind every agent here. It decides by what the prompt says: its answers fit whatever way an agent goes."""

import json
from typing import Any

from strop.engines.scripted import ScriptedRequest

PEOPLE = {"Rome": 2748109, "Oslo": 709037}
TOGETHER = sum(PEOPLE.values())
ANSWERS = [f"Together {TOGETHER} people live there.", "Rome is bigger than Oslo."]

THOUGHT = "<think>\nThe tools know more than I do.\n</think>\n\n"


def play(asked: ScriptedRequest) -> str:
    """Look up what is missing, all at once; add what the tools said; answer. The numbers are the tools' own: nothing
    is added or answered before a tool has said them."""
    told, _, begun = asked.prompt.rpartition("<|im_start|>assistant\n")
    in_code, answer = "<code>" in told, ANSWERS["Which of the two is bigger?" in told]
    missing = [city for city, people in PEOPLE.items() if str(people) not in told]
    if missing:
        calls = [("lookup", {"city": city}) for city in missing]
    elif str(TOGETHER) not in told:
        calls = [("add", dict(zip("ab", PEOPLE.values(), strict=True)))]
    elif "final_answer" in told:
        calls = [("final_answer", {"answer": answer})]
    else:
        return answer
    if in_code:
        lines = "\n".join(in_python(*call) for call in calls)
        return f"Thought: the tools know.\n<code>\n{lines}\n</code>"
    said = "\n".join([*(["Let me look it up."] if missing else []), *(in_json(*call) for call in calls)])
    if begun:  # a call is demanded and begun for the model
        said = said[said.index("<tool_call>") :]
        assert said.startswith(begun), begun
    return said.removeprefix(begun)


def in_json(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def in_python(name: str, arguments: dict[str, Any]) -> str:
    call = f"{name}({', '.join(map(repr, arguments.values()))})"
    return call if name == "final_answer" else f"print({call})"
