"""Old names work, and warn with the new name at the line that has the old one."""

import pathlib

import pytest
import torch

import ringlet
from ranks import on


@on(2)
def test_old_names_warn(rank: int, world: int) -> None:
    with pytest.warns(FutureWarning, match=r"ringlet\.SystemError is now ringlet\.ResourceError") as told:
        assert ringlet.SystemError is ringlet.ResourceError
    assert pathlib.Path(told[0].filename).name == "test_renamed.py"
    work = ringlet.all_reduce(torch.ones(3), async_op=True)
    work.wait()
    with pytest.warns(FutureWarning, match=r"Work\.done is now Work\.is_completed"):
        assert work.done()
    group = ringlet.current()
    for make in (ringlet.GradientReducer, lambda *a, **k: ringlet.Zero(*a, torch.optim.SGD, lr=0.1, **k)):
        with pytest.warns(FutureWarning, match=r"\(process_group=\) is now group="):
            made = make(torch.nn.Linear(2, 1), process_group=group)
        with pytest.raises(TypeError, match="both were passed"):
            make(torch.nn.Linear(2, 1), process_group=group, group=group)
    made.module(torch.ones(1, 2)).sum().backward()
    with pytest.warns(FutureWarning, match=r"Zero\.clip_grad_norm is now Zero\.clip_grad_norm_"):
        assert made.clip_grad_norm(1.0) > 0
