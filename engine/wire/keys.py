"""The old name of `engine.wire.layout`, for imports that still use it."""

from engine.wire.layout import *  # noqa: F403
