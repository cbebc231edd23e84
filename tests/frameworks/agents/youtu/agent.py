"""An agent of Youtu-agent's make-up: OpenAI Agents, made from YAML that Hydra composes. `--config` names the YAML.

The model is where `model.model_provider` says: there, its base_url and api_key come from UTU_LLM_BASE_URL and
UTU_LLM_API_KEY, unless the agent's own YAML says otherwise.
"""

import argparse
import asyncio
import importlib.util
import sys
from pathlib import Path
from typing import Any

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, Tool, function_tool
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from openai import AsyncOpenAI

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from cities import QUESTIONS, say  # noqa: E402

MODELS = {"chat.completions": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


def read(name: str) -> dict[str, Any]:
    with initialize_config_dir(str(HERE / "configs"), version_base=None):
        config = compose(f"agents/{name}")
    assert isinstance(config, DictConfig)
    return OmegaConf.to_container(config, resolve=True)  # type: ignore[return-value]


def make(config: dict[str, Any]) -> Agent:
    provider = config["model"]["model_provider"]
    client = AsyncOpenAI(base_url=provider["base_url"], api_key=provider["api_key"])
    return Agent(
        name=config["agent"]["name"],
        instructions=config["agent"]["instructions"],
        model=MODELS[provider["type"]](provider["model"], client),
        model_settings=ModelSettings(**config["model"]["model_settings"]),
        tools=[tool for toolkit in config["toolkits"].values() for tool in load(toolkit)],
    )


def load(toolkit: dict[str, Any]) -> list[Tool]:
    """The tools of a toolkit of one's own; `activated_tools` picks some of them."""
    assert toolkit["mode"] == "customized"
    spec = importlib.util.spec_from_file_location(toolkit["name"] + "_toolkit", HERE / toolkit["customized_filepath"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    functions = getattr(module, toolkit["customized_classname"])(toolkit).tools()
    activated = toolkit["activated_tools"] or list(functions)
    return [function_tool(functions[name]) for name in activated]


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="cities")
    parser.add_argument("--stream", action="store_true")
    given = parser.parse_args()
    config = read(given.config)
    agent = make(config)
    history: list[Any] = []
    for question in QUESTIONS:
        history.append({"role": "user", "content": question})
        if given.stream:
            result = Runner.run_streamed(agent, history, max_turns=config["max_turns"])
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, history, max_turns=config["max_turns"])
        history = result.to_input_list()
        say(result.final_output)


asyncio.run(main())
