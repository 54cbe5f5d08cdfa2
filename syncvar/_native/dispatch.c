/* Dispatch of public functions in C: find the persistent call of the arguments, and run it. */
#include "persistent_call.h"

static int is_float(PyObject *value) { return Py_TYPE(value) == &PyFloat_Type; }

/* Return whether NumPy makes an array of a value: a number, or a short list or tuple of numbers of
 * one type. */
static int are_numbers(PyObject *value) {
    if (is_number(value)) return 1;
    const int is_list = Py_TYPE(value) == &PyList_Type;
    if (!is_list && Py_TYPE(value) != &PyTuple_Type) return 0;
    const Py_ssize_t count = is_list ? PyList_Size(value) : PyTuple_Size(value);
    if (count < 1 || count > NUMBERS_MAX) return 0;
    PyTypeObject *kind = NULL;
    for (Py_ssize_t place = 0; place < count; place++) {
        PyObject *item = is_list ? PyList_GetItem(value, place) : PyTuple_GetItem(value, place);
        if (!is_number(item) || (kind != NULL && kind != Py_TYPE(item))) return 0;
        kind = Py_TYPE(item);
    }
    return 1;
}

#define TOGETHER 4 /* entries of a cache set: the newest comes first, the last one is evicted */

static uint64_t changes = 1; /* changes of the default group: init, shutdown, contexts of threads */

/* note_change(): invalidate the cached default group. */
PyObject *note_change(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    changes++;
    Py_RETURN_NONE;
}

typedef struct {
    Face face;
    PyObject *no_input, *second, *usual, *home;
    PyObject *world, *persistent_calls; /* borrowed: the default group and its cache, valid while
                                         `changes` equals the global counter */
    uint64_t changes;
    int positions, takes_numbers; /* positional arguments at most; numbers become arrays */
} CallDispatch;

/* Return the cache set of calls of a group with an array of this dtype and shape. */
static Remembered **place_of(CallDispatch *self, PyObject *communicator, PyObject *op,
                             PyObject *dtype, int ndim, const intptr_t *shape) {
    uintptr_t mixed =
        (((uintptr_t)communicator >> 4) * 31 + ((uintptr_t)op >> 4)) * 31 + ((uintptr_t)dtype >> 4);
    for (int axis = 0; axis < ndim; axis++) mixed = mixed * 1000003u + (uintptr_t)shape[axis];
    return self->face.remembered + (mixed ^ mixed >> 17) % (REMEMBERED / TOGETHER) * TOGETHER;
}

/* Return the cache set of calls with several arrays. */
static Remembered **place_of_several(CallDispatch *self, PyObject *communicator, PyObject *op,
                                     PyTypeObject *kind, intptr_t count) {
    return place_of(self, communicator, op, (PyObject *)kind, 1, &count);
}

/* Return the persistent call of a value in a group (None: the world), or NULL. It must belong to
 * the job of this thread, and to the group as it is now. */
static NativeCall *find_call(CallDispatch *self, PyObject *group, PyObject *op, PyObject *value) {
    const Array *form = (PyObject *)Py_TYPE(value) == array_type ? (const Array *)value : NULL;
    const int is_known = group == Py_None && self->changes == changes;
    PyObject *job = NULL, *communicator = self->world, *persistent_calls = self->persistent_calls;
    if (!is_known) {
        job = peek(self->face.state, name_default);
        communicator = group == Py_None ? peek(job, name_world) : peek(group, name__communicator);
        persistent_calls = peek(communicator, name_persistent_calls);
    }
    Remembered **place =
        form != NULL
            ? place_of(self, communicator, op, form->dtype, form->ndim, form->shape)
            : place_of_several(self, communicator, op, Py_TYPE(value), PyObject_Size(value));
    NativeCall *found = NULL;
    for (int which = 0; which < TOGETHER && found == NULL; which++) {
        NativeCall *call = (NativeCall *)place[which];
        if (call != NULL && call->op == op && (PyObject *)call->communicator == communicator &&
            call->persistent_calls == persistent_calls &&
            (form != NULL ? call->leaf_count == 0 && fits(&call->input, value, 0)
                          : call->leaf_count > 0 && holds_leaves(call, value)))
            found = call;
    }
    if (found != NULL && !is_known) {
        if (is_true(self->face.state, name_is_bound) ||
            (group != Py_None && peek(job, name_engine) != found->engine)) {
            found = NULL;
        } else if (group == Py_None) {
            self->changes = changes;
            self->world = communicator;
            self->persistent_calls = persistent_calls;
        }
    }
    if (PyErr_Occurred()) PyErr_Clear();
    return found;
}

