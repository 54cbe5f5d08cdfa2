/* Persistent calls: construction, checks of all offsets, input and result. */
#include "persistent_call.h"

/* -- input and result -------------------------------------------------------------------------- */

/* Return whether a call takes x and out. Set the array of each, or the tuple of several; the target
 * is None if `out` is. */
int accept(const NativeCall *self, PyObject *x, PyObject *out, PyObject **input,
           PyObject **target) {
    const int read = IN_ONE_PIECE | ALIGNED, written = read | WRITEABLE;
    if (self->leaf_count == 0) {
        if (!fits(&self->input, x, read) || (out != Py_None && !fits(&self->output, out, written)))
            return 0;
        *input = Py_NewRef(x);
        *target = Py_NewRef(out);
        return 1;
    }
    *input = leaves_of(self, x, read);
    *target = *input == NULL   ? NULL
              : out == Py_None ? Py_NewRef(out)
                               : leaves_of(self, out, written);
    if (*target == NULL) Py_CLEAR(*input);
    return *target != NULL;
}

/* Return whether accepted arrays still fit: other threads may have changed them. */
int fit_still(const NativeCall *self, const Form *form, PyObject *arrays, int flags) {
    return self->leaf_count ? are_leaves(self, arrays, flags) : fits(form, arrays, flags);
}

/* Return the output: the target, or new arrays. */
PyObject *make_result(const NativeCall *self, PyObject *target) {
    if (self->no_result != Py_None) return Py_NewRef(self->no_result);
    if (target != Py_None) return Py_NewRef(target);
    return self->leaf_count ? make_leaves(self)
                            : PyObject_Call(make_array, self->make_arguments, NULL);
}

/* Return whether the result depends on slots only, not on the input. */
int are_all_put(const NativeCall *self) {
    int all = self->take_count == 0 && !self->is_long;
    for (int term = 0; term < self->term_count; term++) all = all && self->terms[term].rank >= 0;
    return all;
}

/* Return whether the call ignores the input: the rank only receives. */
int ignores_input(const NativeCall *self) {
    int ignores = self->put_count == 0 && !self->is_long;
    for (int take = 0; take < self->take_count; take++)
        ignores = ignores && self->takes[take].rank >= 0;
    return ignores;
}

/* Return the caller's result: the array, the list of its parts, or the pytree. */
PyObject *result_of(const NativeCall *self, PyObject *output) {
    if (self->leaf_count) return structure_of(self, output);
    if (self->parts == 0) return Py_NewRef(output);
    const Py_ssize_t rows = (Py_ssize_t)self->output.shape[0] / self->parts;
    PyObject *given = PyList_New(self->parts);
    for (int part = 0; given != NULL && part < self->parts; part++) {
        PyObject *one = PySequence_GetSlice(output, part * rows, (part + 1) * rows);
        if (one == NULL)
            Py_CLEAR(given);
        else
            PyList_SetItem(given, part, one);
    }
    return given;
}

/* -- construction ------------------------------------------------------------------------------ */

/* add_program(sources, into_all, by_owners, last_side, program): add the program for a placement of
 * long vectors. The first one must be for copied inputs. */
static PyObject *native_call_add_program(PyObject *object, PyObject *arguments) {
    NativeCall *self = (NativeCall *)object;
    Placement found = {0};
    unsigned long long sources;
    if (!PyArg_ParseTuple(arguments, "KppiO!", &sources, &found.into_all, &found.by_owners,
                          &found.last_side, program_type, &found.program))
        return NULL;
    found.sources = sources;
    int index = 0;
    for (; index < PLACEMENTS_MAX && self->placements[index].program != NULL; index++) {
        const Placement *placement = &self->placements[index];
        if (placement->sources == found.sources && placement->into_all == found.into_all &&
            placement->by_owners == found.by_owners)
            Py_RETURN_NONE; /* known already: the others came late */
    }
    if (index == PLACEMENTS_MAX) Py_RETURN_NONE; /* others are left to Python */
    Py_INCREF((PyObject *)found.program);
    self->placements[index] = found;
    if (found.program->memories > self->memories) self->memories = found.program->memories;
    if (found.program->scratch_bytes > self->scratch_bytes)
        self->scratch_bytes = found.program->scratch_bytes;
    Py_RETURN_NONE;
}

static PyObject *native_call_call(PyObject *object, PyObject *arguments, PyObject *keywords) {
    const Py_ssize_t given = PyTuple_Size(arguments);
    if (given < 2 || given > 4 || keywords != NULL) {
        PyErr_SetString(PyExc_TypeError, "a persistent call takes (x, out, spec, timeout)");
        return NULL;
    }
    PyObject *spec = given > 2 ? PyTuple_GetItem(arguments, 2) : Py_None,
             *timeout = given > 3 ? PyTuple_GetItem(arguments, 3) : Py_None;
    return run_call(object, PyTuple_GetItem(arguments, 0), PyTuple_GetItem(arguments, 1), spec,
                    timeout);
}

