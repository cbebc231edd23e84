"""Three ways to improve one agent, one after the other, and what each added on held-out tasks.

    python recipes/joined/train.py --config recipes/joined/laptop.toml --folder runs/joined [--seed N] [--json]

    samples/   the model as it is, four times on some training tasks            strop eval
    sft/       imitation: fine-tuned on the best of those                       algorithm.name = sft
    rl/        reinforcement learning from there                                algorithm.name = grpo, --from sft
    prompts/   the words of the question, rewritten for the model that is left  algorithm.name = gepa, --from rl

Each stage is a plain `strop` command, which is printed before it runs, and a run of its own that all commands know.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(HERE / "laptop.toml"))
    parser.add_argument("--folder", default="runs/joined", type=Path)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--rl-steps", default="8")
    parser.add_argument("--json", action="store_true", help="print what came of it as JSON")
    given = parser.parse_args()
    folder, common = given.folder, ["--config", given.config, "--seed", given.seed]
    if folder.exists():
        sys.exit(f"{folder} is there already. Fix: choose another --folder")
    folder.mkdir(parents=True)
    run("eval", *common, "--split", "train", "-k", "4", "--folder", folder / "samples",
        "--set", "tasks_args={train = 96}")  # fmt: skip
    sources = json.dumps([str(folder / "samples" / "1-trained")])
    run("train", *common, "--folder", folder / "sft", "--set", "algorithm.name=sft",
        "--set", f"algorithm.settings.runs={sources}", "--set", "algorithm.settings.min_reward=1",
        "--set", "algorithm.settings.epochs=1", "--set", "algorithm.settings.batch_size=16")  # fmt: skip
    run("train", "--from", folder / "sft", "--folder", folder / "rl", "--set", "algorithm.name=grpo",
        "--steps", given.rl_steps, "--lr", "2e-4")  # fmt: skip
    with open_writer() as url:
        outside = f"{{writer = {{url = '{url}/v1', model = 'writer'}}}}"
        run("train", "--from", folder / "rl", "--folder", folder / "prompts", "--set", "algorithm.name=gepa",
            "--set", "algorithm.settings.optimizer=writer", "--set", "algorithm.settings.minibatch=16",
            "--set", "algorithm.settings.max_calls=16", "--set", "algorithm.settings.samples=2",
            "--set", f"gateway.outside={outside}", "--steps", "30")  # fmt: skip
    table = read_table(folder)
    (folder / "joined.json").write_text(json.dumps(table, indent=1) + "\n")
    print(json.dumps(table)) if given.json else show(table)
    return 0


def run(*arguments: str | Path) -> None:
    command = list(map(str, arguments))
    print(f"\n$ strop {shlex.join(command)}", file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, "-m", "strop.cli", *command], stdout=sys.stderr)
    if done.returncode:
        sys.exit(done.returncode)


@contextmanager
def open_writer() -> Any:
    server = subprocess.Popen([sys.executable, str(HERE / "scripted.py")], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield server.stdout.readline().strip()
    finally:
        server.terminate()
        server.communicate()


def read_table(folder: Path) -> list[dict[str, Any]]:
    """What held-out tasks earned before, and after each stage; and how many steps each took."""
    rows: list[dict[str, Any]] = []
    for stage in ("sft", "rl", "prompts"):
        summary = json.loads((folder / stage / "summary.json").read_text())
        rows = rows or [{"stage": "the model as it is", "reward": summary["start"], "added": 0.0}]
        added = summary["end"] - summary["start"]  # both of its own evaluations: others draw other samples
        rows.append({"stage": stage, "reward": summary["end"], "added": added, "steps": summary["steps"]})
    return rows


def show(table: list[dict[str, Any]]) -> None:
    print(f"\n{'stage':20} {'held out':>9} {'added':>7} {'steps':>6}")
    for row in table:
        print(f"{row['stage']:20} {row['reward']:9.3f} {row['added']:+7.3f} {row.get('steps', ''):>6}")


if __name__ == "__main__":
    sys.exit(main())
