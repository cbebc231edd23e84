"""`strop chat`: talk to a model, to a run's newest checkpoint, or to a run's agent."""

from __future__ import annotations

import argparse
import secrets
import shutil
import sys
import time
from pathlib import Path
from typing import Any, cast

from msgspec.structs import replace

from strop import config as configs
from strop import demo
from strop.cli.commands import Commands
from strop.config import (
    Config,
    EngineConfig,
    GatewayConfig,
    LearnerConfig,
    PolicyConfig,
    SamplingConfig,
    answers_outside,
    replace_models,
    resolve_policies,
    trained_policies,
)
from strop.errors import ConfigError
from strop.learner.spawn import start_ahead
from strop.run.folder import BEST, RunFolder, find_parts
from strop.run.prompts.pool import read_prompts, replace_prompts
from strop.run.start_from import choose_policy


def add(commands: Commands) -> None:
    chat = commands.add_parser("chat", help="talk to a model, to a run's newest checkpoint, or to its agent")
    chat.add_argument("target", metavar="MODEL|RUN", help="strop/nano, a model's folder or name, or RUN[:STEP]")
    chat.add_argument("--best", action="store_true", help="of a run: the checkpoint with the best score instead")
    chat.add_argument("--policy", default="", metavar="NAME", help="of a run with several policies: talk to this one")
    chat.add_argument("--agent", action="store_true", help="of a run: its agent, with what you type as the task")
    chat.add_argument(
        "--tools",
        action="append",
        default=[],
        metavar="FILE.py:NAME[,NAME]",
        help="functions the model may call (default: none; of the demo, its calculator; --tools none leaves that out)",
    )
    chat.add_argument("--rounds", type=int, default=8, help="how often it may go on calling for an answer (default: 8)")
    chat.add_argument("--system", default="", metavar="TEXT", help="a system message")
    chat.add_argument("--temperature", type=float, help="0 is greedy (default: 1, or how the run evaluates)")
    chat.add_argument("--max-tokens", type=int, help="most tokens of an answer (default: 1024, or as the run has it)")
    chat.add_argument("--seed", type=int, help="the same answers to the same questions (default: others each time)")
    chat.add_argument("--folder", help="where it is recorded (default: runs/chat/TIME)")
    chat.add_argument("--set", action="append", default=[], metavar="a.b=c", help="any setting; see `strop config`")
    chat.add_argument("--json", action="store_true", help="one JSON object per answer")
    chat.set_defaults(command=_chat)


def _chat(arguments: argparse.Namespace) -> int:
    run = run_of(arguments.target)
    if arguments.rounds < 1:
        raise ConfigError("--rounds is how often the model may be asked for one answer: at least 1")
    if arguments.agent and run is None:
        raise ConfigError(f"--agent needs a run, and {arguments.target} is not one. Fix: give a run's folder")
    if arguments.policy and (run is None or arguments.agent):
        why = "its agent is answered by all of them" if arguments.agent else f"{arguments.target} is not a run"
        raise ConfigError(f"--policy chooses one policy of a run, and {why}. Fix: leave it out")
    if arguments.agent and (arguments.tools or arguments.system):
        raise ConfigError("an agent has its own tools and prompts. Fix: leave out --tools and --system, or --agent")
    config = read_config(arguments)
    start_ahead(config, train=False)
    arguments.tools = _tools(arguments, config)
    if len(config.prompts) == 1 and not arguments.agent:  # a run's agent puts it into its requests itself
        arguments.system = arguments.system or next(iter(config.prompts.values())).text
    from strop.cli.chat_loop import talk
    from strop.cli.chat_view import ChatJson, ChatLines, ChatTerminal

    people = sys.stdin.isatty() and sys.stdout.isatty() and not arguments.json
    view = ChatTerminal() if people else ChatJson() if arguments.json else ChatLines()
    folder = Path(arguments.folder) if arguments.folder else choose_folder()
    talk(config, folder, view, arguments, run=run)
    if not view.asked and not arguments.folder:
        shutil.rmtree(folder, ignore_errors=True)  # nothing was said
    return int(view.failed)