/* Start a persistent call; None to fall back. The call site becomes text only when needed. If it is
 * in this package, the Python function has to find the user's frame. */
static PyObject *start_remembered(CallDispatch *self, NativeCall *call, PyObject *array,
                                  PyObject *out, PyObject *timeout) {
    PyFrameObject *frame = PyEval_GetFrame();
    if (frame == NULL) Py_RETURN_NONE;
    PyObject *code = (PyObject *)PyFrame_GetCode(frame), *made = NULL;
    PyObject *instruction = PyObject_GetAttr((PyObject *)frame, name_f_lasti),
             *file = instruction == NULL ? NULL : PyObject_GetAttr(code, name_co_filename);
    const Py_ssize_t ours =
        file == NULL ? -1 : PyUnicode_Tailmatch(file, self->home, 0, PY_SSIZE_T_MAX, -1);
    if (ours >= 0)
        made = ours ? Py_NewRef(Py_None) : start_call(call, array, out, timeout, code, instruction);
    Py_DECREF(code);
    Py_XDECREF(instruction);
    Py_XDECREF(file);
    return made;
}

/* Run a persistent call; NULL without an exception if the Python function has to be called. */
static PyObject *run_remembered(CallDispatch *self, PyObject *const *arguments, Py_ssize_t given,
                                PyObject *names) {
    PyObject *x = given > 0 ? arguments[0] : self->no_input,
             *op = given > 1 ? arguments[1] : self->usual;
    PyObject *out = Py_None, *timeout = Py_None, *group = Py_None;
    int is_async = 0;
    if (given > self->positions || (given == 0) != (self->no_input != Py_None)) return NULL;
    const Py_ssize_t named = names == NULL ? 0 : PyTuple_Size(names);
    for (Py_ssize_t place = 0; place < named; place++) {
        PyObject *name = PyTuple_GetItem(names, place), *value = arguments[given + place];
        if (name == name_out && given > 0)
            out = value;
        else if (name == self->second && given == 1)
            op = value;
        else if (name == name_timeout &&
                 (value == Py_None || (is_float(value) && PyFloat_AsDouble(value) > 0)))
            timeout = value;
        else if (name == name_group)
            group = value;
        else if (name == name_async_op && PyBool_Check(value))
            is_async = value == Py_True;
        else
            return NULL;
    }
    const int has_input = x != Py_None || out == Py_None;
    PyObject *array;
    if (!has_input) { /* a rank without input may pass `out` only */
        array = Py_NewRef(out);
    } else if (self->takes_numbers && are_numbers(x)) {
        array = PyObject_CallFunctionObjArgs(as_array, x, NULL);
        if (array == NULL) PyErr_Clear();
    } else {
        array = Py_NewRef(x);
    }
    PyObject *result = NULL;
    PyTypeObject *const kind = array == NULL ? NULL : Py_TYPE(array);
    if ((PyObject *)kind == array_type || kind == &PyList_Type || kind == &PyTuple_Type ||
        kind == &PyDict_Type) {
        NativeCall *call = find_call(self, group, op, array);
        if (call != NULL && (has_input || ignores_input(call))) {
            Py_INCREF((PyObject *)call);
            result = is_async ? start_remembered(self, call, array, out, timeout)
                              : run_call((PyObject *)call, array, out, Py_None, timeout);
            if (result == Py_None) {
                Py_CLEAR(result); /* fall back */
            } else if (result != NULL && !is_async && call->no_result != Py_None) {
                Py_DECREF(result);
                result = Py_NewRef(Py_None);
            }
            Py_DECREF(call);
        }
    }
    Py_XDECREF(array);
    return result;
}

