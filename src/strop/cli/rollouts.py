"""`strop rollouts`."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import asdict
from rich.console import Console
from rich.text import Text

from strop.cli import keys, rollout_list
from strop.cli.commands import Commands
from strop.cli.output import find_last_line, format_status, make_console, print_json
from strop.config import MAIN, PolicyConfig, resolve_policies
from strop.errors import PlaceError, StropError
from strop.monitor import console as views
from strop.monitor.transcripts import (
    Message,
    find_new_messages,
    find_new_tools,
    format_role,
    format_tokens,
    format_tool,
    list_message_texts,
)
from strop.run.folder import RunFolder
from strop.store import open_store
from strop.store.base import Store
from strop.store.sqlite import is_outdated
from strop.types import TERMINAL, Attempt, Event, Rollout, Turn

Decode = Callable[[Turn, Sequence[int]], str]


def add(commands: Commands) -> None:
    rollouts = commands.add_parser("rollouts", help="list rollouts, show one with its turns and logs, or follow them")
    place = "a run's folder, postgresql://..., or the address of `strop serve` (default: $STROP_URL, or runs/demo)"
    rollouts.add_argument("run", nargs="?", default=os.environ.get("STROP_URL", "runs/demo"), help=place)
    rollouts.add_argument("id", nargs="?", help="the rollout to show")
    keys.add(rollouts)
    rollout_list.add(rollouts)
    rollouts.add_argument("--limit", type=_positive, default=50, help="how many to list (default: 50)")
    rollouts.add_argument("--attempt", type=_positive, help="of one rollout: this attempt (default: the last)")
    rollouts.add_argument(
        "--prompt", action="store_true", help="of one rollout: each turn's prompt, as the model saw it"
    )
    rollouts.add_argument("--follow", action="store_true", help="go on as things happen, until interrupted")
    rollouts.add_argument("--json", action="store_true", help="one JSON object per line")
    rollouts.set_defaults(command=_rollouts)


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


# -- rollouts ----------------------------------------------------------------------------------------------------------


def _rollouts(arguments: argparse.Namespace) -> int:
    known = os.environ.get("STROP_URL")
    if known and arguments.id is None and "://" not in arguments.run and not Path(arguments.run).exists():
        arguments.run, arguments.id = known, arguments.run  # an id alone, since it is known where to look
    return asyncio.run(_look(arguments))


async def _look(arguments: argparse.Namespace) -> int:
    if arguments.prompt and not arguments.id:
        raise StropError("--prompt shows the prompts of one rollout. Fix: add its id after the run")
    store = await open_run(arguments.run, keys.read_key(arguments))
    try:
        if arguments.id:
            show = _follow_one if arguments.follow else _show_one
        else:
            show = rollout_list.follow if arguments.follow else rollout_list.show
        await show(store, arguments)
    except asyncio.CancelledError:  # Ctrl-C: that is how following ends
        if not arguments.follow:
            raise
    finally:
        await store.close()
    return 0


async def open_run(where: str, key: str | None = None) -> Store:
    """The store of a run's folder, wherever its configuration says it is, or of an address."""
    folder = Path(where)
    if "://" not in where and (folder / "config.json").exists() and (url := RunFolder.config(folder).store.url):
        where = url
    if "://" not in where and not (folder / "store.sqlite").exists() and not where.endswith(".sqlite"):
        RunFolder.config(folder)  # a sentence, since there is no run
    if "://" not in where and is_outdated(folder / "store.sqlite") and RunFolder.is_held(folder):
        raise PlaceError(
            f"an older strop is at work in {folder}, and reading its store with this one would change it. Fix: wait "
            "until it has ended, or read it with that one"
        )
    return await open_store(where, key=key, create=False)


async def _show_one(store: Store, arguments: argparse.Namespace) -> None:
    rollout = await store.get(arguments.id)
    attempts = await store.attempts(rollout.id)
    number = arguments.attempt
    if number is not None and number > len(attempts):
        raise StropError(f"rollout {rollout.id!r} has {len(attempts)} attempts: there is no attempt {number}")
    turns, events = await store.turns(rollout.id, attempt=number), await store.events(rollout.id, attempt=number)
    decode = await _decoder(store, arguments)
    if arguments.json:
        keyless = [{name: value for name, value in asdict(one).items() if name != "key"} for one in attempts]
        about = {"rollout": rollout, "attempts": keyless, "turns": turns, "events": events}
        print_json(about | ({"prompts": {turn.id: decode(turn, turn.prompt_ids) for turn in turns}} if decode else {}))
    else:
        _transcript(rollout, turns, events, decode)
        _attempts(attempts)


async def _decoder(store: Store, arguments: argparse.Namespace) -> Decode | None:
    """What turns a prompt's ids into text, if prompts are to be shown: the tokenizer of the run's model."""
    if not arguments.prompt:
        return None
    from strop.gateway.template import Renderer
    from strop.models.names import prepare_folder

    folder = Path(arguments.run)
    if "://" not in arguments.run and (folder / "config.json").exists():
        policies = {name: own.policy for name, own in resolve_policies(RunFolder.config(folder)).items()}
    else:
        policies = {policy.name: PolicyConfig(model=policy.model) for policy in await store.policies()}
    if not policies:
        raise StropError(f"{arguments.run} does not say which model its rollouts are of: --prompt needs its tokenizer")

    def load(policy: PolicyConfig) -> Renderer:
        return Renderer.from_folder(prepare_folder(policy))

    renderers = {name: await asyncio.to_thread(load, policy) for name, policy in policies.items()}
    any_other = next(iter(renderers.values()))
    return lambda turn, ids: renderers.get(turn.policy, any_other).decode(ids)


