"""pytest plugin: TransferQueue's own tests, unchanged, over the backend of this project.

They choose a backend by the name TQ_TEST_BACKEND in a table of configs, or have one config; this
adds an entry to the one and replaces the section `backend` of the other, after their import.
"""

from types import ModuleType
from typing import Any

from deepspeed_gear.integrations.transfer_queue import BACKEND, gear_backend


def pytest_collection_modifyitems(items: list[Any]) -> None:
    modules: set[ModuleType] = {item.module for item in items}
    for module in modules:
        backend = gear_backend()
        if hasattr(module, "BACKEND_CONFIGS"):
            module.BACKEND_CONFIGS[BACKEND] = {
                "controller": {"polling_mode": True},
                "backend": backend,
            }
        if hasattr(module, "_TQ_CONFIG"):
            module._TQ_CONFIG.backend = backend
