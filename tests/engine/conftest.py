"""What the tests of the engine client share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest

from openclaw_rl.engine.transport import connections


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with connections() as session:
        yield session
