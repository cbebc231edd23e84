"""What a chat looks like: on a terminal, as plain lines in a pipe, as JSON for machines."""

from __future__ import annotations

import sys
from typing import Any

from rich.text import Text

from strop.cli.output import make_console, print_json
from strop.cli.rollouts import show_event, show_message
from strop.errors import StropError
from strop.monitor.screen import Screen
from strop.printable import escape_text
from strop.run.chat import ChatAnswer, Shown, TextDelta, ToolCallDone, ToolCallStarted, TurnRecorded
from strop.types import Event, Rollout, Turn


class ChatLines:
    """For pipes: answers and calls as plain text on stdout, errors on stderr, nothing else."""

    def __init__(self) -> None:
        self.asked = self.failed = False
        self._begun = False

    def show(self, what: Shown) -> None:
        """Something happened: said at once."""
        match what:
            case TextDelta(text, thought=False):
                self._write(text)
                self._begun = True
            case TextDelta() | ToolCallStarted():
                pass
            case ToolCallDone(name, arguments, result):
                self._end_line()
                self._write(f"{name}({arguments}) → {result}\n")
            case TurnRecorded(turn, messages):
                for message in [*messages, turn.answer]:
                    show_message(make_console(), message)
            case Event():
                show_event(make_console(), what)

    def show_answer(self, answer: ChatAnswer, context: int) -> None:
        self._end_line()
        if not answer.text and not answer.calls:
            self._write("\n")  # one line at least, so that answers and questions can be counted

    def show_end(self, rollout: Rollout, answer: ChatAnswer) -> None:
        if rollout.cause:
            self.error(StropError(f"the agent failed ({rollout.cause}): {_last_line(rollout)}"))

    def error(self, error: StropError) -> None:
        self._end_line()
        self.failed = True
        print(f"strop: {error}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """What only people want to know."""

    def _end_line(self) -> None:
        if self._begun:
            self._write("\n")
        self._begun = False

    def _write(self, text: str) -> None:
        sys.stdout.write(escape_text(text))
        sys.stdout.flush()


class ChatJson(ChatLines):
    """One object per answer or error."""

    def show(self, what: Shown) -> None:
        pass

    def show_answer(self, answer: ChatAnswer, context: int) -> None:
        last = answer.turns[-1]
        said: dict[str, Any] = {"answer": answer.text, "finish": last.finish, "calls": answer.calls}
        if thought := last.answer.get("reasoning_content"):
            said["reasoning"] = thought
        print_json(said | {"rollout": answer.rollout, "turns": [_facts(turn) for turn in answer.turns]})

    def show_end(self, rollout: Rollout, answer: ChatAnswer) -> None:
        said = {"answer": answer.text, "status": rollout.status, "cause": rollout.cause, "detail": rollout.detail}
        turns = [_facts(turn) | {"messages": turn.messages, "answer": turn.answer} for turn in answer.turns]
        print_json(said | {"rollout": rollout.id, "turns": turns})
        self.failed = self.failed or rollout.cause is not None

    def error(self, error: StropError) -> None:
        self.failed = True
        print_json({"error": str(error)})


class ChatTerminal(ChatLines):
    """For people: answers as they are sampled, and a dim line below each that says how they came about."""

    def __init__(self) -> None:
        super().__init__()
        self.out = Screen(highlight=False)
        self.stopped = False  # by Ctrl-C, a moment ago
        self._thinking = False

    def show(self, what: Shown) -> None:
        match what:
            case TextDelta(text, thought):
                if self._thinking and not thought:
                    self._end_line()
                self._begun, self._thinking = True, thought
                style = "dim italic" if thought else ""
                self.out.print(Text(text, style=style), end="", soft_wrap=True)
            case ToolCallStarted(name, arguments):
                self._end_line()
                self._begun = True
                self.out.print(Text(f"{name}({arguments})", style="magenta"), end="", soft_wrap=True)
            case ToolCallDone(result=result):
                self.out.print(Text.assemble((" → ", "dim"), result), soft_wrap=True)
                self._begun = False
            case TurnRecorded(turn, messages):
                for message in [*messages, turn.answer]:
                    show_message(self.out, message)
                self.note(format_summary([turn]))
            case Event():
                show_event(self.out, what)

    def show_answer(self, answer: ChatAnswer, context: int) -> None:
        self._end_line()
        self.note(format_summary(answer.turns))
        if answer.open:
            self.note("it went on calling tools and was not asked again; --rounds allows for more")
        if len(answer.turns[-1].ids) >= context:
            self.note(f"the context of {context} tokens is full: /reset begins another conversation")
        self.out.print()

    def show_end(self, rollout: Rollout, answer: ChatAnswer) -> None:
        if rollout.cause:
            self.error(StropError(f"the agent failed ({rollout.cause}): {_last_line(rollout)}"))
        else:
            self.out.print()

    def error(self, error: StropError) -> None:
        self._end_line()
        self.out.print(Text(f"{error}\n", style="red"), soft_wrap=True)

    def show_interrupt(self) -> None:
        self.stopped = self._begun = True  # the terminal has written ^C
        self.note("stopped: the question and what was answered are not part of the conversation\n")

    def note(self, text: str) -> None:
        self._end_line()
        self.out.print(Text(text, style="dim"), soft_wrap=True)

    def _end_line(self) -> None:
        if self._begun:
            self.out.print()
        self._begun = self._thinking = False


def format_summary(turns: list[Turn]) -> str:
    """How an answer came about, in a line."""
    tokens = sum(len(turn.response_ids) for turn in turns)
    seconds = sum(turn.ended - turn.started for turn in turns)
    several = f" in {len(turns)} turns" if len(turns) > 1 else ""
    parts = [f"{tokens} tokens{several}", f"{tokens / max(seconds, 1e-9):.0f} tokens/s", turns[-1].finish]
    return " · ".join([*parts, format_exactness(turns)])


def format_exactness(turns: list[Turn]) -> str:
    """How the prompts stood to what was said before, token for token."""
    for turn in turns:
        if turn.branch:
            return f"a branch ({turn.branch}): {turn.shared} of {len(turn.prompt_ids)} prompt tokens kept"
    if turns[-1].parent is None:
        return "a new session"
    return f"extends the session exactly ({turns[-1].shared} tokens kept)"


def _facts(turn: Turn) -> dict[str, Any]:
    """What a machine may want to know of a turn."""
    return {
        "id": turn.id,
        "agent": turn.agent,
        "prompt_tokens": len(turn.prompt_ids),
        "tokens": len(turn.response_ids),
        "seconds": turn.ended - turn.started,
        "finish": turn.finish,
        "parent": turn.parent,
        "shared": turn.shared,
        "branch": turn.branch,
    }


def _last_line(rollout: Rollout) -> str:
    return (rollout.detail or "").strip().rpartition("\n")[2]