/* start(x, out, timeout, site, instruction): see start_call. */
static PyObject *native_call_start(PyObject *object, PyObject *arguments) {
    PyObject *x, *out, *timeout, *site, *instruction = Py_None;
    if (!PyArg_ParseTuple(arguments, "OOOO|O", &x, &out, &timeout, &site, &instruction))
        return NULL;
    return start_call((NativeCall *)object, x, out, timeout, site, instruction);
}

static int native_call_clear(PyObject *object) {
    forget((Remembered *)object);
    return clear_held(object);
}

/* Read tuples (from, to, nbytes, rank); return how many, or -1. */
static int read_copies(PyObject *given, Copy *into, Py_ssize_t most) {
    const Py_ssize_t count = PyTuple_Size(given);
    if (count > most) PyErr_Format(PyExc_ValueError, "at most %zd copies", most);
    if (count < 0 || count > most) return -1;
    for (Py_ssize_t place = 0; place < count; place++) {
        Py_ssize_t numbers[4];
        if (read_numbers(PyTuple_GetItem(given, place), numbers, 4) != 4) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "a copy is (from, to, nbytes, rank)");
            return -1;
        }
        into[place] = (Copy){numbers[0], numbers[1], numbers[2], numbers[3]};
    }
    return (int)count;
}

/* Check that all copies stay within the slots and the arrays; there is no later check. */
static int check_places(const NativeCall *self) {
    const Py_ssize_t slot = self->channel->side_bytes, input = in_slots(self, &self->input),
                     output = in_slots(self, &self->output);
    int good = 1;
    for (int put = 0; put < self->put_count; put++)
        good = good && is_within(self->puts[put].from, self->puts[put].nbytes, input) &&
               is_within(self->puts[put].to, self->puts[put].nbytes, slot);
    for (int take = 0; take < self->take_count + self->term_count; take++) {
        const Copy *copy =
            take < self->take_count ? &self->takes[take] : &self->terms[take - self->take_count];
        good = good && copy->rank < self->channel->size &&
               is_within(copy->from, copy->nbytes, copy->rank < 0 ? input : slot);
        good = good && is_within(copy->to, copy->nbytes, output) &&
               (take < self->take_count || copy->nbytes == output);
    }
    if (self->ring >= 0) /* the terms are the whole inputs */
        good = good && self->put_count == 1 && self->puts[0].nbytes == input &&
               (self->term_count == 0 || input == output) && !self->is_long &&
               is_within(self->ring, self->ring ? RING_SLOTS * slot : 0, self->channel->memory.len);
    if (self->arithmetic.half) /* the terms are the inputs, widened into the slots */
        good = good && self->put_count == 1 && self->puts[0].from == 0 && self->puts[0].to == 0 &&
               self->puts[0].nbytes == input && self->arithmetic.width == sizeof(float) &&
               self->term_count > 0 && are_all_put(self);
    if (!good)
        PyErr_SetString(
            PyExc_ValueError,
            "a persistent call would use memory outside its arrays or the shared memory");
    return good;
}

