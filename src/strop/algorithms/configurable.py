"""Classes whose fields are settings: a constructor that editors complete, and that refuses what does not fit.

class Nearest(Algorithm):
    margin: Annotated[float, Meta(ge=0, description="how far apart two answers count as equal")] = 0.1

Nearest(margin=0.2)     its signature has every setting
Nearest(marging=0.2)    there is no setting 'algorithm.settings.marging'. Fix: write algorithm.settings.margin
Nearest(margin=-1)      algorithm.settings.margin does not fit: it is -1 (expected `float` >= 0.0). Fix: ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, dataclass_transform

from strop.config import convert, field_types, refuse_unknown, rename_old

PATH = "algorithm.settings."


@dataclass_transform(kw_only_default=True, field_specifiers=(field,))
class Configurable:
    """Each subclass is a dataclass with keyword-only fields, without saying so. `given` are the settings that its
    constructor was given, the others have their defaults."""

    given: Mapping[str, Any]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(kw_only=True)(cls)
        cls.__init__ = _checked(cls.__init__)


def _checked(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def checked(self: Configurable, **given: Any) -> None:
        given = rename_old(given, PATH)
        types = field_types(type(self))
        refuse_unknown(given, types, PATH)
        self.given = {name: convert(value, types[name], PATH + name) for name, value in given.items()}
        init(self, **self.given)

    return checked
