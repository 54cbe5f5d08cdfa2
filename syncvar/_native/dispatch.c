/* The entrances of public functions: they find and run persistent calls without a step of Python.
 */
#include "persistent_call.h"

static int is_float(PyObject *value) { return Py_TYPE(value) == &PyFloat_Type; }

/* Return whether a value is a number, or a short list or tuple of numbers of one kind: NumPy makes
 * an array of it. */
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

#define TOGETHER                                                                                   \
    4 /* in one place: the one that was remembered last comes first, and the last one is forgotten \
         for another */

static uint64_t changes =
    1; /* of which job this process is in, of threads that have one of their own, of groups */

/* note_change(): whoever makes one of these changes says so; then entrances look again which group
 * calls without one are of. */
PyObject *note_change(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    changes++;
    Py_RETURN_NONE;
}

typedef struct {
    Face face;
    PyObject *nothing, *second, *usual, *home;
    PyObject *world, *prepared_calls; /* borrowed: of calls without a group, as long as there was no
                                         other change than these */
    uint64_t changes;
    int positions, takes_numbers; /* how many arguments may be given by position; a number or a list
                                     of them is an array too */
} Entrance;

/* Return where calls of a group are remembered that combine, or move, arrays of a form. */
static Remembered **place_of(Entrance *self, PyObject *communicator, PyObject *op, PyObject *dtype,
                             int ndim, const intptr_t *shape) {
    uintptr_t mixed =
        (((uintptr_t)communicator >> 4) * 31 + ((uintptr_t)op >> 4)) * 31 + ((uintptr_t)dtype >> 4);
    for (int axis = 0; axis < ndim; axis++) mixed = mixed * 1000003u + (uintptr_t)shape[axis];
    return self->face.remembered + (mixed ^ mixed >> 17) % (REMEMBERED / TOGETHER) * TOGETHER;
}

/* Return where calls are remembered that take several arrays as one. */
static Remembered **place_of_several(Entrance *self, PyObject *communicator, PyObject *op,
                                     PyTypeObject *kind, intptr_t count) {
    return place_of(self, communicator, op, (PyObject *)kind, 1, &count);
}

/* Return the remembered call of an array, or of several, in a group, of the world for None, if it
 * belongs to the job that this thread is in, and to the group as it is now; else NULL. */
static SlotCall *find_call(Entrance *self, PyObject *group, PyObject *op, PyObject *value) {
    const Array *form = (PyObject *)Py_TYPE(value) == array_type ? (const Array *)value : NULL;
    const int is_known = group == Py_None && self->changes == changes;
    PyObject *job = NULL, *communicator = self->world, *prepared_calls = self->prepared_calls;
    if (!is_known) {
        job = peek(self->face.state, name_default);
        communicator = group == Py_None ? peek(job, name_world) : peek(group, name__communicator);
        prepared_calls = peek(communicator, name_prepared_calls);
    }
    Remembered **place =
        form != NULL
            ? place_of(self, communicator, op, form->dtype, form->ndim, form->shape)
            : place_of_several(self, communicator, op, Py_TYPE(value), PyObject_Size(value));
    SlotCall *found = NULL;
    for (int which = 0; which < TOGETHER && found == NULL; which++) {
        SlotCall *call = (SlotCall *)place[which];
        if (call != NULL && call->op == op && (PyObject *)call->communicator == communicator &&
            call->prepared_calls == prepared_calls &&
            (form != NULL ? call->leaf_count == 0 && fits(&call->brought, value, 0)
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
            self->prepared_calls = prepared_calls;
        }
    }
    if (PyErr_Occurred()) PyErr_Clear();
    return found;
}

/* Begin a call that has been remembered; None where nothing has been done. The caller's place is
 * put into words when somebody asks; where it is in this package, the function has to look further.
 */
static PyObject *begin_remembered(Entrance *self, SlotCall *call, PyObject *array, PyObject *out,
                                  PyObject *timeout) {
    PyFrameObject *frame = PyEval_GetFrame();
    if (frame == NULL) Py_RETURN_NONE;
    PyObject *code = (PyObject *)PyFrame_GetCode(frame), *made = NULL;
    PyObject *instruction = PyObject_GetAttr((PyObject *)frame, name_f_lasti),
             *file = instruction == NULL ? NULL : PyObject_GetAttr(code, name_co_filename);
    const Py_ssize_t ours =
        file == NULL ? -1 : PyUnicode_Tailmatch(file, self->home, 0, PY_SSIZE_T_MAX, -1);
    if (ours >= 0)
        made =
            ours ? Py_NewRef(Py_None) : begin_slots(call, array, out, timeout, code, instruction);
    Py_DECREF(code);
    Py_XDECREF(instruction);
    Py_XDECREF(file);
    return made;
}

/* Run a call that has been remembered; NULL without an error where the function itself has to be
 * called. */
static PyObject *run_remembered(Entrance *self, PyObject *const *arguments, Py_ssize_t given,
                                PyObject *names) {
    PyObject *x = given > 0 ? arguments[0] : self->nothing,
             *op = given > 1 ? arguments[1] : self->usual;
    PyObject *out = Py_None, *timeout = Py_None, *group = Py_None;
    int later = 0;
    if (given > self->positions || (given == 0) != (self->nothing != Py_None)) return NULL;
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
        else if (name == name_async_op && PyBool_Check(value) && given > 0)
            later = value == Py_True;
        else
            return NULL;
    }
    const int brings = x != Py_None || out == Py_None;
    PyObject *array;
    if (!brings) { /* who only takes may give nothing else but where it goes */
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
        SlotCall *call = find_call(self, group, op, array);
        if (call != NULL && (brings || brings_nothing(call))) {
            Py_INCREF((PyObject *)call);
            result = later ? begin_remembered(self, call, array, out, timeout)
                           : run_slots((PyObject *)call, array, out, Py_None, timeout);
            if (result == Py_None) {
                Py_CLEAR(result); /* nothing has been done */
            } else if (result != NULL && call->nothing != Py_None) {
                Py_DECREF(result);
                result = Py_NewRef(Py_None);
            }
            Py_DECREF(call);
        }
    }
    Py_XDECREF(array);
    return result;
}

