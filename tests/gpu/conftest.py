"""Tests of a GPU. They are skipped where there is none; COURSE_LLM_DEVICE names another device to try them on (cpu, mps)."""

import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
NAME = os.environ.get("COURSE_LLM_DEVICE", "cuda")


def pytest_collection_modifyitems(items):
    if NAME == "cuda" and not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device here")
        for item in items:
            if HERE in Path(item.fspath).parents:
                item.add_marker(skip)


@pytest.fixture
def device() -> torch.device:
    return torch.device(NAME)


@pytest.fixture
def cuda(device) -> torch.device:
    """For what only CUDA has."""
    if device.type != "cuda":
        pytest.skip("only on CUDA")
    return device
