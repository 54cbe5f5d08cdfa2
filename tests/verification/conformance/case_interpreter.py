"""Run a case as one rank of a world, and say what differs from what it expects.

The rank's parts of a case are made here (`_operand`), each step is run in its context (`_in_context`), and every
operation is a method or an entry of a table: what has no entry is an error of the case, never skipped.
"""

import contextlib
import copy
import os
import pickle
import threading

import numpy as np

import syncvar as sv
from tests.verification.conformance import case_grammar, compare_results
from tests.verification.conformance.case_interpreter_data import DataOperations, dtype_of
from tests.verification.conformance.compare_results import numbers

_STRATEGIES = {
    "mirrored": "MirroredStrategy",
    "multi_worker_mirrored": "MultiWorkerMirroredStrategy",
    "central_storage": "CentralStorageStrategy",
    "parameter_server": "ParameterServerStrategy",
}


def _strategy(name):
    """Return the class for a case; over several hosts the one that spans them all stands for that of one host."""
    if name == "mirrored" and sv.host_count() > 1:
        name = "multi_worker_mirrored"
    return getattr(sv, _STRATEGIES[name])


_ABSENT = object()


def run_case(case, prefix, folder=None, bind=contextlib.nullcontext):
    """Run a case; return a list of texts, one for each difference seen by this rank.

    Args:
        case: In the grammar.
        prefix: Begins the names of its variables, the same on all ranks and in no other case of this launch.
        folder: Where checkpoints of this case go.
        bind: Context manager that makes a fresh thread part of this rank, in worlds where ranks are threads.

    Returns:
        (differences, error that broke the group or None)
    """
    case_grammar.check(case)
    return _Run(case, prefix, folder, bind).run()