def _tools(arguments: argparse.Namespace, config: Config) -> list[str]:
    """Those that are asked for. The demo's model was trained with one, and is lost without it."""
    if arguments.tools == ["none"]:
        return []
    demos = config.agent == demo.AGENT and not arguments.agent
    return arguments.tools or (["strop.demo:calculator"] if demos else [])


def run_of(target: str) -> Path | None:
    """The folder of RUN or RUN:STEP, if it is one; otherwise it is a model's name."""
    if found := RunFolder.parse_name(target):
        return found[0]
    path = Path(target).expanduser()
    return path if (path / "store.sqlite").is_file() else None


def read_config(arguments: argparse.Namespace) -> Config:
    """The configuration that the model is served with: a run's own, where it is one's."""
    from strop.run.settings import settle

    run = run_of(arguments.target)
    if run is not None:
        _, step = RunFolder.parse_name(arguments.target) or (run, "")
        base = _as_in(run, BEST if arguments.best else step, policy=arguments.policy, agent=arguments.agent)
    elif arguments.best:
        raise ConfigError(f"--best needs a run's checkpoints, and {arguments.target} is not a run. Fix: leave it out")
    else:
        policy = PolicyConfig(model=arguments.target, eval=SamplingConfig(max_tokens=1024))
        base = Config(policy=policy, engine=EngineConfig(max_sequences=4))
    drawn = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
    given = {name: value for name, value in drawn.items() if value is not None}
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    policies = {name: {"eval": given} for name in base.policies}
    return settle(configs.load(base=base, sets=arguments.set, seed=seed, policy={"eval": given}, policies=policies))


def _as_in(run: Path, step: str, *, policy: str, agent: bool) -> Config:
    """A run's settings, as far as they say how its model is shown, asked and computed: of one policy where that is
    talked to, of all of them where the agent is."""
    ran = RunFolder.config(run)
    checkpoint, policies = RunFolder.chosen_checkpoint(run, step), resolve_policies(ran)
    if (prompts := read_prompts(checkpoint)) is not None:
        ran = served = replace_prompts(ran, prompts)
        if not agent and (outside := answers_outside(ran)):
            raise ConfigError(
                f"the outside model {outside} answers in {run}: there is no model of its own to talk to. Fix: talk to "
                f"its agent, with --agent"
            )
    elif agent:
        models = {name: str(part) for name, part in find_parts(checkpoint, trained_policies(ran)).items()}
        served = replace_models(ran, models)
    else:
        part = str(choose_policy(run, checkpoint, policy))
        own = policies[policy] if policy else next(iter(trained_policies(ran).values()))
        served = replace(own, policies={}, policy=replace(own.policy, model=part))
    return Config(
        agent=ran.agent,
        agents=ran.agents,
        prompts=ran.prompts,
        reward=ran.reward,
        policy=served.policy,
        policies={name: _leave_out_training(table) for name, table in served.policies.items()},
        learner=LearnerConfig(device=served.learner.device, dtype=served.learner.dtype),
        engine=_without_servers(served.engine),
        runner=ran.runner,
        gateway=GatewayConfig(workers=1, outside=ran.gateway.outside if agent else {}),
    )


def _without_servers(engine: EngineConfig) -> EngineConfig:
    """Servers that somebody else started keep the weights they have."""
    return replace(engine, vllm=replace(engine.vllm, url=""), sglang=replace(engine.sglang, url=""))


def _leave_out_training(table: dict[str, Any]) -> dict[str, Any]:
    """The same of one of several policies."""
    learner = {name: value for name, value in table.get("learner", {}).items() if name in ("device", "dtype")}
    engine: dict[str, Any] = {
        name: {key: one for key, one in cast("dict[str, Any]", value).items() if key != "url"}
        if isinstance(value, dict)
        else value
        for name, value in table.get("engine", {}).items()
    }
    kept = {name: value for name, value in table.items() if name != "algorithm"}
    return kept | {"learner": learner, "engine": engine}


def choose_folder() -> Path:
    """A folder of its own for every chat."""
    began = Path("runs/chat") / time.strftime("%Y%m%d-%H%M%S")
    later = (began.with_name(f"{began.name}-{n}") for n in range(2, 1000))
    return next(place for place in (began, *later) if not place.exists())
