"""A mathematician with a Python interpreter: thinks, runs code in a sandbox, reads what it printed, answers in a box.

    task      {"messages": [..., {"role": "user", "content": "What is the tens digit of $5^{2005}$?"}], "answer": "2"}
    model     python(code="print(str(5**2005)[-2])")
    tool      2
    model     The tens digit is \\boxed{2}.
    rewards   {"reward": 1.0, "computed": 1.0, "call": 1.0}

An endless loop, too much memory or a crash is what the tool says, and the rollout goes on.
"""

import strop
from strop.rewards import last_boxed, last_number, math_equal
from strop.tools.python import PythonBox

BOX = PythonBox(seconds=10, memory_mb=1024, output=2000, packages=("numpy", "sympy", "mpmath"))


def score(task: strop.Task, episode: strop.Episode) -> dict[str, float]:
    """`call`: some code was run. `computed`: the last number that it printed is the answer. `reward`: the model's last
    words have the right answer in a box."""
    golden = task.data["answer"]
    ran = [call.result for call in episode.calls if call.result.wrong not in ("unknown", "arguments")]
    return {
        "reward": float(math_equal(last_boxed(episode.answer), golden)),
        "computed": float(any(math_equal(last_number(seen.text), golden) for seen in ran if seen.ok)),
        "call": float(bool(ran)),
    }


agent = strop.ToolAgent(tools=lambda task: BOX.tool(), reward=score, max_turns=8, seconds=240)
