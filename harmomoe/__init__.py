"""Unify domain experts into one Mixture-of-Experts model without sharing private data"""

__version__ = "0.1.0"

from importlib import import_module

import harmomoe.moe.register

# The names that most people need, imported when they are first asked for: torch takes seconds.
_NAMES = {
    "Client": "client.client",
    "Config": "config.settings",
    "Public": "describe.public",
    "Server": "server.server",
    "changed": "config.settings",
    "load_domain": "data.domains",
    "load_model": "models.model",
    "open_seed": "models.weights",
    "preset": "config.settings",
    "read_settings": "config.settings",
}
__all__ = sorted(_NAMES)


def __getattr__(name: str):
    if name not in _NAMES:
        raise AttributeError(f"module 'harmomoe' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"harmomoe.{_NAMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})
