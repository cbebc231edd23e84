import pytest

from strop.gateway.template import Renderer
from tests import chatml


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer.from_folder(chatml.make(tmp_path_factory.mktemp("chatml")))
