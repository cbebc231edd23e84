from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.agent.stand import Stand


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[Stand]:
    async with Stand(tmp_path) as stand:
        yield stand
