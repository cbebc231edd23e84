"""A tool server of verifiers 0.4, which is started for each rollout."""

import verifiers.v1 as vf


class CalculatorToolset(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    async def calculator(self, expression: str) -> str:
        """Compute one operation on two integers."""
        a, _, b = expression.partition("*")
        return str(int(a) * int(b))


if __name__ == "__main__":
    CalculatorToolset.run()