async def _follow_one(store: Store, arguments: argparse.Namespace) -> None:
    """Its turns and events as they come, until it has ended."""
    turns: set[str] = set()
    events: set[tuple[int, str]] = set()
    out, decode = make_console(), await _decoder(store, arguments)
    while True:
        rollout = await store.get(arguments.id)
        number = arguments.attempt or max(rollout.attempts, 1)
        for turn in await store.turns(rollout.id, attempt=number):
            if turn.id not in turns:
                turns.add(turn.id)
                print_json(turn) if arguments.json else _turn(out, turn, decode)
        for event in await store.events(rollout.id, attempt=number):
            if (event.attempt, event.id) not in events:
                events.add((event.attempt, event.id))
                print_json(event) if arguments.json else show_event(out, event)
        if rollout.status in TERMINAL:
            print_json(rollout) if arguments.json else _ending(out, rollout)
            return
        await asyncio.sleep(0.3)


def _transcript(rollout: Rollout, turns: list[Turn], events: list[Event], decode: Decode | None) -> None:
    out = make_console()
    out.print(Text.assemble((rollout.id, "bold"), f"  task {rollout.task.id}  ", format_status(rollout)))
    for reward in rollout.rewards:
        target = f" (turn {reward.turn})" if reward.turn else f" (agent {reward.agent})" if reward.agent else ""
        out.print(f"  {reward.name} = {views.format_figure(reward.value)}{target}", markup=False)
    if rollout.tokens:
        out.print(f"  {format_tokens(rollout.tokens.values())}", markup=False)
    offered = find_new_tools(turns)
    for new, turn in find_new_messages(turns):
        for number, tool in enumerate(offered.get(turn.id, ())):
            out.print(Text.assemble((f"{'tools' if number == 0 else '':>9}  ", "cyan"), (format_tool(tool), "magenta")))
        for message in new:
            show_message(out, message)
        _turn(out, turn, decode, rollout.tokens.get(turn.id))
    for event in events:
        show_event(out, event)
    if rollout.detail:
        out.print(Text(rollout.detail, style="red"))


def _turn(out: Console, turn: Turn, decode: Decode | None, tokens: Mapping[str, int] | None = None) -> None:
    """`tokens` says what became of them, where a step has taken it."""
    who = turn.agent if turn.policy in (turn.agent, MAIN) else f"{turn.agent} (policy {turn.policy})"
    how = f"branch: {turn.branch}" if turn.branch else f"{turn.shared} of {len(turn.prompt_ids)} prompt tokens shared"
    out.print(
        Text(
            f"── turn {turn.id} · {who} · version {turn.versions[0][1] if turn.versions else '-'} · "
            f"{format_tokens([tokens]) if tokens else f'{len(turn.response_ids)} tokens'} · {turn.finish} · {how}",
            style="dim",
        )
    )
    if decode:
        _prompt(out, turn, decode)
    show_message(out, turn.answer)


def _prompt(out: Console, turn: Turn, decode: Decode) -> None:
    """The prompt as the engine was given it; without what is the parent turn's, word for word."""
    if not turn.prompt_ids:
        return out.print(Text(f"{'prompt':>9}  an outside model's, whose tokens are not known", style="dim"))
    known = turn.shared if turn.parent else 0
    if known:
        told = f"{known} tokens of turn {turn.parent}, then:"
        out.print(Text.assemble((f"{'prompt':>9}  ", "cyan"), (told, "dim")))
    for number, line in enumerate(decode(turn, turn.prompt_ids[known:]).split("\n")):
        out.print(Text.assemble((f"{'prompt' if number == 0 and not known else '':>9}  ", "cyan"), line))


def show_event(out: Console, event: Event) -> None:
    if event.kind == "message" and isinstance(text := event.data.get("text"), str):
        stream = str(event.data.get("stream", "message"))
        for number, line in enumerate(text.rstrip("\n").split("\n")):
            out.print(Text.assemble((f"{stream if number == 0 else '':>9}  ", "dim"), line))
    else:
        out.print(Text(f"event {event.kind}: {msgspec.json.encode(event.data).decode()}", style="dim"))


def _ending(out: Console, rollout: Rollout) -> None:
    rewards = ", ".join(f"{reward.name} {views.format_figure(reward.value)}" for reward in rollout.rewards)
    out.print(Text.assemble(format_status(rollout), f"  {rewards}" if rewards else ""))
    if rollout.detail:
        out.print(Text(rollout.detail, style="red"))


def _attempts(attempts: list[Attempt]) -> None:
    """Who ran it, where there is more to say than that it went well the first time."""
    out = make_console()
    for attempt in attempts if len(attempts) > 1 else ():
        lasted = f"{attempt.ended - attempt.started:.1f} s" if attempt.ended else "running"
        why = f" · {attempt.cause}: {find_last_line(attempt.detail)}" if attempt.cause else ""
        out.print(Text(f"attempt {attempt.number} · {attempt.runner} · {lasted}{why}", style="dim"))


def show_message(out: Console, message: Message) -> None:
    for number, text in enumerate(list_message_texts(message) or [""]):
        style = "magenta" if number or not message.get("content") else ""  # calls come after the text
        out.print(Text.assemble((f"{format_role(message) if number == 0 else '':>9}  ", "cyan"), (text, style)))
