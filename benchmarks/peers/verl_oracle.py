"""What verl computes, number for number: its algorithms in a virtual environment of their own under .peers/verl.

    python benchmarks/peers/verl_oracle.py                              make the environment
    .peers/verl/bin/python benchmarks/peers/verl_oracle.py ASK ANSWER   call what the file ASK asks for, write ANSWER

ASK is a JSON list of calls of `verl.trainer.ppo.core_algos`, ANSWER a list with what each returned:

    {"call": "agg_loss", "tensors": {"loss_mat": [[1.0, 2.0]]}, "plain": {"loss_agg_mode": "token-mean"},
     "gradient": "loss_mat"}                                         ->  {"returned": [1.5], "gradient": [[0.5, 0.5]]}

A call with `then` is followed by that one, which gets what the first returned as the argument that it `takes`: from
advantages to a loss.

Torch is that of this project's own environment. Of what verl asks for only that is installed which importing its
algorithms needs.
"""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".peers" / "verl"
VERSION = "0.9.1"
ALONE = (f"verl=={VERSION}", "tensordict")
"""Installed without what they ask for: they ask for torch, and for far more than is needed here."""
NEEDED = ("ray", "hydra-core", "codetiming", "orjson", "pyvers", "cloudpickle")
PIP_LOCK = Path(tempfile.gettempdir()) / "pip.lock"
"""Held while pip runs: two that resolve at once starve each other."""


def python() -> Path:
    return HOME / "bin" / "python"


def is_set_up() -> bool:
    stamp = HOME / ".installed"
    return stamp.is_file() and stamp.read_text().strip() == VERSION


def set_up() -> Path:
    """The Python that has verl, installed unless it is there."""
    if is_set_up():
        return python()
    with PIP_LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_set_up():  # somebody else may have been at it
            _install()
    return python()


def _install() -> None:
    subprocess.run([sys.executable, "-m", "venv", HOME], check=True)
    own = next((HOME / "lib").glob("python*/site-packages"))
    (own / "strop.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [python(), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*install, *NEEDED], check=True)
    subprocess.run([*install, "--no-deps", *ALONE], check=True)
    (HOME / ".installed").write_text(VERSION + "\n")


def answer(asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from verl.trainer.ppo import core_algos

    return [_call(core_algos, **call) for call in asked]


def _call(
    algorithms: Any,
    call: str,
    tensors: dict[str, Any] | None = None,
    arrays: dict[str, Any] | None = None,
    plain: dict[str, Any] | None = None,
    algorithm: dict[str, Any] | None = None,
    actor: dict[str, Any] | None = None,
    method: list[Any] | None = None,
    gradient: str | None = None,
    takes: str | None = None,
    taken: Any = None,
    then: dict[str, Any] | None = None,
) -> dict[str, Any]:
    import numpy as np
    import torch

    given: dict[str, Any] = {name: torch.tensor(value, dtype=torch.float64) for name, value in (tensors or {}).items()}
    given |= {takes: taken.detach()} if takes is not None else {}
    if gradient is not None:
        given[gradient].requires_grad_()
    given |= {name: np.array(value) for name, value in (arrays or {}).items()} | (plain or {})
    if algorithm is not None:
        given["config"] = SimpleNamespace(**algorithm)
    if actor is not None:
        from verl.workers.config import ActorConfig

        given["config"] = ActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, ppo_mini_batch_size=1, **actor
        )
    returned = getattr(algorithms, call)(**given)
    if method is not None:  # of an object: call it, and tell what it holds
        name, *values = method
        getattr(returned, name)(*values)
        returned = vars(returned)
    result: dict[str, Any] = {"returned": _plain(returned if isinstance(returned, tuple) else (returned,))}
    first = returned[0] if isinstance(returned, tuple) else returned
    if gradient is not None:
        first.sum().backward()
        result["gradient"] = given[gradient].grad.tolist()
    return result if then is None else result | {"then": _call(algorithms, **then, taken=first)}


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    if len(sys.argv) == 3:
        Path(sys.argv[2]).write_text(json.dumps(answer(json.loads(Path(sys.argv[1]).read_text()))))
    else:
        print(set_up())