class _Run(DataOperations):
    def __init__(self, case, prefix, folder, bind):
        self.case, self.prefix, self.folder, self.bind = case, prefix, folder, bind
        self.rank = sv.rank()
        self.variables, self.calls, self.dtypes = {}, {}, {}
        self.groups = {}
        self.differences = []
        self.broken = None

    # -- the case ----------------------------------------------------------------------------------

    def run(self):
        case = self.case
        try:
            self._prepare()
        except Exception as error:
            self._differs("setup", f"{type(error).__name__}: {error}")
            self._look_at(error)
            return self.differences, self.broken
        # Nothing else orders another rank's write before a one-sided read of it.
        meet = (
            any(spec.get("ranks") for spec in case["variables"].values())
            or any(step["op"] == "read_from" for step in case_grammar.operations(case))
            or case["strategy"] == "parameter_server"
        )
        for index, step in enumerate(case["steps"]):
            if self._takes_part(step):
                self._step(index, step)
            if meet:
                try:
                    sv.barrier()
                except Exception as error:
                    self._differs(
                        f"after step {index}",
                        f"the ranks do not meet: {type(error).__name__}: {error}",
                    )
                    self._look_at(error)
        self._compare_copies("final_local", case["final_local"])
        return self.differences, self.broken

    def _prepare(self):
        case = self.case
        options = dict(case.get("options") or {})
        if "variable_partitioner" in options:
            ((kind, given),) = options["variable_partitioner"].items()
            options["variable_partitioner"] = getattr(sv.partitioners, kind)(**given)
        if case["strategy"] == "default":
            self.strategy = sv.get_strategy()
            make, scope = None, contextlib.nullcontext
        else:
            make = _strategy(case["strategy"])
            self.strategy = make(**options)
            scope = self.strategy.scope
        self.other = self.other_variable = None
        if any(
            step["op"] in ("enter_other_scope", "run_other", "reduce_other", "use_other_variable")
            for step in case_grammar.operations(case)
        ):
            self.other = _strategy("mirrored")()
            if any(step["op"] == "use_other_variable" for step in case_grammar.operations(case)):
                with self.other.scope():
                    self.other_variable = sv.Variable(0.0, name=f"{self.prefix}.other")
        for name, spec in case["variables"].items():
            ranks = spec.get("ranks")
            if ranks is None:
                with scope():
                    self._make(name, spec)
                continue
            if tuple(ranks) not in self.groups:
                group = sv.new_group(ranks)
                self.groups[tuple(ranks)] = (
                    (make or sv.MultiWorkerMirroredStrategy)(group, **options)
                    if group.is_member
                    else None
                )
            self.dtypes[name] = spec["dtype"]
            strategy = self.groups[tuple(ranks)]
            if strategy is not None:
                with strategy.scope():
                    self._make(name, spec)

    def _takes_part(self, step):
        ranks = [case_grammar.ranks_of(self.case, name) for name in case_grammar.variables_of(step)]
        return all(one is None or self.rank in one for one in ranks)

    def _strategy_of(self, step):
        ranks = next(
            filter(
                None,
                (
                    case_grammar.ranks_of(self.case, name)
                    for name in case_grammar.variables_of(step)
                ),
            ),
            None,
        )
        if ranks is not None:
            return self.groups[tuple(ranks)]
        return sv.get_strategy() if self.case["strategy"] == "default" else self.strategy

    def _step(self, index, step):
        expect = step["expect"]
        result, error = None, None
        try:
            result = self._perform(step)
        except case_grammar.BadCase:
            raise
        except Exception as raised:
            error = raised
            self._look_at(error)
        place = f"step {index} ({step['ctx']} {step['op']})"
        self._compare(place, expect, result, error)
        self._compare_copies(place, expect.get("local_after", {}))

    def _look_at(self, error):
        if isinstance(error, sv.TransportError) and self.broken is None:
            self.broken = f"{type(error).__name__}: {error}"

    # -- comparing ---------------------------------------------------------------------------------

    def _differs(self, place, text):
        self.differences.append(f"{place}: {text}"[:1500])

    def _compare(self, place, expect, result, error):
        wanted = expect.get("error")
        if "errors" in expect:
            wanted = expect["errors"][self.rank]
        if wanted is not None:
            kind = compare_results.error_class(wanted, sv)
            if error is None:
                self._differs(place, f"no {wanted}; result {result!r}")
            elif not isinstance(error, kind):
                self._differs(place, f"{type(error).__name__} instead of {wanted}: {error}")
            return
        if error is not None:
            self._differs(place, f"unexpected {type(error).__name__}: {error}")
            return
        if "value" in expect or "per_rank" in expect:
            value = expect["value"] if "value" in expect else expect["per_rank"][self.rank]
            wrong = compare_results.wrong_value(value, result, expect.get("dtype"))
            if wrong:
                self._differs(place, wrong)

    def _compare_copies(self, place, wanted):
        for name, copies in wanted.items():
            ranks = case_grammar.ranks_of(self.case, name)
            if ranks is not None and self.rank not in ranks:
                continue
            variable = self.variables.get(name)
            if variable is None:
                self._differs(place, f"the copy of {name}: there is no such variable")
                continue
            try:
                wrong = compare_results.wrong_value(
                    copies[self.rank], variable.local_value(), self.dtypes[name]
                )
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
            if wrong:
                self._differs(place, f"the copy of {name} {wrong}")

    # -- operands ----------------------------------------------------------------------------------

    def _array(self, value, dtype):
        given = numbers(value)
        if dtype is None:
            made = np.asarray(given)
            kinds = {"i": np.int32, "u": np.int32, "f": np.float32, "c": np.complex64}
            return made.astype(kinds.get(made.dtype.kind, made.dtype))
        return np.array(given, dtype=dtype_of(dtype))

    def _rows(self, value, dtype):
        return np.array(value["indices"], np.int64), self._array(value["values"], dtype)

    def _one(self, value, step):
        """Return an array, or rows, of a value in a step."""
        dtype = step.get("dtype") or self.dtypes.get(step.get("var", "v"))
        return (
            self._rows(value, dtype)
            if step["op"].startswith("scatter_")
            else self._array(value, dtype)
        )

    def _spec(self, spec, step, context):
        """Return the value of an operand spec for this rank."""
        kind = next(iter(key for key in spec if key not in ("dtype", "values")))
        inner = step | {"dtype": spec["dtype"]} if "dtype" in spec else step
        match kind:
            case "array":
                return self._array(
                    spec["array"], inner.get("dtype") or self.dtypes.get(step.get("var", "v"))
                )
            case "indices":
                return self._rows(spec, inner.get("dtype") or self.dtypes.get(step.get("var", "v")))
            case "literal":
                return numbers(spec["literal"])
            case "none":
                return None
            case "var":
                return self.variables[spec["var"]]
            case "mirrored":
                return sv.Mirrored(
                    self._array(
                        spec["mirrored"],
                        inner.get("dtype") or self.dtypes.get(step.get("var", "v")),
                    )
                )
            case "by":
                return self._spec(spec["by"][self.rank], step, context)
            case "container":
                return self._contained(
                    self._spec(spec["container"][self.rank], step, context), step, context
                )
            case "dict":
                return {key: self._spec(item, step, context) for key, item in spec["dict"].items()}
            case "list":
                return [self._spec(item, step, context) for item in spec["list"]]
            case "tuple":
                return tuple(self._spec(item, step, context) for item in spec["tuple"])
        raise case_grammar.BadCase(f"{self.case['id']}: unknown operand {spec!r}")

    def _contained(self, value, step, context):
        """Return this rank's part as a container, or as it is where merge_call makes the container."""
        if context == "merge":
            return value
        if step["op"].startswith("scatter_") and isinstance(value, tuple):
            return tuple(sv.PerReplica(part) for part in value)
        return sv.PerReplica(value)

    def _operand(self, step, context):
        """Return (this rank's operand, whether it is an argument of merge_call)."""
        op = step["op"]
        is_argument = op in ("merge_return", "merge_arg", "reduce_then_assign")
        if "value" in step:
            return self._one(step["value"], step), is_argument
        if "literal" in step:
            return numbers(step["literal"]), is_argument
        if "per_replica" in step:
            value = self._one(step["per_replica"][self.rank], step)
            if op == "container_misuse":
                return sv.PerReplica(value), is_argument
            return (
                self._contained(value, step, context) if context in ("cross", "outside") else value
            ), True
        if "operand" in step:
            return self._spec(step["operand"], step, context), is_argument or _has_container(
                step["operand"]
            )
        return _ABSENT, False

    # -- contexts ----------------------------------------------------------------------------------

    def _perform(self, step):
        context, strategy = step["ctx"], self._strategy_of(step)
        inner = step["do"] if step["op"] == "multi" else [step]
        operands = [self._operand(one, context) for one in inner]
        place = _Place(context, strategy)

        def body(given):
            result = None
            for one, operand in zip(inner, given, strict=True):
                result = self._call(one, result if one.get("operand_last") else operand, place)
            return result

        plain = [operand for operand, _ in operands]
        if context in ("outside", "spmd"):
            place.replica_context = sv.get_replica_context()
            return body(plain)
        if context == "cross":
            with strategy.scope():
                return body(plain)
        if step["op"] == "run_identity":
            return strategy.run(lambda a: a, args=(plain[0],))
        if step["op"] == "merge_unbalanced":
            return self._merge_unbalanced(strategy)

        def replica():
            place.replica_context = sv.get_replica_context()
            return body(plain)

        def merge():
            place.replica_context = sv.get_replica_context()
            which = [index for index, (_, is_argument) in enumerate(operands) if is_argument]

            def merged(_, *arguments):
                given = list(plain)
                for index, argument in zip(which, arguments, strict=True):
                    given[index] = argument
                return body(given)

            return place.replica_context.merge_call(
                merged, args=tuple(plain[index] for index in which)
            )

        return strategy.run(replica if context == "replica" else merge)

    def _merge_unbalanced(self, strategy):
        def fn():
            if sv.get_replica_context().replica_id_in_sync_group == 0:
                sv.get_replica_context().merge_call(lambda _: None)

        strategy.run(fn)
        return strategy.reduce("SUM", 1.0, axis=None)

    # -- operations --------------------------------------------------------------------------------

    def _call(self, step, x, place):
        op = step["op"]
        if op.startswith("scatter_"):
            indices, values = x if isinstance(x, tuple) else (x, x)
            getattr(self._variable(step), op)(indices, values)
            return None
        if op in _OF_VARIABLE:
            return _OF_VARIABLE[op](self._variable(step), x)
        method = getattr(self, f"do_{op}", None)
        if method is None:
            raise case_grammar.BadCase(f"{self.case['id']}: nobody knows how to do {op!r}")
        return method(step, x, place)

    def _variable(self, step):
        return self.variables[step.get("var", "v")]

    def _make(self, name, spec):
        self.calls[name] = 0
        dtype = spec["dtype"]
        initial = spec["initial"]
        if isinstance(initial, dict) and "per_replica" in initial:
            value = self._array(initial["per_replica"][self.rank], dtype)
        elif isinstance(initial, dict) and "callable" in initial:

            def value():
                self.calls[name] += 1
                return self._array(initial["callable"], dtype)

        elif isinstance(initial, dict) and "missing" in initial:
            value = None
        elif isinstance(initial, str) and isinstance(compare_results.number(initial), str):
            value = initial
        else:
            value = self._array(initial, dtype)
        options = {"trainable": spec["trainable"]} if "trainable" in spec else {}
        variable = sv.Variable(
            value,
            name=f"{self.prefix}.{name}",
            dtype=dtype_of(dtype),
            synchronization=spec["synchronization"],
            aggregation=spec["aggregation"],
            **options,
        )
        self.variables[name] = variable
        self.dtypes[name] = dtype
        return variable

    def do_create(self, step, _x, _place):
        self._make(step["var"], step["spec"])

    def do_props(self, step, _x, _place):
        v = self._variable(step)
        return {
            "synchronization": v.synchronization.name,
            "requested_synchronization": v.requested_synchronization.name,
            "aggregation": v.aggregation.name,
            "trainable": v.trainable,
            "dtype": v.dtype.name,
            "shape": list(v.shape),
        }

    def do_initializer_calls(self, step, _x, _place):
        return self.calls[step.get("var", "v")]

    def do_lookup(self, step, _x, _place):
        return self._variable(step).lookup(step["indices"])

    def do_index(self, step, _x, _place):
        at = [
            slice(*one) if isinstance(one, list) else ... if one == "..." else one
            for one in step["at"]
        ]
        return self._variable(step)[tuple(at) if len(at) > 1 else at[0]]

    def do_sharding(self, step, _x, _place):
        v = self._variable(step)
        return {
            "is_sharded": isinstance(v, sv.ShardedVariable),
            "num_shards": v.num_shards,
            "row_ranges": v.row_ranges,
        }

    def do_set_staleness(self, step, _x, _place):
        self._variable(step).set_staleness(step["staleness"])

    def do_read_all(self, step, _x, place):
        return place.strategy.read_all([self.variables[name] for name in step["vars"]])

    def do_snapshot(self, step, _x, place):
        return place.strategy.snapshot([self.variables[name] for name in step["vars"]])

    def do_tick(self, _step, _x, place):
        place.strategy.tick()

    def do_barrier(self, _step, _x, _place):
        sv.barrier()

    def do_read_from(self, step, _x, _place):
        return self._variable(step).read_from(step["rank"])

    def _saved(self, step):
        given = step.get("vars") or {"x": step.get("var", "v")}
        return {entry: self.variables[name] for entry, name in given.items()}

    def _path(self, step):
        return os.path.join(self.folder, self.prefix, step["key"])

    def do_save(self, step, _x, _place):
        sv.Checkpoint(**self._saved(step)).save(self._path(step))

    def do_restore(self, step, _x, _place):
        policy = {"restore_policy": step["restore_policy"]} if "restore_policy" in step else {}
        sv.Checkpoint(**self._saved(step)).restore(self._path(step), **policy)

    def do_deferred_restore(self, step, _x, _place):
        checkpoint = sv.Checkpoint()
        checkpoint.restore(self._path(step))
        checkpoint.x = self._make(step["var"], step["spec"])

    def do_reduce(self, step, x, place):
        return place.strategy.reduce(step["reduce_op"], x, axis=_axis(step))

    def do_gather(self, step, x, place):
        return place.strategy.gather(x, axis=step["axis"])

    def do_all_reduce(self, step, x, place):
        return place.within().all_reduce(step["reduce_op"], x)

    def do_all_gather(self, step, x, place):
        return place.within().all_gather(x, axis=step["axis"])

    def do_reduce_then_assign(self, step, x, place):
        self._variable(step).assign(place.strategy.reduce(step["reduce_op"], x, axis=None))

    def do_return(self, _step, x, place):
        return x if place.context in ("replica", "merge") else place.strategy.run(lambda: x)

    def do_run_identity(self, _step, x, place):
        return place.strategy.run(lambda a: a, args=(x,))

    def do_merge_return(self, _step, x, _place):
        return x

    def do_merge_arg(self, _step, x, _place):
        return {"type": type(x).__name__, "values": x.values}

    def do_local_results(self, _step, x, place):
        return place.strategy.experimental_local_results(x)

    def do_values_from_function(self, step, _x, place):
        make = {
            "ids": lambda about: about.replica_id_in_sync_group,
            "count": lambda about: about.num_replicas_in_sync,
            "half": lambda about: about.replica_id_in_sync_group + 0.5,
            "none": lambda _: None,
            "dict": lambda about: {"a": float(about.replica_id_in_sync_group), "b": 7},
        }[step["kind"]]
        return place.strategy.experimental_distribute_values_from_function(make).values

    def do_deepcopy_independent(self, step, x, place):
        v = self._variable(step)
        c = copy.deepcopy(v)
        with place.strategy.scope() if place.context == "outside" else contextlib.nullcontext():
            v.assign(x)
        return {
            "copy": c.local_value(),
            "original": v.local_value(),
            "synchronization": c.synchronization.name,
            "aggregation": c.aggregation.name,
        }

    def do_new_variable_from(self, step, _x, place):
        with place.strategy.scope() if place.context == "outside" else contextlib.nullcontext():
            w = sv.Variable(self._variable(step), name=f"{self.prefix}.new")
        return {
            "local": w.local_value(),
            "synchronization": w.synchronization.name,
            "aggregation": w.aggregation.name,
        }

    def do_context_info(self, _step, _x, place):
        context, strategy = sv.get_replica_context(), sv.get_strategy()
        return {
            "in_cross": sv.in_cross_replica_context(),
            "replica_id": None if context is None else context.replica_id_in_sync_group,
            "num_replicas": strategy.num_replicas_in_sync,
            "is_own_strategy": strategy is place.strategy,
        }

    def do_context_in_thread(self, _step, _x, _place):
        seen = []

        def look():
            with self.bind():
                seen.append(sv.in_cross_replica_context())

        thread = threading.Thread(target=look)
        thread.start()
        thread.join(10)
        return {"in_cross": seen[0]}

    def do_nested_run(self, _step, _x, place):
        return place.strategy.run(lambda: 1)

    def do_enter_scope(self, _step, _x, place):
        with place.strategy.scope():
            return sv.in_cross_replica_context()

    def do_nested_merge(self, _step, _x, place):
        return place.within().merge_call(lambda _: 1)

    def do_enter_other_scope(self, _step, _x, _place):
        with self.other.scope():
            return sv.in_cross_replica_context()

    def do_run_other(self, _step, _x, _place):
        return self.other.run(lambda: 1)

    def do_reduce_other(self, _step, _x, _place):
        return self.other.reduce("SUM", 1.0, axis=None)

    def do_use_other_variable(self, _step, _x, _place):
        return self.other_variable.read_value()

    def do_scope_reused(self, _step, _x, place):
        scope = place.strategy.scope()
        seen = []
        for _ in range(2):
            with scope:
                seen.append(sv.in_cross_replica_context())
        return [*seen, sv.in_cross_replica_context()]

    def do_crossed_writes(self, step, x, _place):
        variables = [self.variables[name] for name in step["vars"]]
        for variable in variables if self.rank == 0 else reversed(variables):
            variable.assign_add(x)
        return [variable.read_value() for variable in variables]

    def do_mixed_writes(self, step, x, _place):
        v = self._variable(step)
        (v.assign_add if self.rank == 0 else v.assign_sub)(x)
        return v.read_value()

    def do_container_misuse(self, step, x, _place):
        return {
            "add": lambda: x + 1,
            "index": lambda: x[0],
            "iter": lambda: list(iter(x)),
            "asarray": lambda: np.asarray(x),
        }[step["kind"]]()

    def do_mirrored_plus_one(self, _step, x, _place):
        return (x if isinstance(x, sv.Mirrored) else sv.Mirrored(x)) + 1


