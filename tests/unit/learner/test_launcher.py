"""Where the processes that hold weights are started, when nothing else is said: on this machine."""

from strop.learner.launcher import HERE
from strop.learner.verbs import RankPlace


async def test_one_process_is_alone(tmp_path) -> None:
    [child] = await HERE.start([tmp_path / "learner.log"])
    try:
        assert child.place == RankPlace()
        assert child.handle.poll() is None
    finally:
        child.connection.close()
        child.handle.kill()
        assert child.handle.wait(10) == -9


async def test_ranks_meet_in_a_folder_with_a_gpu_each(tmp_path) -> None:
    children = await HERE.start([tmp_path / "0.log", tmp_path / "1.log"], meeting=tmp_path)
    where = (tmp_path / "rendezvous").as_uri()
    try:
        assert [child.place for child in children] == [
            RankPlace(index=index, count=2, rendezvous=where, gpu=index) for index in (0, 1)
        ]
        assert len({child.connection.fileno() for child in children}) == 2
    finally:
        for child in children:
            child.connection.close()
            child.handle.kill()
            child.handle.wait(10)
