from typing import Any

class ChannelState:
    side: int
    last: int
    phase: int
    tail: int
    is_settled: bool

class SlotCall:
    def __init__(self, **parts: Any) -> None: ...
    def __call__(self, x: Any, out: Any, said: Any = ..., timeout: float | None = ..., /) -> Any: ...

def describe(array: Any, /) -> tuple[int, tuple[int, ...], Any, int]: ...
def combine_once(ufunc: Any, number: int, left: Any, right: Any, out: Any, /) -> bool: ...
