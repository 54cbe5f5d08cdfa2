"""What a case may say. `check` refuses everything else, so that a case is never half understood."""

__all__ = ["BadCase", "check", "operations", "ranks_of", "variables_of"]

STRATEGIES = ("mirrored", "multi_worker_mirrored", "central_storage", "parameter_server", "default")
CONTEXTS = ("replica", "cross", "outside", "merge", "spmd")

_SCATTERS = ("add", "sub", "mul", "div", "min", "max", "update")
_ASSIGNS = ("assign", "assign_add", "assign_sub", "iadd")
_OPERAND = ("value", "per_replica", "literal", "operand")
_ENDS = ("value", "per_rank", "error", "errors", "ok")

# operation -> (whether it takes an operand: "must", "may", "" ; keys it must have; keys it may have)
_OPERATIONS = {
    "create": ("", ("var", "spec"), ()),
    **dict.fromkeys(
        (*_ASSIGNS, *(f"scatter_{kind}" for kind in _SCATTERS)), ("must", (), ("var",))
    ),
    **dict.fromkeys(
        (
            "read_value",
            "value",
            "numpy",
            "sync",
            "local_value",
            "asarray",
            "index_all",
            "add_one",
            "py_float",
            "py_int",
            "py_bool",
            "py_len",
            "py_iter",
            "py_hash",
            "pickle",
            "props",
            "initializer_calls",
            "new_variable_from",
        ),
        ("", (), ("var",)),
    ),
    "py_eq": ("must", (), ("var",)),
    "read_from": ("", ("rank",), ("var",)),
    "save": ("", ("key",), ("var", "vars")),
    "restore": ("", ("key",), ("var", "vars", "restore_policy")),
    "deferred_restore": ("", ("key", "var", "spec"), ()),
    "reduce": ("must", ("reduce_op", "axis"), ("var",)),
    "gather": ("must", ("axis",), ("var",)),
    "all_reduce": ("must", ("reduce_op",), ("var",)),
    "all_gather": ("must", ("axis",), ("var",)),
    "reduce_then_assign": ("must", ("reduce_op",), ("var",)),
    "multi": ("", ("do",), ()),
    **dict.fromkeys(
        (
            "return",
            "run_identity",
            "merge_return",
            "merge_arg",
            "local_results",
            "mirrored_plus_one",
        ),
        ("must", (), ("var",)),
    ),
    "values_from_function": ("", ("kind",), ()),
    "deepcopy_independent": ("must", (), ("var",)),
    **dict.fromkeys(
        (
            "context_info",
            "context_in_thread",
            "nested_run",
            "enter_scope",
            "nested_merge",
            "enter_other_scope",
            "run_other",
            "reduce_other",
            "use_other_variable",
            "scope_reused",
            "merge_unbalanced",
            "dataset_context",
        ),
        ("", (), ()),
    ),
    "crossed_writes": ("must", ("vars",), ("var",)),
    "mixed_writes": ("must", (), ("var",)),
    "container_misuse": ("must", ("kind",), ("var",)),
    "distribute_dataset": ("", ("batches",), ("epochs",)),
    "dataset_reduce": ("", ("batches", "reduce_op"), ()),
    "distribute_from_function": ("", ("per_rank_batches",), ()),
    "input_context": ("", ("args", "batches"), ()),
    "partition": ("", ("partitioner", "args", "shape", "dtype"), ()),
    "row_ranges": ("", ("rows", "shards"), ()),
    "lookup": ("", ("indices",), ("var",)),
    "index": ("", ("at",), ("var",)),
    "sharding": ("", (), ("var",)),
    "set_staleness": ("", ("staleness",), ("var",)),
    **dict.fromkeys(("read_all", "snapshot"), ("", ("vars",), ())),
    **dict.fromkeys(("tick", "barrier"), ("", (), ())),
}
_KINDS = {
    "container_misuse": ("add", "index", "iter", "asarray"),
    "values_from_function": ("ids", "count", "half", "none", "dict"),
}
_ONLY_IN = {
    "merge_return": ("merge",),
    "merge_arg": ("merge",),
    "reduce_then_assign": ("merge",),
    "merge_unbalanced": ("replica",),
}
_NO_VARIABLE = (
    "reduce",
    "gather",
    "all_reduce",
    "all_gather",
    "return",
    "run_identity",
    "merge_return",
    "merge_arg",
    "local_results",
    "mirrored_plus_one",
    "container_misuse",
)
_LEAVES = (
    "array",
    "literal",
    "none",
    "var",
    "mirrored",
    "by",
    "container",
    "dict",
    "list",
    "tuple",
    "indices",
)


