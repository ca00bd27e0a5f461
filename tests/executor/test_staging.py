from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quire.engine.executor.staging import Staging


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_put_arrives(device: str) -> None:
    staging = Staging(capacity=200, steps=2, device=torch.device(device))
    first = None
    for turn in range(7):
        values: list[np.ndarray[Any, Any]] = [
            np.arange(5) + turn,
            np.full((3, 2), turn, np.int32),
            np.arange(3, dtype=np.float32),
        ]
        giant = np.arange(100) * turn
        staging.begin_step()
        there = [staging.stage_array(value) for value in values] + [staging.stage_array(giant)]
        staging.send()
        for sent, found in zip([*values, giant], there, strict=True):
            assert found.device.type == device
            assert np.array_equal(found.cpu().numpy(), sent)
        first = first or there[0].data_ptr()
        assert there[0].data_ptr() == first  # what is put first is found at the same address in every step
