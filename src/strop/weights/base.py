"""How a new version reaches engines."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Weights(ABC):
    @abstractmethod
    async def publish(self, version: str) -> None:
        """Make every engine serve `version`; returns once they do."""