static PyObject *call_dispatch_call(PyObject *object, PyObject *const *arguments, size_t flagged,
                                    PyObject *names) {
    CallDispatch *self = (CallDispatch *)object;
    const Py_ssize_t given = GIVEN(flagged);
    PyObject *result = run_remembered(self, arguments, given, names);
    return result != NULL || PyErr_Occurred()
               ? result
               : call_function(self->face.function, arguments, given, names);
}

/* Cache a persistent call; the oldest entry of its set is evicted. */
static void keep_call(CallDispatch *self, NativeCall *call) {
    const Form *form = &call->input;
    PyObject *const communicator = (PyObject *)call->communicator;
    Remembered **place =
        call->leaf_count == 0
            ? place_of(self, communicator, call->op, form->dtype, form->ndim, form->shape)
            : place_of_several(self, communicator, call->op, container_of(call->structure),
                               PyTuple_Size(PyTuple_GetItem(call->structure, 2)));
    if (place[TOGETHER - 1] != NULL) forget(place[TOGETHER - 1]);
    memmove(place + 1, place, (TOGETHER - 1) * sizeof *place);
    *place = NULL;
    remember(&self->face, place, (Remembered *)call);
}

/* remember(op, call, persistent_calls): cache a persistent call. */
static PyObject *call_dispatch_remember(PyObject *object, PyObject *arguments) {
    PyObject *op, *call, *persistent_calls;
    if (!PyArg_ParseTuple(arguments, "OOO", &op, &call, &persistent_calls)) return NULL;
    if (Py_TYPE(call) == native_call_type && ((NativeCall *)call)->face == NULL) {
        NativeCall *made = (NativeCall *)call;
        PyObject *before[] = {made->op, made->persistent_calls};
        made->op = Py_NewRef(op);
        made->persistent_calls = Py_NewRef(persistent_calls);
        Py_XDECREF(before[0]);
        Py_XDECREF(before[1]);
        keep_call((CallDispatch *)object, made);
    }
    Py_RETURN_NONE;
}

/* recall(call): cache a persistent call again after its eviction; ignore one never cached. */
static PyObject *call_dispatch_recall(PyObject *object, PyObject *call) {
    if (Py_TYPE(call) == native_call_type && ((NativeCall *)call)->face == NULL &&
        ((NativeCall *)call)->op != NULL)
        keep_call((CallDispatch *)object, (NativeCall *)call);
    Py_RETURN_NONE;
}

/* CallDispatch(positions, takes_numbers, *, members). */
static PyObject *call_dispatch_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    int positions, takes_numbers;
    if (!PyArg_ParseTuple(arguments, "ip", &positions, &takes_numbers)) return NULL;
    CallDispatch *self = new_holding(type, keywords);
    if (self == NULL) return NULL;
    self->positions = positions;
    self->takes_numbers = takes_numbers;
    self->face.vectorcall = call_dispatch_call;
    return (PyObject *)self;
}

static PyMemberDef call_dispatch_members[] = {
    HOLDS(CallDispatch, face.function, "function"),
    HOLDS(CallDispatch, face.state, "state"),
    HELD(CallDispatch, no_input),
    HELD(CallDispatch, second),
    HELD(CallDispatch, usual),
    HELD(CallDispatch, home),
    CALLED_BY(CallDispatch),
    {NULL},
};

static PyMethodDef call_dispatch_methods[] = {
    {"remember", call_dispatch_remember, METH_VARARGS,
     "Cache a persistent call: (op, call, persistent_calls)."},
    {"recall", call_dispatch_recall, METH_O, "Cache a persistent call again after its eviction."},
    FACE_METHODS,
    {NULL},
};

/* Replaces a public function: runs its persistent calls in C, and calls it for all others. */
TYPE(CallDispatch, call_dispatch, call_dispatch_members, Py_TPFLAGS_HAVE_GC | HAS_VECTORCALL,
     NULL, /* `__doc__` is the function's */
     {Py_tp_new, call_dispatch_new}, {Py_tp_methods, call_dispatch_methods}, FACE, HOLDING)
