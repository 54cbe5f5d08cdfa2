from typing import Any

FORM: int

class ChannelState:
    side: int
    last: int
    phase: int
    tail: int
    is_settled: bool
    def bind(self, *places: Any) -> None: ...

class Program:
    def __init__(self, *parts: Any) -> None: ...

class Run:
    def __init__(self, program: Program, channel: Any, arrays: tuple[Any, ...], offsets: tuple[int, ...], keeps_lock: bool, /) -> None: ...
    def __iter__(self) -> Run: ...
    def __next__(self) -> int: ...

class Tally:
    writes: int
    collectives: int
    added: int
    steps: int

class Watch:
    until: int
    is_free: bool

class Copied:
    moves: int
    is_being_written: bool

class Write:
    def __init__(self, *parts: Any) -> None: ...
    def __call__(self, x: Any, /, *, is_seen: bool = ...) -> int: ...

class SlotCall:
    def __init__(self, **parts: Any) -> None: ...
    def __call__(self, x: Any, out: Any, said: Any = ..., timeout: float | None = ..., /) -> Any: ...

class Entrance:
    def __init__(
        self, function: Any, state: Any, array_type: type, as_array: Any, nothing: Any, second: str | None, usual: Any, positions: int, /
    ) -> None: ...
    def __call__(self, *arguments: Any, **keywords: Any) -> Any: ...
    def remember(self, second: Any, call: Any, shortcuts: Any, /) -> None: ...

def describe(array: Any, /) -> tuple[int, tuple[int, ...], Any, int]: ...
def combine_once(ufunc: Any, number: int, left: Any, right: Any, out: Any, /) -> bool: ...
