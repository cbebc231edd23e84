"""deploy/slurm/train.sh, run for real with recorded stand-ins in the place of Slurm, Ray and strop (recorded_slurm.sh).

What this cannot show: how a real Slurm starts steps, sends signals and queues jobs again."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "deploy" / "slurm" / "train.sh"
STAND_IN = Path(__file__).with_name("recorded_slurm.sh")
PORT = 20000 + 4321 % 1000 * 20
ADDRESS = f"10.0.0.7:{PORT}"
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")


class Job:
    """A job of Slurm, as far as its script can tell."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self.recorded, self.run = folder, folder / "recorded", folder / "shared" / "mine"
        self.recorded.mkdir()
        (folder / "bin").mkdir()
        (folder / "recipe.toml").touch()
        for name in ("srun", "scontrol", "ray", "strop"):
            (folder / "bin" / name).symlink_to(STAND_IN)
        self.environment = {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "RECORDED": str(self.recorded),
            "SLURM_JOB_ID": "4321",
            "SLURM_JOB_NODELIST": ",".join(f"n{number}" for number in range(nodes)),
            "SLURM_CPUS_ON_NODE": "32",
            "SLURM_GPUS_ON_NODE": "8",
            "STROP_RUN": str(self.run),
            "STROP_KEY": "a-secret",
            "STROP_START_SECONDS": "20",
        }

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        for file in self.recorded.glob("*-*"):
            file.unlink()
        return subprocess.Popen(
            [str(SCRIPT), *arguments],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, *arguments: str) -> tuple[int, str]:
        process = self.start(*arguments)
        said, _ = process.communicate(timeout=25)
        return process.returncode, said

    def signal_at_work(self, number: signal.Signals, *arguments: str) -> tuple[int, str]:
        """Start it, and send it a signal once the run is at work."""
        process = self.start(*arguments)
        deadline = time.monotonic() + 30
        while not (self.recorded / "strop-waits").exists():
            assert time.monotonic() < deadline, self.calls()
            time.sleep(0.02)
        process.send_signal(number)
        said, _ = process.communicate(timeout=25)
        return process.returncode, said

    def calls(self) -> list[str]:
        return (self.recorded / "calls").read_text().splitlines()


def test_it_is_bash() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    assert os.access(SCRIPT, os.X_OK)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", SCRIPT], check=True)


@pytest.mark.parametrize("nodes", [1, 4])
def test_a_head_then_workers_then_the_run(tmp_path: Path, nodes: int) -> None:
    job = Job(tmp_path, nodes)
    (job.recorded / "finish").touch()
    code, said = job.finish("recipe.toml", "--set", "loop.steps=3")
    assert code == 0, said
    head, *others = [call for call in job.calls() if " got " not in call]
    ports = f"--node-manager-port={PORT + 1} --object-manager-port={PORT + 2} --num-cpus=32 --num-gpus=8"
    assert head == (
        f"ray@n0 start --head --block --node-ip-address=10.0.0.7 --port={PORT} {ports} "
        f"--ray-client-server-port={PORT + 3} --include-dashboard=false --temp-dir=/tmp/ray-4321"
    )
    workers = [f"ray@n{number} start --block --address={ADDRESS} {ports}" for number in range(1, nodes)]
    assert sorted(others[:-1]) == workers
    train = f"strop train --config recipe.toml --folder {job.run} --cluster {ADDRESS} --set loop.steps=3"
    assert others[-1] == train
    ended = [call for call in job.calls() if " got " in call]
    assert sorted(ended) == [f"ray@n{number} got TERM" for number in range(nodes)]
    assert "a-secret" not in "\n".join(job.calls())


def test_before_the_time_limit_it_stops_is_queued_again_and_goes_on(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    code, said = job.signal_at_work(signal.SIGUSR1, "recipe.toml")
    assert code == 0, said
    assert "goes on when the job starts again" in said
    calls = job.calls()
    assert calls[-1] == "scontrol requeue 4321"
    assert calls.index("strop got INT") < calls.index("ray@n0 got TERM") < len(calls) - 1
    (job.recorded / "finish").touch()
    (tmp_path / "recipe.toml").unlink()  # the run keeps what it began with
    assert job.finish("recipe.toml")[0] == 0
    (train,) = [call for call in job.calls()[len(calls) :] if call.startswith("strop train")]
    assert train == f"strop train --resume {job.run} --cluster {ADDRESS}"


def test_a_job_that_is_cancelled_ends_at_once_and_queues_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    code, said = job.signal_at_work(signal.SIGTERM, "recipe.toml")
    assert code == 143, said
    assert "strop got TERM" in job.calls()
    assert {"ray@n0 got TERM", "ray@n1 got TERM"} <= set(job.calls())
    assert not any("requeue" in call for call in job.calls())


def test_a_run_that_fails_fails_the_job(tmp_path: Path) -> None:
    job = Job(tmp_path, 1)
    (job.recorded / "fail").touch()
    assert job.finish("recipe.toml")[0] == 1
    assert job.calls()[-1] == "ray@n0 got TERM"
    assert not any("requeue" in call for call in job.calls())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("no job", "this is no Slurm job. Fix: sbatch"),
        ("no recipe", "which recipe? Fix: sbatch"),
        ("no file", "there is no other.toml. Fix: "),
        ("no strop", "strop is not on PATH. Fix: activate its environment"),
        ("not shared", "n1 does not see "),
        ("no workers", "fewer than 2 nodes have joined"),
    ],
)
def test_what_is_wrong_is_one_sentence(tmp_path: Path, wrong: str, says: str) -> None:
    job = Job(tmp_path, 2)
    arguments = {"no recipe": [], "no file": ["other.toml"]}.get(wrong, ["recipe.toml"])
    if wrong == "no job":
        del job.environment["SLURM_JOB_ID"]
    elif wrong == "no strop":
        (tmp_path / "bin" / "strop").unlink()
        job.environment["PATH"] = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    elif wrong == "not shared":
        (job.recorded / "blind").write_text("n1")
    elif wrong == "no workers":
        job.environment["SLURM_JOB_NODELIST"] = "n0,n0"  # which is one node to Ray
        job.environment["STROP_START_SECONDS"] = "2"
    code, said = job.finish(*arguments)
    assert code == 2, said
    assert says in said
    assert not (job.recorded / "strop-waits").exists()
    left = [call for call in job.calls() if " start " in call] if (job.recorded / "calls").exists() else []
    assert len([call for call in job.calls() if "got TERM" in call] if left else []) == len(left)