static PyObject *entrance_call(PyObject *object, PyObject *const *arguments, size_t flagged,
                               PyObject *names) {
    Entrance *self = (Entrance *)object;
    const Py_ssize_t given = GIVEN(flagged);
    PyObject *result = run_remembered(self, arguments, given, names);
    return result != NULL || PyErr_Occurred()
               ? result
               : call_function(self->face.function, arguments, given, names);
}

/* Remember a persistent call, by what it is made of; the one of its place that was remembered first
 * is forgotten. */
static void keep_call(Entrance *self, SlotCall *call) {
    const Form *form = &call->brought;
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

/* Remember a persistent call: remember(op, call, prepared_calls). */
static PyObject *entrance_remember(PyObject *object, PyObject *arguments) {
    PyObject *op, *call, *prepared_calls;
    if (!PyArg_ParseTuple(arguments, "OOO", &op, &call, &prepared_calls)) return NULL;
    if (Py_TYPE(call) == slot_call_type && ((SlotCall *)call)->face == NULL) {
        SlotCall *made = (SlotCall *)call;
        PyObject *before[] = {made->op, made->prepared_calls};
        made->op = Py_NewRef(op);
        made->prepared_calls = Py_NewRef(prepared_calls);
        Py_XDECREF(before[0]);
        Py_XDECREF(before[1]);
        keep_call((Entrance *)object, made);
    }
    Py_RETURN_NONE;
}

/* Remember a persistent call again that has been forgotten for others; nothing of one that was
 * never remembered. */
static PyObject *entrance_recall(PyObject *object, PyObject *call) {
    if (Py_TYPE(call) == slot_call_type && ((SlotCall *)call)->face == NULL &&
        ((SlotCall *)call)->op != NULL)
        keep_call((Entrance *)object, (SlotCall *)call);
    Py_RETURN_NONE;
}

/* Entrance(positions, takes_numbers, *, what it holds). */
static PyObject *entrance_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    int positions, takes_numbers;
    if (!PyArg_ParseTuple(arguments, "ip", &positions, &takes_numbers)) return NULL;
    Entrance *self = new_holding(type, keywords);
    if (self == NULL) return NULL;
    self->positions = positions;
    self->takes_numbers = takes_numbers;
    self->face.vectorcall = entrance_call;
    return (PyObject *)self;
}

static PyMemberDef entrance_members[] = {
    HOLDS(Entrance, face.function, "function"),
    HOLDS(Entrance, face.state, "state"),
    HELD(Entrance, nothing),
    HELD(Entrance, second),
    HELD(Entrance, usual),
    HELD(Entrance, home),
    CALLED_BY(Entrance),
    {NULL},
};

static PyMethodDef entrance_methods[] = {
    {"remember", entrance_remember, METH_VARARGS,
     "Remember a persistent call: (op, call, prepared_calls)."},
    {"recall", entrance_recall, METH_O,
     "Remember a persistent call again that has been forgotten for others."},
    FACE_METHODS,
    {NULL},
};

/* A public function whose persistent calls are found and run without Python's steps; any other call
 * is the function's. */
TYPE(Entrance, entrance, entrance_members, Py_TPFLAGS_HAVE_GC | HAS_VECTORCALL,
     NULL, /* `__doc__` is the function's */
     {Py_tp_new, entrance_new}, {Py_tp_methods, entrance_methods}, FACE, HOLDING)