/* NativeCall(spec): a `NativeCallSpec` of persistent_call.py, which explains the fields. */
static PyObject *native_call_new(PyTypeObject *type, PyObject *arguments, PyObject *unused) {
    (void)unused;
    static char *names[] = {
        "fingerprint", "detail",  "moves_blocks", "input_form", "output_form", "puts",
        "takes",       "terms",   "arithmetic",   "ring",       "parts",       "is_everywhere",
        "reads",       "is_long", "groups",       "leaves",     NULL};
    PyObject *spec, *dtypes[2], *shapes[2], *puts, *takes, *terms, *arithmetic, *groups, *leaves;
    unsigned long long fingerprint, detail;
    if (!PyArg_ParseTuple(arguments, "O:NativeCall", &spec)) return NULL;
    PyObject *objects = PyObject_CallMethod(spec, "objects", NULL),
             *values = objects == NULL ? NULL : PyObject_CallMethod(spec, "values", NULL),
             *none = values == NULL ? NULL : PyTuple_New(0);
    NativeCall *self = none == NULL ? NULL : new_holding(type, objects);
    Py_XDECREF(objects);
    if (self == NULL) {
        Py_XDECREF(values);
        Py_XDECREF(none);
        return NULL;
    }
    self->kept_values = values; /* owns what the names below borrow */
    const int is_read = PyArg_ParseTupleAndKeywords(
        none, values, "$KKp(OO)(OO)OOOOnipppOO", names, &fingerprint, &detail, &self->moves_blocks,
        &dtypes[0], &shapes[0], &dtypes[1], &shapes[1], &puts, &takes, &terms, &arithmetic,
        &self->ring, &self->parts, &self->is_everywhere, &self->reads, &self->is_long, &groups,
        &leaves);
    Py_DECREF(none);
    if (!is_read) goto failed;
    self->fingerprint = fingerprint;
    self->detail = detail;
    if (!PyObject_TypeCheck((PyObject *)self->channel, channel_state_type) ||
        !self->channel->is_bound ||
        !PyObject_TypeCheck((PyObject *)self->communicator, communicator_state_type) ||
        !PyList_Check(self->async_calls))
        goto wrong;
    if (!read_form(dtypes[0], shapes[0], &self->input) ||
        !read_form(dtypes[1], shapes[1], &self->output))
        goto failed;
    if (self->parts < 0 || (self->parts && self->output.ndim == 0)) goto wrong;
    self->put_count = read_copies(puts, self->puts, RANKS_MAX);
    self->take_count = read_copies(takes, self->takes, RANKS_MAX + 1);
    self->term_count = read_copies(terms, self->terms, RANKS_MAX);
    if (self->put_count < 0 || self->take_count < 0 || self->term_count < 0) goto failed;
    if (!read_arithmetic(arithmetic, &self->arithmetic, &self->apply)) goto wrong;
    if (!read_leaves(self, groups, leaves)) goto wrong;
    const int combines =
        self->arithmetic.fold.loop != NULL || (self->group_count > 1 && !self->is_long);
    if ((self->term_count > 0) != combines || (self->apply.loop != NULL && self->term_count == 0))
        goto wrong;
    if (!check_places(self)) goto failed;
    if (self->leaf_count && !self->is_long && (!are_all_put(self) || self->term_count == 0))
        goto wrong;
    if (self->leaf_count && (self->moves_blocks || self->reads || self->parts ||
                             self->no_result != Py_None || self->apply.loop != NULL))
        goto wrong;
    self->make_arguments = PyTuple_Pack(2, shapes[1], dtypes[1]);
    if (self->make_arguments == NULL) goto failed;
    return (PyObject *)self;
wrong:
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "the C extension cannot run this persistent call");
failed:
    Py_DECREF(self);
    return NULL;
}

static PyMemberDef native_call_members[] = {
    HELD(NativeCall, channel),
    HELD(NativeCall, engine),
    HELD(NativeCall, communicator),
    HELD(NativeCall, busy),
    HELD(NativeCall, queue),
    HELD(NativeCall, add),
    HELD(NativeCall, info),
    HELD(NativeCall, call),
    HELD(NativeCall, async_calls),
    HELD(NativeCall, work),
    HELD(NativeCall, gil_monitor),
    HELD(NativeCall, no_result),
    HELD(NativeCall, structure),
    HELD(NativeCall, leaves_type),
    HOLDS(NativeCall, make_arguments, "_make_arguments"),
    HOLDS(NativeCall, leaf_arguments, "_leaf_arguments"),
    HOLDS(NativeCall, kept_values, "_values"),
    HOLDS(NativeCall, kept_leaves, "_leaves"),
    HOLDS(NativeCall, kept_groups, "_groups"),
    HOLDS(NativeCall, kept_room, "_room"),
    HOLDS(NativeCall, face, "_face"),
    HOLDS(NativeCall, op, "_op"),
    HOLDS(NativeCall, persistent_calls, "_persistent_calls"),
    HOLDS(NativeCall, input.dtype, "_brought"),
    HOLDS(NativeCall, output.dtype, "_made"),
    HOLDS(NativeCall, arithmetic.fold.owner, "_fold"),
    HOLDS(NativeCall, arithmetic.divide.owner, "_divide"),
    HOLDS(NativeCall, apply.owner, "_apply"),
    HOLDS(NativeCall, placements[0].program, "_first"),
    HOLDS(NativeCall, placements[1].program, "_second"),
    HOLDS(NativeCall, placements[2].program, "_third"),
    HOLDS(NativeCall, placements[3].program, "_fourth"),
    {NULL},
};

static PyMethodDef native_call_methods[] = {
    {"add_program", native_call_add_program, METH_VARARGS,
     "Add the program for a placement of long vectors."},
    {"start", native_call_start, METH_VARARGS, "Start the call: (x, out, timeout, site, instruction)."},
    {NULL},
};

TYPE(NativeCall, native_call, native_call_members, Py_TPFLAGS_HAVE_GC,
     "A persistent call: call(x, out, spec, timeout).", {Py_tp_new, native_call_new},
     {Py_tp_call, native_call_call}, {Py_tp_methods, native_call_methods},
     {Py_tp_traverse, traverse_held}, {Py_tp_clear, native_call_clear},
     {Py_tp_dealloc, dealloc_held})