class _Place:
    """Where a step is run."""

    def __init__(self, context, strategy):
        self.context = context
        self.strategy = strategy
        self.replica_context = None

    def within(self):
        """Return the replica context in force, or the one around merge_call."""
        found = sv.get_replica_context() or self.replica_context
        if found is None:
            raise case_grammar.BadCase(f"there is no replica context in {self.context}")
        return found


def _written(_v):
    """Drop what a write returns: it is not compared, and asking whether it is true would read it."""


def _iadd(v, x):
    v += x


def _hashes(v, _x):
    return hash(v) == hash(v)


_OF_VARIABLE = {
    "assign": lambda v, x: _written(v.assign(x)),
    "assign_add": lambda v, x: _written(v.assign_add(x)),
    "assign_sub": lambda v, x: _written(v.assign_sub(x)),
    "read_value": lambda v, _: v.read_value(),
    "value": lambda v, _: v.value(),
    "numpy": lambda v, _: v.numpy(),
    "sync": lambda v, _: v.sync(),
    "local_value": lambda v, _: v.local_value(),
    "asarray": lambda v, _: np.asarray(v),
    "index_all": lambda v, _: v[...],
    "add_one": lambda v, _: v + v.dtype.type(1),
    "py_float": lambda v, _: float(v),
    "py_int": lambda v, _: int(v),
    "py_bool": lambda v, _: bool(v),
    "py_len": lambda v, _: len(v),
    "py_iter": lambda v, _: list(iter(v)),
    "py_eq": lambda v, x: v == x,
    "py_hash": _hashes,
    "iadd": _iadd,
    "pickle": lambda v, _: pickle.dumps(v),
}


def _has_container(spec):
    if isinstance(spec, dict):
        return "container" in spec or any(_has_container(item) for item in spec.values())
    return isinstance(spec, list) and any(_has_container(item) for item in spec)


def _axis(step):
    return tuple(step["axis"]) if isinstance(step["axis"], list) else step["axis"]
