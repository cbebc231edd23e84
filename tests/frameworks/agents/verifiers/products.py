"""Tasksets as verifiers 0.4 scaffolds them: products, plain or with a tool server."""

import re

import verifiers.v1 as vf
from product_tools import CalculatorToolset


class ProductData(vf.TaskData):
    answer: str


class ProductTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()
    calculator: bool = False


class ProductTask(vf.Task[ProductData, vf.State, ProductTaskConfig]):
    @classmethod
    def toolsets(cls, config: ProductTaskConfig) -> list[vf.Toolset]:
        return [CalculatorToolset(config.tools)] if config.calculator else []

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in re.findall(r"\d+", trace.last_reply))

    @vf.reward(weight=0.001)
    async def reward(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class ProductConfig(vf.TasksetConfig):
    num_tasks: int = 4
    task: ProductTaskConfig = ProductTaskConfig()


class ProductTaskset(vf.Taskset[ProductTask, ProductConfig]):
    def load(self) -> list[ProductTask]:
        pairs = [(a, b) for a in (12, 37) for b in (45, 52)][: self.config.num_tasks]
        return [
            ProductTask(ProductData(prompt=f"Use the calculator: {a} * {b}.", answer=str(a * b)), self.config.task)
            for a, b in pairs
        ]


__all__ = ["ProductTaskset"]
