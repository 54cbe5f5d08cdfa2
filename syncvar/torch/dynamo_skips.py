"""Keeps torch.compile out of the code of the backend.

While a compiled program runs, dynamo looks at each Python function that torch calls from C++, and
would compile the methods of the process group too. `torch.compiler.disable` prevents that, but
imports dynamo, which takes seconds. This marks the code of the methods instead.
"""

from __future__ import annotations

import inspect
from typing import Any


def skip_methods(*classes: Any) -> None:
    """Let dynamo run the methods of these classes, and what they call, as they are."""
    try:
        from torch._C._dynamo.eval_frame import (
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )
    except ImportError:  # an older torch, which has no such function
        return
    skips = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for one in classes:
        for member in vars(one).values():
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if inspect.isfunction(function):
                set_code_exec_strategy(function.__code__, skips)