class BadCase(Exception):
    """A case says what no rule explains."""


def operations(case):
    """Yield every operation of a case, those inside `multi` included."""
    for step in case["steps"]:
        yield step
        yield from step.get("do", ())


def ranks_of(case, name):
    """Return the ranks that the variable `name` lives on, or None for all."""
    return case["variables"].get(name, {}).get("ranks")


def variables_of(step):
    """Return the names of the variables that a step works on; their ranks run it."""
    operation = step["op"]
    if operation == "multi":
        return [name for inner in step["do"] for name in variables_of(inner)]
    if operation in ("create", "deferred_restore"):
        return []
    given = step.get("vars")
    if given:
        return [*given.values()] if isinstance(given, dict) else [*given]
    if operation in _NO_VARIABLE:
        return _variables_in(step.get("operand"))
    return [step.get("var", "v")] if "var" in _OPERATIONS[operation][2] else []


def _variables_in(spec):
    if isinstance(spec, list):
        return [name for item in spec for name in _variables_in(item)]
    if isinstance(spec, dict):
        named = [spec["var"]] if isinstance(spec.get("var"), str) else []
        return named + [name for item in spec.values() for name in _variables_in(item)]
    return []


def check(case):
    """Refuse a case that is not in the grammar.

    Raises:
        BadCase: It is not; says where.
    """
    where = case.get("id", "a case without id")
    try:
        _check_case(case)
    except BadCase as error:
        raise BadCase(f"{where}: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise BadCase(f"{where}: not of the right form: {type(error).__name__}: {error}") from error


def _check_case(case):
    _keys(
        case,
        ("id", "strategy", "replicas", "variables", "steps", "final_local"),
        ("options", "basis", "tensorflow"),
        "the case",
    )
    _one_of(case["strategy"], STRATEGIES, "strategy")
    replicas = case["replicas"]
    if type(replicas) is not int or replicas < 1:
        raise BadCase(f"replicas is {replicas!r}")
    known = {}
    for name, spec in case["variables"].items():
        _check_variable(spec, replicas, f"variable {name}", may_have_ranks=True)
        known[name] = len(spec["ranks"]) if spec.get("ranks") else replicas
    for index, step in enumerate(case["steps"]):
        place = f"step {index}"
        _one_of(step.get("ctx"), CONTEXTS, f"{place}: ctx")
        size = _check_operation(step, case, known, place, top=True)
        _check_expectation(step["expect"], known, size, f"{place}: expect")
    for name, copies in case["final_local"].items():
        if len(copies) != known[name]:
            raise BadCase(f"final_local of {name} has {len(copies)} copies, not {known[name]}")


def _check_variable(spec, replicas, place, *, may_have_ranks=False):
    _keys(
        spec,
        ("synchronization", "aggregation", "dtype", "initial"),
        ("trainable", *(("ranks",) if may_have_ranks else ())),
        place,
    )
    initial = spec["initial"]
    if isinstance(initial, dict):
        _one_of(
            next(iter(initial), None),
            ("per_replica", "callable", "missing", "re", "im"),
            f"{place}: initial",
        )
        _keys(
            initial,
            ("re", "im") if "re" in initial else (next(iter(initial)),),
            (),
            f"{place}: initial",
        )
    ranks = spec.get("ranks")
    if ranks is not None and (ranks != list(range(len(ranks))) or not 0 < len(ranks) <= replicas):
        raise BadCase(f"{place}: ranks {ranks} are not the first of {replicas}")
    if (
        isinstance(initial, dict)
        and "per_replica" in initial
        and len(initial["per_replica"]) != (len(ranks) if ranks else replicas)
    ):
        raise BadCase(f"{place}: initial has an entry too many or too few")


def _check_operation(step, case, known, place, *, top):
    """Check one operation; return by how many ranks it is run."""
    operation = step.get("op")
    _one_of(operation, _OPERATIONS, f"{place}: op")
    operand, must, may = _OPERATIONS[operation]
    given = [key for key in _OPERAND if key in step]
    if step.get("operand_last") is not None and not top:
        given.append("operand_last")
    if len(given) > 1 or (operand == "must" and not given) or (not operand and given):
        raise BadCase(f"{place}: {operation} has operands {given}")
    extra = ("ctx", "expect") if top else ()
    if operand:
        must, may = (*must, *given), (*may, "dtype", "any_dtype")
    _keys(step, ("op", *extra, *must), may, place)
    if operation in _KINDS:
        _one_of(step["kind"], _KINDS[operation], f"{place}: kind")
    if operation in _ONLY_IN and top:
        _one_of(step["ctx"], _ONLY_IN[operation], f"{place}: ctx of {operation}")
    if operation in ("create", "deferred_restore"):
        _check_variable(step["spec"], case["replicas"], f"{place}: spec")
        known.setdefault(step["var"], case["replicas"])
    if operation in _NO_VARIABLE and "var" in step and step["var"] not in known:
        raise BadCase(f"{place}: there is no variable {step['var']!r}")
    names = variables_of(step) if operation != "multi" else []
    for name in names:
        if name not in known:
            raise BadCase(f"{place}: there is no variable {name!r}")
    sizes = {known[name] for name in names}
    if len(sizes) > 1:
        raise BadCase(f"{place}: variables {names} live on different ranks")
    size = sizes.pop() if sizes else case["replicas"]
    if operation == "multi":
        sizes = {
            _check_operation(inner, case, known, f"{place}: do[{index}]", top=False)
            for index, inner in enumerate(step["do"])
        }
        if len(sizes) != 1:
            raise BadCase(f"{place}: multi over variables on different ranks")
        size = sizes.pop()
    if "per_replica" in step and len(step["per_replica"]) != size:
        raise BadCase(f"{place}: per_replica has {len(step['per_replica'])} entries, not {size}")
    if "operand" in step:
        _check_spec(
            step["operand"],
            known,
            size,
            f"{place}: operand",
            scatter=operation.startswith("scatter_"),
        )
    return size


def _check_spec(spec, known, size, place, *, scatter):
    kind = next((key for key in _LEAVES if key in spec), None)
    if kind is None:
        raise BadCase(f"{place}: {spec!r}")
    may = ("dtype",) if kind in ("array", "mirrored", "indices") else ()
    _keys(spec, ("indices", "values") if kind == "indices" else (kind,), may, place)
    if kind == "indices" and not scatter:
        raise BadCase(f"{place}: rows are operands of scatter operations only")
    if kind == "var" and spec["var"] not in known:
        raise BadCase(f"{place}: there is no variable {spec['var']!r}")
    if kind == "none" and spec["none"] is not True:
        raise BadCase(f"{place}: {spec!r}")
    if kind in ("by", "container") and len(spec[kind]) != size:
        raise BadCase(f"{place}: {kind} has {len(spec[kind])} entries, not {size}")
    inner = (
        spec[kind].values()
        if kind == "dict"
        else spec[kind]
        if kind in ("by", "container", "list", "tuple")
        else ()
    )
    for item in inner:
        _check_spec(item, known, size, place, scatter=scatter)


def _check_expectation(expect, known, size, place):
    ends = [key for key in _ENDS if key in expect]
    if len(ends) != 1:
        raise BadCase(f"{place}: {expect!r}")
    _keys(
        expect,
        ends,
        ("local_after", *(("dtype",) if ends[0] in ("value", "per_rank") else ())),
        place,
    )
    if ends[0] in ("per_rank", "errors") and len(expect[ends[0]]) != size:
        raise BadCase(f"{place}: {len(expect[ends[0]])} entries for {size} ranks")
    if ends == ["ok"] and expect["ok"] is not True:
        raise BadCase(f"{place}: {expect!r}")
    for name, copies in expect.get("local_after", {}).items():
        if len(copies) != known.get(name):
            raise BadCase(
                f"{place}: local_after of {name!r} has {len(copies)} copies, not {known.get(name)}"
            )


def _keys(given, must, may, place):
    missing, unknown = set(must) - set(given), set(given) - set(must) - set(may)
    if missing or unknown:
        raise BadCase(f"{place}: missing {sorted(missing)}, unknown {sorted(unknown)}")


def _one_of(given, allowed, place):
    if given not in allowed:
        raise BadCase(f"{place}: {given!r} is none of {', '.join(allowed)}")
