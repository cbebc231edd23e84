"""What a policy says about its template reaches the run; what that leaves out is said before the first step."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from strop import config as configs
from strop import demo
from strop.errors import ConfigError
from strop.gateway.route import PolicyRoute
from strop.monitor.console import Lines
from strop.run.runtime import open_run
from tests import small
from tests.unit.gateway.test_thinking import HYBRID
from tests.unit.gateway.test_tool_prompt import CHATML

SMALL = ["loop.steps=1", "runner.workers=1", f"tasks={Path(small.__file__)}:tasks"]


def config(tmp_path: Path, template: str, *sets: str) -> Any:
    (tmp_path / "template.jinja").write_text(template)
    sets = (*SMALL, f"policy.template={tmp_path / 'template.jinja'}", *sets)
    return configs.load(base=demo.config(), sets=sets, folder=str(tmp_path / "run"))


async def test_a_run_says_before_its_first_step_that_its_template_knows_no_tools(tmp_path: Path) -> None:
    told = io.StringIO()
    async with open_run(config(tmp_path, CHATML), Lines(told), resume=False) as run:
        assert "note: the chat template leaves out tools and calls" in told.getvalue()
        route = run.gateway.routes.agents["*"]
        assert isinstance(route, PolicyRoute)
        assert route.renderer.format.name == "hermes"


async def test_a_runs_kwargs_reach_its_gateway(tmp_path: Path) -> None:
    given = config(tmp_path, HYBRID, "policy.chat_template_kwargs.enable_thinking=false")
    async with open_run(given, Lines(io.StringIO()), resume=False) as run:
        route = run.gateway.routes.agents["*"]
        assert isinstance(route, PolicyRoute)
        assert route.renderer.variables == {"enable_thinking": False}
    given = config(tmp_path, HYBRID, "policy.chat_template_kwargs.enable_thoughts=false")
    with pytest.raises(ConfigError, match="does not read enable_thoughts"):
        async with open_run(given, Lines(io.StringIO()), resume=False):
            pass
